"""What a real server says of itself, and other people's clients."""

import asyncio
import io
import json

import openai
import pytest

from support.api_server import RunningServer, Talk
from support.api_serving import CONTEXT, GREEDY, NAME, TEMPLATE, server, talk

__all__ = ["server", "talk"]


async def test_unknown_fields_are_accepted_and_told_once(talk: Talk, server: RunningServer) -> None:
    for _ in range(2):
        await talk.complete("a", max_tokens=1, dreams="big", user="me")
    assert server.log.count("unknown field 'dreams'") == 1
    assert "unknown field 'user'" not in server.log


async def test_the_tokenizer_tells_its_special_tokens_and_template(talk: Talk) -> None:
    info = json.loads((await talk.get("/tokenizer_info"))[1])
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == ("<s>", "</s>", CONTEXT)
    assert info["chat_template"] == TEMPLATE


async def test_models_version_and_wrong_names(talk: Talk) -> None:
    _, text = await talk.get("/v1/models")
    (model,) = json.loads(text)["data"]
    assert (model["id"], model["max_model_len"]) == (NAME, CONTEXT)
    assert (await talk.get(f"/v1/models/{NAME}"))[0] == 200
    assert (await talk.get("/v1/models/other"))[0] == 404
    status, answer = await talk.post("/v1/completions", prompt="a", model="other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, text = await talk.get("/nowhere")
    assert status == 404 and "error" in json.loads(text)
    async with talk.session.delete("/v1/models") as response:
        assert response.status == 405 and response.headers["Allow"] == "GET, HEAD"
    assert "version" in json.loads((await talk.get("/version"))[1])


async def test_a_request_id_is_given_back_and_logged(talk: Talk, server: RunningServer) -> None:
    async with talk.session.get("/v1/models", headers={"X-Request-Id": "mine-1"}) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
    async with talk.session.get("/v1/models", headers={"X-Request-Id": "not mine <script>"}) as response:
        assert len(response.headers["X-Request-Id"]) == 32
    await talk.complete("a very secret prompt", max_tokens=1)
    assert '"request_id": "mine-1"' in server.log
    assert '"prompt_tokens": 20, "completion_tokens": 1' in server.log
    assert "very secret" not in server.log


async def test_metrics_are_true_at_rest(talk: Talk) -> None:
    before = await talk.until_idle()
    await talk.complete("Hello there", **GREEDY)
    after = await talk.until_idle()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:generation_tokens_total") == 24
    assert grown("vllm:prompt_tokens_total") == 11
    assert grown('vllm:request_success_total{finished_reason="length"}') == 1
    assert grown("vllm:inter_token_latency_seconds_count") == 23
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown(f"vllm:{name}_seconds_count") == 1
    states = [after[f'pagefleet_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "used")]
    assert sum(states) == after["pagefleet_kv_blocks_total"] == 256 and states[2] == 0
    assert after["vllm:kv_cache_usage_perc"] == after["pagefleet_kv_blocks_waiting"] == 0
    some = await talk.metrics("vllm:num_requests_running", "vllm:request_success_total")
    assert {name.partition("{")[0] for name in some} == {"vllm:num_requests_running", "vllm:request_success_total"}


def test_the_openai_client_works(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        whole = client.completions.create(model=NAME, prompt="Hello", temperature=0, max_tokens=8)
        with client.completions.create(model=NAME, prompt="Hello", temperature=0, max_tokens=8, stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        chat = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Hi"}], temperature=0, max_completion_tokens=8
        )
        with client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Hi"}],
            temperature=0,
            max_completion_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        ) as chunks:
            seen = list(chunks)
        assert "".join(c.choices[0].delta.content or "" for c in seen if c.choices) == chat.choices[0].message.content
        assert seen[-1].usage is not None and chat.usage is not None
        assert seen[-1].usage.completion_tokens == chat.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="context is 256 tokens"):
            client.completions.create(model=NAME, prompt="Hello", max_tokens=1000)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="Hello")


async def test_the_async_openai_client_works(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:

        async def ask(text: str) -> str:
            stream = await client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*(ask(text) for text in "abcdefgh"))
        assert together == [await ask(text) for text in "abcdefgh"], "neighbours change nothing"


async def test_probes_answer_while_long_prompts_are_tokenised(talk: Talk) -> None:
    """A prompt of megabytes once froze the health endpoint for half a minute."""
    body = json.dumps({"prompt": "word " * 700_000}).encode()
    json_type = {"Content-Type": "application/json"}

    async def ask() -> int:
        async with talk.session.post("/v1/completions", data=io.BytesIO(body), headers=json_type) as response:
            return response.status

    tasks = [asyncio.create_task(ask()) for _ in range(4)]
    slowest = 0.0
    while not all(task.done() for task in tasks):
        begun = asyncio.get_running_loop().time()
        assert (await talk.get("/livez"))[0] == 200
        slowest = max(slowest, asyncio.get_running_loop().time() - begun)
    assert [task.result() for task in tasks] == [400] * 4
    assert slowest < 5.0, "client and server share this machine"
