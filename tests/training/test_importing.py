"""Checkpoints in the formats of CRR and WCRR, written here, against the formulas of their authors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from bombs import read_in_process
from commands import caller
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.regularizers.published import read_crr, read_wcrr
from bltoolbox import Model
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError
from bltoolbox.testing import smooth_images
from bltoolbox.training.importing import import_model, read_published

torch.set_num_threads(1)

RANGE, KNOTS = 0.1, 11
CHANNELS, SIDES = (1, 2, 4), (3, 5)
RADIUS = sum(side // 2 for side in SIDES)


def normal(*sides: int, seed: int = 0) -> Tensor:
    return torch.randn(sides, generator=torch.Generator().manual_seed(seed))


def layers(free: int) -> dict[str, Tensor]:
    """A stack whose first ``free`` layers have their mean removed by a parametrization."""
    return {
        f"conv_layer.conv_layers.{i}.{'parametrizations.weight.original' if i < free else 'weight'}": 0.3
        * normal(CHANNELS[i + 1], CHANNELS[i], SIDES[i], SIDES[i], seed=i)
        for i in range(len(SIDES))
    }


def crr_state() -> dict[str, Tensor]:
    knots = torch.linspace(-RANGE, RANGE, KNOTS)
    values = knots.tanh().repeat(4, 1) + 0.02 * normal(
        4, KNOTS, seed=7
    )  # not monotone: slopes must be clipped
    rest = {"lmbd": torch.tensor(3.0), "mu": torch.tensor(1.7), "L": torch.tensor(1.0)}
    return layers(2) | rest | {"activation.coefficients_vect": values.flatten()}


def wcrr_state() -> dict[str, Tensor]:
    knots = torch.linspace(-RANGE, RANGE, KNOTS).unsqueeze(0)
    return layers(1) | {
        "mu_": torch.tensor(1.2),
        "activation_cvx.coefficients": (3 * knots).clamp(-0.1, 0.15),  # too steep, and not odd
        "activation_ccv.coefficients": knots.clone(),
        "spline_scaling.coefficients": 3 + 0.3 * normal(4, 5, seed=9),
    }


CRR_CONFIG = {"activation_params": {"knots_range": RANGE, "n_knots": KNOTS}, "sigma": 25}
WCRR_CONFIG = {
    "spline_activation": {"x_max": RANGE, "x_min": -RANGE, "num_knots": KNOTS},
    "noise_range": [0, 30],
    "noise_val": 25,
    "rho_wcvx": 1,
}


def stacked(state: dict[str, Tensor]) -> list[Tensor]:
    named = sorted((name, value) for name, value in state.items() if name.startswith("conv_layer"))
    return [
        (value - value.mean((1, 2, 3), keepdim=True) if "original" in name else value).double()
        for name, value in named
    ]


def integrated(t: Tensor, slopes: Tensor) -> Tensor:
    """∫ of a piecewise constant function (J, intervals) from 0, written out by sums over intervals."""
    spacing = 2 * RANGE / slopes.shape[1]
    starts = -RANGE + spacing * torch.arange(slopes.shape[1], dtype=t.dtype)
    pieces = (t.unsqueeze(-1) - starts).clamp(0, spacing) - (-starts).clamp(0, spacing)
    return (pieces * slopes.view(1, len(slopes), 1, 1, -1)).sum(-1)


def reference_gradient(form: str, state: dict[str, Tensor], x: Tensor, level: float) -> Tensor:
    """∇R by the published formulas, with a stack of convolutions padded with zeros."""
    weights = stacked(state)
    spacing = 2 * RANGE / (KNOTS - 1)

    def forward(x: Tensor) -> Tensor:
        for weight in weights:
            x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
        return x

    def adjoint(t: Tensor) -> Tensor:
        for weight in reversed(weights):
            t = F.conv_transpose2d(t, weight, padding=weight.shape[-1] // 2)
        return t

    def clipped(name: str, count: int, high: float | None) -> Tensor:
        slopes = (state[name].double().reshape(count, KNOTS).diff(dim=1) / spacing).clamp(0, high)
        slopes[:, 0] = slopes[:, -1] = 0
        return slopes

    if form == "crr":
        slopes = clipped("activation.coefficients_vect", 4, None)
        weight, scale = float(state["lmbd"]), float(state["mu"])
        return weight * adjoint(integrated(scale * forward(x), slopes))
    dirac = torch.zeros(1, 1, 41, 41, dtype=torch.float64)
    dirac[..., 20, 20] = 1
    size = 2 * RADIUS + 255
    norm = torch.fft.fft2(adjoint(forward(dirac))[0, 0], s=(size, size)).abs().max().sqrt()
    place = level / 7.5  # five knots from 0 to 30
    knots = state["spline_scaling.coefficients"].double()
    low = int(place)
    between = knots[:, low] * (1 - (place - low)) + knots[:, low + 1] * (place - low)
    scaling = (between.exp() / (level + 1e-5)).view(1, -1, 1, 1)
    pair = []
    for part in ("cvx", "ccv"):
        slopes = clipped(f"activation_{part}.coefficients", 1, 1.0)
        pair.append(((slopes + slopes.flip(1)) / 2).expand(4, -1))
    common = float(state["mu_"].exp()) * pair[0] - pair[1]
    responses = integrated(scaling * forward(x) / norm, common) / scaling
    return adjoint(responses) / norm


def write(folder: Path, form: str) -> Path:
    """As the authors' trainers do, with optimizer states that are of no interest."""
    path = folder / "checkpoints" / "checkpoint_10.pth"
    path.parent.mkdir(parents=True)
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    content: dict[str, Any] = {"epoch": 10, "optimizer_state_dict": optimizer}
    if form == "crr":
        content |= {"state_dict": crr_state(), "config": CRR_CONFIG}
    else:
        content |= {"state_dict": wcrr_state(), "L": torch.tensor(1.0)}
        (folder / "config.json").write_text(json.dumps(WCRR_CONFIG))
    torch.save(content, path)
    return path


