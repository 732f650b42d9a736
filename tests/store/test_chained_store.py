"""ChainedStore: the fastest tier that has a block gives it, the others get it, and one that fails costs the cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checking import expected_tokens, generate, make_engine, make_request, run
from memory_store import NEVER, Habits, MemoryStore
from redis_server import SECRET, RedisServer
from stored import until

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.cache.block_store import BlockStore
from headstart.store.disk import DiskStore, SingleTierStore
from headstart.store.format import StoredBlockFormat
from headstart.store.tiers.chained_store import ChainedStore

A, B, C = list(range(8)), list(range(20, 28)), list(range(40, 48))
SHAPE = StoredBlockFormat(b"m" * 32, 4, 32)  # of the checking executor


def slow(seconds: float) -> Habits:
    return Habits(expected=lambda num: seconds * num)


def stock(store: MemoryStore, *prompts: list[int]) -> MemoryStore:
    engine = make_engine(store=store)
    for index, prompt in enumerate(prompts):
        generate(engine, make_request(f"stock-{index}", prompt))
    store.flush()
    store.loads.clear()
    return store


def breakdown(store: BlockStore, prompt: list[int]) -> PromptTokenBreakdown:
    engine = make_engine(store=store)
    engine.add_request(make_request("a", prompt))
    return next(out.breakdown for out in run(engine)["a"] if out.breakdown is not None)


def test_a_run_comes_from_the_tiers_that_have_its_parts_and_goes_to_those_that_lack_them() -> None:
    near, far = stock(MemoryStore(), A), stock(MemoryStore(habits=slow(1e-9)), [*A, *B])
    chain = ChainedStore([near, far])
    assert breakdown(chain, [*A, *B, 1]) == PromptTokenBreakdown(store=16, computed=1)
    assert [len(keys) for keys in near.loads] == [len(keys) for keys in far.loads] == [2]
    near.flush()
    assert near.shelf.keys() == far.shelf.keys() and len(near.shelf) == 4 and not far._offers
    assert chain.stats().num_blocks == 8 and chain.stats().max_bytes == 0


def test_the_faster_of_two_gives_what_both_have_and_one_that_is_not_to_be_used_nothing() -> None:
    near, far = stock(MemoryStore(habits=slow(1e-3)), A), stock(MemoryStore(habits=slow(1e-9)), [*A, *B])
    assert breakdown(ChainedStore([near, far]), [*A, *B, 1]).store == 16 and (near.loads, len(far.loads)) == ([], 1)
    far.habits = NEVER
    assert breakdown(ChainedStore([near, far]), [*A, *C]) == PromptTokenBreakdown(store=8, computed=8)
    assert breakdown(ChainedStore([MemoryStore(), far]), [*A, *C]) == PromptTokenBreakdown(computed=16)


def test_copies_of_loaded_blocks_wait_for_the_end_of_loads() -> None:
    near, far = MemoryStore(), stock(MemoryStore(habits=Habits(piece=lambda: 1)), [*A, *B])
    chain, prompt, seen = ChainedStore([near, far]), [*A, *B, 1], set[int]()
    engine = make_engine(store=chain)
    engine.add_request(make_request("a", prompt))
    while engine.has_work:
        engine.step()
        seen.add(chain.stats().num_pending)
        assert not far._jobs or not (near._offers or near.shelf)
    near.flush()
    assert near.shelf.keys() == far.shelf.keys() and len(near.shelf) == 4 and max(seen) == 4


def test_a_load_that_is_cancelled_is_cancelled_where_it_runs() -> None:
    near, far = stock(MemoryStore(), A), stock(MemoryStore(habits=Habits(load_delay=lambda: 9)), C)
    chain = ChainedStore([near, far])
    first, second = (chain.begin_load([key for key, _ in store.shelf.values()]) for store in (near, far))
    chain.cancel_load(second, is_late=True)
    chain.cancel_load(second, is_late=True)
    assert far.cancelled == [(1, True)] and near.cancelled == []
    assert [(loaded.load_id, loaded.is_last) for loaded in chain.poll_loads()] == [
        (first, True)
    ] and chain.poll_loads() == []


def test_what_is_distrusted_or_cleared_leaves_every_tier() -> None:
    near, far = stock(MemoryStore(), A), stock(MemoryStore(), A)
    chain = ChainedStore([near, far])
    block_hash = next(iter(near.shelf))
    chain.discard_corrupt([block_hash])
    assert not chain.contains(block_hash) and chain.should_write(block_hash) and len(near.shelf) == len(far.shelf) == 1
    chain.clear()
    chain.close()
    assert not near.shelf and not far.shelf and near.is_closed and far.is_closed


# A folder and a real server ------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    pytest.importorskip("cryptography")
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


def two_tiers(folder: Path, server: RedisServer) -> ChainedStore:
    redis_tier = pytest.importorskip("headstart.store.tiers.redis_tier")
    tier = redis_tier.RedisTier(server.url, None, SHAPE, SECRET, 600)
    return ChainedStore([DiskStore(folder, SHAPE, 64 << 20), SingleTierStore(tier, SHAPE.block_bytes)])


@pytest.mark.usefixtures("patient_store")
def test_a_restart_with_an_empty_disk_reads_from_the_server_and_fills_the_disk(
    tmp_path: Path, server: RedisServer
) -> None:
    first = two_tiers(tmp_path / "a", server)
    engine = make_engine(store=first)
    assert generate(engine, make_request("a", [*A, *B, 1])) == {"a": expected_tokens([*A, *B, 1], 1)}
    assert until(lambda: first.stats().written_blocks == 8)
    engine.close()
    second = two_tiers(tmp_path / "b", server)
    engine = make_engine(store=second)
    engine.add_request(make_request("a", [*A, *B, 1]))
    outputs = run(engine)["a"]
    assert outputs[0].breakdown == PromptTokenBreakdown(store=16, computed=1)
    assert [token for out in outputs for token in out.token_ids] == expected_tokens([*A, *B, 1], 1)
    assert until(lambda: second.stats().written_blocks == 4)  # on its disk
    engine.close()
    server.kill()
    third = two_tiers(tmp_path / "b", server)
    engine = make_engine(store=third)
    assert generate(engine, make_request("a", [*A, *B, 2])) == {"a": expected_tokens([*A, *B, 2], 1)}
    assert engine.stats().counters.store_tokens == 16
    engine.close()


@pytest.mark.usefixtures("patient_store")
def test_a_server_killed_and_started_in_mid_run_costs_no_answer(tmp_path: Path, server: RedisServer) -> None:
    store = two_tiers(tmp_path / "a", server)
    engine = make_engine(store=store)
    for number in range(60):
        if number % 20 == 10:
            server.kill()
        elif number % 20 == 0 and number:
            server.start()
        prompt = [*(A, B, C)[number % 3], *range(50 + number % 7, 58 + number % 7), number]
        assert generate(engine, make_request(str(number), prompt, 3)) == {str(number): expected_tokens(prompt, 3)}
        engine.scheduler.pool.check_invariants()
    engine.close()
