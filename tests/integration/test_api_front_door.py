"""Keys, prefixes, limits and deadlines: the server over a real engine process without a model."""

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.api_server import cut, memory_command, memory_server, raw_completion, running, write_letter_model

LONG: dict[str, Any] = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


async def test_keys_guard_all_but_probes_and_a_prefix_changes_nothing(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("first\nsecond\n")
    async with memory_server(tmp_path, "fine", "--api-key-file", str(key_file), "--root-path", "/llm") as talk:
        for prefix in ("", "/llm"):
            for path in ("/livez", "/readyz", "/startupz", "/health", "/metrics"):
                assert (await talk.get(prefix + path))[0] == 200, path
            for path in ("/v1/models", "/version", "/nowhere", "/llm/llm/livez", "/v1/../livez2"):
                status, text = await talk.get(prefix + path)
                assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key"), path
            for key, want in (("first", 200), ("second", 200), ("third", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                async with talk.session.get(f"{prefix}/v1/models", headers=headers) as response:
                    assert response.status == want
                    assert ("WWW-Authenticate" in response.headers) == (want == 401)
        headers = {"Authorization": "Bearer first"}
        async with talk.session.post("/llm/v1/completions", json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        new = tmp_path / "new"
        new.write_text("third")
        os.replace(new, key_file)

        async def third_is_let_in() -> bool:
            async with talk.session.get("/v1/models", headers={"Authorization": "Bearer third"}) as response:
                return response.status == 200

        await talk.until(third_is_let_in, "the new key is read")
        async with talk.session.get("/v1/models", headers=headers) as response:
            assert response.status == 401, "the old key is gone"
        assert "first" not in talk.server.log.replace("first one", "")


@pytest.mark.parametrize("flags", [(), ("--no-web-page",)])
async def test_the_page_is_served_without_a_key_unless_it_is_turned_off(tmp_path: Path, flags: tuple[str, ...]) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("first")
    async with memory_server(
        tmp_path, "never-ready", "--api-key-file", str(key_file), "--root-path", "/llm", *flags
    ) as talk:
        for path in ("/", "/llm/", "/ui/app.js", "/llm/ui/style.css", "/ui/icon.svg"):
            async with talk.session.get(path) as response:
                assert (response.status == 200) is not bool(flags), path
                if not flags:
                    kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
                    assert response.content_type == kind.get(path.rpartition(".")[2], "text/html")
                    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
        for path in ("/ui/page_routes.py", "/ui/..%2fapp.py", "/ui/", "/ui"):
            assert (await talk.get(path))[0] in {401, 404}, path


async def test_a_key_sends_what_its_line_allows_and_no_more(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("free\nslow requests_per_minute=3\nnarrow concurrent_requests=1\n")
    async with memory_server(tmp_path, "slow-20", "--api-key-file", str(key_file)) as talk:

        async def ask(key: str, **body: Any) -> tuple[int, str | None, dict[str, Any]]:
            headers = {"Authorization": f"Bearer {key}"}
            async with talk.session.post("/v1/completions", json={"prompt": "a", **body}, headers=headers) as response:
                return response.status, response.headers.get("Retry-After"), await response.json()

        answers = [await ask("slow", max_tokens=1) for _ in range(4)]
        assert [status for status, *_ in answers] == [200, 200, 200, 429]
        _, retry_after, answer = answers[3]
        assert 1 <= int(retry_after or "") <= 20
        assert (answer["error"]["code"], answer["error"]["type"]) == ("rate_limit", "rate_limit_error")

        task = asyncio.create_task(ask("narrow", **LONG))

        async def runs() -> bool:
            return await talk.gauge("vllm:num_requests_running") == 1

        await talk.until(runs, "it runs")
        status, retry_after, answer = await ask("narrow", max_tokens=1)
        assert (status, answer["error"]["code"]) == (429, "concurrency_limit") and retry_after is not None
        assert (await ask("free", max_tokens=1))[0] == 200, "another key is not touched"
        async with talk.session.get("/v1/models", headers={"Authorization": "Bearer narrow"}) as response:
            assert response.status == 200, "only POST counts"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        metrics = await talk.until_idle()

        async def served_again() -> bool:
            return (await ask("narrow", max_tokens=1))[0] == 200

        await talk.until(served_again, "a client that left has given its place back")
        for reason in ("rate_limit", "concurrency_limit"):
            assert metrics[f'pagefleet_requests_rejected_total{{reason="{reason}"}}'] == 1


def test_a_key_file_without_a_key_is_a_wrong_flag(tmp_path: Path) -> None:
    command = memory_command("fine", write_letter_model(tmp_path / "model"), "--api-key-file", str(tmp_path / "none"))
    with running(command, tmp_path / "log") as server:
        assert server.wait_exit() == 2
        assert "--api-key-file" in server.log


async def test_an_answer_that_is_not_complete_in_time_is_ended(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-30", "--request-timeout", "30") as talk:
        status, answer = await talk.post("/v1/completions", timeout=0.2, **LONG)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert "0.2 s" in answer["error"]["message"]
        events = await talk.stream(timeout=0.3, n=2, **LONG)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        headers = {"X-Request-Timeout": "0.2"}
        async with talk.session.post("/v1/completions", json=LONG, headers=headers) as response:
            assert response.status == 504
        slow = {"regex": "((((a{0,100}){0,100}){0,100}){0,100})b"}
        status, answer = await talk.post("/v1/completions", timeout=1e-6, structured_outputs=slow, **LONG)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded"), "the time of building it counts"
        for wrong in ("soon", "0", "-1", "nan"):
            headers = {"X-Request-Timeout": wrong}
            async with talk.session.post("/v1/completions", json=LONG, headers=headers) as response:
                assert response.status == 400
        metrics = await talk.until_idle()
        assert metrics['vllm:request_success_total{finished_reason="abort"}'] == 4


async def test_slow_and_oversized_requests_are_cut_short(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--read-timeout", "0.3", "--keep-alive", "0.5") as talk:
        whole = raw_completion(prompt="ab")
        reader, writer = await talk.connect()
        writer.write(whole[:-3])
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
        await cut(writer)

        reader, writer = await talk.connect()
        writer.write(b"GET /livez HT")  # a head that never ends
        assert await asyncio.wait_for(reader.read(1024), 20) == b""
        await cut(writer)

        for head in (
            b"GET /livez HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 1000 + b"\r\n",
            b"GET /livez HTTP/1.1\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"GET /livez HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        ):
            reader, writer = await talk.connect()
            writer.write(head)
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
            await cut(writer)
        assert (await talk.get("/livez"))[0] == 200


SECRET = b"Authorization: Bearer sk-secret\r\n"


async def test_malformed_requests_are_answered_and_told_in_one_line_each(tmp_path: Path) -> None:
    """Each once wrote a stack of the HTTP library into the log: anybody could fill it."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    packed = b"Content-Encoding: gzip\r\nContent-Length: "
    attacks = {
        "no request": (b"nonsense \x1b[31m\r\n\r\n", b"400"),
        "a long header": (b"GET /livez HTTP/1.1\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n", b"400"),
        "a bad chunk": (post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        "a packed body": (post + b"Connection: close\r\n" + packed + b"10\r\n\r\n\xffnot packe", b"415"),
        "more of it than is read": (post + packed + b"100000\r\n\r\n\xffnot packe" + b"x" * 60_000, b"415"),
        "bare line feeds": (post.replace(b"\r\n", b"\n") + SECRET.replace(b"\r\n", b"\n") + b"\n", b"400"),
        "a key with a NUL": (post + SECRET.replace(b"sk-", b"sk-\0") + b"\r\n", b"400"),
        "two types": (post + SECRET + b"Content-Type: text/plain\r\n\r\n", b"400"),
        "a chunk of text": (post + b"Transfer-Encoding: chunked\r\n\r\nsk-secret prompt\r\n", b"400"),
        "another protocol": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        "a body of 10**18 bytes": (post + b"Content-Length: 1000000000000000000\r\n\r\nabc", b"413"),
    }
    async with memory_server(tmp_path, "fine", "--read-timeout", "60") as talk:
        for case, (data, want) in attacks.items():
            reader, writer = await talk.connect()
            writer.write(data)
            received = await asyncio.wait_for(reader.read(), 20)  # and the end, without a reset
            head, _, body = received.partition(b"\r\n\r\n")
            assert head.split()[1] == want, case
            assert b"Server: pagefleet" in head and json.loads(body)["error"]["message"], case
            assert b"secret" not in received, "a proxy may give it to somebody else"
            if case != "more of it than is read":  # refused unread; closed as what is announced does not come
                assert head.startswith(b"HTTP/1.0") or b"Connection: close" in head, case
            await cut(writer)
        bomb = gzip.compress(b" " * 50_000_000)
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with talk.session.post("/v1/completions", data=bomb, headers=headers) as response:
            assert response.status == 415
        assert (await talk.complete("a", max_tokens=1))["usage"]["completion_tokens"] == 1
        assert not [word for word in ("Traceback", "\x1b", "secret") if word in talk.server.log]
        assert 2 <= talk.server.log.count("pagefleet.http") <= len(attacks)


async def test_a_response_tells_the_load_when_asked(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine") as talk:
        headers = {"endpoint-load-metrics-format": "TEXT"}
        async with talk.session.post("/v1/completions", json={"prompt": "a"}, headers=headers) as response:
            assert response.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_usage_perc=")
        async with talk.session.post("/v1/completions", json={"prompt": "a"}) as response:
            assert "endpoint-load-metrics" not in response.headers


async def test_pages_of_allowed_origins_may_call_and_others_may_not(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("first")
    flags = ("--cors-allow-origins", "https://a.example, https://b.example", "--api-key-file", str(key_file))
    async with memory_server(tmp_path, "fine", *flags) as talk:
        for origin, allowed in (("https://a.example", True), ("https://c.example", False), ("null", False)):
            asked = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type",
            }
            async with talk.session.options("/v1/completions", headers=asked) as response:
                assert response.status == (204 if allowed else 403)
                assert response.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
                if allowed:
                    assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
            given = {"Origin": origin, "Authorization": "Bearer first"}
            body = {"prompt": "a", "stream": True}
            async with talk.session.post("/v1/completions", json=body, headers=given) as response:
                assert response.status == 200
                assert response.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
        async with talk.session.options("/v1/completions") as response:
            assert response.status == 401, "not a preflight"


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine") as talk:
        reader, writer = await talk.connect()
        writer.write(b"".join(raw_completion(prompt="ab", max_tokens=n, ignore_eos=True) for n in range(1, 6)))
        received = b""
        while received.count(b'"completion_tokens"') < 5:
            received += await asyncio.wait_for(reader.read(4096), 20)
        counts = [received.split(b'"completion_tokens":')[n][0:1] for n in range(1, 6)]
        assert counts == [b"1", b"2", b"3", b"4", b"5"]
        await cut(writer)
