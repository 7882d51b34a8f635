"""A real browser for the report's tests: headless Chromium over its own debugging protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """Chromium's program, or ``None``."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. What it complains of is in ``errors``, what it fetches in ``requests``.

    Args:
        folder: a new folder for the browser's profile.
    """

    def __init__(self, folder: Path) -> None:
        program = find_chromium()
        assert program is not None
        self.folder = folder
        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        try:
            self._socket = self._connect()
        except BaseException:
            self.process.kill()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _connect(self, seconds: float = 60.0) -> ClientConnection:
        end = time.monotonic() + seconds
        port_file = self.folder / "DevToolsActivePort"
        while time.monotonic() < end:
            if port_file.exists() and port_file.read_text().strip():
                port = port_file.read_text().splitlines()[0]
                pages = [item for item in httpx.get(f"http://127.0.0.1:{port}/json").json() if item["type"] == "page"]
                if pages:
                    return connect(pages[0]["webSocketDebuggerUrl"], max_size=None)
            time.sleep(0.1)
        raise TimeoutError("Chromium did not start")

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        self.process.terminate()
        self.process.wait(20)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol and its result; events on the way are taken note of."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        name, content = message.get("method"), message.get("params", {})
        if name == "Runtime.exceptionThrown":
            details = content["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif name == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.errors.append(content["entry"]["text"])
        elif name == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
            self.errors.append(str(content["args"]))
        elif name == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])

    def size(self, width: int, height: int = 900, *, mobile: bool = False) -> None:
        """The window's size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def show(self, scheme: str, media: str = "") -> None:
        """Show the page to a person who prefers ``light`` or ``dark``, on a screen or (``media``) in ``print``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def open(self, path: Path, seconds: float = 60.0) -> None:
        """Open a file and wait until it is loaded."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.evaluate("location.protocol + document.readyState") == "file:complete":
                return
            time.sleep(0.05)
        raise TimeoutError(f"the page was not loaded; errors: {self.errors}")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"]["exception"].get("description", result))
        return result["result"].get("value")
