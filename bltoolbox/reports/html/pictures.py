"""Pictures for the report: restored evaluation images, and the pictures of θ.

A finished run leaves its evaluation images in ``images/`` (measured, baseline, learned, true), so that a page can
be made without computing anything. If they are missing, a few images are restored with the available θ.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bltoolbox.config.names import BEST_THETA, LAST_THETA, PICTURES, PICTURES_INDEX, THETA_FILE, THETAS
from bltoolbox.config.problem_keys import is_of_images
from bltoolbox.config.reading import REPORT_IMAGES, read_bytes
from bltoolbox.errors import BltError, MissingError
from bltoolbox.restoration.metrics import UNIT, Range
from bltoolbox.runs.files import write_bytes, write_json
from bltoolbox.runs.history import RunHistory
from bltoolbox.runs.logs import read_index
from bltoolbox.runs.metric import UNDESCRIBED, Metric

if TYPE_CHECKING:
    from torch import Tensor

    from bltoolbox.config.registry import Registry
    from bltoolbox.restoration.evaluation import Restored
    from bltoolbox.restoration.model import Model
    from bltoolbox.restoration.results import RunResult

#: Larger images are cut to their middle in the page, and are not restored for it.
MAX_SIDE = 384
_MAX_RESTORED = 512 * 512
#: The key of an image, its values and its metrics.
_State = tuple[str, "Tensor", Mapping[str, float]]
_SAFE = re.compile(r"evaluation-\d+-[a-z]+\.png")


@dataclass(frozen=True)
class Variant:
    """One state of an image."""

    key: str
    name: str
    png: bytes = field(repr=False)
    #: Metrics by name; none of the true image.
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scene:
    """One evaluation image in all its states."""

    label: str
    width: int
    height: int
    variants: list[Variant]


@dataclass(frozen=True)
class Map:
    """What the operator or the data term shows of θ."""

    caption: str
    #: What black and white mean.
    scale: str
    images: list[bytes] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Learned:
    """What the components show of θ: filters of the regularizer, and maps of the others."""

    filters: list[bytes] = field(default_factory=list, repr=False)
    weights: list[float] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    potentials: list[list[float]] = field(default_factory=list, repr=False)
    maps: list[Map] = field(default_factory=list)


@dataclass(frozen=True)
class Pictures:
    """All pictures of one run, and why any are missing."""

    scenes: list[Scene] = field(default_factory=list)
    learned: Learned = Learned()
    notes: list[str] = field(default_factory=list)


def keep_scenes(result: RunResult, folder: Path) -> None:
    """Write the evaluation images of a finished run to its directory."""
    index = []
    for number, scene in enumerate(_scenes(result)):
        files = []
        for variant in scene.variants:
            name = f"evaluation-{number}-{variant.key}.png"
            write_bytes(folder / PICTURES / name, variant.png, within=folder)
            files.append({"key": variant.key, "name": variant.name, "file": name, **variant.values})
        index.append({"label": scene.label, "width": scene.width, "height": scene.height, "variants": files})
    if index:
        write_json(folder / PICTURES_INDEX, index, within=folder)


def collect(
    run: RunHistory, images: int, registry: Registry | None = None, model: Model | None = None
) -> Pictures:
    """The pictures of a run; missing or broken ones are not fatal, and a run that is not about images has none."""
    if not is_of_images(run.recipe):
        return Pictures()
    notes: list[str] = []
    scenes = read_scenes(run.path, run.metrics)[:images]
    try:
        model = model or load_model(run, registry)
    except BltError as error:
        return Pictures(scenes, notes=[f"the learned parameters cannot be shown: {error}"])
    if not scenes and images and run.recipe.get("evaluation") is not None:
        try:
            scenes = _restore(run, model, images, registry)
        except Exception as error:  # θ may have another shape than its recipe requires
            notes.append(f"the evaluation images cannot be shown: {error}")
    try:
        learned = show_learned(model)
    except Exception as error:  # a plugin's own method, on which a page must not depend
        learned = Learned()
        notes.append(f"the learned parameters cannot be shown: {type(error).__name__}: {error}")
    return Pictures(scenes, learned, notes)


def read_scenes(folder: Path, metrics: Sequence[Metric] = (UNDESCRIBED,)) -> list[Scene]:
    """The images that a run has left, with their metrics; none if they are missing or damaged."""
    try:
        index = read_index(folder)
        _check_total(folder, [str(variant["file"]) for scene in index for variant in scene["variants"]])
        return [
            Scene(
                str(scene["label"]),
                int(scene["width"]),
                int(scene["height"]),
                [_read_variant(folder, variant, metrics) for variant in scene["variants"]],
            )
            for scene in index
        ]
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return []


def _read_variant(folder: Path, entry: dict[str, Any], metrics: Sequence[Metric]) -> Variant:
    name = str(entry["file"])
    if not _SAFE.fullmatch(name):
        raise ValueError(f"{name} is not a picture of a run")
    png = read_bytes(folder / PICTURES / name, REPORT_IMAGES, follow=False)
    names = [metric.name for metric in metrics]
    values = {name: float(entry[name]) for name in names if entry.get(name) is not None}
    return Variant(str(entry["key"]), str(entry["name"]), png, values)


def _check_total(folder: Path, names: Sequence[str]) -> None:
    """An index may name the same file a million times."""
    total = 0
    for name in names:
        total += os.lstat(folder / PICTURES / name).st_size
        REPORT_IMAGES.check(folder / PICTURES_INDEX, total)


def load_model(run: RunHistory, registry: Registry | None) -> Model:
    """From the θ that the run chose, or the newest available."""
    from bltoolbox.restoration.model import Model

    named = [run.path / name for name in (THETA_FILE, BEST_THETA, LAST_THETA)]
    kept = sorted((run.path / THETAS).glob("*.safetensors"), reverse=True)
    last: BltError = MissingError("there is no θ yet")
    for path in (*named, *kept):
        if path.is_file() and not path.is_symlink():
            try:
                return Model.load(path, "cpu", registry)
            except BltError as error:
                last = error
            except Exception as error:  # whatever a damaged file leads to
                last = BltError(f"{path}: {type(error).__name__}: {error}")
    raise last


def _restore(run: RunHistory, model: Model, images: int, registry: Registry | None) -> list[Scene]:
    from bltoolbox.config.registry import load_registry
    from bltoolbox.restoration.evaluation import evaluate
    from bltoolbox.restoration.from_recipe import evaluation_samples

    registry, recipe = registry or load_registry(), replace(model.recipe, device="cpu")
    samples = evaluation_samples(recipe, model.problem, registry)
    if samples.shape[-1] * samples.shape[-2] > _MAX_RESTORED:
        raise BltError(f"they have {samples.shape[-2]}×{samples.shape[-1]} pixels, too many for a page")
    evaluation = evaluate(
        model.problem,
        model.theta,
        samples,
        model.solver,
        tol=model.recipe.evaluation_tol,
        limit=model.recipe.iteration_limit,
        metrics=[run.metric.name],
        positions=range(min(images, len(samples))),
        keep=images,
    )
    scenes = []
    for number, image in enumerate(evaluation.images):
        start, learned = evaluation.values_of(number)
        variants = [("measured", image.start, start), ("learned", image.x, learned), *_true(image)]
        scenes.append(_scene(evaluation.labels[number], variants, {}, evaluation.range))
    return scenes


def _scenes(result: RunResult) -> list[Scene]:
    evaluation, baseline = result.evaluation, result.baseline
    if evaluation is None:
        return []
    block = result.model.recipe.baseline
    names = {"baseline": f"{block.name}, tuned"} if block else {}
    scenes = []
    variants: list[_State]
    for number, restored in enumerate(evaluation.images):
        start, learned = evaluation.values_of(number)
        variants = [("measured", restored.start, start)]
        if baseline is not None and number < len(baseline.images):
            variants.append(("baseline", baseline.images[number].x, baseline.values_of(number)[1]))
        variants += [("learned", restored.x, learned), *_true(restored)]
        scenes.append(_scene(evaluation.labels[number], variants, names, evaluation.range))
    return scenes


def _true(restored: Restored) -> list[_State]:
    return [] if restored.x_true is None else [("clean", restored.x_true, {})]


def _scene(label: str, variants: Sequence[_State], names: dict[str, str], span: Range) -> Scene:
    made = [
        Variant(
            key, names.get(key, {"clean": "true"}.get(key, key)), encode_png(_middle(image), span), values
        )
        for key, image, values in variants
    ]
    height, width = _middle(variants[-1][1]).shape[-2:]
    return Scene(label, width, height, made)


def _middle(image: Tensor) -> Tensor:
    """At most ``MAX_SIDE`` pixels each way."""
    top, left = (max(0, (side - MAX_SIDE) // 2) for side in image.shape[-2:])
    return image[..., top : top + MAX_SIDE, left : left + MAX_SIDE]


def show_learned(model: Model) -> Learned:
    """Filters, their weights and their potentials, if the regularizer has any; pictures of the other roles."""
    from bltoolbox.restoration.shown_parameters import shown_filters, shown_parameters

    pictures = shown_filters(model.problem, model.prepared)
    potentials = model.problem.regularizer.potentials(model.prepared["regularizer"])
    maps = [
        Map(picture.caption, picture.scale, [encode_png(image) for image in picture.shades])
        for picture in shown_parameters(model.problem, model.prepared)
    ]
    learned = Learned(maps=maps)
    if pictures is not None:
        kernels = pictures.detach().cpu().double()
        scaled = [0.5 + 0.5 * kernel / kernel.abs().max().clamp_min(1e-12) for kernel in kernels]
        learned = replace(learned, filters=[encode_png(kernel) for kernel in scaled])
    if potentials is not None:
        learned = replace(
            learned,
            weights=[float(f"{value:.5g}") for value in potentials.weights.detach().flatten().tolist()],
            places=[float(f"{value:.5g}") for value in potentials.t.detach().tolist()],
            potentials=[
                [float(f"{value:.5g}") for value in row] for row in potentials.values.detach().tolist()
            ],
        )
    return learned


def encode_png(image: Tensor, span: Range = UNIT) -> bytes:
    """(C, H, W) with values in ``span``; with other than one or three channels, the norm over channels."""
    import numpy as np
    from PIL import Image

    from bltoolbox.restoration.layout import to_unit

    picture = image.detach().cpu().double().nan_to_num(span[0])
    if picture.shape[0] not in (1, 3):
        picture = picture.square().sum(0, keepdim=True).sqrt()
        span = (0.0, max(map(abs, span)))
    values = (to_unit(picture, span) * 255).round().permute(1, 2, 0).numpy().astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values.squeeze(2) if values.shape[2] == 1 else values).save(
        buffer, "PNG", compress_level=3
    )
    return buffer.getvalue()


def data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
