"""The checks behind ``blt doctor``: the installation, and a self-test.

Each check is a function that yields findings. An unexpected failure of a check is itself a
finding, so a broken machine is described completely.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bltoolbox
from bltoolbox.config.cache import cache_folder
from bltoolbox.config.registry import Registry
from bltoolbox.distributed.launch import processors
from bltoolbox.errors import BltError
from bltoolbox.runs.locks import NO_LOCK, acquire

#: Extras that are not needed to run recipes.
_FOR_DEVELOPERS = frozenset({"test", "docs"})
#: Less free space than this is reported: checkpoints of a run with large images.
_ROOM = 2 << 30
#: Picture formats, by Pillow's names of the libraries behind them.
_CODECS = {"PNG": "zlib", "JPEG": "jpg", "TIFF": "libtiff", "WebP": "webp"}
#: Environment variables that affect a run.
_VARIABLES = ("BLT_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_", "CUDA_VISIBLE_DEVICES", "TORCH_")
#: The model, the noise level, and the minimal factor by which it reduces the error of a piecewise constant picture.
_PATIENT, _SIGMA, _GAIN = "denoise-color", 25 / 255, 2.0


class Verdict(StrEnum):
    """``note``: works, but worth knowing. ``wrong``: something does not work."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str
    verdict: Verdict
    found: str
    #: What to do about it.
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(registry: Registry) -> Iterator[Finding]:
    """All checks in turn; the slowest come last."""
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "bltoolbox": _installation,
        "packages": _packages,
        "plugins": lambda: _plugins(registry),
        "pictures": _codecs,
        "folders": _folders,
        "locks": _locks,
        "variables": _variables,
        "processors": _processors,
        "memory": _memory,
        "devices": _devices,
        "ranks": _ranks,
        "compiler": _compiler,
        "computing": lambda: _computing(registry),
    }
    for subject, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding(subject, Verdict.WRONG, f"could not be examined: {_sentence(error)}")


def _installation() -> Iterator[Finding]:
    where = Path(bltoolbox.__file__).parent
    text = f"{bltoolbox.__version__} in {where}, Python {platform.python_version()}, {platform.platform()}"
    yield Finding("bltoolbox", Verdict.OK, text)


def _packages() -> Iterator[Finding]:
    """What the toolbox requires, imported: two installed packages may still be incompatible."""
    modules: dict[str, list[str]] = {}
    for module, distributions in metadata.packages_distributions().items():
        for distribution in distributions:
            modules.setdefault(canonicalize_name(distribution), []).append(module)
    good = []
    for requirement, extra in _requirements():
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield _not_installed(requirement, extra)
            continue
        # Builds from source are pre-releases, which a specifier excludes by default.
        if not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                requirement.name,
                Verdict.WRONG,
                f"{version} is installed, {requirement.specifier} is needed",
                f"pip install --upgrade '{_plain(requirement)}'",
            )
        elif reason := _import_error(modules.get(canonicalize_name(requirement.name), ())):
            together = "torch torchvision" if "torch" in requirement.name else requirement.name
            remedy = f"pip install --force-reinstall {together}"
            yield Finding(requirement.name, Verdict.WRONG, f"{version} cannot be imported: {reason}", remedy)
        else:
            good.append(f"{requirement.name} {version}")
    yield Finding("packages", Verdict.OK, ", ".join(good))


def _requirements() -> Iterator[tuple[Requirement, str]]:
    """What must be installed on this system, and what the extras for users add, with the name of the extra."""
    extras = metadata.metadata("bltoolbox").get_all("Provides-Extra") or []
    for text in metadata.requires("bltoolbox") or ():
        requirement = Requirement(text)
        for extra in ("", *sorted(set(extras) - _FOR_DEVELOPERS)):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra
                break


def _not_installed(requirement: Requirement, extra: str) -> Finding:
    if extra:
        remedy = f"needed only for {extra}: pip install 'bltoolbox[{extra}]'"
        return Finding(requirement.name, Verdict.NOTE, "not installed", remedy)
    return Finding(requirement.name, Verdict.WRONG, "not installed", f"pip install '{_plain(requirement)}'")


