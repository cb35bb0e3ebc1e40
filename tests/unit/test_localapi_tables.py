"""Printer columns: ages, paths, and the cells of built-in kinds."""

from typing import Any

import pytest

from pagefleet_localcluster.api import pod_columns
from pagefleet_localcluster.api.json_paths import find, parse_path
from pagefleet_localcluster.api.resources import builtin_resources
from pagefleet_localcluster.api.tables import age, columns_of, row_of
from pagefleet_localcluster.objects import format_time

NOW = 1_800_000_000.0
DAY = 86400


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (0, "0s"), (119, "119s"), (120, "2m"), (185, "3m5s"), (600, "10m"), (3 * 3600 - 1, "179m"), (3 * 3600, "3h"),
        (5 * 3600 + 60, "5h1m"), (8 * 3600 + 60, "8h"), (47 * 3600, "47h"), (2 * DAY, "2d"), (3 * DAY + 3600, "3d1h"),
        (8 * DAY, "8d"), (700 * DAY, "700d"), (731 * DAY, "2y1d"), (3 * 365 * DAY, "3y"), (-1, "0s"),
        (-10, "<invalid>"),
    ],
)  # fmt: skip
def test_ages_are_shortened_as_kubectl_does(seconds: int, want: str) -> None:
    assert age(format_time(NOW - seconds), NOW) == want


@pytest.mark.parametrize("text", [None, "", "yesterday", 7])
def test_what_is_no_time_has_an_unknown_age(text: Any) -> None:
    assert age(text, NOW) == "<unknown>"


@pytest.mark.parametrize(
    ("path", "want"),
    [
        (".spec.replicas", [3]),
        ("spec.replicas", [3]),
        (".spec.missing", []),
        (".items[0].name", ["a"]),
        (".items[-1].name", ["b"]),
        (".items[7].name", []),
        (".items[*].name", ["a", "b"]),
        ('.items[?(@.name=="b")].value', [2]),
        (r".meta.a\.b/c", ["dotted"]),
        ("['meta']['a.b/c']", ["dotted"]),
    ],
)
def test_paths_of_columns(path: str, want: list[Any]) -> None:
    obj = {
        "spec": {"replicas": 3},
        "items": [{"name": "a", "value": 1}, {"name": "b", "value": 2}],
        "meta": {"a.b/c": "dotted"},
    }
    assert find(obj, path) == want


@pytest.mark.parametrize("path", ["..a", ".a[", ".a[?(@.b)]", ".a["])
def test_paths_that_are_not_understood(path: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        parse_path(path)


@pytest.mark.parametrize("resource", builtin_resources(), ids=lambda resource: str(resource.qualified))
def test_every_builtin_kind_has_a_cell_for_every_column(resource: Any) -> None:
    obj = {"metadata": {"name": "n", "creationTimestamp": format_time(NOW - 5)}, "spec": {}, "roleRef": {}}
    cells = row_of(resource, obj, NOW)
    assert len(cells) == len(columns_of(resource))


def _pod(phase: str = "Running", **more: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "a"}, {"name": "b"}]} | more.pop("spec", {})
    return {"metadata": more.pop("metadata", {}), "spec": spec, "status": {"phase": phase} | more}


RUNNING: dict[str, Any] = {"running": {}}
CRASHED: dict[str, Any] = {"waiting": {"reason": "CrashLoopBackOff"}}


@pytest.mark.parametrize(
    ("pod", "want"),
    [
        (_pod("Pending"), ("0/2", "Pending")),
        (_pod(reason="Evicted"), ("0/2", "Evicted")),
        (
            _pod(containerStatuses=[{"name": "a", "ready": True, "state": RUNNING}, {"name": "b", "state": CRASHED}]),
            ("1/2", "CrashLoopBackOff"),
        ),
        (
            _pod("Failed", containerStatuses=[{"name": "a", "state": {"terminated": {"exitCode": 3}}}]),
            ("0/2", "ExitCode:3"),
        ),
        (
            _pod("Failed", containerStatuses=[{"name": "a", "state": {"terminated": {"exitCode": 137, "signal": 9}}}]),
            ("0/2", "Signal:9"),
        ),
        (_pod(metadata={"deletionTimestamp": "x"}), ("0/2", "Terminating")),
        (
            _pod(
                "Pending",
                spec={"initContainers": [{"name": "i"}, {"name": "j"}]},
                initContainerStatuses=[
                    {"name": "i", "state": {"terminated": {"exitCode": 0}}},
                    {"name": "j", "state": RUNNING},
                ],
            ),
            ("0/2", "Init:1/2"),
        ),
        (
            _pod(
                spec={"initContainers": [{"name": "i", "restartPolicy": "Always"}]},
                initContainerStatuses=[{"name": "i", "ready": True, "started": True, "state": RUNNING}],
            ),
            ("1/3", "Running"),
        ),
    ],
)
def test_the_row_of_a_pod(pod: dict[str, Any], want: tuple[str, str]) -> None:
    assert (pod_columns.ready(pod, NOW), pod_columns.status(pod, NOW)) == want


def test_restarts_tell_how_long_ago() -> None:
    ended = {"terminated": {"finishedAt": format_time(NOW - 30)}}
    pod = _pod(containerStatuses=[{"name": "a", "restartCount": 2, "lastState": ended, "state": RUNNING}])
    assert pod_columns.restarts(pod, lambda at: age(at, NOW)) == "2 (30s ago)"
    assert pod_columns.restarts(_pod(), lambda at: age(at, NOW)) == "0"
