"""The installation of peers: what is finished is left alone, what is not is gone on with."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks.serving import setup
from benchmarks.serving.paths import Paths


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was installed, in order; nothing is in truth."""
    calls: list[str] = []

    def note(peer: str, _: Paths) -> None:
        (tmp_path / peer / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / peer / "bin" / "python").touch()
        calls.append(peer)

    for peer in setup.INSTALLERS:
        monkeypatch.setitem(setup.INSTALLERS, peer, partial(note, peer))
    monkeypatch.setattr(setup, "write_models", lambda _paths, *, with_1b: calls.append("models"))
    return calls


def test_what_is_finished_is_left_alone_until_its_version_changes(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(2):
        setup.main(["--folder", str(tmp_path), "--peers", "openvino,clients"])
    assert installed == ["openvino", "clients", "models", "models"]
    monkeypatch.setitem(setup.VERSIONS, "openvino", "openvino-genai==9")
    setup.main(["--folder", str(tmp_path), "--peers", "openvino,clients"])
    assert installed[4:] == ["openvino", "models"]


@pytest.mark.parametrize("peer", setup.INSTALLERS)
def test_an_installation_that_was_cut_short_is_gone_on_with(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer: str
) -> None:
    """A virtual environment alone, or vLLM without its requirements, once counted as installed."""
    whole = setup.INSTALLERS[peer]

    def cut_short(paths: Paths) -> None:
        whole(paths)
        raise SystemExit("pip ended with exit code 1")

    monkeypatch.setitem(setup.INSTALLERS, peer, cut_short)
    with pytest.raises(SystemExit):
        setup.main(["--folder", str(tmp_path), "--peers", peer])
    monkeypatch.setitem(setup.INSTALLERS, peer, whole)
    setup.main(["--folder", str(tmp_path), "--peers", peer])
    assert installed == [peer, peer, "models"]


def test_an_unknown_name_is_told_before_anything_is_installed(installed: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        setup.main(["--folder", str(tmp_path / "new"), "--peers", "openvino,vlm"])
    assert installed == [] and not (tmp_path / "new").exists()


def test_a_command_that_fails_is_told_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="false ended with exit code 1"):
        setup.call("false")
    assert "+ false" in capfd.readouterr().out
