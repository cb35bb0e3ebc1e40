"""Flags, environment and defaults of pagefleet-server."""

import subprocess
import sys

import pytest

from pagefleet_server.cli import BadSettingError, Flag, check_machine, list_flags, misspelt_variables, parse_settings
from pagefleet_server.settings import EngineSettings, ModelSettings, ServerSettings


def test_defaults_are_those_of_the_settings() -> None:
    assert parse_settings(["--model", "m"], {}) == ServerSettings(EngineSettings(ModelSettings("m")))


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"PAGEFLEET_MODEL": "from-env", "PAGEFLEET_MAX_QUEUE": "7", "PAGEFLEET_PORT": "9000"}
    settings = parse_settings(["--port", "9001"], environ)
    assert settings.engine.model.model == "from-env"
    assert (settings.http.port, settings.http.max_queue) == (9001, 7)


@pytest.mark.parametrize(
    ("text", "want_bytes"),
    [
        ("2GiB", 2 * 1024**3),
        ("32MiB", 32 * 1024**2),
        ("8Gi", 8 * 1024**3),
        ("1.5MiB", 3 * 2**19),
        ("4096", 4096),
        ("2GB", 2 * 10**9),
        ("512 KiB", 512 * 1024),
        ("1mib", 2**20),
    ],
)
def test_sizes_may_have_a_unit(text: str, want_bytes: int) -> None:
    settings = parse_settings(["--model", "m", "--kv-cache-memory", text], {})
    assert settings.engine.cache.kv_cache_memory_bytes == want_bytes


@pytest.mark.parametrize(
    ("argv", "want_words"),
    [
        (["--port", "70000"], ["--port", "70000", "at most 65535"]),
        (["--port", "-1"], ["--port", "-1", "at least 0"]),
        (["--threads", "0"], ["--threads", "0", "at least 1"]),
        (["--threads", "two"], ["--threads", "'two'", "whole number"]),
        (["--max-model-len", "1"], ["--max-model-len", "at least 2"]),
        (["--served-model-name", "a" * 300], ["--served-model-name", "256 characters"]),
        (["--otlp-endpoint", "http://collector:99999"], ["--otlp-endpoint", "1..65535"]),
        (["--stream-keep-alive", "0.000001"], ["--stream-keep-alive", "at least 0.1"]),
        (["--block-size", "12"], ["--block-size", "12", "power of two"]),
        (["--gpu-memory-utilization", "0"], ["--gpu-memory-utilization", "more than 0"]),
        (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "number"]),
        (["--kv-cache-memory", "2 dogs"], ["--kv-cache-memory", "2 dogs", "MiB"]),
        (["--device", "tpu"], ["--device", "'tpu'", "auto, cpu, cuda"]),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], ["--max-num-batched-tokens", "8", "64"]),
        (["--served-model-name", ""], ["--served-model-name", "empty"]),
        (["--kv-cache-mem", "2GiB"], ["'--kv-cache-mem'", "no flag", "did you mean --kv-cache-memory?"]),
        (["--max_queue=4"], ["'--max_queue=4'", "did you mean --max-queue?"]),
        (["more"], ["'more' is no flag; --help"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--no-web-page=false"], ["--no-web-page", "ignored explicit argument 'false'"]),
        (["--model", "file:///models/m"], ["--model", "no file:// here", "the path itself, /models/m"]),
        (["--model", "https://hub.example/org/m"], ["--model", "no https:// here", "hf://org/name"]),
        (["--model", "pvc://claim/m"], ["--model", "no pvc:// here"]),
        (["--cors-allow-origins", "chat.example"], ["--cors-allow-origins", "'chat.example'", "https://"]),
        (["--cors-allow-origins", "https://a.example/,*"], ["--cors-allow-origins", "'https://a.example/'"]),
    ],
)
def test_a_bad_value_is_refused_with_what_value_and_bound(argv: list[str], want_words: list[str]) -> None:
    with pytest.raises(BadSettingError) as refused:
        parse_settings(["--model", "m", *argv], {})
    assert all(word in str(refused.value) for word in want_words), str(refused.value)


