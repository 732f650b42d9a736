"""The pool under random use by several owners: law 8 after every operation, and every promise about evictions."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.cache.block_pool import HISTORY_POOLS, BlockPool
from headstart.core.cache.eviction import PYTHON, KVBlockLoops
from headstart.core.cache.hashing import BlockHash, extend_block_hashes, root_hash
from headstart.core.request import DEFAULT_RETENTION, RetentionHint
from headstart.model.kernels.compiled_blocks import compiled_block_loops

TENANTS = ("", "a", "b")
BLOCK = 2  # tokens
# few enough that they meet: a chain is often used again, pinned, wanted
PATHS = [(0,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0), (1,), (1, 0), (1, 0, 0)]
RETENTIONS = [DEFAULT_RETENTION, DEFAULT_RETENTION, RetentionHint(10), RetentionHint(90), RetentionHint(80, ttl=3)]

Setting = tuple[int, str, float, int]  # blocks, eviction policy, floor, tenants
Act = tuple[int, int, int]  # what, and two numbers that say of whom and how


class Chain:
    """The blocks of one prompt of one tenant."""

    def __init__(self, tenant: str, path: tuple[int, ...]) -> None:
        self.tenant = tenant
        self.root = root_hash(b"", domain=tenant.encode())
        tokens = array("i", [token for token in path for _ in range(BLOCK)])
        self.raw = tokens.tobytes()
        self.stride = BLOCK * tokens.itemsize
        self.names: list[BlockHash] = []
        extend_block_hashes(self.names, tokens, BLOCK, self.root)

    def parent(self, index: int) -> BlockHash:
        return self.names[index - 1] if index else self.root

    def tokens(self, index: int) -> bytes:
        return self.raw[index * self.stride : (index + 1) * self.stride]


class Twin:
    """A listener that replays events, and what else is known of each published name."""

    def __init__(self) -> None:
        self.blocks: dict[BlockHash, int] = {}
        self.parents: dict[BlockHash, BlockHash] = {}
        self.serial: dict[BlockHash, int] = {}  # when it was published
        self.orderly: set[BlockHash] = set()  # published behind all that precede it, so that who uses it uses them
        self.gone: list[BlockHash] = []
        self.roots = {Chain(tenant, PATHS[0]).root for tenant in TENANTS}
        self._count = 0

    def on_block_published(self, block: int, name: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        assert name not in self.blocks
        self._count += 1
        self.blocks[name], self.parents[name], self.serial[name] = block, parent, self._count
        self.orderly.discard(name)
        head = name
        while (before := self.parents[head]) in self.blocks and self.serial[before] < self.serial[head]:
            head = before
        if self.parents[head] in self.roots:
            self.orderly.add(name)

    def on_block_removed(self, name: BlockHash) -> None:
        del self.blocks[name]
        self.gone.append(name)

    def on_cache_cleared(self) -> None:
        self.gone += self.blocks
        self.blocks.clear()


class Driver:
    """Owners take chains and give them back; the model knows who holds what and asked for what."""

    def __init__(self, setting: Setting, ops: KVBlockLoops = PYTHON) -> None:
        size, policy, floor, num_tenants = setting
        self.tenants = TENANTS[:num_tenants]
        self.pool = BlockPool(size, eviction_policy=policy, tenant_floor=floor, ops=ops)
        self.twin = Twin()
        self.pool.listeners.append(self.twin)
        self.floor = floor * (size - 1)
        self.owners: list[tuple[Chain, list[int]]] = []
        self.seen: set[str] = set()
        self.tenant_of: dict[BlockHash, str] = {}
        self.asked: dict[BlockHash, list[RetentionHint]] = {}  # by those who used it since it was published
        self.pins: list[list[BlockHash]] = []
        self.pinned: Counter[BlockHash] = Counter()
        self.wanted: list[list[BlockHash]] = []

    # ---------------------------------------------------------------------------------------------- what is the case

    def chain(self, number: int) -> Chain:
        return Chain(self.tenants[number // len(PATHS) % len(self.tenants)], PATHS[number % len(PATHS)])

    def wants(self, name: BlockHash) -> bool:
        return any(name in names for names in self.wanted)

    def idle(self, tenant: str) -> list[BlockHash]:
        return [
            name
            for name, block in self.twin.blocks.items()
            if self.tenant_of[name] == tenant and not self.pool.ref_count(block) and not self.pinned[name]
        ]

    def protected(self, tenant: str) -> int:
        return int(self.floor / len(self.seen)) if tenant and self.seen else 0

    def priority(self, name: BlockHash) -> int | None:
        """Return the priority that its users asked for; None if a time is involved."""
        asked = self.asked.get(name, [])
        return None if any(r.ttl for r in asked) else max((r.priority for r in asked), default=None)

    # ---------------------------------------------------------------------------------------------- what may happen

    def run(self, acts: Iterable[Act]) -> None:
        """Does all of it, and looks after each whether all is well."""
        kinds: list[Callable[[int, int], None]] = [
            *(self.take, self.take, self.take, self.take, self.give_back, self.give_back, self.give_back),
            *(self.add_queued_refs, self.drop_queued_refs, self.pin, self.unpin, self.pass_time, self.fail_or_clear),
        ]
        for what, whom, how in acts:
            kinds[what % len(kinds)](whom, how)
            self.check()

    def take(self, whom: int, how: int) -> None:
        chain, pool = self.chain(whom), self.pool
        num_own, last_resort = how % 3, how % 2 == 0
        hit = pool.match_prefix(chain.names, chain.root, chain.raw, chain.stride)
        new = len(chain.names) - len(hit) + num_own
        available = pool.num_available_after_acquire(hit, chain.tenant, last_resort=last_resort)
        assert 0 <= available <= pool.num_free - pool.num_idle_among(hit)
        if new > available:
            self.refuse(available + pool.num_idle_among(hit) + 1, chain.tenant, last_resort)
            return
        pool.acquire(hit)
        blocks = hit + self.allocate(new, chain.tenant, last_resort)
        for index in range(len(hit), len(chain.names)):
            name = chain.names[index]
            if pool.publish(blocks[index], name, chain.parent(index), chain.tokens(index), chain.tenant):
                self.tenant_of[name] = chain.tenant
                self.asked[name] = []
        self.owners.append((chain, blocks))

    def refuse(self, num: int, tenant: str, last_resort: bool) -> None:
        """Asks for more than there is: nothing changes."""
        num = max(num, self.pool.num_available_after_acquire((), tenant, last_resort=last_resort) + 1)
        before = (self.pool.num_scratch, len(self.twin.blocks))
        with pytest.raises(AssertionError, match="check before allocating"):
            self.pool.allocate(num, tenant, last_resort=last_resort)
        assert before == (self.pool.num_scratch, len(self.twin.blocks))

    def allocate(self, num: int, tenant: str, last_resort: bool) -> list[int]:
        """Allocates, and checks every promise about what is evicted for it."""
        pool, twin = self.pool, self.twin
        before = {name: self.idle(name) for name in TENANTS}
        floors = {name: self.protected(name) for name in TENANTS}
        num_scratch, evictions = pool.num_scratch, pool.evictions["capacity"]
        twin.gone.clear()
        blocks = pool.allocate(num, tenant, by="someone", last_resort=last_resort)
        self.seen |= {tenant} - {""}
        gone = list(twin.gone)
        assert len(set(blocks)) == num and 0 not in blocks and all(pool.ref_count(block) == 1 for block in blocks)
        assert len(gone) == max(num - num_scratch, 0) == pool.evictions["capacity"] - evictions
        evictions_of = [pool.find_eviction_record(name) for name in gone]
        assert all(found is not None and found[:3] == ("capacity", "someone", pool.now) for found in evictions_of)
        after = {name: self.idle(name) for name in TENANTS}
        for name in TENANTS:
            if name != tenant and not last_resort:
                assert len(after[name]) >= min(len(before[name]), floors[name]), "a floor was broken"
        for name in gone:
            self.check_evicted(name, tenant, after, floors)
        return blocks

    def check_evicted(
        self, name: BlockHash, tenant: str, after: dict[str, list[BlockHash]], floors: dict[str, int]
    ) -> None:
        assert not self.pinned[name], "a pinned block was evicted"
        owner = self.tenant_of[name]
        if self.wants(name):
            spare = [n for t in TENANTS for n in after[t] if t == tenant or len(after[t]) > floors[t]]
            assert all(map(self.wants, spare)), "a wanted block was evicted before one without references"
        else:
            mine = self.priority(name)
            others = [self.priority(n) for n in after[owner] if not self.wants(n)]
            if mine is not None:
                assert all(other is None or other >= mine for other in others), "a hint was not honoured"
        for child, parent in self.twin.parents.items():
            if parent == name and child in self.twin.blocks:
                later = self.twin.serial[child] > self.twin.serial[name]
                assert not later or child not in self.twin.orderly, "a head was evicted before its tail"

    def give_back(self, whom: int, how: int) -> None:
        if not self.owners:
            return
        chain, blocks = self.owners.pop(whom % len(self.owners))
        retention = RETENTIONS[how % len(RETENTIONS)]
        for name, block in zip(chain.names, blocks, strict=False):
            if self.twin.blocks.get(name) == block:
                self.asked[name].append(retention)
        self.pool.release(blocks, retention)

    def fail_or_clear(self, whom: int, how: int) -> None:
        if how % 3:
            kept = {name for name in self.twin.blocks if self.pinned[name]} if how % 2 else set[BlockHash]()
            self.pool.clear_published(pinned=how % 2 == 0)
            assert self.twin.blocks.keys() == kept
        elif self.owners:
            _, blocks = self.owners.pop(whom % len(self.owners))
            self.pool.discard_corrupt(blocks)
            self.pool.release(blocks)
            assert not set(blocks) & set(self.twin.blocks.values())

    def pin(self, whom: int, how: int) -> None:
        names = self.chain(whom).names
        if len(self.pinned.keys() | set(names)) <= self.pool.usable_capacity // 2:
            self.pool.pin_hashes(names)
            self.pinned.update(names)
            self.pins.append(names)

    def unpin(self, whom: int, how: int) -> None:
        if self.pins:
            names = self.pins.pop(whom % len(self.pins))
            self.pool.unpin_hashes(names)
            self.pinned -= Counter(names)

    def add_queued_refs(self, whom: int, how: int) -> None:
        names = self.chain(whom).names
        middle = how % (len(names) + 1)
        self.pool.add_queued_refs(names[:middle])
        self.pool.add_queued_refs(names[middle:])
        self.wanted.append(names)

    def drop_queued_refs(self, whom: int, how: int) -> None:
        if self.wanted:
            self.pool.drop_queued_refs(self.wanted.pop(whom % len(self.wanted)))

    def pass_time(self, whom: int, how: int) -> None:
        self.pool.now += how % 4

    # ---------------------------------------------------------------------------------------------- what always holds

    def check(self) -> None:
        """Law 8; and the index is what the events say."""
        pool = self.pool
        pool.check_invariants()
        held = Counter(block for _, blocks in self.owners for block in blocks)
        assert all(pool.ref_count(block) == held[block] for block in range(pool.num_blocks))
        idle_pinned = sum(1 for name, block in self.twin.blocks.items() if self.pinned[name] and not held[block])
        assert pool.num_pinned_idle == idle_pinned
        assert pool.num_free == pool.usable_capacity - len(held) - idle_pinned
        assert pool.num_published == len(self.twin.blocks)
        assert all(map(pool.contains, self.twin.blocks))
        assert len(pool._history) <= HISTORY_POOLS * pool.num_blocks


number = st.integers(0, 99)
settings_of_pools = st.tuples(
    st.integers(4, 12), st.sampled_from(["lru", "2q", "lhd"]), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 3)
)


@settings(max_examples=200, deadline=None)
@given(settings_of_pools, st.lists(st.tuples(number, number, number), min_size=10, max_size=80))
def test_any_use_of_the_pool_keeps_its_promises(setting: Setting, acts: list[Act]) -> None:
    Driver(setting).run(acts)


@pytest.mark.parametrize("policy", ["lru", "2q", "lhd"])
@pytest.mark.parametrize("num_tenants", [1, 2, 3])
def test_long_use_of_the_pool_keeps_its_promises(policy: str, num_tenants: int) -> None:
    for seed in range(12):
        rng = Random(seed)
        setting = (rng.randint(5, 14), policy, rng.choice((0.0, 0.5, 1.0)), num_tenants)
        Driver(setting).run((rng.randrange(100), rng.randrange(100), rng.randrange(100)) for _ in range(400))


@pytest.mark.skipif(compiled_block_loops() is None, reason="no compiler")
@pytest.mark.parametrize("policy", ["lru", "2q", "lhd"])
@pytest.mark.parametrize("num_tenants", [1, 3])
def test_compiled_loops_leave_the_same_tables_as_those_in_python(policy: str, num_tenants: int) -> None:
    ops = compiled_block_loops()
    assert ops is not None
    for seed in range(12):
        rng = Random(seed)
        setting = (rng.randint(5, 40), policy, rng.choice((0.0, 0.5, 1.0)), num_tenants)
        drivers = Driver(setting), Driver(setting, ops)
        for _ in range(300):
            act = rng.randrange(100), rng.randrange(100), rng.randrange(100)
            tables = [tables_after(driver, act) for driver in drivers]
            assert tables[0] == tables[1], f"seed {seed}"


def tables_after(driver: Driver, act: Act) -> tuple[object, ...]:
    driver.run([act])
    pool = driver.pool
    idle = list(pool.iterate_in_eviction_order())
    return idle, pool._refs, pool._scratch, pool._block_hashes, pool._entries, bytes(pool._marks), pool.evictions
