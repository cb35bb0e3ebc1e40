"""Binds PersistentVolumeClaims to folders, and removes a folder with its claim."""

import shutil
from pathlib import Path

from pagefleet_localcluster.client import CLAIMS, Client
from pagefleet_localcluster.objects import name_of
from pagefleet_localcluster.reflector import Reflector


class ClaimController:
    """Every claim is bound at once, whatever its size and storage class: the folder is `directory/NAMESPACE/NAME`."""

    def __init__(self, client: Client, claims: Reflector, directory: Path) -> None:
        self._client = client
        self._claims = claims
        self._directory = directory

    async def reconcile(self, key: str) -> float | None:
        """Bind the claim `key`, or remove what a deleted one held."""
        claim = self._claims.objects.get(key)
        if claim is None:
            shutil.rmtree(self._directory / key, ignore_errors=True)
            return None
        if (claim.get("status") or {}).get("phase") == "Bound":
            return None
        (self._directory / key).mkdir(parents=True, exist_ok=True)
        spec, namespace = claim["spec"], claim["metadata"]["namespace"]
        if not spec.get("volumeName"):
            volume = {"spec": {"volumeName": f"pvc-{claim['metadata']['uid']}"}}
            self._claims.record(await self._client.patch(CLAIMS, name_of(claim), volume, namespace))
        status = {
            "phase": "Bound",
            "accessModes": spec.get("accessModes") or [],
            "capacity": {"storage": ((spec.get("resources") or {}).get("requests") or {}).get("storage", "0")},
        }
        patched = await self._client.patch(CLAIMS, name_of(claim), {"status": status}, namespace, subresource="status")
        self._claims.record(patched)
        return None
