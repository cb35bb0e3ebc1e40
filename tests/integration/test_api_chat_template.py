"""Chat templates are rendered as transformers renders them, and cannot reach out of their sandbox."""

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagefleet_server.api.chat_template import ChatTemplate
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.gguf_metadata import read_gguf_metadata
from support.smollm2 import smollm2_gguf

MESSAGES = [
    {"role": "system", "content": "Be <kind> & short."},
    {"role": "user", "content": "  Héllo \n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "漢字?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}]
TEMPLATES = {
    "blocks and trimming": "{%- for m in messages %}\n  {{ m.role }}: {{ m.content | trim }}\n{%- endfor %}\n",
    "tojson keeps characters": "{{ tools | tojson }}|{{ messages | tojson(indent=2) }}",
    "special tokens": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation blocks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "undefined is empty": "[{{ nothing }}]{% if not nothing is defined %}none{% endif %}",
    "generation prompt": "{{ messages[-1].content }}{% if add_generation_prompt %}<assistant>{% endif %}",
    "variables": "{{ enable_thinking }}{{ documents | length }}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}
VARIABLES: dict[str, Any] = {"enable_thinking": False}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, special_tokens=TOKENS, now=lambda: datetime(2026, 1, 2))
    return template.render(MESSAGES if messages is None else messages, **options)


def oracle(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    call: Any = render_jinja_template
    chosen = {"add_generation_prompt": True, **TOKENS, **options}
    rendered, _ = call(conversations=[MESSAGES if messages is None else messages], chat_template=source, **chosen)
    return str(rendered[0])


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_render_as_in_transformers(source: str) -> None:
    want = oracle(source, tools=TOOLS, documents=[{"text": "x"}], **VARIABLES)
    assert render(source, tools=TOOLS, documents=[{"text": "x"}], variables=VARIABLES) == want


def test_the_real_models_template_renders_as_in_transformers() -> None:
    source = read_gguf_metadata(smollm2_gguf()).get_str("tokenizer.chat_template")
    assert source is not None
    for messages in (MESSAGES, MESSAGES[1:2]):
        assert render(source, messages) == oracle(source, messages)


@pytest.mark.parametrize("content", ["Well, ", "Well", "  Well  "])
def test_a_continued_message_ends_as_in_transformers(content: str) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **options) == oracle(source, messages, **options)


def test_the_date_comes_from_the_clock() -> None:
    assert render("{{ strftime_now('%d %B %Y') }}") == "02 January 2026"


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages + 1 }}", "list"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_requests_fault(source: str, want: str) -> None:
    with pytest.raises(BadRequestError, match=want):
        render(source)


def test_messages_too_deep_for_a_recursive_template_are_the_requests_fault() -> None:
    nested: Any = []
    for _ in range(190):
        nested = [nested]
    walk = "{% macro walk(x) %}{% for y in x %}({{ walk(y) | trim | string | upper }}){% endfor %}{% endmacro %}"
    with pytest.raises(BadRequestError, match="nested too deeply"):
        render(walk + "{{ walk(tools) }}", tools=[[nested] * 2] if nested else [])
    with pytest.raises(BadRequestError, match="nested too deeply"):
        render("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")


def test_a_broken_template_is_told_at_once() -> None:
    with pytest.raises(BadRequestError, match="cannot be used"):
        ChatTemplate("{% if %}", special_tokens={})


def test_only_a_template_that_uses_tools_takes_them() -> None:
    assert ChatTemplate("{{ tools }}", special_tokens={}).takes_tools
    assert not ChatTemplate("{{ messages }} no tools here {# tools #}", special_tokens={}).takes_tools
