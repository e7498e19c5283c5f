"""``blt apply``: restore picture files with a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, MetricNames, Plugins, open_registry, print_json, say
from bltoolbox.cli.completion import complete_model
from bltoolbox.cli.display.pictures import display, picture_line, print_table
from bltoolbox.distributed.signals import Interrupted
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.cli.display.pictures import Display
    from bltoolbox.config.registry import Registry
    from bltoolbox.restoration.apply import Outcome
    from bltoolbox.restoration.metrics import ImageMetric
    from bltoolbox.restoration.model import Model
    from bltoolbox.restoration.pictures.jobs import Job
    from bltoolbox.restoration.tiles import Restorer


ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run directory, a θ file or a name from blt models.",
        autocompletion=complete_model,
    ),
]
Inputs = Annotated[list[str], typer.Argument(metavar="INPUT...", help="Pictures, folders or patterns.")]
Out = Annotated[
    str | None,
    typer.Option(
        "--out", "-o", metavar="OUT", help="A folder, or a file for one picture; default beside the input."
    ),
]
NoiseLevel = Annotated[
    str | None,
    typer.Option(metavar="S", help="25/255, 0.1, 25 (of 255), auto (default) or model (its own)."),
]
Truth = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Ground truth, a file or a folder; prints the metrics.")
]
OperatorName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Replace the operator that the model was trained with.")
]
Kernel = Annotated[
    str | None, typer.Option(metavar="K", help="Blur kernel: FILE.npy, a picture or gaussian:SIGMA[:SIZE].")
]
Mask = Annotated[
    str | None,
    typer.Option(metavar="M", help="Missing pixels: FILE.npy with zeros there, or a picture, dark there."),
]
Factor = Annotated[
    int | None, typer.Option(metavar="F", min=1, help="Downsampling: times the result is larger.")
]
Tolerance = Annotated[
    float | None,
    typer.Option(metavar="T", help="Accuracy: RMS distance to the minimiser; default by noise and bits."),
]
TileSize = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tile size for large pictures; default 768.")
]
Device = Annotated[str, typer.Option(metavar="D", help="auto, cpu, cuda or cuda:1.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing results.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the table, no progress.")]


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("apply", rich_help_panel="Use")(apply)


def apply(
    model: ModelSource,
    inputs: Inputs,
    out: Out = None,
    noise: NoiseLevel = None,
    truth: Truth = None,
    metric: MetricNames = "psnr,ssim",
    operator: OperatorName = None,
    kernel: Kernel = None,
    mask: Mask = None,
    factor: Factor = None,
    tol: Tolerance = None,
    tile: TileSize = None,
    device: Device = "auto",
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Restore pictures with a trained model.

    For example: blt apply denoise-color photo.jpg, or blt apply runs/denoise "scans/*.tif" -o restored/

    The noise level is estimated from each picture unless --noise gives it; --noise model takes the one that the model
    was trained with.

    Pictures with other faults: --kernel for a blur, --mask for missing pixels, --factor for a larger picture.

    Reads PNG, JPEG, TIFF and WebP of any size, gray or colour, with transparency, a palette, CMYK or 16 bits. A result
    keeps the format, bit depth, mode and metadata of its input and is named <name>-restored. Pictures larger than a
    tile are restored in overlapping tiles, in bounded memory and without seams.

    A file that cannot be restored is reported, and the others are still restored; the exit code is then 1. It is 2 if
    all results already exist, and 4 if the model or the device is missing.
    """
    from bltoolbox.restoration.metrics import pick_listed
    from bltoolbox.restoration.noise_level import parse_noise
    from bltoolbox.restoration.shipped import find_model

    find_model(model)
    metrics = pick_listed(metric)
    level = parse_noise(noise)
    if tol is not None and not 0 < tol < 1:
        raise UsageError(f"--tol {tol:g} is out of range; give a number between 0 and 1")
    options = _operator_options(kernel, mask, factor)
    jobs, notes = _jobs(inputs, out, force, truth)
    registry = open_registry(plugin, warn=not as_json)
    talk = not quiet and not as_json
    with display(talk) as shown:
        shown.say(f"loading {model}")
        loaded = _load(model, device, operator, options, registry)
        restorer = _restorer(loaded, tol, tile)
        if talk:
            for note in [*notes, *_headline(loaded, noise, level)]:
                shown.message(note)
        outcomes = _restore_all(jobs, restorer, level, (truth, metrics), shown, talk)
    _report(model, outcomes, metrics if truth is not None else (), as_json)


def _operator_options(kernel: str | None, mask: str | None, factor: int | None) -> dict[str, dict[str, Any]]:
    """What the options say about operators, by the operator they belong to."""
    from bltoolbox.restoration.pictures.kernels import parse_kernel

    return {
        "blur": parse_kernel(kernel) if kernel is not None else {},
        "inpainting": {"mask": mask} if mask is not None else {},
        "downsampling": {"factor": factor} if factor is not None else {},
    }


