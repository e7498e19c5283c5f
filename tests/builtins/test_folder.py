"""Folders of image files: order, what is left out and said, one size, laziness, and runs on them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from blt_builtins.data.folder import Folder

Blt = Callable[..., subprocess.CompletedProcess[str]]


def picture(path: Path, height: int = 20, width: int = 24, seed: int = 0, gray: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width) if gray else (height, width, 3)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures of one size, in three folders."""
    for i, name in enumerate(("b.png", "a.PNG", "sub/c.bmp", "sub/deeper/d.tif", "sub/a.png", "z y.webp")):
        picture(tmp_path / "images" / name, seed=i)
    return tmp_path / "images"


def test_order_is_that_of_paths(folder: Path) -> None:
    data = Folder(str(folder))
    labels = [data.label(i) for i in range(len(data))]
    assert labels == ["a.PNG", "b.png", "sub/a.png", "sub/c.bmp", "sub/deeper/d.tif", "z y.webp"]
    assert data.clean([1, 0]).shape == (2, 3, 20, 24)
    expected = np.asarray(Image.open(folder / "b.png"), np.float32) / np.float32(255)
    assert np.array_equal(data.clean([1])[0].permute(1, 2, 0).numpy(), expected)
    assert torch.equal(data.clean([4, 1])[1], data.clean([1])[0])


def test_count_and_offset_are_positions_of_files_whatever_can_be_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "b.png").write_text("broken")
    one, other = Folder(str(folder), count=3), Folder(str(folder), offset=3)
    labels = [[data.label(i) for i in range(len(data))] for data in (one, other)]
    assert labels == [["a.PNG", "sub/a.png"], ["sub/c.bmp", "sub/deeper/d.tif", "z y.webp"]]
    assert torch.equal(Folder(str(folder), count=1, offset=4).clean([0]), other.clean([1]))
    with pytest.raises(ValueError, match="holds 6 image files, but offset 4 and count 3 ask for at least 7"):
        Folder(str(folder), count=3, offset=4)
    with pytest.raises(IndexError):
        one.clean([2])


