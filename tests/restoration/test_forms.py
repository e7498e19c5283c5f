"""Forms are chosen once, with a clear lead, and a resumed run uses those of its beginning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from processes import on_ranks

from bltoolbox import resume, run
from bltoolbox.distributed.ranks import Ranks
from bltoolbox.errors import UsageError
from bltoolbox.restoration import forms
from bltoolbox.restoration.forms import FORMS, fastest, measured
from bltoolbox.restoration.theta_file import read_theta

QUESTION = "multiply 2 numbers, 1 thread"


@pytest.fixture(autouse=True)
def _own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("BLT_FORMS", raising=False)
    monkeypatch.setenv("BLT_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    with FORMS.restored():
        FORMS.adopt({}, closed=False)
        yield


def busy(milliseconds: float, calls: list[str], name: str) -> Callable[[], None]:
    def compute() -> None:
        calls.append(name)
        end = time.thread_time() + milliseconds / 1e3
        while time.thread_time() < end:
            pass

    return compute


def candidates(calls: list[str], **milliseconds: float) -> dict[str, Callable[[], None]]:
    return {name: busy(value, calls, name) for name, value in milliseconds.items()}


def choose(calls: list[str], **milliseconds: float) -> str:
    return FORMS.choose("multiply 2 numbers", candidates(calls, **milliseconds))


def forget() -> None:
    """As in another process."""
    FORMS.adopt({}, closed=False)


def test_the_fastest_is_chosen_once_and_kept_on_disk() -> None:
    calls: list[str] = []
    assert choose(calls, plain=2, quick=0.5, slow=3) == "quick"
    assert calls[:6] == ["plain", "quick", "slow"] * 2  # in turns
    assert FORMS.answers == {QUESTION: "quick"}
    calls.clear()
    assert choose(calls, plain=0, quick=5, slow=5) == "quick"
    forget()
    assert choose(calls, plain=0, quick=5, slow=5) == "quick"
    assert not calls
    # Other candidates are another question.
    forget()
    assert choose(calls, plain=0, quick=2) == "plain"


def test_the_default_loses_only_by_a_clear_lead() -> None:
    assert fastest({"plain": 1.0, "other": 0.95}) == "plain"
    assert fastest({"plain": 1.0, "other": 0.95, "third": 0.9}) == "third"
    assert fastest({"plain": 1.0, "other": 1.0}) == "plain"


def test_the_least_of_several_turns_counts() -> None:
    waits = iter([0.0, 5.0, 0.0, 5.0, 5.0])

    def sometimes_slow() -> None:
        busy(next(waits), [], "")()

    assert measured({"one": sometimes_slow}, turns=4)["one"] < 4e-3


def test_a_damaged_or_unwritable_cache_is_measured_again(tmp_path: Path) -> None:
    calls: list[str] = []
    choose(calls, plain=0, other=1)
    (entry,) = (tmp_path / "cache" / "forms").iterdir()
    assert json.loads(entry.read_text())["form"] == "plain"
    for damage in ("", "[1]", '{"form": "unknown"}', '{"form": [1]}'):
        entry.write_text(damage)
        forget()
        calls.clear()
        assert choose(calls, plain=0, other=1) == "plain"
        assert calls


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setenv("BLT_FORMS", "default")
    assert choose(calls, plain=1, quick=0) == "plain"
    forget()
    monkeypatch.setenv("BLT_FORMS", f"{QUESTION} = quick; default")
    assert choose(calls, plain=0, quick=1) == "quick"
    assert not calls
    forget()
    monkeypatch.setenv("BLT_FORMS", f"{QUESTION}=fastest")
    with pytest.raises(UsageError, match=r"no form 'fastest'; choose from plain, quick"):
        choose(calls, plain=0, quick=1)
    monkeypatch.setenv("BLT_FORMS", "plain")
    with pytest.raises(UsageError, match="neither `default` nor"):
        choose(calls, plain=0, quick=1)


def test_no_measurement_where_ranks_must_agree() -> None:
    calls: list[str] = []
    FORMS.adopt({}, closed=True)
    assert choose(calls, plain=1, quick=0) == "plain"
    assert not calls


def test_a_form_of_another_version_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    FORMS.adopt({QUESTION: "forgotten"}, closed=False)
    assert choose([], plain=0, quick=2) == "plain"
    assert "'forgotten' is not known any more" in caplog.text


def recipe(steps: int) -> dict[str, object]:
    return {
        "data": {"name": "dead-leaves", "count": 6, "size": 24},
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "lower_solver": "mm",
        "sampler": {"size": 3},
        "upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1},
        "validation": {"count": 2},
        "checkpoint": {"every": 0.0, "keep_finished": True},
        "budget": {"steps": steps},
    }


def forms_of(path: Path) -> dict[str, str]:
    recorded: dict[str, str] = json.loads((path / "env.json").read_text())["forms"]
    return recorded


def prefer(monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    """The last or the first candidate of every question is the fastest."""

    def times(candidates: forms.Candidates, turns: int = 0) -> dict[str, float]:
        best = list(candidates)[-1 if last else 0]
        return {name: 1.0 if name == best else 2.0 for name in candidates}

    monkeypatch.setattr(forms, "measured", times)


def test_a_resumed_run_uses_the_forms_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, last=True)
    run(recipe(4), out=tmp_path / "whole")
    used = forms_of(tmp_path / "whole")
    assert used == {
        "correlate 3 to 3 channels 3x3, 1 thread": "1x4",
        "transpose 3 to 3 channels 3x3, 1 thread": "4x2",
    }
    run(recipe(2), out=tmp_path / "run")
    # Another process on another machine, whose own choice would differ.
    forget()
    prefer(monkeypatch, last=False)
    monkeypatch.setenv("BLT_CACHE", str(tmp_path / "other"))
    resume(tmp_path / "run", ["budget.steps=4"])
    assert forms_of(tmp_path / "run") == used
    assert FORMS.answers == {}  # what was adopted was that of the run
    same, theirs = (read_theta(tmp_path / name / "theta.safetensors")[0] for name in ("whole", "run"))
    assert all(torch.equal(same[name], theirs[name]) for name in same)
    run(recipe(4), out=tmp_path / "there")
    assert set(forms_of(tmp_path / "there").values()) == {"1x1", "2x2"}


def test_a_run_without_a_record_used_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLT_FORMS", "default")
    run(recipe(2), out=tmp_path / "run")
    path = tmp_path / "run" / "env.json"
    environment = json.loads(path.read_text())
    del environment["forms"]
    path.write_text(json.dumps(environment))
    forget()
    monkeypatch.delenv("BLT_FORMS")
    prefer(monkeypatch, last=True)
    resume(tmp_path / "run", ["budget.steps=3"])
    assert set(forms_of(tmp_path / "run").values()) == {"1x1", "2x2"}


def test_the_variable_does_not_change_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefer(monkeypatch, last=True)
    run(recipe(1), out=tmp_path / "run")
    forget()
    monkeypatch.setenv("BLT_FORMS", "correlate 3 to 3 channels 3x3, 1 thread = 1x2")
    resume(tmp_path / "run", ["budget.steps=2"])
    assert forms_of(tmp_path / "run")["correlate 3 to 3 channels 3x3, 1 thread"] == "1x4"
    assert "the resumed run uses the form it was started with for correlate 3 to 3" in caplog.text


def test_ranks_use_the_forms_of_the_first(tmp_path: Path) -> None:
    """Also where every other rank would choose differently, on a machine and with a cache of its own."""

    def work(ranks: Ranks) -> list[object]:
        asked: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BLT_CACHE", str(tmp_path / f"cache {ranks.rank}"))
            prefer(patch, last=ranks.first)
            mine = forms.measured
            patch.setattr(forms, "measured", lambda candidates: (asked.append("once"), mine(candidates))[1])
            run(recipe(2), out=tmp_path / "run", ranks=ranks)
        return [dict(FORMS.answers), len(asked), _choice(last=not ranks.first)]

    first, second = on_ranks(tmp_path, 2, work)
    expected = {
        "correlate 3 to 3 channels 3x3, 1 thread": "1x4",
        "transpose 3 to 3 channels 3x3, 1 thread": "4x2",
    }
    assert first[0] == second[0] == expected == forms_of(tmp_path / "run")
    assert (first[1], second[1]) == (2, 0), "only the first rank measures"
    assert first[2] == second[2] == "plain", "what comes up later has its default everywhere"


def _choice(last: bool) -> str:
    """The answer to a question that nobody has asked so far, where the last or the first candidate is faster."""
    times = {"plain": 2.0, "quick": 0.0} if last else {"plain": 0.0, "quick": 2.0}
    return FORMS.choose("add 2 numbers", candidates([], **times))
