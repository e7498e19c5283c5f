"""How exactly a device computes during a solve, whatever the process has set; restored afterwards.

*Precision.* Torch lets CUDA round the factors of convolutions to 10 bits (TF32) unless told otherwise, and, if asked
to, CPUs to 7 (bfloat16). A solver cannot reach a tolerance below about 1e-2 that way. So every solve computes in full
float32, except in a run with ``tf32: true``.

*Determinism.* A resumed run repeats what the interrupted one would have computed, to the last bit, only if kernels add
in a fixed order. CUDA has kernels that do not. cuDNN is told to use deterministic algorithms in every solve, and not to
choose them by racing. A run also makes torch refuse all other kernels without a fixed order: a component that uses one
ends with an error that names it. ``BLT_DETERMINISTIC=0`` allows them; then a resumed run agrees up to rounding, and
``env.json`` and a warning on resume report it.

Torch has older and newer switches for the same thing, and raises if they contradict each other. The older ones set
both, so they come first here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bltoolbox.errors import BltError

#: Set to 0, kernels without a fixed order of summation are allowed in runs.
VARIABLE = "BLT_DETERMINISTIC"
#: cuBLAS needs a workspace of fixed size to be deterministic.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_active = False


def deterministic() -> bool:
    """Whether runs refuse kernels that are not."""
    return os.environ.get(VARIABLE, "1") != "0"


@contextmanager
def computing(device: torch.device, tf32: bool | None = None, run: bool = False) -> Iterator[None]:
    """Full precision, or TF32 on CUDA, and deterministic convolutions; in a ``run`` everything is deterministic.

    Inside of another one, this changes nothing unless it says which precision: a solve in a run is as the run is.
    """
    global _active
    if _active and tf32 is None:
        yield
        return
    outer, restore = _active, _saved()
    _active = True
    try:
        _set(bool(tf32))
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        if run and device.type == "cuda" and deterministic():
            os.environ.setdefault(*_WORKSPACE)
            torch.use_deterministic_algorithms(True)
            # Filling what is about to be written costs a pass over memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    except RuntimeError as error:
        if run and "deterministic implementation" in str(error):
            raise BltError(
                f"{str(error).split(',')[0]}, so a resumed run could not repeat it exactly; use another component,"
                f" the CPU, or {VARIABLE}=0, which allows results that differ in rounding"
            ) from error
        raise
    finally:
        _active = outer
        restore()


def _set(tf32: bool) -> None:
    for owner in _general():
        if owner.fp32_precision != "none":
            owner.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    for owner in _on_cpu():
        owner.fp32_precision = "ieee"


def _general() -> list[Any]:
    """The newer switches that others inherit from."""
    return [owner for owner in (torch.backends, torch.backends.cudnn) if _has_newer(owner)]


def _on_cpu() -> list[Any]:
    """The newer switches of CPUs."""
    backend = torch.backends.mkldnn
    owners = [getattr(backend, name, None) for name in ("matmul", "conv")]
    return [owner for owner in owners if _has_newer(owner)]


def _saved() -> Callable[[], None]:
    """A function that restores all switches."""
    backends = torch.backends
    newer = [getattr(backends.cudnn, name, None) for name in ("conv", "rnn")] + [backends.cuda.matmul]
    owners = _general() + [owner for owner in newer if _has_newer(owner)] + _on_cpu()
    values = [owner.fp32_precision for owner in owners]
    convolutions = _readable(lambda: backends.cudnn.allow_tf32)
    products = _readable(torch.get_float32_matmul_precision)
    cudnn = backends.cudnn.deterministic, backends.cudnn.benchmark
    algorithms = _algorithms()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def restore() -> None:
        if convolutions is not None:
            backends.cudnn.allow_tf32 = convolutions
        if products is not None:
            torch.set_float32_matmul_precision(products)
        for owner, value in zip(owners, values, strict=True):
            if owner.fp32_precision != value:
                owner.fp32_precision = value
        backends.cudnn.deterministic, backends.cudnn.benchmark = cudnn
        # Only where it was changed: this call imports torch's compiler, which takes a second.
        if _algorithms() != algorithms:
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]

    return restore


def _algorithms() -> tuple[bool, bool]:
    """Whether kernels without a fixed order are refused, and whether with a warning only."""
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only


def _has_newer(owner: Any) -> bool:
    try:
        return owner is not None and isinstance(owner.fp32_precision, str)
    except (AttributeError, AssertionError):  # before torch 2.9
        return False


def _readable(read: Callable[[], Any]) -> Any:
    """The value of an older switch; None where newer ones contradict it."""
    try:
        return read()
    except RuntimeError:
        return None
