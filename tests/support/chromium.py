"""A headless Chromium, driven over its DevTools protocol: one page, no library between."""

import asyncio
import base64
import itertools
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--mute-audio",
)
DEADLINE_SECONDS = 60.0


def find_chromium() -> str | None:
    """The program, when one is installed."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One tab. `faults` collects what the console complains of: exceptions, blocked or failed loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.faults: list[str] = []

    async def read(self) -> None:
        """Take in the browser's messages until it is gone."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.faults.append(json.dumps(found["params"]["exceptionDetails"])[:500])
            elif found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
                self.faults.append(found["params"]["entry"]["text"] + " " + found["params"]["entry"].get("url", ""))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, DEADLINE_SECONDS)
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def text(self, selector: str) -> str:
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def until(self, expression: str, accept: Callable[[Any], bool] = bool) -> Any:
        """The expression's first accepted value."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not accept(value := await self.value(expression)):
            assert time.monotonic() < deadline, f"waited too long for {expression}; it is {value!r}"
            await asyncio.sleep(0.05)
        return value

    async def type(self, selector: str, text: str) -> None:
        await self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """A key of one character, or Enter, Tab, Space."""
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def click(self, selector: str) -> None:
        await self.value(f"document.querySelector({json.dumps(selector)}).click()")

    async def see(self, width: int, height: int, scheme: str) -> None:
        """The window's size, and the colours that its user likes."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, file: Path) -> None:
        data = base64.b64decode((await self.call("Page.captureScreenshot"))["data"])
        await asyncio.to_thread(file.write_bytes, data)


@asynccontextmanager
async def open_page(program: str, folder: Path) -> AsyncIterator[Page]:
    """A blank page of a fresh browser, which ends with the block."""
    profile = folder / "profile"
    browser = await asyncio.create_subprocess_exec(
        *(program, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await asyncio.to_thread(_read_port, profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                targets = await response.json(content_type=None)
            (address,) = (target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                reader = asyncio.create_task(page.read())
                yield page
                reader.cancel()
    finally:
        browser.terminate()
        await browser.wait()


def _read_port(file: Path) -> int:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (file.exists() and (lines := file.read_text().split())):
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    return int(lines[0])