NUMBERS = [flag for flag in list_flags() if flag.kind in (int, float)]


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
def test_no_number_is_taken_whatever_it_is(flag: Flag) -> None:
    """Clocks overflow, memory is planned by it, or nothing is ever served; told before a model is loaded."""
    for absurd in ("9" * 18, "0" if flag.is_size else "-1"):
        with pytest.raises(BadSettingError, match=rf"{flag.option}: {absurd} is out of bounds, it must be"):
            parse_settings(["--model", "m", flag.option, absurd], {})


def test_more_threads_than_cpus_are_refused() -> None:
    settings = parse_settings(["--model", "m", "--threads", "9"], {})
    check_machine(settings, num_cpus=9)
    with pytest.raises(BadSettingError, match="--threads: 9 are more than the 8 CPUs of this machine"):
        check_machine(settings, num_cpus=8)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(BadSettingError, match="PAGEFLEET_MAX_QUEUE: 'many'"):
        parse_settings(["--model", "m"], {"PAGEFLEET_MAX_QUEUE": "many"})


def test_a_misspelt_variable_is_told_and_others_are_left_alone() -> None:
    environ = {
        "PAGEFLEET_KV_CACHE_MEMROY": "1GiB",
        "PAGEFLEET_MAX_QUEUE": "3",
        "PAGEFLEET_PORT": "tcp://10.0.0.7:80",
        "PAGEFLEET_SERVICE_PORT": "80",
        "PAGEFLEET_PORT_80_TCP_ADDR": "10.0.0.7",
        "PAGEFLEET_CACHE_DIR": "/cache",
        "KV_CACHE_MEMROY": "1GiB",
    }
    assert misspelt_variables(environ) == [
        "PAGEFLEET_KV_CACHE_MEMROY is no setting and does nothing; did you mean PAGEFLEET_KV_CACHE_MEMORY?"
    ]


def test_help_has_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_settings(["--help"], {})
    words = capsys.readouterr().out.replace("[", " ").replace("]", " ").split()
    assert [flag.name for flag in list_flags() if not {flag.option, flag.variable} <= set(words)] == []


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(BadSettingError, match="--model is required"):
        parse_settings([], {})


def test_a_service_named_pagefleet_does_not_set_our_port() -> None:
    """Kubernetes puts PAGEFLEET_PORT=tcp://... into the pods of a namespace that has such a Service."""
    settings = parse_settings(["--model", "m"], {"PAGEFLEET_PORT": "tcp://10.0.0.7:80"})
    assert settings.http.port == 8000


def test_a_switch_that_is_on_by_default_is_turned_off() -> None:
    assert parse_settings(["--model", "m"], {}).engine.cache.prefix_caching
    assert not parse_settings(["--model", "m", "--no-prefix-caching"], {}).engine.cache.prefix_caching
    assert not parse_settings(["--model", "m"], {"PAGEFLEET_NO_PREFIX_CACHING": "true"}).engine.cache.prefix_caching


def test_every_flag_says_what_it_is() -> None:
    flags = list(list_flags())
    assert len({flag.name for flag in flags}) == len(flags)
    assert [flag.name for flag in flags if not flag.doc] == []


@pytest.mark.parametrize(
    "name",
    [
        "model",
        "served-model-name",
        "host",
        "port",
        "device",
        "dtype",
        "load-format",
        "max-model-len",
        "kv-cache-memory",
        "num-kv-blocks",
        "gpu-memory-utilization",
        "block-size",
        "max-num-seqs",
        "max-num-batched-tokens",
        "max-queue",
        "no-prefix-caching",
        "threads",
        "drain-delay",
        "drain-timeout",
    ],
)
def test_the_flags_that_other_people_depend_on_are_there(name: str) -> None:
    assert name in {flag.name for flag in list_flags()}


def test_the_command_exits_with_2_and_the_reason() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pagefleet_server.main", "--model", "m", "--port", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "--port: 'x' is no whole number" in ended.stderr


def test_the_api_process_loads_neither_torch_nor_transformers() -> None:
    """It starts in a second and stays small; only the engine process needs them."""
    imports = "import sys, pagefleet_server.main, pagefleet_server.api.server"
    code = f"{imports}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize("flag", ["--model", "--chat-template", "--api-key-file", "--port"])
def test_bytes_that_are_no_utf8_are_refused(flag: str) -> None:
    """Python hands them over as lone surrogates, which nothing behind can write."""
    with pytest.raises(BadSettingError, match=f"{flag}: .* is no UTF-8 text"):
        parse_settings(["--model", "m", flag, "caf\udce9"], {})
