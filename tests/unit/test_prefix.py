"""The prefix cache over the block pool, alone and as a state machine against plain dicts."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batching import prefix
from batching.blocks import BlockPool
from batching.prefix import PrefixCache, root
from batching.runner import BLOCK_TOKENS

ROOT = root("default", "tiny")


def ids_of(letter: str | int) -> list[int]:
    return [ord(letter) + 1000 if isinstance(letter, str) else letter] * BLOCK_TOKENS


class Texts:
    """Rows over a pool and its cache: a letter stands for a whole block of ids."""

    def __init__(self, blocks: int, *, enabled: bool = True):
        self.pool = BlockPool(blocks)
        self.cache = PrefixCache(self.pool, enabled=enabled)

    def known(self, text: Sequence[str | int]) -> list[int]:
        """The blocks that the cache finds for the beginning of ``text``."""
        digest, blocks = ROOT, []
        for letter in text:
            hit = self.cache.find(digest, ids_of(letter))
            if hit is None:
                break
            digest = hit[0]
            blocks.append(hit[1])
        return blocks

    def compute(self, text: Sequence[str | int], *, adopt: bool = True) -> list[int]:
        """The block table of a row that has computed ``text``, but what it found."""
        table = self.known(text) if adopt else []
        for block in table:
            self.pool.share(block)
        digest = ROOT
        for index, letter in enumerate(text):
            if index < len(table):
                digest = self.cache.child(digest, ids_of(letter))
            else:
                table.append(self.pool.take())
                digest = self.cache.insert(digest, ids_of(letter), table[index])
        return table

    def drop(self, table: Sequence[int]) -> None:
        for block in reversed(table):
            self.pool.release(block)


def test_the_longest_common_beginning_is_found_while_held_and_after() -> None:
    texts = Texts(8)
    table = texts.compute("abc")
    assert texts.known("abd") == table[:2]
    texts.drop(table)
    assert texts.known("abd") == table[:2]
    assert texts.known("bc") == []


def test_the_same_ids_behind_another_beginning_are_another_block() -> None:
    texts = Texts(8)
    assert texts.compute("ab")[1] != texts.compute("cb")[1]


def test_nothing_is_shared_across_tenants_or_models() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    cache.insert(root("one", "tiny"), ids_of("a"), pool.take())
    assert cache.find(root("one", "tiny"), ids_of("a")) is not None
    for other in (root("two", "tiny"), root("one", "small"), root("on", "etiny")):
        assert cache.find(other, ids_of("a")) is None


def test_child_names_what_insert_will() -> None:
    pool = BlockPool(1)
    cache = PrefixCache(pool)
    assert cache.child(ROOT, ids_of("a")) == cache.insert(ROOT, ids_of("a"), pool.take())


def test_of_two_blocks_with_one_content_the_first_is_remembered_and_the_other_becomes_free() -> None:
    texts = Texts(4)
    first, second = texts.compute("a", adopt=False), texts.compute("a", adopt=False)
    assert texts.known("a") == first
    texts.drop(second)
    assert len(texts.cache) == 1
    assert texts.pool.take() == second[0]


def test_the_text_used_longest_ago_is_evicted_first_from_its_end() -> None:
    texts = Texts(4)
    old, new = texts.compute("ab"), texts.compute("cd")
    texts.drop(new)
    texts.drop(old)
    texts.known("cd")  # a lookup is a use
    assert [texts.pool.take() for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_a_beginning_outlives_what_rests_behind_it_however_it_was_released() -> None:
    texts = Texts(3)
    table = texts.compute("abc")
    for block in table:  # first ones first
        texts.pool.release(block)
    assert [texts.pool.take() for _ in range(3)] == table[::-1]


def test_a_beginning_in_use_by_many_does_not_go_before_an_old_text() -> None:
    texts = Texts(4)
    system, old = texts.compute("s"), texts.compute("o")
    texts.drop(texts.compute("sx"))
    texts.drop(old)
    texts.drop(system)
    assert texts.pool.take() == 3  # never used
    texts.known("s")
    assert [texts.pool.take() for _ in range(3)] == [2, old[0], system[0]]


def test_a_block_that_lost_its_beginning_is_found_again_with_it() -> None:
    texts = Texts(4)
    first = texts.compute("a", adopt=False)
    second = texts.compute("a", adopt=False)  # not remembered
    digest = texts.cache.child(ROOT, ids_of("a"))
    second.append(texts.pool.take())
    texts.cache.insert(digest, ids_of("b"), second[1])
    texts.drop(first)
    taken = [texts.pool.take(), texts.pool.take()]
    assert taken == [3, first[0]]
    assert texts.known("ab") == []
    texts.cache.insert(ROOT, ids_of("a"), second[0])
    assert texts.known("ab") == second
    texts.pool.check_integrity()


def test_a_block_without_its_beginning_is_evicted_in_its_turn() -> None:
    texts = Texts(3)
    first = texts.compute("a", adopt=False)
    second = texts.compute("a", adopt=False)
    second.append(texts.pool.take())
    texts.cache.insert(texts.cache.child(ROOT, ids_of("a")), ids_of("b"), second[1])
    texts.drop(first)
    assert texts.pool.take() == first[0]
    texts.drop(second)
    assert [texts.pool.take(), texts.pool.take()] == [second[0], second[1]]
    assert len(texts.cache) == 0


def test_forgetting_a_block_forgets_what_was_computed_from_it() -> None:
    texts = Texts(8)
    bad = texts.compute("ab")
    behind = texts.compute("abc")
    beside = texts.compute("x")
    texts.drop(behind)
    assert sorted(texts.cache.forget(bad[0])) == sorted(behind)
    assert texts.known("abc") == []
    assert texts.known("x") == beside
    assert texts.pool.refs(behind[2]) == 0
    assert texts.cache.forget(behind[2]) == []
    texts.drop(bad)
    assert texts.pool.free == 7
    texts.pool.check_integrity()


def test_a_disabled_cache_keeps_nothing() -> None:
    texts = Texts(2, enabled=False)
    table = texts.compute("ab")
    assert texts.known("ab") == []
    texts.drop(table)
    assert len(texts.cache) == 0


def test_a_collision_of_digests_is_a_miss_and_so_is_all_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "DIGEST_BYTES", 2)
    texts = Texts(8)
    by_digest: dict[bytes, int] = {}
    for other in range(1000):
        letter = by_digest.setdefault(texts.cache.child(ROOT, ids_of(other)), other)
        if letter != other:
            break
    assert letter != other, "no collision was found"
    table = texts.compute([letter])
    behind = texts.compute([other, "x"])
    assert texts.known([letter, "x"]) == table
    assert texts.known([other, "x"]) == []
    texts.drop(behind)
    texts.pool.check_integrity()


# -- everything at once


class CacheMachine(RuleBasedStateMachine):
    """Rows come, adopt what is known, compute the rest, fork, go, and are tainted; the pool is small."""

    blocks = 7

    def __init__(self) -> None:
        super().__init__()
        self.texts = Texts(self.blocks)
        self.rows: list[tuple[str, list[int]]] = []
        self.content: dict[int, str] = {}  # what was last computed into each block: the text up to its end

    @rule(text=st.text("ab", min_size=1, max_size=4), adopt=st.booleans())
    def come(self, text: str, adopt: bool) -> None:
        pool, cache = self.texts.pool, self.texts.cache
        table = self.texts.known(text) if adopt else []
        for index, block in enumerate(table):
            assert self.content[block] == text[: index + 1], "a found block holds something else"
            pool.share(block)
        digest = ROOT
        for index, letter in enumerate(text):
            if index >= len(table):
                if not pool.free:
                    break
                table.append(pool.take())
                self.content[table[index]] = text[: index + 1]
                cache.insert(digest, ids_of(letter), table[index])
            digest = cache.child(digest, ids_of(letter))
        self.rows.append((text[: len(table)], table))

    @rule(text=st.text("ab", min_size=1, max_size=4))
    def look(self, text: str) -> None:
        for index, block in enumerate(self.texts.known(text)):
            assert self.content[block] == text[: index + 1]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        text, table = data.draw(st.sampled_from(self.rows))
        for block in table:
            self.texts.pool.share(block)
        self.rows.append((text, list(table)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), backwards=st.booleans())
    def go(self, data: st.DataObject, backwards: bool) -> None:
        _, table = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        for block in table[::-1] if backwards else table:
            self.texts.pool.release(block)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def taint(self, data: st.DataObject) -> None:
        text, table = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        for block in table:
            self.texts.cache.forget(block)
        known = self.texts.known(text)
        assert not set(known) & set(table)
        self.texts.drop(table)

    @invariant()
    def the_books_are_in_order(self) -> None:
        pool = self.texts.pool
        pool.check_integrity()
        held: dict[int, int] = {}
        for _, table in self.rows:
            for block in table:
                held[block] = held.get(block, 0) + 1
        assert {block: pool.refs(block) for block in range(self.blocks)} == {block: held.get(block, 0) for block in range(self.blocks)}
        assert (pool.used, pool.free) == (len(held), self.blocks - len(held))
        assert len(self.texts.cache) <= self.blocks
        assert all(self.content[block].startswith(text[: index + 1]) for text, table in self.rows for index, block in enumerate(table))

    def teardown(self) -> None:
        """Nothing leaks: when all are gone every block can be had, and then nothing is known."""
        for _, table in self.rows:
            self.texts.drop(table)
        assert sorted(self.texts.pool.take() for _ in range(self.blocks)) == list(range(self.blocks))
        assert len(self.texts.cache) == 0
        self.texts.pool.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
