"""The level-triggered loop of one LLMDeployment: observe -> decide -> plan -> apply -> status.

Events only mark an object dirty. What runs compares what is with what should be, every time from scratch; a failure
backs off and touches no other object.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_operator import apply, status
from pagefleet_operator.autoscale import Decision
from pagefleet_operator.client import Api
from pagefleet_operator.clock import Clock
from pagefleet_operator.conditions import Facts
from pagefleet_operator.errors import ApiError, SpecError
from pagefleet_operator.events import EventRecorder
from pagefleet_operator.loop_memory import Memory, fingerprint, refusal
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.observe import find_children, observe
from pagefleet_operator.pacing import Pace
from pagefleet_operator.plan import Observed, Plan, kinds_of, past, plan
from pagefleet_operator.resources import EVERY_CHILD
from pagefleet_operator.scrape import Scraper
from pagefleet_operator.settings import OperatorSettings
from pagefleet_operator.sharing import Shares
from pagefleet_operator.specs import Specs
from pagefleet_operator.store import LLMDEPLOYMENT, Store
from pagefleet_operator.telemetry import Telemetry
from pagefleet_operator.transitions import transitions
from pagefleet_operator.write_budget import Rank, WriteBudget

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Failures in a row that may pass by themselves, before the status speaks of them."""

SCALE_WRITES = 3
"""Of one decision: the replicas, and an Event or two."""

FIND_AGAIN_SECONDS = 5.0
"""A child that the watch does not show is read directly this often."""
FIND_CLAIM_AGAIN_SECONDS = 60.0
"""A claim that users bring is read this often."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all loops share."""

    api: Api
    store: Store
    scraper: Scraper
    recorder: EventRecorder
    settings: OperatorSettings
    clock: Clock
    telemetry: Telemetry
    shares: Shares
    specs: Specs
    pace: Pace
    """Of status writes that only change numbers."""
    budget: WriteBudget
    """Of all writes."""


