"""The replay of recordings can fail: it sees every kind of difference, and only differences."""

from typing import Any

import pytest

from support.recordings import Replay
from support.transcripts import Transcript

UID = "5ac5daae-b69a-4f4b-a116-06a88839284a"


@pytest.mark.parametrize(
    ("want", "got", "path"),
    [
        ({"a": 1}, {"a": 2}, "a"),
        ({"a": 1}, {"a": True}, "a"),
        ({"a": 1}, {}, "a"),
        ({}, {"a": 1}, "a"),
        ({"a": [1]}, {"a": [1, 2]}, "a[]"),
        ({"a": [{"b": "x"}]}, {"a": [{"b": "y"}]}, "a[0].b"),
        ({"a": None}, {"a": {}}, "a"),
        ({"a": "code 1"}, {"a": "code 2"}, "a"),
        ({"a": "<uid-1> is here"}, {"a": "x was there"}, "a"),
    ],
)
def test_every_difference_is_found(want: Any, got: Any, path: str) -> None:
    [difference] = Replay().compare(want, got)
    assert difference.path == path
    assert path in str(difference)


def test_placeholders_are_learned_and_put_into_requests() -> None:
    replay = Replay()
    want = {"uid": "<uid-1>", "version": "<rv-1>", "text": "made <time> by <uid-1>", "age": "2s"}
    got = {"uid": UID, "version": "7", "text": f"made 2026-01-01T00:00:00Z by {UID}", "age": "30s"}
    assert list(replay.compare(want, got)) == []
    assert replay.fill({"path": "/x/<uid-1>", "n": 1, "list": ["<rv-1>"]}) == {
        "path": f"/x/{UID}",
        "n": 1,
        "list": ["7"],
    }
    [difference] = replay.compare({"uid": "<uid-1>"}, {"uid": UID.replace("5", "6")})
    assert difference.path == "uid"


def test_times_of_requests_move_on() -> None:
    replay = Replay()
    assert replay.fill("<time>") != replay.fill("<time>")


def test_transcripts_hold_nothing_of_the_run() -> None:
    transcript = Transcript()
    body = {
        "metadata": {"uid": UID, "resourceVersion": "7", "namespace": "contract-0123abcd"},
        "at": "2026-01-01T00:00:00Z",
    }
    for _ in range(2):
        transcript.add({"method": "GET", "path": "/a/contract-0123abcd"}, 200, body)
    [first, second] = transcript.normalised("topic")["steps"]
    assert first["response"]["body"] == {
        "metadata": {"uid": "<uid-1>", "resourceVersion": "<rv-1>", "namespace": "<name-1>"},
        "at": "<time>",
    }
    assert first["request"]["path"] == "/a/<name-1>"
    assert second["response"] == first["response"]
