"""litellm against a server: BASE_URL as the first argument. Prints what it did as JSON."""

import asyncio
import importlib.metadata
import json
import sys
from typing import Any, Literal

import litellm  # type: ignore[import-not-found]
from pydantic import BaseModel

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(BaseModel):
    """A city."""

    continent: Literal["Europe", "Asia", "Africa"]
    is_capital: bool


def main() -> None:
    """As an OpenAI server and as a vLLM server: plain, streamed, asynchronous, tools, structured, errors."""
    base_url = sys.argv[1]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    for provider in ("openai/m", "hosted_vllm/m"):
        common: dict[str, Any] = {"model": provider, "api_base": base_url, "api_key": "none", "temperature": 0}
        common |= {"num_retries": 0, "timeout": 280}
        answer = litellm.completion(messages=question, max_tokens=20, **common)
        text = answer.choices[0].message.content
        assert "Paris" in text, text
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        options = {"include_usage": True}
        chunks = list(
            litellm.completion(messages=question, max_tokens=20, stream=True, stream_options=options, **common)
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        whole = litellm.stream_chunk_builder(chunks, messages=question)
        assert whole.usage.completion_tokens == answer.usage.completion_tokens, (whole.usage, answer.usage)
        assert (
            asyncio.run(litellm.acompletion(messages=question, max_tokens=20, **common)).choices[0].message.content
            == text
        )
        call = litellm.completion(messages=question, tools=[TOOL], tool_choice="required", max_tokens=60, **common)
        found = call.choices[0].message.tool_calls[0].function
        assert found.name == "get_weather" and "city" in json.loads(found.arguments), call
        shaped = litellm.completion(messages=question, response_format=City, max_tokens=100, **common)
        City.model_validate_json(shaped.choices[0].message.content)
        try:
            litellm.completion(messages=question, max_tokens=10**9, **common)
        except litellm.BadRequestError:  # ContextWindowExceededError is one
            pass
        else:
            raise AssertionError("an impossible length was accepted")
    text_model = litellm.text_completion(
        model="text-completion-openai/m",
        prompt="1, 2, 3, 4,",
        api_base=base_url,
        api_key="none",
        max_tokens=8,
        temperature=0,
    )
    assert "5" in text_model.choices[0].text
    print(json.dumps({"version": importlib.metadata.version("litellm")}))


if __name__ == "__main__":
    main()
