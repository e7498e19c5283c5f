"""MRI with several coils: against a plain sum over coils, with maps of the options, of a file and of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from test_operators import normal

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.noises.gaussian import Gaussian
from blt_builtins.operators.coils import simulated_coils
from blt_builtins.operators.mri import MRI
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.records import Rows
from bltoolbox.bilevel.tensors import dot, keyed_generator, norm
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.theta import join
from bltoolbox.testing import Images, smooth_images, variational

SIZE = (6, 8)


def maps(count: int, coils: int = 3) -> torch.Tensor:
    """Without any structure, (B, K, H, W)."""
    return torch.complex(normal(count, coils, *SIZE, seed=7), normal(count, coils, *SIZE, seed=6))


def masks(count: int) -> torch.Tensor:
    return (normal(count, *SIZE, seed=8) > 0).double()


def contexts(count: int) -> list[Rows]:
    return [
        {"coils": maps(count)},
        {"coils": maps(count), "mask": masks(count)},
        {"mask": masks(count)[:, :1]},
    ]


def matrix(operator: MRI, context: Rows, channels: int) -> torch.Tensor:
    size = channels * SIZE[0] * SIZE[1]
    units = torch.eye(size, dtype=torch.float64).view(size, channels, *SIZE)
    every = {name: rows.expand(size, *rows.shape[1:]) for name, rows in context.items()}
    return operator.apply(units, {}, every).flatten(1).T


@pytest.mark.parametrize("image", ["real", "complex"])
def test_measurements_are_those_of_a_plain_sum_over_coils(image: str) -> None:
    operator = MRI(acceleration=2, center_fraction=0.2, image=image)  # type: ignore[arg-type]
    x, context = normal(2, 2, *SIZE), {"coils": maps(2), "mask": masks(2)}
    y = operator.apply(x, {}, context).numpy()
    half = y.shape[1] // 2
    found = y[:, :half] + 1j * y[:, half:]
    for i in range(2):
        sensitivity = context["coils"][i].numpy()
        planes = x[i].numpy() if image == "real" else (x[i, :1] + 1j * x[i, 1:]).numpy()
        expected = [np.fft.fft2(s * plane, norm="ortho") for plane in planes for s in sensitivity]
        np.testing.assert_allclose(found[i], np.stack(expected) * context["mask"][i].numpy(), atol=1e-12)


@pytest.mark.parametrize("image", ["real", "complex"])
@pytest.mark.parametrize("which", range(3))
def test_adjoints_and_bounds_of_each_sample(image: str, which: int) -> None:
    operator = MRI(image=image)  # type: ignore[arg-type]
    x, context = normal(2, 2, *SIZE), contexts(2)[which]
    seen = operator.apply(x, {}, context)
    y = normal(*seen.shape, seed=1)
    gap = (dot(seen, y) - dot(x, operator.adjoint(y, {}, context))).abs()
    assert (gap <= 1e-12 * norm(seen) * norm(y)).all()
    least, most = operator.spectrum({}, (2, *SIZE), context)
    assert isinstance(least, torch.Tensor) and isinstance(most, torch.Tensor)
    for i in range(2):
        a = matrix(operator, {name: rows[i : i + 1] for name, rows in context.items()}, 2)
        eigenvalues = torch.linalg.eigvalsh(a.T @ a)
        assert float(least[i]) <= float(eigenvalues[0]) + 1e-10
        assert float(eigenvalues[-1]) <= float(most[i]) * (1 + 1e-12)
        if "coils" not in context:  # exact for one coil
            assert float(least[i]) == pytest.approx(float(eigenvalues[0]), abs=1e-10)
            assert float(most[i]) == pytest.approx(float(eigenvalues[-1]))


def test_bounds_are_exact_where_all_is_measured() -> None:
    operator, context = MRI(acceleration=1), {"coils": maps(1)}
    a = matrix(operator, context, 1)
    eigenvalues = torch.linalg.eigvalsh(a.T @ a)
    least, most = operator.spectrum({}, (1, *SIZE), context)
    torch.testing.assert_close(torch.cat([least, most]), eigenvalues[[0, -1]])  # type: ignore[list-item]


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("size", [(8, 8), (9, 14)])
def test_simulated_maps_are_normalised_smooth_and_different(count: int, size: tuple[int, int]) -> None:
    found = simulated_coils(count, *size)
    torch.testing.assert_close(found.abs().square().sum(0), torch.ones(size, dtype=torch.float64))
    operator = MRI(acceleration=1, coils=count)
    least, most = operator.spectrum({}, (1, *size), {})
    assert least == pytest.approx(1) and most == pytest.approx(1)
    x = normal(2, 1, *size)
    torch.testing.assert_close(operator.adjoint(operator.apply(x, {}, {}), {}, {}), x)
    assert torch.linalg.matrix_rank(found.flatten(1)) == count
    # Half of the power of a coil is on its own side.
    if count > 1:
        assert float(found[0, :, -1].abs().mean()) > 1.5 * float(found[0, :, 0].abs().mean())
    step = torch.diff(found, dim=2).abs().max()
    assert float(step) < 4 / max(size)


def test_simulated_maps_do_not_depend_on_precision_or_order() -> None:
    operator = MRI(coils=4)
    single = operator.coil_maps(torch.empty(1, 1, 8, 8), {})
    double = operator.coil_maps(torch.empty(1, 1, 8, 8, dtype=torch.float64), {})
    assert single is not None and double is not None
    assert single.dtype == torch.complex64 and double.dtype == torch.complex128
    torch.testing.assert_close(single, double.to(torch.complex64))


def test_maps_from_a_file(tmp_path: Path) -> None:
    path, given = str(tmp_path / "maps.npy"), maps(1)[0]
    np.save(path, given.numpy())
    operator, x = MRI(coils=path), normal(2, 1, *SIZE)
    expected = MRI().apply(x, {}, {"coils": given.expand(2, -1, -1, -1)})
    torch.testing.assert_close(operator.apply(x, {}, {}), expected)
    assert operator.apply(x.float(), {}, {}).dtype == torch.float32
    power = given.abs().square().sum(0)
    assert operator.spectrum({}, (1, *SIZE), {}) == (0.0, pytest.approx(float(power.max())))
    assert operator.check((1, *SIZE)) is None
    assert "the coil maps are 6×8 but the images are 8×8" in (operator.check((1, 8, 8)) or "")
    for bad, message in (
        (np.ones((4, 4)), "coils × height × width"),
        (np.full((2, 4, 4), np.nan), "NaN"),
        (np.zeros((2, 4, 4)), "only zeros"),
    ):
        np.save(path, bad)
        with pytest.raises(ValueError, match=message):
            MRI(coils=path)
    with pytest.raises(ValueError, match="there is no file"):
        MRI(coils="nowhere.npy")


def test_start_does_not_depend_on_the_scale_of_the_maps() -> None:
    operator, x = MRI(acceleration=2, center_fraction=0.2), normal(2, 1, *SIZE)
    small, large = ({"coils": scale * maps(2)} for scale in (1.0, 100.0))
    torch.testing.assert_close(
        operator.start(operator.apply(x, {}, small), {}, small),
        operator.start(operator.apply(x, {}, large), {}, large),
    )


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"coils": torch.zeros(1, 3, 8, 8)}, r"coils .* \(1, 3, 8, 8\), but mri needs \(B, K, 6, 8\)"),
        ({"coils": torch.zeros(3, *SIZE)}, r"but mri needs \(B, K, 6, 8\)"),
        ({"mask": torch.zeros(1, 1, *SIZE)}, r"but mri needs \(B, 6, 8\)"),
        ({"mask": torch.zeros(1, 2, 8)}, r"but mri needs \(B, 6, 8\)"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(context: Rows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MRI().apply(torch.zeros(1, 1, *SIZE), {}, context)


def test_measurements_of_other_coils_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8 channels, these have 6"):
        MRI(coils=4).start(torch.zeros(1, 6, *SIZE), {}, {})


def test_more_coils_reconstruct_better() -> None:
    """What parallel imaging is for: at the same acceleration, the error is smaller."""
    x = smooth_images(2, (1, 16, 16)).double()
    prior = TotalVariation(weight=0.001, nu=0.01)
    theta = join(regularizer=prior.init_params((1, 16, 16), keyed_generator(0)))
    errors = []
    for coils in (None, 8):
        operator = MRI(acceleration=3, center_fraction=0.15, coils=coils)
        problem = variational(operator, prior, strong_convexity=1e-4)
        lower = problem.at(theta, (1, 16, 16)).on(operator.apply(x, {}, {}))
        errors.append(norm(solve_cold(AGD(), lower, 1e-3, 20_000).x - x))
    assert (errors[1] < 0.5 * errors[0]).all()


class Scans(Images):
    """Images with coil maps and masks of their own, as a data component may bring them."""

    def context(self, ids: Sequence[int]) -> Rows:
        index = torch.as_tensor(ids)
        return {"coils": maps(4).to(torch.complex64)[index], "mask": masks(4).bool()[index]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maps_of_the_data_reach_measurements_and_solves(dtype: torch.dtype) -> None:
    operator, truth = MRI(), smooth_images(4, (1, *SIZE))
    samples = Samples(Scans(truth), operator, Gaussian(0.1), dtype=dtype)
    sample = samples.batch([2, 0])
    assert sample.context["coils"].dtype == dtype.to_complex()
    context = {"coils": maps(4)[[2, 0]], "mask": masks(4)[[2, 0]]}
    exact = operator.apply(truth[[2, 0]].double(), {}, context)
    noise = sample.y.double() - exact
    assert float(noise[context["mask"].bool().unsqueeze(1).expand_as(noise)].std()) == pytest.approx(
        0.1, rel=0.2
    )
    assert float(noise[~context["mask"].bool().unsqueeze(1).expand_as(noise)].abs().max()) < 1e-6
    prior = TotalVariation(weight=0.01, nu=0.1)
    theta = {
        k: v.to(dtype) for k, v in join(regularizer=prior.init_params((1, *SIZE), keyed_generator(0))).items()
    }
    at = variational(operator, prior, strong_convexity=0.1).at(theta, (1, *SIZE))
    together = at.on(sample.y, sample.context)
    x = solve_cold(AGD(), together, 1e-3, 20_000).x
    alone = samples.batch([0])
    torch.testing.assert_close(
        solve_cold(AGD(), at.on(alone.y, alone.context), 1e-3, 20_000).x, x[1:], atol=2e-3, rtol=0
    )
    assert (together.residual(x) <= 1e-3 * together.mu).all()
