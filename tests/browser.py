"""A headless Chromium driven by its own protocol over two pipes: no port, no driver, no library."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


class Browser:
    """One page in a window of ``width`` × ``height`` CSS pixels. A context manager."""

    def __init__(
        self, page: Path, folder: Path, *, width: int, height: int = 900, phone: bool = False
    ) -> None:
        assert CHROMIUM
        self._ids = itertools.count(1)
        self._left = b""
        self.events: list[dict[str, Any]] = []
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on descriptor 4.
        words = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in, self._session = ours_out, ours_in, ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        if phone:
            self.ask("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
        self.open(page)

    def open(self, page: Path, query: str = "") -> None:
        """Load a page. The events of earlier ones remain."""
        self.events = [event for event in self.events if event["method"] != "Page.loadEventFired"]
        self.ask("Page.navigate", url=page.resolve().as_uri() + query)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def show(
        self, width: int, media: str = "screen", scheme: str = "light", *, phone: bool = False
    ) -> None:
        """Set the width of the window in CSS pixels, what the page is shown on, and the colours."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._out)
        os.close(self._in)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            block = os.read(self._in, 1 << 16)
            assert block, "Chromium ended"
            self._left += block
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def js(self, expression: str) -> Any:
        """What the page's script says to an expression, which may be a promise."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """A mouse event of the left button: mousePressed, mouseMoved, mouseReleased."""
        self.ask(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="left",
            buttons=1,
            clickCount=clicks,
        )

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """A touch event: touchStart, touchMove, touchEnd."""
        self.ask(
            "Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y} for x, y in points]
        )
