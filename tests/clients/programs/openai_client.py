"""The openai package against a server: BASE_URL as the first argument. Prints what it did as JSON."""

import asyncio
import importlib.metadata
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

MODEL = "m"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """What structured output has to look like."""

    continent: Literal["Europe", "Asia", "Africa"]
    is_capital: bool


def chats(client: openai.OpenAI) -> None:
    """Plain, streamed, several, with log-probabilities."""
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=20)
    text = answer.choices[0].message.content
    assert text and "Paris" in text, text
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0, max_tokens=20) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == text
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == text and usage is not None and usage == answer.usage
    several = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, seed=5, max_completion_tokens=8, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for choice in several.choices:
        assert choice.logprobs and choice.logprobs.content
        assert all(len(token.top_logprobs) >= 3 for token in choice.logprobs.content)


def completions(client: openai.OpenAI) -> None:
    """Text, token ids, lists, echo with log-probabilities, stop strings."""
    one = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=8, logprobs=2)
    assert one.choices[0].logprobs and one.choices[0].logprobs.tokens
    assert "5" in one.choices[0].text
    two = client.completions.create(model=MODEL, prompt=["1, 2, 3, 4,", "A, B, C,"], temperature=0, max_tokens=8)
    assert two.choices[0].text == one.choices[0].text and len(two.choices) == 2
    ids = client.completions.create(model=MODEL, prompt=[[10, 20, 30]], temperature=0, max_tokens=3, echo=True)
    assert ids.usage and ids.usage.prompt_tokens == 3
    cut = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=30, stop=[" 7"])
    assert cut.choices[0].finish_reason == "stop" and "7" not in cut.choices[0].text
    streamed = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=8, stream=True)
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == one.choices[0].text


def tools(client: openai.OpenAI) -> None:
    """A forced call, whole and streamed, and its answer fed back."""
    ask: Any = {"model": MODEL, "messages": QUESTION, "tools": [TOOL], "temperature": 0, "max_tokens": 80}
    choices: Any = ("required", {"type": "function", "function": {"name": "get_weather"}})
    for choice in choices:
        answer = client.chat.completions.create(tool_choice=choice, **ask)
        calls = answer.choices[0].message.tool_calls
        assert calls and len(calls) == 1, answer
        found: Any = calls[0]
        arguments = json.loads(found.function.arguments)
        assert found.function.name == "get_weather" and arguments["unit"] in ("C", "F") and "city" in arguments
        assert answer.choices[0].finish_reason == "tool_calls", answer
    with client.chat.completions.stream(tool_choice="required", **ask) as stream:
        for _ in stream:
            pass
        final: Any = stream.get_final_completion().choices[0].message.tool_calls
        assert json.loads(final[0].function.arguments) == arguments
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [found.model_dump()]},
        {"role": "tool", "tool_call_id": found.id, "content": "21 degrees"},
    ]
    end = client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], tool_choice="none", max_tokens=8)
    assert end.choices[0].message.tool_calls is None


def structured(client: openai.OpenAI) -> None:
    """parse() with a pydantic model, json_object, and a regex by extra_body."""
    parsed = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=City, temperature=0, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, City), parsed
    free = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Give me a small JSON object."}],
        response_format={"type": "json_object"},
        extra_body={"structured_outputs": None},
        max_tokens=400,
        temperature=0,
    )
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content or ""), dict)
    regex = client.completions.create(
        model=MODEL, prompt="Phone:", max_tokens=20, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}
    )
    assert len(regex.choices[0].text) == 8, regex


def errors(client: openai.OpenAI) -> None:
    """Each kind is the exception that the package has for it."""
    faults: Any = (
        (openai.NotFoundError, {"model": "other", "messages": QUESTION}),
        (openai.BadRequestError, {"model": MODEL, "messages": QUESTION, "temperature": -1}),
        (openai.BadRequestError, {"model": MODEL, "messages": []}),
        (openai.BadRequestError, {"model": MODEL, "messages": QUESTION, "max_tokens": 10**9}),
    )
    for kind, ask in faults:
        try:
            client.chat.completions.create(**ask)
        except kind as error:
            assert isinstance(error, openai.APIStatusError) and error.body, error
        else:
            raise AssertionError(f"{ask}: no {kind.__name__}")
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


async def together(base_url: str) -> int:
    """48 streams at once, a third of which leave after a few tokens."""
    async with openai.AsyncOpenAI(base_url=base_url, max_retries=0, timeout=280) as client:

        async def one(index: int) -> int:
            messages: Any = [{"role": "user", "content": f"Count from {index} to 20."}]
            pieces = 0
            stream = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, stream=True)
            async with stream:
                async for _ in stream:
                    pieces += 1
                    if index % 3 == 0 and pieces == 4:
                        break
            assert pieces
            return pieces

        return sum(await asyncio.gather(*(one(index) for index in range(48))))


def main() -> None:
    """All of it; the first fault ends it."""
    base_url = sys.argv[1]
    client = openai.OpenAI(base_url=base_url, max_retries=0, timeout=280)
    done = []
    for part in (chats, completions, tools, structured, errors):
        part(client)
        done.append(part.__name__)
    pieces = asyncio.run(together(base_url))
    print(json.dumps({"version": importlib.metadata.version("openai"), "parts": done, "streamed_events": pieces}))


if __name__ == "__main__":
    main()
