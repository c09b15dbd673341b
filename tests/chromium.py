"""Drives a headless Chromium by the DevTools protocol, over a pipe: messages are JSON, each ended by a zero byte."""

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")
KEY_CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. `events` keeps all that was reported meanwhile."""

    def __init__(self, profile, width=1366, height=768):
        reads, self.to_browser = os.pipe()
        self.from_browser, writes = os.pipe()

        def place():  # where the browser looks for them
            os.dup2(reads, 103), os.dup2(writes, 104)
            os.dup2(103, 3), os.dup2(104, 4)

        words = [find(), *FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            [*words, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4, reads, writes),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self.numbers, self.buffer, self.events, self.session = itertools.count(1), b"", [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def read(self, seconds: float) -> dict:
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_browser], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            self.buffer += os.read(self.from_browser, 1 << 20)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self.read(60)).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read(60))

    def ask(self, expression: str):
        """The value of a JavaScript expression"""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key on the keyboard"""
        text = {"text": key} if len(key) == 1 else {}
        code = KEY_CODES.get(key, ord(key[0]))
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def named(self, *methods: str) -> list[dict]:
        return [event["params"] for event in self.events if event.get("method") in methods]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
