"""The KV-cache blocks: who holds them, which are cached, which goes next. O(1) per block for every operation."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from pagefleet_server.core.free_queue import Block, FreeQueue
from pagefleet_server.core.prefix_hash import BlockHash

NULL_BLOCK_ID: Final = 0
"""Never allocated and never written: padding in block tables points here."""


class PoolError(Exception):
    """The caller broke the pool's rules, or the books do not balance: a fault of the program."""


class CacheObserver(Protocol):
    """Told when content becomes findable, and when it is lost."""

    def on_cached(self, block_hash: BlockHash) -> None:
        """find() gives this content from now on."""

    def on_forgotten(self, block_hash: BlockHash) -> None:
        """find() does not give it any more."""


class BlockPool:
    """Usable blocks have the ids 1..num_blocks. Each is in exactly one state:

    used    held by at least one request (references > 0)
    cached  held by nobody, its content still valid under its hash; in the free queue, may be evicted
    free    held by nobody, no content; in the free queue before every cached block

    free + cached + used = num_blocks. The queue's head goes first: blocks without a hash, then the least recently
    released cached block; release tail-first, so that of one sequence the last block is evicted first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; at least 1 usable block is needed")
        self._blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self._free = FreeQueue()
        self._cached: dict[BlockHash, Block] = {}
        self._num_cached_idle = 0  # cached and in the free queue
        self.observer: CacheObserver | None = None
        self.num_evictions = 0
        """Cached blocks whose content was given up for a new one, since start."""
        for block in self._blocks[1:]:
            self._free.append(block)

    @property
    def num_blocks(self) -> int:
        """Usable blocks, the null block excluded."""
        return len(self._blocks) - 1

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can give: free plus cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content is still of use."""
        return self._num_cached_idle

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, without content."""
        return len(self._free) - self._num_cached_idle

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def content(self, block_id: int) -> BlockHash | None:
        """The hash under which the block is findable; None when it is not."""
        return self._blocks[block_id].block_hash

    def references(self, block_id: int) -> int:
        """Holders of a block."""
        return self._blocks[block_id].references

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, one reference each; evicts cached ones when the free ones run out.

        Raises PoolError when fewer are available: ask num_available first.
        """
        if count > len(self._free):
            raise PoolError(f"{count} blocks wanted, {len(self._free)} available")
        taken = []
        for _ in range(count):
            block = self._free.pop_first()
            if block.block_hash is not None:
                self._forget(block)
                self._num_cached_idle -= 1
                self.num_evictions += 1
            block.references = 1
            taken.append(block.block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each: cached blocks leave the free queue, used ones get another holder."""
        for block_id in block_ids:
            block = self._usable(block_id)
            if block.references == 0:
                if block.block_hash is None:
                    raise PoolError(f"block {block_id} is free: it has no content to share")
                self._free.remove(block)
                self._num_cached_idle -= 1
            block.references += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference from each, in the order of a block table; the last block becomes evictable first."""
        for block_id in reversed(block_ids):
            block = self._usable(block_id)
            if block.references == 0:
                raise PoolError(f"block {block_id} is released more often than it was taken")
            block.references -= 1
            if block.references > 0:
                continue
            if block.block_hash is None:
                self._free.prepend(block)  # last in, first out: its memory is warm
            else:
                self._free.append(block)
                self._num_cached_idle += 1

    def register(self, block_id: int, block_hash: BlockHash) -> bool:
        """Make a full, held block findable. False when another block already has this content: the first one stays,
        since block tables are append-only and blocks are not merged."""
        block = self._usable(block_id)
        if block.references == 0:
            raise PoolError(f"block {block_id} is registered but nobody holds it")
        if block.block_hash is not None:
            raise PoolError(f"block {block_id} already has a hash; a full block never changes")
        if block_hash in self._cached:
            return False
        block.block_hash = block_hash
        self._cached[block_hash] = block
        if self.observer is not None:
            self.observer.on_cached(block_hash)
        return True

    def has(self, block_hash: BlockHash) -> bool:
        """True when find() would give a block."""
        return block_hash in self._cached

    def find(self, block_hash: BlockHash) -> int | None:
        """The block with this content, used or cached. Takes no reference: share() it before anything else."""
        block = self._cached.get(block_hash)
        return None if block is None else block.block_id

    def is_idle(self, block_id: int) -> bool:
        """True when nobody holds the block, so that sharing it takes one from num_available."""
        return self._blocks[block_id].references == 0

    def forget(self, block_hash: BlockHash) -> None:
        """This content is not findable any more, if it was; its holders keep it."""
        block = self._cached.get(block_hash)
        if block is None:
            return
        self._forget(block)
        if block.references == 0:
            self._num_cached_idle -= 1
            self._free.remove(block)
            self._free.prepend(block)  # without content it goes before every cached block

    def forget_cached(self) -> None:
        """Nothing is findable any more. Held blocks keep their content for their holders."""
        for block in list(self._cached.values()):
            self._forget(block)
        self._num_cached_idle = 0

    def check_integrity(self) -> None:
        """Raise PoolError unless the books balance. O(num_blocks)."""
        queued = [block.block_id for block in self._free]
        if len(queued) != len(self._free) or len(set(queued)) != len(queued):
            raise PoolError(f"free queue counts {len(self._free)} blocks and holds {queued}")
        in_queue = set(queued)
        idle_with_hash = 0
        for block in self._blocks[1:]:
            if block.references < 0 or (block.references == 0) != (block.block_id in in_queue):
                raise PoolError(f"block {block.block_id}: {block.references} references, queued or not")
            if block.block_hash is not None:
                idle_with_hash += block.references == 0
                if self._cached.get(block.block_hash) is not block:
                    raise PoolError(f"block {block.block_id} has a hash that does not lead to it")
        hashed = sum(block.block_hash is not None for block in self._blocks)
        if hashed != len(self._cached) or idle_with_hash != self._num_cached_idle:
            raise PoolError(
                f"{hashed} blocks have hashes, {len(self._cached)} are findable;"
                f" {idle_with_hash} are idle, {self._num_cached_idle} counted"
            )
        null = self._blocks[NULL_BLOCK_ID]
        if null.references or null.block_hash is not None or NULL_BLOCK_ID in in_queue:
            raise PoolError("the null block was touched")
        if self.num_free + self.num_cached + self.num_used != self.num_blocks:
            raise PoolError("free + cached + used differ from the total")

    def _usable(self, block_id: int) -> Block:
        if not 0 < block_id < len(self._blocks):
            raise PoolError(f"block {block_id} is not in 1..{self.num_blocks}")
        return self._blocks[block_id]

    def _forget(self, block: Block) -> None:
        assert block.block_hash is not None
        block_hash, block.block_hash = block.block_hash, None
        del self._cached[block_hash]
        if self.observer is not None:
            self.observer.on_forgotten(block_hash)
