"""The run directory: what was asked, what happened, what came out. Files are replaced atomically, logs are appended."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import bltoolbox
from bltoolbox.errors import BltError, UsageError
from bltoolbox.experiment import Experiment, Listener, RunResult
from bltoolbox.files import write_bytes, write_json, write_text
from bltoolbox.interfaces import Theta
from bltoolbox.model import THETA_FILE, encode


def fresh_directory(root: Path, name: str) -> Path:
    """``root/name/<time>``, not yet existing."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    path = root / name / stamp
    for count in range(2, 1000):
        if not path.exists():
            return path
        path = root / name / f"{stamp}_{count}"
    raise UsageError(f"{root / name} holds too many runs of this second")


class RunDirectory(Listener):
    """Writes a run to disk as it happens."""

    def __init__(self, path: Path | str, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        if self.path.is_file():
            raise UsageError(f"{self.path} is a file; choose another run directory")
        if self.path.is_dir() and any(self.path.iterdir()) and not overwrite:
            raise UsageError(f"{self.path} is not empty; choose another run directory or add --overwrite")

    def started(self, experiment: Experiment) -> None:
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (self.path / "images").mkdir(exist_ok=True)
        except OSError as error:
            raise BltError(f"cannot write to {self.path}: {error.strerror}") from error
        self.experiment = experiment
        recipe = experiment.recipe
        write_text(self.path / "recipe.yaml", recipe.text or recipe.to_yaml())
        write_text(self.path / "resolved.yaml", recipe.to_yaml())
        write_json(self.path / "env.json", environment(experiment))
        write_json(self.path / "status.json", {"status": "running", "bltoolbox": bltoolbox.__version__})
        for name in ("metrics.jsonl", "timings.jsonl"):
            write_text(self.path / name, "")
        self.metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        self.timings = (self.path / "timings.jsonl").open("a", encoding="utf-8")
        self.began = time.perf_counter()
        self.log_lines: list[str] = []
        self.log(
            f"started: {recipe.name}, {experiment.train.device}, {len(experiment.train)} training images"
        )

    def log(self, sentence: str) -> None:
        self.log_lines.append(f"{time.perf_counter() - self.began:9.2f} s  {sentence}")
        write_text(self.path / "log.txt", "\n".join(self.log_lines) + "\n")

    def phase(self, sentence: str) -> None:
        self.log(sentence)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.metrics.write(json.dumps(record) + "\n")
        self.metrics.flush()
        self.timings.write(json.dumps({"step": record["step"], "seconds": round(seconds, 6)}) + "\n")
        self.timings.flush()

    def checked(self, step: int, psnr: float, theta: Theta, best: bool) -> None:
        self.log(f"step {step}: validation PSNR {psnr:.3f} dB" + (" (best so far)" if best else ""))
        self._save_theta("last", theta)
        if best:
            self._save_theta("best", theta)

    def finished(self, result: RunResult) -> None:
        from bltoolbox.figures import draw

        self.close()
        self._save_theta("last", result.last)
        write_bytes(self.path / THETA_FILE, encode(result.theta, self.experiment.recipe))
        draw(result, self.path / "images")
        summary = result.as_dict() | {"run_dir": str(self.path), "bltoolbox": bltoolbox.__version__}
        write_json(self.path / "status.json", summary)
        self.log(f"finished: {result.status}")

    def aborted(self, theta: Theta, reason: str) -> None:
        self.close()
        self._save_theta("last", theta)
        write_json(self.path / "status.json", {"status": reason, "bltoolbox": bltoolbox.__version__})
        self.log(reason)

    def close(self) -> None:
        self.metrics.close()
        self.timings.close()

    def _save_theta(self, name: str, theta: Theta) -> None:
        path = self.path / "checkpoints" / f"{name}.safetensors"
        write_bytes(path, encode(theta, self.experiment.recipe))


def environment(experiment: Experiment) -> dict[str, Any]:
    """What a run needs to be explained later."""
    device = experiment.train.device
    return {
        "bltoolbox": bltoolbox.__version__,
        "git": _git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "command": sys.argv,
    }


def _git_state() -> str | None:
    """Commit of the checkout this package runs from, if it is one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
