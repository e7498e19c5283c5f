"""Training and evaluation samples: clean images by id, and their measurements.

    y_i = A x*_i + σ n_i

n_i is drawn on the CPU from a generator keyed by (seed, id): a sample has the same noise in every epoch, order,
batch size, process and device, and after a resume. Measurements are not clipped.

Images are read and noise is drawn one by one in ``workers`` threads, or all together in the calling one; both depend
on the id alone, so the result is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.errors import BltError
from bltoolbox.restoration.layout import image_layout
from bltoolbox.restoration.roles import Data, Operator, Sample

#: ITU-R BT.601 luma.
LUMA = (0.299, 0.587, 0.114)

Color = Literal["rgb", "gray"]


class Samples:
    """Images of a data component with their noisy measurements, on the device and in the dtype of the run."""

    def __init__(
        self,
        data: Data,
        operator: Operator,
        *,
        noise: float,
        seed: int = 0,
        color: Color = "rgb",
        stream: str = "train",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        operator_theta: Theta | None = None,
        ids: Sequence[int] | None = None,
        workers: int = 0,
    ) -> None:
        self.data = data
        self.operator = operator
        self.noise = noise
        self.seed = seed
        self.color = color
        self.stream = stream
        self.dtype = dtype
        self.device = torch.device(device)
        self.operator_theta = operator.prepare(operator_theta or {})
        self.ids = range(len(data)) if ids is None else ids
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="blt-images") if workers else None
        self.shape: tuple[int, ...] = tuple(self._clean(self.ids[:1]).shape[1:])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def range(self) -> tuple[float, float]:
        """The values between which images lie."""
        return self.data.range

    def label(self, position: int) -> str:
        """The label of a sample in tables and figures."""
        return self.data.label(self.ids[position])

    def digest(self) -> str:
        """Changes when images are added, removed or renamed, as far as their labels show it."""
        labels = "\n".join(self.data.label(i) for i in self.ids)
        return hashlib.blake2b(labels.encode("utf-8", "replace"), digest_size=16).hexdigest()

    def batch(self, positions: Sequence[int]) -> Sample:
        """The samples at ``positions`` of this set, with their measurements."""
        ids = [self.ids[position] for position in positions]
        try:
            clean = self._clean(ids)
        except (ValueError, OSError) as error:
            raise BltError(f"an image cannot be loaded: {error}") from error
        x_true = image_layout(clean.to(self.device, self.dtype))
        y = self.operator.apply(x_true, self.operator_theta, {})
        if self.noise:
            noise = self.noise * self._noise(ids, y.shape[1:]).to(y)
            mask = self.operator.measured(y, {})
            y = y + (noise if mask is None else noise * mask)
        return Sample(positions, image_layout(y), truth=x_true, range=self.data.range)

    def _clean(self, ids: Sequence[int]) -> Tensor:
        images = self._read(ids)
        if self.color == "gray" and images.shape[1] == 3:
            return torch.einsum("bchw,c->bhw", images, images.new_tensor(LUMA)).unsqueeze(1)
        return images

    def _read(self, ids: Sequence[int]) -> Tensor:
        if self.pool is None or len(ids) < 2:
            return self.data.clean(ids)
        return torch.cat(list(self.pool.map(lambda i: self.data.clean([i]), ids)))

    def _noise(self, ids: Sequence[int], shape: Sequence[int]) -> Tensor:
        # Drawn in float64 whatever the dtype of the run, so that both see the same noise.
        def draw(i: int) -> Tensor:
            generator = keyed_generator("noise", self.stream, self.seed, i)
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        return torch.stack(list(map(draw, ids) if self.pool is None else self.pool.map(draw, ids)))
