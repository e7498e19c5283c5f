"""The available components: discovery, provenance, clashes, broken plugins, lookup.

Entry points of the group ``bltoolbox`` are loaded one by one, so that a broken plugin does not affect the others: it
is recorded with its reason. If two components have the same kind and name, both are refused, and
the message names both distributions. Nothing here imports torch; a component's module is imported when its class is
needed.

``BLT_PLUGINS=a,b`` restricts discovery to those entry points; files and modules given to ``load_registry`` are always
added.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import pluggy

import bltoolbox
from bltoolbox.config import hooks as hookspecs
from bltoolbox.config.block import Block
from bltoolbox.config.hooks import API_VERSION, CORE, KINDS, PROJECT, ROLES, STAND_INS, Component
from bltoolbox.config.wording import did_you_mean, reason_of
from bltoolbox.errors import MissingError, UsageError

if TYPE_CHECKING:
    from bltoolbox.config.signatures import Signature

GROUP = "bltoolbox"
_FROM_FILE = "; to use one from a file, add --plugin FILE.py"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True)
class Plugin:
    """Where components come from, or why they cannot be used."""

    name: str
    distribution: str
    version: str
    module: str
    status: Literal["ok", "broken", "off"] = "ok"
    reason: str = ""

    @property
    def origin(self) -> str:
        """For messages: ``bltoolbox 0.1.0 (plugin 'solvers')``."""
        return f"{self.distribution} {self.version}".strip() + f" (plugin {self.name!r})"


@dataclass(frozen=True)
class Registered:
    """A component and its provenance."""

    component: Component
    distribution: str
    version: str
    plugin: Plugin

    @property
    def kind(self) -> str:
        return self.component.kind

    @property
    def name(self) -> str:
        return self.component.name

    def load(self) -> type[Any]:
        """Import the class. It must implement the role of its kind completely."""
        module_name, _, class_name = self.component.target.partition(":")
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise MissingError(f"{self._who} cannot be imported: {reason_of(error)}") from error
        cls = getattr(module, class_name, None)
        if not inspect.isclass(cls):
            raise MissingError(f"{self._who} cannot be used: module {module_name} has no class {class_name}")
        if not any(vars(base).get("kind") == self.kind for base in cls.__mro__):
            raise MissingError(
                f"{self._who} cannot be used: {class_name} does not derive from bltoolbox.plugin.{ROLES[self.kind]}"
            )
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise MissingError(f"{self._who} cannot be used: {class_name} lacks {', '.join(missing)}")
        return cls

    def signature(self) -> Signature:
        """Parameters and documentation, from the cache if possible."""
        from bltoolbox.config.cache import cached_signature  # not needed by a list of components

        return cached_signature(self.component.target, self.load, self._who)

    @property
    def _who(self) -> str:
        return f"{self.kind} {self.name!r} of {self.plugin.origin}"


class Registry:
    """All components that were found, and the plugins they came from; those of the toolbox itself are always there."""

    def __init__(self, plugins: Iterable[Plugin], components: Iterable[Registered]) -> None:
        self._plugins = sorted(plugins, key=lambda plugin: (plugin.distribution, plugin.name))
        self._components: dict[tuple[str, str], list[Registered]] = {}
        own = Plugin("core", PROJECT, bltoolbox.__version__, PROJECT)
        core = [Registered(component, own.distribution, own.version, own) for component in CORE]
        for registered in (*core, *components):
            self._components.setdefault((registered.kind, registered.name), []).append(registered)

    def plugins(self) -> list[Plugin]:
        return list(self._plugins)

    def of(self, plugin: Plugin) -> list[Registered]:
        """All components that a plugin offers, clashing or not."""
        everything = [
            registered
            for group in self._components.values()
            for registered in group
            if registered.plugin == plugin
        ]
        return sorted(everything, key=lambda registered: (KINDS.index(registered.kind), registered.name))

    def build(self, block: Block) -> Any:
        """Import the class that a block names and make the component, and those nested in it."""
        from bltoolbox.config.describe import construct

        def nested(inner: Block) -> Any:
            try:
                return self.build(inner)
            except ValueError as error:
                raise ValueError(f"{inner.name}: {error}") from error

        return construct(self.get(block.kind, block.name).load(), block.options, nested)

    def clash(self, registered: Registered) -> str:
        """A sentence if more than one plugin offers this kind and name, else nothing."""
        group = self._components[registered.kind, registered.name]
        return self._clash(group) if len(group) > 1 else ""

    def components(self, kind: str | None = None) -> list[Registered]:
        """In the order of a recipe, then by name; without those that clash."""
        if kind is not None and kind not in KINDS:
            hint = did_you_mean(kind, KINDS)
            raise UsageError(f"{kind!r} is not a kind of component{hint} (kinds: {', '.join(KINDS)})")
        unique = [group[0] for group in self._components.values() if len(group) == 1]
        chosen = [registered for registered in unique if kind in (None, registered.kind)]
        return sorted(chosen, key=lambda registered: (KINDS.index(registered.kind), registered.name))

    def get(self, kind: str, name: str) -> Registered:
        """The component of that kind and name; MissingError with a suggestion if there is none or more than one."""
        if (kind, name) in STAND_INS:
            core = Plugin("core", PROJECT, "", PROJECT)
            return Registered(STAND_INS[kind, name], core.distribution, core.version, core)
        group = self._components.get((kind, name), [])
        if len(group) > 1:
            raise MissingError(self._clash(group))
        if not group:
            raise MissingError(self._unknown(kind, name))
        return group[0]

    def find(self, text: str) -> Registered:
        """``kind/name``, or a name alone if only one kind has it."""
        kind, slash, name = text.rpartition("/")
        if slash:
            if kind not in KINDS:
                self.components(kind)  # raises, with the kinds to choose from
            return self.get(kind, name)
        kinds = [kind for kind, other in self._components if other == name]
        if len(kinds) > 1:
            choices = " or ".join(f"{kind}/{name}" for kind in kinds)
            raise UsageError(f"{name!r} is the name of more than one component; use {choices}")
        if not kinds:
            hint = did_you_mean(name, [other for _, other in self._components])
            raise MissingError(
                f"{name!r} is not a registered component{hint or _FROM_FILE} (blt list){self._broken()}"
            )
        return self.get(kinds[0], name)

    def warnings(self) -> list[str]:
        """One sentence for each plugin that is broken and each clash."""
        broken = [plugin for plugin in self._plugins if plugin.status == "broken"]
        clashes = [group for group in self._components.values() if len(group) > 1]
        sentences = [f"{plugin.origin} is not used: {plugin.reason}" for plugin in broken]
        return sentences + [self._clash(group) for group in clashes]

    def _clash(self, group: list[Registered]) -> str:
        owners = " and by ".join(registered.plugin.origin for registered in group)
        return (
            f"{group[0].name!r} is offered as {group[0].kind} by {owners}, so neither is used; "
            "uninstall one of them, or choose plugins with BLT_PLUGINS"
        )

    def _unknown(self, kind: str, name: str) -> str:
        elsewhere = [other for other, offered in self._components if offered == name]
        same_kind = [offered for other, offered in self._components if other == kind]
        hint = f"; it is of kind {elsewhere[0]}" if elsewhere else did_you_mean(name, same_kind)
        return f"{name!r} is not a registered {kind}{hint or _FROM_FILE} (blt list {kind}){self._broken()}"

    def _broken(self) -> str:
        names = [repr(plugin.name) for plugin in self._plugins if plugin.status == "broken"]
        return f"; broken plugins: {', '.join(names)}" if names else ""


#: Plugin files, or modules that are imported.
Plugins = Sequence[str | Path | ModuleType]


def registry_with(plugins: Plugins) -> Registry:
    """The installed components and those of ``plugins``, all of which must be usable."""
    registry = load_registry(plugins)
    names = {given.__name__ if isinstance(given, ModuleType) else Path(given).name for given in plugins}
    for plugin in registry.plugins():
        if plugin.status == "broken" and plugin.name in names:
            raise MissingError(f"{plugin.origin} cannot be used: {plugin.reason}")
    return registry


def load_registry(files: Plugins = ()) -> Registry:
    """Discover the installed plugins, and add those in ``files``, which may also be modules that are imported."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    plugins: list[Plugin] = []
    components: list[Registered] = []
    wanted = _wanted()
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    # Parsed once per distribution: the metadata of one with many plugins contain its whole description.
    metadata = {dist: dist.metadata for dist in {point.dist for point in points} if dist}
    for point in points:
        known = metadata[point.dist] if point.dist else {"Name": "unknown distribution", "Version": ""}
        plugin = Plugin(point.name, known["Name"], known["Version"], point.module)
        if wanted is not None and point.name not in wanted:
            plugins.append(replace(plugin, status="off", reason="excluded by BLT_PLUGINS"))
            continue
        _enter(manager, plugin, point.load, plugins, components)
    for name in sorted((wanted or set()) - {point.name for point in points}):
        hint = did_you_mean(name, [point.name for point in points])
        reason = f"BLT_PLUGINS names it, but no installed distribution provides it{hint}"
        plugins.append(Plugin(name, "BLT_PLUGINS", "", "", "broken", reason))
    for given in dict.fromkeys(
        file if isinstance(file, ModuleType) else Path(file).resolve() for file in files
    ):
        _enter(manager, *_given(given), plugins, components)
    return Registry(plugins, components)


