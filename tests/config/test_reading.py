"""Files of others: what they declare is compared with a limit before anything is allocated, and nothing waits."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import pickle
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from bombs import GROWTH, deflated, inflating, npy, read_in_process, sparse, tiff, with_index
from PIL import Image

from blt_builtins.data.array import Array
from blt_builtins.data.groups import read_groups
from blt_builtins.operators.arrays import read_mask
from bltoolbox.config.reading import (
    JSON,
    LIMITS,
    PIXELS,
    FileRefused,
    open_file,
    parse_json,
    read_bytes,
    read_json,
)
from bltoolbox.config.recipe import load_recipe
from bltoolbox.errors import BltError, UsageError
from bltoolbox.reports.html.pictures import read_scenes
from bltoolbox.restoration.model import read_theta
from bltoolbox.restoration.npy import map_array
from bltoolbox.restoration.pictures.files import read_picture
from bltoolbox.restoration.pictures.images import ImageError, read_header
from bltoolbox.restoration.pictures.kernels import parse_kernel
from bltoolbox.runs.history import RunHistory
from bltoolbox.runs.locks import is_locked
from bltoolbox.runs.logs import Tail, read_status
from bltoolbox.training.checkpoint import MAGIC, DamagedCheckpoint, read_checked, write_checked
from bltoolbox.training.payload import PayloadError, check_payload

ROOT = Path(__file__).parents[2]
TERABYTE = 2**40
MASK = "from blt_builtins.operators.arrays import read_mask"
KERNEL = "from bltoolbox.restoration.pictures.kernels import parse_kernel"
PICTURE = "from pathlib import Path; from bltoolbox.restoration.pictures.files import read_picture"
HISTORY = (
    "from pathlib import Path; from bltoolbox.runs.history import RunHistory; "
    "from bltoolbox.runs.logs import read_status"
)


def refused(imports: str, call: str) -> str:
    """The sentence with which a file is refused in a process with little memory, none of which was taken."""
    said, growth = read_in_process(imports, call)
    assert "MemoryError" not in said and "fit into memory" not in said, said
    assert growth < GROWTH, f"{growth / 2**20:.0f} MiB: {said}"
    return said


@pytest.fixture
def promptly() -> Iterator[None]:
    """Waiting for a pipe fails instead of going on for ever."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("opening the file waits for somebody to write to it")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class TestLimits:
    def test_the_table_in_the_documentation_is_that_of_the_code(self) -> None:
        text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
        rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
        memory = "half of the memory"
        expected = [
            f"| {one.what} | {memory if memory[:4] in one.reason else one} | {one.reason} |"
            f" {f'`{one.variable}`' if one.variable else '–'} |"
            for one in LIMITS
        ]
        assert rows == expected

    def test_the_sentence_says_what_where_and_how_to_go_on(self, tmp_path: Path) -> None:
        path = sparse(tmp_path / "a.json", TERABYTE)
        with pytest.raises(FileRefused) as caught:
            read_bytes(path, JSON)
        assert str(caught.value) == (
            f"{path} is refused: it declares 1024 GiB, and the limit for a JSON file is 32 MiB; if you trust it,"
            f" set BLT_MAX_JSON={TERABYTE}"
        )

    def test_a_variable_changes_a_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Image.new("L", (30, 20)).save(tmp_path / "a.png")
        Image.new("L", (30, 20)).save(tmp_path / "a.tif")
        for name in ("a.png", "a.tif"):
            monkeypatch.setenv("BLT_MAX_PIXELS", "599")
            with pytest.raises(ImageError, match="BLT_MAX_PIXELS"):
                read_header(tmp_path / name)
            monkeypatch.setenv("BLT_MAX_PIXELS", "600")
            assert read_header(tmp_path / name).width == 30

    @pytest.mark.parametrize("text", ["-1", "0", "many", "1e9", "²", "9" * 40])
    def test_a_variable_that_is_no_number(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BLT_MAX_PIXELS", text)
        with pytest.raises(UsageError, match="positive whole number"):
            _ = PIXELS.most

    def test_no_file_is_read_in_another_way(self) -> None:
        """Whoever reads files of others uses this module; the exceptions read what is installed with the toolbox, or
        what it has just written."""
        own = {
            *("registry.py", "scaffold.py", "launch.py", "page.py", "photos.py", "reading.py"),
            *("plugin_api.py", "__main__.py", "recipes.py", "sampler.py"),
        }
        names = {
            *("read_text", "read_bytes", "open", "load", "loads", "memmap", "fromfile", "safe_load"),
            *("loadtxt", "genfromtxt", "imread", "File", "TiffFile", "ZipFile"),
        }
        #: Other objects have a method of this name, too.
        loaders = ("np.load", "numpy.load", "torch.load", "json.load", "yaml.load", "pickle.load")
        allowed = {
            *("images.py Image.open", "download.py tarfile.open", "model.py safe_open", "npy.py np.memmap"),
            *(
                "npy.py np.fromfile",
                "checkpoint.py torch.load",
                "importing.py torch.load",
                "stl10.py np.memmap",
                "ranks.py json.loads",
            ),
            *(
                "cache.py load",
                "hdf5.py h5py.File",
                "files.py tifffile.TiffFile",
                "payload.py zipfile.ZipFile",
            ),
            *("payload.py inspector.load", "pictures.py known.load", "pictures.py image.load"),
            *("images.py image.load", "profiling.py exported.read_bytes", "download.py part.open"),
            "logger.py file.read_bytes",
            # What the system says about itself, and a function of this name.
            *("chunk_size.py open", "scratch.py MOUNTS.read_text", "forms.py _CPU.read_text"),
            "next_batch.py load",
        }
        found = set()
        for path in [*ROOT.glob("bltoolbox/**/*.py"), *ROOT.glob("plugins/**/*.py")]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or path.name in own:
                    continue
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                writes = any(
                    isinstance(one, ast.Constant) and set(str(one.value)) & set("wa") for one in node.args
                )
                pure = isinstance(called, ast.Name) and name in ("read_text", "read_bytes")
                if name in names and not pure and not (name == "open" and writes):
                    found.add(f"{path.name} {ast.unparse(called)}")
        assert {
            one
            for one in found
            if one not in allowed and (one.endswith(loaders) or not one.endswith((".load", "os.open")))
        } == set()


class TestJson:
    DEEP = "[" * 100_000 + "]" * 100_000

    def test_depth(self, tmp_path: Path) -> None:
        for text in (self.DEEP, '{"a":' * 65 + "1" + "}" * 65, "[" * 65 + "]" * 65):
            with pytest.raises(FileRefused, match="64 levels"):
                parse_json(text, "a.json")
        assert parse_json("[" * 64 + "]" * 64, "a.json")
        (tmp_path / "a.json").write_text(self.DEEP)
        with pytest.raises(FileRefused, match=r"a\.json is refused"):
            read_json(tmp_path / "a.json")

    @pytest.mark.parametrize("content", [DEEP, ""])
    def test_a_run_directory_is_read_all_the_same(self, content: str, tmp_path: Path) -> None:
        """Nested, or a terabyte that takes no room."""
        (tmp_path / "images").mkdir()
        (tmp_path / "resolved.yaml").write_text("seed: 0\n")
        names = (
            "status.json",
            "env.json",
            "metrics.jsonl",
            "timings.jsonl",
            "checks.jsonl",
            "images/evaluation.json",
        )
        for name in names:
            if content:
                (tmp_path / name).write_text(content)
            else:
                sparse(tmp_path / name, TERABYTE)
        said, growth = read_in_process(HISTORY, f"print(RunHistory.read(Path({str(tmp_path)!r})).notes)")
        assert "metrics.jsonl" in said and said.endswith("read") and growth < GROWTH
        assert read_status(tmp_path) is None and read_scenes(tmp_path) == []
        assert Tail(tmp_path / "metrics.jsonl").look() == []


class TestPipesAndLinks:
    READERS: ClassVar[dict[str, Callable[[Path], object]]] = {
        "recipe": load_recipe,
        "theta": read_theta,
        "picture": read_picture,
        "image": read_header,
        "array": lambda path: Array(str(path)),
        "mask": lambda path: read_mask(str(path)),
        "kernel": lambda path: parse_kernel(f"{path}.npy"),
        "table": lambda path: read_groups(path, 3, str(path)),
        "checkpoint": read_checked,
        "mapped": map_array,
        "json": read_json,
    }

    @pytest.mark.parametrize("kind", READERS)
    @pytest.mark.parametrize("what", ["pipe", "device"])
    def test_special_files_are_refused_at_once(
        self, kind: str, what: str, tmp_path: Path, promptly: None
    ) -> None:
        for name in ("a", "a.npy"):
            if what == "pipe":
                os.mkfifo(tmp_path / name)
            else:
                (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises((BltError, ValueError)):
            self.READERS[kind](tmp_path / "a")

    def test_pipes_in_a_run_directory(self, tmp_path: Path, promptly: None) -> None:
        (tmp_path / "resolved.yaml").write_text("seed: 0\n")
        for name in ("status.json", "env.json", "metrics.jsonl", "timings.jsonl", "checks.jsonl", "lock"):
            os.mkfifo(tmp_path / name)
        history = RunHistory.read(tmp_path)
        assert any("named pipe" in note for note in history.notes)
        assert not is_locked(tmp_path) and Tail(tmp_path / "metrics.jsonl").look() == []

    def test_links_inside_a_run_directory_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "private.json").write_text('{"status": "a secret"}')
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "status.json").symlink_to(tmp_path / "private.json")
        assert read_status(tmp_path / "run") is None
        with pytest.raises(FileRefused, match="symbolic link"):
            open_file(tmp_path / "run" / "status.json", follow=False)
        # The user may name a link, and a run directory may be one.
        assert read_json(tmp_path / "run" / "status.json")["status"] == "a secret"
        (tmp_path / "run" / "status.json").unlink()
        (tmp_path / "run" / "status.json").write_text('{"status": "ended"}')
        (tmp_path / "link").symlink_to(tmp_path / "run")
        assert read_status(tmp_path / "link") == {"status": "ended"}


