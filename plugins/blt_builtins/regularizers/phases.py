"""Correlations by phases: p×q neighbouring pixels of the result as channels of one convolution of stride (p, q).

    (k ⋆ x)_{pm+i, qn+j} = (k^{ij} ⋆ x)_{pm, qn},        k^{ij} is k, shifted by (i, j) within a (K+p−1)×(K+q−1) frame

A CPU computes 8 or 16 channels at a time, and several such groups at once, so one, three or ten channels leave much of
it idle. Phases cost (1 + (p−1)/K)(1 + (q−1)/K) times the products and fill it. Which p and q are fastest depends on
the processor: ``bltoolbox`` measures it once (``choose_form``). Neighbours in a row need no copy to be put in their
place, where channels are innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bltoolbox.plugin import choose_form, image_layout

#: Rows and columns of phases.
Form = tuple[int, int]
#: Those to choose from, for C and for Cᵀ; the first is used where nothing is measured.
CORRELATING: tuple[Form, ...] = ((1, 1), (1, 2), (1, 3), (1, 4))
ADJOINT_GRAY: tuple[Form, ...] = ((3, 3), (2, 4), (4, 4))
ADJOINT_COLOUR: tuple[Form, ...] = ((2, 2), (2, 4), (4, 2))
ADJOINT_MANY: tuple[Form, ...] = ((1, 2), (2, 2), (2, 4))
#: Channels from which Cᵀ has many.
MANY = 4
#: Images that are convolved to measure, and their sides.
_IMAGES, _SIDE = 8, 64


@dataclass(frozen=True)
class Phases:
    """k ⋆ x with kernels (O, I, K, K)."""

    kernels: Tensor
    form: Form = (1, 1)

    def __call__(self, x: Tensor, margin: int = 0) -> Tensor:
        """Of images (B, I, H, W) with ``margin`` zeros around them: (B, O, H + 2 margin − K + 1, …)."""
        if self.form == (1, 1):
            return F.conv2d(x, self._shifted, padding=margin)
        (p, q), (outputs, _, size, _) = self.form, self.kernels.shape
        height, width = (x.shape[dim] + 2 * margin - size + 1 for dim in (2, 3))
        # Where p or q does not divide the result, it is computed with a frame, which costs no copy of x.
        top, left = (-height % p + 1) // 2, (-width % q + 1) // 2
        out = F.conv2d(x, self._shifted, stride=self.form, padding=(margin + top, margin + left))
        count, _, rows, columns = out.shape
        pixels = out.permute(0, 2, 3, 1)
        if p > 1:
            pixels = pixels.reshape(count, rows, columns, p, q * outputs).transpose(2, 3)
        image = pixels.reshape(count, p * rows, q * columns, outputs).permute(0, 3, 1, 2)
        return image[:, :, top : top + height, left : left + width]

    @cached_property
    def _shifted(self) -> Tensor:
        """The kernels of all phases, (p q O, I, K + p − 1, K + q − 1)."""
        (p, q), (outputs, inputs, size, _) = self.form, self.kernels.shape
        if self.form == (1, 1):
            return image_layout(self.kernels)
        phases = self.kernels.new_zeros(p, q, outputs, inputs, size + p - 1, size + q - 1)
        for i in range(p):
            for j in range(q):
                phases[i, j, :, :, i : i + size, j : j + size] = self.kernels
        return image_layout(phases.flatten(0, 2))


def fastest(kernels: Tensor, forms: Sequence[Form], margin: int, purpose: str) -> Phases:
    """The form to use for these kernels (O, I, K, K): the first one unless another is faster on this CPU.

    Nothing is measured where derivatives are taken with respect to the kernels, whose backward pass does not gain, nor
    in float64, which is for checks. A GPU needs no phases.
    """
    if kernels.device.type != "cpu":
        return Phases(kernels)
    # Tensors of another class stand for others, as fake tensors do.
    if kernels.dtype != torch.float32 or kernels.requires_grad or type(kernels) is not Tensor:
        return Phases(kernels, forms[0])
    outputs, inputs, size, _ = kernels.shape
    x = image_layout(kernels.new_zeros(_IMAGES, inputs, _SIDE + size - 1, _SIDE + size - 1))
    candidates = {f"{p}x{q}": Phases(kernels.detach(), (p, q)) for p, q in forms}
    question = f"{purpose} {inputs} to {outputs} channels {size}x{size}"
    chosen = choose_form(question, {name: partial(form, x, margin) for name, form in candidates.items()})
    return Phases(kernels, candidates[chosen].form)
