"""Leader election by a Lease: one operator at a time serves a namespace, and a late one writes nothing.

Times are monotonic seconds of this process. Another holder's lease is judged by how long we have seen it unchanged,
never by comparing clocks of two machines.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.client import Api
from pagefleet_operator.errors import ApiError
from pagefleet_operator.resources import LEASES
from pagefleet_operator.settings import LeaseSettings

logger = logging.getLogger(__name__)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sighting:
    """Someone's lease as we know it."""

    version: str
    """resourceVersion: changes with every renewal."""
    holder: str
    """Empty: released."""
    duration_seconds: float
    first_seen: float
    """When we first saw this version."""


def sight(lease: Mapping[str, Any], before: Sighting | None, now: float) -> Sighting:
    """What is known after reading `lease` once more."""
    spec = lease.get("spec") or {}
    version = lease["metadata"]["resourceVersion"]
    since = before.first_seen if before is not None and before.version == version else now
    return Sighting(version, spec.get("holderIdentity") or "", float(spec.get("leaseDurationSeconds") or 0), since)


def may_take(seen: Sighting, identity: str, now: float) -> bool:
    """Whether the lease is free: released, ours, or not renewed for its whole duration under our eyes."""
    return seen.holder in ("", identity) or now - seen.first_seen >= seen.duration_seconds


class LeaseHolder:
    """Holds the Lease of one namespace."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        identity: str,
        settings: LeaseSettings,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace = namespace
        self._api = api
        self._identity = identity
        self._settings = settings
        self._monotonic = monotonic
        self._lease: Json | None = None
        self._renewed: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether a write is still safe: the last renewal began within the renew deadline."""
        return self._renewed is not None and self._monotonic() - self._renewed < self._settings.renew_deadline_seconds

    async def acquire(self, *, may_skip: bool = False) -> bool:
        """True once the lease is ours. `may_skip`: False at once where there can be none, as the namespace is gone or
        we have no rights in it."""
        seen: Sighting | None = None
        waiting_for = ""
        while True:
            try:
                seen, taken = await self._try(seen)
                if taken:
                    logger.info("holding lease %s/%s as %s", self.namespace, names.LEASE, self._identity)
                    return True
                if seen is not None and seen.holder != waiting_for:
                    waiting_for = seen.holder
                    logger.info("standby: lease %s/%s is held by %s", self.namespace, names.LEASE, waiting_for)
            except (ApiError, TimeoutError) as error:
                if may_skip and isinstance(error, ApiError) and error.status in (403, 404):
                    logger.warning("namespace %s is not served until it can be: %s", self.namespace, error)
                    return False
                logger.warning("lease %s/%s: %s", self.namespace, names.LEASE, error or "no answer in time")
            await asyncio.sleep(self._settings.retry_seconds)

    async def come_back(self) -> str:
        """Of a lease that was skipped: returns once it can be had, and why that matters."""
        while True:
            await asyncio.sleep(self._settings.retry_seconds)
            try:
                async with asyncio.timeout(self._settings.write_timeout_seconds):
                    known = await self._api.get(LEASES, self.namespace, names.LEASE)
                if known is None:
                    await self._write(None)
            except (ApiError, TimeoutError) as error:
                logger.debug("namespace %s: %s", self.namespace, error)
                continue
            return f"namespace {self.namespace} can be served now: starting anew"

    async def hold(self) -> str:
        """Renews until the lease is lost; returns why."""
        while True:
            await asyncio.sleep(self._settings.retry_seconds)
            if not self.is_held:
                return "it was not renewed in time"
            try:
                await self._write(self._lease)
            except (ApiError, TimeoutError) as error:
                refused = isinstance(error, ApiError) and error.status in (404, 409)
                if refused and not await self._is_still_ours():
                    return f"someone else changed it: {error}"
                logger.warning("lease %s/%s: %s", self.namespace, names.LEASE, error or "no answer in time")

    async def _is_still_ours(self) -> bool:
        """After a refused renewal: an earlier one may have been written although its answer was lost.

        While nobody answers it is not known to be lost; the renew deadline bounds that.
        """
        try:
            async with asyncio.timeout(self._settings.write_timeout_seconds):
                lease = await self._api.get(LEASES, self.namespace, names.LEASE)
        except (ApiError, TimeoutError):
            return True
        if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self._identity:
            return False
        self._lease = lease
        return True

    async def release(self) -> None:
        """Give it up, so that the next one need not wait."""
        if self._lease is None or not self.is_held:
            return
        try:
            await self._write(self._lease, holder="")
        except (ApiError, TimeoutError) as error:
            logger.info("lease %s/%s was not released: %s", self.namespace, names.LEASE, error)
        self._renewed = None

    async def _try(self, seen: Sighting | None) -> tuple[Sighting | None, bool]:
        async with asyncio.timeout(self._settings.write_timeout_seconds):
            lease = await self._api.get(LEASES, self.namespace, names.LEASE)
        if lease is None:
            await self._write(None)
            return None, True
        seen = sight(lease, seen, self._monotonic())
        if not may_take(seen, self._identity, self._monotonic()):
            return seen, False
        try:
            await self._write(lease)
        except ApiError as error:
            if error.status == 409:
                return None, False  # another one was quicker
            raise
        return seen, True

    async def _write(self, lease: Json | None, *, holder: str | None = None) -> None:
        began = self._monotonic()
        body = self._body(lease, self._identity if holder is None else holder)
        async with asyncio.timeout(self._settings.write_timeout_seconds):
            if lease is None:
                self._lease = await self._api.create(LEASES, self.namespace, body, fenced=False)
            else:
                self._lease = await self._api.replace(LEASES, self.namespace, names.LEASE, body, fenced=False)
        self._renewed = began

    def _body(self, lease: Json | None, holder: str) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((lease or {}).get("spec") or {})
        if spec.get("holderIdentity") != holder and holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if lease is not None else 0)
        spec |= {
            "holderIdentity": holder,
            "renewTime": now,
            "leaseDurationSeconds": self._settings.duration_seconds if holder else 1,
        }
        metadata = dict((lease or {}).get("metadata") or {"name": names.LEASE, "namespace": self.namespace})
        metadata.pop("managedFields", None)
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
