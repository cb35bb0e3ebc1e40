"""The embedded API answers every recorded exchange as a real kube-apiserver 1.36.2 did, but for listed differences."""

import asyncio
import fnmatch
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from support.cluster_targets import embedded_cluster
from support.localapi import RECORDED, VIEWER_TOKEN
from support.recorded_differences import DIFFERENCES, REFUSED_CRDS
from support.recordings import Difference, Json, Recording, Replay, load

FOLDER = RECORDED / "1.36.2"
# In the order of the recording: later topics see the objects of earlier ones.
TOPICS = (
    "crd", "crd_refused", "status_scale", "patch", "apply", "list_watch", "delete", "workload", "lease_events_rbac",
    "discovery",
)  # fmt: skip
RECORDINGS = [load(FOLDER, topic) for topic in TOPICS]
STEPS = [(recording.topic, step["name"]) for recording in RECORDINGS for step in recording.steps]
# The recorder waited for the controllers at these steps; the replay asks again until they are done.
WAIT_SECONDS = 5.0
START_SECONDS = 1_800_000_000.0
Found = dict[tuple[str, str], list[Difference]]


async def _ask(session: aiohttp.ClientSession, url: str, token: str, step: Json, replay: Replay) -> Json:
    asked = replay.fill(step["request"])
    tokens = {None: token, "viewertoken": VIEWER_TOKEN}
    bearer = tokens.get(asked.get("as"), str(asked.get("as")))
    headers = {"Authorization": f"Bearer {bearer}", "User-Agent": "Python/3", "Accept": asked.get("accept", "*/*")}
    body = asked.get("body")
    if body is not None:
        headers["Content-Type"] = asked["content_type"]
        body = body if isinstance(body, str) else json.dumps(body)
    query = asked.get("query") or {}
    async with session.request(
        asked["method"], url + asked["path"], params=query, headers=headers, data=body
    ) as response:
        if query.get("watch") and response.status == 200:
            return {"status": 200, "events": await _events(response, float(query.get("timeoutSeconds") or 0.5))}
        text = await response.text()
        parsed = json.loads(text) if text.startswith(("{", "[")) else text
        warning = {"Warning": response.headers["Warning"]} if "Warning" in response.headers else {}
        return {"status": response.status, "body": parsed} | warning


async def _events(response: aiohttp.ClientResponse, seconds: float) -> list[Any]:
    found = []
    try:
        async with asyncio.timeout(seconds + 1):
            async for line in response.content:
                found.append(json.loads(line))
    except TimeoutError:
        pass
    return found


def _recorded_answer(step: Json) -> Json:
    response = step["response"]
    answer = {key: response[key] for key in ("status", "body", "events") if key in response}
    warning = (response.get("headers") or {}).get("Warning")
    return answer | ({"Warning": warning} if warning else {})


def _unlisted(topic: str, step: Json, differences: list[Difference]) -> list[Difference]:
    patterns = [
        pattern for (name, pattern), _ in DIFFERENCES.items() if fnmatch.fnmatchcase(f"{topic}/{step['name']}", name)
    ]
    return [d for d in differences if not any(fnmatch.fnmatchcase(d.path, pattern) for pattern in patterns)]


def _comparable(topic: str, step: Json, answer: Json) -> Json:
    """An answer in an order that does not hang on generated names; of discovery, what both know."""
    body = answer.get("body")
    if topic == "workload" and isinstance(body, dict) and isinstance(body.get("items"), list):
        images = [json.dumps(item.get("spec", {}).get("containers", item.get("spec"))) for item in body["items"]]
        order = sorted(range(len(images)), key=lambda i: ("img:1" in images[i], body["items"][i]["metadata"]["name"]))
        return answer | {"body": body | {"items": [body["items"][i] for i in order]}}
    return answer


def _identity(item: Any) -> str:
    if not isinstance(item, dict):
        return ""
    return str(item.get("name") or item.get("resource") or (item.get("metadata") or {}).get("name") or "")


