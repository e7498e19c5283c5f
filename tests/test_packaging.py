"""What a package index sees: metadata, sizes, import names, the README without relative links."""

from __future__ import annotations

import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from test_wheel import build

import bltoolbox

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Bytes of a wheel or sdist.
LARGEST = 5_000_000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(wheel.read(name).decode())


def test_both_are_small(built: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in built.iterdir()}
    assert len(sizes) == 2
    assert max(sizes.values()) < LARGEST, sizes


def test_an_install_adds_two_import_names_both_typed(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"bltoolbox", "blt_builtins"}
    assert {"bltoolbox/py.typed", "blt_builtins/py.typed"} <= set(wheel.namelist())


def test_the_version_is_in_one_place(metadata: Message) -> None:
    assert "version" in PROJECT["dynamic"]
    assert metadata["Version"] == bltoolbox.__version__
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == bltoolbox.__version__
    assert f"\n## {bltoolbox.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {bltoolbox.__version__}" in (ROOT / "docs/release-notes.md").read_text(encoding="utf-8")


def test_the_description_has_no_relative_links(metadata: Message) -> None:
    text = str(metadata.get_payload())
    assert text.startswith("# bltoolbox") and metadata["Description-Content-Type"] == "text/markdown"
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)", prose)
    assert len(targets) == len(re.findall(r"\]\(([^)\s]+)", re.sub(r"`[^`\n]*`", "", README)))
    assert all(re.match(r"https://|#", target) for target in targets), targets
    assert re.search(r"!\[[^\]]*\]\(https://\S+/raw/main/docs/images/restored\.jpg\)", text)


def test_the_first_line_of_code_installs_and_restores() -> None:
    first = re.search(r"^```\w*\n(.*?)\n", README, re.MULTILINE)
    assert first and first[1] == "pip install bltoolbox && blt apply denoise-color photo.jpg"


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| \S", page, re.MULTILINE)
    assert set(rows) == set(PROJECT["optional-dependencies"]), "the table of extras in docs/install.md"


def test_the_sdist_has_no_pictures_of_the_documentation(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert any(name.endswith("/docs/tutorial.md") for name in names)
    assert any(name.endswith("/hatch_build.py") for name in names)
    assert not [name for name in names if "/docs/" in name and name.endswith((".png", ".jpg"))]


def test_twine_has_nothing_to_say(built: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed; the job `wheel` of CI runs it")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir()))]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
