"""Every kind of file that the toolbox reads: an example, how to change what it means, and all that reads it.

A format is added by a row in ``formats``: where the file is, its mutation, and a function that reads the folder as a
user's command would.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mutations as to
import numpy as np
import torch
from conftest import ROOT
from PIL import Image

from bltoolbox import Model, resume, run
from bltoolbox.bilevel.events import Listener
from bltoolbox.config.recipe import Recipe, load_recipe, parse_recipe, recipe_from_dict, recipe_variants
from bltoolbox.config.registry import load_registry
from bltoolbox.reports import writer
from bltoolbox.reports.compare.comparison import as_dict, compare
from bltoolbox.reports.html.build import write_report
from bltoolbox.restoration.pictures.files import read_picture, write_picture
from bltoolbox.restoration.pictures.images import read_header, read_image
from bltoolbox.restoration.pictures.kernels import parse_kernel
from bltoolbox.runs.history import RunHistory, expand, glance
from bltoolbox.runs.watch import Watched
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import resume_in
from bltoolbox.training.resume import reopen
from bltoolbox.training.run_dir import RunDirectory
from bltoolbox.training.sweep.grid import parse_grid
from bltoolbox.training.sweep.plan import Sweep, plan

try:
    import h5py
except ImportError:  # an extra
    h5py = None

REGISTRY = load_registry()
TINY: dict[str, Any] = {
    "data": {"name": "dead-leaves", "count": 4, "size": 12},
    "evaluation": {"name": "dead-leaves", "count": 2, "size": 12, "seed": 7},
    "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
    "lower_solver": {"name": "mm"},
    "sampler": {"size": 2},
    "validation": {"count": 1, "checks": 2},
    "checkpoint": {"every": 0, "keep_finished": True},
    "loggers": [{"name": "csv"}],
    "device": "cpu",
    "iteration_limit": 200,
    "budget": {"steps": 2},
}
#: Other pictures, of which the bytes alone are changed; JPEG 2000 and AVIF where Pillow has them.
OTHER_PICTURES = ("rgb.webp", "rgb.bmp", "rgb.gif", "rgb.ppm", "rgb.jp2", "rgb.avif")
VARIANTS = """
variants:
  short: {upper_optimizer.step: 1e-4, seed: 1}
  all: {sampler: full, upper_optimizer: {name: maid, trials: 7}}
