"""Methods that compute with θ receive it prepared: in a run, in its report, and where a picture is restored."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from commands import caller
from conftest import Install
from toy_models import noisy_picture

from bltoolbox import Model, load_recipe, run
from bltoolbox.config.registry import load_registry
from bltoolbox.testing.conformance import run_conformance, select

SOURCE = '''
"""Components whose methods fail on a θ that is not prepared, and remember it."""
import functools
import inspect

from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.foe import FieldOfExperts, Prepared
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.plugin import Component, DataTerm, Operator, Regularizer, hookimpl

#: θ itself goes to these.
RAW = {"prepare", "upgrade", "project", "penalty", "pairing_gradients"}
CALLED, VIOLATIONS = set(), set()


@hookimpl
def blt_components():
    return [
        Component(cls.kind, f"strict-{name}", f"{__name__}:{cls.__name__}", "Strict.")
        for name, cls in (("foe", StrictFoE), ("tv", StrictTV), ("blur", StrictBlur), ("squares", StrictSquares))
    ]


def strict(cls):
    """Guard the methods of the role that the component implements."""
    role = next(base for base in cls.__mro__ if "kind" in vars(base))
    for name in dir(role):
        method = getattr(cls, name)
        if inspect.isfunction(method) and method is not getattr(role, name) and name not in RAW:
            if "theta" in inspect.signature(method).parameters:
                setattr(cls, name, guarded(method, cls.__name__))
    return cls


def guarded(method, owner):
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*arguments, **options):
        theta = signature.bind(*arguments, **options).arguments["theta"]
        CALLED.add(f"{owner}.{method.__name__}")
        if not isinstance(theta, (Ready, Prepared)):
            VIOLATIONS.add(f"{owner}.{method.__name__}")
            raise AssertionError(f"{owner}.{method.__name__} received θ that is not prepared")
        return method(*arguments, **options)

    return checked


class Ready(dict):
    """θ as ``prepare`` returns it."""


@strict
class StrictFoE(FieldOfExperts):
    """It has a prepare of its own."""


@strict
class StrictTV(TotalVariation):
    def prepare(self, theta):
        return Ready(theta)


@strict
class StrictBlur(Blur):
    def prepare(self, theta):
        return Ready(theta)


@strict
class StrictSquares(LeastSquares):
    def prepare(self, theta):
        return Ready(theta)
'''

RECIPE = [
    "data={name: dead-leaves, count: 4, size: 16}",
    "evaluation={name: dead-leaves, count: 2, size: 20, seed: 5}",
    "validation.count=1",
    "regularizer={name: strict-foe, filters: 2, kernel_size: 3}",
    "baseline=strict-tv",
    "operator={name: strict-blur, size: 3, sigma: 1.0, learned: true, boundary: zero}",
    "data_term=strict-squares",
    "sampler={name: epoch, size: 2}",
    "certificates.every=1",
    "evaluation_tol=0.3",
    "color=gray",
    "device=cpu",
]


@pytest.fixture
def components(install: Install) -> ModuleType:
    install("blt-strict", {"strict": "strict_components"}, {"strict_components": SOURCE})
    return importlib.import_module("strict_components")


def test_theta_is_prepared_wherever_it_is_computed_with(
    components: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = load_recipe("smoke", [*RECIPE, "lower_solver=mm", "budget={steps: 2}"])
    with caplog.at_level(logging.WARNING):
        run(recipe, out=tmp_path / "run")
    assert not components.VIOLATIONS
    assert not [record.message for record in caplog.records if "could not be written" in record.message]
    for command, *options in (
        ("evaluate", "lower_solver=agd"),
        ("report", "-o", str(tmp_path / "page.html")),
    ):
        done = caller(command, capfd)(str(tmp_path / "run"), *options)
        assert done.returncode == 0, done.stderr
    model = Model.load(tmp_path / "run", device="cpu")
    picture = noisy_picture(90, 100, 1)[..., 0]
    for noise in (None, 0.2):
        restored = model.restore(picture, noise, tol=1e-2, tile=64)
        assert np.isfinite(restored).all()
    assert model.solve(picture[None]).shape == (1, 90, 100)
    assert not components.VIOLATIONS
    looked_at = {"StrictFoE": {"pictures", "potentials", "energy", "lipschitz", "majorant"}}
    looked_at |= {"StrictBlur": {"apply", "adjoint", "start", "spectrum"}, "StrictTV": {"gradient"}}
    looked_at |= {"StrictSquares": {"gradient", "curvature", "majorant", "spectrum"}}
    assert {f"{owner}.{name}" for owner, names in looked_at.items() for name in names} <= components.CALLED


def test_the_conformance_suite_prepares_theta_too(components: ModuleType) -> None:
    registry = load_registry()
    chosen = [one for name in ("foe", "tv", "blur", "squares") for one in select(registry, f"strict-{name}")]
    assert len(chosen) == 4
    wrong = [outcome for outcome in run_conformance(registry, chosen) if outcome.status == "failed"]
    assert not wrong and not components.VIOLATIONS
