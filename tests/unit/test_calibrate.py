"""The fit of a profile's step time."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "calibrate.py"


@pytest.fixture(scope="module")
def calibrate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibrate_tool", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["calibrate_tool"] = module
    spec.loader.exec_module(module)
    return module


def test_a_known_step_time_is_found_again(calibrate: ModuleType) -> None:
    step, token, pair, row, context = 0.02, 1e-4, 2e-9, 3e-4, 1e-7
    prefills = [
        calibrate.Prefill(n, step * -(-n // 512) + token * n + pair * n * (n + 1) / 2)
        for n in (16, 128, 512, 1024, 3000)
    ]
    decodes = [
        calibrate.Decode(rows, length, step + row * rows + context * rows * length)
        for rows in (1, 4, 8)
        for length in (50, 1000)
    ]
    found = calibrate.fit(prefills, decodes, 512)
    assert found.step_seconds == pytest.approx(step)
    assert found.prompt_token_seconds == pytest.approx(token)
    assert found.prompt_pair_seconds == pytest.approx(pair)
    assert found.decode_token_seconds == pytest.approx(row)
    assert found.decode_pair_seconds == pytest.approx(context)


def test_what_comes_out_negative_is_zero(calibrate: ModuleType) -> None:
    falling = [calibrate.Decode(rows, 100, 0.1 - 0.001 * rows) for rows in (1, 2, 4)]
    found = calibrate.fit([calibrate.Prefill(n, 0.1 + n * 1e-4) for n in (1, 10, 100)], falling, 512)
    assert found.step_seconds > 0
    assert found.decode_pair_seconds == 0
    assert found.decode_token_seconds > 0, "a profile needs it above zero"


def test_too_little_to_fit_is_said(calibrate: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least 3"):
        calibrate.fit([], [], 512)
