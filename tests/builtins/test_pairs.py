"""Recorded measurements: sources, names, layouts, ranges, limits."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from blt_builtins.data.pairs import ContextFile, Pairs
from blt_builtins.operators.mri import MRI
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import RecipeError
from bltoolbox.plugin import FileRefused, Operator, Rows, Theta
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.training.assemble import assemble

COUNT, HEIGHT, WIDTH = 5, 12, 14


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def counts(seed: int = 0, channels: int | None = None) -> np.ndarray:
    shape = (COUNT, HEIGHT, WIDTH) if channels is None else (COUNT, HEIGHT, WIDTH, channels)
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def save_pictures(folder: str, images: np.ndarray, names: str = "{}", suffix: str = ".png") -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(Path(folder, names.format(i) + suffix))


class TestSources:
    @pytest.mark.parametrize("form", ["folder", "glob", "files of arrays", "array"])
    def test_every_form_gives_the_same_images(self, here: Path, form: str) -> None:
        images = counts(channels=3)
        if form == "files of arrays":
            Path("m").mkdir()
            for i, image in enumerate(images):
                np.save(f"m/{i}.npy", image)
        elif form == "array":
            np.save("m.npy", images)
        else:
            save_pictures("m", images)
        path = {"folder": "m", "glob": "m/*.png", "files of arrays": "m/*.npy", "array": "m.npy"}[form]
        expected = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
        data = Pairs(measured=path)
        assert len(data) == COUNT
        assert torch.equal(data.measured([3, 0]), expected[[3, 0]])

    def test_rows_of_an_hdf5_dataset(self, here: Path) -> None:
        h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
        images = counts()
        with h5py.File("a.h5", "w") as file:
            file.create_dataset(
                "deep/images", data=images, chunks=(1, 4, 4), compression="gzip", shuffle=True
            )
        np.save("a.npy", images)
        data, same = Pairs(measured="a.h5:/deep/images"), Pairs(measured="a.npy")
        assert torch.equal(data.measured(range(COUNT)), same.measured(range(COUNT)))

    def test_without_h5py_one_sentence(self, here: Path) -> None:
        Path("a.h5").write_bytes(b"")
        code = (
            "import sys; sys.modules['h5py'] = None\n"
            "from blt_builtins.data.pairs import Pairs\n"
            "from bltoolbox.errors import MissingError\n"
            "try: Pairs(measured='a.h5:/x')\n"
            "except MissingError as error: print(error)\n"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "pip install 'bltoolbox[hdf5]'" in found.stdout and "\n" not in found.stdout.strip()

    def test_only_what_is_asked_for_is_read(self, here: Path) -> None:
        with open("a.npy", "wb") as file:  # 80 GB that take no room
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f4", "fortran_order": False, "shape": (2_000_000, 100, 100)}
            )
            file.truncate(file.tell() + 2_000_000 * 40_000)
        assert torch.equal(Pairs(measured="a.npy").measured([1_999_999]), torch.zeros(1, 1, 100, 100))

    def test_deep_pictures_keep_their_bits(self, here: Path) -> None:
        values = np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) * 300
        Path("m").mkdir()
        Image.fromarray(values).save("m/a.png")
        raw = Pairs(measured="m", range=(0, 65535)).measured([0])
        assert torch.equal(raw[0, 0], torch.from_numpy(values.astype(np.float32)))
        scaled = torch.from_numpy((values / 65535).astype(np.float32))
        assert torch.equal(Pairs(measured="m").measured([0])[0, 0], scaled)

    def test_float_pictures_are_not_clipped(self, here: Path) -> None:
        values = np.linspace(-0.5, 1.5, HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH)
        Path("m").mkdir()
        Image.fromarray(values).save("m/a.tif")
        assert torch.equal(Pairs(measured="m").measured([0])[0, 0], torch.from_numpy(values))

    def test_count_and_offset(self, here: Path) -> None:
        save_pictures("m", counts())
        whole, part = Pairs(measured="m"), Pairs(measured="m", offset=2, count=2)
        assert len(part) == 2 and part.label(0) == whole.label(2) == "2"
        assert torch.equal(part.measured([1]), whole.measured([3]))
        with pytest.raises(IndexError):
            part.measured([2])
        with pytest.raises(ValueError, match="5 samples, but offset 4 and count 2"):
            Pairs(measured="m", offset=4, count=2)

    @pytest.mark.parametrize("path", ["nowhere", "nowhere/*.png", "nowhere.npy", "nowhere.h5:/x"])
    def test_nothing_there(self, here: Path, path: str) -> None:
        with pytest.raises(ValueError, match="nowhere"):
            Pairs(measured=path)


class TestNames:
    def test_stems_match_whatever_the_suffix_and_the_order(self, here: Path) -> None:
        images = counts()
        save_pictures("gt", images)
        Path("low").mkdir()
        for i in reversed(range(COUNT)):
            np.save(f"low/{i}.npy", images[i])
        data = Pairs(measured="low", clean="gt")
        assert torch.equal(data.clean(range(COUNT)), data.measured(range(COUNT)))

    def test_wildcards_match(self, here: Path) -> None:
        images = counts()
        for i, image in enumerate(images):
            save_pictures(f"scans/p{i}", image[None], "low")
            save_pictures(f"scans/p{i}", 255 - image[None], "full")
        data = Pairs(measured="scans/*/low.png", clean="scans/*/full.png")
        assert [data.label(i) for i in range(COUNT)] == [f"p{i}" for i in range(COUNT)]
        assert torch.allclose(data.clean([2]) + data.measured([2]), torch.ones(1), atol=1e-6)

    @pytest.mark.parametrize(
        ("pattern", "file", "name"),
        [
            ("a/*.png", "a/x.1.png", "x.1"),
            ("a/*", "a/x.png", "x"),
            ("a/img_*_low.png", "a/img_7_low.png", "7"),
            ("a/**/*.png", "a/b/c/x.png", "b/c/x"),
            ("a/**/*.png", "a/x.png", "x"),
            ("a/[xy]?.png", "a/x1.png", "x/1"),
        ],
    )
    def test_the_name_of_a_file(self, here: Path, pattern: str, file: str, name: str) -> None:
        path = Path(file)
        save_pictures(str(path.parent), counts()[:1], path.name.removesuffix(".png"))
        assert Pairs(measured=pattern).label(0) == name

    def test_mismatches_are_listed(self, here: Path) -> None:
        save_pictures("gt", counts(), "a{}")
        save_pictures("low", counts()[:2], "a{}")
        save_pictures("low", counts()[:1], "b{}")
        with pytest.raises(ValueError) as caught:
            Pairs(measured="low", clean="gt")
        said = str(caught.value)
        assert "1 of low have no partner in gt (b0)" in said
        assert "3 of gt have no partner in low (a2, a3, a4)" in said

    def test_a_long_list_is_cut(self, here: Path) -> None:
        save_pictures("gt", counts(), "a{}")
        save_pictures("low", counts(), "b{}")
        with pytest.raises(ValueError, match=r"\(b0, b1, b2 and 2 more\)"):
            Pairs(measured="low", clean="gt")

    def test_two_files_of_one_name(self, here: Path) -> None:
        save_pictures("m", counts()[:1])
        save_pictures("m", counts()[:1], suffix=".tif")
        with pytest.raises(ValueError, match="two files of m are called 0"):
            Pairs(measured="m")

    def test_rows_match_by_position(self, here: Path) -> None:
        images = counts()
        save_pictures("gt", images)
        np.save("low.npy", images)
        data = Pairs(measured="low.npy", clean="gt/*.png")
        assert torch.equal(data.clean(range(COUNT)), data.measured(range(COUNT)))
        np.save("low.npy", images[:3])
        with pytest.raises(ValueError, match=r"low.npy has 3 samples and gt/\*.png has 5"):
            Pairs(measured="low.npy", clean="gt/*.png")

    def test_shapes_differ(self, here: Path) -> None:
        save_pictures("m", counts())
        save_pictures("m", counts()[:1, :5], "other")
        with pytest.raises(ValueError, match=r"0.png is 12×14×1 and other.png is 5×14×1"):
            Pairs(measured="m")

    def test_crops_of_one_photograph_stay_together(self, here: Path) -> None:
        np.save("low.npy", counts())
        Path("low.csv").write_text("photograph\na\na\nb\nb\nb\n")
        data = Pairs(measured="low.npy", offset=1)
        groups = [data.group(i) for i in range(4)]
        assert groups[1] == groups[2] == groups[3] != groups[0]
        assert len({Pairs(measured="low.npy", groups="none").group(i) for i in range(COUNT)}) == COUNT

    def test_the_same_file_is_the_same_group(self, here: Path) -> None:
        save_pictures("m", counts())
        first, second = Pairs(measured="m"), Pairs(measured="./m/*.png", offset=3)
        assert first.group(3) == second.group(0)


class TestLayout:
    def test_channels_first_and_last(self, here: Path) -> None:
        images = counts(channels=3)
        np.save("last.npy", images)
        np.save("first.npy", images.transpose(0, 3, 1, 2))
        last, first = (Pairs(measured=f"{name}.npy").measured(range(COUNT)) for name in ("last", "first"))
        assert torch.equal(first, last)

    def test_ambiguous_channels_are_refused(self, here: Path) -> None:
        np.save("a.npy", np.zeros((2, 3, 20, 3), np.float32))
        with pytest.raises(ValueError, match="set layout"):
            Pairs(measured="a.npy").measured([0])
        shapes = {"channels-first": (1, 3, 20, 3), "channels-last": (1, 3, 3, 20)}
        for layout, shape in shapes.items():
            assert Pairs(measured="a.npy", layout=layout).measured([0]).shape == shape  # type: ignore[arg-type]

    def test_complex_numbers_are_pairs_of_channels(self, here: Path) -> None:
        rng = np.random.default_rng(0)
        values = rng.normal(size=(2, 4, 6)) + 1j * rng.normal(size=(2, 4, 6))
        np.save("k.npy", values)
        found = Pairs(measured="k.npy").measured([1])
        assert torch.equal(found[0, 0], torch.from_numpy(values[1].real.astype(np.float32)))
        assert torch.equal(found[0, 1], torch.from_numpy(values[1].imag.astype(np.float32)))


class TestRange:
    def test_counts_are_taken_as_they_are(self, here: Path) -> None:
        values = np.arange(2 * 6 * 6, dtype=np.uint16).reshape(2, 6, 6) * 50
        np.save("a.npy", values)
        data = Pairs(measured="a.npy", clean="a.npy", range=(0, 4095))
        assert data.range == (0, 4095)
        assert torch.equal(data.clean([1])[0, 0], torch.from_numpy(values[1].astype(np.float32)))

    def test_signed_integers_need_a_range(self, here: Path) -> None:
        np.save("hu.npy", np.full((2, 6, 6), -500, np.int16))
        with pytest.raises(ValueError, match=r"int16.*set range"):
            Pairs(measured="hu.npy").measured([0])
        assert float(Pairs(measured="hu.npy", range=(-1000, 2000)).measured([0]).max()) == -500

    def test_noisy_targets_may_leave_the_range(self, here: Path) -> None:
        np.save("a.npy", np.random.default_rng(0).normal(0.5, 0.3, (2, 6, 6)))
        assert Pairs(measured="a.npy", clean="a.npy").offers("clean")

    @pytest.mark.parametrize("range", [(1, 1), (2, 0)])
    def test_an_empty_range(self, here: Path, range: tuple[float, float]) -> None:
        np.save("a.npy", counts())
        with pytest.raises(ValueError, match="is empty"):
            Pairs(measured="a.npy", range=range)

    def test_nan_is_refused_where_it_is_read(self, here: Path) -> None:
        values = np.zeros((2, 6, 6), np.float32)
        values[1, 2, 3] = np.nan
        np.save("a.npy", values)
        data = Pairs(measured="a.npy")
        data.measured([0])
        with pytest.raises(ValueError, match=r"a.npy #1 contains NaN"):
            data.measured([1])


class TestContext:
    def test_entries_are_passed_on_as_they_are(self, here: Path) -> None:
        rng = np.random.default_rng(0)
        np.save("a.npy", counts())
        maps = rng.normal(size=(COUNT, 2, 3)) + 1j * rng.normal(size=(COUNT, 2, 3))
        np.save("maps.npy", maps.astype(np.complex64))
        save_pictures("masks", counts(1))
        context = [ContextFile("maps", "maps.npy"), ContextFile("mask", "masks/*.png")]
        found = Pairs(measured="a.npy", context=context, offset=1).context([2, 0])
        assert torch.equal(found["maps"], torch.from_numpy(maps.astype(np.complex64))[[3, 1]])
        assert torch.equal(found["mask"], torch.from_numpy(counts(1))[[3, 1], None])

    def test_a_number_of_each_sample(self, here: Path) -> None:
        np.save("a.npy", counts())
        np.save("classes.npy", np.arange(COUNT))
        np.save("doses.npy", np.linspace(0, 1, COUNT))
        context = [ContextFile("class", "classes.npy"), ContextFile("dose", "doses.npy")]
        found = Pairs(measured="a.npy", context=context).context([2, 0])
        assert found["class"].tolist() == [2, 0] and found["class"].dtype == torch.int64
        assert found["dose"].tolist() == [float(np.linspace(0, 1, COUNT)[2]), 0.0]
        with pytest.raises(ValueError, match="a row for each sample is needed"):
            Pairs(measured="doses.npy")

    def test_one_row_for_each_measurement(self, here: Path) -> None:
        np.save("a.npy", counts())
        np.save("b.npy", counts()[:3])
        with pytest.raises(ValueError, match=r"b.npy has 3"):
            Pairs(measured="a.npy", context=[ContextFile("mask", "b.npy")])
        with pytest.raises(ValueError, match="twice"):
            Pairs(measured="a.npy", context=[ContextFile("mask", "a.npy")] * 2)


class TestTrust:
    def test_pickles_are_refused(self, here: Path) -> None:
        np.save("a.npy", np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
        with pytest.raises(FileRefused, match="array of numbers"):
            Pairs(measured="a.npy")

    def test_pipes_are_refused(self, here: Path) -> None:
        Path("m").mkdir()
        for name in ("a.npy", "a.h5", "m/a.npy"):
            os.mkfifo(name)
        for path in ("a.npy", "a.h5:/x", "m", "m/*.npy"):
            with pytest.raises(ValueError):
                Pairs(measured=path)

    def test_a_sample_larger_than_the_memory(self, here: Path) -> None:
        with open("a.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f4", "fortran_order": False, "shape": (2, 2**15, 2**15)}
            )
            file.truncate(file.tell() + 2 * 4 * 2**30)
        with pytest.raises(FileRefused, match="BLT_MAX_RECORDED"):
            Pairs(measured="a.npy")

    @pytest.mark.parametrize(
        "trick", ["external link", "soft link", "virtual", "external storage", "chunk", "plugin"]
    )
    def test_hdf5_that_leads_elsewhere(self, here: Path, trick: str) -> None:
        h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
        with h5py.File("other.h5", "w") as file:
            file["x"] = counts()
        with h5py.File("a.h5", "w") as file:
            if trick == "external link":
                file["x"] = h5py.ExternalLink("other.h5", "/x")
            elif trick == "soft link":
                file["real"] = counts()
                file["x"] = h5py.SoftLink("/real")
            elif trick == "virtual":
                layout = h5py.VirtualLayout((COUNT, HEIGHT, WIDTH), np.uint8)
                layout[:] = h5py.VirtualSource("other.h5", "x", (COUNT, HEIGHT, WIDTH))
                file.create_virtual_dataset("x", layout)
            elif trick == "external storage":
                file.create_dataset("x", (2, 3, 3), np.uint8, external=[("/etc/hostname", 0, 18)])
            elif trick == "chunk":
                file.create_dataset(
                    "x", (4, 2**15, 2**14), np.uint8, chunks=(4, 2**14, 2**13), compression="gzip"
                )
            else:
                settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                settings.set_chunk((1, 3, 3))
                settings.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
                space = h5py.h5s.create_simple((2, 3, 3))
                h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_FLOAT, space, settings)
        with pytest.raises((ValueError, FileRefused)) as caught:
            Pairs(measured="a.h5:/x")
        word = {
            "chunk": "BLT_MAX_RECORDED",
            "plugin": "plugin",
            "external link": "is a link",
            "soft link": "is a link",
        }
        assert word.get(trick, "other files") in str(caught.value)

    @pytest.mark.parametrize("compression", ["gzip", "lzf", "shuffle", "checksum", "none"])
    def test_hdf5_chunks_of_every_encoding(self, here: Path, compression: str) -> None:
        h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
        options = {
            "gzip": {"compression": "gzip"},
            "lzf": {"compression": "lzf"},
            "shuffle": {"compression": "gzip", "shuffle": True},
            "checksum": {"compression": "lzf", "shuffle": True, "fletcher32": True},
            "none": {},
        }[compression]
        smooth, rough = np.zeros((70, 90)), np.random.default_rng(0).random((70, 90))
        written = np.stack([smooth, rough, smooth + 0.5]).astype(np.float32)
        with h5py.File("a.h5", "w") as file:
            # Row 1 is not compressible, row 3 was never written, and the last chunks reach beyond the border.
            file.create_dataset("x", (4, 70, 90), np.float32, chunks=(2, 32, 64), **options)
            file["x"][:3] = written
        read = Pairs(measured="a.h5:/x").measured(range(4))
        assert torch.equal(read[:3, 0], torch.from_numpy(written)) and not read[3].any()

    @pytest.mark.parametrize("trick", ["more", "fewer", "raw", "lzf", "twice", "scale", "chunks"])
    def test_hdf5_chunks_of_another_size(self, here: Path, trick: str) -> None:
        """HDF5 would make room for any expansion, and would read beyond the end of a chunk that is too small."""
        h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
        bomb = zlib.compress(bytes(2**26), 1)
        with h5py.File("a.h5", "w") as file:
            settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            settings.set_chunk((1, 1, 1) if trick == "chunks" else (1, 12, 12))
            for _ in range({"chunks": 0, "twice": 2}.get(trick, 1)):
                if trick == "scale":
                    settings.set_scaleoffset(h5py.h5z.SO_INT, 0)
                elif trick == "lzf":
                    settings.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
                else:
                    settings.set_deflate(9)
            side = 300 if trick == "chunks" else 12
            space = h5py.h5s.create_simple((2, side, side))
            dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, settings)
            chunk, skipped = {
                "more": (bomb, 0),
                "fewer": (zlib.compress(b"few"), 0),
                "raw": (b"few", 1),
                "lzf": (b"\x00a" + b"\xff\xff\x00" * 1000, 0),
                "twice": (zlib.compress(bomb), 0),
            }.get(trick, (None, 0))
            if chunk is not None:
                dataset.write_direct_chunk((0, 0, 0), chunk, skipped)
        assert os.path.getsize("a.h5") < 2**20
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=r"a\.h5:/x is refused: ") as caught:
                Pairs(measured="a.h5:/x").measured([0])
            assert tracemalloc.get_traced_memory()[1] < 2**24
        finally:
            tracemalloc.stop()
        reason = {"raw": "fewer", "lzf": "more", "scale": "neither by gzip", "chunks": "90000 chunks"}
        assert reason.get(trick, trick) in str(caught.value)

    def test_hdf5_with_a_damaged_part_is_a_sentence(self, here: Path) -> None:
        h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
        with h5py.File("whole.h5", "w") as file:
            file.create_dataset("x", data=counts(), chunks=(1, HEIGHT, WIDTH), compression="gzip")
        whole, sentences = Path("whole.h5").read_bytes(), set()
        for place in range(0, len(whole), 40):
            Path("a.h5").write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
            try:
                Pairs(measured="a.h5:/x").measured(range(COUNT))
            except ValueError as error:
                sentences.add(str(error))
        causes = [sentence for sentence in sentences if sentence.startswith("a.h5 cannot be read as HDF5: ")]
        assert len(causes) > 3 and all(len(sentence.splitlines()) == 1 for sentence in sentences)

    def test_the_datasets_of_a_file_are_named(self, here: Path) -> None:
        h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
        with h5py.File("a.h5", "w") as file:
            file["low"] = counts()
            file.create_group("group")
        with pytest.raises(ValueError, match=r"name one, e.g. a.h5:/"):
            Pairs(measured="a.h5")
        with pytest.raises(ValueError, match="no dataset /high"):
            Pairs(measured="a.h5:/high")
        with pytest.raises(ValueError, match="group of datasets"):
            Pairs(measured="a.h5:/group")
        Path("b.h5").write_bytes(b"nothing of the kind")
        with pytest.raises(ValueError, match="cannot be read as HDF5"):
            Pairs(measured="b.h5:/x")

    def test_transparent_pictures_are_refused(self, here: Path) -> None:
        Path("m").mkdir()
        Image.fromarray(np.full((6, 6, 4), 100, np.uint8)).save("m/a.png")
        with pytest.raises(ValueError, match="transparent"):
            Pairs(measured="m").measured([0])


class Masked(Operator):
    """Keeps the pixels that the mask of each sample names."""

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return x * context["mask"]

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return y * context["mask"]


class TestInARecipe:
    def recipe(self, **sections: object) -> object:
        np.save("clean.npy", counts())
        np.save("low.npy", counts())
        base = {
            "data": {"name": "pairs", "measured": "low.npy", "clean": "clean.npy"},
            "color": "gray",
            "sampler": {"name": "full"},
            "regularizer": {"name": "tv"},
            "validation": {"count": 1},
            "budget": {"steps": 1},
            "device": "cpu",
        }
        return recipe_from_dict(base | sections)

    def test_nothing_is_added(self, here: Path) -> None:
        experiment = assemble(self.recipe())  # type: ignore[arg-type]
        sample = experiment.train.samples.batch([0, 1])
        assert torch.equal(sample.y, sample.truth)  # type: ignore[arg-type]

    def test_noise_is_refused(self, here: Path) -> None:
        with pytest.raises(RecipeError, match="recorded, and nothing is added to them; remove noise"):
            self.recipe(noise=0.1)

    def test_shapes_against_the_operator(self, here: Path) -> None:
        recipe = self.recipe(operator={"name": "downsampling", "factor": 2})
        with pytest.raises(RecipeError, match="measurements are 1×12×14, but the operator makes 1×6×7"):
            assemble(recipe)  # type: ignore[arg-type]

    def test_an_operator_that_cannot_treat_the_measurements(self, here: Path) -> None:
        np.save("odd.npy", np.zeros((COUNT, 3, 5, 7), np.float32))
        np.save("flat.npy", np.zeros((COUNT, 5, 7), np.float32))
        with pytest.raises(ValueError, match="complex numbers are pairs of channels"):
            Samples(Pairs(measured="odd.npy"), MRI())
        with pytest.raises(ValueError, match="cannot treat the measurements, which are 1×5×7: 'mask'"):
            Samples(Pairs(measured="flat.npy"), Masked())

    def test_a_forgotten_range_is_noticed(self, here: Path) -> None:
        np.save("a.npy", np.linspace(0, 4095, 5 * 36, dtype=np.float32).reshape(5, 6, 6))
        data = {"name": "pairs", "measured": "a.npy", "clean": "a.npy"}
        with pytest.raises(RecipeError, match=r"far outside the range \[0, 1\] of the data; give the range"):
            assemble(self.recipe(data=data))  # type: ignore[arg-type]
        assemble(self.recipe(data=data | {"range": [0, 4095]}))  # type: ignore[arg-type]
