"""The trained models that come with the toolbox: ``<name>.safetensors`` with a card ``<name>.md``. Without torch.

A card is Markdown for people. Its first lines, between two lines ``---``, are YAML for tables:

    ---
    summary: Colour denoising with ten filters.
    task: denoising
    parameters: 1482
    noise: 25/255
    psnr: 28.9
    levels: 5–50/255
    images: 68 crops of other photographs
    start: noisy colour photographs
    ---

``noise`` is the level of training, ``levels`` are those where the model was measured, ``psnr`` is that on ``images``,
and ``start`` says for what this model is the first to try.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bltoolbox.config.names import LAST_THETA, THETA_FILE
from bltoolbox.config.reading import RECIPE, read_text
from bltoolbox.config.wording import did_you_mean
from bltoolbox.config.yaml_text import Spot, parse
from bltoolbox.errors import MissingError
from bltoolbox.runs.metric import UNDESCRIBED

#: Where they are, in a checkout as in an installed package.
FOLDER = Path(__file__).parent / "weights"


_FACTS = ("task", "parameters", "noise", "levels", "psnr", "images", "start", "summary")
#: What cards give figures of.
QUALITY = UNDESCRIBED


@dataclass(frozen=True)
class Card:
    """The facts about a shipped model on its card; None if missing."""

    name: str
    path: Path
    text: str
    facts: dict[str, Any]

    def fact(self, key: str) -> str:
        value = self.facts.get(key)
        return "–" if value is None else str(value)

    def as_dict(self) -> dict[str, Any]:
        facts = {key: self.facts.get(key) for key in _FACTS}
        return {"name": self.name, "path": str(self.path)} | facts | self.facts


def shipped_models() -> dict[str, Path]:
    """θ files by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.safetensors"))}


def read_card(name: str) -> Card:
    """The card of a shipped model; an empty one if it has none."""
    shipped = shipped_models()
    if name not in shipped:
        raise MissingError(f"no shipped model is named {name!r}{did_you_mean(name, shipped)} (blt models)")
    path = shipped[name].with_suffix(".md")
    text = read_text(path, RECIPE) if path.is_file() else ""
    facts, body = _front_matter(text)
    return Card(name, shipped[name], body, facts)


def find_model(source: Path | str) -> Path:
    """The θ file of a run directory, a θ file, or the one of a shipped model's name."""
    path = Path(source)
    if os.path.isdir(path):
        if not os.access(path, os.R_OK | os.X_OK):
            raise MissingError(f"{path} cannot be read")
        if (theta := path / THETA_FILE).is_file():
            return theta
        if (last := path / LAST_THETA).is_file():
            raise MissingError(
                f"{path}: the run is not finished and has no {THETA_FILE}; its last θ is {last}"
            )
        raise MissingError(f"{path / THETA_FILE}: there is no such θ file")
    if os.path.isfile(path):
        return path
    shipped = shipped_models()
    if str(source) not in shipped:
        named = path.suffix == "" and len(path.parts) == 1
        hint = f"{did_you_mean(str(source), shipped)} (blt models)" if named else ""
        raise MissingError(f"{source}: there is no such run directory, θ file or shipped model{hint}")
    return shipped[str(source)]


def _front_matter(text: str) -> tuple[dict[str, Any], str]:
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (line.strip() for line in lines[1:]):
        return {}, text
    end = [line.strip() for line in lines].index("---", 1)
    facts = parse("\n".join(lines[1:end]), Spot("card")).data
    return (facts if isinstance(facts, dict) else {}), "\n".join(lines[end + 1 :]).strip() + "\n"
