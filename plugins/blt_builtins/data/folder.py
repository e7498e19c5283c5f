"""Images from a folder and its subfolders.

PNG, JPEG, TIFF, WebP, BMP, GIF, PPM, JPEG 2000 and, if Pillow supports it, AVIF. Files are sorted by path, so ids do
not depend on the file system. Only headers are read at first; the pixels of an image are decoded on request and not
kept, so the set may be larger than the memory. With ``workers`` in the recipe, several threads decode.

A photograph is rotated according to its EXIF orientation; transparent pixels are composited over white; palettes and
CMYK become RGB; 16-bit gray keeps its precision. A folder of gray files has one channel; one colour file among them
makes all images RGB. Files that are damaged, too small or of an unsupported format are left out, with one message.
Hidden files are ignored.

Prefer it for photographs as they come from a camera or a data set; crops that are used repeatedly are read faster
from one ``array``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt
from PIL import Image
from torch import Tensor

from blt_builtins.data.file_names import files_below
from blt_builtins.data.files import ImageFiles, real_path
from blt_builtins.data.ranges import check_range
from bltoolbox.plugin import SUFFIXES, Data

#: Images, too, but of kinds that are not read: worth a word rather than silence.
_UNREADABLE = frozenset(
    {
        ".heic",
        ".heif",
        ".jxl",
        ".svg",
        ".psd",
        ".eps",
        ".raw",
        ".dng",
        ".cr2",
        ".cr3",
        ".nef",
        ".arw",
        ".orf",
        ".exr",
    }
)


class Folder(Data):
    """Image files of a folder, decoded when they are needed.

    Args:
        path: The folder.
        count: Number of files to use; by default all from ``offset`` on. Unusable files are counted and left out, so
            a range means the same files whatever ``crop`` and ``resize`` are.
        offset: Position of the first file to use, in the order of paths, e.g. to hold out the files before it.
        crop: Side of a square crop around the centre, after ``resize`` if both are set; by default the full image.
        resize: Scale the shorter side to this length (never enlarging it) and cut out the middle square.
    """

    def __init__(
        self,
        path: str,
        count: Annotated[int, Gt(0)] | None = None,
        offset: Annotated[int, Ge(0)] = 0,
        crop: Annotated[int, Gt(0)] | None = None,
        resize: Annotated[int, Gt(0)] | None = None,
    ) -> None:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            what = (
                "is a file, not a folder" if folder.exists() else f"does not exist (looked in {Path.cwd()})"
            )
            raise ValueError(f"{path} {what}; give the path of a folder of images")
        if crop is not None and resize is not None and crop > resize:
            raise ValueError(
                f"crop {crop} is larger than resize {resize}; a crop is cut from the resized image"
            )
        files = files_below(folder, SUFFIXES | _UNREADABLE)
        names = sorted(file.relative_to(folder).as_posix() for file in files)
        if not names:
            raise ValueError(f"there are no image files in {path} or its subfolders")
        check_range(f"{path} holds {len(names)} image files", len(names), offset, count)
        self.path = path
        end = None if count is None else offset + count
        self._files = ImageFiles(folder, names[offset:end], resize=resize, crop=crop)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        for i, name in enumerate(("a.png", "b.jpg", "more/c.tif", "more/d.webp", "e.bmp")):
            pixels = rng.integers(256, size=(14 + i, 18 - i, 3), dtype=np.uint8)
            (folder / name).parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(folder / name)
        return {"path": str(folder), "crop": 10}

    def __len__(self) -> int:
        return len(self._files)

    def clean(self, ids: Sequence[int]) -> Tensor:
        return self._files.read(ids)

    def label(self, id: int) -> str:
        return self._files.label(id)

    def group(self, id: int) -> str:
        return f"file {real_path(self._files.path(id))}"
