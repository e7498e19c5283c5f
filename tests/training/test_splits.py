"""No photograph on both sides of a split; the same run whatever reads its images."""

from __future__ import annotations

import multiprocessing
import re
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from blt_builtins.data.array import Array
from bltoolbox import run
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.errors import RecipeError
from bltoolbox.restoration.roles import Data
from bltoolbox.training.assemble import assemble
from bltoolbox.training.splits import hold_out, shared

torch.set_num_threads(1)


class Named(Data):
    """Images that are known by their groups alone."""

    def __init__(self, groups: Sequence[str | None]) -> None:
        self.groups = list(groups)

    def __len__(self) -> int:
        return len(self.groups)

    def clean(self, ids: Sequence[int]) -> Tensor:
        return torch.zeros(len(ids), 1, 4, 4)

    def group(self, id: int) -> str | None:
        return self.groups[id]


class Plain(Named):
    group = Data.group


class Many(Named):
    """More images than groups can be kept of."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def group(self, id: int) -> str:
        return f"photograph {id // 2}"


def test_a_split_takes_a_few_bytes_for_each_image() -> None:
    """Files declare any number of images, and need not contain them on disk."""
    tracemalloc.start()
    try:
        training, held = hold_out(Many(50_001), 3)
        overlap = shared(Many(50_001), Many(4))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert list(held) == [49_998, 49_999, 50_000] and len(training) == 49_998 and overlap == [0, 1, 2, 3]
    assert most < 10 * 50_001


@given(st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=20), st.integers(0, 20))
def test_whole_groups_are_held_out(groups: list[str | None], count: int) -> None:
    count = min(count, len(groups))
    data = Named(groups)
    training, held = hold_out(data, count)
    assert sorted([*training, *held]) == list(range(len(groups)))
    assert list(training) == sorted(training) and list(held) == sorted(held)
    names = [{groups[i] for i in ids} - {None} for ids in (training, held)]
    assert not names[0] & names[1]
    assert len(held) >= count
    # No group is held out without need.
    largest = max([1, *(groups.count(name) for name in names[1])])
    assert len(held) < count + largest
    assert not set(shared(Named([groups[i] for i in training]), Named([groups[i] for i in held])))


@given(st.integers(1, 20), st.integers(0, 20))
def test_without_groups_the_last_images_are_held_out(total: int, count: int) -> None:
    count = min(count, total)
    for data in (Plain([None] * total), Named([None] * total), Named([str(i) for i in range(total)])):
        training, held = hold_out(data, count)
        assert list(training) == list(range(total - count))
        assert list(held) == list(range(total - count, total))


def array(folder: Path, name: str = "a", total: int = 12, seed: int = 0) -> Path:
    images = np.random.default_rng(seed).integers(256, size=(total, 16, 16, 3), dtype=np.uint8)
    np.save(folder / f"{name}.npy", images)
    return folder / f"{name}.npy"


def recipe(path: Path, steps: int = 2, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "data": {"name": "array", "path": str(path)},
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "lower_solver": "mm",
        "upper_optimizer": {"name": "isgd", "tol": 0.5},
        "sampler": {"size": 4},
        "validation": {"count": 3, "checks": 1},
        "budget": {"steps": steps},
    }
    return recipe_from_dict(settings | changes)


class TestGroupsOfArrays:
    ROWS = "index,image,scale\n" + "".join(f"{i},{100 + i % 5},1/1\n" for i in range(12))

    def test_the_file_beside_the_array_is_found(self, tmp_path: Path) -> None:
        path = array(tmp_path)
        assert Array(str(path)).group(0) != Array(str(path)).group(5)
        path.with_suffix(".csv").write_text(self.ROWS)
        data = Array(str(path))
        assert data.group(0) == data.group(5) != data.group(1)
        assert Array(str(path), offset=5).group(0) == data.group(0)
        assert Array(str(path), groups="none").group(0) != Array(str(path), groups="none").group(5)

    @pytest.mark.parametrize("column", ["photograph", "photo", "group", "Photo "])
    def test_columns_and_order_of_rows(self, tmp_path: Path, column: str) -> None:
        path = array(tmp_path, total=3)
        (tmp_path / "other.csv").write_text(f"note,index,{column}\nx,2,dog\ny,0,cat\nz,1,dog\n")
        data = Array(str(path), groups="other.csv")
        assert data.group(1) == data.group(2) != data.group(0)
        (tmp_path / "rows.csv").write_text(f"{column}\ndog\ncat\ndog\n")
        data = Array(str(path), groups=str(tmp_path / "rows.csv"))
        assert data.group(0) == data.group(2) != data.group(1)

    def test_a_file_without_such_a_column_is_something_else(self, tmp_path: Path) -> None:
        path = array(tmp_path, total=3)
        path.with_suffix(".csv").write_text("index,psnr\n0,1\n")
        assert len({Array(str(path)).group(i) for i in range(3)}) == 3
        with pytest.raises(
            ValueError, match=r"a\.csv has no column photograph, photo, group, source or image"
        ):
            Array(str(path), groups="a.csv")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("photo\n1\n2\n", r"one row for each of the 3 images of a\.npy, but has 2 rows; groups: none"),
            ("index,photo\n0,1\n1,1\n1,2\n", "3 rows with other indices"),
            ("photo\n1\n\n2\n3\n4\n", "but has more rows"),
            ("photo,x\n1,1\n,1\n2,1\n", "one row for each"),
        ],
    )
    def test_a_file_that_does_not_fit_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        path = array(tmp_path, total=3)
        path.with_suffix(".csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            Array(str(path))
        with pytest.raises(ValueError, match=r"there is no file missing\.csv"):
            Array(str(path), groups="missing.csv")
        path.with_suffix(".csv").write_bytes(b"photo\n\xff\xfe\n")
        with pytest.raises(ValueError, match=r"a\.csv cannot be read"):
            Array(str(path))

    def test_validation_takes_whole_photographs(self, tmp_path: Path) -> None:
        path = array(tmp_path)
        path.with_suffix(".csv").write_text(self.ROWS)
        experiment = assemble(recipe(path))
        train, validation = (experiment.problem.samples[name] for name in ("training", "validation"))
        # Images 11 and 10 are of photographs 101 and 100, which have three crops each.
        assert list(validation.ids) == [1, 6, 11]
        assert list(train.ids) == [0, 2, 3, 4, 5, 7, 8, 9, 10]
        assert [validation.label(i) for i in range(3)] == ["#1", "#6", "#11"]

    def test_one_photograph_cannot_be_split(self, tmp_path: Path) -> None:
        path = array(tmp_path)
        path.with_suffix(".csv").write_text("photo\n" + "7\n" * 12)
        with pytest.raises(RecipeError, match="images of one photograph stay together; reduce it"):
            assemble(recipe(path))
        assert len(assemble(recipe(path, validation={"count": 0})).train) == 12


class TestOverlap:
    def test_the_same_range_of_the_same_file(self, tmp_path: Path) -> None:
        path = array(tmp_path)
        data = {"name": "array", "path": str(path), "count": 8}
        (tmp_path / "link.npy").symlink_to(path)
        for other in (str(path), str(tmp_path / "link.npy")):
            evaluation = {"name": "array", "path": other, "offset": 6, "crop": 8}
            with pytest.raises(RecipeError, match=r"evaluation: 2 of the 6 images .* \(the first is #6\)"):
                assemble(recipe(path, data=data, evaluation=evaluation))
        evaluation = {"name": "array", "path": str(path), "offset": 8}
        assert len(assemble(recipe(path, data=data, evaluation=evaluation)).train) == 5

    def test_crops_of_the_same_photograph(self, tmp_path: Path) -> None:
        path = array(tmp_path)
        path.with_suffix(".csv").write_text(TestGroupsOfArrays.ROWS)
        data = {"name": "array", "path": str(path), "count": 8}
        evaluation = {"name": "array", "path": str(path), "offset": 8}
        with pytest.raises(RecipeError, match="4 of the 4 images are of photographs in the training data"):
            assemble(recipe(path, data=data, evaluation=evaluation))
        apart = {"groups": "none"}
        assemble(recipe(path, data=data | apart, evaluation=evaluation | apart))

    @pytest.mark.parametrize(
        ("data", "evaluation", "refused"),
        [
            ({"name": "dead-leaves", "count": 20, "size": 16}, {"count": 2}, True),
            ({"name": "dead-leaves", "count": 20, "size": 16}, {"count": 2, "seed": 1}, False),
            ({"name": "photos", "size": 16}, {"size": 32, "names": ["coffee"]}, True),
            ({"name": "photos", "size": 16, "names": ["rocket"]}, {"names": ["coffee"]}, False),
        ],
    )
    def test_other_data(
        self, tmp_path: Path, data: dict[str, Any], evaluation: dict[str, Any], refused: bool
    ) -> None:
        settings = {"validation": {"count": 0}, "sampler": {"size": 1}}
        asked = recipe(tmp_path, data=data, evaluation=data | evaluation, **settings)
        if refused:
            with pytest.raises(RecipeError, match="of photographs in the training data"):
                assemble(asked)
        else:
            assemble(asked)

    def test_data_that_know_no_groups_overlap_with_themselves(
        self, tmp_path: Path, install: Callable[..., Path]
    ) -> None:
        source = (
            "import torch\nfrom bltoolbox.plugin import Component, Data, hookimpl\n"
            "BLT_API = 2\nclass Zeros(Data):\n    def __len__(self): return 3\n"
            "    def clean(self, ids): return torch.zeros(len(ids), 3, 8, 8)\n"
            "@hookimpl\ndef blt_components(): return [Component('data', 'zeros', 'zeros_plugin:Zeros', 'Zeros.')]\n"
        )
        install("zeros", {"zeros": "zeros_plugin"}, {"zeros_plugin": source})
        with pytest.raises(RecipeError, match="3 of the 3 images"):
            assemble(recipe(tmp_path, data="zeros", evaluation="zeros", validation={"count": 0}))


@pytest.mark.parametrize("kind", ["folder", "array", "dead-leaves"])
def test_a_run_does_not_depend_on_the_number_of_threads_that_read(tmp_path: Path, kind: str) -> None:
    path = array(tmp_path)
    for i, pixels in enumerate(np.load(path)):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i:02}.jpg")
    data: dict[str, Any] = {
        "folder": {"path": str(tmp_path / "images"), "crop": 12},
        "array": {"path": str(path)},
        "dead-leaves": {"count": 12, "size": 16},
    }[kind]
    results = [run(recipe(path, 4, data={"name": kind} | data, workers=workers)) for workers in (0, 1, 3)]
    for result in results[1:]:
        assert all(torch.equal(result.last[key], results[0].last[key]) for key in result.last)
        assert result.history == results[0].history


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_an_array_is_read_only_where_it_is_used(tmp_path: Path, dtype: str) -> None:
    """75 MB of images, and what is read of them goes again."""
    images = np.lib.format.open_memmap(
        tmp_path / "a.npy", "w+", dtype, (25 if dtype == "float32" else 100, 500, 500, 3)
    )
    images[::10] = 1
    images.flush()
    context = multiprocessing.get_context("fork")  # others of its threads would have memory of their own
    received, sent = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sent.send(read_all(tmp_path / "a.npy")))
    child.start()
    assert received.poll(60) and received.recv() < 20
    child.join()


def read_all(path: Path) -> float:
    """By how many megabytes reading all images makes this process grow."""
    data = Array(str(path))
    for i in range(10):
        data.clean([i])
    before = anonymous()
    for i in range(len(data)):
        data.clean([i])
    return anonymous() - before


def anonymous() -> float:
    """Megabytes that are not of files."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
