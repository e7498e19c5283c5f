"""Pointwise work in one pass over memory by torch.compile, for components with ``compile: true``.

A chain of elementwise operations and sums reads and writes each large tensor again and again; compiled, it touches
each once. Compiling takes a while at first (about 20 s; 2 s once torch has cached the result on disk) and needs a C++
compiler on the CPU; if it fails, a warning is logged and the function runs uncompiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)


class Fused(Generic[P, R]):
    """A function of tensors without side effects, compiled at its first call."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._plain = function
        self._compiled: Callable[P, R] | None = None
        self._failed = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._failed:
            try:
                if self._compiled is None:
                    self._compiled = torch.compile(self._plain, dynamic=True)
                return self._compiled(*args, **kwargs)
            except Exception as error:
                self._failed = True
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                log.warning("torch.compile failed; continuing without it: %s", reason)
        return self._plain(*args, **kwargs)