class ObjectLoop:
    """Reconciles one key until its object is gone."""

    def __init__(self, key: ObjectKey, context: Context, turns: asyncio.Semaphore) -> None:
        """`turns` bounds how many objects are reconciled at once."""
        self.key = key
        self._turns = turns
        self._context = context
        self._dirty = asyncio.Event()
        self._memory: Memory | None = None
        self.dirty_since: float | None = None
        """Since when a change waits to be looked at, on the shared clock; None: nothing waits."""
        self._waits: dict[Rank, float] = {}
        """What may not be written yet, and seconds until it is worth asking again."""

    def mark(self) -> None:
        """Something about the object may have changed."""
        if self.dirty_since is None:
            self.dirty_since = self._context.clock()
        self._dirty.set()

    async def run(self) -> None:
        """Returns when the object is gone."""
        failures = 0
        due: float | None = None
        while True:
            await self._wait(due)
            try:
                async with self._turns:
                    self._dirty.clear()
                    self.dirty_since = None
                    body = self._context.store.get(LLMDEPLOYMENT, self.key)
                    if body is None:
                        self._context.shares.forget(self.key)
                        self._context.specs.forget(self.key)
                        self._context.budget.leave(self.key)
                        return
                    due = await self._timed_step(body)
                failures = 0
            except ApiError as error:
                failures += 1
                pause = self._backoff(failures, error)
                level = logging.DEBUG if error.status == 409 and failures < 5 else logging.WARNING
                logger.log(level, "%s: %s; again in %.1f s", self.key, error, pause)
                await asyncio.sleep(pause)
                due = 0.0

    async def _timed_step(self, body: Mapping[str, Any]) -> float | None:
        telemetry = self._context.telemetry
        result = "error"
        try:
            with telemetry.reconcile_seconds.time():
                due = await self.step(body)
            result = "ok"
            return due
        except ApiError as error:
            result = "conflict" if error.status == 409 else "error"
            raise
        finally:
            telemetry.reconciles.labels(result).inc()

    async def _wait(self, due_seconds: float | None) -> None:
        try:
            async with asyncio.timeout(due_seconds):
                await self._dirty.wait()
        except TimeoutError:
            return

    def _backoff(self, failures: int, error: ApiError) -> float:
        settings = self._context.settings.reconcile
        pause: float = min(settings.max_backoff_seconds, settings.min_backoff_seconds * 2 ** min(failures - 1, 16))
        return max(pause, min(error.retry_after_seconds or 0.0, settings.max_backoff_seconds))

    async def step(self, body: Mapping[str, Any]) -> float | None:
        """One reconcile. Returns seconds until the next one is due anyway. Raises ApiError."""
        waited, self._waits = self._waits, {}
        try:
            due = await self._step(body, has_looked=Rank.DEED in waited)
            return min((seconds for seconds in (due, *self._waits.values()) if seconds is not None), default=None)
        except BaseException:
            self._waits = {}
            raise
        finally:
            self._context.budget.leave(self.key, but=self._waits)

    async def _step(self, body: Mapping[str, Any], *, has_looked: bool) -> float | None:
        now = self._context.clock()
        if body["metadata"].get("deletionTimestamp") is not None:
            return None
        memory = self._remember(body["metadata"]["uid"])
        parse = self._context.specs.parse
        try:
            llmd = parse(body)
        except SpecError as error:
            return await self._say(memory, body, None, status.render_invalid(body, error, now), now)
        observed = await self._observe(memory, llmd, now, has_looked=has_looked)
        body = await self._scale(memory, llmd, body, observed, now)
        if self._waits:
            return None
        llmd = parse(body)
        intended = self._plan(memory, llmd, observed, now)
        if intended.failure is not None and intended.failure != past(llmd).failure:
            # Remembered first: a restart in between must not try the same template again.
            if self._must_wait(Rank.DEED, 1, now):
                return None
            with self._context.budget.booked(1):
                body = await apply.write_status(
                    self._context.api, body, {"rollout": status.render_failure(intended.failure)}
                )
            self._context.store.put(LLMDEPLOYMENT, body)
            llmd = parse(body)
        failure = await self._apply(memory, llmd, intended, observed, now)
        if Rank.DEED in self._waits and llmd.status:
            return None  # the status must not speak of a spec that has not been followed
        observed = observe(self._context.store, self._context.scraper, self.key, now, memory.found)
        facts = Facts(
            llmd=llmd,
            observed=observed,
            plan=intended,
            decision=memory.scaling.decision,
            latencies=memory.scaling.latencies,
            overwritten=memory.scaling.overwritten,
            apply_failure=failure,
            scale_failure=memory.scaling.failure,
            contested=self._contested(memory, now),
        )
        rendered = status.render(facts, memory.scaling.history, memory.scaling.decisions, now)
        due = await self._say(memory, body, llmd, rendered, now)
        if intended.waits_for_victims:
            return 1.0 if due is None else min(due, 1.0)
        return due

    def _must_wait(self, rank: Rank, writes: int, now: float) -> bool:
        """Whether so many writes may not be sent yet; then the step is done again when they may."""
        seconds = self._context.budget.ask(self.key, rank, writes, now)
        if seconds > 0.0:
            self._waits[rank] = seconds
        return seconds > 0.0

    def _remember(self, uid: str) -> Memory:
        if self._memory is None or self._memory.uid != uid:
            self._memory = Memory(uid)
        return self._memory

    async def _observe(self, memory: Memory, llmd: LLMDeployment, now: float, *, has_looked: bool) -> Observed:
        """`has_looked`: since then the object has only waited for its turn to write. It does not look for its children
        again and again meanwhile: if somebody makes one, its own apply will be a conflict."""
        store, scraper = self._context.store, self._context.scraper
        kinds = kinds_of(llmd, has_pod_monitors=store.has_pod_monitors)
        has_foreign_claim = llmd.spec.cache is not None and llmd.spec.cache.claim is not None
        shown = all(store.get(kind, self.key) is not None for kind in kinds)
        if shown and not has_foreign_claim:
            memory.found, memory.found_at = {}, None
            return observe(store, scraper, self.key, now, {})
        wait = FIND_CLAIM_AGAIN_SECONDS if shown else FIND_AGAIN_SECONDS
        is_old = memory.found_at is None or (now - memory.found_at >= wait and not has_looked)
        if is_old or memory.found_for != llmd.generation:
            memory.found = await find_children(self._context.api, store, llmd, kinds)
            memory.found_at, memory.found_for = now, llmd.generation
        return observe(store, scraper, self.key, now, memory.found)

    async def _scale(
        self, memory: Memory, llmd: LLMDeployment, body: Mapping[str, Any], observed: Observed, now: float
    ) -> Mapping[str, Any]:
        """Decide if a scrape round has ended since, and write; returns the object's body as it is then."""
        scaling, context = memory.scaling, self._context
        rounds, allowance = context.scraper.rounds, context.shares.allowance
        decision = scaling.decide(llmd, observed, scrape_round=rounds, now=now, allowance=allowance)
        if scaling.decision is not None:
            context.shares.want(llmd.key, scaling.decision.unbudgeted, needed=scaling.decision.needed)
        if decision is None or self._must_wait(Rank.DEED, SCALE_WRITES, now):
            return body
        with context.budget.booked(SCALE_WRITES):
            return await self._write_scale(memory, llmd, body, decision, now)

    async def _write_scale(
        self, memory: Memory, llmd: LLMDeployment, body: Mapping[str, Any], decision: Decision, now: float
    ) -> Mapping[str, Any]:
        scaling, context = memory.scaling, self._context
        before, after = llmd.spec.replicas, decision.replicas
        try:
            with context.shares.granting(llmd.key, after):
                body = await apply.write_scale(context.api, llmd, body, after)
                context.store.put(LLMDEPLOYMENT, body)
        except ApiError as error:
            # A conflict means that what was decided about has changed: the next round decides anew.
            scaling.gave_up(None if error.status == 409 else str(error))
            return body
        scaling.scaled(llmd, decision, now)
        context.telemetry.scalings.labels("up" if after > before else "down").inc()
        context.telemetry.fleet.decided(llmd.key, decision.reason)
        await context.recorder.record(
            llmd,
            reason="ScaledUp" if after > before else "ScaledDown",
            message=f"from {before} to {after} replicas: {decision.reason}: {decision.message}",
        )
        if scaling.overwritten is not None:
            await context.recorder.record(llmd, reason="ReplicasOverwritten", message=scaling.overwritten)
        return body

    def _plan(self, memory: Memory, llmd: LLMDeployment, observed: Observed, now: float) -> Plan:
        deadline = self._context.settings.reconcile.victims_deadline_seconds
        overdue = memory.victims_since is not None and now - memory.victims_since >= deadline
        intended = plan(
            llmd,
            observed,
            self._context.settings.children,
            applied_replicas=memory.ledger.replicas,
            victims_overdue=overdue,
        )
        if not intended.waits_for_victims:
            memory.victims_since = None
        elif memory.victims_since is None:
            memory.victims_since = now
        return intended

    async def _apply(
        self, memory: Memory, llmd: LLMDeployment, intended: Plan, observed: Observed, now: float
    ) -> tuple[str, str] | None:
        """Returns (reason, message) of a refusal; raises ApiError for what may pass later."""
        context = self._context
        if memory.refused is not None:
            held = memory.held(fingerprint(intended), now, context.settings.reconcile)
            if held is not None:
                return held.reason, held.message
        work = apply.outstanding(llmd, intended, observed, memory.ledger, context.settings.reconcile, now)
        if work.writes and self._must_wait(Rank.REPEAT if work.is_repetition else Rank.DEED, work.writes, now):
            return None
        try:
            with context.budget.booked(work.writes):
                await apply.write_costs(context.api, llmd, observed, work.costs)
                outcome = await apply.apply_children(
                    context.api, intended, observed, memory.ledger, context.settings.reconcile, now
                )
                await self._keep(llmd, outcome)  # first: what happened is not lost because something else failed
                if outcome.failure is not None:
                    raise outcome.failure
                removed = await apply.remove_children(context.api, llmd, intended, observed, memory.ledger)
        except ApiError as error:
            memory.apply_failures += 1
            if error.status == 409:
                memory.found_at = None  # there may be an object that the watch does not show
            if error.is_transient and memory.apply_failures < PATIENCE:
                raise
            memory.refused = refusal(error, fingerprint(intended), now)
            return memory.refused.reason, memory.refused.message
        memory.refused = None
        memory.apply_failures = 0
        for kind, child in zip(intended.removals, removed, strict=True):
            context.store.drop(kind, child)
        return None

    async def _keep(self, llmd: LLMDeployment, outcome: apply.Outcome) -> None:
        """Remember what the API answered, and say what was repaired."""
        for child in outcome.bodies:
            self._context.store.put(child["kind"], child)
        for repair in outcome.repairs:
            who = ", ".join(repair.managers) or "someone"
            await self._context.recorder.record(
                llmd,
                reason="DriftRepaired",
                message=f"{repair.kind} {llmd.key.name} was changed by {who} and changed back: "
                f"edit LLMDeployment {llmd.key.name} instead",
                warning=True,
            )

    def _contested(self, memory: Memory, now: float) -> str | None:
        settings = self._context.settings.reconcile
        for kind in EVERY_CHILD:
            if memory.ledger.is_contested(kind, settings, now):
                who = ", ".join(memory.ledger.rivals[kind]) or "someone"
                return (
                    f"{kind} {self.key.name} was changed by {who} and changed back {settings.contested_repairs} times "
                    f"within {settings.contested_window_seconds:g} s: stop the other writer, and edit the "
                    "LLMDeployment instead"
                )
        return None

    async def _say(
        self,
        memory: Memory,
        body: Mapping[str, Any],
        llmd: LLMDeployment | None,
        rendered: Mapping[str, Any],
        now: float,
    ) -> float | None:
        """Write what differs, and Events about it; numbers alone when it is their turn. Returns seconds until then.

        `llmd`: None for a spec that cannot be read, of which the status alone speaks.
        """
        last = body.get("status") or {}
        patch = status.difference(rendered, last)
        if not patch:
            memory.turn = None
            return None
        is_urgent = status.is_urgent(patch, last)
        wait = 0.0 if is_urgent else self._until_turn(memory, now)
        if wait > 0.0:
            return wait
        news = [] if llmd is None else list(transitions(last, rendered))
        rank = Rank.FIRST_WORD if not last else Rank.WORD if is_urgent else Rank.NUMBER
        if self._must_wait(rank, 1 + len(news), now):
            return None
        with self._context.budget.booked(1 + len(news)):
            said = [
                self._context.recorder.record(llmd, reason=item.reason, message=item.message, warning=item.warning)
                for item in news
                if llmd is not None
            ]
            await asyncio.gather(self._write_status(memory, body, patch, now), *said)
        return None

    async def _write_status(
        self, memory: Memory, body: Mapping[str, Any], patch: Mapping[str, Any], now: float
    ) -> None:
        try:
            answer = await apply.write_status(self._context.api, body, patch)
        except ApiError as error:
            if error.status == 404:
                return
            raise
        memory.status_at, memory.turn = now, None
        self._context.store.put(LLMDEPLOYMENT, answer)

    def _until_turn(self, memory: Memory, now: float) -> float:
        """Seconds until changed numbers may be written: a while after the last write, and one object after another."""
        earliest = (memory.status_at or 0.0) + self._context.settings.reconcile.status_interval_seconds
        if memory.turn is None:
            if now < earliest:
                return earliest - now
            memory.turn = self._context.pace.next_turn(now)
        return memory.turn - now
