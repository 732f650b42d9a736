"""A tier that becomes slow and well again, in time that the test makes up: how many requests pass until it is used."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from stored import BLOCK_BYTES, Clock, keys, until

from headstart.core.cache.block_store import BlockKey
from headstart.store.disk import SingleTierStore
from headstart.store.segment import ReadResult
from headstart.store.tiers.tier import TierError

NUM = 32  # blocks of a request
COMPUTING, BETWEEN = 0.45, 1.0  # seconds to compute them, and between two requests
Way = Callable[[int], float]  # blocks -> seconds that a read takes


def healthy(num: int) -> float:
    return 0.002 + num * 0.0006


class SlowTier:
    """Has every block; a read takes as long as `way` says, and fails after `deadline`."""

    num_blocks = num_bytes = max_bytes = num_segments = num_corrupt = 0

    def __init__(self, clock: Clock) -> None:
        self.clock, self.deadline = clock, 1.0
        self.way: Way = healthy

    def contains(self, block_hash: object) -> bool:
        return True

    def read_blocks_until_miss(
        self, keys: Sequence[BlockKey], buffer: memoryview, ahead: Sequence[BlockKey] = ()
    ) -> ReadResult:
        seconds = self.way(len(keys))
        self.clock.now += min(seconds, self.deadline)
        if seconds > self.deadline:
            return ReadResult(0, "io", TierError("no complete answer"))
        return ReadResult(len(keys))

    def make_room(self, num_bytes: int, **kept: object) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


class Requests:
    """One request after another for the same blocks, as the engine would ask: each loads or computes."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tier = SlowTier(self.clock)
        tier: Any = self.tier  # what a store asks of it, and no more
        self.store = SingleTierStore(tier, BLOCK_BYTES, self.clock)

    def used(self) -> bool:
        """Serve one request; return whether it loaded its blocks."""
        self.clock.now += BETWEEN
        store, loader = self.store, self.store._loader  # type: ignore[reportPrivateUsage]
        health = loader.health
        assert until(lambda: not health.reason or not health.may_attempt(self.clock.now))  # the loader's own attempt
        expected = store.expected_load_seconds(NUM)
        assert until(lambda: loader.num_read == store._num_requested)  # type: ignore[reportPrivateUsage]
        if not expected < COMPUTING:
            return False
        began = self.clock.now
        load_id = store.begin_load(keys(*range(1, NUM + 1)))
        assert until(lambda: loader.num_read == store._num_requested)  # type: ignore[reportPrivateUsage]
        if self.clock.now - began > 2 * expected + 0.05 and expected:
            store.cancel_load(load_id, is_late=True)
            store.poll_loads()
            return False
        arrived = store.poll_loads()
        for loaded in arrived:
            store.release_loaded(loaded)
        return sum(len(loaded.data) for loaded in arrived) == NUM


@pytest.mark.parametrize(
    "harmed",
    [lambda num: 0.5 + healthy(num), lambda num: 0.9 + healthy(num), lambda num: num * 0.5, lambda num: 5.0],
    ids=["delay 0.5 s", "delay 0.9 s", "narrow", "no answer"],
)
def test_a_tier_is_used_again_soon_after_its_harm_has_ended(harmed: Way) -> None:
    requests = Requests()
    try:
        assert [requests.used() for _ in range(5)][1:] == [True] * 4
        requests.tier.way = harmed
        during = [requests.used() for _ in range(30)]
        assert not any(during[6:]), during
        requests.tier.way = healthy
        after = [requests.used() for _ in range(12)]
        assert all(after[3:]), after
    finally:
        requests.store.close()
