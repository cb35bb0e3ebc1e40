"""A queue of blocks from whose middle one can be taken: a doubly linked list whose nodes are the blocks."""

from collections.abc import Iterator

from pagefleet_server.core.prefix_hash import BlockHash


class Block:
    """One block's books. `previous` and `following` belong to the queue."""

    __slots__ = ("block_hash", "block_id", "following", "previous", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.block_hash: BlockHash | None = None
        self.previous: Block | None = None
        self.following: Block | None = None


class FreeQueue:
    """prepend, append, pop_first and remove are O(1) and allocate nothing. A block is in at most one queue, once."""

    def __init__(self) -> None:
        # One sentinel closes the list into a ring: no special case at either end.
        self._ring = Block(-1)
        self._ring.previous = self._ring.following = self._ring
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        block = self._ring.following
        while block is not None and block is not self._ring:
            yield block
            block = block.following

    def prepend(self, block: Block) -> None:
        """Put it where pop_first takes it next."""
        self._insert_after(self._ring, block)

    def append(self, block: Block) -> None:
        """Put it at the end."""
        assert self._ring.previous is not None
        self._insert_after(self._ring.previous, block)

    def pop_first(self) -> Block:
        """Take the head. Raises IndexError when empty."""
        first = self._ring.following
        if first is None or first is self._ring:
            raise IndexError("the free queue is empty")
        self.remove(first)
        return first

    def remove(self, block: Block) -> None:
        """Take it out, wherever it is. Raises ValueError when it is in no queue."""
        if block.previous is None or block.following is None:
            raise ValueError(f"block {block.block_id} is in no queue")
        block.previous.following = block.following
        block.following.previous = block.previous
        block.previous = block.following = None
        self._count -= 1

    def _insert_after(self, left: Block, block: Block) -> None:
        if block.previous is not None:
            raise ValueError(f"block {block.block_id} is already in a queue")
        right = left.following
        assert right is not None
        block.previous, block.following = left, right
        left.following = right.previous = block
        self._count += 1