@pytest.mark.parametrize(("form", "level"), [("crr", 25.0), ("wcrr", 25.0), ("wcrr", 11.0)])
def test_gradients_are_the_published_ones_away_from_the_border(
    tmp_path: Path, form: str, level: float
) -> None:
    path = write(tmp_path, form)
    content, recipe = import_model(form, path, load_registry(), noise=level / 255)
    target = tmp_path / "model.safetensors"
    target.write_bytes(content)
    model = Model.load(target, device="cpu")
    x = smooth_images(2, (1, 20, 22)).double()
    x = x + 0.1 * normal(2, 1, 20, 22, seed=3).double()
    theta = {name.partition(".")[2]: value.double() for name, value in model.theta.items()}
    inner = (..., slice(2 * RADIUS, -2 * RADIUS), slice(2 * RADIUS, -2 * RADIUS))
    expected = reference_gradient(form, crr_state() if form == "crr" else wcrr_state(), x, level)
    gradient = model.problem.regularizer.gradient(theta, x)
    torch.testing.assert_close(gradient[inner], expected[inner], rtol=1e-4, atol=1e-5)
    assert float(gradient[inner].abs().max()) > 1e-3
    assert recipe.regularizer.options["kernel_size"] == 2 * RADIUS + 1


def test_convexity_is_read_off_the_slopes() -> None:
    registry = load_registry()
    convex = read_crr(crr_state(), CRR_CONFIG, None)
    regularizer = registry.get("regularizer", "spline-ridge").load()(**convex.options)
    assert float(regularizer.strong_convexity(convex.theta, (1, 24, 24))) == 0
    weak = read_wcrr(wcrr_state(), WCRR_CONFIG, None)
    regularizer = registry.get("regularizer", "spline-ridge").load()(**weak.options, boundary="periodic")
    # The concave part has slope 1, and W norm 1: the regularizer is 1-weakly convex.
    bound = -float(regularizer.strong_convexity(weak.theta, (1, 24, 24)))
    assert 0.9 < bound < 1.15
    assert convex.noise == weak.noise == 25 / 255


