"""A run directory, a sweep or a recipe from someone else: nothing is written elsewhere, nothing reaches a terminal."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import caller
from rich.console import Console
from test_nothing_lost import TINY

from bltoolbox import load_recipe, run
from bltoolbox.cli import common
from bltoolbox.cli.display import sweep as sweep_display
from bltoolbox.cli.display import tables
from bltoolbox.cli.display import watch as watch_display
from bltoolbox.config.names import EXTRA_FILES, FILES, FOLDERS, MANIFEST, is_component
from bltoolbox.config.printable import printable, printable_json, printable_lines
from bltoolbox.errors import RecipeError, UsageError
from bltoolbox.reports import progress
from bltoolbox.runs.files import UnsafePath, append_to, make_folder, open_regular, remove, write_bytes
from bltoolbox.runs.history import expand
from bltoolbox.runs.watch import Watched

#: Clears the screen, sets a title, writes from right to left, begins a line, and is markup to rich.
EVIL = "\x1b[2J\x1b]0;x\x07\u202e\r\n\x9b31m [bold]x[/nothing]"
OBEYED = set("\x1b\x07\u202e\r\x9b")
RECIPE = [*TINY, "evaluation={name: dead-leaves, count: 1, size: 16, seed: 1}"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run(load_recipe("smoke", RECIPE), out=path)
    return path


@pytest.fixture
def foreign(finished: Path, tmp_path: Path) -> Path:
    """A run directory that somebody sent."""
    return Path(shutil.copytree(finished, tmp_path / "foreign"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


# Links


@pytest.mark.parametrize("name", [*FILES, *EXTRA_FILES, MANIFEST, "lock", *FOLDERS])
def test_resuming_writes_through_no_link(
    name: str, foreign: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "victim").mkdir()
    target = foreign / name
    if name in FOLDERS:
        shutil.rmtree(home / "victim")
        target.rename(home / "victim")
    else:
        if target.exists():
            shutil.copy(target, home / "victim" / "file")
            target.unlink()
        else:
            (home / "victim" / "file").write_text("mine")
    target.symlink_to(home / "victim" if name in FOLDERS else home / "victim" / "file")
    before = tree(home)
    done = caller("resume", capfd)(str(foreign), "budget.steps=4")
    assert tree(home) == before
    assert "unexpected" not in done.stderr
    if done.returncode:
        assert done.returncode == 1 and f"{target} is a symbolic link" in done.stderr


@pytest.mark.parametrize("name", ["log.txt", "lock", "metrics.jsonl"])
def test_a_hard_link_or_a_pipe_is_not_written_to(
    name: str, foreign: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    (foreign / name).touch()
    os.link(foreign / name, victim)
    before = victim.read_bytes()
    done = caller("resume", capfd)(str(foreign), "budget.steps=4")
    assert done.returncode == 1 and "hard links" in done.stderr and victim.read_bytes() == before
    if name == "metrics.jsonl":
        return  # read before it is opened for writing
    (foreign / name).unlink()
    os.mkfifo(foreign / name)
    done = caller("resume", capfd)(str(foreign), "budget.steps=4")
    assert done.returncode == 1 and "is not a regular file" in done.stderr


def test_overwriting_follows_no_link(
    foreign: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (foreign / "checkpoints").rename(tmp_path / "elsewhere")
    (foreign / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path / "elsewhere")
    done = caller("run", capfd)("smoke", *TINY, "-o", str(foreign), "--overwrite")
    assert done.returncode == 1 and "checkpoints is a symbolic link" in done.stderr
    assert tree(tmp_path / "elsewhere") == before


def test_files_below_a_folder_stay_there(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    for folder in (root, away):
        folder.mkdir()
    (away / "file").write_text("mine")
    (root / "link").symlink_to(away)
    (root / "file").symlink_to(away / "file")
    attempts: list[Callable[[], object]] = [
        lambda: write_bytes(root / "link" / "file", b"x", within=root),
        lambda: write_bytes(root / ".." / "away" / "file", b"x", within=root),
        lambda: write_bytes(away / "file", b"x", within=root),
        lambda: append_to(root / "file", within=root),
        lambda: append_to(root / "link" / "file", within=root),
        lambda: remove(root / "link" / "file", within=root),
        lambda: make_folder(root / "link" / "deep", within=root),
        lambda: make_folder(root / "link", within=root),
        lambda: open_regular(root / "file", os.O_RDWR, within=root),
    ]
    for attempt in attempts:
        with pytest.raises(UnsafePath):
            attempt()
    assert tree(away) == {"file": b"mine"}
    write_bytes(root / "file", b"new", within=root)
    assert not (root / "file").is_symlink() and tree(away) == {"file": b"mine"}, (
        "a link is replaced, not followed"
    )
    (tmp_path / "mine").symlink_to(root)
    write_bytes(tmp_path / "mine" / "other", b"x", within=tmp_path / "mine")
    assert (root / "other").read_bytes() == b"x", "the folder itself is the user's choice"


def test_a_link_made_while_a_run_goes_on_is_not_followed_either(tmp_path: Path) -> None:
    """Folders are opened one in the other, so there is no moment between a look and a write."""
    root = tmp_path / "root"
    make_folder(root.parent / "root" / "images", within=tmp_path)
    (root / "images").rename(tmp_path / "away")
    (root / "images").symlink_to(tmp_path / "away")
    with pytest.raises(UnsafePath, match="images is a symbolic link"):
        write_bytes(root / "images" / "x.png", b"x", within=root)
    assert tree(tmp_path / "away") == {}


# Sweeps


def sweep_of(path: Path, name: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "sweep.json").write_text(json.dumps({"cells": [{"name": name, "recipe": {}}]}))
    return path


@pytest.mark.parametrize(
    "name", ["../victim", "/etc", "a/b", "..", ".", "", "a\\b", "a\nb", "\x1b[2J", "logs", "x" * 300]
)
def test_cells_are_in_their_sweep(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = sweep_of(tmp_path / "sweep", name)
    with pytest.raises(UsageError, match="which is not the name of a folder in the sweep"):
        expand([folder])
    for command, words in (
        ("compare", [str(folder), "-o", str(tmp_path / "x.png")]),
        ("report", [str(folder), "-o", str(tmp_path / "x.html")]),
        ("watch", [str(folder), "--once"]),
        ("sweep", ["smoke", *TINY, "seed=0,1", "-o", str(folder), "--dry-run"]),
    ):
        done = caller(command, capfd)(*words)
        assert done.returncode == 2 and "not the name of a folder" in done.stderr, (command, done)
        assert not OBEYED & set(done.stdout + done.stderr)


def test_ordinary_names_are_fine() -> None:
    assert all(map(is_component, ["step=1,seed=0", "isgd+step=1", "größe", "...", "a b", "-x"]))


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\0b", "a\ud800b", "a\x1b[2J", "x" * 256, 3, None])
def test_a_name_that_no_folder_can_have_is_not_one(name: object) -> None:
    assert not is_component(name)


@pytest.mark.parametrize("name", ["seed=0", "logs", "logs/seed=0.log", "set-aside", "lock"])
def test_a_sweep_writes_through_no_link(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, home = tmp_path / "sweep", tmp_path / "home"
    words = ["smoke", *TINY, "seed=0,1", "-o", str(folder), "-q"]
    assert caller("sweep", capfd)(*words).returncode == 0
    home.mkdir()
    (folder / name).rename(home / "victim") if (folder / name).exists() else (home / "victim").mkdir()
    (folder / name).symlink_to(home / "victim")
    for cell in ("seed=0", "seed=1"):  # to be run again
        (folder / cell / "status.json").write_text('{"status": "failed: before"}')
    before = tree(home)
    done = caller("sweep", capfd)(*words)
    assert done.returncode == 1 and f"{folder / name} is a symbolic link" in done.stderr, done.stderr
    assert tree(home) == before


# Recipes


@pytest.mark.parametrize(
    "path",
    ["/any/file", "../file", "a/../../file", "~/file", "metrics.jsonl", "checkpoints/x", ".", "a\\..\\b"],
)
@pytest.mark.parametrize("logger", ["csv, path", "tensorboard, folder"])
def test_a_logger_of_a_recipe_stays_in_the_run_directory(
    path: str, logger: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, key = logger.split(", ")
    word = f"loggers=[{{name: {name}, {key}: {json.dumps(path)}}}]"
    with pytest.raises(RecipeError, match=rf"loggers\[0\].{key}: .*in the run directory"):
        load_recipe("smoke", [*TINY, word])
    done = caller("run", capfd)("smoke", *TINY, word, "-o", str(tmp_path / "run"))
    assert done.returncode == 3 and not (tmp_path / "run").exists()


def test_a_logger_replaces_no_file_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".profile").write_text("mine")
    recipe = load_recipe("smoke", [*TINY, "loggers=[{name: csv, path: .profile}, csv]"])
    run(recipe)
    assert (tmp_path / ".profile").read_text() == "mine" and "was not written by this logger" in caplog.text
    first = (tmp_path / "figures.csv").read_text()
    run(recipe)
    assert len((tmp_path / "figures.csv").read_text().splitlines()) == len(first.splitlines()), "begun anew"


# Terminals


def test_nothing_that_a_terminal_obeys_is_left() -> None:
    assert printable(EVIL) == "\\x1b[2J\\x1b]0;x\\x07\\u202e\\r\\n\\x9b31m [bold]x[/nothing]"
    assert printable_lines("a\n\tb\x1b") == "a\n\tb\\x1b"
    assert printable("größe → θ 😀 \u200d") == "größe → θ 😀 \u200d"
    text = printable_json(json.dumps({"a": EVIL}, ensure_ascii=False))
    assert json.loads(text) == {"a": EVIL} and not OBEYED & set(text)
    assert printable("\ud800").encode() == b"\\ud800"


def poison(folder: Path) -> None:
    """Evil words wherever a run directory has words that somebody sees."""
    environment = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps(environment | {"recipe": EVIL}))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"status": EVIL, "theta": EVIL}))
    index = json.loads((folder / "images" / "evaluation.json").read_text())
    for one in index:
        one["label"] = EVIL
    (folder / "images" / "evaluation.json").write_text(json.dumps(index))
    with (folder / "log.txt").open("a") as log:
        log.write(f"    1.00 s  {EVIL.replace(chr(10), '')}\n")
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 99, EVIL: 1}) + "\n")


def test_the_name_of_a_recipe_is_logged_in_one_line(foreign: Path, capfd: pytest.CaptureFixture[str]) -> None:
    poison(foreign)
    shutil.copy(foreign / "log.txt", foreign / "before.txt")
    done = caller("resume", capfd)(str(foreign), "budget.steps=4", "-v")
    assert done.returncode == 0, done.stderr
    assert not OBEYED & set(done.stdout + done.stderr)
    new = [line for line in (foreign / "log.txt").read_text().split("\n") if "started" in line]
    assert printable(EVIL) in new[-1]


@pytest.mark.parametrize(
    "words",
    [["watch", "--once"], ["watch", "--once", "--json"], ["compare"], ["report"], ["evaluate"], ["resume"]],
    ids=" ".join,
)
def test_words_of_a_run_directory_are_escaped(
    words: list[str], foreign: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    poison(foreign)
    out = {"compare": ["-o", str(tmp_path / "x.png")], "report": ["-o", str(tmp_path / "x.html")]}
    before = tree(foreign)
    done = caller(words[0], capfd)(str(foreign), *words[1:], *out.get(words[0], []))
    assert not OBEYED & set(done.stdout + done.stderr) and done.returncode == 0, done.stderr
    if words[0] in ("watch", "resume"):
        assert "x1b" in done.stdout + done.stderr or "u001b" in done.stdout, "it is shown"
    if words[0] != "resume":
        assert tree(foreign) == before, "reading writes nothing"


def drawn(monkeypatch: pytest.MonkeyPatch, module: object) -> io.StringIO:
    """What a terminal would get from the consoles that ``module`` makes."""
    screen = io.StringIO()
    monkeypatch.setattr(
        module,
        "Console",
        lambda **options: Console(file=screen, force_terminal=True, color_system=None, width=200),
    )
    return screen


def test_drawn_pictures_are_escaped(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(foreign)
    screen = drawn(monkeypatch, watch_display)
    display = watch_display.WatchDisplay()
    snapshot = Watched(foreign).look()
    display.end([snapshot])
    display.end([snapshot, snapshot])
    assert "[bold]x[/nothing]" in screen.getvalue(), "markup is text"
    assert "\x1b[2J" not in screen.getvalue() and not (OBEYED - {"\x1b", "\r"}) & set(screen.getvalue())
    screen = drawn(monkeypatch, progress)
    bar = progress.Progress()
    bar.task = bar.bar.add_task("preparing", total=1.0, figures="")
    bar.phase(EVIL)
    bar.bar.refresh()
    bar.bar.console.print(bar.bar.make_tasks_table(bar.bar.tasks))
    assert "[bold]x[/nothing]" in screen.getvalue() and "\x1b[2J" not in screen.getvalue()
    screen = drawn(monkeypatch, sweep_display)
    shown = sweep_display.Display(quiet=False)
    shown.say(EVIL)
    assert "[bold]x[/nothing]" in screen.getvalue() and "\x1b[2J" not in screen.getvalue()


def test_tables_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_rows([("name", "value"), (EVIL, "1")])
    common.say(EVIL)
    common.show(EVIL)
    common.print_json({EVIL: EVIL})
    said = capsys.readouterr()
    assert not OBEYED & set(said.out + said.err) and len(said.out.splitlines()) == 6


def test_commands_print_through_what_escapes() -> None:
    """Whoever adds a command finds ``say`` and ``show``, not the functions below them."""
    folder = Path(common.__file__).parent
    for path in folder.glob("*.py"):
        if path.name != "common.py":
            text = path.read_text(encoding="utf-8")
            assert "typer.echo" not in text and "typer.secho" not in text and " print(" not in text, path.name