def _plain(requirement: Requirement) -> str:
    """A requirement as a user would write it, without its conditions."""
    return f"{requirement.name}{requirement.specifier}"


def _import_error(modules: Iterable[str]) -> str:
    import warnings

    for module in modules:
        if module.startswith("_") or not module.isidentifier():
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except Exception as error:  # a torchvision for another torch fails with a RuntimeError
            return _sentence(error)
    return ""


def _plugins(registry: Registry) -> Iterator[Finding]:
    plugins = registry.plugins()
    for plugin in plugins:
        if plugin.status not in ("ok", "off"):
            yield Finding(
                f"plugin {plugin.name}", Verdict.WRONG, f"{plugin.status}: {plugin.reason}", "blt plugins"
            )
    components, clashes = 0, set()
    for plugin in plugins:
        for component in registry.of(plugin):
            components += 1
            clashes.add(registry.clash(component) or "")
    for clash in sorted(clashes - {""}):
        yield Finding("plugins", Verdict.WRONG, clash, "uninstall one of them, or choose with BLT_PLUGINS")
    off = [plugin.name for plugin in plugins if plugin.status == "off"]
    text = f"{len(plugins)} with {components} components"
    if off:
        yield Finding("plugins", Verdict.NOTE, f"{text}; excluded by BLT_PLUGINS: {', '.join(off)}")
    else:
        yield Finding("plugins", Verdict.OK, text)


def _codecs() -> Iterator[Finding]:
    from PIL import features

    missing = [name for name, library in _CODECS.items() if not features.check(library)]
    if missing:
        yield Finding(
            "pictures",
            Verdict.NOTE,
            f"Pillow was built without {', '.join(missing)}",
            "pip install --force-reinstall pillow",
        )
    else:
        yield Finding("pictures", Verdict.OK, ", ".join(_CODECS))


def _folders() -> Iterator[Finding]:
    for subject, folder, without in (
        ("here", Path.cwd(), "runs are written there; choose another folder with -o"),
        (
            "cache",
            cache_folder(),
            "commands are slower without it; set BLT_CACHE to a writable folder",
        ),
    ):
        if not _writable(folder):
            yield Finding(subject, Verdict.NOTE, f"{folder} cannot be written", without)
            continue
        free = shutil.disk_usage(_existing(folder)).free
        verdict = Verdict.OK if free >= _ROOM else Verdict.NOTE
        yield Finding(subject, verdict, f"{folder}, {free / 2**30:.1f} GiB free")


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _writable(folder: Path) -> bool:
    """Tested by writing: permissions do not reveal a full or read-only file system."""
    with contextlib.suppress(OSError):
        with tempfile.TemporaryFile(dir=_existing(folder)) as file:
            file.write(b"0")
        return True
    return False


def _locks() -> Iterator[Finding]:
    """Whether locks prevent two runs from writing to one directory here."""
    folder = _existing(Path.cwd())
    if os.environ.get(NO_LOCK) == "1":
        yield Finding(
            "locks", Verdict.NOTE, f"{NO_LOCK}=1 disables them", "unset it on file systems with locks"
        )
        return
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        try:
            acquire(file, folder)
        except BltError as error:
            yield Finding("locks", Verdict.NOTE, str(error))


def _variables() -> Iterator[Finding]:
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))
    if settings:
        yield Finding("variables", Verdict.OK, ", ".join(settings))


def _processors() -> Iterator[Finding]:
    import torch

    usable, threads = processors(), torch.get_num_threads()
    text = f"{usable} usable, torch uses {threads}"
    if threads > usable:
        yield Finding(
            "processors",
            Verdict.NOTE,
            text,
            f"too many threads slow each other down: set OMP_NUM_THREADS={usable}",
        )
    elif 2 * threads < usable and "OMP_NUM_THREADS" in os.environ:
        yield Finding(
            "processors", Verdict.NOTE, text, "limited by OMP_NUM_THREADS; unset it to use all of them"
        )
    else:
        yield Finding("processors", Verdict.OK, text)


