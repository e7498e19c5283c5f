"""Every component that the registry holds keeps what its role promises, with its defaults and with other options."""

from __future__ import annotations

from typing import Any

import pytest

from bltoolbox.config.hooks import KINDS
from bltoolbox.config.registry import load_registry
from bltoolbox.testing.conformance import (
    check_component,
    conformance_tests,
    properties_of,
    run_conformance,
    select,
)

test_everything_installed = conformance_tests()

#: Options that lead through other code than the defaults.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    (
        "regularizer/foe",
        {"basis": "pixel", "boundary": "valid", "smoothing": "per-filter", "start": "random"},
    ),
    ("regularizer/foe", {"boundary": "zero", "kernel_size": 4, "start": "dct"}),
    ("regularizer/foe", {"boundary": "periodic", "kernel_size": 3, "filters": 12}),
    ("regularizer/tv", {"channels": "separate"}),
    ("regularizer/tikhonov", {"of": "identity"}),
    ("regularizer/crr", {"symmetry": "free", "boundary": "symmetric"}),
    ("regularizer/icnn", {"layers": 3, "kernel_size": 3, "ridge": 0.1}),
    ("operator/blur", {"learned": True, "boundary": "valid"}),
    ("operator/blur", {"learned": True, "boundary": "symmetric", "size": 4}),
    ("operator/blur", {"kernel": [[0.5, -1.0, 0.2], [0.3, 2.0, 0.0]], "boundary": "periodic"}),
    ("operator/blur", {"kernel": [[0.5, -1.0, 0.2], [0.3, 2.0, 0.0]], "boundary": "symmetric"}),
    ("operator/blur", {"boundary": "zero", "size": 6, "sigma": 1.0}),
    ("operator/inpainting", {"missing": 0.0}),
    ("operator/inpainting", {"missing": 0.9, "seed": 3}),
    ("operator/downsampling", {"factor": 1}),
    ("operator/mri", {"image": "complex"}),
    ("operator/mri", {"acceleration": 1.0}),
    ("operator/mri", {"acceleration": 2.0, "center_fraction": 0.2, "seed": 4}),
    ("lower_solver/lbfgs", {"memory": 2}),
    ("lower_solver/newton-cg", {"forcing": 1.0, "cg_limit": 3}),
    ("hypergradient/unrolled", {"steps": 200}),
    ("hypergradient/f2sa", {"difference": "central"}),
    ("hypergradient/stocbio", {"truncation": "random"}),
    ("sampler/epoch", {"size": 4}),
    ("sampler/nice", {"size": 1}),
    ("sampler/independent", {"size": 1.5}),
    ("upper_optimizer/isgd", {"step_decay": 0.5, "tol_decay": 0.6}),
    ("upper_optimizer/iadam", {"step_decay": 0.5, "tol_decay": 0.6}),
    ("upper_optimizer/hoag", {"decay": "cubic"}),
    ("upper_optimizer/single-loop", {"order": "simultaneous", "iterations": 3}),
    ("data/array", {"crop": None, "count": 2, "offset": 1}),
    ("data/folder", {"crop": None, "resize": 12}),
    ("data/folder", {"resize": 12, "crop": 9, "offset": 2, "count": 3}),
    ("data/oxford-pets", {"fit": "crop", "count": 2, "offset": 1}),
    ("data/stl10", {"count": 2, "offset": 1}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=lambda value: str(value))
def test_other_options(name: str, options: dict[str, Any]) -> None:
    registry = load_registry()
    outcomes = check_component(registry.find(name), registry, options)
    assert [one.message for one in outcomes if one.status == "failed"] == []
    assert len(outcomes) == len(properties_of(name.partition("/")[0]))


def test_outcomes_say_what_was_asked() -> None:
    registry = load_registry()
    outcomes = run_conformance(registry, select(registry, "sampler/full"))
    assert [one.property for one in outcomes] == [one.name for one in properties_of("sampler")]
    assert {one.status for one in outcomes if "observe" not in one.property} == {"passed"}
    assert [one.message for one in outcomes if one.status != "passed"] == ["it does not observe steps"]
    assert all(one.seconds >= 0 and one.to_json()["name"] == "full" for one in outcomes)


def test_properties_have_names_of_their_own() -> None:
    for kind in KINDS:
        names = [one.name for one in properties_of(kind)]
        assert len(names) == len(set(names)) >= 5


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("sampler/full", {"full"}),
        ("full", {"full"}),
        ("samplers", {"epoch", "full", "importance", "independent", "nice"}),
        ("sampler", {"epoch", "full", "importance", "independent", "nice"}),
    ],
)
def test_select(target: str, expected: set[str]) -> None:
    assert {one.name for one in select(load_registry(), target)} == expected


def test_a_distribution_is_all_its_plugins() -> None:
    registry = load_registry()
    mine = [
        one for one in registry.components() if one.distribution == "bltoolbox" and one.plugin.name != "core"
    ]
    assert set(select(registry, "bltoolbox")) == set(mine)
