"""A new plugin from templates: an installable package with one working component for each requested kind.

The files in ``templates/`` are those of a plugin called ``my-plugin``; only that name and the few words between ``@``
are replaced.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bltoolbox.config.hooks import KINDS
from bltoolbox.config.problem_keys import IMAGE_KEYS
from bltoolbox.config.registry import NAME
from bltoolbox.config.wording import did_you_mean
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry

TEMPLATES = Path(__file__).parent / "templates"

#: The class and the summary of the example of each kind.
EXAMPLES = {
    "problem": ("Smoothing", "Noisy signals; learns how much to smooth them."),
    "data": ("Checkerboards", "Generated checkerboards under a gradient of light."),
    "operator": ("Vignetting", "A gain that falls off towards the corners."),
    "noise": ("Laplacian", "Errors with a Laplace distribution: mostly small, sometimes large."),
    "data_term": ("LogCosh", "A log cosh of each residual, robust against outliers."),
    "regularizer": (
        "LogCoshTV",
        "Anisotropic total variation, smoothed by log cosh, with a learned weight per direction.",
    ),
    "upper_loss": ("LogCoshError", "A log cosh of the error of each pixel, robust against outliers."),
    "lower_solver": ("HeavyBall", "Polyak's heavy ball; needs a Lipschitz constant."),
    "hypergradient": (
        "Richardson",
        "Implicit differentiation; the Hessian system is solved by Richardson's iteration.",
    ),
    "sampler": ("WithReplacement", "Independent uniform draws at each step."),
    "upper_optimizer": ("Momentum", "Stochastic gradient descent with momentum."),
    "logger": ("Diary", "A text file with one line per check."),
}

#: What the example recipe uses for kinds that the plugin does not offer.
PARTNERS = {
    "problem": "ridge",
    "data": "dead-leaves",
    "operator": "identity",
    "noise": "gaussian",
    "data_term": "least-squares",
    "regularizer": "tv",
    "upper_loss": "squared-error",
    "lower_solver": "agd",
    "hypergradient": "cg-ift",
    "sampler": "epoch",
    "upper_optimizer": "isgd",
    "logger": "csv",
}


def new_plugin(name: str, kinds: Sequence[str], target: Path, registry: Registry) -> list[Path]:
    """Write the package into ``target``, which must be empty or missing; returns the files in order."""
    package = package_name(name)
    components = component_names(name, kinds or ["regularizer"])
    for kind, component in components.items():
        if any(entry.name == component for entry in registry.components(kind)):
            owner = registry.get(kind, component).plugin.origin
            raise UsageError(f"{component!r} is already a {kind} of {owner}; choose another name")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty; choose another folder with -o")
    files = render(name, package, components)
    for path, text in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    return [target / path for path in files]


def package_name(name: str) -> str:
    """The Python package of a plugin; UsageError if the name is not usable."""
    if not NAME.fullmatch(name) or not name[0].isalpha():
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        hint = f"; did you mean {near!r}?" if NAME.fullmatch(near) else ""
        raise UsageError(
            f"{name!r} is not a plugin name; use lowercase letters, digits and single hyphens, a letter first{hint}"
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package):
        raise UsageError(f"{name!r} is a Python keyword; choose another name")
    if package in sys.stdlib_module_names or _is_installed(package):
        raise UsageError(f"{name!r} would hide the Python package {package!r}; choose another name")
    return package


def component_names(name: str, kinds: Sequence[str]) -> dict[str, str]:
    """By kind, in the order of a recipe: a single component has the name of its plugin."""
    for kind in kinds:
        if kind not in KINDS:
            hint = did_you_mean(kind, KINDS)
            raise UsageError(f"{kind!r} is not a kind of component{hint} (kinds: {', '.join(KINDS)})")
    chosen = [kind for kind in KINDS if kind in kinds]
    return {kind: name if len(chosen) == 1 else f"{name}-{kind.replace('_', '-')}" for kind in chosen}


def render(name: str, package: str, components: Mapping[str, str]) -> dict[str, str]:
    """The text of each file of the package, by its path."""

    def filled(template: str, **words: str) -> str:
        text = (TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        return text.replace("my-plugin", name).replace("my_plugin", package)

    records = []
    for kind, component in components.items():
        cls, summary = EXAMPLES[kind]
        words = {"kind": kind, "name": component, "class": cls, "summary": summary}
        records.append(filled("component", **words).rstrip("\n"))
    offers = [f"- {kind} `{component}`: {EXAMPLES[kind][1]}" for kind, component in components.items()]
    show = next(f"{kind}/{component}" for kind, component in components.items())
    return {
        "pyproject.toml": filled("pyproject.toml"),
        "README.md": filled("README.md", offers="\n".join(offers), show=show),
        **{
            file: filled(template, file=file, **{**PARTNERS, **components})
            for file, template in _recipes(components).items()
        },
        f"{package}/__init__.py": filled("__init__.py", components="\n".join(records)),
        **{f"{package}/{kind}.py": filled(f"components/{kind}.py") for kind in components},
        "tests/test_plugin.py": filled("test_plugin.py"),
    }


def _recipes(components: Mapping[str, str]) -> dict[str, str]:
    """The recipes of a plugin and their templates: a problem needs one without the sections for images."""
    of_images = any(kind in IMAGE_KEYS for kind in components)
    if "problem" not in components:
        return {"recipe.yaml": "recipe.yaml"}
    if not of_images:
        return {"recipe.yaml": "recipe-problem.yaml"}
    return {"recipe.yaml": "recipe.yaml", "recipe-problem.yaml": "recipe-problem.yaml"}


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder without __init__ does not hide a package
