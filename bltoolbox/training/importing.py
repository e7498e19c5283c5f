"""Models of other authors, from their PyTorch checkpoints.

A checkpoint is read like one of our own: within limits, checked before ``torch.load`` sees it, and with
``weights_only=True``, so that nothing in it executes. What its tensors mean is up to the regularizer that takes them
(``from_published``); the result is a θ file with the recipe of a gray denoiser, which ``Model.load``, ``blt apply`` and
``blt evaluate`` use like any other.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bltoolbox.config.reading import CHECKPOINT, read_bytes, read_json
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.config.registry import Registry
from bltoolbox.errors import BltError
from bltoolbox.restoration.theta_file import encode
from bltoolbox.training.payload import PayloadError, check_payload

#: The regularizer that published models are converted to.
REGULARIZER = "spline-ridge"


def import_model(
    form: str,
    path: Path,
    registry: Registry,
    *,
    config: Path | None = None,
    noise: float | None = None,
    boundary: str = "symmetric",
) -> tuple[bytes, Recipe]:
    """The θ file of a published model, and its recipe."""
    tensors, settings = read_published(path, config)
    component = registry.get("regularizer", REGULARIZER).load()
    try:
        published = component.from_published(form, tensors, settings, noise)
    except ValueError as error:
        raise BltError(f"{path} is not a {form} model: {error}") from error
    options = published.options | {"boundary": boundary}
    recipe = _recipe(options, published.noise, registry)
    theta = {f"regularizer.{name}": value.float() for name, value in published.theta.items()}
    return encode(theta, recipe), recipe


def read_published(path: Path, config: Path | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint by name, and the settings of its authors.

    Settings are those in ``config``, in the checkpoint, or in a config.json beside it or in the folder above, where the
    authors keep it; none where there is no such file, and what is needed of them is then refused by name.
    """
    try:
        payload = read_bytes(path, CHECKPOINT)
        check_payload(payload)
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except PayloadError as error:
        raise BltError(f"{path} is refused: {error}") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        if isinstance(error, BltError):
            raise
        reason = str(error).partition("\n")[0]
        raise BltError(f"{path} is not a checkpoint of tensors ({reason})") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise BltError(f"{path} contains no state_dict, so it is not a checkpoint of a model")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    # Views may show one number many times over; the limits of a model are checked with it.
    return tensors, _settings(path, config, content)


def _settings(path: Path, config: Path | None, content: Mapping[str, Any]) -> dict[str, Any]:
    places = [path.parent / "config.json", path.parent.parent / "config.json"] if config is None else [config]
    if config is None and isinstance(content.get("config"), dict):
        return dict(content["config"])
    for place in places:
        if config is not None or place.is_file():
            try:
                settings = read_json(place)
            except ValueError as error:
                if isinstance(error, BltError):
                    raise
                raise BltError(f"{place} is not a JSON file ({error})") from error
            if not isinstance(settings, dict):
                raise BltError(f"{place} does not contain the settings of a model")
            return settings
    return {}


def _recipe(options: Mapping[str, Any], noise: float, registry: Registry) -> Recipe:
    """That of gray denoising; its sections for training are what a continued training would start from."""
    settings = {
        "color": "gray",
        "data": {"name": "dead-leaves", "count": 272, "size": 96},
        "evaluation": {"name": "photos"},
        "noise": noise,
        "regularizer": {"name": REGULARIZER, **options},
        "lower_solver": {"name": "agd"},
        "hypergradient": {"name": "cg-ift"},
        "sampler": {"name": "epoch", "size": 16},
        "upper_optimizer": {"name": "iadam"},
        "budget": {"steps": 100},
    }
    return recipe_from_dict(settings, registry=registry)
