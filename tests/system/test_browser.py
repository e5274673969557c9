"""A report in a real browser: Debian's Chromium, remote-controlled over two pipes."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import ROOT, published

from quarl_tf import pipeline

#: For screenshots.
SHOTS = ROOT / "build/browser"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
    "--remote-debugging-pipe",
]
ERRORS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
#: Waits for a condition; returns what the page shows then.
UNTIL = """new Promise((resolve) => {
  const texts = (name) => [...document.querySelectorAll(name)].map((node) => node.textContent);
  const look = () => (%s ? resolve([...texts(".return"), ...texts(".arena small")])
                         : requestAnimationFrame(look));
  look();
})"""
BOX = """(({ x, y, width, height }) => [x, y + scrollY, width, height])(
  document.getElementById("play").getBoundingClientRect())"""
BOTH_MOVE = 'texts(".return").every((shown) => shown !== "0")'
BOTH_OVER = 'texts(".arena small").every((shown) => shown.startsWith("over"))'


class Browser:
    """A page of a headless Chromium."""

    def __init__(self, profile: Path) -> None:
        (into, self._out), (self._in, out) = os.pipe(), os.pipe()
        # It reads messages from 3 and answers into 4.
        words = ["bash", "-c", f'exec "$@" 3<&{into} 4>&{out}', "bash", "chromium", *FLAGS]
        words.append(f"--user-data-dir={profile}")
        with (profile / "log").open("wb") as log:
            self._process = subprocess.Popen(words, pass_fds=(into, out), stderr=log)
        for end in (into, out):
            os.close(end)
        self._read, self._sent, self._page = b"", 0, dict[str, str]()
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._page = {"sessionId": attached["sessionId"]}
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params} | self._page
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._sent:
            self._events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def events(self, *methods: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["method"] in methods]

    def run(self, code: str) -> Any:
        done = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def show(self, page: Path, width: int, scheme: str) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self._events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not self.events("Page.loadEventFired"):
            self._events.append(self._next())

    def shoot(self, path: Path) -> None:
        x, y, width, height = self.run(BOX)
        clip = {"x": 0, "y": y - 140, "width": width + 2 * x, "height": height + 170, "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._page = {}
        self.call("Browser.close")
        assert self._process.wait() == 0
        for end in (self._in, self._out):
            os.close(end)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


def page_of(run_id: str, folder: Path) -> Path:
    """Write the report of a run with its fp32 and int8."""
    page = pipeline.report([run_id], root=published(folder, run_id).root, command="quarl report")
    assert page.stat().st_size < 1_000_000
    return page


@pytest.mark.parametrize(
    "cell", ["dqn-CartPole-v1", "ppo-Acrobot-v1", "ppo-MountainCarContinuous-v0", "dqn-AirNav-v0"]
)
def test_both_policies_play(browser: Browser, cell: str, tmp_path: Path) -> None:
    page = page_of(f"{cell}-s0", tmp_path)
    for look, width, scheme in (("narrow", 390, "dark"), ("wide", 1280, "light")):
        browser.show(page, width, scheme)
        browser.run('document.querySelector(".toggle").click()')
        browser.run(UNTIL % BOTH_MOVE)
        browser.shoot(SHOTS / f"{cell}-{look}-{scheme}.png")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    fp32, int8, *texts = browser.run(UNTIL % BOTH_OVER)
    for shown, text in zip((fp32, int8), texts, strict=True):
        assert text.endswith(f"evaluation: return {shown}")
    assert browser.events(*ERRORS) == []


def test_other_environments_have_a_film(browser: Browser, tmp_path: Path) -> None:
    page = page_of("ppo-LunarLander-v3-s0", tmp_path)
    for look, width in (("narrow", 390), ("wide", 1280)):
        browser.show(page, width, "light")
        assert browser.run('document.querySelector("#play img").naturalWidth') > 300
        browser.shoot(SHOTS / f"film-{look}.png")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.events(*ERRORS) == []
