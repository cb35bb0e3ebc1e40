"""The same requests to two servers: status codes, shapes of the answers, greedy text, names of metrics."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "m"
TEXT = "The lighthouse keeper had counted 1,204 ships since the winter began, and he"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks a city up", "parameters": SCHEMA}}


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    name: str
    path: str
    body: dict[str, Any] | bytes | None = None
    """None: a GET."""
    greedy: bool = False
    """Whether the text of the answer must be the same."""


def completion(name: str, **fields: Any) -> Case:
    """A greedy completion of TEXT, or of what the fields say."""
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 12, "temperature": 0} | fields
    return Case(f"completion: {name}", COMPLETIONS, body, greedy=True)


def chat(name: str, **fields: Any) -> Case:
    """A greedy chat."""
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 12, "temperature": 0} | fields
    return Case(f"chat: {name}", CHATS, body, greedy=True)


USAGE = {"include_usage": True}
CASES = (
    completion("plain"),
    completion("token ids", prompt=[504, 2998, 282, 260, 905]),
    completion("list of texts", prompt=[TEXT, "1, 2, 3,"]),
    completion("list of lists of token ids", prompt=[[504, 2998, 282], [260, 905, 314]]),
    completion("streamed", stream=True),
    completion("streamed with usage", stream=True, stream_options=USAGE),
    completion("streamed, continuous usage", stream=True, stream_options=USAGE | {"continuous_usage_stats": True}),
    completion("stop string", stop=[" sea", ","]),
    completion("stop string, shown", stop=[","], include_stop_str_in_output=True),
    completion("stop token", stop_token_ids=[28]),
    completion("logprobs", logprobs=3),
    completion("logprobs 0", logprobs=0),
    completion("logprobs, streamed", logprobs=2, stream=True),
    completion("echo", echo=True),
    completion("echo with logprobs", echo=True, logprobs=1),
    completion("prompt_logprobs", prompt_logprobs=2),
    completion("n = 2", n=2, temperature=0.9, seed=1),
    completion("penalties", presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
    completion("logit_bias", logit_bias={"28": 100}),
    completion("allowed_token_ids", allowed_token_ids=[28, 30, 284]),
    completion("bad_words", bad_words=[" was"]),
    completion("min_tokens and ignore_eos", min_tokens=12, ignore_eos=True),
    completion("return_token_ids", return_token_ids=True),
    completion("no max_tokens", max_tokens=None),
    completion("regex", structured_outputs={"regex": "[a-z]{4}"}),
    completion("choice", structured_outputs={"choice": ["red", "green"]}),
    completion("json schema", structured_outputs={"json": SCHEMA}, max_tokens=40),
    completion("unknown field", nobody_knows_this=1),
    completion("top_k and min_p", top_k=5, min_p=0.1, seed=3),
    completion("wrong model", model="other"),
    completion("temperature -1", temperature=-1),
    completion("temperature as text", temperature="hot"),
    completion("top_p 0", top_p=0),
    completion("top_p 2", top_p=2),
    completion("max_tokens 0", max_tokens=0),
    completion("max_tokens -1", max_tokens=-1),
    completion("max_tokens beyond the context", max_tokens=100000),
    completion("prompt beyond the context", prompt=[300] * 9000),
    completion("token id beyond the vocabulary", prompt=[10**6]),
    completion("negative token id", prompt=[-1]),
    completion("empty prompt", prompt=""),
    completion("empty list of prompts", prompt=[]),
    completion("no prompt", prompt=None),
    completion("n = 0", n=0),
    completion("logprobs 100", logprobs=100),
    completion("presence_penalty 3", presence_penalty=3),
    completion("broken regex", structured_outputs={"regex": "[a-"}),
    completion("suffix", suffix="end"),
    completion("best_of 2", best_of=2),
    completion("stream_options without stream", stream_options=USAGE),
    completion("stop of 40 texts", stop=[f"zz{index}" for index in range(40)]),
    chat("plain"),
    chat("system role", messages=[{"role": "system", "content": "Be short."}, *CHAT]),
    chat("content parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Name a color."}]}]),
    chat("streamed", stream=True),
    chat("streamed with usage", stream=True, stream_options=USAGE),
    chat("logprobs", logprobs=True, top_logprobs=2),
    chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    chat("n = 2", n=2, temperature=0.9, seed=1),
    chat("json_object", response_format={"type": "json_object"}, max_tokens=60),
    chat("json_schema", response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}),
    chat("continue_final_message", messages=[*CHAT, {"role": "assistant", "content": "The capital"}],
         add_generation_prompt=False, continue_final_message=True),
    chat("stop string", stop=["Paris"]),
    chat("named tool", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look_up"}}, max_tokens=60),
    chat("tool_choice of no tool", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
    chat("tool_choice none", tools=[TOOL], tool_choice="none"),
    chat("no messages", messages=[]),
    chat("messages missing", messages=None),
    chat("unknown role", messages=[{"role": "alien", "content": "x"}]),
    chat("content missing", messages=[{"role": "user"}]),
    chat("top_logprobs without logprobs", top_logprobs=2),
    chat("image part", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]),
    Case("tokenize", "/tokenize", {"model": MODEL, "prompt": TEXT}),
    Case("tokenize messages", "/tokenize", {"model": MODEL, "messages": CHAT}),
    Case("detokenize", "/detokenize", {"model": MODEL, "tokens": [504, 2998, 282]}),
    Case("models", "/v1/models"),
    Case("version", "/version"),
    Case("health", "/health"),
    Case("no such path", "/v1/nothing"),
    Case("completions by GET", COMPLETIONS),
    Case("broken JSON", COMPLETIONS, b'{"model": '),
    Case("body that is a list", COMPLETIONS, b"[]"),
    Case("no body", COMPLETIONS, b""),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observation:
    """What a server answered."""

    status: int
    shape: frozenset[str]
    """JSON path and type of every value, as `choices[].text: str`; of all events of a stream together."""
    texts: tuple[str, ...] = field(default=())
    """Of each choice, and why it ended."""


def observe(base_url: str, case: Case) -> Observation:
    """Send it. Raises OSError if no answer comes."""
    data = case.body if isinstance(case.body, bytes | None) else json.dumps(case.body).encode()
    request = urllib.request.Request(base_url + case.path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=280) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    documents = list(parse(text))
    shape = frozenset(line for document in documents for line in lines_of(document, ""))
    return Observation(status, shape, tuple(texts_of(documents)))


def parse(text: str) -> Iterator[Any]:
    """One document, or the events of a stream."""
    if text.startswith(("data:", ":")):
        for line in text.splitlines():
            if line.startswith("data:") and "[DONE]" not in line:
                yield json.loads(line.removeprefix("data:"))
        return
    try:
        yield json.loads(text)
    except ValueError:
        yield text


def lines_of(value: Any, path: str) -> Iterator[str]:
    """Path and type of every leaf. Keys that are data (token texts) are one key, `*`."""
    if isinstance(value, dict):
        is_data = path.endswith(("top_logprobs[]", "prompt_logprobs[]"))
        for key, item in value.items():
            yield from lines_of(item, f"{path}.{'*' if is_data else key}".removeprefix("."))
    elif isinstance(value, list):
        if not value:
            yield f"{path}: []"
        for item in value:
            yield from lines_of(item, f"{path}[]")
    else:
        kind = "null" if value is None else "number" if type(value) in (int, float) else type(value).__name__
        yield f"{path}: {kind}"


def texts_of(documents: list[Any]) -> Iterator[str]:
    """Each choice's text, pieces joined, with its finish reason."""
    pieces: dict[int, str] = {}
    ends: dict[int, str] = {}
    for document in documents:
        for choice in document.get("choices", ()) if isinstance(document, dict) else ():
            message = choice.get("message") or choice.get("delta") or {}
            text = choice.get("text") or message.get("content") or ""
            for call in message.get("tool_calls") or ():
                text += call["function"].get("arguments") or ""
            index = choice["index"]
            pieces[index] = pieces.get(index, "") + text
            ends[index] = choice.get("finish_reason") or ends.get(index, "")
    for index in sorted(pieces):
        yield f"{pieces[index]!r} {ends[index]}"


