"""What every part of the API works on: objects, resources, time, and how names are made."""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagefleet_localcluster.api.resources import Registry, Resource, builtin_resources
from pagefleet_localcluster.api.store import Name, Store, Stored
from pagefleet_localcluster.objects import SAFE_ALPHABET, format_time

Json = dict[str, Any]


@dataclass
class Cluster:
    """The state of one local cluster."""

    clock: Callable[[], float]
    """Seconds since the epoch."""
    store: Store = field(default_factory=Store)
    registry: Registry = field(default_factory=lambda: Registry(builtin_resources()))
    rng: random.Random = field(default_factory=random.Random)

    def now(self) -> str:
        """The time as Kubernetes writes it, to the second."""
        return format_time(self.clock())

    def new_uid(self) -> str:
        """A random UUID."""
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def name_from(self, prefix: str) -> str:
        """A name for `generateName`: the prefix and five letters."""
        return prefix[:58] + "".join(self.rng.choices(SAFE_ALPHABET, k=5))

    def get(self, resource: Resource, name: Name) -> Stored | None:
        """The current version of an object, if it exists."""
        return self.store.get(resource.collection, name)
