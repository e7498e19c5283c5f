"""Every command that reads a run directory, against every kind of damage: a sentence and an exit code, never a bug."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import caller
from PIL import Image
from safetensors.torch import load, save

from bltoolbox import run
from bltoolbox.config.recipe import load_recipe
from bltoolbox.runs.files import write_json
from bltoolbox.training.checkpoint import read_checked, write_checked

RECIPE = """\
data: {name: dead-leaves, count: 6, size: 16}
evaluation: {name: dead-leaves, count: 1, size: 16, seed: 5}
regularizer: {name: foe, filters: 2, kernel_size: 3}
sampler: {size: 4}
validation: {count: 2, checks: 2}
checkpoint: {every: 0, keep_finished: true}
budget: {steps: 3}
evaluation_tol: 1e-2
"""

DIGITS = "9" * 5000
DEEP = "[" * 100_000
LATIN = b"caf\xe9 \xff\xfe\x00"

Damage = Callable[[Path], None]
Copy = Callable[[], tuple[Path, Path]]


def text(name: str, content: str | bytes) -> Damage:
    def damage(run: Path) -> None:
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def missing(name: str) -> Damage:
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def folder(name: str) -> Damage:
    """A folder where a file should be."""

    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return damage


def cut(name: str, share: float = 0.5) -> Damage:
    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: int(share * len(content))])

    return damage


def entry(name: str, **changes: Any) -> Damage:
    """JSON objects with some entries of another type."""

    def damage(run: Path) -> None:
        path = run / name
        lines = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
        path.write_text("".join(json.dumps(json.loads(line) | changes) + "\n" for line in lines))

    return damage


def theta(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **metadata: str) -> Damage:
    """Every θ file of the run, its tensors changed."""

    def damage(run: Path) -> None:
        for path in run.rglob("*.safetensors"):
            raw = path.read_bytes()
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            known = header["__metadata__"] | metadata
            path.write_bytes(save(change(load(raw)), {key: one for key, one in known.items() if one}))

    return damage


def checkpoint(change: Callable[[dict[str, Any]], Any], kind: str = "state") -> Damage:
    """Every checkpoint of the run, its content changed and its checksum right."""

    def damage(run: Path) -> None:
        for path in (run / "checkpoints").glob(f"{kind}-*.ckpt"):
            write_checked(path, change(read_checked(path)))

    return damage


def inside(**changes: Any) -> Damage:
    """Manifests whose state of the run has some entries of another type."""

    def change(content: dict[str, Any]) -> Any:
        state = content["content"]
        return content | {"content": state | {"run": state["run"] | changes}}

    return checkpoint(change)


def without(content: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != key}


def first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., dict[str, torch.Tensor]]:
    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = min(tensors)
        return tensors | {name: change(tensors[name])}

    return changed


JSON_TYPES = {
    "list": "[1]",
    "number": "3",
    "string": '"fine"',
    "null": "null",
    "broken": "{",
    "latin": LATIN,
    "empty": "",
    "digits": f'{{"steps": {DIGITS}}}',
    "deep": DEEP,
}
LINES = {
    "list": "[1]\n" * 3,
    "latin": LATIN,
    "empty": "",
    "digits": f'{{"step": {DIGITS}}}\n',
    "deep": DEEP,
    "scalars": '1\n"a"\nnull\n',
}

DAMAGES: dict[str, Damage] = {
    **{
        f"{file} {kind}": text(file, content)
        for file in ("status.json", "env.json", "images/evaluation.json")
        for kind, content in JSON_TYPES.items()
    },
    **{
        f"{file} {kind}": text(file, content)
        for file in ("metrics.jsonl", "timings.jsonl", "checks.jsonl")
        for kind, content in LINES.items()
    },
    **{
        f"{file} {how.__name__}": how(file)
        for how in (missing, folder)
        for file in (
            "status.json",
            "env.json",
            "recipe.yaml",
            "resolved.yaml",
            "metrics.jsonl",
            "timings.jsonl",
            "checks.jsonl",
            "log.txt",
            "theta.safetensors",
            "images/evaluation.json",
            "lock",
        )
    },
    **{
        f"{file} {kind}": text(file, content)
        for file in ("recipe.yaml", "resolved.yaml")
        for kind, content in {
            "latin": LATIN,
            "empty": "",
            "list": "[1, 2]",
            "number": "3",
            "digits": f"seed: {DIGITS}",
            "hexadecimal": f"seed: 0x{'f' * 5000}",
            "deep": DEEP,
            "budget": "budget: 3",
        }.items()
    },
    "checkpoints missing": missing("checkpoints"),
    "thetas missing": missing("thetas"),
    "images missing": missing("images"),
    **{
        f"{file} cut": cut(file)
        for file in (
            "metrics.jsonl",
            "timings.jsonl",
            "checks.jsonl",
            "log.txt",
            "status.json",
            "env.json",
            "resolved.yaml",
            "theta.safetensors",
            "images/evaluation.json",
            "images/evaluation-0-clean.png",
        )
    },
    "log.txt latin": text("log.txt", LATIN * 100),
    "status entries": entry(
        "status.json",
        status=3,
        steps="many",
        seconds={},
        psnr_after=[],
        theta_size="x",
        theta=[1],
        finished=0,
    ),
    "status finished": entry(
        "status.json",
        status=["x"],
        steps=-1e300,
        seconds=-5,
        psnr_after="24",
        computations=None,
        finished="y",
    ),
    "status huge": entry("status.json", steps=10**400, seconds=10**400, theta_size=10**400),
    "env entries": entry("env.json", recipe=5, bltoolbox=[], images=[1], command=7, device_name={}, git=3),
    "env images": entry("env.json", images={"training": 5, "validation": [], "evaluation": None}),
    "env version": entry("env.json", bltoolbox=DIGITS),
    "env recipe": entry("env.json", recipe="a/../b\n\x1b[31m" + "x" * 300),
    "metrics steps": entry("metrics.jsonl", step=10**400, loss="low", computations=[]),
    "metrics negative": entry("metrics.jsonl", step=-7, loss=None, computations=-1e308, batch=0),
    "metrics types": entry("metrics.jsonl", step=True, loss={}, computations="x", tol=[], batch="a"),
    "timings types": entry("timings.jsonl", step="x", seconds=[]),
    "checks types": entry("checks.jsonl", step={}, evaluation_psnr="x", validation_psnr=[], seconds="s"),
    "checks huge": entry("checks.jsonl", step=10**30, evaluation_psnr=1e308, validation_psnr=-1e308),
    "images entries": text("images/evaluation.json", '[{"label": 3, "variants": [{"key": []}]}, 5]'),
    "images places": text(
        "images/evaluation.json",
        '[{"label": "a", "variants": [{"key": "learned", "name": 3, "psnr": "x", "file": "../../etc"}]}]',
    ),
    "state-abc": text("checkpoints/state-abc.ckpt", "x"),
    "state without number": text("checkpoints/state-.ckpt", "x"),
    "state of other digits": text("checkpoints/state-²³.ckpt", "x"),
    "state of many digits": text(f"checkpoints/state-{'9' * 200}.ckpt", "x"),
    "state folder": folder("checkpoints/state-00000099.ckpt"),
    "warm-abc": text("checkpoints/warm-abc.ckpt", "x"),
    "warm folder": folder("checkpoints/warm-00000099-p0.ckpt"),
    "states empty": checkpoint(lambda content: {}),
    "states without segments": checkpoint(lambda content: without(content, "segments")),
    "states without content": checkpoint(lambda content: without(content, "content")),
    "states of another format": checkpoint(lambda content: content | {"format": "two"}),
    "states with wrong segments": checkpoint(lambda content: content | {"segments": [3]}),
    "states with other segments": checkpoint(lambda content: content | {"segments": [["../x", 1]]}),
    "states with unwritable segments": checkpoint(lambda content: content | {"segments": [["a\0b", 1]]}),
    "states with unwritable own": checkpoint(lambda content: content | {"own": ["a\0b"]}),
    "states with no list of segments": checkpoint(lambda content: content | {"segments": 5}),
    "states with wrong own": checkpoint(lambda content: content | {"own": 5}),
    "states with other own": checkpoint(lambda content: content | {"own": [["x"]]}),
    "states with wrong content": checkpoint(lambda content: content | {"content": []}),
    "states with wrong lengths": checkpoint(
        lambda content: content | {"content": content["content"] | {"lengths": [1]}}
    ),
    "states with odd lengths": checkpoint(
        lambda content: content | {"content": content["content"] | {"lengths": {"metrics.jsonl": "x"}}}
    ),
    "states with negative lengths": checkpoint(
        lambda content: content | {"content": content["content"] | {"lengths": {"metrics.jsonl": -5}}}
    ),
    "states without θ": inside(theta=None),
    "states with θ of other names": inside(theta={"other": torch.zeros(3)}),
    "states with θ of another shape": inside(theta={"regularizer.weights": torch.zeros(7)}),
    "states with wrong optimizer": inside(optimizer=5),
    "states with empty optimizer": inside(optimizer={}),
    "states with wrong sampler": inside(sampler=5),
    "states with empty sampler": inside(sampler={}),
    "states with wrong cost": inside(cost={"stars": 1}),
    "states with wrong numbers": inside(steps="x", seconds=[], checking=None),
    "states with wrong best": inside(best=3),
    "states with wrong journal": inside(journal=3),
    "states with wrong end": inside(ended=3),
    "segments empty": checkpoint(lambda content: {}, "warm"),
    "segments of other kinds": checkpoint(lambda content: {"stars": {"ids": torch.zeros(1)}}, "warm"),
    "segments of wrong rows": checkpoint(
        lambda content: {name: {"ids": 3, "rows": "x"} for name in content}, "warm"
    ),
    "segments of other shapes": checkpoint(
        lambda content: {
            name: {"ids": torch.tensor([0]), "rows": torch.zeros(1, 3, 5, 5)} for name in content
        },
        "warm",
    ),
    "segments of other ids": checkpoint(
        lambda content: {
            name: {"ids": torch.tensor([10**9]), "rows": held["rows"][:1]} for name, held in content.items()
        },
        "warm",
    ),
    "θ of another shape": theta(first(lambda value: torch.zeros(7, 5))),
    "θ without numbers": theta(first(lambda value: torch.zeros(0))),
    "θ of whole numbers": theta(first(lambda value: value.to(torch.int64))),
    "θ of booleans": theta(first(lambda value: value > 0)),
    "θ of complex numbers": theta(first(lambda value: value.to(torch.complex64))),
    "θ of half precision": theta(first(lambda value: value.to(torch.float16))),
    "θ of mixed precision": theta(first(lambda value: value.double())),
    "θ with another key": theta(lambda tensors: tensors | {"stars": torch.zeros(3)}),
    "θ with another part": theta(lambda tensors: tensors | {"regularizer.stars": torch.zeros(3)}),
    "θ without a key": theta(lambda tensors: without(tensors, min(tensors))),
    "θ without any key": theta(lambda tensors: {}),
    "θ without recipe": theta(lambda tensors: tensors, recipe=""),
    "θ with a list for a recipe": theta(lambda tensors: tensors, recipe="[1]"),
    "θ with a broken recipe": theta(lambda tensors: tensors, recipe="{"),
    "θ with a deep recipe": theta(lambda tensors: tensors, recipe=DEEP),
    "θ with an endless number": theta(lambda tensors: tensors, recipe=f'{{"seed": {DIGITS}}}'),
    "θ with another recipe": theta(lambda tensors: tensors, recipe='{"regularizer": "tv", "budget": 3}'),
}

#: What a user might call with a run directory (and, where they write, a place for it).
COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "resume": lambda run, place: ["resume", str(run), "-q"],
    "resume, more": lambda run, place: ["resume", str(run), "budget.steps=4", "-q"],
    "watch": lambda run, place: ["watch", str(run), "--once"],
    "watch --json": lambda run, place: ["watch", str(run), "--json"],
    "report": lambda run, place: ["report", str(run), "-o", str(place / "page.html")],
    "compare": lambda run, place: ["compare", str(run), "-o", str(place / "figure.svg")],
    "compare --json": lambda run, place: ["compare", str(run), "--json", "-o", str(place / "figure.svg")],
    "compare --at": lambda run, place: ["compare", str(run), "--at", "99", "-o", str(place / "figure.svg")],
    "evaluate": lambda run, place: ["evaluate", str(run), "--json"],
    "apply": lambda run, place: ["apply", str(run), str(place / "picture.png"), "-o", str(place / "out.png")],
    "models": lambda run, place: ["models", str(run)],
    "sweep": lambda run, place: [
        "sweep",
        str(run.parents[1] / "tiny.yaml"),
        "-o",
        str(run.parent),
        "--dry-run",
    ],
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, a sweep of one cell that has finished, and a picture."""
    place = tmp_path_factory.mktemp("whole")
    (place / "tiny.yaml").write_text(RECIPE)
    recipe = load_recipe(place / "tiny.yaml", ())
    run(recipe, out=place / "sweep" / "tiny")
    cell = {"name": "tiny", "settings": {}, "overrides": [], "failed": None, "recipe": recipe.to_dict()}
    write_json(place / "sweep" / "sweep.json", {"recipe": "tiny", "grid": {}, "cells": [cell]})
    Image.fromarray(np.full((16, 16, 3), 99, np.uint8)).save(place / "picture.png")
    return place


