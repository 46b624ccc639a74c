import pytest

from batching.blocks import BlockPool
from batching.prefix import PrefixCache, root
from batching.runner import BLOCK_TOKENS

ROOT = root("default", "tiny")


def test_take_gives_the_lowest_free_block_and_counts_it_as_used() -> None:
    pool = BlockPool(3)
    assert [pool.take(), pool.take()] == [0, 1]
    pool.release(0)
    assert (pool.free, pool.used) == (2, 1)
    assert pool.take() == 0


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert (pool.refs(block), pool.free) == (1, 0)
    pool.release(block)
    assert (pool.refs(block), pool.free) == (0, 1)


def test_a_full_pool_gives_nothing() -> None:
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(ValueError, match="all blocks are held"):
        pool.take()


def test_releasing_once_too_often_is_an_error() -> None:
    pool = BlockPool(1)
    pool.release(pool.take())
    with pytest.raises(ValueError, match="not held"):
        pool.release(0)


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="is free"):
        BlockPool(1).share(0)


def test_a_resting_block_counts_as_free_and_is_given_away_last() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    block = pool.take()
    cache.insert(ROOT, [1] * BLOCK_TOKENS, block)
    pool.release(block)
    assert (pool.free, pool.used) == (2, 0)
    assert [pool.take(), pool.take()] == [1, block]
    assert len(cache) == 0


def test_a_resting_block_can_be_held_again() -> None:
    pool = BlockPool(1)
    cache = PrefixCache(pool)
    block = pool.take()
    cache.insert(ROOT, [1] * BLOCK_TOKENS, block)
    pool.release(block)
    pool.share(block)
    assert (pool.refs(block), pool.free) == (1, 0)
    with pytest.raises(ValueError, match="all blocks are held"):
        pool.take()


def test_a_lost_block_is_noticed() -> None:
    pool = BlockPool(2)
    pool.take()
    pool._refs[0] = 0
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_integrity()
