"""Who wants which part of a namespace's budget of devices, between the loops of one operator."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pagefleet_operator.budget import Claim, allowances
from pagefleet_operator.errors import SpecError
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.pods import is_finished
from pagefleet_operator.specs import Specs
from pagefleet_operator.store import LLMDEPLOYMENT, POD, Store


class Shares:
    """Remembers what each LLMDeployment wants, and what is being written for it. One per operator."""

    def __init__(self, budgets: Mapping[str, int], store: Store, specs: Specs) -> None:
        """`budgets`: devices by namespace; a namespace that is not in it has no bound."""
        self._budgets = budgets
        self._store = store
        self._specs = specs
        self._wanted: dict[ObjectKey, tuple[int, int]] = {}
        self._granting: dict[ObjectKey, int] = {}

    def allowance(self, llmd: LLMDeployment) -> int | None:
        """Replicas that it may have now; None: nothing bounds it. What was asked for last counts as wanted."""
        devices = self._budgets.get(llmd.key.namespace)
        if devices is None or llmd.spec.engine.accelerator is None:
            return None
        claims = [claim for key in self._store.keys(LLMDEPLOYMENT) if (claim := self._claim(key, llmd)) is not None]
        return allowances(claims, devices)[llmd.key]

    def want(self, key: ObjectKey, replicas: int, *, needed: int | None = None) -> None:
        """What a decision would have without the budget, and what of it load needs; None: all."""
        if key.namespace in self._budgets:
            self._wanted[key] = (replicas, replicas if needed is None else needed)

    @contextmanager
    def granting(self, key: ObjectKey, replicas: int) -> Iterator[None]:
        """While spec.replicas is being written nobody else gets the same devices."""
        self._granting[key] = replicas
        try:
            yield
        finally:
            del self._granting[key]

    def forget(self, key: ObjectKey) -> None:
        """The object is gone."""
        self._wanted.pop(key, None)

    def _claim(self, key: ObjectKey, asking: LLMDeployment) -> Claim | None:
        if key.namespace != asking.key.namespace:
            return None
        body = self._store.get(LLMDEPLOYMENT, key)
        if body is None:
            return None
        try:
            llmd = asking if key == asking.key else self._specs.parse(body)
        except SpecError:
            return None  # its children are left alone, and it cannot grow
        if llmd.spec.engine.accelerator is None:
            return None
        each, autoscaling = llmd.spec.engine.accelerator.count, llmd.spec.autoscaling
        held = each * sum(not is_finished(pod) for pod in self._store.owned(POD, key))
        if body["metadata"].get("deletionTimestamp") is not None:
            return Claim(key, 0, each, replicas=0, devices_held=held, wanted=0, needed=0, minimum=0)
        replicas = max(llmd.spec.replicas, self._granting.get(key, 0))
        wanted, needed = self._wanted.get(key, (replicas, replicas))
        is_managed = autoscaling is not None and autoscaling.mode == "Managed"
        return Claim(
            key=key,
            priority=autoscaling.priority if autoscaling is not None else 0,
            devices_per_replica=each,
            replicas=replicas,
            devices_held=held,
            wanted=wanted if is_managed else replicas,
            needed=needed if is_managed else replicas,
            minimum=autoscaling.min_replicas if autoscaling is not None and is_managed else replicas,
        )
