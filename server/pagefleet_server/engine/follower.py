"""`python -m pagefleet_server.engine.follower`: a further rank of a model that several processes hold, started by the
engine process. It computes its part of each step and ends with the engine."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import msgspec

from pagefleet_server.engine.exit_code import ExitCode
from pagefleet_server.engine.parent import ParentGoneError, die_with_parent, leave_signals_to_parent
from pagefleet_server.model_errors import ModelError
from pagefleet_server.settings import EngineSettings

log = logging.getLogger("pagefleet.follower")


def run_follower(argv: Sequence[str]) -> ExitCode:
    """Everything the process does."""
    parser = argparse.ArgumentParser(
        prog="python -m pagefleet_server.engine.follower", description="A further rank; the engine starts it."
    )
    parser.add_argument("--rank", type=int, required=True, help="1 .. ranks - 1")
    parser.add_argument("--port", type=int, required=True, help="where rank 0 listens, on loopback")
    parser.add_argument("--parent-pid", type=int, required=True, help="the engine process; the follower ends with it")
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    arguments = parser.parse_args(argv)
    leave_signals_to_parent()
    try:
        die_with_parent(arguments.parent_pid)
        settings = msgspec.json.decode(arguments.settings, type=EngineSettings)
        from pagefleet_server.runner.runner import build_follower

        build_follower(settings, rank=arguments.rank, port=arguments.port)()
    except ParentGoneError as gone:
        log.error("rank %d ends: %s", arguments.rank, gone)
        return ExitCode.API_GONE
    except Exception as error:
        code = ExitCode.BAD_MODEL if isinstance(error, ModelError) else ExitCode.STEP_FAILED
        log.error("rank %d ends: %s", arguments.rank, error, exc_info=None if code is ExitCode.BAD_MODEL else error)
        return code
    return ExitCode.STOPPED


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    exit_code = run_follower(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)
