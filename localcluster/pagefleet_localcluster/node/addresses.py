"""Loopback addresses and GPU slots for a node's pods."""

import random
from collections.abc import Sequence

from pagefleet_localcluster.objects import Object, parse_quantity

GPU = "nvidia.com/gpu"


class AddressPool:
    """Hands out addresses of 127.(64+index).0.0/16 in turn, from a random start: an address comes back only after all
    others, and two clusters on one machine are unlikely to meet."""

    def __init__(self, index: int, rng: random.Random) -> None:
        self._prefix = f"127.{64 + index}"
        self._next = rng.randrange(2**16)
        self._used: set[str] = set()

    def take(self) -> str:
        """A free address. Raises RuntimeError when all 65,000 are in use."""
        for _ in range(2**16):
            third, fourth = divmod(self._next, 256)
            self._next = (self._next + 1) % 2**16
            address = f"{self._prefix}.{third}.{fourth}"
            if fourth not in (0, 255) and address not in self._used:
                self._used.add(address)
                return address
        raise RuntimeError(f"no free pod address in {self._prefix}.0.0/16")

    @property
    def num_used(self) -> int:
        """Addresses in use."""
        return len(self._used)

    def give_back(self, address: str) -> None:
        """The pod that had it is gone."""
        self._used.discard(address)


def gpus_for(pod: Object, free: Sequence[int]) -> dict[str, list[int]] | None:
    """Slots of `free` for each container that asks for GPUs; None when there are not enough."""
    taken: dict[str, list[int]] = {}
    left = list(free)
    for container in [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]:
        limits = (container.get("resources") or {}).get("limits") or {}
        count = int(parse_quantity(limits.get(GPU, 0)))
        if count > len(left):
            return None
        taken[container["name"]], left = left[:count], left[count:]
    return taken
