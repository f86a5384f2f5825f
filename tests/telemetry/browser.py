"""A Chromium without a window, driven through its own debugging pipe (the Chrome DevTools Protocol)."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
_SECONDS = 120.0  # for the browser's start, and for each answer, on a busy machine
# Chromium reads commands from file descriptor 3 and writes to 4.
_LAUNCH = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]);"
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One page in a new profile.

    Args:
        folder: For the profile.

    Attributes:
        errors: What the page's console has reported as an error so far, and exceptions of its script.
    """

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-first-run", "about:blank"]
        theirs, self._write = os.pipe()
        self._read, other = os.pipe()
        command = [sys.executable, "-c", _LAUNCH, str(theirs), str(other), BROWSER, *options]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(theirs, other), stdin=quiet, stdout=quiet, stderr=quiet)
        os.close(theirs)
        os.close(other)
        self.errors: list[str] = []
        self._number, self._session = 0, ""
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read_messages, daemon=True)
        self._reader.start()
        (target, *_) = [one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        self._session = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, url: str, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Opens a page on a screen of that width, below 600 px on a phone; or as if it was printed, with `media` "print"."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._ask("Page.navigate", url=url)

    def look(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits until an expression is true in the page."""
        deadline = time.monotonic() + _SECONDS
        pause = threading.Event()
        while not (value := self.look(script)):
            assert time.monotonic() < deadline, f"waited in vain for {script}; the page shows:\n{self.text()}\n{self.errors}"
            pause.wait(0.05)
        return value

    def text(self) -> str:
        """What a person reads on the page."""
        return str(self.look("document.body ? document.body.innerText : ''")).replace("\u00a0", " ")

    def close(self) -> None:
        os.close(self._write)  # ends the browser
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(20)
        os.close(self._read)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._messages.get(timeout=_SECONDS)).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _read_messages(self) -> None:
        rest = b""
        while part := os.read(self._read, 1 << 16):
            *whole, rest = (rest + part).split(b"\0")
            for message in map(json.loads, whole):
                self._note_errors(message)
                self._messages.put(message)

    def _note_errors(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
