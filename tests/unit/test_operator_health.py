"""The health server, its checks, and the command line."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from pagefleet_operator.errors import TooOldError
from pagefleet_operator.health import NUM_LAGS, Health
from pagefleet_operator.main import operator_settings, parse_arguments, wait_for_api
from pagefleet_operator.settings import ChildSettings
from pagefleet_operator.telemetry import Telemetry


@pytest_asyncio.fixture
async def health() -> AsyncIterator[tuple[Health, str]]:
    made = Health(Telemetry())
    port = await made.start("127.0.0.1", 0)
    yield made, f"http://127.0.0.1:{port}"
    await made.stop()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_standby_and_leader_are_ready_a_starting_one_is_not(health: tuple[Health, str]) -> None:
    made, url = health
    assert (await get(url + "/readyz"))[0] == 503
    made.role = "standby"
    assert (await get(url + "/readyz"))[0] == 200


async def test_liveness_fails_with_the_reason(health: tuple[Health, str]) -> None:
    made, url = health
    made.checks["watch"] = lambda: None
    assert (await get(url + "/livez"))[0] == 200
    made.checks["reconcile"] = lambda: "a change has waited 200 s"
    status, text = await get(url + "/livez")
    assert status == 503
    assert "a change has waited 200 s" in text


async def test_every_metric_is_there_at_zero(health: tuple[Health, str]) -> None:
    _, url = health
    status, text = await get(url + "/metrics")
    assert status == 200
    for line in (
        "pagefleet_operator_leader 0.0",
        'pagefleet_operator_reconciles_total{result="ok"} 0.0',
        'pagefleet_operator_scalings_total{direction="up"} 0.0',
        "pagefleet_operator_missed_watch_events_total 0.0",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("argv", "want"),
    [
        ([], ("team",)),
        (["--namespace", "a", "--namespace", "b", "--namespace", "a"], ("a", "b")),
        (["--all-namespaces"], ()),
    ],
)
def test_scope(argv: list[str], want: tuple[str, ...]) -> None:
    assert operator_settings(parse_arguments(argv), {}, "team").namespaces == want


def test_the_servers_image_comes_from_the_environment() -> None:
    arguments = parse_arguments([])
    assert operator_settings(arguments, {"PAGEFLEET_SERVER_IMAGE": "x:1"}, "d").children.server_image == "x:1"
    assert operator_settings(arguments, {}, "d").children == ChildSettings()
    assert ChildSettings().server_image.startswith("pagefleet/server:")


@pytest.mark.parametrize(
    "argv",
    [
        ["--listen", "nonsense"],
        ["--listen", "h:99999"],
        ["--lease-seconds", "1"],
        ["--namespace", "a", "--all-namespaces"],
    ],
)
def test_bad_flags_are_refused(argv: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argv)
    assert "pagefleet-operator: error" in capsys.readouterr().err


def test_a_loop_that_is_late_again_and_again_is_unhealthy_and_one_late_moment_is_not() -> None:
    made = Health(Telemetry())
    for _ in range(NUM_LAGS - 1):
        made.saw_lag(3.0)
    assert made.problems() == {}
    made.saw_lag(3.0)
    assert "at least 3.0 s late" in made.problems()["loop"]
    made.saw_lag(0.1)
    assert made.problems() == {}


async def test_an_api_server_that_is_too_old_is_refused_with_both_versions() -> None:
    class OldApi:
        async def version(self) -> tuple[int, int]:
            return 1, 29

    with pytest.raises(TooOldError, match=r"Kubernetes 1\.29 is too old: 1\.30 or newer is needed"):
        await wait_for_api(OldApi())  # type: ignore[arg-type]
