"""Signatures: what is read off a class validates data, survives JSON, and is remembered until its file changes."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, IsNotNan, Le, Len, Lt, MaxLen, MinLen, MultipleOf
from conftest import Install
from hypothesis import given
from hypothesis import strategies as st

from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.config.block import Block
from bltoolbox.config.cache import cache_folder
from bltoolbox.config.describe import Undescribable, construct, describe
from bltoolbox.config.registry import load_registry
from bltoolbox.config.signatures import Signature
from bltoolbox.config.validation import Checker
from bltoolbox.restoration.roles import Noise


@dataclass(frozen=True)
class Decay:
    """How it shrinks.

    Args:
        power: The exponent.
    """

    power: Annotated[float, Gt(0)]
    every: Annotated[int, Gt(0)] = 1


class Everything:
    """A class of all annotations.

    Args:
        count: How many
            of them.
        rate (float): How fast.

    More words.
    """

    def __init__(
        self,
        count: Annotated[int, Gt(0)],
        rate: Annotated[float, Gt(0), Lt(1)] = 0.5,
        flag: bool = False,
        word: str = "w",
        file: Path | None = None,
        mode: Literal["fast", "exact", 3] = "fast",
        limit: Annotated[int, Ge(1)] | None = None,
        share: float | Literal["auto"] = "auto",
        sizes: Annotated[list[Annotated[int, Ge(0)]], MinLen(1), MaxLen(3)] = [1],  # noqa: B006
        scales: tuple[float, ...] = (1.0, 2.0),
        range: tuple[int, str] = (1, "px"),
        names: Sequence[str] = (),
        decay: Decay = Decay(1.0),
        maybe: Decay | None = None,
        top: IsNotNan[float] = math.inf,
        even: Annotated[int, MultipleOf(2), Interval(ge=0, le=8)] = 4,
        inner: LowerSolver | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.values = dict(locals())


SIGNATURE = describe(Everything)


def check(**given: Any) -> tuple[dict[str, Any], list[str]]:
    checker = Checker(load_registry())
    values = checker.parameters(SIGNATURE.parameters, {"count": 1} | given, (), "everything")
    return values, [issue.message for issue in checker.issues]


def test_defaults_are_filled_in_as_python_wants_them() -> None:
    values, issues = check()
    assert not issues
    assert values["scales"] == (1.0, 2.0)
    assert values["range"] == (1, "px")
    assert values["decay"] == {"power": 1.0, "every": 1}
    assert values["top"] == math.inf
    assert list(values) == [parameter.name for parameter in SIGNATURE.parameters]


def test_a_signature_survives_json() -> None:
    assert Signature.from_json(json.loads(json.dumps(SIGNATURE.to_json()))) == SIGNATURE


def test_documentation_is_read_from_the_docstrings() -> None:
    docs = {parameter.name: parameter.doc for parameter in SIGNATURE.parameters}
    assert docs["count"] == "How many of them."
    assert docs["rate"] == "How fast."
    assert SIGNATURE.about == "A class of all annotations.\n\nMore words."
    assert SIGNATURE.doc.startswith("Signatures: what is read")


@pytest.mark.parametrize(
    ("key", "given", "wanted"),
    [
        ("count", 1e5, 100000),
        ("rate", "25/255", 25 / 255),
        ("rate", " 1e-1 / 2 ", 0.05),
        ("scales", [1, "1/4"], (1.0, 0.25)),
        ("file", "a/b.npy", Path("a/b.npy")),
        ("limit", None, None),
        ("limit", 7, 7),
        ("share", "auto", "auto"),
        ("share", 1, 1.0),
        ("share", "1/2", 0.5),
        ("mode", 3, 3),
        ("range", [2, "mm"], (2, "mm")),
        ("decay", {"power": 2}, {"power": 2.0, "every": 1}),
        ("decay", Decay(3.0), {"power": 3.0, "every": 1}),
        ("maybe", {"power": 2}, {"power": 2.0, "every": 1}),
        ("inner", "agd", Block("lower_solver", "agd", {})),
        ("inner", {"name": "agd"}, Block("lower_solver", "agd", {})),
        ("noise", "25/255", Block("noise", "gaussian", {"level": 25 / 255})),
        ("noise", 0, Block("noise", "gaussian", {"level": 0.0})),
        ("noise", "none", Block("noise", "none", {})),
        ("top", -math.inf, -math.inf),
        ("even", 8, 8),
    ],
)
def test_generous_and_exact(key: str, given: Any, wanted: Any) -> None:
    values, issues = check(**{key: given})
    assert not issues
    assert values[key] == wanted
    assert type(values[key]) is type(wanted)


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("count", "many", "count: expected a whole number greater than 0, got 'many'"),
        ("count", 1.5, "count: expected a whole number greater than 0, got 1.5"),
        ("count", True, "count: expected a whole number greater than 0, got true"),
        ("count", 0, "count: expected a whole number greater than 0, got 0"),
        ("count", None, "count: expected a whole number greater than 0, got nothing"),
        ("count", math.inf, "count: expected a whole number greater than 0, got .inf"),
        ("rate", 1, "rate: expected a number greater than 0 and less than 1, got 1"),
        ("rate", True, "rate: expected a number greater than 0 and less than 1, got true"),
        ("rate", "1/0", "rate: expected a number greater than 0 and less than 1, got '1/0'"),
        ("rate", "1.2.3/4", "rate: expected a number greater than 0 and less than 1, got '1.2.3/4'"),
        ("scales", [math.nan], "scales[0]: expected a number, finite, got .nan"),
        ("scales", [1, 10**400], f"scales[1]: expected a number, finite, got {'1' + '0' * 58}…"),
        ("top", math.nan, "top: expected a number, finite, got .nan"),
        ("flag", "yes", "flag: expected true or false, got 'yes'"),
        ("word", 12, "word: expected text, got 12 (in quotes it would be text)"),
        ("file", {}, "file: expected a path or null, got a mapping"),
        ("mode", "fats", "mode: expected one of 'fast', 'exact', 3, got 'fats'; did you mean 'fast'?"),
        ("limit", 0, "limit: expected a whole number of at least 1 or null, got 0"),
        ("share", "auot", "share: expected a number or 'auto', got 'auot'"),
        (
            "sizes",
            [],
            "sizes: expected a list of 1 to 3 items, each a whole number of at least 0, got a list of 0",
        ),
        ("sizes", [1, -1], "sizes[1]: expected a whole number of at least 0, got -1"),
        ("sizes", "1", "sizes: expected a list of 1 to 3 items, each a whole number of at least 0, got '1'"),
        ("range", [1], "range: expected a list of 2: a whole number, text, got a list of 1"),
        ("decay", {}, "decay.power: missing; expected a number greater than 0"),
        (
            "decay",
            {"power": 1, "evry": 2},
            "decay.evry: decay has no parameter 'evry'; did you mean 'every'?",
        ),
        ("maybe", {"power": 0}, "maybe.power: expected a number greater than 0, got 0"),
        (
            "even",
            3,
            "even: expected a whole number of at least 0 and of at most 8 and that is a multiple of 2, got 3",
        ),
        ("noise", "3/2", "noise: expected a number of at least 0 and of at most 1, got '3/2'"),
        ("noise", "1/0", "noise: expected a number of at least 0 and of at most 1, got '1/0'"),
        ("noise", {}, "noise: has no name; write {name: …} (blt list noise)"),
        ("inner", {}, "inner: has no name; write {name: …} (blt list lower_solver)"),
        (
            "inner",
            "adg",
            "inner: 'adg' is not a registered lower_solver; did you mean 'agd'? (blt list lower_solver)",
        ),
        ("cuont", 1, "cuont: everything has no key 'cuont'; did you mean 'count'?"),
    ],
)
def test_each_mistake_in_our_own_words(key: str, given: Any, message: str) -> None:
    assert check(**{key: given})[1] == [message]


def test_all_mistakes_at_once() -> None:
    assert len(check(count=0, rate=2, decay={"power": "x", "every": 0}, zzz=1)[1]) == 5


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4)
)
def test_whatever_is_accepted_is_accepted_again_unchanged(value: Any) -> None:
    for parameter in SIGNATURE.parameters:
        first = Checker()
        result = first.value(parameter.type, value, (parameter.name,))
        if not first.issues:
            second = Checker()
            again = second.value(parameter.type, result, (parameter.name,))
            assert not second.issues
            assert again == result


@pytest.mark.parametrize(
    ("annotation", "label"),
    [
        ("count", "int > 0"),
        ("rate", "float > 0, < 1"),
        ("limit", "int ≥ 1 | null"),
        ("mode", "fast | exact | 3"),
        ("sizes", "list of int ≥ 0 (1 to 3 items)"),
        ("range", "[int, str]"),
        ("inner", "lower_solver | null"),
        ("noise", "float | noise | null"),
    ],
)
def test_labels(annotation: str, label: str) -> None:
    labels = {parameter.name: parameter.type.label() for parameter in SIGNATURE.parameters}
    assert labels[annotation] == label


def test_construct_makes_settings_and_components() -> None:
    values, _ = check(decay={"power": 2}, inner="agd")
    made = construct(Everything, values, lambda block: f"built {block.name}").values
    assert made["decay"] == Decay(2.0)
    assert made["maybe"] is None
    assert made["inner"] == "built agd"
    built = load_registry().build(Block("lower_solver", "agd", {}))
    assert isinstance(built, LowerSolver)


def _with_annotation(annotation: Any, default: Any = None) -> type[Any]:
    def init(self: Any, x: Any = default) -> None: ...

    init.__annotations__["x"] = annotation
    return type("Odd", (), {"__init__": init})


class Bare:
    def __init__(self, x) -> None: ...  # type: ignore[no-untyped-def]


class Starred:
    def __init__(self, **options: int) -> None: ...


class Named:
    def __init__(self, name: str) -> None: ...


class Unresolved:
    def __init__(self, x: NoSuchName) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            _with_annotation(dict[str, int], {}),
            "parameter 'x' of Odd is annotated .*dict.*, which a recipe cannot express",
        ),
        (_with_annotation(complex, 1j), "annotated complex, which a recipe cannot express"),
        (_with_annotation(list, []), r"write e.g. list\[int\]"),
        (
            _with_annotation(int),
            "a default that violates its annotation: x: expected a whole number, got nothing",
        ),
        (
            _with_annotation(Annotated[int, Le(3)], 4),
            "violates its annotation: x: expected a whole number of at most 3, got 4",
        ),
        (Bare, "parameter 'x' of Bare has no annotation"),
        (Starred, "parameter 'options' of Starred cannot be set by name"),
        (Named, "parameter 'name' of Named would hide the name"),
        (Unresolved, "annotations of Unresolved cannot be evaluated: name 'NoSuchName'"),
    ],
)
def test_authors_are_told_what_a_recipe_cannot_express(cls: type[Any], message: str) -> None:
    with pytest.raises(Undescribable, match=message):
        describe(cls)


def test_other_lengths() -> None:
    exact = describe(_with_annotation(Annotated[str, Len(2, 2)], "ab")).parameters[0].type
    assert exact.expected() == "text of 2 characters"
    most = describe(_with_annotation(Annotated[list[int], MaxLen(1)], [])).parameters[0].type
    assert most.expected() == "a list of at most 1 item, each a whole number"


HOOK = """
from bltoolbox.config.hooks import Component, hookimpl
@hookimpl
def blt_components():
    return [Component("sampler", "toy", "toy_heavy:Toy", "A toy.")]