def test_an_imported_model_restores_and_is_evaluated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, target = write(tmp_path, "crr"), tmp_path / "crr.safetensors"
    result = caller("import", capfd)("crr", str(path), "-o", str(target), "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["filters"] == 4 and facts["noise"] == pytest.approx(25 / 255)
    assert caller("import", capfd)("crr", str(path), "-o", str(target)).returncode == 2  # exists
    clean = smooth_images(1, (1, 32, 32))
    noisy = clean + 25 / 255 * normal(1, 1, 32, 32, seed=5)
    restored = Model.load(target, device="cpu").solve(noisy)
    assert float((restored - clean).square().mean()) < 0.8 * float((noisy - clean).square().mean())
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    from PIL import Image

    Image.fromarray((255 * clean[0, 0]).byte().numpy()).save(pictures / "one.png")
    out = ["-o", str(tmp_path / "restored")]
    applied = caller("apply", capfd)(str(target), str(pictures / "one.png"), *out)
    assert applied.returncode == 0, applied.stderr
    measured = caller("evaluate", capfd)(
        str(target), "--images", str(pictures), "--noise", "25/255", "--json"
    )
    assert measured.returncode == 0, measured.stderr


class Payload:
    def __reduce__(self) -> Any:
        return eval, ("open('executed', 'w')",)


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registry, path = load_registry(), tmp_path / "bad.pth"

    def refusal(content: Any, form: str = "crr") -> str:
        torch.save(content, path)
        with pytest.raises(BltError) as error:
            import_model(form, path, registry)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "not plain data" in refusal({"state_dict": Payload()})
    assert not (tmp_path / "executed").exists()
    assert "no state_dict" in refusal([1, 2])
    assert "no complete stack" in refusal({"state_dict": {}})
    assert "it has no activation_cvx" in refusal({"state_dict": crr_state()}, "wcrr")
    assert "NaN" in refusal({"state_dict": crr_state() | {"mu": torch.tensor(torch.nan)}})
    wide = {"conv_layer.conv_layers.0.parametrizations.weight.original": torch.zeros(2, 3, 3, 3)}
    assert "only gray models" in refusal({"state_dict": crr_state() | wide})
    even = crr_state() | {"activation.coefficients_vect": torch.zeros(4 * 10)}
    assert "10 knots" in refusal({"state_dict": even})
    path.write_bytes(pickle.dumps({"state_dict": 1}))
    with pytest.raises(BltError, match=r"not plain data as torch\.save writes it"):
        read_published(path, None)
    torch.save({"state_dict": wcrr_state()}, path)
    config = tmp_path / "settings.json"
    for text, words in (("[1]", "does not contain the settings"), ("{", "not a JSON file")):
        config.write_text(text)
        with pytest.raises(BltError, match=words):
            import_model("wcrr", path, registry, config=config)
    for changes, words in (
        ({"noise_val": None}, "for which noise level it is; give it with --noise"),
        (
            {"spline_activation": {}},
            r"no spline_activation\.x_max; give the config.json of its authors with --config",
        ),
        ({"rho_wcvx": -1}, "rho_wcvx in its config is -1, which is not a valid number"),
        ({"noise_range": None}, "noise_range in its config is not a pair of numbers"),
        ({"noise_range": [30, 0]}, "noise_range in its config is not an interval"),
    ):
        config.write_text(json.dumps(WCRR_CONFIG | changes))
        with pytest.raises(BltError, match=words):
            import_model("wcrr", path, registry, config=config)


def test_a_small_file_cannot_exhaust_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.pth"
    huge = torch.zeros(1).expand(2**33)
    torch.save({"state_dict": crr_state() | {"activation.coefficients_vect": huge}}, path)
    outcome, grown = read_in_process(
        "from pathlib import Path\nfrom bltoolbox.training.importing import read_published",
        f"read_published(Path({str(path)!r}), None)",
    )
    assert "would take" in outcome and grown < 2**27
