"""Which blocks each request holds, is promised, or still has in a step in flight."""

from collections.abc import Iterable

from pagefleet_server.core.block_pool import BlockPool, PoolError
from pagefleet_server.core.demand import BlockDemand
from pagefleet_server.core.prefix_hash import BlockHash, chain_hash, chain_root
from pagefleet_server.core.request import Request


class BlockTables:
    """The pool's books by request.

    A promise sets blocks aside without taking them: a request that is let in gets all blocks of its known tokens
    (`promised <= available` always holds), yet until a chunk needs them they stay in the cache as content.
    A fence keeps the blocks of a request that ended while a step was still writing them, until that step is done.
    """

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._root = chain_root("")
        self._demand = BlockDemand(self.pool.has)
        self.pool.observer = self._demand
        self._promised = 0
        self._fences: list[tuple[int, list[int]]] = []  # (step id, blocks)
        self._num_fenced = 0

    @property
    def num_open(self) -> int:
        """Blocks that are neither held nor promised."""
        return self.pool.num_available - self._promised

    @property
    def num_fenced(self) -> int:
        """References that end with the steps in flight: at most so many blocks come back."""
        return self._num_fenced

    @property
    def num_wanted(self) -> int:
        """New blocks that the queued requests need for the tokens they have."""
        return self._demand.num_blocks

    def queue(self, request: Request) -> None:
        """The request begins to wait: its blocks count as wanted."""
        shareable = self.hashes(request, self._max_cached_blocks(request))
        self._demand.add(
            request.request_id, shareable, num_private=self.blocks_for(request.num_tokens) - len(shareable)
        )

    def unqueue(self, request: Request) -> None:
        """It waits no more."""
        self._demand.remove(request.request_id)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, request: Request) -> list[int]:
        """Blocks with the KV of the request's first tokens, never all of them: the last one must be computed to
        draw from its logits. Takes no reference."""
        found: list[int] = []
        for block_hash in self.hashes(request, self._max_cached_blocks(request)):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def admit(self, request: Request, *, headroom: int) -> int | None:
        """Share the cached prefix and promise the rest of the known tokens' blocks; gives the number of cached tokens.
        None, and nothing changes, when fewer than `headroom` blocks would stay open."""
        cached = self.cached_prefix(request)
        num_new = self.blocks_for(request.num_tokens) - len(cached)
        num_idle = sum(self.pool.is_idle(block_id) for block_id in cached)
        if num_new + num_idle + headroom > self.num_open:
            return None
        self.pool.share(cached)
        request.block_ids = cached
        request.num_registered = len(cached)
        request.promised_blocks = num_new
        self._promised += num_new
        return len(cached) * self.block_size

    def shortage(self, request: Request, num_tokens: int) -> int:
        """Open blocks that are missing for the request to hold so many tokens; 0: grow() will succeed."""
        wanted = self.blocks_for(num_tokens) - len(request.block_ids) - request.promised_blocks
        return max(0, wanted - self.num_open) if wanted > 0 else 0

    def grow(self, request: Request, num_tokens: int) -> None:
        """Take blocks until so many tokens fit, promised ones first. Raises PoolError when shortage() is not 0."""
        count = self.blocks_for(num_tokens) - len(request.block_ids)
        if count <= 0:
            return
        from_promise = min(count, request.promised_blocks)
        if count - from_promise > self.num_open:
            raise PoolError(f"request {request.request_id} needs {count - from_promise} blocks of {self.num_open} open")
        request.block_ids += self.pool.allocate(count)
        request.promised_blocks -= from_promise
        self._promised -= from_promise

    def register(self, request: Request) -> None:
        """Tell the prefix cache of every block that the scheduled steps fill with known tokens. Requests behind this
        one may share them at once, even in the same step: each layer writes the whole batch before it reads."""
        if not self._prefix_caching:
            return
        num_full = min(request.num_computed, request.num_tokens) // self.block_size
        if num_full <= request.num_registered:
            return
        hashes = self.hashes(request, num_full)
        for index in range(request.num_registered, num_full):
            self.pool.register(request.block_ids[index], hashes[index])
        request.num_registered = num_full

    def release(self, request: Request, *, fence_step: int | None) -> None:
        """Give up everything the request holds; with a fence only once that step is done."""
        self._promised -= request.promised_blocks
        request.promised_blocks = 0
        request.num_registered = 0
        block_ids, request.block_ids = request.block_ids, []
        if fence_step is None or not block_ids:
            self.pool.release(block_ids)
        else:
            self._fences.append((fence_step, block_ids))
            self._num_fenced += len(block_ids)

    def lift_fences(self, step_id: int) -> None:
        """Step `step_id` and all before it are done: what they wrote may be reused."""
        if not self._fences:
            return
        lifted = [block_ids for fence_step, block_ids in self._fences if fence_step <= step_id]
        self._fences = [fence for fence in self._fences if fence[0] > step_id]
        for block_ids in lifted:
            self._num_fenced -= len(block_ids)
            self.pool.release(block_ids)

    def hashes(self, request: Request, count: int) -> list[BlockHash]:
        """The hashes of the request's first `count` full blocks; computed once."""
        known = request.block_hashes
        size = self.block_size
        parent = known[-1] if known else self._root
        for index in range(len(known), count):
            parent = chain_hash(parent, request.token_ids[index * size : (index + 1) * size])
            known.append(parent)
        return known[:count]

    def _max_cached_blocks(self, request: Request) -> int:
        return (request.num_tokens - 1) // self.block_size if self._prefix_caching else 0

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise PoolError unless holders and pool agree."""
        self.pool.check_integrity()
        holders: dict[int, int] = {}
        promised = 0
        for request in running:
            promised += request.promised_blocks
            if len(set(request.block_ids)) != len(request.block_ids):
                raise PoolError(f"request {request.request_id} holds a block twice: {request.block_ids}")
            for block_id in request.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        for _, block_ids in self._fences:
            for block_id in block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        for block_id in range(1, self.pool.num_blocks + 1):
            if self.pool.references(block_id) != holders.get(block_id, 0):
                raise PoolError(
                    f"block {block_id}: {self.pool.references(block_id)} references, {holders.get(block_id, 0)} holders"
                )
        if promised != self._promised or promised > self.pool.num_available:
            raise PoolError(f"{self._promised} blocks promised, {promised} by request, {self.pool.num_available} there")
        if self._num_fenced != sum(len(block_ids) for _, block_ids in self._fences):
            raise PoolError("the fences are miscounted")
        if self._demand.num_blocks != self._demand.recount():
            raise PoolError(f"{self._demand.num_blocks} blocks wanted by the books, {self._demand.recount()} by count")
