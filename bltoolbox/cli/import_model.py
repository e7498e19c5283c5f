"""``blt import``: models of other authors from their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say
from bltoolbox.errors import UsageError


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("import", rich_help_panel="Use")(import_)


def import_(
    form: Annotated[Literal["crr", "wcrr"], typer.Argument(metavar="FORMAT", help="crr or wcrr.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A PyTorch checkpoint of the authors.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="MODEL", help="The .safetensors file to write.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="The authors' config.json; default: in or beside the checkpoint."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(metavar="S", help="The noise level of the model, e.g. 25/255; default its config's."),
    ] = None,
    boundary: Annotated[
        Literal["symmetric", "zero", "periodic", "valid"],
        typer.Option(metavar="NAME", help="symmetric (mirrored), zero, periodic or valid."),
    ] = "symmetric",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Convert a public CRR or WCRR model to a model of bltoolbox.

    For example: blt import wcrr checkpoint_6000.pth -o wcrr.safetensors --noise 15/255

    Reads checkpoints of the convex (Goujon et al. 2023) and weakly convex (Goujon et al. 2024) ridge regularizers
    as their authors' code writes them; nothing in the file is executed. The result is a denoiser for gray images: use
    it with blt apply, blt evaluate or Model.load, e.g. blt apply wcrr.safetensors photo.png

    The authors pad with zeros, which darkens borders; --boundary zero comes closest to that.
    """
    from bltoolbox.config.names import refuse_unusable_name
    from bltoolbox.restoration.model import Model
    from bltoolbox.runs.files import write_bytes
    from bltoolbox.training.importing import import_model

    if out.suffix != ".safetensors":
        raise UsageError(f"{out}: a model is a .safetensors file")
    refuse_unusable_name(out)
    if out.exists() and not force:
        raise UsageError(f"{out} exists; choose another name, or replace it with --force")
    level = None if noise is None else _level(noise)
    registry = open_registry(plugin)
    content, recipe = import_model(form, file, registry, config=config, noise=level, boundary=boundary)
    write_bytes(out, content)
    model = Model.load(out, device="cpu", registry=registry)
    assert model.problem.noise is not None and model.problem.noise.level is not None
    sigma, options = model.problem.noise.level, recipe.regularizer.options
    filters, size = options["filters"], options["kernel_size"]
    if as_json:
        facts = {"filters": filters, "kernel_size": size, "noise": sigma, "parameters": model.size}
        print_json({"model": str(out)} | facts)
        return
    say(
        f"{out} written: {filters} filters of {size}×{size}, {model.size:,} parameters, σ = {255 * sigma:.3g}/255;"
        f" restore with blt apply {out} PICTURE"
    )


def _level(text: str) -> float:
    from bltoolbox.restoration.noise_level import parse_noise

    level = parse_noise(text)
    if not isinstance(level, float):
        raise UsageError(f"--noise {text} is not a level; give one, e.g. 25/255")
    return level
