"""A headless browser that a test drives: Chromium's DevTools protocol over a pair of pipes."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from installed import need

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_DEADLINE_S = 60.0


class Page:
    """One open page. `problems` collects script errors, console errors and refused content."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._sent = 0
        self._session: str | None = None
        self._loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(self, path: Path) -> None:
        self._loaded = False
        self._send("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._hear(self._receive())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def emulate(self, *, scheme: str = "light", media: str = "screen", width: int = 1280) -> None:
        """A reader's colour scheme ("dark"), medium ("print") and width in CSS pixels."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._send("Emulation.setEmulatedMedia", media=media, features=[feature])
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._sent:
            self._hear(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], deadline_s - time.monotonic())
            assert ready, "the browser does not answer"
            received = os.read(self._from, 1 << 16)
            assert received, "the browser is gone"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] != "verbose":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with one page.

    Args:
        profile: an empty directory for what the browser keeps.
    """
    need(_NAMES[0], *_NAMES)
    program = next(found for name in _NAMES if (found := shutil.which(name)))
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4.
    process = subprocess.Popen(
        ["bash", "-c", f'exec 3<&{their_in} 4>&{their_out}; exec "$@"', "browser", program,
         "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={profile}", "--remote-debugging-pipe"],
        pass_fds=(their_in, their_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(their_in)
    os.close(their_out)
    try:
        yield Page(our_out, our_in)
    finally:
        process.terminate()
        process.wait(timeout=_DEADLINE_S)
        os.close(our_out)
        os.close(our_in)
