"""The health server, its checks, and the command line."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from pagefleet_operator.health import Health
from pagefleet_operator.main import operator_settings, parse_arguments
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
