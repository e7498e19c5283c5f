"""Variants of images are the images turned, mirrored and at other contrasts, and are for training only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blt_builtins.data.array import Array
from blt_builtins.data.variants import Variants
from bltoolbox import run
from bltoolbox.plugin import Data, Rows
from bltoolbox.training.splits import hold_out


class Images(Data):
    """Random images, two of each photograph; ``rows`` come with each, and ``maps`` with each pixel."""

    def __init__(self, count: int = 6, shape: tuple[int, int] = (6, 6), maps: bool = False) -> None:
        self.images = torch.rand(count, 3, *shape, generator=torch.Generator().manual_seed(0))
        self.maps = maps

    def __len__(self) -> int:
        return len(self.images)

    def clean(self, ids: Sequence[int]) -> Tensor:
        return self.images[list(ids)]

    def context(self, ids: Sequence[int]) -> Rows:
        return {"map": self.images[list(ids)]} if self.maps else {"class": torch.tensor(ids)}

    def group(self, id: int) -> str | None:
        return f"photograph {id // 2}"


def of(data: Variants, image: int) -> list[Tensor]:
    """All variants of an image."""
    return list(data.clean(range(image, len(data), len(data.images))))


def test_the_images_themselves_come_last() -> None:
    images, data = Images(), Variants(Images(), contrast=(0.5, 5.0))
    assert torch.equal(data.clean(range(len(data)))[-6:], images.images)
    assert [data.derived(i) for i in range(len(data))] == [True] * 42 + [False] * 6
    assert [data.label(i) for i in range(42, 48)] == [images.label(i) for i in range(6)]
    assert len({data.label(i) for i in range(48)}) == 48
    assert data.context([0, 7, 47])["class"].tolist() == [0, 1, 5]


@pytest.mark.parametrize(("shape", "count"), [((6, 6), 8), ((6, 4), 4)])
def test_symmetries_are_different_and_have_the_same_pixels(shape: tuple[int, int], count: int) -> None:
    data = Variants(Images(shape=shape))
    variants = of(data, 2)
    assert len(variants) == count and len(data) == 6 * count
    assert len({tuple(variant.flatten().tolist()) for variant in variants}) == count
    expected = data.images.clean([2])[0].flatten(1).sort().values
    for variant in variants:
        assert variant.shape == (3, *shape)
        assert torch.equal(variant.flatten(1).sort().values, expected)


def test_contrasts_are_log_uniform_for_a_share_of_the_variants_and_do_not_depend_on_the_batch() -> None:
    data = Variants(Images(400, (1, 1)), symmetries=False, contrast=(0.5, 8.0), share=0.25, seed=3)
    changed, originals = data.clean(range(400)), data.clean(range(400, 800))
    factors = (changed / originals)[:, 0, 0, 0]
    torch.testing.assert_close(changed, factors.view(-1, 1, 1, 1) * originals)
    other = factors[(factors - 1).abs() > 1e-6]
    assert abs(len(other) - 0.25 * 400) <= 26  # three standard deviations
    assert 0.5 <= float(other.min()) < 0.7 and 6 < float(other.max()) <= 8
    assert float((other < 2).double().mean()) == pytest.approx(0.5, abs=0.15)
    assert torch.equal(data.clean([17, 503])[0], changed[17])
    assert not torch.equal(
        Variants(Images(400, (1, 1)), symmetries=False, contrast=(0.5, 8.0)).clean(range(400)), changed
    )


def test_only_images_are_held_out_and_no_variant_of_their_photographs_is_trained_on() -> None:
    data = Variants(Images())
    training, held = hold_out(data, 3)
    assert list(held) == [44, 45, 46, 47]  # photographs stay together
    assert not any(data.derived(i) for i in held)
    assert {i % 6 for i in training} == {0, 1} and len(training) == 16


def test_a_network_learns_from_variants(tmp_path: Path) -> None:
    path = tmp_path / "images.npy"
    np.save(path, np.random.default_rng(0).integers(256, size=(5, 8, 8), dtype=np.uint8))
    images = {"name": "array", "path": str(path)}
    recipe: dict[str, Any] = {
        "data": {"name": "variants", "images": images, "contrast": [2.0, 5.0], "share": 1.0},
        "noise": 0.1,
        "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
        "sampler": {"name": "epoch", "size": 4},
        "validation": {"count": 1, "checks": 1},
        "budget": {"steps": 2},
    }
    result = run(recipe, out=tmp_path / "run")
    assert result.steps == 2


def test_tiles_cover_the_middle_without_overlap_and_stay_with_their_photograph() -> None:
    images = Images(shape=(7, 11))
    data = Variants(images, tiles=3, symmetries=False)
    assert len(data) == 6 * 6 and not any(data.derived(i) for i in range(36))
    tiles = data.clean(range(6, 12))  # of the second image: two rows of three
    middle = torch.cat([torch.cat(list(row), 2) for row in (tiles[:3], tiles[3:])], 1)
    assert torch.equal(middle, images.images[1, :, :6, 1:10])
    assert {data.group(i) for i in range(12)} == {"photograph 0"}
    training, held = hold_out(data, 7)
    assert (len(training), len(held)) == (24, 12)


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (Images(maps=True), {}, "images come with map, which would have to be turned along"),
        (Images(), {"tiles": 7}, "tiles of 7×7 do not fit into images of 6×6"),
        (Images(), {"contrast": (2.0, 1.0)}, r"contrast \[2.0, 1.0\] is not an interval"),
    ],
)
def test_refusals(images: Data, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Variants(images, **options)


def test_recorded_measurements_are_refused() -> None:
    class Recorded(Images):
        def measured(self, ids: Sequence[int]) -> Tensor:
            return self.clean(ids)

    with pytest.raises(ValueError, match="recorded measurements, which would have to be turned along"):
        Variants(Recorded())


def test_images_without_groups_are_groups_of_their_own_with_their_variants(tmp_path: Path) -> None:
    path = tmp_path / "images.npy"
    np.save(path, np.zeros((3, 4, 4), np.uint8))
    data = Variants(Array(str(path), groups="none"))
    training, held = hold_out(data, 1)
    assert list(held) == [23] and {i % 3 for i in training} == {0, 1}
