"""The engine process from its first to its last line: arguments, start-up, loop, exit code."""

import argparse
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.prompt_lookup import SpeculationLimits
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.engine.channel import Channel, ChannelClosedError
from pagefleet_server.engine.exit_code import ExitCode
from pagefleet_server.engine.loop import EngineLoop, gauges_of
from pagefleet_server.engine.parent import ParentGoneError, die_with_parent, leave_signals_to_parent
from pagefleet_server.engine.runner_protocol import BuildRunner, Runner
from pagefleet_server.engine.stall_guard import FaulthandlerGuard
from pagefleet_server.model_errors import ModelError
from pagefleet_server.settings import EngineSettings, SchedulerSettings
from pagefleet_server.wire import Failed, Ready, Starting, StepDone

LINGER_SECONDS = 2.0
"""The last message may take so long to leave."""
MAX_REASON_CHARS = 2000

log = logging.getLogger("pagefleet.engine")


def main(argv: Sequence[str], build_runner: BuildRunner) -> NoReturn:
    """Run the engine and end the process with its exit code, at once: tearing down the interpreter with a model in it
    takes a second, and nobody is told why the pod ends before that is over."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    code = run_engine(argv, build_runner)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_engine(argv: Sequence[str], build_runner: BuildRunner) -> ExitCode:
    """Everything the process does. `build_runner` is called once, after the socket is up, so that its progress and its
    errors reach the API. A ModelError ends with BAD_MODEL, any other with START_FAILED."""
    try:
        arguments = parse_arguments(argv)
        settings = msgspec.json.decode(arguments.settings, type=EngineSettings)
        connection = socket.socket(fileno=arguments.fd)
    except (msgspec.MsgspecError, OSError) as error:
        log.error("the engine's arguments are not valid: %s", error)
        return ExitCode.USAGE
    leave_signals_to_parent()
    channel = Channel(connection, clock=time.monotonic, unread_timeout_seconds=settings.process.unread_timeout_seconds)
    try:
        die_with_parent(arguments.parent_pid)
        return _serve(channel, settings, build_runner)
    except (ChannelClosedError, ParentGoneError) as gone:
        log.error("the engine ends: %s", gone)
        return ExitCode.API_GONE
    finally:
        channel.close(linger_seconds=LINGER_SECONDS)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """fd, parent_pid, settings (JSON). Exits with USAGE on anything else."""
    parser = argparse.ArgumentParser(
        prog="python -m pagefleet_server.engine", description="The engine of pagefleet-server, which starts it."
    )
    parser.add_argument("--fd", type=int, required=True, help="descriptor of a connected stream socket")
    parser.add_argument("--parent-pid", type=int, required=True, help="the API process; the engine ends with it")
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    return parser.parse_args(argv)


def _serve(channel: Channel, settings: EngineSettings, build_runner: BuildRunner) -> ExitCode:
    def progress(phase: str, message: str, /, *, done_bytes: int = 0, total_bytes: int = 0) -> None:
        log.info("%s: %s", phase, message)
        channel.send(Starting(phase, message, done_bytes, total_bytes))

    try:
        runner = build_runner(settings, progress)
        loop = _build_loop(channel, settings, runner)
    except ChannelClosedError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: whatever it was, the API is told why
        code = ExitCode.BAD_MODEL if isinstance(error, ModelError) else ExitCode.START_FAILED
        return _fail(channel, error, "the engine could not start", code)
    gc.collect()
    gc.freeze()  # the model's million objects are no garbage: collections between steps need not look at them
    channel.send(_ready(runner))
    channel.send(StepDone(gauges_of(loop.scheduler.counts()), [], time.monotonic()))
    try:
        loop.run()
    except ChannelClosedError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: whatever it was, the API is told why
        return _fail(channel, error, "a step failed", ExitCode.STEP_FAILED)
    return ExitCode.STOPPED


def _build_loop(channel: Channel, settings: EngineSettings, runner: Runner) -> EngineLoop:
    limits = SchedulerLimits(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
        max_step_seconds=settings.scheduler.max_step_ms / 1000 or None,
        speculation=speculation_limits(settings.scheduler),
    )
    return EngineLoop(
        channel=channel,
        scheduler=Scheduler(limits, prefix_caching=settings.cache.prefix_caching),
        runner=runner,
        clock=time.monotonic,
        stall_guard=FaulthandlerGuard(settings.process.stall_dump_seconds, time.monotonic),
    )


def speculation_limits(settings: SchedulerSettings) -> SpeculationLimits | None:
    """None: off."""
    if not settings.speculative_tokens:
        return None
    return SpeculationLimits(
        num_tokens=settings.speculative_tokens,
        min_ngram=settings.speculative_min_ngram,
        max_ngram=settings.speculative_max_ngram,
        max_num_seqs=settings.speculative_max_num_seqs,
    )


def _ready(runner: Runner) -> Ready:
    return Ready(
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        eos_token_ids=list(runner.eos_token_ids),
        vocab_size=runner.vocab_size,
        attention_backend=runner.attention_backend,
        start_seconds=dict(runner.start_seconds),
        linear_backend=runner.linear_backend,
        pooling=runner.pooling,
    )


def _fail(channel: Channel, error: Exception, what: str, code: ExitCode) -> ExitCode:
    text = " ".join(str(error).split()) or "no message"  # a line: the last one of the log is what Kubernetes shows
    if code is ExitCode.BAD_MODEL:
        reason = text[:MAX_REASON_CHARS]  # the API process tells it, and ends
    else:
        reason = f"{what}: {type(error).__name__}: {text}"[:MAX_REASON_CHARS]
        log.error("%s", reason, exc_info=error)
    channel.send(Failed(reason))
    return code
