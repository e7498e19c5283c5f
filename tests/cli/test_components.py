"""The command line's front half: list, show, validate, and how errors end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import caller
from conftest import BLT, ROOT, Install
from test_recipe import BAD, SMALL
from typer.testing import CliRunner

from bltoolbox.config.hooks import KINDS
from bltoolbox.config.registry import load_registry

Run = Callable[..., subprocess.CompletedProcess[str]]

SLOW = ("torch", "numpy", "matplotlib", "skimage", "torchvision")

FILE = '''
"""A file with a sampler in it.

    v = 1

Prefer it never.
"""
from bltoolbox.config.hooks import Component, hookimpl
from bltoolbox.bilevel.roles import Sampler

class Toy(Sampler):
    """Args:
        size: Samples a step.
    """
    def __init__(self, size: int, mode: str = "on") -> None: ...
    def init(self, m, seed): return {}
    def next(self, state): raise NotImplementedError

@hookimpl
def blt_components():
    return [Component("sampler", "toy", f"{__name__}:Toy", "A toy.")]
'''


@pytest.fixture
def toy(tmp_path: Path) -> str:
    path = tmp_path / "toy.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``blt`` in this process, which has imported torch already."""
    return caller("", capfd)


def imported(code: str) -> set[str]:
    """Which slow packages a process has imported after running some code."""
    script = f"import sys\n{code}\nprint('\\n', *(name for name in {SLOW!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def command(*arguments: str) -> str:
    return f"from bltoolbox.cli import main\ntry: main({list(arguments)!r})\nexcept SystemExit as e: assert not e.code"


def test_nothing_slow_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    assert imported("import bltoolbox; bltoolbox.load_recipe") == set()
    assert imported(command("list")) == set()
    assert imported(command("--help")) == set()
    (tmp_path / "r.yaml").write_text(SMALL)
    warm = command("validate", str(tmp_path / "r.yaml"))
    imported(warm)
    imported(warm)
    assert imported(warm) == set(), "a warm cache must do without torch"
    assert imported(command("show", "agd")) == set()


@pytest.mark.usefixtures("new_processes")
def test_list_is_quick(blt: Run) -> None:
    """Half a second at most; processor time, so that a busy machine does not fail the test."""
    times = []
    for _ in range(3):
        before = os.times()
        assert blt("list").returncode == 0
        after = os.times()
        times.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert min(times) < 0.5


def test_a_command_imports_its_own_module_only() -> None:
    """The table of modules names each command that they register, and nothing else."""
    from bltoolbox.cli import MODULES, application

    for module, names in MODULES.items():
        commands = typer.main.get_command(application([names[0]])).commands  # type: ignore[attr-defined]
        assert tuple(commands) == names, module
    script = f"{command('list')}\nprint(*(name for name in sys.modules if name.startswith('bltoolbox.cli.')))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{script}"], text=True, capture_output=True, check=True
    )
    modules = {name.rpartition(".")[2] for name in done.stdout.splitlines()[-1].split()}
    assert modules & set(MODULES) == {"components"}


def test_list_names_everything(blt: Run) -> None:
    done = blt("list")
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for registered in load_registry().components():
        (line,) = (line for line in lines if line.split()[:2] == [registered.kind, registered.name])
        assert registered.component.summary in line, "one line a component when nobody watches"
        assert "bltoolbox 0.1.0" in line
    assert "\x1b" not in done.stdout


def test_list_json_and_kind(blt: Run) -> None:
    found = json.loads(blt("list", "--json").stdout)
    assert {one["kind"] for one in found} == set(KINDS)
    assert set(found[0]) == {"kind", "name", "summary", "distribution", "version", "plugin", "target"}
    assert {one["kind"] for one in json.loads(blt("list", "sampler", "--json").stdout)} == {"sampler"}
    wrong = blt("list", "samplr")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean 'sampler'?" in wrong.stderr