class TestArrays:
    def test_sparse_masks_and_kernels(self, tmp_path: Path) -> None:
        path = npy(tmp_path / "a.npy", (70_000, 70_000))
        assert "limit for a mask is 134217728 elements" in refused(MASK, f"read_mask({str(path)!r})")
        said = refused(KERNEL, f"parse_kernel({str(path)!r})")
        assert said.startswith("UsageError") and "limit for a blur kernel" in said

    def test_a_sparse_array_of_images(self, tmp_path: Path) -> None:
        path = str(npy(tmp_path / "a.npy", (1, 2**19, 2**19), "|u1"))
        with pytest.raises(ValueError, match=r"BLT_MAX_PIXELS"):
            Array(path)
        with pytest.raises(ValueError, match="limit for the images of a data set"):
            Array(str(npy(tmp_path / "a.npy", (2**30, 2, 2), "|u1")))
        # Any number of bytes is mapped: a terabyte of small images is fine.
        many = Array(str(npy(tmp_path / "a.npy", (2**20, 1024, 1024), "|u1")))
        assert many.clean([2**20 - 1]).shape == (1, 1, 1024, 1024)

    def test_archives_and_pickles_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.npy"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("arr_0.npy", bytes(1000))
        for content in (path.read_bytes(), pickle.dumps([1]), b"\x93NUMPY\x03\x00" + bytes(80)):
            path.write_bytes(content)
            for read in (
                lambda: read_mask(str(path)),
                lambda: Array(str(path)),
                lambda: parse_kernel(str(path)),
            ):
                with pytest.raises((ValueError, UsageError), match=r"cannot be read as an \.npy array"):
                    read()

    @pytest.mark.parametrize(
        "header",
        [
            b"{'descr': '|O', 'fortran_order': False, 'shape': (2, 2), }",
            b"{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -2), }",
            b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }",
            b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 1), }",
            b"(" * 5000,
            b" " * 20_000,
        ],
    )
    def test_headers_that_lie(self, header: bytes, tmp_path: Path) -> None:
        """32 bytes of data: four numbers."""
        path = tmp_path / "a.npy"
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(32))
        with pytest.raises(FileRefused):
            map_array(path)

    def test_good_arrays_in_both_orders(self, tmp_path: Path) -> None:
        values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        for array in (values, np.asfortranarray(values), values[:0], values.astype(">f4")):
            np.save(tmp_path / "a.npy", array)
            np.testing.assert_array_equal(map_array(tmp_path / "a.npy"), array)

    def test_a_table_is_not_read_further_than_it_fits(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("photo\n" + "x\n" * 1000)
        with pytest.raises(ValueError, match="more rows"):
            read_groups(tmp_path / "a.npy", 3, "auto")
        sparse(tmp_path / "a.csv", TERABYTE)
        with pytest.raises(ValueError, match="BLT_MAX_TABLE"):
            read_groups(tmp_path / "a.npy", 3, "auto")


class TestTiff:
    """A picture of 8×8 pixels with one tag changed."""

    def test_the_plain_one_is_read(self, tmp_path: Path) -> None:
        assert read_picture(tiff(tmp_path / "a.tif", {})).colours.shape == (8, 8, 3)

    @pytest.mark.parametrize(
        ("tags", "limit"),
        [
            ({32997: (2**22,)}, "for an image is"),
            ({256: (60_000,), 257: (60_000,)}, "for an image is"),
            ({258: (16,) * 3, 277: (65_535,)}, "samples per pixel"),
            ({258: (16,) * 2000}, "samples per pixel"),
            ({258: (16, 16, 2**20)}, "64 bits"),
            ({256: (9000,), 257: (9000,), 258: (64,) * 8, 277: (8,)}, "decoded TIFF"),
            ({322: (2**15,), 323: (2**15,), 324: (8,), 325: (384,)}, "a tile of"),
            ({259: (61234,)}, "unknown compression"),
        ],
    )
    def test_numbers_that_multiply(
        self, tags: dict[int, tuple[int, ...]], limit: str, tmp_path: Path
    ) -> None:
        path = tiff(tmp_path / "a.tif", tags)
        assert path.stat().st_size < 10_000
        said = refused(PICTURE, f"read_picture(Path({str(path)!r}))")
        assert said.startswith(f"ImageError {path}") and limit in said

    def test_a_strip_that_inflates(self, tmp_path: Path) -> None:
        path = tiff(tmp_path / "a.tif", {259: (8,)}, inflating(2**29))
        assert "inflates to more" in refused(PICTURE, f"read_picture(Path({str(path)!r}))")

    def test_tags_that_share_their_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "a.tif"
        content = tiff(path, {60_000 + k: (k,) for k in range(100)}).read_bytes()
        shared = b"".join(struct.pack("<HHII", 60_000 + k, 1, 2**20, 8) for k in range(100))
        plain = b"".join(struct.pack("<HHII", 60_000 + k, 4, 1, k) for k in range(100))
        assert plain in content
        path.write_bytes(content.replace(plain, shared) + bytes(2**21))
        with pytest.raises(ImageError, match="tags declare"):
            read_picture(path)

    def test_a_sparse_picture(self, tmp_path: Path) -> None:
        Image.new("L", (8, 8)).save(tmp_path / "b.webp")
        path = sparse(tmp_path / "a.webp", TERABYTE, (tmp_path / "b.webp").read_bytes())
        assert "BLT_MAX_IMAGE_FILE" in refused(PICTURE, f"read_picture(Path({str(path)!r}))")


def write_payload(path: Path, payload: bytes) -> Path:
    """A checkpoint with the right checksum, which anybody can compute."""
    path.write_bytes(MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
    return path


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def index_of(payload: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


class TestCheckpoints:
    def test_what_a_run_may_keep(self, tmp_path: Path) -> None:
        weights = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        content = {
            "theta": {"a": weights, "same": weights, "row": weights[0], "none": torch.empty(0, 3)},
            "numbers": [1, 2.5, None, True, "text", b"bytes", (1, 2), {3: 4}, {5}, 1j],
            "tensors": [
                torch.zeros(2, dtype=kind) for kind in (torch.uint16, torch.bfloat16, torch.complex128)
            ],
            "kinds": [torch.float32, torch.device("cpu"), torch.Size([1, 2])],
            "module": torch.nn.Linear(2, 2).state_dict(),
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "expanded": torch.ones(1).expand(1000),
        }
        write_checked(tmp_path / "a.ckpt", content)
        back = read_checked(tmp_path / "a.ckpt")
        assert back["numbers"] == content["numbers"] and back["kinds"] == content["kinds"]
        assert torch.equal(back["theta"]["a"], weights) and back["theta"]["a"].stride() == weights.stride()
        assert torch.equal(back["expanded"], torch.ones(1000))

    def test_deflated_records(self, tmp_path: Path) -> None:
        path = write_payload(tmp_path / "a.ckpt", deflated(saved({"rows": torch.zeros(2**27)})))
        assert path.stat().st_size < 2**20
        said = refused(
            "from pathlib import Path; from bltoolbox.training.checkpoint import read_checked",
            f"read_checked(Path({str(path)!r}))",
        )
        assert said.startswith("DamagedCheckpoint") and "compressed" in said

    @pytest.mark.parametrize(
        "tensors",
        [
            torch.zeros(1).expand(2**40),
            list(torch.zeros(2**20).expand(40, -1)),
            torch.zeros(2**20).as_strided((2**20, 2**10), (1, 0)),
        ],
    )
    def test_tensors_that_show_more_than_there_is(self, tensors: object, tmp_path: Path) -> None:
        path = write_payload(tmp_path / "a.ckpt", saved({"rows": tensors}))
        with pytest.raises(DamagedCheckpoint, match="tensors would take"):
            read_checked(path)

    def test_storages_that_declare_more_than_their_record(self, tmp_path: Path) -> None:
        """Refused whether or not the installed torch checks it."""
        payload = saved({"rows": torch.zeros(1000, dtype=torch.uint8)})
        index = index_of(payload)
        number = b"M" + struct.pack("<H", 1000)
        assert index.count(number) == 2
        larger = index.replace(number, b"J" + struct.pack("<i", 10**9))
        path = write_payload(tmp_path / "a.ckpt", with_index(payload, larger))
        with pytest.raises(DamagedCheckpoint, match="its record has 1000"):
            read_checked(path)

    @pytest.mark.parametrize(
        ("index", "reason"),
        [
            (
                b"\x80\x02cbuiltins\nbytearray\n(\x8a\x05" + (10**11).to_bytes(5, "little") + b"tR.",
                "bytearray",
            ),
            (b"\x80\x02ctorch\nFloatTensor\n(J\xff\xff\xff\x7ftR.", "FloatTensor"),
            (b"\x80\x02}r\xff\xff\xff\x7f.", "memo"),
            (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "not plain data"),
            (b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.", "os.system"),
            (b"", "not plain data"),
        ],
    )
    def test_an_index_that_allocates(self, index: bytes, reason: str, tmp_path: Path) -> None:
        path = write_payload(tmp_path / "a.ckpt", with_index(saved({}), index))
        with pytest.raises(DamagedCheckpoint, match=reason):
            read_checked(path)

    def test_the_payload_cannot_change_its_inspector(self) -> None:
        """BUILD sets attributes of whatever stands before it: here four bytes per number to one."""
        payload = saved({"rows": torch.zeros(1000)})
        index = index_of(payload)
        kind, number = b"ctorch\nFloatStorage\n", b"M" + struct.pack("<H", 1000)
        assert kind in index and number in index
        for state in (b"}X\x04\x00\x00\x00sizeK\x01s", b"N}X\x04\x00\x00\x00sizeK\x01s\x86"):
            evil = index.replace(kind, kind + state + b"b").replace(number, b"M" + struct.pack("<H", 4000))
            with pytest.raises(PayloadError, match="declares 16000 bytes, its record has 4000"):
                check_payload(with_index(payload, evil))

    def test_a_sparse_checkpoint(self, tmp_path: Path) -> None:
        path = sparse(tmp_path / "a.ckpt", TERABYTE, MAGIC + b"0" * 64 + b"\n")
        with pytest.raises(DamagedCheckpoint, match="BLT_MAX_CHECKPOINT"):
            read_checked(path)


class TestTheta:
    @pytest.mark.parametrize(
        ("size", "start", "limit"),
        [(TERABYTE, b"", "BLT_MAX_THETA"), (2**29, (2**28).to_bytes(8, "little"), "header of a θ file")],
    )
    def test_sparse_files(self, size: int, start: bytes, limit: str, tmp_path: Path) -> None:
        path = sparse(tmp_path / "a.safetensors", size, start)
        with pytest.raises(FileRefused, match=limit):
            read_theta(path)

    def test_a_link_is_followed_only_where_it_is_named(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
        (tmp_path / "run").mkdir()
        link = tmp_path / "run" / "theta.safetensors"
        link.symlink_to(tmp_path / "a.safetensors")
        assert list(read_theta(link)[0]) == ["a"]
        with pytest.raises(FileRefused, match="symbolic link"):
            read_theta(tmp_path / "run")

    def test_a_nested_recipe(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        from bltoolbox.restoration.model import Model

        path = tmp_path / "a.safetensors"
        save_file({"a": torch.zeros(1)}, path, {"recipe": TestJson.DEEP})
        with pytest.raises(BltError, match="its recipe is damaged"):
            Model.load(path, "cpu")
