"""Operators one after the other: the product of their matrices, their bounds, and parameters of every part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from test_operators import RECIPE, check_hypergradient, matrix, normal, params
from torch import Tensor

from blt_builtins.operators.blur import Blur
from blt_builtins.operators.composed import Composed
from blt_builtins.operators.ct import CT
from blt_builtins.operators.downsampling import Downsampling
from blt_builtins.operators.identity import Identity
from blt_builtins.operators.inpainting import Inpainting
from blt_builtins.operators.mri import MRI
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.bilevel.tensors import dot, norm
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import RecipeError
from bltoolbox.restoration.roles import Operator
from bltoolbox.testing import variational
from bltoolbox.training.assemble import assemble

SHAPE = (2, 8, 12)
CHAINS: dict[str, Callable[[], list[Operator]]] = {
    "one": lambda: [Blur(size=3)],
    "blur-downsampling": lambda: [Blur(size=5, sigma=1.0), Downsampling(2)],
    "valid-downsampling": lambda: [Blur(size=3, boundary="valid"), Downsampling(2)],
    "learned-learned": lambda: [Blur(size=3, learned=True), Blur(size=2, learned=True, boundary="valid")],
    "blur-mri": lambda: [Blur(size=3, sigma=0.7), MRI(acceleration=2, center_fraction=0.2, coils=2)],
    "nested": lambda: [Composed([Blur(size=3), Identity()]), Downsampling(2), Inpainting(missing=0.3)],
    "unitary": lambda: [MRI(acceleration=1), Identity()],
}


@pytest.fixture(params=CHAINS)
def parts(request: pytest.FixtureRequest) -> list[Operator]:
    return CHAINS[request.param]()


def product(parts: Sequence[Operator], theta: Theta) -> Tensor:
    """The matrices of the parts, multiplied."""
    shape, total = SHAPE, torch.eye(torch.Size(SHAPE).numel(), dtype=torch.float64)
    for position, part in enumerate(parts):
        own = {n.split(".", 1)[1]: v for n, v in theta.items() if n.startswith(f"{position}.")}
        size = torch.Size(shape).numel()
        image = part.apply(torch.eye(size, dtype=torch.float64).view(size, *shape), own, {})
        total, shape = image.flatten(1).T @ total, tuple(image.shape[1:])  # type: ignore[assignment]
    return total


def test_is_the_product_of_its_parts(parts: list[Operator]) -> None:
    operator = Composed(parts)
    torch.testing.assert_close(matrix(operator), product(parts, params(operator)))


def test_adjoint_is_exact(parts: list[Operator]) -> None:
    operator = Composed(parts)
    theta, x = params(operator), normal(3, *SHAPE)
    image = operator.apply(x, theta, {})
    y = normal(*image.shape, seed=1)
    gap = (dot(image, y) - dot(x, operator.adjoint(y, theta, {}))).abs()
    assert (gap <= 1e-12 * norm(image) * norm(y)).all()
    assert operator.start(y, theta, {}).shape == x.shape


def test_bounds_are_true_and_the_products_of_those_of_the_parts(parts: list[Operator]) -> None:
    operator = Composed(parts)
    a = matrix(operator)
    eigenvalues = torch.linalg.eigvalsh(a.T @ a)
    least, most = operator.spectrum(params(operator), SHAPE, {})
    assert least is not None and most is not None
    assert 0 <= float(least) <= float(eigenvalues[0]) + 1e-12
    assert float(eigenvalues[-1]) <= float(most) * (1 + 1e-12)


def test_bounds_of_unitary_parts_are_kept() -> None:
    assert Composed(CHAINS["unitary"]()).spectrum({}, SHAPE, {}) == (1, 1)


class Unknown(Identity):
    """The identity, of whose norm nothing is known."""

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def test_what_is_unknown_of_a_part_is_unknown() -> None:
    assert Composed([Identity(), Unknown()]).spectrum({}, SHAPE, {}) == (0.0, None)
    assert Composed([Unknown(), Identity()]).spectrum({}, SHAPE, {}) == (0.0, None)


def test_context_reaches_every_part_and_bounds_are_those_of_each_sample() -> None:
    operator = Composed([Identity(), MRI()])
    context = {"mask": (normal(2, 8, 12, seed=3) > 0).double(), "coils": normal(2, 2, 8, 12, seed=4)}
    x = normal(2, *SHAPE)
    torch.testing.assert_close(operator.apply(x, {}, context), MRI().apply(x, {}, context))
    measured = operator.measured(operator.apply(x, {}, context), context)
    assert measured is not None and torch.equal(measured[:, 0], context["mask"])
    for found, expected in zip(
        operator.spectrum({}, SHAPE, context), MRI().spectrum({}, SHAPE, context), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_parameters_of_every_part_are_learned() -> None:
    operator = Composed(CHAINS["learned-learned"]())
    assert {name: tuple(value.shape) for name, value in params(operator).items()} == {
        "0.log_kernel": (3, 3),
        "1.log_kernel": (2, 2),
    }


def test_hypergradients_of_every_part_are_those_of_central_differences() -> None:
    operator = Composed([Blur(size=2, learned=True), Downsampling(2), Blur(size=2, learned=True)])
    problem = variational(operator, TotalVariation(weight=0.05, nu=0.1), strong_convexity=0.05)
    check_hypergradient(problem, (1, 6, 8))


class Halving(Identity):
    """One parameter between 0 and 1, with a penalty: what a part may do with its θ beside measuring."""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"gain": torch.tensor([0.5, shape[1]], dtype=torch.float64)}

    def prepare(self, theta: Theta) -> Theta:
        return {**theta, "squared": theta["gain"].square()} if theta else {}

    def upgrade(self, theta: Theta) -> dict[str, Tensor]:
        return {"gain": theta["old"]}

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return {"gain": theta["gain"].clamp(0, 1)}

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        return {"gain": gradient["gain"] * 0}

    def penalty(self, theta: Theta) -> Tensor:
        return theta["gain"].sum()


def test_everything_that_is_done_to_theta_is_done_by_the_part_it_belongs_to() -> None:
    operator = Composed([Downsampling(2), Halving(), Halving()])
    theta = operator.init_params(SHAPE, torch.Generator())
    assert {name: value.tolist() for name, value in theta.items()} == {"1.gain": [0.5, 4], "2.gain": [0.5, 4]}
    assert set(operator.prepare(theta)) == {"1.gain", "1.squared", "2.gain", "2.squared"}
    assert operator.project(theta)["2.gain"].tolist() == [0.5, 1]
    assert operator.project_gradient(theta)["1.gain"].tolist() == [0, 0]
    assert float(operator.penalty(theta)) == 9  # type: ignore[arg-type]
    assert Composed([Identity()]).penalty({}) is None
    old = {name.replace("gain", "old"): value for name, value in theta.items()}
    assert operator.upgrade(old) == theta


def test_images_that_do_not_fit_a_part_are_refused_with_its_position() -> None:
    operator = Composed([Blur(size=2, boundary="valid"), Downsampling(2)])
    assert operator.check((1, 9, 13)) is None
    assert operator.check((1, 8, 12)) == (
        "part 1: factor 2 does not divide the 7×11 images; use another factor, or crop the images to a multiple of it"
    )
    assert (Composed([CT(size=9), Identity()]).check(SHAPE) or "").startswith("part 0: size 9")


def test_only_the_first_part_may_differ_from_place_to_place() -> None:
    rows, columns = slice(2, 6), slice(4, 12)
    same = Composed([Blur(size=3), Downsampling(2)])
    assert same.crop(rows, columns, SHAPE) is same
    operator, x = Composed([Inpainting(missing=0.3), Downsampling(2)]), normal(1, *SHAPE)
    part = operator.crop(rows, columns, SHAPE)
    assert part is not None
    expected = operator.apply(x, {}, {})[:, :, 1:3, 2:6]
    torch.testing.assert_close(part.apply(x[:, :, rows, columns], {}, {}), expected)
    assert Composed([Blur(size=3), Inpainting()]).crop(rows, columns, SHAPE) is None


BLOCK = {
    "name": "composed",
    "parts": [{"name": "blur", "size": 3, "learned": True}, {"name": "downsampling", "factor": 2}],
}


class TestRecipe:
    def test_trains(self) -> None:
        recipe = recipe_from_dict(RECIPE | {"operator": BLOCK, "strong_convexity": 0.01})
        result = assemble(recipe).run()
        assert "operator.0.log_kernel" in result.model.theta
        assert bool(result.model.theta["operator.0.log_kernel"].any())  # flat at first
        y = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))
        assert result.model.solve(y.expand(3, 8, 8)).shape == (3, 16, 16)

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            ({"name": "composed"}, "operator.parts: missing"),
            ({"name": "composed", "parts": []}, "operator.parts"),
            ({"name": "composed", "parts": [{"name": "blurr"}]}, "did you mean 'blur'"),
            (
                {"name": "composed", "parts": ["identity", {"name": "ct"}]},
                "part 1: size 128 is not that of the 16×16",
            ),
        ],
    )
    def test_mistakes_are_named(self, block: object, message: str) -> None:
        with pytest.raises(RecipeError, match=message):
            assemble(recipe_from_dict(RECIPE | {"operator": block}))