"""
#: What may stand in the text of a recipe.
TEXTS = [
    "name", "size", "foe", "tv", "{", "}", "[", "]", ":", ": ", ",", "\n", "\t", "- ", "&a ", "*a",
    "!!python/object:os.system ", "!", "|", ">", "%", "@", "`", '"', "'", "#", "---", "...", "<<: ", "? ", "null", "~",
    "true", ".nan", ".inf", "-1", "0", "1e999", "9" * 40, "0x", "012", "1/0", "25/255", "\x00", "\ufeff", "\u2028",
    "é", "𝔘", "../../etc/passwd", "os.system", "budget", "steps",
]  # fmt: skip
PIECES = [text.encode() for text in TEXTS]
OVERRIDES = """sampler.size=2
regularizer={name: foe, filters: 3}
budget.steps=5
seed=1
noise=25/255
"""


@dataclass(frozen=True)
class Format:
    """A kind of file, where an example is, and who reads it."""

    name: str
    file: str
    read: Callable[[Path], object]
    #: Changes what the file means; its bytes alone are changed as well.
    meaning: to.Mutation | None = None
    pieces: list[bytes] = field(default_factory=list)
    #: Further examples.
    seeds: list[bytes] = field(default_factory=list)
    #: Cases in the ordinary tests: fewer where reading takes long.
    few: int = 30
    #: Reads the file without the computations that follow; a long campaign does this in most cases.
    brief: Callable[[Path], object] | None = None
    #: Of the cases of a long campaign: fewer where reading takes long.
    share: int = 6


def surroundings(folder: Path) -> None:
    """One example of every file, where it belongs."""
    numbers = np.random.default_rng(0)
    writer.draw, draw = (lambda result, folder: []), writer.draw
    try:
        run(recipe_from_dict(TINY), out=folder / "run")
    finally:
        writer.draw = draw
    (folder / "recipe.yaml").write_bytes((ROOT / "recipes" / "smoke.yaml").read_bytes())
    (folder / "overrides.txt").write_text(OVERRIDES)
    (folder / "pictures").mkdir()
    pixels = numbers.integers(256, size=(12, 14, 3), dtype=np.uint8)
    for name, image in {
        "rgb.png": Image.fromarray(pixels),
        "rgb.jpg": Image.fromarray(pixels),
        "rgb.tif": Image.fromarray(pixels),
        "deep.png": Image.fromarray(pixels[..., 0].astype(np.uint16) * 257),
        "deep.tif": Image.fromarray(pixels[..., 0].astype(np.uint16) * 257),
    }.items():
        image.save(folder / "pictures" / name)
    for name in _supported(OTHER_PICTURES):
        Image.fromarray(pixels).save(folder / "pictures" / name)
    (folder / "variants.yaml").write_text((folder / "recipe.yaml").read_text() + VARIANTS)
    np.save(folder / "inputs.npy", numbers.random((30, 3)))
    np.save(folder / "targets.npy", np.arange(30.0) % 2)
    np.save(folder / "classes.npy", np.arange(4) % 2)
    _write_shaped_theta(folder)
    np.save(folder / "images.npy", numbers.integers(256, size=(4, 12, 12, 3), dtype=np.uint8))
    rows = [f"{i},photo-{i // 2}" for i in range(4)]
    (folder / "images.csv").write_text("\n".join(["index,photograph", *rows, ""]))
    _write_recorded(folder, numbers)
    np.save(folder / "mask.npy", np.eye(12, dtype=bool))
    np.save(folder / "weights.npy", numbers.random((12, 12)))
    np.save(folder / "coils.npy", numbers.random((2, 12, 12)) + 1j)
    np.save(folder / "kernel.npy", np.ones((3, 3)) / 9)
    _write_sweep(folder)


def _supported(names: Sequence[str]) -> list[str]:
    Image.init()
    return [name for name in names if Image.EXTENSION.get(Path(name).suffix) in Image.SAVE]


def _write_shaped_theta(folder: Path) -> None:
    """A model whose parameters belong to images of one size."""
    experiment = assemble(_recipe(data_term="weight-map", lower_solver="agd"), REGISTRY)
    experiment.model(experiment.theta).save(folder / "shaped.safetensors")


def _write_recorded(folder: Path, numbers: np.random.Generator) -> None:
    """Measurements with a mask for each of them, as an array and, where h5py is there, as an HDF5 file."""
    measured = numbers.integers(256, size=(4, 12, 12), dtype=np.uint8)
    masks = numbers.integers(2, size=measured.shape, dtype=np.uint8)
    np.save(folder / "measured.npy", measured)
    np.save(folder / "masks.npy", masks)
    if h5py is not None:
        with h5py.File(folder / "measured.h5", "w") as file:
            file.create_dataset("low", data=measured, chunks=(1, 12, 12), compression="gzip")
            file["masks"] = masks


def _write_sweep(folder: Path) -> None:
    sweep = _sweep(folder)
    (folder / "sweep").mkdir()
    sweep.save()
    shutil.copytree(folder / "run", folder / "sweep" / sweep.cells[0].name)


def _sweep(folder: Path) -> Sweep:
    (folder / "tiny.yaml").write_text(recipe_from_dict(TINY).to_yaml())
    return Sweep(
        folder / "sweep", plan(str(folder / "tiny.yaml"), parse_grid(["seed=0,1"]), REGISTRY), REGISTRY
    )


def read_recipe(folder: Path) -> None:
    _read_back(load_recipe(folder / "recipe.yaml", (), REGISTRY))


def read_variants(folder: Path) -> None:
    path = folder / "variants.yaml"
    for name in [*recipe_variants(path)[:3], "short"]:
        _read_back(load_recipe(path, [f"variant={name}"], REGISTRY))


def read_overrides(folder: Path) -> None:
    words = (folder / "overrides.txt").read_bytes().decode(errors="replace").splitlines()
    text = (folder / "recipe.yaml").read_text()
    _read_back(parse_recipe(text, "recipe.yaml", words, REGISTRY))


def _read_back(recipe: Recipe) -> None:
    assert parse_recipe(recipe.to_yaml(), registry=REGISTRY) == recipe, "a resolved recipe means another run"


def look(folder: Path) -> None:
    """All commands that tell about a run."""
    path = folder / "run"
    history = RunHistory.read(path)
    glance(path, history.recipe)
    Watched(path).look().as_dict()
    write_report([path], folder / "report.html", force=True, images=1, registry=REGISTRY)
    as_dict(compare([history]))


def look_briefly(folder: Path) -> None:
    """The same without pages and tables."""
    path = folder / "run"
    glance(path, RunHistory.read(path).recipe)
    Watched(path).look().as_dict()


def go_on(folder: Path) -> None:
    """All of ``blt resume``, on a copy."""
    draw, writer.draw = writer.draw, (lambda result, folder: [])
    try:
        resume(_copy(folder), ["budget.steps=3"])
    finally:
        writer.draw = draw


class _Enough(Exception):
    """The first step after a checkpoint is done."""


class _OneStep(Listener):
    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        raise _Enough


def go_on_briefly(folder: Path) -> None:
    """``blt resume`` for one step, on a copy."""
    with reopen(_copy(folder), ["budget.steps=3"], REGISTRY) as reopened, contextlib.suppress(_Enough):
        resume_in(reopened.directory, reopened.experiment, [_OneStep()])


def _copy(folder: Path) -> Path:
    place = folder / "copy"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "run", place)
    return place


def begin_again(folder: Path) -> None:
    """``blt run --overwrite`` without the run: what was there is deleted."""
    with RunDirectory(_copy(folder), overwrite=True).begun(_recipe()):
        pass


def begin_again_and_go_on(folder: Path) -> None:
    begin_again(folder)
    go_on(folder)


def look_and_assemble(folder: Path) -> None:
    look(folder)
    assemble(load_recipe(folder / "run" / "resolved.yaml", (), REGISTRY), REGISTRY)


def look_and_assemble_briefly(folder: Path) -> None:
    look_briefly(folder)
    assemble(load_recipe(folder / "run" / "resolved.yaml", (), REGISTRY), REGISTRY)


def look_and_go_on(folder: Path) -> None:
    look(folder)
    go_on(folder)


def look_and_go_on_briefly(folder: Path) -> None:
    look_briefly(folder)
    go_on_briefly(folder)


def read_theta(folder: Path) -> None:
    model = Model.load(folder / "run" / "theta.safetensors", "cpu", REGISTRY)
    model.solve(torch.full((3, 12, 12), 0.5), tol=0.5)
    assemble(_recipe(init=str(folder / "run" / "theta.safetensors")), REGISTRY)


def read_shaped_theta(folder: Path) -> None:
    model = Model.load(folder / "shaped.safetensors", "cpu", REGISTRY)
    model.solve(torch.full((3, 12, 12), 0.5), tol=0.5)


def read_sweep(folder: Path) -> None:
    expand([folder / "sweep"])
    _sweep(folder)


def read_sweep_briefly(folder: Path) -> None:
    """The same with cells that are planned once."""
    expand([folder / "sweep"])
    Sweep(folder / "sweep", copy.deepcopy(_planned(folder)), REGISTRY)


@cache
def _planned(folder: Path) -> Any:
    return plan(str(folder / "tiny.yaml"), parse_grid(["seed=0,1"]), REGISTRY)


def _recipe(**changes: Any) -> Recipe:
    return recipe_from_dict(TINY | changes, registry=REGISTRY)


def read_array(folder: Path) -> None:
    recipe = _recipe(data={"name": "array", "path": str(folder / "images.npy")}, evaluation=None)
    experiment = assemble(recipe, REGISTRY)
    experiment.train.samples.batch(range(len(experiment.train)))


def read_classes(folder: Path) -> None:
    data = {
        "name": "array",
        "path": str(folder / "images.npy"),
        "groups": "none",
        "classes": str(folder / "classes.npy"),
    }
    term = {"name": "least-squares", "learned": True, "classes": 2}
    experiment = assemble(_recipe(data=data, data_term=term, evaluation=None), REGISTRY)
    experiment.train.samples.batch(range(len(experiment.train)))


def read_table(folder: Path) -> None:
    files = {"inputs": str(folder / "inputs.npy"), "targets": str(folder / "targets.npy")}
    for name in ("ridge", "logistic-regression", "softmax-regression"):
        settings = {
            "problem": {"name": name, "data": files, "folds": 2},
            "lower_solver": "lbfgs",
            "sampler": "full",
            "validation": {"metric": "loss"},
            "device": "cpu",
            "budget": {"steps": 1},
        }
        assemble(recipe_from_dict(settings, registry=REGISTRY), REGISTRY)


def read_mask(folder: Path) -> None:
    for name in ("inpainting", "mri"):
        color = "gray" if name == "mri" else "rgb"
        assemble(_recipe(operator={"name": name, "mask": str(folder / "mask.npy")}, color=color), REGISTRY)


def read_weights(folder: Path) -> None:
    term = {"name": "least-squares", "weights": str(folder / "weights.npy")}
    assemble(_recipe(data_term=term, lower_solver="agd"), REGISTRY)


def read_coils(folder: Path) -> None:
    assemble(_recipe(operator={"name": "mri", "coils": str(folder / "coils.npy")}, color="gray"), REGISTRY)


def _read_pairs(measured: str, masks: str) -> None:
    context = [{"key": "mask", "path": masks}]
    recipe = _recipe(
        data={"name": "pairs", "measured": measured, "clean": measured, "context": context},
        operator="inpainting",
        noise=None,
        color="gray",
        evaluation=None,
    )
    experiment = assemble(recipe, REGISTRY)
    experiment.train.samples.batch(range(len(experiment.train)))


def read_recorded(folder: Path) -> None:
    _read_pairs(str(folder / "measured.npy"), str(folder / "masks.npy"))


def read_hdf5(folder: Path) -> None:
    _read_pairs(f"{folder}/measured.h5:/low", f"{folder}/measured.h5:/masks")


def read_kernel(folder: Path) -> None:
    assemble(
        _recipe(operator={"name": "blur", "kernel": parse_kernel(str(folder / "kernel.npy"))["kernel"]}),
        REGISTRY,
    )
    assemble(_recipe(operator={"name": "blur", "kernel": str(folder / "kernel.npy")}), REGISTRY)


def reader_of(name: str) -> Callable[[Path], None]:
    suffix = ".png" if name in OTHER_PICTURES else Path(name).suffix

    def read(folder: Path) -> None:
        path = folder / "pictures" / name
        read_header(path)
        read_image(path, channels=3)
        write_picture(folder / f"written{suffix}", read_picture(path))

    return read


def formats() -> list[Format]:
    """All of them."""
    recipes = [path.read_bytes() for path in sorted((ROOT / "recipes").rglob("*.yaml"))]
    found = [
        Format("recipe", "recipe.yaml", read_recipe, to.of_yaml, PIECES, recipes, few=150),
        Format(
            "variants", "variants.yaml", read_variants, to.of_yaml, [*PIECES, b"variants", b"variant"], few=40
        ),
        Format(
            "overrides",
            "overrides.txt",
            read_overrides,
            None,
            [*PIECES, b"=", b"\na.b.c=1\n", b"\ndata.path=x\n"],
            few=100,
        ),
        Format(
            "resolved",
            "run/resolved.yaml",
            look_and_assemble,
            to.of_yaml,
            PIECES,
            few=12,
            brief=look_and_assemble_briefly,
            share=2,
        ),
        Format(
            "status",
            "run/status.json",
            look_and_go_on,
            to.of_json,
            few=8,
            brief=look_and_go_on_briefly,
            share=1,
        ),
        Format(
            "environment",
            "run/env.json",
            look_and_go_on,
            to.of_json,
            few=8,
            brief=look_and_go_on_briefly,
            share=1,
        ),
        Format("metrics", "run/metrics.jsonl", look, to.of_lines, few=10, brief=look_briefly, share=4),
        Format("timings", "run/timings.jsonl", look, to.of_lines, few=10, brief=look_briefly, share=4),
        Format("checks", "run/checks.jsonl", look, to.of_lines, few=10, brief=look_briefly, share=4),
        Format("pictures of a run", "run/images/evaluation.json", look, to.of_json, few=8, share=2),
        Format(
            "metrics resumed", "run/metrics.jsonl", go_on, to.of_lines, few=6, brief=go_on_briefly, share=1
        ),
        Format(
            "checkpoint",
            "run/checkpoints/state-*.ckpt",
            go_on,
            to.of_checkpoint,
            few=14,
            brief=go_on_briefly,
            share=2,
        ),
        Format(
            "warm starts",
            "run/checkpoints/warm-*.ckpt",
            go_on,
            to.of_checkpoint,
            few=8,
            brief=go_on_briefly,
            share=2,
        ),
        Format("theta", "run/theta.safetensors", read_theta, to.of_safetensors, few=20),
        Format("shaped theta", "shaped.safetensors", read_shaped_theta, to.of_safetensors, few=15, share=4),
        Format("sweep", "sweep/sweep.json", read_sweep, to.of_json, few=8, brief=read_sweep_briefly, share=2),
        Format("array", "images.npy", read_array, to.of_npy, few=30),
        Format("classes", "classes.npy", read_classes, to.of_npy, few=10, share=4),
        Format("table", "inputs.npy", read_table, to.of_npy, few=10, share=4),
        Format("targets", "targets.npy", read_table, to.of_npy, few=10, share=4),
        Format("groups", "images.csv", read_array, to.of_csv, few=15),
        Format("mask", "mask.npy", read_mask, to.of_npy, few=15),
        Format("weights", "weights.npy", read_weights, to.of_npy, few=10, share=4),
        Format("coils", "coils.npy", read_coils, to.of_npy, few=10, share=4),
        Format("recorded", "measured.npy", read_recorded, to.of_npy, few=15, share=4),
        Format("context", "masks.npy", read_recorded, to.of_npy, few=15, share=4),
        Format(
            "list of files",
            "run/files.json",
            begin_again_and_go_on,
            to.of_json,
            few=8,
            brief=begin_again,
            share=2,
        ),
        Format(
            "given recipe", "run/recipe.yaml", look, to.of_yaml, PIECES, few=8, brief=look_briefly, share=2
        ),
        Format("log", "run/log.txt", look_and_go_on, None, few=6, brief=look_briefly, share=2),
        Format("figures", "run/figures.csv", go_on, to.of_csv, few=8, brief=go_on_briefly, share=1),
        Format("kernel", "kernel.npy", read_kernel, to.of_npy, few=20, share=8),
    ]
    if h5py is not None:
        found.append(Format("hdf5", "measured.h5", read_hdf5, to.of_hdf5, few=20, share=8))
    meanings = {".png": to.of_png, ".tif": to.of_tiff, ".jpg": to.of_jpeg}
    for name in ("rgb.png", "deep.png", "rgb.tif", "deep.tif", "rgb.jpg"):
        found.append(Format(name, f"pictures/{name}", reader_of(name), meanings[Path(name).suffix], share=8))
    for name in _supported(OTHER_PICTURES):
        found.append(Format(name, f"pictures/{name}", reader_of(name), few=15, share=4))
    return found
