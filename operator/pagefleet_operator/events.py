"""Kubernetes Events on transitions, each said once."""

import hashlib
import logging
from collections import OrderedDict

from pagefleet_operator import names
from pagefleet_operator.client import Api
from pagefleet_operator.clock import Clock
from pagefleet_operator.errors import ApiError, shorten
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.resources import EVENTS
from pagefleet_operator.times import timestamp

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
"""The same Event of the same object is not said again within this time."""
MAX_REMEMBERED = 4096
MAX_MESSAGE = 1024
"""Limit of the API."""


class EventRecorder:
    """Writes Events; a failure to do so is logged and changes nothing else."""

    def __init__(self, api: Api, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        self._said: OrderedDict[str, float] = OrderedDict()

    async def record(self, llmd: LLMDeployment, *, reason: str, message: str, warning: bool = False) -> None:
        """Say `reason: message` about the object unless just said."""
        now = self._clock()
        digest = hashlib.sha256(f"{llmd.uid}/{reason}/{message}".encode()).hexdigest()[:16]
        if now - self._said.get(digest, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._said[digest] = now
        self._said.move_to_end(digest)
        while len(self._said) > MAX_REMEMBERED:
            self._said.popitem(last=False)
        log = logger.warning if warning else logger.info
        log("%s: %s: %s", llmd.key, reason, message)
        try:
            await self._api.create(EVENTS, llmd.key.namespace, _event(llmd, digest, reason, message, now, warning))
        except ApiError as error:
            logger.warning("%s: Event %s was not written: %s", llmd.key, reason, error)


def _event(llmd: LLMDeployment, digest: str, reason: str, message: str, now: float, warning: bool) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{llmd.key.name}.{digest}.{int(now):x}", "namespace": llmd.key.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": llmd.key.namespace,
            "name": llmd.key.name,
            "uid": llmd.uid,
        },
        "reason": reason,
        "message": shorten(message, MAX_MESSAGE),
        "type": "Warning" if warning else "Normal",
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "reportingInstance": names.FIELD_MANAGER,
        "action": reason,
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
