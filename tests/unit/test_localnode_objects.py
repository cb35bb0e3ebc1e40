"""Quantities, percentages, selectors, times, names, addresses, GPU slots, image tables."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_localcluster.launcher import ClusterSettings
from pagefleet_localcluster.node.addresses import AddressPool, gpus_for
from pagefleet_localcluster.node.images import ImageTable
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.objects import (
    Object,
    canonical_quantity,
    format_time,
    parse_quantity,
    parse_time,
    resolve_percent,
    safe_hash,
    selector_matches,
)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1", 1.0),
        (2, 2.0),
        ("0.5", 0.5),
        ("250m", 0.25),
        ("1k", 1000.0),
        ("1Ki", 1024.0),
        ("1.5Gi", 1.5 * 2**30),
        ("2e3", 2000.0),
        ("1E", 1e18),
        ("100n", 1e-7),
    ],
)
def test_quantities(text: str | int, want: float) -> None:
    assert float(parse_quantity(text)) == pytest.approx(want)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1000m", "1"),
        ("0.5", "500m"),
        ("1.5Gi", "1536Mi"),
        ("1024Mi", "1Gi"),
        ("2000", "2k"),
        ("1e3", "1e3"),
        ("0.1Gi", "107374182400m"),
        ("1.25", "1250m"),
        ("1024", "1024"),
        ("1500Mi", "1500Mi"),
        ("0.0001", "1m"),
        ("3000k", "3M"),
        ("0.5Mi", "512Ki"),
        ("1E", "1E"),
        ("-0", "0"),
        (2, "2"),
    ],
)
def test_quantities_of_resource_lists_have_one_spelling(text: object, want: str) -> None:
    """As a real API server answered."""
    assert canonical_quantity(text) == want


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1gi", "--1", "1Gi2", "0x1", "1e", "1e99999999", None])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "total", "up", "want"),
    [("25%", 10, True, 3), ("25%", 10, False, 2), (3, 10, True, 3), ("4", 10, True, 4)],
)
def test_percentages(value: int | str, total: int, up: bool, want: int) -> None:
    assert resolve_percent(value, total, round_up=up) == want


@pytest.mark.parametrize(
    ("selector", "want"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["0"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Lt", "values": ["0"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "Gt", "values": ["0"]}]}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Bogus"}]}, False),
    ],
)
def test_selectors(selector: Object | None, want: bool) -> None:
    assert selector_matches(selector, {"a": "1"}) is want


def test_times_survive_a_round_trip_in_whole_seconds() -> None:
    assert format_time(0.9) == "1970-01-01T00:00:00Z"
    assert parse_time(format_time(1_700_000_000.7)) == 1_700_000_000.0
    assert parse_time("2026-01-01T00:00:00.250000Z") % 1 == 0.25
    assert parse_time(None) == 0.0


@given(st.text())
def test_hashes_spell_like_kubernetes(text: str) -> None:
    assert set(safe_hash(text)) <= set("bcdfghjklmnpqrstvwxz2456789") and 1 <= len(safe_hash(text)) <= 10


@given(seed=st.integers(0, 2**32), holds=st.lists(st.booleans(), max_size=60))
def test_an_address_is_never_given_twice_and_not_again_at_once(seed: int, holds: list[bool]) -> None:
    pool, used, last = AddressPool(3, random.Random(seed)), set[str](), list[str]()
    for hold in holds:
        address = pool.take()
        assert address.startswith("127.67.") and address not in used and address not in last[-30:]
        last.append(address)
        if hold:
            used.add(address)
        else:
            pool.give_back(address)


def test_a_full_pool_says_so() -> None:
    pool = AddressPool(0, random.Random(0))
    for _ in range(256 * 254):
        pool.take()
    with pytest.raises(RuntimeError, match=r"no free pod address in 127\.64\.0\.0/16"):
        pool.take()


def gpu_pod(*counts: int) -> Object:
    containers = [
        {"name": f"c{i}", "resources": {"limits": {"nvidia.com/gpu": str(count)}}} for i, count in enumerate(counts)
    ]
    return {"spec": {"containers": containers}}


def test_gpu_slots_are_whole_and_fit_all_or_nothing() -> None:
    assert gpus_for(gpu_pod(1, 2), [4, 5, 6, 7]) == {"c0": [4], "c1": [5, 6]}
    assert gpus_for(gpu_pod(0, 1), [7]) == {"c0": [], "c1": [7]}
    assert gpus_for(gpu_pod(1, 1), [7]) is None
    assert gpus_for(gpu_pod(0), []) == {"c0": []}


def test_image_tables_are_read_from_yaml_before_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "images.yaml"
    path.write_text(
        "images:\n- patterns: [vllm-openai, 'ghcr.io/me/*']\n  argvPrefix: [nice]\n  entrypoint: [vllm, serve]\n"
        "  path: [/opt/vllm/bin]\n  environment: {A: '1'}\n"
    )
    rule = ImageTable.load(path).find("docker.io/vllm/vllm-openai:v1")
    assert rule is not None
    assert (rule.argv_prefix, rule.entrypoint, rule.path) == (("nice",), ("vllm", "serve"), ("/opt/vllm/bin",))
    assert rule.environment == {"A": "1"}
    assert ImageTable.load(path).find("ghcr.io/me/x") == rule
    default = ImageTable.load(path).find("pagefleet-server")
    assert default is not None and default.entrypoint == ("pagefleet-server",)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[]", "expected a mapping with the list `images`"),
        ("images: [{entrypoint: [x]}]", r"images\[0\]: no `patterns`"),
        ("images: [{patterns: [x], entrypont: [x]}]", r"images\[0\]: unknown field 'entrypont'"),
        ("images: [{patterns: x}]", r"images\[0\]\.patterns: expected a list of strings"),
        ("images: [", "cannot read"),
    ],
)
def test_a_wrong_image_table_is_refused_with_the_place(text: str, want: str, tmp_path: Path) -> None:
    path = tmp_path / "images.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=want):
        ImageTable.load(path)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ((33, 0, 0), "nodes 33"),
        ((-1, 0, 0), "nodes -1"),
        ((1, 65, 0), "gpus per node 65"),
        ((1, 0, 70000), "port 70000"),
    ],
)
def test_cluster_settings_have_bounds(fields: tuple[int, int, int], want: str) -> None:
    with pytest.raises(ValueError, match=want):
        ClusterSettings(Path("x"), *fields)


def test_node_settings_have_bounds() -> None:
    with pytest.raises(ValueError, match="at most 32 nodes"):
        NodeSettings("n", Path("x"), Path("y"), index=32)
    with pytest.raises(ValueError, match="gpus -1"):
        NodeSettings("n", Path("x"), Path("y"), gpus=-1)
