"""Ends of sentences: suggestions, and the reasons given by other programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'agd'?"``, or nothing if no choice is close."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def reason_of(error: BaseException) -> str:
    """An exception of other code as the end of a sentence."""
    text = " ".join(str(error).split())
    shortened = text if len(text) <= 300 else text[:299] + "…"
    return f"{type(error).__name__}: {shortened}" if text else type(error).__name__
