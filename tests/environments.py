"""Fresh virtual environments in a second: they borrow the installed packages through a path file, torch included."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Several commands in one process, so that torch is imported once; prints exit code, stdout and stderr of each as JSON.
DRIVER = """
import contextlib, io, json, sys
from bltoolbox.cli import main
asked = json.load(sys.stdin)
if not asked["figures"]:
    from bltoolbox.reports import writer
    writer.draw = lambda result, folder: []
told = []
for arguments in asked["commands"]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as done:
            code = done.code
    told.append([code or 0, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a cache of its own."""

    folder: Path

    @property
    def python(self) -> str:
        scripts = "Scripts" if os.name == "nt" else "bin"
        return str(self.folder / scripts / "python")

    def run(self, *command: str, cwd: Path | None = None, text: str = "") -> str:
        """``python …`` in this environment, away from the checkout; what it prints."""
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BLT_"))
        }
        done = subprocess.run(
            [self.python, *command],
            cwd=cwd or self.folder,
            env=inherited | {"BLT_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"},
            input=text,
            text=True,
            encoding="utf-8",
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def blt(self, *commands: Sequence[str], cwd: Path, figures: bool = True) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each ``blt`` command; runs are much quicker without figures."""
        asked = {"commands": [list(command) for command in commands], "figures": figures}
        told = self.run("-c", DRIVER, cwd=cwd, text=json.dumps(asked))
        return [(code, out, err) for code, out, err in json.loads(told)]

    def install(self, paths: Sequence[Path]) -> None:
        """As ``pip install`` would, building with what is there and downloading nothing."""
        options = (
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--disable-pip-version-check",
        )
        self.run("-m", "pip", "install", *options, "--force-reinstall", *map(str, paths))


def make_environment(folder: Path, *, with_toolbox: bool) -> Environment:
    """An environment that sees the installed packages; bltoolbox, being a link to the checkout, only if wanted."""
    venv.create(folder, with_pip=False)
    # The toolbox under test comes first, should another one be installed.
    mine = [distribution("bltoolbox").locate_file(""), ROOT, ROOT / "plugins"] if with_toolbox else []
    outer = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    # A plain line is a folder of packages; ``addsitedir`` also follows the links in it, as of an editable install.
    lines = [str(path) for path in mine]
    lines += [
        f"import site; site.addsitedir({path!r})" if with_toolbox else path for path in dict.fromkeys(outer)
    ]
    environment = Environment(folder)
    inner = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (inner / "outer.pth").write_text("\n".join(lines) + "\n")
    return environment