"""

HEAVY = """
"A toy sampler."
from toy_base import Base
class Toy(Base):
    def __init__(self, size: int = 1) -> None: ...
    def init(self, m, seed): return {}
    def next(self, state): raise NotImplementedError
"""

BASE = "from bltoolbox.plugin import Sampler\nclass Base(Sampler): ...\n"


@pytest.fixture
def ask(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask for the default as a new process would, and whether the component was imported to know it."""
    site = install("toy", {"toy": "toy_light"}, {"toy_light": HOOK, "toy_heavy": HEAVY, "toy_base": BASE})
    monkeypatch.setenv("BLT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def call() -> tuple[Any, str]:
        for name in ("toy_light", "toy_heavy", "toy_base"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        default = load_registry().get("sampler", "toy").signature().parameters[0].default
        return default, "imported" if "toy_heavy" in sys.modules else "cached"

    return call, site


def test_the_cache_spares_the_import_until_a_file_changes(ask: Any) -> None:
    call, site = ask
    assert call() == (1, "imported")
    assert call() == (1, "cached")
    (site / "toy_heavy.py").write_text(HEAVY.replace("= 1", "= 2"))
    assert call() == (2, "imported")
    assert call() == (2, "cached")
    (site / "toy_base.py").write_text(BASE + "# changed\n")
    assert call() == (2, "imported"), "a base class may define __init__"


@pytest.mark.parametrize(
    "junk", ["", "{", "[]", "{}", '{"files": {}}', '{"files": {"/": "x"}, "signature": {}}', "null"]
)
def test_a_damaged_cache_is_no_cache(ask: Any, tmp_path: Path, junk: str) -> None:
    call, _ = ask
    call()
    (entry,) = (tmp_path / "cache").rglob("*.json")
    entry.write_text(junk)
    assert call() == (1, "imported")
    assert call() == (1, "cached")


def test_a_cache_that_cannot_be_written_is_no_cache(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLT_CACHE", str(tmp_path / "file" / "cache"))
    assert ask[0]() == (1, "imported")


def test_a_class_older_than_its_file_is_not_remembered(ask: Any, tmp_path: Path) -> None:
    call, site = ask
    registered = load_registry().get("sampler", "toy")
    registered.load()
    (site / "toy_heavy.py").write_text(HEAVY.replace("= 1", "= 2"))
    assert registered.signature().parameters[0].default == 1
    assert call() == (2, "imported")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{os.sep}x")
    assert cache_folder() == Path(os.sep, "x", "bltoolbox")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "bltoolbox"
