"""Firefox as it is installed, driven by WebDriver BiDi: no driver is needed, nothing is fetched."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.waiting import wait_until

__all__ = ["Firefox"]

ANSWER_S = 120.0
"""How long one command may take."""
_LISTENS = "WebDriver BiDi listening on "
_EVENTS = ["log.entryAdded", "network.beforeRequestSent"]
_AT_HOME = {
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.normandy.enabled": False,
    "app.update.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
}
"""Settings with which the browser asks no host for anything by itself."""


class Firefox:
    """A headless Firefox with one tab. Commands wait for their answer, at most `ANSWER_S`."""

    def __init__(self, program: str, folder: Path) -> None:
        profile = folder / "profile"
        profile.mkdir(parents=True)
        lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in _AT_HOME.items()]
        (profile / "user.js").write_text("\n".join(lines))
        self.log = folder / "log"
        self.said: list[str] = []
        """Errors, warnings and uncaught exceptions that pages wrote, since the last `open`."""
        self.asked: list[str] = []
        """URLs that were asked for since the last `open`."""
        self._count = 0
        options = ["--headless", "--no-remote", "--remote-debugging-port=0"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, *options, "--profile", str(profile)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._socket = connect(f"{self._address()}/session", max_size=None)
            self._socket.__enter__()
            self._command("session.new", capabilities={})
            self._command("session.subscribe", events=_EVENTS)
            (tab,) = self._command("browsingContext.getTree")["contexts"]
            self._tab = tab["context"]
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _address(self) -> str:
        def told() -> list[str]:
            lines = self.log.read_text(errors="replace").splitlines(keepends=True)
            return [each.strip() for each in lines if each.startswith(_LISTENS) and "\n" in each]

        if not wait_until(lambda: told() or self._process.poll() is not None, ANSWER_S):
            raise TimeoutError(f"Firefox did not listen: {self.log.read_text()[-2000:]}")
        if not told():
            raise RuntimeError(f"Firefox ended: {self.log.read_text()[-2000:]}")
        return told()[0].removeprefix(_LISTENS)

    def _command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        asked = {"id": self._count, "method": method, "params": parameters}
        self._socket.send(json.dumps(asked))
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                told = json.loads(self._socket.recv(timeout=max(deadline - time.monotonic(), 0.0)))
            except TimeoutError:
                raise TimeoutError(f"no answer to {method} {parameters} in {ANSWER_S} s") from None
            if told["type"] == "event":
                self._note(told["method"], told["params"])
            elif told.get("id") == self._count:
                if told["type"] == "error":
                    raise RuntimeError(f"{method}: {told['error']}: {told['message']}")
                return dict(told["result"])

    def _note(self, event: str, what: dict[str, Any]) -> None:
        if event == "network.beforeRequestSent":
            self.asked.append(what["request"]["url"])
        elif event == "log.entryAdded" and what["level"] in {"warn", "error"}:
            self.said.append(f"{what['level']}: {what['text']}")

    def open(self, url: str, *, width: int = 1280, height: int = 800) -> None:
        """Open a page and wait until it is loaded; sizes in CSS pixels."""
        self._command(
            "browsingContext.setViewport",
            context=self._tab,
            viewport={"width": width, "height": height},
        )
        # the page before may still say something: a blank one says nothing
        self._navigate("about:blank")
        self.said.clear()
        self.asked.clear()
        self._navigate(url)

    def _navigate(self, url: str) -> None:
        self._command("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """Return what a script's expression, or the promise it gives, is worth: JSON data.

        Raises:
            RuntimeError: it threw; says what.
        """
        told = self._command(
            "script.evaluate",
            expression=f"Promise.resolve({expression}).then(it => JSON.stringify(it) ?? 'null')",
            target={"context": self._tab},
            awaitPromise=True,
        )
        if told["type"] == "exception":
            raise RuntimeError(told["exceptionDetails"]["text"])
        return json.loads(told["result"]["value"])

    def press(self, *keys: str) -> None:
        """Press and release keys one after the other: characters as WebDriver names them."""
        actions = [{"type": how, "value": key} for key in keys for how in ("keyDown", "keyUp")]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._command("input.performActions", context=self._tab, actions=[source])

    def screenshot(self, path: Path) -> Path:
        """Write what the tab shows as a PNG file."""
        shown = self._command("browsingContext.captureScreenshot", context=self._tab)
        path.write_bytes(base64.b64decode(shown["data"]))
        return path

    def close(self) -> None:
        """End the browser."""
        try:
            self._command("browser.close")
            self._process.wait(ANSWER_S)
        finally:
            self._socket.close()
            self._process.kill()
            self._process.wait()
