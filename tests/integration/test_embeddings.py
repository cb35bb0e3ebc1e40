"""/v1/embeddings: openai's client against a real server with a tiny random model, compared with transformers."""

import base64
import json
import random
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
from transformers import AutoModel, PreTrainedModel

from pagefleet_server.model_errors import ModelRefused
from pagefleet_server.models.pooling import pooling_of
from pagefleet_server.settings import ModelSettings
from support.api_server import RunningServer, Talk, poll, running
from support.tiny_models import BOS_ID, VOCAB_SIZE, byte_tokenizer, write_tiny_llama

NAME = "vectors"
CONTEXT = 96
CHUNK = 16
"""Tokens of a step: prompts are computed in parts."""


def declare(path: Path, mode: str, *, modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize")) -> Path:
    """As sentence-transformers writes it."""
    listed = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}", "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(modules)
    ]
    path.mkdir(parents=True, exist_ok=True)
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_llama(tmp_path_factory.mktemp("embeddings") / "model", max_positions=CONTEXT)
    return declare(path, "mean_tokens")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    command = [sys.executable, "-m", "pagefleet_server.main", "--model", str(model), "--served-model-name", NAME]
    command += ["--port", "0", "--num-kv-blocks", "64", "--threads", "1", "--dtype", "float32", "--drain-delay", "0"]
    command += ["--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"]
    with running(command, model.parent / "server.log", {"OMP_NUM_THREADS": "1"}) as started:
        started.wait_listening()
        poll(lambda: "ready after" in started.log, started, "it is ready")
        yield started


@pytest.fixture
async def talk(server: RunningServer) -> AsyncIterator[Talk]:
    async with aiohttp.ClientSession(server.base_url) as session:
        yield Talk(server, session)


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def oracle(model: Path) -> PreTrainedModel:
    loaded = AutoModel.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(loaded, PreTrainedModel)
    return loaded


@torch.inference_mode()
def wanted(oracle: PreTrainedModel, token_ids: list[int], *, dimensions: int | None = None) -> torch.Tensor:
    states = oracle(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0)[:dimensions], dim=0)


def worst(got: list[float], want: torch.Tensor) -> float:
    return float((torch.tensor(got) - want).abs().max())


def encode(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


TEXTS = ["a", "Hello world", "x" * CONTEXT, "the same", "the same", "ab " * 20, "é€", "0", "last one of nine"]


def test_texts_give_transformers_vectors(client: openai.OpenAI, oracle: PreTrainedModel) -> None:
    """Longer than a step, more than run at once, the longest that fits; the client asks for base64 by itself."""
    answer = client.embeddings.create(model=NAME, input=TEXTS)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    for text, item in zip(TEXTS, answer.data, strict=True):
        assert worst(item.embedding, wanted(oracle, encode(text))) <= 1e-5
    num_tokens = sum(len(encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (num_tokens, num_tokens, NAME)


def test_every_shape_of_input(client: openai.OpenAI, oracle: PreTrainedModel) -> None:
    rng = random.Random(0)
    first, second = ([rng.randrange(3, 250) for _ in range(count)] for count in (40, 7))
    for given, want in (("Hello", [encode("Hello")]), (first, [first]), ([first, second], [first, second])):
        answer = client.embeddings.create(model=NAME, input=given, encoding_format="float")
        assert len(answer.data) == len(want)
        for item, token_ids in zip(answer.data, want, strict=True):
            assert worst(item.embedding, wanted(oracle, token_ids)) <= 1e-5


def test_dimensions_cut_and_norm_again(client: openai.OpenAI, oracle: PreTrainedModel) -> None:
    answer = client.embeddings.create(model=NAME, input="Hello", dimensions=7)
    assert worst(answer.data[0].embedding, wanted(oracle, encode("Hello"), dimensions=7)) <= 1e-5


async def test_both_encodings_are_the_same_numbers(talk: Talk) -> None:
    plain, packed = [await post(talk, input="Hello", encoding_format=name) for name in ("float", "base64")]
    data = base64.b64decode(packed["data"][0]["embedding"])
    values = plain["data"][0]["embedding"]
    assert struct.unpack(f"<{len(values)}f", data) == pytest.approx(values, abs=0)
    assert sum(value * value for value in values) == pytest.approx(1.0)


async def test_a_hundred_at_once_are_what_they_are_alone(talk: Talk, client: openai.OpenAI) -> None:
    texts = [f"text {number} " * (number % 7 + 1) for number in range(100)]
    together = client.embeddings.create(model=NAME, input=texts, encoding_format="float")
    for number in range(0, 100, 9):
        alone = await post(talk, input=texts[number])
        assert together.data[number].embedding == pytest.approx(alone["data"][0]["embedding"], abs=1e-6)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "no tokens"),
        ({"input": ["a", ""]}, "no tokens"),
        ({"input": [[]]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [VOCAB_SIZE]}, "not in the vocabulary"),
        ({"input": [-1]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [BOS_ID] * (CONTEXT + 1)}, f"context is {CONTEXT} tokens; an input has {CONTEXT + 1}"),
        ({"input": "x" * (CONTEXT + 1)}, f"context is {CONTEXT} tokens; an input has {CONTEXT + 1}"),
        ({"input": "a" * 100_000}, "context"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 49}, "embeddings have 48"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "timeout": 0}, "timeout"),
    ],
)
async def test_bad_input_is_refused(talk: Talk, body: dict[str, Any], want: str) -> None:
    async with talk.session.post("/v1/embeddings", json={"model": NAME, **body}) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert want in json.dumps(answer["error"])


async def test_it_makes_no_texts(talk: Talk) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        async with talk.session.post(path, json=body) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (400, "no_texts")


async def test_metrics_count_prompts_and_nothing_is_held(talk: Talk) -> None:
    before = await metrics(talk)
    await post(talk, input=["four", "seven77"])
    after = await metrics(talk)
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 11
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


async def post(talk: Talk, **body: Any) -> dict[str, Any]:
    async with talk.session.post("/v1/embeddings", json=body) as response:
        answer: dict[str, Any] = await response.json()
    assert response.status == 200, answer
    return answer


async def metrics(talk: Talk) -> dict[str, float]:
    async with talk.session.get("/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize(
    ("mode", "setting", "want"),
    [
        ("mean_tokens", "auto", "mean"),
        ("lasttoken", "auto", "last"),
        ("lasttoken", "mean", "mean"),
        ("mean_tokens", "none", None),
    ],
)
def test_checkpoint_says_the_kind_and_the_flag_overrides(
    tmp_path: Path, mode: str, setting: str, want: str | None
) -> None:
    assert pooling_of(ModelSettings(model=str(declare(tmp_path, mode)), pooling=setting)) == want


def test_model_without_declaration_makes_texts(tmp_path: Path) -> None:
    assert pooling_of(ModelSettings(model=str(tmp_path))) is None


@pytest.mark.parametrize(
    ("mode", "modules", "want"),
    [
        ("cls_token", ("Transformer", "Pooling"), "pooling cls_token"),
        ("none at all", ("Transformer", "Pooling"), "of no kind"),
        ("mean_tokens", ("Transformer", "Pooling", "Dense", "Normalize"), "Dense"),
        ("mean_tokens", ("Transformer",), "no pooling"),
    ],
)
def test_embeddings_that_would_be_wrong_are_refused(
    tmp_path: Path, mode: str, modules: tuple[str, ...], want: str
) -> None:
    with pytest.raises(ModelRefused, match=want):
        pooling_of(ModelSettings(model=str(declare(tmp_path, mode, modules=modules))))
