"""One request, many outputs: they differ in seed and length only, and share their rules."""

from types import MappingProxyType
from typing import Any, cast

import msgspec
import pytest

from pagefleet_server.api import sampling as sampling_module
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.planning import plan_choices
from pagefleet_server.api.protocol.completions import CompletionBody
from pagefleet_server.api.sampling import SEEDS, ModelFacts
from pagefleet_server.api.service import Loaded
from pagefleet_server.client.engine_client import check_request
from pagefleet_server.client.errors import RequestRefusedError
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.frames import HEADER_BYTES, encode_frame
from pagefleet_server.wire import AddRequests, Ready, ToEngine, read_samplings, write_samplings

READY = Ready(16, 100, 1000, [0], 50, "memory", {})
FACTS = ModelFacts(eos_token_ids=(0,), vocab_size=50)


def plan(prompts: list[list[int]], **fields: Any) -> list[SamplingParams]:
    loaded = Loaded(READY, cast("Any", None), MappingProxyType({}))
    body = CompletionBody(prompt=prompts, **fields)
    plans = plan_choices(
        loaded, body, [(prompt, None) for prompt in prompts], FACTS, wanted=body.max_tokens, default=16
    )
    assert [item.index for item in plans] == list(range(len(plans)))
    return [item.sampling for item in plans]


def test_outputs_share_their_rules_and_have_seeds_of_their_own() -> None:
    made = plan([[1], [2] * 990], n=3, seed=SEEDS - 2, allowed_token_ids=[3, 4, 3], logit_bias={"5": 1.0})
    assert [item.seed for item in made] == [SEEDS - 2, SEEDS - 1, 0] * 2
    assert [item.max_tokens for item in made] == [16] * 3 + [10] * 3, "each prompt has the room that it leaves"
    assert all(item.allowed_token_ids is made[0].allowed_token_ids for item in made)
    assert made[0].allowed_token_ids == (3, 4)


def test_each_prompt_must_leave_room_for_the_least_output() -> None:
    with pytest.raises(BadRequestError, match="min_tokens 12 is more than the 10 tokens"):
        plan([[1], [2] * 990], min_tokens=12)


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [1, 2, 3, 4, 5]}, {"logit_bias": {"1": 1, "2": 2, "3": 3}}])
def test_long_rules_are_not_repeated_for_any_number_of_prompts(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampling_module, "MAX_RULES", 21)
    assert len(plan([[1]] * 3, n=2, **fields)) == 6
    with pytest.raises(BadRequestError, match="send fewer prompts"):
        plan([[1]] * 4, **fields)


def test_the_rules_of_many_outputs_cross_to_the_engine_once() -> None:
    first = SamplingParams(max_tokens=5, allowed_token_ids=tuple(range(1000)), seed=7)
    alike = [msgspec.structs.replace(first, seed=seed) for seed in range(20)]
    odd = msgspec.structs.replace(first, max_tokens=6)
    samplings = [first, *alike, odd]
    message = AddRequests([str(number) for number in range(22)], [1], write_samplings(samplings), 0.0)
    frame = encode_frame(message)
    assert len(frame) < 3 * len(encode_frame(AddRequests(["0"], [1], [first], 0.0)))
    read = msgspec.msgpack.Decoder(ToEngine).decode(frame[HEADER_BYTES:])
    assert isinstance(read, AddRequests) and read_samplings(read.samplings) == samplings


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "told"),
    [
        ([], [1], "no tokens"),
        ([1, -1, 2], [1], "token id -1"),
        ([1, 50], [1], "token id 50"),
        ([1], [1, 0], "max_tokens is 0"),
        ([1] * 999, [1, 2], "the limit is 1000"),
    ],
)
def test_the_client_refuses_what_the_engine_could_never_run(
    prompt: list[int], max_tokens: list[int], told: str
) -> None:
    with pytest.raises(RequestRefusedError, match=told):
        check_request(prompt, [SamplingParams(max_tokens=count) for count in max_tokens], READY)