def call(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr of a command."""
    done = caller("", capfd)(*arguments)
    return done.returncode, done.stderr


@pytest.fixture
def copied(sweep: Path, tmp_path: Path) -> Iterator[Copy]:
    """A new copy of the finished run each time, and the place that it lies in."""
    made: list[Path] = []

    def copy() -> tuple[Path, Path]:
        made.append(tmp_path / str(len(made)))
        shutil.copytree(sweep, made[-1])
        return made[-1] / "sweep" / "tiny", made[-1]

    yield copy


def readers(damage: str) -> list[str]:
    """The commands that read what is damaged."""
    if damage.startswith(("state", "segments", "warm", "checkpoints")):
        return ["resume, more"]
    if damage.startswith("θ"):
        return ["compare --at", "evaluate", "apply", "report"]
    if damage.startswith("images"):
        return ["watch --json", "report"]
    compare = "compare" if reaches_a_figure(damage) else "compare --json"
    return ["resume", "resume, more", "watch --json", "report", compare, "sweep"]


def reaches_a_figure(damage: str) -> bool:
    """Drawing takes longer than all the rest; only numbers that can be read come so far."""
    return damage.startswith(("metrics ", "checks ", "timings ", "status "))


def complaints(
    damage: str, commands: Iterable[str], copy: Copy, capfd: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """The commands that took the damage for a bug of ours, and what they said."""
    wrong = {}
    for name in commands:
        run, place = copy()
        DAMAGES[damage](run)
        code, said = call(COMMANDS[name](run, place), capfd)
        if "unexpected" in said or "Traceback" in said or code not in range(5) or (code and not said.strip()):
            wrong[name] = f"{code}: {said}"
    return wrong


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_sentence(
    damage: str, copied: Copy, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reaches_a_figure(damage):
        monkeypatch.setattr("bltoolbox.reports.compare.figures.save_figure", save_nothing)
    assert not complaints(damage, readers(damage), copied, capfd)


def save_nothing(figure: Any, path: Path) -> None:
    """In place of drawing a figure whose numbers are not damaged."""
    path.touch()


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_sentence_for_every_command(
    damage: str, copied: Copy, capfd: pytest.CaptureFixture[str]
) -> None:
    others = [name for name in COMMANDS if name not in readers(damage)]
    assert not complaints(damage, others, copied, capfd)


def test_the_commands_succeed_where_nothing_is_damaged(
    copied: Copy, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the table above would test nothing. (``blt models`` knows names, not directories.)"""
    codes = {}
    for name, arguments in COMMANDS.items():
        codes[name] = call(arguments(*copied()), capfd)
    assert {name: code for name, (code, _) in codes.items()} == dict.fromkeys(COMMANDS, 0) | {"models": 4}, (
        codes
    )
