"""A real browser without a window, for tests of pages: Chromium, spoken to over a pipe in its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Where a Chromium is installed, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of a browser. What it said on its console and what it asked the network for is kept."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self.process = process
        self.commands, self.answers = commands, answers
        self.numbers = itertools.count(1)
        self.buffer = b""
        self.session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, width: int = 1280, height: int = 900, *, mobile: bool = False) -> None:
        """Load a page from a file and wait until its scripts have run."""
        self.complaints.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'true'")
        self.wait_for_frames()

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 20) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"{script} did not become true; the page said {self.complaints}"
            time.sleep(0.05)

    def wait_for_frames(self) -> None:
        """Two frames, so that what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """A point of an element, scrolled into sight, as a share of its size."""
        self.run(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })()"
        )
        return box[0] + x * box[2], box[1] + y * box[3]

    def mouse(self, kind: str, at: tuple[float, float], **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", start)
        self.mouse("mousePressed", start, button="left", buttons=1, clickCount=1)
        for k in range(1, 5):
            at = tuple(a + (b - a) * k / 4 for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", (at[0], at[1]), button="left", buttons=1)
        self.mouse("mouseReleased", end, button="left", clickCount=1)
        self.wait_for_frames()

    def click(self, selector: str) -> None:
        at = self.place(selector)
        self.mouse("mousePressed", at, button="left", buttons=1, clickCount=1)
        self.mouse("mouseReleased", at, button="left", clickCount=1)
        self.wait_for_frames()

    def press(self, key: str, **more: Any) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.wait_for_frames()

    def prefer(self, **features: str) -> None:
        """Media features, e.g. ``prefer(color_scheme="dark")``."""
        chosen = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()
        ]
        self.call("Emulation.setEmulatedMedia", features=chosen)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A screenshot as PNG, of what is in sight or of the whole page."""
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            more = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        taken = self.call("Page.captureScreenshot", format="png", **more)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], 60)
            assert ready, "the browser does not answer"
            part = os.read(self.answers, 1 << 20)
            assert part, f"the browser has gone away, exit code {self.process.poll()}"
            self.buffer += part
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(said["args"])[:500])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = said["request"]["url"]
            if not url.startswith(("data:", "file:", "about:")):
                self.requests.append(url)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own in ``folder``, gone at the end."""
    found = find_browser()
    assert found is not None
    take_commands, give_commands = os.pipe()
    take_answers, give_answers = os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4.
    script = f'exec "$@" 3<&{take_commands} 4>&{give_answers}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", script, "bash", found, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(take_commands, give_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(take_commands)
    os.close(give_answers)
    try:
        yield Page(process, give_commands, take_answers)
    finally:
        os.close(give_commands)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(take_answers)
