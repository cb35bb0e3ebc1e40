"""The built-in page in a real browser, over a real server process. Needs a Chromium on the PATH."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.api_server import Talk, memory_server
from support.chromium import Page, find_chromium, open_page

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed; the unit tests parse and run the scripts"),
]
SHOTS = os.environ.get("PAGE_SCREENSHOTS")
"""A folder that gets pictures of the page, to look at."""
BUSY = "document.querySelector('.message.assistant:last-child')?.getAttribute('aria-busy')"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    assert PROGRAM is not None
    async with open_page(PROGRAM, tmp_path) as page:
        yield page


@pytest.fixture
async def talk(tmp_path: Path) -> AsyncIterator[Talk]:
    async with memory_server(tmp_path, "slow-20", "--num-kv-blocks", "128") as talk:
        yield talk


async def shoot(page: Page, name: str) -> None:
    if SHOTS is not None:
        await page.screenshot(Path(SHOTS) / f"{name}.png")


async def ready(page: Page, url: str) -> None:
    await page.open(url)
    await page.until("document.getElementById('state')?.dataset.state === 'ready'")


async def ask(page: Page, text: str) -> None:
    await page.type("#prompt", text)
    await page.press("Enter")


async def test_an_answer_is_streamed_and_the_figures_live(page: Page, talk: Talk) -> None:
    await page.see(1280, 800, "light")
    await ready(page, f"{talk.server.base_url}/")
    assert await page.text("#model") == "letters"
    await ask(page, "abc <img src=x onerror=alert(1)> def")
    await page.until(f"{BUSY} === 'true'")
    first = await page.until("document.querySelector('.message.assistant .body').textContent")
    await page.until("Number(document.getElementById('running').textContent) === 1")
    await shoot(page, "light")
    await page.until(f"{BUSY} === 'false'")
    whole = await page.text(".message.assistant .body")
    assert whole.startswith(first) and len(whole) > len(first), "it came in pieces"
    assert "tokens" in await page.text("#usage")
    assert await page.value("document.querySelectorAll('#log img').length") == 0, "texts are never HTML"
    assert "<img" in await page.text(".message.user .body")
    label = await page.value("document.getElementById('blocks').getAttribute('aria-label')")
    assert "blocks" in label
    await page.until("document.getElementById('ttft-50').textContent !== '\u2013'")
    await page.until("document.querySelectorAll('#rate-chart path').length > 0")
    assert page.faults == []


async def test_an_answer_can_be_stopped_and_the_engine_forgets_it(page: Page, talk: Talk) -> None:
    await ready(page, f"{talk.server.base_url}/")
    await page.value("document.getElementById('max-tokens').value = '900'")
    await ask(page, "abc")
    await page.until("document.querySelector('.message.assistant .body')?.textContent")
    await page.click("#stop")
    await page.until(f"{BUSY} === 'false'")
    assert await page.text(".message.assistant .note") == "stopped"
    metrics = await talk.until_idle()
    assert metrics['vllm:request_success_total{finished_reason="abort"}'] == 1
    await page.click("#clear")
    assert await page.value("document.querySelectorAll('.message').length") == 0
    assert page.faults == []


async def test_dark_narrow_and_by_keyboard(page: Page, talk: Talk) -> None:
    await page.see(420, 900, "dark")
    await ready(page, f"{talk.server.base_url}/")
    assert await page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    ground = await page.value("getComputedStyle(document.body).backgroundColor")
    await ask(page, "abc")
    await page.until(f"{BUSY} === 'false'")
    await shoot(page, "dark-narrow")
    await page.see(1280, 800, "dark")
    await shoot(page, "dark")
    await page.click("#theme")
    assert await page.value("getComputedStyle(document.body).backgroundColor") != ground, "light in spite of the system"
    await page.value("document.body.focus()")
    seen = set()
    for _ in range(12):
        await page.press("Tab")
        seen.add(await page.value("document.activeElement.id || document.activeElement.className"))
    assert {"prompt", "send", "theme", "clear"} <= seen
    assert page.faults == []


async def test_everything_that_can_be_used_has_a_name(page: Page, talk: Talk) -> None:
    await ready(page, f"{talk.server.base_url}/")
    await page.value("document.querySelector('details').open = true")
    nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
    used = {"button", "textbox", "spinbutton", "image", "log", "link", "table"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node.get("ignored") and node.get("role", {}).get("value") in used
    ]
    assert len(named) >= 12, json.dumps(named)
    assert [role for role, name in named if not name.strip() and role != "table"] == []


async def test_a_key_is_asked_for_and_then_used(page: Page, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with memory_server(tmp_path, "slow-5", "--api-key-file", str(keys), "--root-path", "/llm") as talk:
        await ready(page, f"{talk.server.base_url}/llm/")
        await ask(page, "abc")
        await page.until("!document.getElementById('error').hidden")
        assert "valid API key" in await page.text("#error")
        assert await page.value("document.getElementById('prompt').value") == "abc", "the question is not lost"
        await page.value("document.getElementById('prompt').value = ''")
        await page.value("document.getElementById('key').value = 'secret'")
        await ask(page, "abc")
        await page.until("document.querySelector('.message.assistant:last-child .body')?.textContent")
        await shoot(page, "key")
    await page.until("document.getElementById('state').dataset.state === 'gone'")
