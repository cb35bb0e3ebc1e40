"""Whatever a client sends: an answer that is no 500, a server that lives, and nothing left in the engine."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.protocol.completions import CompletionBody
from pagefleet_server.api.protocol.fields import HARMLESS, REFUSED
from support.api_server import Talk, memory_server

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20)
    | st.sampled_from(["\x00", "\ud800", "\ufeff", "a" * 5000, "{{ 7*7 }}", "</s>"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *REFUSED, *HARMLESS, "foo"})
FIELDS = st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=4)
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(0, 5),
        "stream": st.booleans(),
        "stop": st.lists(st.text("ab.", max_size=2), max_size=3),
        "max_tokens": st.integers(0, 12),
        "top_k": st.integers(-2, 60),
        "top_p": st.floats(0, 1),
        "temperature": st.floats(0, 3),
        "min_tokens": st.integers(0, 12),
        "seed": st.integers(),
        "echo": st.booleans(),
        "return_token_ids": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, 60).map(str), st.floats(-100, 100), max_size=3),
        "prompt": st.text("ab.", max_size=5) | st.lists(st.integers(0, 55), max_size=5),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "assistant"]), "content": st.text("ab")}),
            max_size=3,
        ),
    },
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
EXPECTED = {200, 400, 404, 413, 503}


@pytest.fixture
async def talk(tmp_path: Path) -> AsyncIterator[Talk]:
    async with memory_server(tmp_path, "fine", "--max-body", "64KiB") as talk:
        yield talk


async def send(talk: Talk, path: str, data: bytes) -> tuple[int, bytes]:
    async with talk.session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
        return response.status, await response.read()


async def check_still_well(talk: Talk) -> None:
    assert (await talk.complete("ab", max_tokens=2, ignore_eos=True))["usage"]["completion_tokens"] == 2
    metrics = await talk.until_idle()
    assert metrics['vllm:request_success_total{finished_reason="error"}'] == 0
    assert "Traceback" not in talk.server.log


async def test_bodies_of_any_content_get_an_answer(talk: Talk) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = []

    @settings(
        max_examples=300, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
    )
    @given(path=PATHS, likely=LIKELY, fields=FIELDS)
    def collect(path: str, likely: dict[str, Any], fields: dict[str, Any]) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            fields.pop(name, None)  # the engine without a model has none
        bodies.append((path, {"prompt": "ab", **likely, **fields}))

    collect()
    answered = 0
    for path, body in bodies:
        if path == "/v1/chat/completions":
            body.setdefault("messages", [{"role": "user", "content": "ab"}])
        status, answer = await send(talk, path, json.dumps(body).encode())
        assert status in EXPECTED, (path, body, answer)
        if status == 200:
            answered += 1
        else:
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
            assert len(answer) < 3000
    assert answered > 20, "the search reaches the engine"
    await check_still_well(talk)


ATTACKS = [
    b"",
    b"\x00",
    b"\xff\xfe\x00",
    b"{",
    b"null",
    b'"prompt"',
    b'{"prompt": "a"} trailing',
    b'{"prompt": "a", "prompt": ' + b"[" * 50_000,
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
    b'{"prompt": "a", "stop": [' + b'"a",' * 100_000 + b'"a"]}',
    b'{"prompt": ' + b"[[1]," * 5000 + b"[1]" + b"]" * 5000 + b"}",
    b'{"messages": [' + b'{"role":"user","content":"a"},' * 2000 + b'{"role":"user","content":"a"}]}',
    b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}',
    b'{"prompt": "a", "guided_json": {"type": "objekt"}}',
    b'{"prompt": "a", "guided_regex": "("}',
    b'{"prompt": "a", "guided_grammar": "root ::= nothing"}',
    b'{"prompt": "a", "prompt_logprobs": -1}',
    b"{" + b'"a":{' * 30 + b"}" * 31,
]


async def test_known_attacks_are_refused(talk: Talk) -> None:
    for data in ATTACKS:
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, answer = await send(talk, path, data)
            assert status in {400, 413}, (path, data[:200], answer)
        for path in ("/tokenize", "/detokenize"):
            status, answer = await send(talk, path, data)
            assert status in EXPECTED, (path, data[:200], answer)
    await check_still_well(talk)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP, identity", "x" * 500])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_packed_body_is_refused_without_unpacking_it(talk: Talk, encoding: str, path: str) -> None:
    """A kilobyte may become a megabyte, and the library unpacks in one go."""
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    for data in (b"\xffnot packed", gzip.compress(b" " * 10_000_000), b'{"prompt": "ab"}'):
        async with talk.session.post(path, data=data, headers=headers) as response:
            assert response.status == 415
            assert "packed" in (await response.json())["error"]["message"]
    assert (await talk.complete("ab", max_tokens=2, ignore_eos=True))["usage"]["completion_tokens"] == 2


async def test_a_prompt_of_control_characters_is_just_a_prompt(talk: Talk) -> None:
    status, _ = await talk.post("/tokenize", prompt="a\x00b\u202e\ufeff")
    assert status == 200


async def test_a_template_cannot_be_injected_through_a_message(talk: Talk) -> None:
    message = {"role": "user", "content": "{{ cycler.__init__.__globals__ }} ab"}
    _, tokens = await talk.post("/tokenize", messages=[message])
    _, want = await talk.post("/tokenize", prompt=f"{message['content']} ")
    assert tokens["tokens"] == want["tokens"]


async def test_tools_for_a_model_that_cannot_be_told_of_them_are_refused(talk: Talk) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    status, answer = await talk.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], tools=tools)
    assert (status, answer["error"]["param"]) == (400, "tools")
    status, answer = await talk.post("/v1/completions", prompt="a", tools=tools)
    assert (status, answer["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_of_ours_is_told_as_one_and_leaves_nothing(tmp_path: Path, stream: bool) -> None:
    """It once was a line of plain text. An engine that gives no log-probabilities is such a fault."""
    body = {"prompt": "ab", "logprobs": 1, "stream": stream, "max_tokens": 400, "ignore_eos": True}
    async with memory_server(tmp_path, "no-logprobs") as talk:
        async with talk.session.post("/v1/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"], error["code"]) == (500, "internal_error", "internal_error")
            request_id = response.headers["X-Request-Id"]
            assert request_id in error["message"] and "zip" not in error["message"]
        assert f"request {request_id} failed\nTraceback" in talk.server.log
        await talk.until_idle()


async def test_a_burst_of_requests_is_served_or_refused_and_forgotten(talk: Talk) -> None:
    """A burst of 72 once killed an engine."""
    answers = await asyncio.gather(
        *(talk.post("/v1/completions", prompt="ab", max_tokens=3, ignore_eos=True) for _ in range(300))
    )
    assert {status for status, _ in answers} <= {200, 503}
    assert sum(status == 200 for status, _ in answers) >= 256
    await check_still_well(talk)
