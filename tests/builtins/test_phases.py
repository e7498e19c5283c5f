"""Correlations by phases equal plain ones, and the choice among them never changes more than rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from blt_builtins.regularizers import filters, phases
from blt_builtins.regularizers.filters import FilterBank
from blt_builtins.regularizers.phases import ADJOINT_COLOUR, ADJOINT_GRAY, CORRELATING, Phases
from bltoolbox.restoration.forms import FORMS

FORMS_USED = sorted({*CORRELATING, *ADJOINT_GRAY, *ADJOINT_COLOUR})


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS_USED, ids=lambda form: "x".join(map(str, form)))
@pytest.mark.parametrize(("height", "width"), [(12, 12), (13, 14), (15, 11), (9, 17)])
@pytest.mark.parametrize("margin", [0, 2, 4])
def test_phases_are_the_convolution(form: tuple[int, int], height: int, width: int, margin: int) -> None:
    kernels, x = images(4, 3, 5, 5), images(2, 3, height, width, seed=1)
    found = Phases(kernels, form)(x, margin)
    torch.testing.assert_close(found, F.conv2d(x, kernels, padding=margin), rtol=1e-12, atol=1e-12)


def test_phases_in_a_row_need_no_copy() -> None:
    x = images(2, 3, 11, 12).contiguous(memory_format=torch.channels_last)
    found = Phases(images(5, 3, 4, 4), (1, 3))(x)
    assert found.shape == (2, 5, 8, 9)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert found._base is not None


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("boundary", ["valid", "zero", "periodic", "symmetric"])
def test_every_form_of_a_bank_gives_the_same(
    channels: int, boundary: filters.Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BLT_FORMS", raising=False)
    kernels, x = images(10, channels, 7, 7).float(), images(2, channels, 13, 18, seed=1).float()
    exact = FilterBank(kernels.double(), boundary)
    t = exact.correlate(x.double())
    back = exact.adjoint(t, x.shape[1:])
    names = [f"{p}x{q}" for p, q in CORRELATING]
    others = [f"{p}x{q}" for p, q in (ADJOINT_GRAY if channels == 1 else ADJOINT_COLOUR)]
    for correlating in names:
        for transposing in others:
            answers = {
                f"correlate {channels} to 10 channels 7x7, 1 thread": correlating,
                f"transpose 10 to {channels} channels 7x7, 1 thread": transposing,
            }
            with FORMS.restored():
                FORMS.adopt(answers, closed=True)
                bank = FilterBank(kernels, boundary)
                torch.testing.assert_close(bank.correlate(x).double(), t, rtol=1e-4, atol=1e-4)
                found = bank.adjoint(t.float(), x.shape[1:]).double()
                torch.testing.assert_close(found, back, rtol=1e-4, atol=1e-3)
                assert answers == FORMS.answers


def test_derivatives_and_float64_use_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> str:
        raise AssertionError("a form was chosen")

    monkeypatch.setattr(phases, "choose_form", refused)
    kernels, x = images(3, 1, 5, 5), images(1, 1, 9, 9)
    bank = FilterBank(kernels, "symmetric")
    bank.adjoint(bank.correlate(x), x.shape[1:])
    leaf = kernels.float().requires_grad_()
    bank = FilterBank(leaf, "symmetric")
    bank.adjoint(bank.correlate(x.float()), x.shape[1:]).sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())
    with pytest.raises(AssertionError, match="chosen"):
        FilterBank(kernels.float(), "symmetric").correlate(x.float())
