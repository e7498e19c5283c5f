"""Several tiles at once: the same pictures in the same order, whatever the number of threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from toy_models import as_bytes, noisy_picture, toy_model

from bltoolbox.restoration.tile_threads import Report, in_order, tiles_at_once
from bltoolbox.restoration.tiles import Restorer


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order(two_threads: None) -> None:
    """Tile 0 ends after tile 1 has, which only threads that work at once can do."""
    second = threading.Event()
    shares: set[int] = set()

    def work(number: int, report: Report) -> int:
        shares.add(torch.get_num_threads())
        if number == 0:
            assert second.wait(30)
        elif number == 1:
            second.set()
        return number

    assert list(in_order(work, 7, lambda number, part: None)) == list(range(7))
    assert shares == {1} and torch.get_num_threads() == 2


def test_tiles_that_nobody_waits_for_are_abandoned(two_threads: None) -> None:
    began: list[int] = []

    def work(number: int, report: Report) -> int:
        began.append(number)
        while number:  # the first tile ends, the others only by their reports
            report(0.5)
        return number

    with contextlib.closing(in_order(work, 50, lambda number, part: None)) as results:
        assert next(results) == 0
    assert len(began) <= 4 and torch.get_num_threads() == 2


def test_an_error_in_a_tile_is_that_of_the_picture(two_threads: None) -> None:
    def work(number: int, report: Report) -> int:
        if number == 3:
            raise ValueError("tile 3")
        return number

    with pytest.raises(ValueError, match="tile 3"):
        list(in_order(work, 9, lambda number, part: None))


def test_threads_do_not_change_a_picture(two_threads: None) -> None:
    model, picture = toy_model(), as_bytes(noisy_picture(110, 130))
    parts: list[float] = []
    several, report = Restorer(model, tile=80).run(picture, progress=lambda part, phase: parts.append(part))
    torch.set_num_threads(1)
    single, alone = Restorer(model, tile=80).run(picture)
    np.testing.assert_array_equal(several, single)
    assert report.tiles == alone.tiles > 3 and report.iterations == alone.iterations
    assert parts == sorted(parts) and parts[-1] == 1


def test_a_gpu_works_on_one_tile() -> None:
    assert tiles_at_once(9, torch.device("cuda")) == 1