def _known(want: Any, got: Any) -> tuple[Any, Any]:
    """Of two discovery documents, what both know, lists in one order: a real server serves more resources."""
    if isinstance(want, dict) and isinstance(got, dict):
        if "paths" in want and "openapi" not in want:
            want = want | {"paths": {key: value for key, value in want["paths"].items() if key in got["paths"]}}
        pairs = {key: _known(want[key], got[key]) for key in want if key in got}
        return (
            want | {key: pair[0] for key, pair in pairs.items()},
            got | {key: pair[1] for key, pair in pairs.items()},
        )
    if isinstance(want, list) and isinstance(got, list) and all(map(_identity, [*want, *got])):
        names = {_identity(item) for item in want} & {_identity(item) for item in got}
        ours = sorted((item for item in got if _identity(item) in names), key=_identity)
        theirs = sorted((item for item in want if _identity(item) in names), key=_identity)
        found = [_known(one, other) for one, other in zip(theirs, ours, strict=True)]
        return [pair[0] for pair in found], [pair[1] for pair in found]
    return want, got


async def _replay(recording: Recording, session: aiohttp.ClientSession, url: str, token: str, found: Found) -> None:
    loop = asyncio.get_running_loop()
    replay = Replay()
    for step in recording.steps:
        if recording.topic == "crd_refused":
            step = step | {"request": step["request"] | {"body": REFUSED_CRDS[step["name"]]()}}
        asked = step["request"]
        repeatable = asked["method"] == "GET" and "watch" not in (asked.get("query") or {})
        end = loop.time() + WAIT_SECONDS
        while True:
            attempt = Replay(dict(replay.values))
            got = _comparable(recording.topic, step, await _ask(session, url, token, step, attempt))
            want = _comparable(recording.topic, step, _recorded_answer(step))
            if "discovery" in recording.topic + step["name"]:
                want, got = _known(want, got)
            differences = _unlisted(recording.topic, step, list(attempt.compare(want, got)))
            if not differences or not repeatable or loop.time() > end:
                break
            await asyncio.sleep(0.05)
        replay = attempt
        found[recording.topic, step["name"]] = differences


@pytest.fixture(scope="module")
def answers() -> Iterator[Found]:
    found: Found = {}

    async def run(url: str, token: str, topics: list[Recording]) -> None:
        async with aiohttp.ClientSession(skip_auto_headers=("Content-Type", "User-Agent")) as session:
            if topics[0].topic != "crd":  # which creates the namespace of all recordings
                headers = {"Authorization": f"Bearer {token}"}
                body = {"metadata": {"name": "rec"}}
                async with session.post(f"{url}/api/v1/namespaces", json=body, headers=headers) as response:
                    assert response.status == 201
            for recording in topics:
                await _replay(recording, session, url, token, found)

    # What controllers write at their own pace would make the answers of all other topics a matter of chance.
    for controllers in (False, True):
        topics = [recording for recording in RECORDINGS if (recording.topic == "workload") is controllers]
        # Of several managers the earlier stands first; a clock that stands makes every run of a slow machine the same.
        clock = time.time if controllers else lambda: START_SECONDS
        with embedded_cluster(controllers=controllers, clock=clock) as kubeconfig:
            asyncio.run(run(kubeconfig.server, kubeconfig.token or "", topics))
    yield found


@pytest.mark.parametrize(("topic", "name"), STEPS, ids=[f"{topic}: {name}" for topic, name in STEPS])
def test_answers_as_recorded(answers: Found, topic: str, name: str) -> None:
    assert [str(difference) for difference in answers[topic, name]] == []


def test_every_listed_difference_has_a_reason_and_a_step() -> None:
    for (name, _), reason in DIFFERENCES.items():
        assert len(reason) > 10
        assert any(fnmatch.fnmatchcase(f"{topic}/{step}", name) for topic, step in STEPS), name
