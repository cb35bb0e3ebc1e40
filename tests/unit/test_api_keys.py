"""API keys from a file: who is let in, and what happens when the file changes."""

import os
from pathlib import Path

import pytest

from pagefleet_server.api.api_keys import MAX_FILE_BYTES, ApiKeys, KeyFileError
from pagefleet_server.api.errors import QuotaError
from pagefleet_server.api.quota import Limits


class Clock:
    """Virtual time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys(path: Path, clock: Clock | None = None, told: list[str] | None = None) -> ApiKeys:
    return ApiKeys(path, clock=clock or Clock(), report=(told if told is not None else []).append)


def admits(checked: ApiKeys, header: str) -> bool:
    return checked.identify(header) is not None


def write(path: Path, text: str) -> Path:
    """As Kubernetes does it: by another file."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)
    return path


@pytest.mark.parametrize(
    ("header", "want"),
    [
        ("Bearer one", True),
        ("bearer two", True),
        ("Bearer  two ", True),
        ("Bearer three", False),
        ("Bearer # two", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("Basic one", False),
        ("one", False),
        ("", False),
        (None, False),
        ("Bearer " + "x" * 100_000, False),
        ("Bearer \udcff", False),
    ],
)
def test_a_bearer_of_one_of_the_keys_is_let_in(tmp_path: Path, header: str | None, want: bool) -> None:
    path = write(tmp_path / "keys", "one\n\n# two\n  two  \n")
    assert (keys(path).identify(header) is not None) is want


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    clock, told = Clock(), list[str]()
    checked = keys(write(tmp_path / "keys", "old"), clock, told)
    write(tmp_path / "keys", "new")
    assert admits(checked, "Bearer old"), "the file is looked at once a second at most"
    clock.now += 2
    assert (admits(checked, "Bearer old"), admits(checked, "Bearer new")) == (False, True)
    assert told == ["API keys read again: 1 keys"]


@pytest.mark.parametrize("content", [None, "", "# none\n"])
def test_a_file_that_goes_bad_neither_opens_nor_locks_the_door(tmp_path: Path, content: str | None) -> None:
    clock, told = Clock(), list[str]()
    path = write(tmp_path / "keys", "old")
    checked = keys(path, clock, told)
    if content is None:
        path.unlink()
    else:
        write(path, content)
    for _ in range(3):
        clock.now += 2
        assert (admits(checked, "Bearer old"), admits(checked, "Bearer ")) == (True, False)
    assert len(told) == 1 and "stay as they were" in told[0]


@pytest.mark.parametrize(
    "content",
    [None, "", "#\n", "x" * 600, b"\xff\xfe", b"x\n" * MAX_FILE_BYTES, b"\0\0\0", "k\x7f", "sk-\u00e9", b"sk-a\nk\0\1"],
)
def test_without_a_key_to_begin_with_there_is_no_start(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(KeyFileError, match="keys"):
        keys(path)


def test_more_keys_than_can_be_compared_quickly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="10001 keys"):
        keys(write(tmp_path / "keys", "\n".join(f"key-{number}" for number in range(10_001))))


def test_each_key_is_its_own_tenant_and_its_name_tells_nothing(tmp_path: Path) -> None:
    checked = keys(write(tmp_path / "keys", "one\ntwo\n"))
    one, two = checked.identify("Bearer one"), checked.identify("Bearer two")
    assert one and two and one.name != two.name and "one" not in one.name


def test_limits_stand_behind_the_key(tmp_path: Path) -> None:
    text = "one\ntwo requests_per_minute=60  concurrent_requests=4\nboss admin\n"
    checked = keys(write(tmp_path / "keys", text))
    found = [checked.identify(f"Bearer {key}") for key in ("one", "two", "boss")]
    assert [tenant and tenant.quota.limits for tenant in found] == [Limits(), Limits(60, 4), Limits(admin=True)]


@pytest.mark.parametrize(
    "line",
    [
        "k requests_per_minute",
        "k requests_per_minute=0",
        "k requests_per_minute=-1",
        "k requests_per_minute=1e3",
        "k requests_per_minute=9999999",
        "k requests_per_minute=1 requests_per_minute=2",
        "k concurrent_requests=many",
        "k dreams=1",
        "one",
    ],
)
def test_a_line_that_is_wrong_is_told_by_its_number_and_never_shown(tmp_path: Path, line: str) -> None:
    with pytest.raises(KeyFileError, match="line 2") as refused:
        keys(write(tmp_path / "keys", f"one\n{line}\n"))
    assert "one\n" not in str(refused.value) and "dreams" not in str(refused.value)


def test_changed_limits_hold_at_once_and_nothing_used_is_forgotten(tmp_path: Path) -> None:
    clock = Clock()
    checked = keys(write(tmp_path / "keys", "k requests_per_minute=2 concurrent_requests=9"), clock)
    before = checked.identify("Bearer k")
    assert before is not None
    with before.quota.spend(), before.quota.spend():
        write(tmp_path / "keys", "k requests_per_minute=3 concurrent_requests=2")
        clock.now += 2
        after = checked.identify("Bearer k")
        assert after is not None
        with pytest.raises(QuotaError, match="at most 2"), after.quota.spend():
            pass
    with pytest.raises(QuotaError, match="3 requests a minute"), after.quota.spend():
        pass
