"""Grammars are built in a process that can be ended: none holds the server or the engine for long."""

import asyncio
import json
from collections.abc import AsyncIterator

import psutil
import pytest

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.grammar_worker import MAX_GRAMMARS, GrammarCompiler

LINKED_LIST = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}},
    "$ref": "#/$defs/n",
}
LAUGHS = {
    f"l{i}": {"type": "object", "properties": {n: {"$ref": f"#/$defs/l{i + 1}"} for n in "ab"}} for i in range(40)
}


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(wall_seconds=120)
    yield compiler
    await compiler.close()


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "grammar_worker" in " ".join(child.cmdline())]


async def test_honest_grammars_are_built_and_remembered(compiler: GrammarCompiler) -> None:
    recursive = await compiler.compile("json", json.dumps(LINKED_LIST))
    assert await compiler.compile("json", json.dumps(LINKED_LIST)) is recursive
    for kind, source in (
        ("regex", "[a-z]+(x|y){2,5}"),
        ("regex", "(a{1,1000}){1,1000}"),
        ("choice", json.dumps(['a "b" \\', "漢", "line\nbreak"])),
        ("grammar", "start: /a/"),
        ("json", '{"type": "integer", "multipleOf": 100}'),
        ("json", json.dumps({"$defs": LAUGHS | {"l40": {"type": "string"}}, "$ref": "#/$defs/l0"})),
    ):
        assert await compiler.compile(kind, source)
    (worker,) = workers()
    for number in range(MAX_GRAMMARS):
        await compiler.compile("regex", f"a{{{number + 1}}}")
    assert await compiler.compile("json", json.dumps(LINKED_LIST)) == recursive, "forgotten, and built again"
    assert workers() == [worker]


@pytest.mark.parametrize(
    ("kind", "source", "want_words"),
    [
        ("regex", "(", "regex"),
        ("json", '{"$ref": "#"}', "no text can ever be complete"),
        ("regex", r"[^\s\S]", "no text can ever be complete"),
        ("grammar", "root ::= root", "no text can ever be complete"),
        ("json", '{"$ref": "file:///etc/passwd"}', "not present"),
        ("json", '{"items":' * 2000 + "{}" + "}" * 2000, "recursion"),
        ("json", '{"type": "integer", "multipleOf": 10000019}', "takes too long"),
        pytest.param(
            *("json", json.dumps({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), "takes too long"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("grammar", 'start: %json {"type": "integer", "multipleOf": 10000019}', "takes too long"),
            marks=pytest.mark.long,
        ),
    ],
)
async def test_what_cannot_be_built_or_costs_too_much_is_refused_and_the_next_one_served(
    compiler: GrammarCompiler, kind: str, source: str, want_words: str
) -> None:
    """A schema of twenty characters kept the library busy for minutes, and the engine with it."""
    with pytest.raises(BadRequestError, match=want_words) as refused:
        await compiler.compile(kind, source)
    assert refused.value.code == "invalid_grammar" and len(str(refused.value)) < 400
    assert await compiler.compile("regex", "a+")


async def test_what_is_known_waits_for_nobodys_new_grammar(compiler: GrammarCompiler) -> None:
    """One client with a grammar that takes seconds held up everybody's, also those that had long been built."""
    known = await compiler.compile("choice", '["yes", "no"]')
    with pytest.raises(BadRequestError, match="unclosed group"):
        await compiler.compile("regex", "(")
    with pytest.raises(BadRequestError, match="takes too long"):
        await compiler.compile("json", '{"type": "integer", "multipleOf": 10000019}')
    async with asyncio.timeout(20), compiler._lock:  # somebody's is being built
        assert await compiler.compile("choice", '["yes", "no"]') == known
        with pytest.raises(BadRequestError, match="unclosed group"):
            await compiler.compile("regex", "(")
        with pytest.raises(BadRequestError, match="takes too long"):
            await compiler.compile("json", '{"type": "integer", "multipleOf": 10000019}')


async def test_a_client_that_leaves_takes_no_answer_from_the_next_one(compiler: GrammarCompiler) -> None:
    await compiler.compile("regex", "a")
    task = asyncio.create_task(compiler.compile("json", '{"type": "integer", "multipleOf": 10000019}'))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "b" in await compiler.compile("regex", "b")
    assert len(workers()) == 1


async def test_time_is_bounded_by_the_wall_as_well() -> None:
    compiler = GrammarCompiler(wall_seconds=0.001)
    with pytest.raises(BadRequestError, match="takes too long"):
        await compiler.compile("regex", "a")
    assert workers() == []
