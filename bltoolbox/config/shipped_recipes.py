"""The recipes that come with the toolbox, and how a recipe is found by name."""

from __future__ import annotations

from pathlib import Path

from bltoolbox.config.reading import read_start
from bltoolbox.config.wording import did_you_mean
from bltoolbox.errors import UsageError

#: Bytes at the beginning of a recipe that are searched for its first comment.
_SUMMARY = 2**14


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the toolbox, by name: ``denoise``, …, then those in folders, ``paper/…``."""
    package = Path(__file__).parents[1]
    folders = [package / "recipes"]
    if (package.parent / "pyproject.toml").is_file():  # a checkout
        folders.append(package.parent / "recipes")
    paths: dict[str, Path] = {}
    for folder in folders:
        for path in folder.rglob("*.yaml"):
            paths.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return dict(sorted(paths.items(), key=lambda entry: ("/" in entry[0], entry[0])))


def recipe_summary(path: Path) -> str:
    """The first comment of a recipe that is meant for people."""
    for line in read_start(path, _SUMMARY).decode("utf-8-sig", "replace").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("#").strip()
        if text and not text.startswith("yaml-language-server:"):
            return text
    return ""


def find_recipe(source: str | Path) -> Path:
    """A file, or the shipped recipe of that name."""
    path = Path(source)
    if path.exists() and not path.is_dir():
        return path
    shipped = shipped_recipes()
    if str(source) in shipped:
        return shipped[str(source)]
    if path.is_dir():
        raise UsageError(f"recipe {source} is a folder; give a file in it")
    hint = did_you_mean(path.with_suffix("").name, shipped)
    raise UsageError(f"recipe {source} does not exist, and no shipped recipe has this name{hint}")
