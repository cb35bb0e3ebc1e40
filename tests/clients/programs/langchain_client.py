"""langchain-openai against a server: BASE_URL as the first argument. Prints what it did as JSON."""

import asyncio
import importlib.metadata
import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    continent: Literal["Europe", "Asia", "Africa"]
    is_capital: bool


@tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def main() -> None:
    """Plain, streamed, batched, asynchronous, with tools, structured."""
    base_url = sys.argv[1]
    chat = ChatOpenAI(model="m", base_url=base_url, api_key="none", temperature=0, max_tokens=60, max_retries=0)
    question = [SystemMessage("Be short."), HumanMessage("What is the capital of France?")]
    answer = chat.invoke(question)
    assert "Paris" in answer.content and answer.usage_metadata["total_tokens"] > 0, answer
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(chunk.content for chunk in chat.stream(question)) == answer.content
    assert [one.content for one in chat.batch([question] * 8)] == [answer.content] * 8
    assert asyncio.run(chat.ainvoke(question)).content == answer.content
    forced = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Rome?")
    assert forced.tool_calls[0]["name"] == "get_weather" and "city" in forced.tool_calls[0]["args"], forced
    back = [HumanMessage("Weather in Rome?"), forced, ToolMessage("sunny", tool_call_id=forced.tool_calls[0]["id"])]
    assert isinstance(chat.bind_tools([get_weather]).invoke(back).content, str)
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(City, method=method).invoke("Paris has two million inhabitants.")
        assert isinstance(found, City), (method, found)
    counted = chat.with_config({}).bind(logprobs=True).invoke("Hi")
    assert counted.response_metadata["logprobs"]["content"]
    text = OpenAI(model="m", base_url=base_url, api_key="none", temperature=0, max_tokens=8, max_retries=0)
    assert "5" in text.invoke("1, 2, 3, 4,")
    assert "".join(text.stream("1, 2, 3, 4,")) == text.invoke("1, 2, 3, 4,")
    print(json.dumps({"version": importlib.metadata.version("langchain-openai")}))


if __name__ == "__main__":
    main()
