"""STL-10 and Oxford-IIIT Pet on small files of their true form, against torchvision's own readers."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Call, caller
from PIL import Image
from test_download import Server, archive, server

from blt_builtins.data.pets import OxfordPets
from blt_builtins.data.stl10 import STL10
from blt_builtins.data.vision import torchvision_datasets
from bltoolbox.errors import MissingError

__all__ = ["server"]

COUNTS = {"train": 6, "test": 5, "unlabeled": 9}


def datasets() -> Any:
    """Imported when it is first needed, since it brings torch's compiler."""
    return torchvision_datasets("tests")


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def stl10_files() -> dict[str, bytes]:
    """What the archive holds, with few images: a file of pixels and one of labels."""
    files = {}
    for seed, (split, count) in enumerate(COUNTS.items()):
        rng = np.random.default_rng(seed)
        files[f"{split}_X.bin"] = rng.integers(256, size=(count, 3, 96, 96), dtype=np.uint8).tobytes()
        if split != "unlabeled":
            files[f"{split}_y.bin"] = rng.integers(1, 11, size=count, dtype=np.uint8).tobytes()
    return files


@pytest.fixture
def stl10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files in their folder, and torchvision knowing their checksums."""
    files = stl10_files()
    (tmp_path / "stl10_binary").mkdir()
    for name, content in files.items():
        (tmp_path / "stl10_binary" / name).write_bytes(content)
    known_sums(monkeypatch, files)
    return tmp_path


def known_sums(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    for key in ("train_list", "test_list"):
        names = [name for name, _ in getattr(datasets().STL10, key)]
        sums = [[name, md5(files[name])] for name in names]
        monkeypatch.setattr(datasets().STL10, key, sums)


class TestSTL10:
    @pytest.mark.parametrize("split", ["train", "test", "unlabeled"])
    def test_images_equal_those_of_torchvision(self, stl10: Path, split: Any) -> None:
        reader = datasets().STL10(str(stl10), split=split)
        data = STL10(str(stl10), split=split)
        assert len(data) == len(reader) == COUNTS[split]
        for i in range(len(data)):
            expected = np.asarray(reader[i][0], np.float32) / np.float32(255)
            assert np.array_equal(data.clean([i])[0].permute(1, 2, 0).numpy(), expected)

    def test_count_and_offset(self, stl10: Path) -> None:
        whole, part = STL10(str(stl10)), STL10(str(stl10), count=3, offset=2)
        assert len(part) == 3
        assert torch.equal(part.clean([0, 2]), whole.clean([2, 4]))
        assert part.label(0) == "train #2" and part.group(0) == whole.group(2)
        with pytest.raises(IndexError):
            part.clean([3])
        with pytest.raises(
            ValueError, match="train has 6 images, but offset 4 and count 3 ask for at least 7"
        ):
            STL10(str(stl10), count=3, offset=4)

    def test_a_damaged_file_is_refused_unless_it_is_not_looked_at(self, stl10: Path) -> None:
        file = stl10 / "stl10_binary" / "train_X.bin"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=r"train_X\.bin is damaged"):
            STL10(str(stl10))
        assert len(STL10(str(stl10), verify=False)) == 6
        assert len(STL10(str(stl10), split="test")) == 5
        for length in (0, 1000):
            file.write_bytes(content[:length])
            with pytest.raises(ValueError, match=rf"has {length} bytes, which is not a whole number"):
                STL10(str(stl10), verify=False)

    def test_nothing_but_what_is_used_is_read(self, stl10: Path) -> None:
        data = STL10(str(stl10), verify=False)
        file = stl10 / "stl10_binary" / "train_X.bin"
        before = data.clean([3])
        with file.open("r+b") as changed:
            changed.seek(3 * 27648)
            changed.write(b"\0" * 27648)
        assert not torch.equal(data.clean([3]), before) and not data.clean([3]).any()
        with file.open("r+b") as changed:
            changed.truncate(100)
        with pytest.raises(ValueError, match="was cut short"):
            data.clean([0])

    def test_download_only_on_request(
        self, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = stl10_files()
        server.content = archive({f"stl10_binary/{name}": content for name, content in files.items()})
        server.cuts = [100_000]
        known_sums(monkeypatch, files)
        monkeypatch.setattr(datasets().STL10, "url", server.url)
        monkeypatch.setattr(datasets().STL10, "tgz_md5", md5(server.content))
        monkeypatch.setenv("BLT_CACHE", str(tmp_path))
        with pytest.raises(MissingError, match=r"there is no .*train_X\.bin; set download: true to get it"):
            STL10()
        assert server.asked == []
        assert len(STL10(download=True)) == 6
        assert server.asked == [None, "bytes=100000-"]
        assert len(STL10(split="unlabeled", download=True)) == 9
        assert (tmp_path / "torchvision" / "stl10_binary" / "test_y.bin").read_bytes() == files["test_y.bin"]
        assert len(server.asked) == 2
        # A file that is missing from the folder is fetched with all of it.
        (tmp_path / "torchvision" / "stl10_binary" / "test_X.bin").unlink()
        assert len(STL10(split="test", download=True)) == 5


def pets_files(folder: Path) -> dict[str, bytes]:
    """Photographs of several shapes and modes, and the lists of both splits."""
    folder.mkdir(exist_ok=True)
    files = {}
    for i in range(7):
        pixels = np.random.default_rng(i).integers(256, size=(40 + 3 * i, 60 - 2 * i, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        image = image.convert("L") if i == 2 else image
        kind = "png" if i == 3 else "jpeg"  # in the true set, too, some .jpg files are none
        image.save(folder / "x", kind)
        files[f"images/Cat_{i}.jpg"] = (folder / "x").read_bytes()
    (folder / "x").unlink()
    files["annotations/trainval.txt"] = b"".join(b"Cat_%d 1 1 1\n" % i for i in (4, 0, 2, 3))
    files["annotations/test.txt"] = b"".join(b"Cat_%d 1 1 1\n" % i for i in (1, 6, 5))
    return files


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for name, content in pets_files(tmp_path / "made").items():
        path = tmp_path / "oxford-iiit-pet" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


class TestOxfordPets:
    @pytest.mark.parametrize("split", ["trainval", "test"])
    def test_photographs_equal_those_of_torchvision(self, pets: Path, split: Any) -> None:
        reader = datasets().OxfordIIITPet(str(pets), split=split)
        data = OxfordPets(str(pets), split=split, size=30, fit="crop")
        assert len(data) == len(reader)
        for i in range(len(data)):
            image = reader[i][0]
            left, top = (image.width - 30) // 2, (image.height - 30) // 2
            expected = np.asarray(image.crop((left, top, left + 30, top + 30)), np.float32) / np.float32(255)
            assert np.array_equal(data.clean([i])[0].permute(1, 2, 0).numpy(), expected)

    def test_order_size_and_labels(self, pets: Path) -> None:
        data = OxfordPets(str(pets), size=32)
        assert [data.label(i) for i in range(4)] == ["Cat_4", "Cat_0", "Cat_2", "Cat_3"]
        assert data.clean(range(4)).shape == (4, 3, 32, 32)
        part = OxfordPets(str(pets), size=32, offset=1, count=2)
        assert torch.equal(part.clean([1]), data.clean([2]))
        assert part.group(0) == data.group(1) == "oxford-pets Cat_0"
        with pytest.raises(ValueError, match="trainval has 4 photographs, but offset 4 ask for at least 5"):
            OxfordPets(str(pets), offset=4)

    def test_small_photographs_are_left_out(self, pets: Path, caplog: pytest.LogCaptureFixture) -> None:
        data = OxfordPets(str(pets), size=45)
        assert [data.label(i) for i in range(len(data))] == ["Cat_4", "Cat_2", "Cat_3"]
        assert "1 of 4 image files" in caplog.text and "too small for resize 45" in caplog.text
        with pytest.raises(ValueError, match="none of the 4 image files can be used"):
            OxfordPets(str(pets))

    def test_a_list_that_is_none(self, pets: Path) -> None:
        (pets / "oxford-iiit-pet/annotations/test.txt").write_text("Cat_1\n")
        with pytest.raises(ValueError, match=r"test\.txt cannot be read as torchvision's list"):
            OxfordPets(str(pets), split="test")
        (pets / "oxford-iiit-pet/annotations/test.txt").unlink()
        with pytest.raises(ValueError, match=r"test\.txt cannot be read as torchvision's list"):
            OxfordPets(str(pets), split="test")

    def test_download_only_on_request(
        self, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = pets_files(tmp_path / "made")
        parts = {
            member: archive({name: content for name, content in files.items() if name.startswith(member)})
            for member in ("images", "annotations")
        }
        base = server.url.rpartition("/")[0]
        resources = [(f"{base}/{member}.tar.gz", md5(content)) for member, content in parts.items()]
        monkeypatch.setattr(datasets().OxfordIIITPet, "_RESOURCES", resources)
        place = str(tmp_path / "place")
        with pytest.raises(MissingError, match=r"there is no .*oxford-iiit-pet .*; set download: true"):
            OxfordPets(place, size=32)
        server.content = parts["images"]
        # The second archive is not served yet: the first is kept for the next time.
        with pytest.raises(MissingError, match=r"annotations\.tar\.gz is not the file it should be"):
            OxfordPets(place, size=32, download=True)
        server.content = parts["annotations"]
        assert len(OxfordPets(place, size=32, download=True)) == 4
        assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"stl10: torchvision is not installed \(.*\); install it with: pip install torchvision"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "does not work with torch .*nms"),
        (
            "raise OSError('libcudart.so.13: cannot open shared object file')",
            "does not work with torch .*libcudart",
        ),
        ("from torch import nothing_like_this", "does not work with torch .*nothing_like_this"),
    ],
)
def test_torchvision_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, message: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    if source is None:
        monkeypatch.setitem(sys.modules, "torchvision", None)  # type: ignore[arg-type]
    else:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingError, match=message) as caught:
        torchvision_datasets("stl10")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 4


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``blt`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller("", capfd)


@pytest.mark.parametrize("name", ["stl10", "oxford-pets"])
def test_missing_files_from_the_command_line(name: str, tmp_path: Path, here: Call) -> None:
    recipe = f"data: {{name: {name}, path: here}}\nregularizer: {{name: tv}}\nbudget: {{steps: 1}}\n"
    (tmp_path / "r.yaml").write_text(recipe)
    done = here("run", "r.yaml", "-o", "out")
    assert done.returncode == 4
    assert done.stderr.startswith(f"error: {name}: there is no here/") and "set download: true" in done.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "here").exists()
    # Validation looks at the recipe, not at the disk.
    assert here("validate", "r.yaml").returncode == 0


def test_a_run_on_stl10(stl10: Path, tmp_path: Path, here: Call) -> None:
    recipe = (
        "data: {name: stl10, path: ., split: unlabeled, verify: false}\nevaluation: {name: stl10, path: ., split: test,"
        " count: 1, verify: false}\nregularizer: {name: tv}\nsampler: {size: 2}\nvalidation: {count: 2, checks: 1}\n"
        "budget: {steps: 1}\nworkers: 2\n"
    )
    (tmp_path / "r.yaml").write_text(recipe)
    done = here("run", "r.yaml", "-o", "out", "-q", "--json")
    assert done.returncode == 0, done.stderr
