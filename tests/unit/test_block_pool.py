"""The block pool by exact sequences: who goes first, what is kept."""

import pytest

from pagefleet_server.core.block_pool import BlockPool, PoolError
from pagefleet_server.core.prefix_hash import BlockHash, chain_hash, chain_root


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def test_new_pool_gives_ids_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(3)
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (0, 0, 3)


def test_allocating_more_than_available_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(PoolError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    pool.register(a, name("a"))
    pool.release([a])
    pool.release([b, c])
    assert pool.allocate(2) == [b, c]
    assert pool.find(name("a")) == a


def test_cached_blocks_are_evicted_least_recently_released_first_and_tail_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for index, block in enumerate([*first, *second]):
        pool.register(block, name(str(index)))
    pool.release(first)
    pool.release(second)
    assert pool.num_cached == 4
    assert pool.allocate(3) == [first[1], first[0], second[1]]
    assert pool.num_evictions == 3
    assert pool.find(name("2")) == second[0]


def test_sharing_a_cached_block_saves_it_from_eviction() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.register(a, name("a"))
    pool.register(b, name("b"))
    pool.release([a, b])
    pool.share([b])
    assert pool.allocate(1) == [a]
    assert pool.references(b) == 1
    pool.check_integrity()


def test_shared_block_stays_used_until_the_last_holder_leaves() -> None:
    pool = BlockPool(1)
    (a,) = pool.allocate(1)
    pool.share([a])
    pool.release([a])
    assert pool.num_used == 1
    pool.release([a])
    assert pool.num_free == 1


def test_second_block_with_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    assert pool.register(a, name("x"))
    assert not pool.register(b, name("x"))
    assert pool.find(name("x")) == a
    pool.release([a, b])
    assert (pool.num_free, pool.num_cached) == (1, 1)


def test_forgetting_makes_idle_and_held_blocks_unfindable() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.register(a, name("a"))
    pool.register(b, name("b"))
    pool.release([a])
    pool.forget_cached()
    pool.check_integrity()
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 1)
    assert pool.find(name("a")) is pool.find(name("b")) is None
    pool.release([b])
    assert (pool.num_free, pool.num_cached) == (2, 0)


@pytest.mark.parametrize("block_id", [0, -1, 3])
def test_ids_outside_the_pool_are_refused(block_id: int) -> None:
    pool = BlockPool(2)
    with pytest.raises(PoolError, match=r"not in 1\.\.2"):
        pool.release([block_id])


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    (a,) = pool.allocate(1)
    with pytest.raises(PoolError, match="no content to share"):
        pool.share([2])
    with pytest.raises(PoolError, match="nobody holds it"):
        pool.register(2, name("b"))
    pool.register(a, name("a"))
    with pytest.raises(PoolError, match="already has a hash"):
        pool.register(a, name("other"))
    pool.release([a])
    with pytest.raises(PoolError, match="more often than it was taken"):
        pool.release([a])
    with pytest.raises(ValueError, match="at least 1 usable block"):
        BlockPool(0)


def test_chain_hash_depends_on_salt_parent_and_every_token() -> None:
    root = chain_root("", "")
    first = chain_hash(root, [1, 2, 3, 4])
    others = [
        chain_hash(chain_root("ab", ""), [1, 2, 3, 4]),
        chain_hash(chain_root("", "ab"), [1, 2, 3, 4]),
        chain_hash(chain_root("a", "b"), [1, 2, 3, 4]),
        chain_hash(first, [1, 2, 3, 4]),
        chain_hash(root, [1, 2, 3, 5]),
        chain_hash(root, [4, 3, 2, 1]),
    ]
    assert len({first, *others}) == 7
    assert first == chain_hash(chain_root("", ""), (1, 2, 3, 4))