def test_other_files_are_none_of_our_business(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("notes.txt", "list.csv", ".hidden.png", ".cache/thumb.png", "._a.PNG"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no image")
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    assert len(Folder(str(folder))) == 6
    assert not caplog.records


def test_links_are_followed_once(folder: Path, tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "e.png", seed=9)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "gone.png").symlink_to(tmp_path / "nothing.png")
    data = Folder(str(folder))
    assert len(data) == 7
    assert [data.label(i) for i in range(7)].count("linked/e.png") == 1


def test_bad_files_are_left_out_with_one_message(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic")
    (folder / "empty.jpg").write_bytes(b"")
    content = (folder / "b.png").read_bytes()
    (folder / "cut.png").write_bytes(content[: len(content) // 2])
    picture(folder / "small.png", 10, 100)
    with caplog.at_level(logging.WARNING):
        data = Folder(str(folder), crop=16)
    assert len(data) == 6
    (record,) = caplog.records
    assert record.name == "bltoolbox"
    said = record.getMessage()
    assert said.startswith(f"5 of 11 image files in {folder} are left out: ")
    assert "broken.png" in said and "cut.png cannot be read" in said and said.endswith("; and 2 more")


def test_nothing_to_use(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none of the 6 image files can be used: .*a\.PNG is 20×24, too small for crop 21"
    ):
        Folder(str(folder), crop=21)
    with pytest.raises(ValueError, match=r"too small for resize 50; .*; and 3 more"):
        Folder(str(folder), resize=50)
    with pytest.raises(ValueError, match="crop 20 is larger than resize 16"):
        Folder(str(folder), resize=16, crop=20)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there are no image files in"):
        Folder(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="does not exist"):
        Folder(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="is a file, not a folder"):
        Folder(str(folder / "b.png"))


def test_sizes_must_agree_or_be_made_to(folder: Path) -> None:
    picture(folder / "c.png", 30, 18)
    with pytest.raises(
        ValueError, match=r"a\.PNG is 20×24 and c\.png is 30×18; set crop or resize, e\.g\. to 18"
    ):
        Folder(str(folder))
    assert Folder(str(folder), crop=18).clean(range(7)).shape == (7, 3, 18, 18)
    assert Folder(str(folder), resize=12).clean(range(7)).shape == (7, 3, 12, 12)
    assert Folder(str(folder), resize=12, crop=8).clean(range(7)).shape == (7, 3, 8, 8)


def test_gray_files_alone_are_gray_and_among_colours_rgb(tmp_path: Path) -> None:
    for i in range(3):
        picture(tmp_path / f"{i}.png", seed=i, gray=True)
    gray = Folder(str(tmp_path)).clean(range(3))
    assert gray.shape == (3, 1, 20, 24)
    picture(tmp_path / "3.png", seed=3)
    mixed = Folder(str(tmp_path)).clean(range(4))
    assert mixed.shape == (4, 3, 20, 24)
    assert torch.equal(mixed[:3], gray.expand(-1, 3, -1, -1))


def test_pixels_are_read_when_they_are_asked_for(folder: Path) -> None:
    data = Folder(str(folder))
    before = data.clean([1])
    picture(folder / "b.png", seed=77)
    assert not torch.equal(data.clean([1]), before)
    picture(folder / "b.png", 21, 24)
    with pytest.raises(ValueError, match=r"b\.png is 21×24, but was 20×24 when it was opened"):
        data.clean([1])
    (folder / "b.png").unlink()
    with pytest.raises(ValueError, match=r"there is no file .*b\.png"):
        data.clean([0, 1])


def test_memory_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    for i in range(12):
        picture(tmp_path / f"{i:02}.bmp", 1024, 1024, seed=i)  # 3 MB each, 12 MB as float32
    code = (
        "import ctypes, sys\n"
        "from blt_builtins.data.folder import Folder\n"
        "def anonymous():\n"
        "    ctypes.CDLL(None).malloc_trim(0)\n"  # what is in use, not what the allocator keeps
        "    line = next(line for line in open('/proc/self/status') if line.startswith('RssAnon'))\n"
        "    return int(line.split()[1]) / 1024\n"
        "data = Folder(sys.argv[1])\n"
        "data.clean([0])\n"
        "before = anonymous()\n"
        "for i in range(len(data)):\n"
        "    data.clean([i])\n"
        "print(anonymous() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 30


RECIPE = """\
data: {name: folder, path: images, crop: 16}
regularizer: {name: foe, filters: 3, kernel_size: 3}
sampler: {size: 2}
validation: {count: 2}
budget: {steps: 2}
"""


def test_a_run_from_the_command_line_warns_and_goes_on(folder: Path, tmp_path: Path, blt: Blt) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (folder / "bad.png").write_text("bad")
    done = blt("run", "r.yaml", "-o", "out", "-q", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert (
        len(told) == 1
        and "1 of 7 image files in images are left out: images/bad.png is not an image" in told[0]
    )
    assert done.stdout.startswith("{")


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("data.path=nowhere", 3, "r.yaml:1:7: data: folder: nowhere does not exist"),
        ("data.crop=64", 3, "data: folder: none of the 6 image files can be used"),
        ("data.crop=0", 3, "data.crop: expected a whole number greater than 0"),
        (
            "evaluation={name: folder, path: images, offset: 4, crop: 16}",
            3,
            "evaluation: 2 of the 2 images are of",
        ),
        ("workers=-1", 3, "workers: expected a whole number of at least 0"),
    ],
)
def test_errors_from_the_command_line(
    folder: Path, tmp_path: Path, blt: Blt, override: str, code: int, message: str
) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    done = blt("run", "r.yaml", override, "--dry-run", cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