@dataclass(slots=True)
class Differences:
    """What was found, as rows of the documentation's tables: (where, ours, vLLM's)."""

    found: set[tuple[str, str, str]] = field(default_factory=set)

    def rows(self) -> set[tuple[str, str, str]]:
        """All of them."""
        return self.found

    def as_json(self) -> list[list[str]]:
        """For a file."""
        return [list(row) for row in sorted(self.found)]


def compare(case: Case, ours: Observation, theirs: Observation, into: Differences) -> bool:
    """Add what differs; whether nothing does. Answers of other status codes are not compared further. A key that is
    null counts as one that is not there."""
    before = len(into.found)
    if ours.status != theirs.status:
        into.found.add((case.name, str(ours.status), str(theirs.status)))
        return False
    kind = "error" if ours.status >= 400 else case.name.split(":")[0]
    kind += " stream" if isinstance(case.body, dict) and case.body.get("stream") and kind != "error" else ""
    alike = True
    for path in sorted({line.split(": ")[0] for line in ours.shape ^ theirs.shape}):
        mine, other = (_types(one.shape, path) for one in (ours, theirs))
        if {mine, other} == {"-", "null"}:
            continue  # nothing, said in two ways
        if "-" in (mine, other):
            top = _topmost_missing(path, ours.shape if mine == "-" else theirs.shape)
            if top != path:
                path, mine, other = top, *("-" if types == "-" else "object" for types in (mine, other))
        into.found.add((f"{kind} `{path}`", mine, other))
        alike = False
    if case.greedy and ours.status == 200 and case.body.get("temperature") == 0 and ours.texts != theirs.texts:  # type: ignore[union-attr]
        mine, other = ("`" + " ".join(one.texts).replace("|", "\\|") + "`" for one in (ours, theirs))
        into.found.add((f"text of {case.name}", mine, other))
        alike = False
    return alike and len(into.found) == before