def _wanted() -> set[str] | None:
    names = {name.strip() for name in os.environ.get("BLT_PLUGINS", "").split(",")} - {""}
    return names or None


def _enter(
    manager: pluggy.PluginManager,
    plugin: Plugin,
    load: Callable[[], Any],
    plugins: list[Plugin],
    components: list[Registered],
) -> None:
    """Load one plugin; whatever goes wrong in it becomes its record."""
    try:
        offered = _offered(manager, plugin, load())
    except _Refused as refusal:
        plugins.append(replace(plugin, status="broken", reason=str(refusal)))
    except (Exception, SystemExit) as error:
        plugins.append(replace(plugin, status="broken", reason=reason_of(error)))
    else:
        plugins.append(plugin)
        components += [
            Registered(component, plugin.distribution, plugin.version, plugin) for component in offered
        ]


class _Refused(Exception):
    """The plugin loads, but violates the contract."""


def _offered(manager: pluggy.PluginManager, plugin: Plugin, loaded: Any) -> list[Component]:
    api = getattr(loaded, "BLT_API", API_VERSION)
    if api != API_VERSION:
        raise _Refused(
            f"it is written for plugin API {api}, but this bltoolbox provides API {API_VERSION}; import from"
            " bltoolbox.plugin, adapt the signatures as docs/plugin-api.md lists them, and set BLT_API ="
            f" {API_VERSION}"
        )
    if manager.is_registered(loaded):
        raise _Refused(f"its module {plugin.module} is already loaded through another entry point")
    manager.register(loaded, name=f"{plugin.distribution}/{plugin.name}")
    hooks = [hook for hook in manager.hook.blt_components.get_hookimpls() if hook.plugin is loaded]
    if not hooks:
        raise _Refused(f"{plugin.module} defines no blt_components() marked with @hookimpl")
    result = hooks[0].function()
    if isinstance(result, Component | str) or not isinstance(result, Iterable):
        raise _Refused(f"blt_components() must return a list of Component, not {_a(result)}")
    offered = list(result)
    for component in offered:
        _check(component)
    return offered


