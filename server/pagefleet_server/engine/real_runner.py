"""The runner of a real model; tests put others in its place."""

import contextlib
import gc
import logging
from collections.abc import Iterator

from pagefleet_server.engine.runner_protocol import Runner
from pagefleet_server.models.checkpoint import open_checkpoint
from pagefleet_server.models.load_progress import Progress
from pagefleet_server.settings import EngineSettings

_logger = logging.getLogger(__name__)


def build_runner(settings: EngineSettings, progress: Progress) -> Runner:
    """Imported here: torch takes seconds, and the API should hear of it meanwhile; a model that is not there is told
    before that."""
    open_checkpoint(settings.model.model, need_weights=settings.model.load_format != "dummy")
    progress("load_weights", "importing torch")
    with _without_collections():
        from pagefleet_server.runner.placement import keep_apart
        from pagefleet_server.runner.runner import build_runner as build
    runner = build(settings, progress)
    if settings.model.pin_threads and runner.linear_backend == "cpu" and runner.group is None:
        places = keep_apart()
        if places is not None:
            _logger.info("CPU %d leads the steps, the other threads keep to %s", *places.leader, sorted(places.others))
    return runner


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """What a module makes stays; looking for garbage in it, now and at every later collection, takes a tenth of a
    start."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
