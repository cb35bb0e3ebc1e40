"""The built-in page: every file is there, nothing comes from elsewhere, and its scripts compute what they should."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import quickjs
from prometheus_client.parser import text_string_to_metric_families

from pagefleet_server.api.gauges import GaugeView
from pagefleet_server.api.metrics import Metrics
from pagefleet_server.api.page_routes import HEADERS, PAGE

INDEX = PAGE["index.html"][0].decode()
SCRIPTS = sorted(name for name in PAGE if name.endswith(".js"))


class Seen(HTMLParser):
    """What the document names."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.named: list[tuple[str, str]] = []
        self.inline: list[str] = []
        self.feed(INDEX)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.references += [given[name] for name in ("src", "href") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        self.named += [(name, given[name]) for name in ("for", "aria-labelledby") if name in given]
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag in {"style", "script"} and "src" not in given:
            self.inline.append(tag)


def run(name: str, call: str) -> Any:
    """The value of an expression over one script's exports."""
    source = re.sub(r"^export (class|function)", r"\1", PAGE[name][0].decode(), flags=re.MULTILINE)
    context = quickjs.Context()
    context.eval(source)
    return json.loads(str(context.eval(f"JSON.stringify({call})")))


def test_every_reference_is_a_file_of_the_page() -> None:
    for reference in Seen().references:
        assert reference.startswith("#") or reference.removeprefix("ui/") in PAGE, reference
    for name in SCRIPTS:
        for imported in re.findall(r'from "\./([^"]+)"', PAGE[name][0].decode()):
            assert imported in PAGE, f"{name} imports {imported}"


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for name, (body, _) in PAGE.items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|@import|url\(|eval\(|innerHTML|insertAdjacentHTML", text), name
    assert Seen().inline == []
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "*" not in policy


def test_ids_are_unique_and_every_label_names_one() -> None:
    seen = Seen()
    assert len(seen.ids) == len(set(seen.ids))
    for attribute, name in seen.named:
        assert name in seen.ids, (attribute, name)
    for script in SCRIPTS:
        for name in re.findall(r'(?:byId|\bat)\("([a-z0-9-]+)"\)', PAGE[script][0].decode()):
            assert name in seen.ids, f"{script} looks for {name}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_parses(name: str) -> None:
    context = quickjs.Context()
    source = re.sub(r"^import .*$", "", PAGE[name][0].decode(), flags=re.MULTILINE)
    source = re.sub(r"^export ", "", source, flags=re.MULTILINE)
    context.eval(f"(async () => {{ return async () => {{ {source} }} }})")
    with pytest.raises(quickjs.JSException):
        context.eval(f"(async () => {{ {source} ( }})")


EVENTS = 'data: {"choices":[{"delta":{"content":"é"}}]}\n\n: keep-alive\n\ndata: [DONE]\n\n'


def test_events_are_read_the_same_however_they_are_cut() -> None:
    want = ['{"choices":[{"delta":{"content":"é"}}]}', "[DONE]"]
    for cut in range(len(EVENTS) + 1):
        parts = json.dumps([EVENTS[:cut], EVENTS[cut:]])
        assert (
            run("sse.js", f"(() => {{ const r = new EventReader(); return {parts}.flatMap(t => r.feed(t)); }})()")
            == want
        )


@pytest.mark.parametrize(
    ("event", "want"),
    [
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}, {"text": "a", "finish": "stop"}),
        ({"choices": [{"text": "b", "finish_reason": None}]}, {"text": "b", "finish": None}),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, {"thought": "hm", "text": ""}),
        ({"choices": [], "usage": {"prompt_tokens": 3}}, {"usage": {"prompt_tokens": 3}, "text": ""}),
        ({"error": {"message": "no"}}, {"error": "no"}),
    ],
)
def test_an_event_says_what_it_says(event: dict[str, Any], want: dict[str, Any]) -> None:
    read = run("sse.js", f"readEvent({json.dumps(json.dumps(event))})")
    assert {name: read[name] for name in want} == want


def test_fences_make_code() -> None:
    parts = run(
        "sse.js",
        f"splitCode({json.dumps('a' + chr(10) + '```py' + chr(10) + 'x < 1' + chr(10) + '```' + chr(10) + 'b')})",
    )
    assert parts == [{"code": False, "text": "a\n"}, {"code": True, "text": "x < 1\n"}, {"code": False, "text": "b"}]


def test_the_page_reads_the_metrics_that_there_are() -> None:
    view = GaugeView(running=3, waiting=2, blocks_used=5, blocks_cached=7, blocks_free=4, blocks_total=16)
    metrics = Metrics('m"\\n', lambda: view)
    for value in (0.02, 0.03, 0.05):
        metrics.first_token.observe(value)
    text = json.dumps(metrics.render().decode())
    wanted = re.findall(r'"((?:vllm:|pagefleet_)[a-z0-9_]+)"', PAGE["live.js"][0].decode())
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert {name.removesuffix("_total") for name in wanted} <= families | {"pagefleet_kv_blocks"}
    read = run("figures.js", f"Object.fromEntries(readMetrics({text}))")
    assert read["vllm:num_requests_running"] == 3 and read["pagefleet_kv_blocks|state=cached"] == 7
    name = "vllm:time_to_first_token_seconds"
    median = run("figures.js", f"quantile(histogramGain(new Map(), readMetrics({text}), '{name}'), 0.5)")
    assert 0.02 <= median <= 0.04
    assert run("figures.js", "quantile([], 0.5)") is None


@pytest.mark.parametrize(
    ("blocks", "want"),
    [((0, 0, 0), [0, 0, 0]), ((1, 0, 9999), [1, 0, 99]), ((50, 25, 25), [50, 25, 25]), ((1, 1, 1), [34, 33, 33])],
)
def test_the_picture_shows_whoever_has_something(blocks: tuple[int, int, int], want: list[int]) -> None:
    assert run("figures.js", f"shareCells({', '.join(map(str, blocks))}, 100)") == want
