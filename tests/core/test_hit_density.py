"""Eviction by hit density: equal to a slow twin, prefix closed, and it learns what is used again."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.hit_density import CLASSES, SIZES, USES, WIDTHS, HitDensityOrder, ReuseModel, hit_densities

ROOT = BlockHash(b"root")
Word = tuple[int, ...]


def name_of(word: Word) -> BlockHash:
    return BlockHash(bytes(word))


class Twin:
    """A pool whose owners take chains, and what is evicted next, found by looking at every block."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + 1, eviction_policy="lhd")
        model = self.pool._idle.model
        assert model is not None
        self.model = model
        self.owners: list[tuple[Word, list[int]]] = []
        self.held: dict[Word, int] = {}
        self.uses: dict[Word, int] = {}
        self.keys: dict[Word, int] = {}
        self.leaf_since: dict[Word, int] = {}
        self.count = 0
        self.gone: list[BlockHash] = []
        self.pool.listeners.append(self)

    def on_block_removed(self, block_hash: BlockHash) -> None:
        self.gone.append(block_hash)

    def on_block_published(self, block: int, block_hash: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Nothing: who publishes knows."""

    def on_cache_cleared(self) -> None:
        """Nothing: it never happens here."""

    def idle(self, word: Word) -> bool:
        return not self.pool.ref_count(self.held[word])

    def is_leaf(self, word: Word) -> bool:
        return not any(other[:-1] == word for other in self.held)

    def note_leaf(self, word: Word) -> None:
        self.count += 1
        self.leaf_since[word] = self.count

    def expected(self, num: int) -> list[BlockHash]:
        """Remove and return the next `num` blocks to evict."""
        found: list[BlockHash] = []
        for _ in range(num):
            leaves = [word for word in self.held if self.idle(word) and self.is_leaf(word)]
            value, keys = self.model.expected_hits_per_epoch, self.keys
            word = min(leaves, key=lambda word: (value(keys[word]), keys[word], self.leaf_since[word]))
            del self.held[word]
            found.append(name_of(word))
            parent = word[:-1]
            if parent in self.held and self.idle(parent) and self.is_leaf(parent):
                self.note_leaf(parent)
        return found

    def take(self, word: Word) -> None:
        words = [word[: end + 1] for end in range(len(word))]
        names = [name_of(each) for each in words]
        hit = self.pool.match_prefix(names, ROOT, b"", 0)
        assert hit == [self.held[each] for each in words if each in self.held], "a hit has a gap"
        new = len(words) - len(hit)
        if new > self.pool.num_available_after_acquire(hit):
            return
        self.pool.acquire(hit)
        self.gone.clear()
        wanted = self.expected(max(new - self.pool.num_scratch, 0))
        blocks = hit + self.pool.allocate(new)
        assert self.gone == wanted
        for index in range(len(hit), len(words)):
            memory = self.pool.find_eviction_record(names[index])
            self.uses[words[index]] = self.uses[words[index]] if memory is not None else 0
            self.held[words[index]] = blocks[index]
            self.pool.publish(blocks[index], names[index], names[index - 1] if index else ROOT, b"")
        self.owners.append((word, blocks))

    def give_back(self, number: int) -> None:
        word, blocks = self.owners.pop(number % len(self.owners))
        idle = [word[: index + 1] for index in reversed(range(len(word))) if self.pool.ref_count(blocks[index]) == 1]
        size = min(sum(1 for each in idle if not self.uses[each]).bit_length(), SIZES - 1)
        self.pool.release(blocks)
        for each in idle:
            self.uses[each] = min(self.uses[each] + 1, USES)
            self.keys[each] = self.model.epoch * CLASSES + SIZES * (self.uses[each] - 1) + size
            if self.is_leaf(each):
                self.note_leaf(each)
        self.pool.check_invariants()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(3, 24),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=4)), min_size=20, max_size=120),
)
def test_it_evicts_what_a_slow_twin_evicts(num_blocks: int, acts: list[tuple[bool, list[int]]]) -> None:
    twin = Twin(num_blocks)
    for gives_back, word in acts:
        if twin.owners and (gives_back or len(twin.owners) > 2):
            twin.give_back(sum(word))
        else:
            twin.take(tuple(word[:num_blocks]))


def test_it_evicts_what_a_slow_twin_evicts_for_a_long_time() -> None:
    for seed in range(2):
        rng, twin = Random(seed), Twin(40)
        for _ in range(1500):
            twin.take(tuple(min(int(rng.expovariate(0.4)), 9) for _ in range(rng.randint(1, 6))))
            while len(twin.owners) > rng.randint(0, 3):
                twin.give_back(rng.randrange(9))
        assert twin.model.epoch > 100


@given(st.lists(st.floats(0, 1), min_size=len(WIDTHS), max_size=len(WIDTHS)))
def test_a_hit_density_is_the_best_over_all_times_to_keep_a_block(hazards: list[float]) -> None:
    found = hit_densities(hazards)
    for age in range(len(WIDTHS)):
        best, reuses, time, left = 0.0, 0.0, 0.0, 1.0
        for later in range(age, len(WIDTHS)):
            for _ in range(WIDTHS[later]):
                time += left
                reuses += left * hazards[later]
                left *= 1.0 - hazards[later]
            best = max(best, reuses / time)
        assert found[age] == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_a_block_about_to_be_used_is_worth_more_than_one_just_used() -> None:
    hazards = [0.0, 0.0, 0.0, 0.5] + [0.0] * (len(WIDTHS) - 4)
    found = hit_densities(hazards)
    assert found[0] < found[1] < found[2] < found[3] and found[4] == 0.0


def test_blocks_that_come_back_after_a_pause_outlive_those_used_once() -> None:
    """A session returns after two pools of one-off prompts; least recently used order loses it each time."""
    hits = {policy: turns_found(policy) for policy in ("lru", "lhd")}
    assert hits["lru"] == 0 and hits["lhd"] > 0.5 * 40


def turns_found(policy: str, rounds: int = 60, counted: int = 40) -> int:
    """Number of hits of a session of one block in the last rounds, on a pool of 64 blocks."""
    pool, number, found = BlockPool(65, eviction_policy=policy), 0, 0

    def serve(words: list[Word]) -> int:
        names = [name_of(word) for word in words]
        hit = pool.match_prefix(names, ROOT, b"", 0)
        pool.acquire(hit)
        blocks = hit + pool.allocate(len(words) - len(hit))
        for index in range(len(hit), len(words)):
            pool.publish(blocks[index], names[index], names[index - 1] if index else ROOT, b"")
        pool.release(blocks)
        return len(hit)

    for turn in range(rounds):
        hit = serve([(1,), (1, 1)])
        found += hit // 2 if turn >= rounds - counted else 0
        for _ in range(16):  # 128 blocks used once
            number += 1
            word = (2, number // 256, number % 256)
            serve([(*word, *range(depth)) for depth in range(8)])
    return found


def test_a_leaf_goes_before_the_block_before_it_whatever_their_values() -> None:
    model = ReuseModel(8, 8)
    order = HitDensityOrder(bytearray(8), model=model)
    model.record_published(1, 0, -1)
    order.add_chain([1])
    model.record_published(2, 1, -1)  # behind 1, which is idle
    order.add_chain([2])
    assert 1 in order and 2 in order and len(order) == 2
    assert order.pop_victim() == 2
    model.detach_child(2)
    assert order.pop_victim() == 1
    with pytest.raises(KeyError):
        order.pop_victim()


def test_while_all_that_is_behind_is_in_use_a_head_may_go() -> None:
    model = ReuseModel(8, 8)
    order = HitDensityOrder(bytearray(8), model=model)
    model.record_published(1, 0, -1)
    model.record_published(2, 1, -1)
    order.add_chain([1])  # 2 is a copy that another request holds
    assert order.pop_victim() == 1 and len(order) == 0