def _check(component: Any) -> None:
    if not isinstance(component, Component):
        raise _Refused(f"blt_components() must return a list of Component, but an item is {_a(component)}")
    for field in ("kind", "name", "target", "summary"):
        if not isinstance(getattr(component, field), str):
            raise _Refused(f"the {field} of a Component must be text, not {getattr(component, field)!r}")
    if component.kind not in KINDS:
        raise _Refused(f"{component.kind!r} is not a kind of component{did_you_mean(component.kind, KINDS)}")
    if not NAME.fullmatch(component.name):
        raise _Refused(f"the component name {component.name!r} is not of the form 'my-name'")
    if (component.kind, component.name) in STAND_INS:
        raise _Refused(
            f"the name {component.name!r} stands for data that are given from Python; choose another"
        )
    if not TARGET.fullmatch(component.target):
        raise _Refused(
            f"the target {component.target!r} of {component.name!r} is not of the form 'package.module:Class'"
        )


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _given(source: Path | ModuleType) -> tuple[Plugin, Callable[[], ModuleType]]:
    """A plugin that is named by the caller, and how to load it."""
    if isinstance(source, ModuleType):
        return Plugin(source.__name__, f"module {source.__name__}", "", source.__name__), lambda: source
    if not source.is_file():
        raise UsageError(f"plugin file {source} does not exist")
    module = _module_name(source)
    return Plugin(source.name, str(source), "", module), partial(_import_file, source, module)


def _module_name(path: Path) -> str:
    """The same for a file in every process, and different for two files of the same name."""
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    stem = re.sub(r"\W", "_", path.stem)
    return f"blt_file_{stem}_{digest}"


def _import_file(path: Path, name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Compiled here rather than by the loader, which would leave a __pycache__ beside the user's file.
        exec(loader.source_to_code(path.read_bytes(), str(path)), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
