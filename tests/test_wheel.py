"""The toolbox from a wheel, without a checkout: everything that comes with it is there."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from environments import make_environment
from PIL import Image

import bltoolbox
from bltoolbox.config.hooks import KINDS
from bltoolbox.config.shipped_recipes import shipped_recipes
from bltoolbox.restoration.shipped import shipped_models


def build(source: Path, target: Path, *kinds: str) -> Path:
    options = [argument for kind in kinds for argument in ("-t", kind)]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *options, "-d", str(target)],
        cwd=source,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_and_sdist_hold_what_they_should_and_nothing_else(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    inside = names(wheel)
    templates = {f"bltoolbox/cli/templates/components/{kind}.py.tmpl" for kind in KINDS}
    recipes = {f"bltoolbox/recipes/{name}.yaml" for name in shipped_recipes()}
    models = {f"bltoolbox/restoration/weights/{path.name}" for path in shipped_models().values()}
    models |= {name.replace(".safetensors", ".md") for name in models} | {
        "bltoolbox/restoration/weights/README.md"
    }
    assert (
        templates | recipes | models | {"bltoolbox/py.typed", "blt_builtins/lower_solvers/agd.py"} <= inside
    )
    info = f"bltoolbox-{bltoolbox.__version__}.dist-info/"
    packages = {"bltoolbox/"} | {f"{path.name}/" for path in (ROOT / "plugins").iterdir()}
    assert not [name for name in inside if not name.startswith((info, *packages))]
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    (again,) = build(unpacked, tmp_path / "dist", "wheel").glob("*.whl")
    assert names(again) == inside, "a wheel built from the sdist is the same"


def test_everything_works_from_a_wheel_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", with_toolbox=False)
    environment.install(list(built.glob("*.whl")))
    here = tmp_path / "some where"
    here.mkdir()
    home = environment.run("-c", "import bltoolbox; print(bltoolbox.__file__)", cwd=here)
    assert str(tmp_path / "env") in home, "the checkout must be out of sight"
    Image.new("RGB", (24, 16), "olive").save(here / "photo.jpg")
    tiny = ("budget={steps: 1}", "data.count=12", "sampler.size=2", "evaluation=", "validation.checks=1")
    listed, recipes, cp, again, valid, shown, ran, new, applied = environment.blt(
        ("list", "--json"),
        ("recipes", "--json"),
        ("cp", "smoke"),
        ("cp", "smoke"),
        ("validate", "smoke.yaml", "denoise-maid"),
        ("show", "agd"),
        ("run", "smoke", *tiny, "-q", "-o", "out"),
        ("new-plugin", "my-own"),
        ("apply", "denoise-color", "photo.jpg"),
        cwd=here,
    )
    assert {one["kind"] for one in json.loads(listed[1])} == set(KINDS)
    found = json.loads(recipes[1])
    assert {one["name"] for one in found} == set(shipped_recipes())
    for one in found:
        assert one["summary"], one["name"]
        assert one["path"].startswith(str(tmp_path / "env"))
    assert cp[:2] == (0, "smoke.yaml\n")
    assert again[:2] == (2, "")
    assert "smoke.yaml exists" in again[2]
    assert valid[:2] == (0, "smoke.yaml: valid\ndenoise-maid: valid\n")
    assert "Nesterov" in shown[1]
    assert ran[0] == 0, ran
    assert (here / "out" / "theta.safetensors").is_file()
    assert new[0] == 0, new
    assert (here / "my-own" / "my_own" / "regularizer.py").is_file()
    assert applied[0] == 0, applied
    with Image.open(here / "photo-restored.jpg") as picture:
        assert picture.size == (24, 16), "as the first line of the README promises"


def test_the_installed_script(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "blt = bltoolbox.__main__:main" in archive.read(points).decode()
