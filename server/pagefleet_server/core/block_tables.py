"""Which blocks each request holds, is promised, or still has in a step in flight."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagefleet_server.core.block_pool import BlockPool, PoolError
from pagefleet_server.core.demand import BlockDemand
from pagefleet_server.core.prefix_hash import BlockHash, chain_hash
from pagefleet_server.core.request import Request


@dataclass(frozen=True, slots=True)
class _Fence:
    step_id: int
    block_ids: list[int]
    is_copy_source: bool = False


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
        self._demand = BlockDemand(self.pool.has)
        self.pool.observer = self._demand
        self._promised = 0
        self._fences: list[_Fence] = []
        self._num_fenced = 0  # blocks of fences that are no copy sources
        self._copy_sources: dict[int, int] = {}  # block -> fences that keep it as the source of a copy

    @property
    def num_open(self) -> int:
        """Blocks that are neither held nor promised."""
        return self.pool.num_available - self._promised

    @property
    def num_promised(self) -> int:
        """Available blocks that are set aside."""
        return self._promised

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
        shareable, num_private = self._wants(request)
        self._demand.add(request.request_id, shareable, num_private=num_private)

    def unqueue(self, request: Request) -> None:
        """It waits no more."""
        self._demand.remove(request.request_id)

    def copies_for(self, request: Request) -> int:
        """Blocks that a leader and its siblings will take soon after they fork: all but one copy the last block."""
        return max(0, request.num_seats - 1) if request.num_tokens % self.block_size else 0

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

    def missing(self, request: Request, *, headroom: int, without: Sequence[Request] = ()) -> int:
        """Open blocks that are missing to admit() a queued request and keep `headroom` open; 0: it can get in.
        `without`: as it will be when these have given up what they hold."""
        cached = self.cached_prefix(request)
        holders = Counter(block_id for leaving in without for block_id in leaving.block_ids)
        freed = [block_id for block_id, count in holders.items() if self.pool.references(block_id) == count]
        num_open = self.num_open + len(freed) + sum(leaving.promised_blocks for leaving in without)
        num_new = self.blocks_for(request.num_tokens) - len(cached)
        num_idle = sum(self.pool.is_idle(block_id) for block_id in cached) + len({*cached}.intersection(freed))
        return max(0, num_new + num_idle + headroom - num_open)

    def admit(self, request: Request) -> int:
        """Share the cached prefix and promise the rest of the known tokens' blocks; gives the number of cached tokens.
        Call it when missing() is 0."""
        cached = self.cached_prefix(request)
        num_new = self.blocks_for(request.num_tokens) - len(cached)
        self.pool.share(cached)
        request.block_ids = cached
        request.num_registered = len(cached)
        request.promised_blocks = num_new
        self._promised += num_new
        return len(cached) * self.block_size

    def shortage(self, request: Request, num_tokens: int) -> int:
        """Open blocks that are missing to write() up to so many tokens; 0: it will succeed."""
        wanted = self.blocks_for(num_tokens) - len(request.block_ids) - request.promised_blocks
        wanted += self._is_shared_at_its_end(request)
        return max(0, wanted - self.num_open) if wanted > 0 else 0

    def write(self, request: Request, num_tokens: int, *, step_id: int) -> tuple[int, int] | None:
        """Make the blocks of tokens [num_computed, num_tokens) writable for this request: take new ones, promised ones
        first, and trade a shared, partly filled last block for an own one. Gives (source, destination) to copy in the
        latter case. Raises PoolError when shortage() is not 0."""
        copy = None
        if self._is_shared_at_its_end(request):
            (own,) = self.pool.allocate(1)
            shared, request.block_ids[-1] = request.block_ids[-1], own
            copy = (shared, own)
            # The request's reference keeps the source until the copy is made, so that it is no copy's destination.
            self._fences.append(_Fence(step_id, [shared], is_copy_source=True))
            self._copy_sources[shared] = self._copy_sources.get(shared, 0) + 1
        count = self.blocks_for(num_tokens) - len(request.block_ids)
        if count <= 0:
            return copy
        from_promise = min(count, request.promised_blocks)
        if count - from_promise > self.num_open:
            raise PoolError(f"request {request.request_id} needs {count - from_promise} blocks of {self.num_open} open")
        request.block_ids += self.pool.allocate(count)
        request.promised_blocks -= from_promise
        self._promised -= from_promise
        return copy

    def trim(self, request: Request) -> None:
        """Give back the blocks behind the computed tokens: they were written for guesses that were wrong. No step in
        flight may have a row of the request; such a block was never shared nor findable."""
        kept = self.blocks_for(request.num_computed)
        surplus = request.block_ids[kept:]
        if surplus:
            del request.block_ids[kept:]
            self.pool.release(surplus)

    def fork(self, leader: Request, sibling: Request) -> None:
        """The sibling holds all blocks of the leader, too."""
        self.pool.share(leader.block_ids)
        sibling.block_ids = list(leader.block_ids)
        sibling.block_hashes = list(leader.block_hashes)
        sibling.num_registered = leader.num_registered

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

    def forget(self, request: Request) -> None:
        """Nobody finds what this request computed: its content is not to be trusted."""
        for block_hash in request.block_hashes:
            self.pool.forget(block_hash)

    def release(self, request: Request, *, fence_step: int | None) -> None:
        """Give up everything the request holds; with a fence only once that step is done."""
        self._promised -= request.promised_blocks
        request.promised_blocks = 0
        request.num_registered = 0
        block_ids, request.block_ids = request.block_ids, []
        if fence_step is None or not block_ids:
            self.pool.release(block_ids)
        else:
            self._fences.append(_Fence(fence_step, block_ids))
            self._num_fenced += len(block_ids)

    def lift_fences(self, step_id: int) -> None:
        """Step `step_id` and all before it are done: what they wrote may be reused."""
        if not self._fences:
            return
        lifted = [fence for fence in self._fences if fence.step_id <= step_id]
        self._fences = [fence for fence in self._fences if fence.step_id > step_id]
        for fence in lifted:
            if fence.is_copy_source:
                (source,) = fence.block_ids
                self._copy_sources[source] -= 1
                if not self._copy_sources[source]:
                    del self._copy_sources[source]
            else:
                self._num_fenced -= len(fence.block_ids)
            self.pool.release(fence.block_ids)

    def hashes(self, request: Request, count: int) -> list[BlockHash]:
        """The hashes of the request's first `count` full blocks; computed once."""
        known = request.block_hashes
        size = self.block_size
        parent = known[-1] if known else request.root_hash
        for index in range(len(known), count):
            parent = chain_hash(parent, request.token_ids[index * size : (index + 1) * size])
            known.append(parent)
        return known[:count]

    def _wants(self, request: Request) -> tuple[list[BlockHash], int]:
        """Blocks that the cache may have, and further ones that it cannot have."""
        shareable = self.hashes(request, self._max_cached_blocks(request))
        return shareable, self.blocks_for(request.num_tokens) - len(shareable) + self.copies_for(request)

    def _check_contents(self, request: Request) -> None:
        """What the cache says of the request's blocks must be what the request has there."""
        parent, size = request.root_hash, self.block_size
        for index, known in enumerate(request.block_hashes):
            tokens = request.token_ids[index * size : (index + 1) * size]
            parent = chain_hash(parent, tokens)
            if len(tokens) < size or known != parent:
                raise PoolError(f"request {request.request_id}: the hash of its block {index} is wrong")
        for index, block_id in enumerate(request.block_ids):
            content = self.pool.content(block_id)
            if content is not None and content != request.block_hashes[index]:
                raise PoolError(f"request {request.request_id}: block {block_id} is cached as something else")

    def _is_shared_at_its_end(self, request: Request) -> bool:
        if request.num_computed % self.block_size == 0:
            return False
        last = request.block_ids[-1]
        return self.pool.references(last) - self._copy_sources.get(last, 0) > 1

    def _max_cached_blocks(self, request: Request) -> int:
        if not self._prefix_caching or request.num_to_score or request.sampling.pooling:
            return 0
        return (request.num_tokens - 1) // self.block_size

    def check_integrity(self, running: Iterable[Request], waiting: Iterable[Request]) -> None:
        """Raise PoolError unless holders and pool agree, and what waits is counted as it is now."""
        self.pool.check_integrity()
        holders: dict[int, int] = {}
        promised = 0
        for request in running:
            promised += request.promised_blocks
            if len(set(request.block_ids)) != len(request.block_ids):
                raise PoolError(f"request {request.request_id} holds a block twice: {request.block_ids}")
            for block_id in request.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
            self._check_contents(request)
        for fence in self._fences:
            for block_id in fence.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        for block_id in range(1, self.pool.num_blocks + 1):
            if self.pool.references(block_id) != holders.get(block_id, 0):
                raise PoolError(
                    f"block {block_id}: {self.pool.references(block_id)} references, {holders.get(block_id, 0)} holders"
                )
        if promised != self._promised or promised > self.pool.num_available:
            raise PoolError(f"{self._promised} blocks promised, {promised} by request, {self.pool.num_available} there")
        sources = [fence.block_ids[0] for fence in self._fences if fence.is_copy_source]
        num_fenced = sum(len(fence.block_ids) for fence in self._fences if not fence.is_copy_source)
        if self._num_fenced != num_fenced or self._copy_sources != dict(Counter(sources)):
            raise PoolError("the fences are miscounted")
        if self._demand.by_request != {request.request_id: self._wants(request) for request in waiting}:
            raise PoolError("a waiting request wants other blocks than are counted for it")
        if self._demand.num_blocks != self._demand.recount():
            raise PoolError(f"{self._demand.num_blocks} blocks wanted by the books, {self._demand.recount()} by count")
