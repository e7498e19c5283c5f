"""The data components: determinism, statistics, caches and errors."""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from blt_builtins.data.array import Array
from blt_builtins.data.dead_leaves import DeadLeaves
from blt_builtins.data.photos import Photos
from bltoolbox.errors import MissingError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache folder of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLT_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def leaves() -> torch.Tensor:
    return DeadLeaves(count=96, size=96, cache=False).clean(range(96))


def _differences(images: torch.Tensor) -> torch.Tensor:
    gray = images.mean(1)
    return torch.cat([gray.diff(dim=1).flatten(), gray.diff(dim=2).flatten()])


class TestDeadLeaves:
    @pytest.mark.parametrize(
        ("options", "variable"),
        [
            ({"count": 2**32}, "BLT_MAX_IMAGES"),
            ({"size": 2**20}, "BLT_MAX_PIXELS"),
            ({"count": 2**23, "size": 2**13}, "BLT_MAX_GENERATED"),
        ],
    )
    def test_more_than_the_memory_is_refused_before_anything_is_painted(
        self, options: dict[str, int], variable: str
    ) -> None:
        with pytest.raises(ValueError, match=variable):
            DeadLeaves(**options)

    def test_shape_type_and_range(self, leaves: torch.Tensor) -> None:
        assert leaves.shape == (96, 3, 96, 96)
        assert leaves.dtype == torch.float32
        assert leaves.min() >= 0 and leaves.max() <= 1
        assert (leaves.flatten(1).std(1) > 0.01).all()

    def test_same_seed_same_images(self) -> None:
        first, second = (DeadLeaves(count=4, size=24, cache=False).clean(range(4)) for _ in range(2))
        assert torch.equal(first, second)

    def test_another_seed_other_images(self) -> None:
        first, second = (DeadLeaves(count=2, size=24, seed=s, cache=False).clean([0, 1]) for s in (0, 1))
        assert not torch.equal(first[0], second[0])
        assert not torch.equal(first[0], first[1])
        assert not torch.equal(first[1], second[0])

    def test_image_does_not_depend_on_count_or_on_the_batch(self) -> None:
        few, many = DeadLeaves(count=3, size=24), DeadLeaves(count=7, size=24)
        assert torch.equal(few.clean([2, 0]), many.clean([2, 5, 0])[[0, 2]])

    def test_an_id_beyond_the_count_is_refused(self) -> None:
        with pytest.raises(IndexError):
            DeadLeaves(count=3, size=16).clean([3])

    @pytest.mark.parametrize("size", [1, 7, 33])
    def test_any_size(self, size: int) -> None:
        assert DeadLeaves(count=2, size=size, cache=False).clean([0, 1]).shape == (2, 3, size, size)

    def test_without_texture_and_blur_leaves_are_flat(self) -> None:
        flat = DeadLeaves(count=8, size=48, texture=0, blur=0, cache=False).clean(range(8))
        assert (_differences(flat) == 0).float().mean() > 0.4

    def test_gradients_are_heavy_tailed(self, leaves: torch.Tensor) -> None:
        d = _differences(leaves).double()
        kurtosis = (d**4).mean() / (d**2).mean() ** 2
        assert kurtosis > 8  # the normal law has 3, photographs about 16

    def test_spectrum_is_a_power_law(self, leaves: torch.Tensor) -> None:
        gray = leaves.mean(1).double()
        window = torch.hann_window(96, dtype=torch.float64)
        gray = (gray - gray.mean((1, 2), keepdim=True)) * window[:, None] * window
        power = torch.fft.fft2(gray).abs().square().mean(0).numpy()
        f = np.hypot(np.fft.fftfreq(96)[:, None], np.fft.fftfreq(96)[None])
        bands = np.geomspace(0.03, 0.5, 9)
        log_f, log_p = [], []
        for low, high in pairwise(bands):
            log_f.append(np.log(low * high) / 2)
            log_p.append(np.log(power[(f >= low) & (f < high)].mean()))
        slope, offset = np.polyfit(log_f, log_p, 1)
        assert -3.0 < slope < -2.0
        assert np.abs(np.polyval((slope, offset), log_f) - log_p).max() < 0.5

    def test_colours_are_mostly_brightness(self, leaves: torch.Tensor) -> None:
        d = leaves.diff(dim=3).movedim(1, 0).flatten(1).double()
        values = torch.linalg.eigvalsh(torch.cov(d)).flip(0).sqrt()
        assert values[1] / values[0] < 0.3
        assert values[2] > 0

    def test_cache_is_used(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = DeadLeaves(count=3, size=16).clean(range(3))
        monkeypatch.setattr(DeadLeaves, "image", lambda self, i: pytest.fail("painted again"))
        assert torch.equal(DeadLeaves(count=3, size=16).clean(range(3)), first)
        assert len(list(cache.iterdir())) == 1

    def test_every_parameter_has_its_own_cache(self, cache: Path) -> None:
        variants: list[dict[str, float]] = [
            {},
            {"count": 3},
            {"size": 17},
            {"seed": 1},
            {"contrast": 0.5},
            {"texture": 0.5},
            {"blur": 0.5},
        ]
        for variant in variants:
            data = DeadLeaves(**{"count": 2, "size": 16, **variant})  # type: ignore[arg-type]
            fresh = DeadLeaves(**{"count": 2, "size": 16, **variant}, cache=False)  # type: ignore[arg-type]
            assert torch.equal(data.clean([0, 1]), fresh.clean([0, 1]))
        assert len(list(cache.iterdir())) == len(variants)

    @pytest.mark.parametrize("damage", ["empty", "truncated", "header", "changed", "extended"])
    def test_a_damaged_cache_is_regenerated(self, cache: Path, damage: str) -> None:
        first = DeadLeaves(count=3, size=16).clean(range(3))
        (file,) = cache.iterdir()
        content = file.read_bytes()
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        file.write_bytes(
            {
                "empty": b"",
                "truncated": content[:-100],
                "header": content[:20],
                "changed": content[:middle] + flipped + content[middle + 1 :],
                "extended": content + b"0123456789",
            }[damage]
        )
        assert torch.equal(DeadLeaves(count=3, size=16).clean(range(3)), first)
        assert file.read_bytes() == content

    def test_an_unwritable_cache_is_no_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blocked = tmp_path / "a file, not a folder"
        blocked.write_text("")
        monkeypatch.setenv("BLT_CACHE", str(blocked / "cache"))
        assert DeadLeaves(count=2, size=16).clean([1]).shape == (1, 3, 16, 16)

    def test_a_read_only_cache_is_no_error(self, cache: Path) -> None:
        cache.mkdir()
        cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            assert DeadLeaves(count=2, size=16).clean([1]).shape == (1, 3, 16, 16)
        finally:
            cache.chmod(stat.S_IRWXU)

    def test_cache_folder_follows_the_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("BLT_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        DeadLeaves(count=1, size=8).clean([0])
        assert os.listdir(tmp_path / "xdg" / "bltoolbox")

    def test_nothing_is_written_without_cache_or_before_use(self, cache: Path) -> None:
        DeadLeaves(count=1, size=8, cache=False).clean([0])
        DeadLeaves(count=1, size=8)
        assert not cache.exists()


class TestPhotos:
    def test_distinct_photographs(self) -> None:
        data = Photos(size=128)
        images = data.clean(range(len(data)))
        assert images.shape == (4, 3, 128, 128)
        assert images.dtype == torch.float32
        assert images.min() >= 0 and images.max() <= 1
        for i in range(4):
            for j in range(i):
                assert (images[i] - images[j]).abs().mean() > 0.05

    def test_crops_are_central_and_in_the_order_asked(self) -> None:
        large, small = Photos(names=["coffee", "chelsea"]), Photos(names=["chelsea"], size=64)
        assert torch.equal(large.clean([1])[..., 96:160, 96:160], small.clean([0]))
        assert torch.equal(large.clean([1, 0])[0], large.clean([0, 1])[1])

    def test_colour_photographs(self) -> None:
        images = Photos(size=64).clean(range(4))
        assert ((images[:, 0] - images[:, 2]).abs().flatten(1).mean(1) > 0.01).all()

    def test_a_photograph_that_is_not_shipped(self) -> None:
        with pytest.raises(MissingError, match="does not ship 'lily'"):
            Photos(names=["lily"]).clean([0])  # type: ignore[list-item]

    def test_bad_choices(self) -> None:
        with pytest.raises(ValueError, match="larger than chelsea"):
            Photos(names=["chelsea"], size=301).clean([0])
        with pytest.raises(ValueError, match="twice"):
            Photos(names=["coffee", "coffee"])
        with pytest.raises(ValueError, match="empty"):
            Photos(names=[])


class TestArray:
    @pytest.mark.parametrize(("shape", "channels"), [((5, 8, 6, 3), 3), ((5, 8, 6, 1), 1), ((5, 8, 6), 1)])
    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
    def test_shapes_and_types(
        self, tmp_path: Path, shape: tuple[int, ...], channels: int, dtype: str
    ) -> None:
        values = np.random.default_rng(0).random(shape)
        scale = np.iinfo(dtype).max if dtype.startswith("u") else 1
        np.save(tmp_path / "a.npy", (values * scale).round(6 if scale == 1 else 0).astype(dtype))
        images = Array(str(tmp_path / "a.npy")).clean([4, 1])
        assert images.shape == (2, channels, 8, 6)
        assert images.dtype == torch.float32
        expected = torch.from_numpy(values.reshape(5, 8, 6, channels)[[4, 1]]).permute(0, 3, 1, 2)
        assert (images - expected).abs().max() <= 0.51 / 255

    def test_count_offset_and_crop(self, tmp_path: Path) -> None:
        values = np.random.default_rng(0).integers(0, 256, (9, 10, 12, 3), dtype=np.uint8)
        np.save(tmp_path / "a.npy", values)
        data = Array(str(tmp_path / "a.npy"), count=4, offset=3, crop=6)
        assert len(data) == 4
        expected = torch.from_numpy(values[5, 2:8, 3:9]).permute(2, 0, 1).float() / 255
        assert torch.equal(data.clean([2])[0], expected)
        assert len(Array(str(tmp_path / "a.npy"), offset=3)) == 6
        with pytest.raises(IndexError):
            data.clean([4])

    def test_bad_requests(self, tmp_path: Path) -> None:
        path = str(tmp_path / "a.npy")
        np.save(path, np.zeros((3, 8, 8), np.uint8))
        with pytest.raises(ValueError, match="holds 3 images"):
            Array(path, count=4)
        with pytest.raises(ValueError, match="holds 3 images"):
            Array(path, offset=3)
        with pytest.raises(ValueError, match="crop 9 is larger"):
            Array(path, crop=9)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (np.zeros((8, 8), np.uint8), "has shape 8×8"),
            (np.zeros((2, 3, 8, 8), np.uint8), "has shape 2×3×8×8"),
            (np.zeros((0, 8, 8), np.uint8), "is empty"),
            (np.zeros((2, 8, 8), np.int64), "holds int64"),
            (np.array([{"a": 1}], dtype=object), "cannot be read"),
        ],
    )
    def test_bad_arrays(self, tmp_path: Path, values: np.ndarray, message: str) -> None:
        np.save(tmp_path / "a.npy", values)
        with pytest.raises(ValueError, match=message):
            Array(str(tmp_path / "a.npy"))

    @pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY"])
    def test_bad_files(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            Array(str(tmp_path / "a.npy"))

    def test_truncated_archived_and_missing_files(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.zeros((3, 8, 8), np.uint8))
        (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-9])
        with pytest.raises(ValueError, match="cannot be read"):
            Array(str(tmp_path / "a.npy"))
        np.savez(tmp_path / "b.npz", a=np.zeros(3))
        with pytest.raises(ValueError, match="archive"):
            Array(str(tmp_path / "b.npz"))
        with pytest.raises(ValueError, match="there is no file"):
            Array(str(tmp_path / "none.npy"))

    @pytest.mark.parametrize("bad", [1.5, -0.1, np.nan])
    def test_floats_outside_the_unit_interval(self, tmp_path: Path, bad: float) -> None:
        values = np.full((2, 4, 4), 0.5)
        values[1, 2, 2] = bad
        np.save(tmp_path / "a.npy", values)
        data = Array(str(tmp_path / "a.npy"))
        assert data.clean([0]).max() == 0.5
        with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
            data.clean([1])
