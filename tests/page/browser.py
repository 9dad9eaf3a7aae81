"""A Chromium without a screen, controlled through its debugging pipe, without dependencies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
"""Searched on the path if ``RECOLLECT_BROWSER`` names none."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-zygote"),
    *("--hide-scrollbars", "--remote-debugging-pipe", "about:blank"),
)
LIMIT = 60  # seconds until an answer


class Browser:
    """One page of a browser, by the DevTools protocol: commands out on one pipe, answers in."""

    def __init__(self, program: str, profile: Path) -> None:
        high = 10  # above 3 and 4, which the browser reads and writes
        (theirs_in, ours_out), (ours_in, theirs_out) = (
            tuple(fcntl.fcntl(x, fcntl.F_DUPFD_CLOEXEC, high) for x in os.pipe()) for _ in range(2)
        )

        def placed() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=placed,
            pass_fds=(3, 4),
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(ours_in, False)
        self._out, self._in = ours_out, ours_in
        self._text, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        result = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = result["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to one command."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session is not None:
            command["sessionId"] = self.session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        answer = self._await(lambda one: one.get("id") == command["id"])
        assert "error" not in answer, answer
        return answer["result"]

    def wait_for(self, event: str) -> None:
        """Wait until the page reports a new event of this name."""
        if not any(one.get("method") == event for one in self.events):
            self._await(lambda one: one.get("method") == event)

    def _await(self, expected: Any) -> dict[str, Any]:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            while b"\0" in self._text:
                one, self._text = self._text.split(b"\0", 1)
                message = json.loads(one)
                if "id" not in message:
                    self.events.append(message)
                if expected(message):
                    return message
            try:
                self._text += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        raise AssertionError(f"the browser did not answer within {LIMIT} s")

    def open(self, path: Path, *, width: int, dark: bool = False, link: str = "") -> None:
        """Open a file, in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        # By way of an empty page: if only the link differs, the browser loads nothing.
        for address in ("about:blank", path.as_uri() + link):
            self.events.clear()
            self.call("Page.navigate", url=address)
            self.wait_for("Page.loadEventFired")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requested_addresses(self) -> list[str]:
        """Return addresses that the page has requested since it was opened."""
        events = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in events]

    def close(self) -> None:
        """End the browser and its processes."""
        os.close(self._out)
        os.close(self._in)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


def opened(profile: Path) -> Iterator[Browser]:
    """Open a browser for a fixture; the test is skipped if there is none."""
    named = os.environ.get("RECOLLECT_BROWSER")
    program = named or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is on the path, nor named by RECOLLECT_BROWSER, to open the page")
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