def _memory() -> Iterator[Finding]:
    from bltoolbox.bilevel.memory import keep_freed_memory

    if keep_freed_memory():
        yield Finding("memory", Verdict.OK, "freed memory is kept by the process while it solves")
    elif named := [name for name in os.environ if name.startswith("MALLOC_")]:
        yield Finding(
            "memory",
            Verdict.NOTE,
            f"controlled by {', '.join(named)}",
            "unset it if runs on the CPU are slow",
        )
    else:
        yield Finding(
            "memory", Verdict.NOTE, "not glibc: freed memory is returned to the system, runs may be slower"
        )


def _devices() -> Iterator[Finding]:
    import torch

    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        why = f"this torch is for CUDA {built}" if built else "this torch is for CPU only"
        yield Finding("cuda", Verdict.NOTE, f"no CUDA device ({why}); runs use the CPU")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(
            f"cuda:{index}", Verdict.OK, f"{facts.name}, {facts.total_memory / 2**30:.1f} GiB, CUDA {built}"
        )


def _ranks() -> Iterator[Finding]:
    import torch.distributed as distributed

    if not distributed.is_available():
        yield Finding("ranks", Verdict.NOTE, "this torch has no torch.distributed: no --nproc, no torchrun")
        return
    backends = [("gloo", distributed.is_gloo_available()), ("nccl", distributed.is_nccl_available())]
    yield Finding("ranks", Verdict.OK, ", ".join(name for name, there in backends if there))


def _compiler() -> Iterator[Finding]:
    """A compiler is needed only for ``compile: true`` of a component, which has no effect without one."""
    wanted = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [wanted] if wanted else ["g++", "clang++", "c++"])), None)
    if compiler:
        yield Finding("compiler", Verdict.OK, compiler)
    else:
        yield Finding("compiler", Verdict.NOTE, "no C++ compiler: `compile: true` has no effect on the CPU")


def _computing(registry: Registry) -> Iterator[Finding]:
    """Restore a noisy picture with a shipped model on each device; the results should agree."""
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    first: Any = None
    for device in devices:
        clean, noisy = _plain_areas()
        try:
            restored = _restore(noisy, device, registry)
        except Exception as error:
            yield Finding(f"computing on {device}", Verdict.WRONG, _sentence(error))
            continue
        gain = float(abs(noisy - clean).mean() / abs(restored - clean).mean())
        text = f"{_PATIENT} reduces the error of a noisy picture {gain:.1f} times"
        apart = 0.0 if first is None else float(abs(restored - first).max())
        first = restored if first is None else first
        if not gain >= _GAIN:
            yield Finding(f"computing on {device}", Verdict.WRONG, f"{text}; expected more than {_GAIN:g}")
        elif apart > 1e-2:
            yield Finding(
                f"computing on {device}",
                Verdict.WRONG,
                f"the result differs from that of the CPU by {apart:.2g}",
            )
        else:
            yield Finding(f"computing on {device}", Verdict.OK, text)


def _plain_areas() -> tuple[Any, Any]:
    import numpy as np

    rows, columns = np.mgrid[:48, :64]
    areas = [columns < 32, rows < columns / 2, (rows - 24) ** 2 + (columns - 40) ** 2 < 100]
    clean = np.stack([0.2 + 0.6 * area for area in areas], axis=2).astype(np.float32)
    noise = np.random.default_rng(0).standard_normal(clean.shape)
    return clean, (clean + _SIGMA * noise).astype(np.float32)


def _restore(noisy: Any, device: str, registry: Registry) -> Any:
    from bltoolbox.restoration.model import Model

    return Model.load(_PATIENT, device, registry).restore(noisy)


def _sentence(error: Exception) -> str:
    detail = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{': ' if detail else ''}{detail}"
