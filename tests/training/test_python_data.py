"""Data from Python: tensors, arrays, data sets and pairs in place of the sections of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from bltoolbox import Images, Model, load_recipe, resume, run
from bltoolbox.bilevel.events import Listener
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError, RecipeError, UsageError
from bltoolbox.restoration.python_data import as_data, stand_in
from bltoolbox.restoration.roles import Data
from bltoolbox.testing import smooth_images
from bltoolbox.training.assemble import assemble

SETTINGS: dict[str, Any] = {
    "color": "gray",
    "regularizer": {"name": "tikhonov"},
    "sampler": {"size": 2},
    "upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 0.1},
    "validation": {"count": 1, "checks": 2},
    "budget": {"steps": 4},
    "device": "cpu",
}
X = smooth_images(6, (1, 12, 14))
Y = X + 0.1 * torch.randn(X.shape, generator=torch.Generator().manual_seed(0))


def recipe_file(folder: Path, **sections: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | sections))
    return path


class Pairs(Dataset[Any]):
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, i: int) -> Any:
        items = tuple(part[i] for part in self.parts)
        return items if len(items) > 1 else items[0]


class Watched(Listener):
    def started(self, experiment: Any) -> None:
        self.sample = experiment.train.samples.batch(range(len(experiment.train)))
        self.recipe = experiment.recipe


class TestForms:
    @pytest.mark.parametrize(
        "given",
        [
            X,
            X.double(),
            X.numpy(),
            X.permute(0, 2, 3, 1).numpy(),
            X[:, 0],
            X[:, 0].numpy()[:, ::-1][:, ::-1],
            Pairs(X),
            Pairs(X[:, 0]),
            TensorDataset(X),
            Images(X),
        ],
        ids=[
            "tensor",
            "float64",
            "array",
            "N×H×W×C",
            "gray",
            "gray array",
            "set",
            "gray set",
            "tuples",
            "images",
        ],
    )
    def test_true_images(self, given: Any) -> None:
        data = as_data(given)
        assert len(data) == len(X) and data.offers("clean") and not data.offers("measured")
        assert torch.equal(data.clean([4, 1]), X[[4, 1]])
        assert stand_in(data).name == "python"

    @pytest.mark.parametrize(
        "given",
        [
            (X, Y),
            (X.numpy(), Y.numpy()),
            (X.permute(0, 2, 3, 1).numpy(), Y.permute(0, 2, 3, 1).numpy()),
            (X[:, 0], Y[:, 0]),
            Pairs(X, Y),
            TensorDataset(X, Y),
            Images(X, Y),
        ],
        ids=["tensors", "arrays", "N×H×W×C", "gray", "set", "tensor set", "images"],
    )
    def test_pairs(self, given: Any) -> None:
        data = as_data(given)
        assert torch.equal(data.clean([3]), X[[3]]) and torch.equal(data.measured([3]), Y[[3]])
        assert stand_in(data).name == "python-pairs"

    def test_measurements_alone(self) -> None:
        data = as_data((None, Y))
        assert not data.offers("clean") and torch.equal(data.measured([2]), Y[[2]])
        assert stand_in(data).name == "python-measured"

    @pytest.mark.parametrize("kind", [np.uint8, np.uint16])
    def test_integers_stand_for_the_unit_interval(self, kind: Any) -> None:
        values = np.random.default_rng(0).integers(np.iinfo(kind).max, size=(4, 6, 7, 3)).astype(kind)
        expected = torch.from_numpy((values / np.iinfo(kind).max).astype(np.float32)).permute(0, 3, 1, 2)
        assert torch.equal(as_data(values).clean(range(4)), expected)

    def test_measurements_may_have_any_shape(self) -> None:
        sinograms = torch.randn(6, 1, 30, 18)
        assert torch.equal(as_data((X, sinograms)).measured([5]), sinograms[[5]])

    def test_complex_measurements_are_pairs_of_channels(self) -> None:
        k = torch.randn(6, 1, 4, 5, dtype=torch.complex64)
        found = as_data((X, k)).measured([0, 1])
        assert torch.equal(found, torch.cat([k.real, k.imag], 1)[:2])

    def test_what_is_given_is_not_changed(self) -> None:
        x = X.clone()
        as_data(x).clean([0]).zero_()
        assert torch.equal(x, X)


class Iterable(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(X)


class Random(Pairs):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i) + torch.rand(())


class TestRefused:
    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            (np.zeros((5, 3, 20, 3)), "may be N×C×H×W or N×H×W×C; give a tensor"),
            (np.zeros((5, 20, 20, 20)), "may be N×C×H×W or N×H×W×C"),
            (torch.zeros(5, 20, 20, 3), "seems to be N×H×W×C; give x.permute"),
            (torch.zeros(3, 20, 20), "which may be one image"),
            (torch.zeros(20, 20), "N×C×H×W is needed"),
            (torch.zeros(4, 1, 8, 8, dtype=torch.int64), "int64; give floats"),
            ((X, Y[:4]), "the numbers of samples differ: clean 6, measured 4"),
            ((None, None), "give at least one of them"),
            ([X, Y], "data of type list cannot be used"),
            ("photos", "data of type str cannot be used"),
            (Iterable(), "has no length"),
            (Pairs(X[:0]), "is empty"),
            (Random(X), "differs between two reads"),
            (Pairs(X, list(range(6))), r"item 0 of Pairs is \(Tensor, int\)"),
        ],
    )
    def test_in_one_sentence(self, given: Any, sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence.replace("(0", r"\(0")) as caught:
            as_data(given)
        assert "\n" not in str(caught.value)

    def test_items_of_different_shapes(self) -> None:
        with pytest.raises(ValueError, match="item 1 of Pairs is 1×8×8, but item 0 is 1×12×14"):
            as_data(Pairs([X[0], torch.zeros(1, 8, 8)])).clean([0, 1])

    def test_nan(self) -> None:
        with pytest.raises(ValueError, match="NaN"):
            as_data(torch.full((2, 1, 8, 8), torch.nan)).clean([0])

    def test_values_of_another_range(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="far outside the range"):
            run(recipe_file(tmp_path), data=255 * X)
        assert run(recipe_file(tmp_path), data=Images(255 * X, range=(0, 255))).model.range == (0, 255)


class TestRuns:
    def test_images_are_measured_as_the_recipe_says(self, tmp_path: Path) -> None:
        watched = Watched()
        np.save(tmp_path / "x.npy", X[:, 0].numpy())
        run(recipe_file(tmp_path, noise=0.1), data=X, listeners=[watched])
        file = {"name": "array", "path": str(tmp_path / "x.npy")}
        expected = assemble(recipe_from_dict(SETTINGS | {"noise": 0.1, "data": file})).train.samples.batch(
            range(5)
        )
        assert torch.equal(watched.sample.y, expected.y)

    def test_nothing_is_added_to_recorded_measurements(self, tmp_path: Path) -> None:
        watched = Watched()
        result = run(
            recipe_file(tmp_path), data=(X, Y), evaluation=(X[:2] / 2, Y[:2] / 2), listeners=[watched]
        )
        assert torch.equal(watched.sample.y, Y[:5]) and watched.recipe.noise is None
        assert result.evaluation is not None
        assert result.evaluation.before["psnr"][0] == pytest.approx(
            float(-10 * ((Y[0].clamp(0, 2) / 2 - X[0] / 2).double().square().mean()).log10()), rel=1e-5
        )

    def test_noise_in_the_recipe_is_refused_for_recorded_measurements(self, tmp_path: Path) -> None:
        for recipe in (
            recipe_file(tmp_path, noise=0.1),
            load_recipe(recipe_file(tmp_path, noise=0.1), data_given=True),
        ):
            with pytest.raises(RecipeError, match="nothing is added to them; remove noise"):
                run(recipe, data=(X, Y))

    def test_the_noise_of_a_recipe_with_data_of_its_own_is_removed_by_null(self, tmp_path: Path) -> None:
        path = recipe_file(tmp_path, noise=0.1, data={"name": "dead-leaves", "count": 4, "size": 12})
        watched = Watched()
        run(path, ["noise=null"], data=(X, Y), listeners=[watched])
        assert torch.equal(watched.sample.y, Y[:5]) and watched.recipe.noise is None
        with pytest.raises(RecipeError, match="'python' are simulated; give their noise"):
            run(path, ["noise=null"], data=X)

    def test_a_recipe_object_with_the_default_noise(self, tmp_path: Path) -> None:
        recipe = load_recipe(recipe_file(tmp_path), data_given=True)
        watched = Watched()
        run(recipe, ["budget.steps=1"], data=(X, Y), listeners=[watched])
        assert torch.equal(watched.sample.y, Y[:5]) and watched.recipe.budget.steps == 1

    def test_a_recipe_without_data_needs_some(self, tmp_path: Path) -> None:
        path = recipe_file(tmp_path)
        with pytest.raises(RecipeError, match="data: missing"):
            load_recipe(path)
        with pytest.raises(RecipeError, match="were given from Python; give them again"):
            run(load_recipe(path, data_given=True))

    def test_the_data_of_the_recipe_are_replaced(self, tmp_path: Path) -> None:
        watched = Watched()
        run(recipe_file(tmp_path, data={"name": "dead-leaves"}), data=X, listeners=[watched])
        assert torch.equal(watched.sample.truth, X[:5])

    def test_groups_and_context(self, tmp_path: Path) -> None:
        watched = Watched()
        given = Images(X, groups=["a", "b", "b", "c", "a", "c"], context={"row": torch.arange(6)})
        run(recipe_file(tmp_path), data=given, listeners=[watched])
        assert watched.sample.context["row"].tolist() == [0, 1, 2, 4]

    def test_training_images_are_not_evaluated_on(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="are of photographs in the training data"):
            run(recipe_file(tmp_path), data=X, evaluation=X)

    def test_measurements_without_truth_need_another_loss(self, tmp_path: Path) -> None:
        with pytest.raises(
            RecipeError, match="'squared-error' compares with true images, which data 'python-measured'"
        ):
            run(recipe_file(tmp_path), data=(None, Y))


class TestDirectories:
    def test_the_recipe_says_that_data_came_from_python(self, tmp_path: Path) -> None:
        run(recipe_file(tmp_path), data=(X, Y), out=tmp_path / "run")
        section = yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text())["data"]
        assert section == stand_in(as_data((X, Y))).to_dict()
        assert section["name"] == "python-pairs" and section["count"] == 6
        model = Model.load(tmp_path / "run", "cpu")
        assert model.solve(Y).shape == X.shape

    def test_resume_needs_the_same_data(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        run(recipe_file(tmp_path), ["checkpoint.keep_finished=true"], data=(X, Y), out=path)
        more = ["budget.steps=8"]
        with pytest.raises(BltError, match=r"resume\(run_dir, data=…\)"):
            resume(path, more)
        with pytest.raises(UsageError, match="there were 6 samples, now there are 5"):
            resume(path, more, data=(X[:5], Y[:5]))
        changed = Y.clone()
        changed[5, 0, 0, 0] += 1e-6
        with pytest.raises(UsageError, match="they have changed"):
            resume(path, more, data=(X, changed))
        with pytest.raises(UsageError, match=r"evaluation of .* did not come from Python"):
            resume(path, more, data=(X, Y), evaluation=(X, Y))
        resumed = resume(path, more, data=(X, Y))
        whole = run(recipe_file(tmp_path), more, data=(X, Y))
        assert resumed.steps == 8
        assert all(torch.equal(resumed.theta[name], whole.theta[name]) for name in whole.theta)

    def test_data_of_a_recipe_are_not_replaced_by_resume(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", X[:, 0].numpy())
        run(
            recipe_file(tmp_path, data={"name": "array", "path": str(tmp_path / "x.npy")}),
            out=tmp_path / "run",
        )
        with pytest.raises(UsageError, match="did not come from Python; leave data=… out"):
            resume(tmp_path / "run", ["budget.steps=8"], data=X)


class TestStandIns:
    def test_they_are_not_listed(self) -> None:
        assert not [one.name for one in load_registry().components("data") if one.name.startswith("python")]

    def test_a_plugin_cannot_take_their_names(self, tmp_path: Path) -> None:
        plugin = tmp_path / "mine.py"
        plugin.write_text(
            "from bltoolbox.plugin import Component, hookimpl\n"
            "@hookimpl\n"
            "def blt_components(): return [Component('data', 'python', 'a:B', 'mine')]\n"
        )
        assert any("given from Python; choose another" in word for word in load_registry([plugin]).warnings())

    def test_the_digest_of_a_data_set_sees_its_ends(self) -> None:
        def digest(x: Tensor) -> str:
            return str(stand_in(as_data(Pairs(x))).options["digest"])

        assert digest(X) == digest(X.clone())
        assert len({digest(X), digest(X.flip(0)), digest(X[:5])}) == 3

    def test_any_data_class(self, tmp_path: Path) -> None:
        class Mine(Data):
            def __len__(self) -> int:
                return 6

            def clean(self, ids: Any) -> Tensor:
                return X[list(ids)]

        assert run(recipe_file(tmp_path), data=Mine()).steps == 4
