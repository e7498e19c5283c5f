"""No file, however mangled, ends in anything but a result or a sentence of the toolbox.

The ordinary tests try a few hundred files; ``BLT_FUZZ=100000 pytest -m slow tests/campaigns/test_damaged_files.py``
tries as many as are asked for, in all formats together, and keeps what went wrong in the folder ``BLT_FUZZ_KEEP``.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formats import REGISTRY, TEXTS, TINY, Format, formats, surroundings
from fuzzing import attempt, campaign
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bltoolbox import Model
from bltoolbox.config.recipe import parse_recipe, recipe_from_dict
from bltoolbox.errors import BltError
from bltoolbox.runs.history import glance
from bltoolbox.training.assemble import assemble

torch.set_num_threads(1)
FORMATS = formats()
MANY = int(os.environ.get("BLT_FUZZ", "100000")) / sum(format.share for format in FORMATS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    found = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLT_CACHE", str(cache))
        surroundings(found)
    return found


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_what_is_whole_is_read(format: Format, folder: Path) -> None:
    format.read(folder)
    if format.brief is not None:
        format.brief(folder)


@pytest.mark.parametrize(
    ("read", "seen"),
    [
        (lambda folder: (folder / "inside").write_text("fine"), ""),
        (lambda folder: Path("beside").write_text("x"), "wrote beside to the working directory"),
        (lambda folder: folder.with_name("outside").write_text("x"), "open of"),
        (lambda folder: subprocess.run(["true"], check=True), "subprocess.Popen"),
        (lambda folder: torch.empty(2**40, dtype=torch.uint8), "RuntimeError"),
        (lambda folder: time.sleep(60), "waits for more than"),
        (lambda folder: _compute(), "takes more than"),
        (lambda folder: json.loads("{"), "JSONDecodeError"),
        (lambda folder: _fail(BltError("two\nlines")), "is not a sentence"),
        (lambda folder: _fail(BltError("one sentence")), ""),
    ],
)
def test_the_campaign_sees_what_no_reader_may_do(
    read: Callable[[Path], object], seen: str, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    _, wrong = attempt(
        read, tmp_path / "files", seconds=1.0, patience=30.0 if seen == "takes more than" else 1.0
    )
    assert seen in wrong and bool(wrong) == bool(seen)


def _compute() -> None:
    while True:
        pass


def _fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_few_damaged_files(format: Format, folder: Path) -> None:
    attack(format, folder, format.few)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_many_damaged_files(format: Format, folder: Path) -> None:
    attack(format, folder, math.ceil(format.share * MANY), guided=True)


def attack(format: Format, folder: Path, count: int, guided: bool = False) -> None:
    endings, wrong = campaign(format, folder, count, guided)
    print(f"{format.name}: {count} files: " + ", ".join(f"{n} {ended}" for ended, n in endings.items()))
    if keep := os.environ.get("BLT_FUZZ_KEEP"):
        for sentence, (number, data) in wrong.items():
            place = Path(keep) / f"{format.name.replace(' ', '-')}-{number}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            place.with_suffix(".txt").write_text(sentence)
    told = [f"case {number}: {sentence}" for sentence, (number, _) in wrong.items()]
    assert not wrong, f"{len(wrong)} kinds of trouble with {format.name}:\n" + "\n".join(told)
    assert endings["refused"] or endings["read"]


def test_a_budget_that_is_no_mapping_tells_nothing(folder: Path) -> None:
    assert glance(folder / "run", {"budget": "x"}).fraction == 0


def test_a_model_whose_kernel_is_elsewhere_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    """A recipe may name files that only the machine has that trained the model."""
    shutil.copy(folder / "kernel.npy", tmp_path / "kernel.npy")
    blurred = TINY | {"operator": {"name": "blur", "kernel": str(tmp_path / "kernel.npy")}}
    experiment = assemble(recipe_from_dict(blurred, registry=REGISTRY), REGISTRY)
    experiment.model(experiment.theta).save(tmp_path / "model.safetensors")
    assert Model.load(tmp_path / "model.safetensors", "cpu", REGISTRY).size
    (tmp_path / "kernel.npy").unlink()
    with pytest.raises(BltError, match=r"model\.safetensors: .* cannot be built: .*there is no file"):
        Model.load(tmp_path / "model.safetensors", "cpu", REGISTRY)


@pytest.mark.parametrize("option", [{"filters": 2**32}, {"kernel_size": 2**15}], ids=str)
@pytest.mark.parametrize("name", ["foe", "foe-nonsmooth", "wcfoe", "crr", "icnn"])
def test_a_filter_bank_that_fills_the_memory_is_refused(name: str, option: dict[str, int]) -> None:
    """The recipe in a θ file says how large the bank is, and it is made before its size can be compared."""
    with pytest.raises(BltError, match="at most"):
        recipe_from_dict(TINY | {"regularizer": {"name": name, **option}}, registry=REGISTRY)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=300), override=st.text(max_size=30))
def test_any_text_for_a_recipe_or_an_override(text: str, override: str) -> None:
    for overrides in ([], [override]):
        try:
            parse_recipe(text, "any.yaml", overrides, REGISTRY)
        except BltError as error:
            assert str(error) and error.exit_code in (2, 3, 4)


def test_the_real_command_never_shows_a_traceback(
    tmp_path: Path, folder: Path, blt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    chance, whole = random.Random(0), (folder / "recipe.yaml").read_text()
    for number in range(8):
        text = whole
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(text))
            text = text[:place] + chance.choice(TEXTS) + text[place + chance.randrange(20) :]
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, encoding="utf-8")
        done = blt("validate", str(file))
        assert done.returncode in (0, 2, 3, 4) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n"
        + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "data: " + "[" * 5000,
        "data: !!python/object/apply:os.system [touch owned]\n",
        "data: {name: array, path: x}\nregularizer: os.system\nbudget: {steps: 1}\n",
    ],
    ids=["billion laughs", "depth", "python tag", "import path"],
)
def test_attacks_are_refused_at_once(text: str) -> None:
    with pytest.raises(BltError) as caught:
        parse_recipe(text, "attack.yaml", [], REGISTRY)
    assert caught.value.exit_code in (3, 4)
