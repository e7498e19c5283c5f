"""Errors as one sentence for the user, each with its exit code."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field


class BltError(Exception):
    """The run failed (exit code 1)."""

    exit_code = 1
    #: Whether another rank reports it.
    told = False


class NumericalError(BltError):
    """The mathematics failed: a NaN, a divergence, a system that is not definite (exit code 1)."""


class BudgetExhausted(BltError):
    """The budget ran out between two oracle calls; the run ends normally with the last accepted θ."""


class UsageError(BltError):
    """The command line is wrong or would overwrite something (exit code 2)."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One problem of a recipe, with its position."""

    message: str
    file: str = "<recipe>"
    line: int = 1
    column: int = 1
    #: The line of text, for showing where the problem is.
    source: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


class RecipeError(BltError):
    """A recipe is invalid (exit code 3); contains every problem, not only the first."""

    exit_code = 3

    def __init__(self, problems: list[Problem], message: str | None = None) -> None:
        super().__init__("\n".join(map(str, problems)) if message is None else message)
        self.problems = problems


class MissingError(BltError):
    """A component, dependency or device is missing (exit code 4)."""

    exit_code = 4


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means out of memory; Python, NumPy, CUDA and the CPU report it differently."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # By name, since torch is not imported here.
    named = any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__)
    cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or named or cpu


def explain(error: BaseException) -> str:
    """One sentence about any exception."""
    if isinstance(error, BltError):
        return str(error)
    detail = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return (
            "out of memory; lower `chunk` in the recipe (the samples computed at once), use fewer workers or smaller"
            f" images{f' ({detail})' if detail else ''}"
        )
    return f"{type(error).__name__}{': ' if detail else ''}{detail}"


@contextlib.contextmanager
def refusing_misfits(where: str) -> Iterator[None]:
    """Turn errors caused by state of another recipe or version into one sentence."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error) if type(error) is ValueError else explain(error)
        raise BltError(
            f"{where} does not fit this recipe or this version of its components ({reason}); start a new run"
        ) from error
