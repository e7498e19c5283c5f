"""Forward operators: exact adjoints, true norm bounds, starts, and hypergradients through each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.operators.blur import Blur, gaussian_kernel
from blt_builtins.operators.downsampling import Downsampling
from blt_builtins.operators.identity import Identity
from blt_builtins.operators.inpainting import Inpainting
from blt_builtins.operators.mri import MRI
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.records import Accuracy, Batch
from bltoolbox.bilevel.tensors import dot, keyed_generator, norm
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.metrics import METRICS, measure
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.roles import Operator
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing import Images, White, make_oracle, smooth_images, variational
from bltoolbox.training.assemble import assemble

SIGNED = [[0.0, -1.0, 0.5], [2.0, 1.0, -0.3]]
MOTION = [[0.1, 0.2, 0.4, 0.2, 0.1]]
BOUNDARIES = ("symmetric", "periodic", "zero", "valid")

OPERATORS: dict[str, Callable[[], Operator]] = {
    "identity": Identity,
    **{f"blur-{rule}": lambda rule=rule: Blur(size=5, sigma=1.2, boundary=rule) for rule in BOUNDARIES},
    **{f"blur-even-{rule}": lambda rule=rule: Blur(size=4, boundary=rule) for rule in BOUNDARIES},
    **{f"blur-signed-{rule}": lambda rule=rule: Blur(kernel=SIGNED, boundary=rule) for rule in BOUNDARIES},
    "blur-motion": lambda: Blur(kernel=MOTION, boundary="valid"),
    "blur-learned": lambda: Blur(size=3, learned=True),
    "inpainting": lambda: Inpainting(missing=0.4),
    "inpainting-nothing": lambda: Inpainting(missing=0.0),
    "downsampling": lambda: Downsampling(2),
    "downsampling-1": lambda: Downsampling(1),
    "mri": lambda: MRI(acceleration=2.5, center_fraction=0.2),
    "mri-complex": lambda: MRI(acceleration=2.5, center_fraction=0.2, image="complex"),
    "mri-full": lambda: MRI(acceleration=1),
    "mri-coils": lambda: MRI(acceleration=2.5, center_fraction=0.2, coils=3),
    "mri-coils-complex": lambda: MRI(acceleration=2.5, center_fraction=0.2, image="complex", coils=3),
}
SHAPE = (2, 8, 12)
RECIPE = {
    "data": {"name": "dead-leaves", "count": 4, "size": 16},
    "noise": 0.1,
    "regularizer": "tv",
    "lower_solver": "agd",
    "hypergradient": "cg-ift",
    "sampler": "full",
    "upper_optimizer": "isgd",
    "validation": {"count": 1},
    "budget": {"steps": 1},
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=keyed_generator("operators", seed))


def params(operator: Operator) -> dict[str, Tensor]:
    """Parameters away from their symmetric start."""
    theta = operator.init_params(SHAPE, keyed_generator(0))
    return {name: value + normal(*value.shape) for name, value in theta.items()}


def matrix(operator: Operator, shape: Sequence[int] = SHAPE) -> Tensor:
    """A as a matrix, one column an input pixel."""
    size = torch.Size(shape).numel()
    units = torch.eye(size, dtype=torch.float64).view(size, *shape)
    return operator.apply(units, params(operator), {}).flatten(1).T


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> Operator:
    return OPERATORS[request.param]()


class TestEvery:
    def test_adjoint_is_exact(self, operator: Operator) -> None:
        theta, x = params(operator), normal(3, *SHAPE)
        image = operator.apply(x, theta, {})
        y = normal(*image.shape, seed=1)
        back = operator.adjoint(y, theta, {})
        assert back.shape == x.shape
        gap = (dot(image, y) - dot(x, back)).abs()
        assert (gap <= 1e-12 * norm(image) * norm(y)).all()

    def test_linear_and_sample_by_sample(self, operator: Operator) -> None:
        theta, x, v = params(operator), normal(2, *SHAPE), normal(2, *SHAPE, seed=1)
        torch.testing.assert_close(
            operator.apply(2 * x - v, theta, {}),
            2 * operator.apply(x, theta, {}) - operator.apply(v, theta, {}),
        )
        torch.testing.assert_close(operator.apply(x, theta, {})[1:], operator.apply(x[1:], theta, {}))
        y = operator.apply(x, theta, {})
        torch.testing.assert_close(operator.start(y, theta, {})[1:], operator.start(y[1:], theta, {}))

    def test_the_upper_end_of_the_spectrum_is_true_and_tight(self, operator: Operator) -> None:
        theta = params(operator)
        true = float(torch.linalg.matrix_norm(matrix(operator), 2)) ** 2
        bound = float(operator.spectrum(theta, SHAPE, {})[1])  # type: ignore[arg-type]
        # A border that is cut off costs a small image part of its norm, and at a mirrored one the test of Schur is
        # blind to the signs of a kernel.
        loose = isinstance(operator, Blur) and operator.boundary != "periodic"
        assert true <= bound * (1 + 1e-12)
        assert bound <= (2.5 if loose else 1.02) * true

    def test_the_lower_end_of_the_spectrum_is_true(self, operator: Operator) -> None:
        a = matrix(operator)
        smallest = float(torch.linalg.eigvalsh(a.T @ a).min())
        least = operator.spectrum(params(operator), SHAPE, {})[0]
        assert least is not None and 0 <= float(least) <= smallest + 1e-12

    def test_start_is_an_image_and_better_than_nothing(self, operator: Operator) -> None:
        x = smooth_images(3, SHAPE).double()
        start = operator.start(operator.apply(x, {}, {}), {}, {})
        assert start.shape == x.shape
        if not (isinstance(operator, Blur) and operator.kernel.min() < 0):
            quality, nothing = (
                measure([METRICS["psnr"]], one, x)["psnr"] for one in (start, torch.zeros_like(x))
            )
            assert all(value > worse for value, worse in zip(quality, nothing, strict=True))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_is_kept_and_inputs_are_untouched(self, operator: Operator, dtype: torch.dtype) -> None:
        theta = {name: value.to(dtype) for name, value in params(operator).items()}
        x = normal(2, *SHAPE).to(dtype)
        before = x.clone()
        y = operator.apply(x, theta, {})
        copy = y.clone()
        assert operator.start(y, theta, {}).dtype == operator.adjoint(y, theta, {}).dtype == y.dtype == dtype
        assert torch.equal(x, before)
        assert torch.equal(y, copy)

    def test_noise_is_only_on_measurements(self, operator: Operator) -> None:
        samples = Samples(Images(smooth_images(4, SHAPE)), operator, White(0.3), dtype=torch.float64)
        sample = samples.batch(range(4))
        assert sample.truth is not None
        x, y = sample.truth, sample.y
        noise = y - operator.apply(x, {}, {})
        measured = _measured(operator, y)
        assert torch.equal(noise != 0, measured)
        assert abs(float(noise[measured].std()) / 0.3 - 1) < 0.2
        assert torch.equal(samples.batch([2]).y[0], y[2])

    def test_hypergradient_is_that_of_central_differences(self, operator: Operator) -> None:
        shape = SHAPE if "complex" in vars(operator).values() else (1, *SHAPE[1:])
        problem = variational(operator, TotalVariation(weight=0.05, nu=0.1), strong_convexity=0.05)
        check_hypergradient(problem, shape)


def _measured(operator: Operator, y: Tensor) -> Tensor:
    """Entries of y that are measurements."""
    mask = operator.measured(y, {})
    assert (mask is not None) == isinstance(operator, Inpainting | MRI)
    return torch.ones_like(y, dtype=torch.bool) if mask is None else (mask == 1).expand_as(y)


def check_hypergradient(problem: Variational, shape: Sequence[int], rtol: float = 1e-5) -> None:
    """z of the whole stack against central differences of f, in every direction of a small θ."""
    theta = join(
        regularizer=problem.regularizer.init_params(shape, keyed_generator(1)),
        operator=params(problem.operator),
    )
    oracle = make_oracle(
        smooth_images(2, shape),
        problem.regularizer,
        AGD(),
        CGIFT(5000),
        problem.operator,
        noise=0.05,
        strong_convexity=problem.strong_convexity,
        iteration_limit=50_000,
    ).on(Batch([0, 1], [1.5, 0.5]))
    z = oracle.hypergradient(theta, Accuracy(1e-11), Accuracy(1e-11)).gradient
    for name, value in theta.items():
        expected = torch.zeros_like(value)
        for k in range(value.numel()):
            shift = torch.zeros_like(value)
            shift.view(-1)[k] = 1e-4
            ahead, behind = (
                oracle.value(theta | {name: at}, Accuracy(1e-11)).value
                for at in (value + shift, value - shift)
            )
            expected.view(-1)[k] = (ahead - behind) / 2e-4
        assert (z[name] - expected).norm() <= rtol * expected.norm(), name


class TestBlur:
    @pytest.mark.parametrize(
        ("boundary", "mode"), [("symmetric", "reflect"), ("periodic", "wrap"), ("zero", "constant")]
    )
    @pytest.mark.parametrize("size", [(3, 3), (5, 3), (1, 7), (4, 2)])
    def test_is_convolution_with_that_boundary(self, boundary: str, mode: str, size: tuple[int, int]) -> None:
        kernel, x = normal(*size, seed=2), normal(2, *SHAPE)
        found = Blur(kernel=kernel.tolist(), boundary=boundary).apply(x, {}, {})  # type: ignore[arg-type]
        for image, expected in zip(found.flatten(0, 1), x.flatten(0, 1), strict=True):
            reference = ndimage.convolve(expected.numpy(), kernel.numpy(), mode=mode)
            np.testing.assert_allclose(image.numpy(), reference, atol=1e-12)

    def test_valid_is_the_inside_of_zero(self) -> None:
        x = normal(1, *SHAPE)
        inside = Blur(size=5, boundary="valid").apply(x, {}, {})
        torch.testing.assert_close(inside, Blur(size=5, boundary="zero").apply(x, {}, {})[:, :, 2:-2, 2:-2])

    @pytest.mark.parametrize("boundary", ["symmetric", "periodic", "valid"])
    def test_unit_mass_keeps_constants(self, boundary: str) -> None:
        operator = Blur(boundary=boundary)  # type: ignore[arg-type]
        y = operator.apply(torch.full((1, 3, 9, 9), 0.7, dtype=torch.float64), {}, {})
        torch.testing.assert_close(y, torch.full_like(y, 0.7))
        start = operator.start(y, {}, {})
        torch.testing.assert_close(start, torch.full_like(start, 0.7))

    def test_gaussian(self) -> None:
        kernel = gaussian_kernel(7, 2.0)
        assert float(kernel.sum()) == pytest.approx(1)
        torch.testing.assert_close(kernel, kernel.flip(0).T)
        assert float(kernel[3, 3] / kernel[3, 5]) == pytest.approx(np.exp(0.5))

    def test_bound_of_a_nonnegative_kernel_is_its_mass(self) -> None:
        for boundary in BOUNDARIES:
            bound = float(Blur(boundary=boundary).spectrum({}, (1, 16, 16), {})[1])  # type: ignore[arg-type]
            assert bound == pytest.approx(1, rel=1e-12)

    def test_learned_kernel_is_one_of_unit_mass(self) -> None:
        operator = Blur(size=3, learned=True)
        theta = params(operator)
        impulse = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
        impulse[0, 0, 3, 3] = 1
        kernel = operator.apply(impulse, theta, {})
        assert float(kernel.min()) >= 0
        assert float(kernel.sum()) == pytest.approx(1)
        torch.testing.assert_close(operator.apply(impulse, {}, {}), Blur(size=3).apply(impulse, {}, {}))

    def test_kernel_from_a_file(self, tmp_path: Path) -> None:
        path = str(tmp_path / "kernel.npy")
        np.save(path, np.array(SIGNED, dtype=np.float32))
        x = normal(1, *SHAPE)
        torch.testing.assert_close(
            Blur(kernel=path).apply(x, {}, {}), Blur(kernel=SIGNED).apply(x, {}, {}), atol=1e-6, rtol=0
        )

    @pytest.mark.parametrize(
        ("kernel", "message"),
        [
            ([[1.0], [1.0, 2.0]], "differ in length"),
            ([], "empty"),
            ([[float("nan")]], "finite"),
            ([[0.0, 0.0]], "not all zero"),
            ("nowhere.npy", "there is no file"),
        ],
    )
    def test_nonsense_is_refused(self, kernel: list[list[float]] | str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Blur(kernel=kernel)

    def test_learned_needs_a_kernel_it_can_reach(self) -> None:
        with pytest.raises(ValueError, match="learned"):
            Blur(kernel=SIGNED, learned=True)

    def test_too_large_a_kernel_is_refused(self) -> None:
        assert "larger" in (Blur(size=9).check((3, 8, 20)) or "")
        assert Blur(size=8).check((3, 8, 20)) is None


class TestInpainting:
    @pytest.mark.parametrize("missing", [0.0, 0.3, 0.5, 0.99])
    def test_the_fraction_is_exact(self, missing: float) -> None:
        known = Inpainting(missing=missing).mask_for(torch.empty(1, 1, 10, 20), {})
        assert float(known.sum()) == 200 - round(200 * missing)

    def test_mask_depends_on_seed_and_size_alone(self) -> None:
        x = torch.empty(3, 3, 10, 10, dtype=torch.float64)
        mask = Inpainting(seed=1).mask_for(x, {})
        torch.testing.assert_close(mask, Inpainting(seed=1).mask_for(x[:1, :1], {}))
        assert not torch.equal(mask, Inpainting(seed=2).mask_for(x, {}))

    def test_is_a_projection(self) -> None:
        operator, x = Inpainting(), normal(2, *SHAPE)
        y = operator.apply(x, {}, {})
        assert torch.equal(operator.apply(y, {}, {}), y)
        assert torch.equal((y == 0).all(1), (y == 0).any(1))

    @pytest.mark.parametrize("missing", [0.5, 0.95])
    def test_start_keeps_what_is_known_and_fills_with_neighbours(self, missing: float) -> None:
        operator = Inpainting(missing=missing)
        x = 0.3 + 0.4 * torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=keyed_generator(0))
        y = operator.apply(x, {}, {})
        start, known = operator.start(y, {}, {}), operator.mask_for(y, {}) == 1
        assert torch.equal(start[..., known], x[..., known])
        # A mean of known pixels of the same image lies between their extremes.
        assert (start >= x.amin((2, 3), keepdim=True) - 1e-12).all()
        assert (start <= x.amax((2, 3), keepdim=True) + 1e-12).all()
        flat = operator.start(operator.apply(torch.full_like(x, 0.6), {}, {}), {}, {})
        torch.testing.assert_close(flat, torch.full_like(x, 0.6))

    def test_one_known_pixel_fills_the_image(self, tmp_path: Path) -> None:
        mask = np.zeros((9, 13), dtype=bool)
        mask[2, 12] = True
        np.save(tmp_path / "mask.npy", mask)
        operator = Inpainting(mask=str(tmp_path / "mask.npy"))
        x = normal(2, 3, 9, 13)
        start = operator.start(operator.apply(x, {}, {}), {}, {})
        torch.testing.assert_close(start, x[:, :, 2:3, 12:13].expand_as(x))

    def test_a_part_has_its_part_of_the_mask(self, tmp_path: Path) -> None:
        np.save(tmp_path / "mask.npy", (normal(8, 12) > 0).numpy())
        x = normal(2, *SHAPE)
        rows, columns = slice(2, 7), slice(0, 9)
        for operator in (Inpainting(missing=0.4), Inpainting(mask=str(tmp_path / "mask.npy"))):
            part = operator.crop(rows, columns, SHAPE)
            expected = operator.apply(x, {}, {})[:, :, rows, columns]
            assert torch.equal(part.apply(x[:, :, rows, columns], {}, {}), expected)
            again = part.crop(slice(1, 3), slice(2, 4), (2, 5, 9))
            inner = x[:, :, 3:5, 2:4]
            assert torch.equal(again.apply(inner, {}, {}), operator.apply(x, {}, {})[:, :, 3:5, 2:4])

    def test_a_part_within_a_hole_starts_from_nothing(self, tmp_path: Path) -> None:
        mask = np.zeros((8, 12))
        mask[:, 0] = 1
        np.save(tmp_path / "mask.npy", mask)
        part = Inpainting(mask=str(tmp_path / "mask.npy")).crop(slice(0, 8), slice(4, 12), SHAPE)
        assert not part.start(normal(1, 2, 8, 8), {}, {}).any()
        assert part.spectrum({}, (2, 8, 8), {}) == (0, 1)

    def test_masks_of_each_sample(self) -> None:
        operator, x = Inpainting(), normal(2, *SHAPE)
        context = {"mask": torch.stack([normal(8, 12) > 0, torch.ones(8, 12, dtype=torch.bool)])}
        y = operator.apply(x, {}, context)
        assert torch.equal(y[1], x[1]) and torch.equal(y[0] != 0, context["mask"][0].expand(2, -1, -1))
        torch.testing.assert_close(
            operator.spectrum({}, SHAPE, context)[0], torch.tensor([0.0, 1.0]).double()
        )
        start = operator.start(y, {}, context)
        torch.testing.assert_close(start[:1], operator.start(y[:1], {}, {"mask": context["mask"][:1]}))
        with pytest.raises(ValueError, match=r"\(2, 8\), but inpainting needs \(B, 8, 12\)"):
            operator.apply(x, {}, {"mask": torch.ones(2, 8)})

    def test_a_picture_as_a_mask(self, tmp_path: Path) -> None:
        known = np.ones((8, 12), dtype=np.uint8)
        known[2:4, 5:9] = 0
        for mode in ("L", "RGB"):
            Image.fromarray(255 * known).convert(mode).save(tmp_path / "mask.png")
            operator = Inpainting(mask=str(tmp_path / "mask.png"))
            assert torch.equal(
                operator.mask_for(torch.empty(1, 1, 8, 12), {}), torch.from_numpy(known).float()
            )
        Image.fromarray(0 * known).save(tmp_path / "dark.png")
        with pytest.raises(ValueError, match="dark everywhere"):
            Inpainting(mask=str(tmp_path / "dark.png"))
        (tmp_path / "bad.png").write_text("no picture")
        with pytest.raises(ValueError, match="the mask cannot be read"):
            Inpainting(mask=str(tmp_path / "bad.png"))

    def test_masks_from_files(self, tmp_path: Path) -> None:
        path = str(tmp_path / "mask.npy")
        np.save(path, np.eye(8, 12))
        operator = Inpainting(mask=path)
        assert operator.check(SHAPE) is None
        assert "8×12" in (operator.check((1, 9, 12)) or "")
        with pytest.raises(ValueError, match="8×12"):
            operator.apply(torch.zeros(1, 1, 9, 12), {}, {})
        for bad, message in ((np.full((8, 12), 0.5), "0 and 1"), (np.zeros((8, 12)), "zeros only")):
            np.save(path, bad)
            with pytest.raises(ValueError, match=message):
                Inpainting(mask=path)
        np.save(path, np.ones(3))
        with pytest.raises(ValueError, match="matrix"):
            Inpainting(mask=path)


class TestDownsampling:
    def test_rows_are_orthogonal(self) -> None:
        a = matrix(Downsampling(2))
        torch.testing.assert_close(a @ a.T, torch.eye(len(a), dtype=torch.float64) / 4)

    def test_is_the_mean_of_blocks_and_keeps_constants(self) -> None:
        operator, x = Downsampling(4), normal(2, 3, 8, 12)
        blocks = x.view(2, 3, 2, 4, 3, 4).mean((3, 5))
        torch.testing.assert_close(operator.apply(x, {}, {}), blocks)
        constant = torch.full_like(x, 0.2)
        torch.testing.assert_close(operator.start(operator.apply(constant, {}, {}), {}, {}), constant)

    def test_sizes_that_do_not_fit_are_refused(self) -> None:
        assert "factor 5" in (Downsampling(5).check(SHAPE) or "")
        with pytest.raises(ValueError, match="does not divide"):
            Downsampling(5).apply(torch.zeros(1, *SHAPE), {}, {})


class TestMRI:
    @pytest.mark.parametrize("image", ["real", "complex"])
    def test_full_sampling_is_unitary(self, image: str) -> None:
        operator = MRI(acceleration=1, image=image)  # type: ignore[arg-type]
        x = normal(3, *SHAPE)
        y = operator.apply(x, {}, {})
        torch.testing.assert_close(operator.adjoint(y, {}, {}), x)
        torch.testing.assert_close(norm(y), norm(x))
        assert operator.spectrum({}, SHAPE, {}) == (1, 1)

    def test_measurements_are_the_numpy_transform(self) -> None:
        operator, x = MRI(acceleration=2, center_fraction=0.2), normal(2, 1, 8, 12)
        y = operator.apply(x, {}, {}).numpy()
        reference = np.fft.fft2(x.numpy(), norm="ortho") * operator.sampled(x, {}).numpy()
        np.testing.assert_allclose(y[:, :1] + 1j * y[:, 1:], reference, atol=1e-12)
        complex_image = MRI(acceleration=2, center_fraction=0.2, image="complex")
        torch.testing.assert_close(complex_image.apply(torch.cat([x, 0 * x], 1), {}, {}), torch.from_numpy(y))

    @pytest.mark.parametrize("width", [12, 13, 64])
    @pytest.mark.parametrize(("acceleration", "center"), [(2, 0.3), (4, 0.08), (4, 0.25), (1, 0.0)])
    def test_columns(self, width: int, acceleration: float, center: float) -> None:
        mask = MRI(acceleration, center).sampled(torch.empty(1, 1, 8, width), {})
        assert mask.shape == (1, width)
        assert float(mask.sum()) == max(round(width / acceleration), round(center * width))
        frequency = torch.fft.fftfreq(width).abs()
        assert float(mask[0, frequency < (round(center * width) - 1) / (2 * width)].prod()) == 1

    def test_constants_are_exact_for_any_mask(self, tmp_path: Path) -> None:
        path = str(tmp_path / "mask.npy")
        half = np.zeros((6, 8))
        half[:, :5] = 1
        for mask in (half, np.eye(6, 8), (normal(6, 8) > 0).numpy()):
            np.save(path, mask)
            for image in ("real", "complex"):
                operator = MRI(mask=path, image=image)  # type: ignore[arg-type]
                a = matrix(operator, (2, 6, 8))
                eigenvalues = torch.linalg.eigvalsh(a.T @ a)
                least, most = operator.spectrum({}, (2, 6, 8), {})
                assert most == pytest.approx(float(eigenvalues[-1]), abs=1e-10)
                assert least == pytest.approx(float(eigenvalues[0]), abs=1e-10)

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="center_fraction"):
            MRI(acceleration=8, center_fraction=0.5)
        assert "even number" in (MRI(image="complex").check((3, 8, 8)) or "")
        with pytest.raises(ValueError, match="pairs of channels"):
            MRI().start(torch.zeros(1, 3, 8, 8), {}, {})


class TestInTheStack:
    """What the core does with images and measurements of different shapes."""

    @pytest.mark.parametrize("name", ["blur-valid", "inpainting", "downsampling", "mri", "blur-learned"])
    def test_a_model_restores(self, name: str) -> None:
        operator, regularizer = OPERATORS[name](), TotalVariation(weight=0.02, nu=0.1)
        recipe = recipe_from_dict(RECIPE)
        theta = join(
            regularizer=regularizer.init_params((1, 8, 8), keyed_generator(0)), operator=params(operator)
        )
        model = Model(variational(operator, regularizer, strong_convexity=0.01), AGD(), theta, recipe)
        images = Images(smooth_images(2, (1, 8, 12)))
        sample = Samples(images, operator, White(0.01), dtype=torch.float64).batch([0, 1])
        x, y = sample.truth, sample.y
        assert x is not None
        restored = model.solve(y, tol=1e-6)
        assert restored.shape == x.shape
        torch.testing.assert_close(model.solve(y[1], tol=1e-6), restored[1], atol=1e-5, rtol=0)
        lower = model.problem.at(theta, x.shape[1:]).on(y)
        assert (lower.residual(restored) <= 1e-6 * lower.mu).all()

    def test_a_model_refuses_measurements_that_do_not_fit(self) -> None:
        regularizer = TotalVariation()
        recipe = recipe_from_dict(RECIPE)
        theta = join(regularizer=regularizer.init_params((1, 8, 8), keyed_generator(0)))
        with pytest.raises(BltError, match="pairs of channels"):
            Model(variational(MRI(), regularizer), AGD(), theta, recipe).solve(torch.zeros(3, 8, 8))
        with pytest.raises(BltError, match="larger than the 3×3"):
            Model(variational(Blur(), regularizer), AGD(), theta, recipe).solve(torch.zeros(1, 3, 3))

    def test_assembly_refuses_images_that_do_not_fit(self) -> None:
        recipe = recipe_from_dict(RECIPE | {"operator": {"name": "downsampling", "factor": 3}})
        with pytest.raises(RecipeError, match="downsampling: factor 3 does not divide the 16×16 images"):
            assemble(recipe)
