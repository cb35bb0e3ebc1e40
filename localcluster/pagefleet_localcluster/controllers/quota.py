"""ResourceQuota status: how much of it the namespace's pods use. The API server itself refuses what exceeds it."""

from collections.abc import Iterable
from decimal import Decimal

from pagefleet_localcluster.client import RESOURCE_QUOTAS, Client
from pagefleet_localcluster.objects import Object, quota_usage
from pagefleet_localcluster.reflector import Reflector


class QuotaController:
    """Reconciles one ResourceQuota at a time."""

    def __init__(self, client: Client, quotas: Reflector, pods: Reflector) -> None:
        self._client = client
        self._quotas = quotas
        self._pods = pods

    async def reconcile(self, key: str) -> float | None:
        """One synchronisation of the quota `key`."""
        quota = self._quotas.objects.get(key)
        if quota is None:
            return None
        namespace = quota["metadata"]["namespace"]
        pods = [pod for pod in self._pods.objects.values() if pod["metadata"]["namespace"] == namespace]
        hard = quota["spec"].get("hard") or {}
        status = {"hard": hard, "used": used_of(hard, pods)}
        if status != quota.get("status"):
            self._quotas.record(await self._client.replace(RESOURCE_QUOTAS, {**quota, "status": status}, "status"))
        return None


def used_of(hard: Iterable[str], pods: Iterable[Object]) -> dict[str, str]:
    """Quantities of the pods that have not finished, for those names of `hard` that are about pods."""
    used = quota_usage(pods)
    return {name: _format(used[name]) for name in hard if name in used or _is_about_pods(name)}


def _is_about_pods(name: str) -> bool:
    return name in ("pods", "count/pods", "cpu", "memory") or name.startswith(("requests.", "limits."))


def _format(amount: Decimal) -> str:
    return f"{amount:.0f}" if amount == int(amount) else f"{round(amount * 1000)}m"