def _jobs(
    inputs: Sequence[str], out: str | None, force: bool, truth: Path | None
) -> tuple[list[Job], list[str]]:
    """The pictures to restore, and notes about those that are left out."""
    from bltoolbox.restoration.pictures.jobs import plan

    if truth is not None and not truth.exists():
        raise UsageError(f"--truth: {truth} does not exist; give a file or a folder")
    jobs, notes = plan(inputs, out, force)
    if truth is not None and truth.is_file() and len(jobs) > 1:
        raise UsageError(f"--truth {truth} is one file, but there are {len(jobs)} pictures; give a folder")
    if all(job.refused for job in jobs):
        raise UsageError("; ".join(job.trouble for job in jobs))
    return jobs, notes


def _report(model: str, outcomes: Sequence[Outcome], metrics: Sequence[ImageMetric], as_json: bool) -> None:
    """The table or the JSON text; the exit code is 1 if a picture failed."""
    restored = sum(outcome.status == "restored" for outcome in outcomes)
    failed = sum(outcome.error is not None for outcome in outcomes)
    if as_json:
        pictures = [outcome.as_dict() for outcome in outcomes]
        print_json({"model": model, "restored": restored, "failed": failed, "pictures": pictures})
    elif restored:
        print_table(outcomes, metrics)
    if failed:
        compared = restored + failed - len(outcomes)
        also = f", {compared} of them only in the comparison with --truth" if compared else ""
        say(f"{failed} of {len(outcomes)} pictures failed{also}")
        raise typer.Exit(1)


#: The option that says what an operator does to pictures, by a parameter that the operator has.
_WANTED = {
    "kernel": "a kernel: --kernel FILE.npy, a picture or gaussian:SIGMA[:SIZE]",
    "missing": "the missing pixels: --mask FILE.npy, or a picture that is dark there",
}


def _load(
    source: str,
    device: str,
    operator: str | None,
    options: Mapping[str, dict[str, Any]],
    registry: Registry,
) -> Model:
    """The model, with the operator that the options describe; ``options`` are by the operator they belong to."""
    from bltoolbox.restoration.model import Model, replace_operator

    model = Model.load(source, device=device, registry=registry)
    given = {name: option for name, option in options.items() if option}
    if len(given) > 1:
        raise UsageError("--kernel, --mask and --factor belong to different operators; give one of them")
    belongs, chosen = next(iter(given.items()), (None, {}))
    own = model.recipe.operator
    name = operator or belongs or own.name
    known = [one.name for one in registry.get("operator", name).signature().parameters]
    if operator is None and belongs is None:
        if "missing" in known and own.options.get("mask") is None:
            raise UsageError(f"operator {name!r} of the model needs {_WANTED['missing']}")
        return model
    if chosen and not set(chosen) <= set(known):
        what = {"blur": "kernel", "inpainting": "mask", "downsampling": "factor"}[belongs or ""]
        raise UsageError(f"operator {name!r} has no {what}")
    if "seed" in known and "mask" not in chosen:
        needs = f"; it needs {_WANTED['missing']}" if "missing" in known else ""
        raise UsageError(
            f"operator {name!r} measures at random positions, which a picture file does not contain{needs}"
        )
    if not chosen and "kernel" in known:
        raise UsageError(f"operator {name!r} needs {_WANTED['kernel']}")
    return replace_operator(model, {"name": name} | chosen, registry)


def _restorer(model: Model, tol: float | None, tile: int | None) -> Restorer:
    from bltoolbox.restoration.tiles import Restorer

    return Restorer(model, tol=tol, tile=tile, estimates=True)


def _headline(model: Model, noise: str | None, level: float | str | None) -> Iterator[str]:
    from bltoolbox.restoration.noise_level import show_noise, show_training_noise

    colours = "gray" if model.channels == 1 else "colour"
    yield (
        f"model: {model.recipe.regularizer.name} of {model.size} parameters, {colours}, operator"
        f" {model.recipe.operator.name}, trained for"
        f" {show_training_noise(model.recipe.noise, model.problem.noise_level)};"
        f" on {next(iter(model.theta.values())).device}"
    )
    if isinstance(level, float) and noise is not None and "/" not in noise and float(noise) > 1:
        yield f"noise {noise} is above 1; using {show_noise(level)}"


def _restore_all(
    jobs: Sequence[Job],
    restorer: Restorer,
    noise: float | str | None,
    compared: tuple[Path | None, Sequence[ImageMetric]],
    shown: Display,
    talk: bool,
) -> list[Outcome]:
    from bltoolbox.restoration.apply import apply_to
    from bltoolbox.restoration.pictures.jobs import count_pixels

    shown.weights = [0 if job.trouble else count_pixels(job.source) for job in jobs]
    outcomes: list[Outcome] = []
    try:
        for index, job in enumerate(jobs):
            outcome = apply_to(job, restorer, noise, *compared, shown.picture(index, job.source.name))
            outcomes.append(outcome)
            if talk and outcome.status == "restored":
                shown.message(picture_line(outcome, accuracy=restorer.tol is not None))
            if outcome.error is not None:
                shown.message(f"error: {outcome.error}")
    except (KeyboardInterrupt, Interrupted):
        shown.message(
            f"interrupted: {len(outcomes)} of {len(jobs)} pictures are done, and the others untouched"
        )
        raise
    return outcomes
