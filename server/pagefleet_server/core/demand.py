"""How many new blocks the waiting requests need: kept up to date event by event, since it is asked for every step."""

from collections.abc import Callable, Sequence

from pagefleet_server.core.prefix_hash import BlockHash


class BlockDemand:
    """A prefix wanted by several requests counts once; a block that is cached (or held by a running request) does not
    count. One evicted block in the middle of a chain counts as one, though all behind it must be computed again."""

    def __init__(self, is_cached: Callable[[BlockHash], bool]) -> None:
        self._is_cached = is_cached
        self._wanted: dict[BlockHash, int] = {}  # hash -> waiting requests that want it
        self._num_missing = 0  # wanted hashes that are not cached
        self._num_private = 0  # blocks that cannot come from the cache
        self.by_request: dict[str, tuple[Sequence[BlockHash], int]] = {}
        """What add() was told of those that wait."""

    @property
    def num_blocks(self) -> int:
        """New blocks needed in all."""
        return self._num_missing + self._num_private

    def add(self, request_id: str, shareable: Sequence[BlockHash], *, num_private: int) -> None:
        """A request begins to wait: blocks that the cache may have, and further ones that it cannot have."""
        self.by_request[request_id] = (shareable, num_private)
        self._num_private += num_private
        for block_hash in shareable:
            count = self._wanted.get(block_hash, 0)
            if count == 0 and not self._is_cached(block_hash):
                self._num_missing += 1
            self._wanted[block_hash] = count + 1

    def remove(self, request_id: str) -> None:
        """It waits no more. Raises KeyError when it did not."""
        shareable, num_private = self.by_request.pop(request_id)
        self._num_private -= num_private
        for block_hash in shareable:
            count = self._wanted[block_hash] - 1
            if count:
                self._wanted[block_hash] = count
            else:
                del self._wanted[block_hash]
                if not self._is_cached(block_hash):
                    self._num_missing -= 1

    def on_cached(self, block_hash: BlockHash) -> None:
        """The cache has got this block."""
        if block_hash in self._wanted:
            self._num_missing -= 1

    def on_forgotten(self, block_hash: BlockHash) -> None:
        """The cache has lost this block."""
        if block_hash in self._wanted:
            self._num_missing += 1

    def recount(self) -> int:
        """num_blocks computed from scratch, for the check of integrity."""
        wanted = {block_hash for shareable, _ in self.by_request.values() for block_hash in shareable}
        missing = sum(not self._is_cached(block_hash) for block_hash in wanted)
        return missing + sum(num_private for _, num_private in self.by_request.values())
