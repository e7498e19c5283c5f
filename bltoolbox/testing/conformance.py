"""The conformance suite: tests whether a component does what its role promises.

``blt check`` runs it on installed plugins. Plugin authors run it under pytest with

    from bltoolbox.testing.conformance import conformance_tests

    test_my_plugin = conformance_tests("my-plugin")

which gives one test for each property of each component. The properties of each kind are in
``bltoolbox.testing.checks``. A component that needs options to be built, or smaller ones to be fast, returns them from
its ``example``.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bltoolbox.config.hooks import KINDS
from bltoolbox.config.registry import Registered, Registry, load_registry
from bltoolbox.config.wording import did_you_mean, reason_of
from bltoolbox.errors import BltError, MissingError, UsageError
from bltoolbox.testing.checks import (
    PROPERTIES,
    ConformanceFailure,
    NotApplicable,
    NotVerified,
    Property,
    Subject,
)

__all__ = [
    "ConformanceFailure",
    "Outcome",
    "check_component",
    "conformance_tests",
    "properties_of",
    "run_conformance",
    "select",
]

IMPORTED = "can be imported"
BUILT = "builds from its example options"


#: ``skipped`` does not apply to the component; ``unverified`` applies, but nothing can tell whether it holds.
Status = Literal["passed", "failed", "skipped", "unverified"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one property of one component; ``message`` says why it did not pass."""

    kind: str
    name: str
    property: str
    status: Status
    message: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def properties_of(kind: str) -> list[Property]:
    """All properties of a kind, in order; the first is that it can be imported, the second that it can be built."""
    common = [Property(kind, IMPORTED, _imports), Property(kind, BUILT, _builds)]
    return common + PROPERTIES[kind]


def run_conformance(registry: Registry, selection: Sequence[Registered] | None = None) -> list[Outcome]:
    """Test every property of the selected components, by default of all."""
    chosen = registry.components() if selection is None else selection
    return [outcome for component in chosen for outcome in check_component(component, registry)]


def check_component(
    registered: Registered, registry: Registry, options: Mapping[str, Any] | None = None
) -> list[Outcome]:
    """Test every property of one component, with ``options`` that override those of its example.

    The first failure to import or build it ends the test; it is skipped if a package that it needs is missing.
    """
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, _steady():
        for number, property in enumerate(properties_of(registered.kind)):
            subject = Subject(registered, registry, Path(folder) / str(number), options or {})
            outcomes.append(_judge(property, subject))
            if property.name in (IMPORTED, BUILT) and outcomes[-1].status != "passed":
                break
    return outcomes


def select(registry: Registry, target: str) -> list[Registered]:
    """The components named by a distribution, a plugin, a plugin file, a kind, KIND/NAME or a name."""
    plugins = [
        plugin
        for plugin in registry.plugins()
        if target in (plugin.distribution, plugin.name, _stem(plugin.name))
    ]
    for plugin in plugins:
        if plugin.status != "ok":
            raise MissingError(f"{plugin.origin} is not used: {plugin.reason}")
    selected = [component for plugin in plugins for component in registry.of(plugin)]
    for component in selected:
        if clash := registry.clash(component):
            raise MissingError(clash)
    everything = registry.components()
    selected += [
        component
        for component in everything
        if target in (component.kind, component.name, f"{component.kind}/{component.name}")
    ]
    if not selected and not plugins:
        names = {component.distribution for component in everything} | {
            component.plugin.name for component in everything
        }
        names |= (
            {component.name for component in everything}
            | {f"{component.kind}/{component.name}" for component in everything}
            | set(KINDS)
        )
        raise UsageError(
            f"{target!r} is not a plugin, distribution, component or recipe{did_you_mean(target, sorted(names))}"
            " (blt plugins, blt list, blt recipes)"
        )
    return list(dict.fromkeys(selected))


def conformance_tests(*targets: str, files: Sequence[str | Path] = ()) -> Callable[..., None]:
    """A pytest test with one case for each property of each component of ``targets``.

    A target is a distribution, a plugin, KIND/NAME or a name; ``files`` are plugin files to load; without
    targets, all of their components are tested.
    """
    import pytest

    registry = load_registry(files)
    names = list(targets) or [Path(file).name for file in files]
    try:
        chosen = (
            [component for name in names for component in select(registry, name)]
            if names
            else registry.components()
        )
    except BltError as error:
        return _failing(str(error))
    cases = [
        pytest.param(component, property, id=f"{component.kind}/{component.name}: {property.name}")
        for component in dict.fromkeys(chosen)
        for property in properties_of(component.kind)
    ]

    @pytest.mark.parametrize(("component", "promise"), cases)
    def test(component: Registered, promise: Property, tmp_path: Path) -> None:
        __tracebackhide__ = True
        with _steady():
            outcome = _judge(promise, Subject(component, registry, tmp_path))
        if outcome.status == "failed":
            pytest.fail(
                f"{outcome.kind}/{outcome.name}: {outcome.property}\n{outcome.message}", pytrace=False
            )
        if outcome.status == "skipped":
            pytest.skip(outcome.message)
        if outcome.status == "unverified":
            pytest.skip(f"not verified: {outcome.message}")

    return test


def _failing(message: str) -> Callable[[], None]:
    import pytest

    def test() -> None:
        __tracebackhide__ = True
        pytest.fail(message, pytrace=False)

    return test


def _imports(subject: Subject) -> None:
    try:
        subject.registered.load()
        subject.registered.signature()
    except MissingError as error:
        raise ConformanceFailure(IMPORTED, str(error)) from None


def _builds(subject: Subject) -> None:
    subject()


def _judge(property: Property, subject: Subject) -> Outcome:
    """The outcome of a property; exceptions of the component count as failures."""
    begin = time.perf_counter()
    status: Status = "passed"
    message = ""
    try:
        property(subject)
    except ConformanceFailure as failure:
        status, message = "failed", failure.message
    except NotVerified as reason:
        status, message = "unverified", str(reason)
    except (NotApplicable, MissingError) as reason:
        # A missing dependency is not the fault of the component.
        status, message = "skipped", str(reason)
    except (Exception, SystemExit) as error:
        status, message = "failed", f"it raised {reason_of(error)}{_place(error)}"
    seconds = round(time.perf_counter() - begin, 4)
    registered = subject.registered
    return Outcome(registered.kind, registered.name, property.name, status, message, seconds)


def _place(error: BaseException) -> str:
    """The line of the author's code that raised an exception."""
    ours = str(Path(__file__).parents[1])
    torchs = str(Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, torchs, "<"))
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


@contextmanager
def _steady() -> Iterator[None]:
    """Use one thread, since the images are tiny, and restore the global generator afterwards."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def _stem(name: str) -> str:
    return name.removesuffix(".py")