def _topmost_missing(path: str, shape: frozenset[str]) -> str:
    """The shortest beginning of the path that a shape has nothing of (null is nothing): one line tells of all below."""
    present = [line.removesuffix(": null") if line.endswith(": null") else line for line in shape]
    parts = path.split(".")
    for count in range(1, len(parts)):
        top = ".".join(parts[:count])
        if not any(line.startswith((f"{top}.", f"{top}:", f"{top}[")) for line in present):
            return top
    return path


def _types(shape: frozenset[str], path: str) -> str:
    return ", ".join(sorted(line.split(": ")[1] for line in shape if line.split(": ")[0] == path)) or "-"


def compare_metrics(ours: str, theirs: str, into: Differences) -> None:
    """Families that only vLLM has; families of both with another type or other labels."""
    mine, other = metric_families(ours), metric_families(theirs)
    for name, kind in other.items():
        if not name.startswith("vllm:") or name.endswith("_created"):
            continue  # the Prometheus library's times of creation
        if name not in mine:
            into.found.add((f"metric `{name}`", "-", kind))
        elif (mine[name], label_names(ours, name)) != (kind, label_names(theirs, name)):
            labels = [", ".join(sorted(label_names(text, name))) for text in (ours, theirs)]
            into.found.add((f"metric `{name}`", f"{mine[name]} {labels[0]}", f"{kind} {labels[1]}"))
    for name in mine:
        if name.startswith("vllm:") and name not in other:
            into.found.add((f"metric `{name}`", mine[name], "-"))


def listed(page: Path) -> set[tuple[str, str, str]]:
    """The first three cells of every row of the page's tables."""
    rows = set()
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if len(cells) == 4 and not set(cells[0]) <= set("-: ") and cells[1] != "Ours":
            rows.add((cells[0], cells[1], cells[2]))
    return rows


def metric_families(text: str) -> dict[str, str]:
    """Name -> type of every family of an exposition."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def label_names(text: str, family: str) -> set[str]:
    """Of all samples of a family, `le` left out."""
    names: set[str] = set()
    for labels in re.findall(rf"^{re.escape(family)}(?:_total|_bucket|_sum|_count)?\{{(.*)\}} ", text, re.MULTILINE):
        names |= set(re.findall(r'(\w+)="', labels))
    return names - {"le"}