@pytest.mark.parametrize("name", ["list", "recipes", "plugins"])
def test_a_list_on_a_narrow_terminal_stays_within_it(name: str) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    command = subprocess.Popen([*BLT, name], stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    # Read while it writes: a terminal holds a few kilobytes.
    text = b""
    try:
        while chunk := os.read(ours, 4096):
            text += chunk
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(ours)
    assert command.wait(60) == 0
    lines = re.sub(r"\x1b\[\dm", "", text.decode()).splitlines()
    assert len(lines) > 16
    assert max(map(len, lines)) <= 80


def test_show(here: Run, toy: str) -> None:
    done = here("show", "toy", "--plugin", toy)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("A file with a sampler", "    v = 1", "size: int; required", "      Samples a step.", toy):
        assert words in done.stdout
    snippet = "  sampler:\n    name: toy\n    size:  # required: a whole number\n    mode: 'on'\n"
    assert snippet in done.stdout
    assert here("show", "sampler/toy", "--plugin", toy).stdout == done.stdout
    told = json.loads(here("show", "toy", "--plugin", toy, "--json").stdout)
    assert [parameter["name"] for parameter in told["parameters"]] == ["size", "mode"]
    assert told["parameters"][1]["default"] == "on"


def test_show_snippets_of_builtins_are_valid_recipes() -> None:
    from bltoolbox.cli.components import _snippet
    from bltoolbox.config.yaml_text import Spot, parse

    for registered in load_registry().components():
        signature = registered.signature()
        document = parse(_snippet(registered, signature), Spot("x"))
        assert not document.problems
        wanted = {parameter.name: parameter.default for parameter in signature.parameters}
        block = {"name": registered.name} | wanted
        assert document.data == (
            {"loggers": [block]} if registered.kind == "logger" else {registered.kind: block}
        )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "adg"], 4, "error: 'adg' is not a registered component; did you mean 'agd'? (blt list)"),
        (["show", "sampler/agd"], 4, "error: 'agd' is not a registered sampler; it is of kind lower_solver"),
        (["show", "solver/agd"], 2, "error: 'solver' is not a kind of component"),
        (["list", "--plugin", "nowhere.py"], 2, "nowhere.py does not exist"),
        (["validate", "nowhere.yaml"], 2, "error: recipe nowhere.yaml does not exist"),
        (["validate", "seed=3"], 2, "error: no recipe given, only overrides"),
        (["validate"], 2, "RECIPE"),
        (["list", "--no-such-option"], 2, "No such option"),
        (["no-such-command"], 2, "No such command"),
    ],
)
def test_errors_are_one_sentence_and_an_exit_code(
    blt: Run, arguments: list[str], code: int, message: str
) -> None:
    done = blt(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_version_and_help(blt: Run) -> None:
    import bltoolbox

    assert blt("--version").stdout == f"bltoolbox {bltoolbox.__version__}\n"
    assert {"list", "show", "validate"} <= set(blt("--help").stdout.split())


def test_help_lists_every_command_uncut_and_in_groups() -> None:
    from bltoolbox.cli import application

    app = application()
    text = CliRunner().invoke(app, ["--help"], prog_name="blt", env={"COLUMNS": "80"}).stdout
    headings = [line for line in text.splitlines() if re.fullmatch(r"\w+:", line)]
    assert headings == ["Options:", "Train:", "Look:", "Use:", "Extend:"]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        summary = command.help.partition("\n")[0]
        line = re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE)
        # A terminal of 80 columns has 78 for a line.
        assert line is not None and len(line[0]) <= 78, f"{name} is cut"
        page = CliRunner().invoke(app, [name, "--help"], prog_name="blt", env={"COLUMNS": "80"}).stdout
        assert max(map(len, page.splitlines())) <= 80 and summary in page
        usage = " ".join(page.partition("\n\n")[0].split())
        arguments = [param.metavar for param in command.params if param.param_type_name == "argument"]
        assert usage == " ".join(["Usage: blt", name, "[OPTIONS]", *arguments]), "as a user types it"


def test_validate(here: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "good=1.yaml", tmp_path / "bad.yaml"
    good.write_text(SMALL)
    bad.write_text(BAD)
    done = here("validate", str(good), "sampler.size=8")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{good}: valid\n", "")
    done = here("validate", str(good), str(bad))
    assert done.returncode == 3
    assert done.stdout == f"{good}: valid\n"
    # Each with the line that it is about, and a caret under the place.
    assert done.stderr.count(f"{bad}:") == len(done.stderr.splitlines()) / 3 == 9
    done = here("validate", str(good), "validation.metric=sim")
    assert done.returncode == 3 and "there is no metric 'sim'; did you mean 'ssim'?" in done.stderr
    told: list[dict[str, Any]] = json.loads(here("validate", str(good), str(bad), "--json").stdout)
    assert [one["valid"] for one in told] == [True, False]
    assert told[1]["problems"][1]["line"] == 1
    assert set(told[1]["problems"][0]) == {"file", "line", "column", "message"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "good=1.yaml"]


def test_validate_with_a_plugin_file(here: Run, tmp_path: Path, toy: str) -> None:
    (tmp_path / "r.yaml").write_text(SMALL + "sampler: {name: toy}\n")
    assert here("validate", str(tmp_path / "r.yaml"), "--plugin", toy, "sampler.size=3").returncode == 0
    done = here("validate", str(tmp_path / "r.yaml"), "--plugin", toy)
    assert "r.yaml:4:10: sampler.size: missing; expected a whole number" in done.stderr


def test_broken_plugins_are_warned_about_and_nothing_more(blt: Run, install: Install) -> None:
    install("bad-dist", {"bad": "bad_light"}, {"bad_light": "import no_such_module"})
    done = blt("list", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)
    assert done.stderr == (
        "warning: bad-dist 1.0 (plugin 'bad') is not used: ModuleNotFoundError: No module named 'no_such_module'\n"
    )


BOOM = """
import sys, types
from bltoolbox import cli
def boom({}):
    {}
module = sys.modules['bltoolbox.cli.boom'] = types.ModuleType('boom')
module.register = lambda app: app.command('boom')(boom)
cli.MODULES['boom'] = ('boom',)
cli.main(['boom', {}])
"""


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (
            "raise ValueError('bad luck')",
            1,
            "error: ValueError: bad luck (unexpected; --debug shows the traceback)\n",
        ),
        ("raise KeyError", 1, "error: KeyError (unexpected; --debug shows the traceback)\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("from bltoolbox.errors import BltError; raise BltError('it failed')", 1, "error: it failed\n"),
    ],
)
def test_the_unexpected_is_one_sentence_too(body: str, code: int, message: str) -> None:
    script = BOOM.format("", body, "")
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (code, message)


def test_debug_shows_a_traceback() -> None:
    script = "from bltoolbox.cli.common import Debug\n" + BOOM.format(
        "debug: Debug = False", "1 / 0", "'--debug'"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: ZeroDivisionError: division by zero\n")


def test_output_survives_poor_terminals_and_closed_pipes() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*BLT, "show", "foe"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    script = f"'{sys.executable}' -m bltoolbox list | true; exit ${{PIPESTATUS[0]}}"
    piped = subprocess.run(["bash", "-c", script], capture_output=True, cwd=ROOT)
    assert piped.stderr == b""
