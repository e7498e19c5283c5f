"""How batches of images lie in memory, and their values for pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.restoration.metrics import Range

#: Red, green and blue in a gray value, ITU-R BT.601.
LUMA = (0.299, 0.587, 0.114)


def image_layout(x: Tensor) -> Tensor:
    """Channels last for image batches: halves the cost of few-channel convolutions on CPU."""
    if x.ndim != 4:
        return x
    if x.shape[1] == 1:
        # Both layouts are the same memory; a convolution goes by the strides for the layout of what it returns.
        return x.contiguous().squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


def with_channels(image: Tensor, extra: int) -> Tensor:
    """Images followed by ``extra`` channels of zeros, for regularizers with auxiliary variables."""
    if not extra:
        return image
    zeros = image.new_zeros(len(image), extra, *image.shape[2:])
    return image_layout(torch.cat([image, zeros], dim=1))


def to_unit(image: Tensor, span: Range) -> Tensor:
    """An image whose values lie in ``span``, with values in [0, 1], for pictures."""
    low, high = span
    return ((image.double() - low) / (high - low)).clamp(0, 1)


def to_gray(images: Tensor) -> Tensor:
    """Batches of three channels as one, by ITU-R BT.601; others as they are."""
    if images.ndim != 4 or images.shape[1] != 3:
        return images
    # Pixel by pixel: the last bit of a product of matrices depends on the number of images.
    red, green, blue = (part * share for part, share in zip(images.unbind(1), LUMA, strict=True))
    return (red + green + blue).unsqueeze(1)
