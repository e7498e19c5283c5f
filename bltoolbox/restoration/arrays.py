"""Arrays, tensors and images of Pillow: results have the kind, dtype, shape and range of the input. Files, too, which
become images of Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bltoolbox.errors import BltError
from bltoolbox.restoration.measurements import looks_turned
from bltoolbox.restoration.pictures.files import read_picture
from bltoolbox.restoration.pictures.images import ImageError

if TYPE_CHECKING:
    from bltoolbox.restoration.tiles import Restorer

#: Floats beyond this are surely not meant for [0, 1], however strong the noise.
_LARGEST = 8.0
#: Modes of Pillow whose numbers are a picture; others are converted.
_MODES = ("L", "LA", "RGB", "RGBA", "F", "I", "I;16", "I;16L", "I;16B", "I;16N")


def restore_array(restorer: Restorer, image: Any, noise: float | str | None) -> Any:
    """Restore pictures; each one separately, so that batching does not affect the result."""
    if isinstance(image, Tensor):
        return _restore_tensor(restorer, image, noise)
    if isinstance(image, str | Path):
        return _as_image(restore_array(restorer, _read(Path(image)), noise))
    if isinstance(image, Image.Image):
        return _as_image(restore_array(restorer, np.array(_plain(image)), noise))
    if not isinstance(image, np.ndarray):
        raise BltError(
            f"expected a NumPy array, a tensor, an image of Pillow or a path, got {type(image).__name__}"
        )
    if image.ndim not in (2, 3):
        raise BltError(f"expected an array of shape (H, W) or (H, W, C), got {image.shape}")
    planes = image[..., None] if image.ndim == 2 else image
    if planes.shape[2] > 4:
        raise BltError(
            f"an array of shape {image.shape} would have {planes.shape[2]} channels; arrays are (H, W, C),"
            " tensors (C, H, W)"
        )
    restored = _restore_planes(restorer, planes, noise)
    return restored[..., 0] if image.ndim == 2 else restored


def _read(path: Path) -> NDArray[Any]:
    """The pixels of a file, turned as it is shown."""
    try:
        picture = read_picture(path)
    except ImageError as error:
        raise BltError(str(error)) from error
    pixels = picture.colours
    if picture.kind == "cmyk" or (pixels.dtype == np.uint16 and pixels.shape[2] > 1):
        kind = "the colours CMYK" if picture.kind == "cmyk" else "16 bits per colour"
        raise BltError(f"{path} has {kind}, which an image of Pillow cannot keep; use blt apply")
    return pixels if picture.alpha is None else np.concatenate([pixels, picture.alpha], axis=2)


def _plain(image: Image.Image) -> Image.Image:
    if image.mode in _MODES:
        return image
    if image.mode == "1":
        return image.convert("L")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _as_image(pixels: NDArray[Any]) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def _restore_tensor(restorer: Restorer, image: Tensor, noise: float | str | None) -> Tensor:
    if image.ndim not in (2, 3, 4):
        raise BltError(
            f"expected a tensor of shape (H, W), (C, H, W) or (B, C, H, W), got {tuple(image.shape)}"
        )
    if image.ndim > 2 and looks_turned(image.shape):
        axes = "2, 0, 1" if image.ndim == 3 else "0, 3, 1, 2"
        raise BltError(
            f"a tensor of shape {tuple(image.shape)} seems to be (H, W, C), but tensors are (C, H, W); give"
            f" image.permute({axes}), or a NumPy array"
        )
    batch = image.detach().cpu()[(None,) * (4 - image.ndim)]
    kind = batch.dtype
    if kind == torch.bfloat16:  # NumPy has none
        batch = batch.float()
    images = [_restore_planes(restorer, planes.permute(1, 2, 0).numpy(), noise) for planes in batch]
    if not images:
        return image.clone()
    restored = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().to(kind)
    return restored[(0,) * (4 - image.ndim)].to(image.device)


def _restore_planes(restorer: Restorer, image: NDArray[Any], noise: float | str | None) -> NDArray[Any]:
    """Of H×W×C, an alpha channel kept."""
    if 0 in image.shape:
        raise BltError(f"a picture of {'×'.join(map(str, image.shape))} is empty")
    if image.dtype not in (np.uint8, np.uint16) and image.dtype.kind != "f":
        raise BltError(f"pictures must be uint8, uint16 or floats, not {image.dtype}")
    colours = image.shape[2] - (image.shape[2] in (2, 4))
    # `not (… <= …)` also catches NaN, for which every comparison is false.
    if image.dtype.kind == "f" and not np.abs(image[..., :colours]).max() <= _LARGEST:
        raise BltError("float pictures must have values in [0, 1], but these are far outside or NaN")
    restored, _ = restorer.run(image[..., :colours], noise)
    if colours == image.shape[2]:
        return restored
    if restored.shape[:2] != image.shape[:2]:
        raise BltError("the operator changes the size of pictures, so that an alpha channel does not fit")
    return np.concatenate([restored, image[..., colours:]], axis=2)
