"""RedisTier: blocks of a real server come back verified or not at all, and a server that fails delays no other work."""

import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_server import SECRET, Proxy, RedisServer, slowly
from stored import (
    BLOCK_BYTES,
    SHAPE,
    Pool,
    content,
    contents,
    key,
    keys,
    load,
    name,
    names,
    settled,
    until,
    written,
)

redis = pytest.importorskip("redis")
pytest.importorskip("cryptography")

from headstart.store.disk import SingleTierStore  # noqa: E402
from headstart.store.tiers import redis_inspect, redis_link, redis_tier  # noqa: E402
from headstart.store.tiers.redis_tier import RedisTier  # noqa: E402
from headstart.store.tiers.sealing import NAME_BYTES, BlockSealer, damage_of_value  # noqa: E402
from headstart.store.tiers.tier import derive_key  # noqa: E402

TTL = 600
SEALER = BlockSealer(SECRET, SHAPE)
Open = Callable[..., SingleTierStore]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def opened(server: RedisServer, pool: Pool) -> Iterator[Open]:
    made: list[SingleTierStore] = []

    def opens(url: str = "", secret: bytes = SECRET, shape: object = SHAPE, ttl: int = TTL) -> SingleTierStore:
        tier = RedisTier(url or server.url, None, shape, secret, ttl)  # type: ignore[arg-type]
        made.append(SingleTierStore(tier, BLOCK_BYTES))
        made[-1].start_writing_from(pool)
        return made[-1]

    yield opens
    for store in made:
        store.close()


def client(server: RedisServer) -> "redis.Redis":
    return redis.Redis(port=server.port)


def stored_names(server: RedisServer) -> list[bytes]:
    return client(server).keys(redis_inspect.PREFIX + b"*:b:*")


def test_what_one_process_writes_another_loads_in_order_and_after_a_restart(opened: Open, pool: Pool) -> None:
    writes, reads = opened(), opened()
    pool.offer(writes, *range(1, 601))
    assert written(reads, *range(1, 601)) and load(reads, keys(*range(1, 601))) == contents(*range(1, 601))
    writes.close()
    later = opened()
    assert later.contains(name(1)) and later.contains(name(600)) and later.stats().num_blocks == 600
    assert load(later, keys(1, 2, 3)) == contents(1, 2, 3)
    stats = later.stats()
    assert (stats.loaded_blocks, stats.degraded, sum(stats.misses.values())) == (3, "", 0)


def test_the_next_piece_is_asked_for_while_one_is_opened(server: RedisServer, opened: Open, pool: Pool) -> None:
    writes = opened()
    pool.offer(writes, *range(1, 5))
    tier = RedisTier(server.url, None, SHAPE, SECRET, TTL)
    assert written(writes, *range(1, 5))
    first, second, buffer = keys(1, 2), keys(3, 4), bytearray(2 * BLOCK_BYTES)
    assert tier.read_blocks_until_miss(first, memoryview(buffer), second).num_blocks == 2 and bytes(buffer) == content(
        name(1)
    ) + content(name(2))
    asked = client(server)
    assert until(lambda: asked.info("commandstats")["cmdstat_mget"]["calls"] == 2)
    asked.flushall()  # the server has answered already
    assert tier.read_blocks_until_miss(second, memoryview(buffer)).num_blocks == 2
    assert tier.read_blocks_until_miss(list(second), memoryview(buffer)).miss == "gone", "it is for one load"
    tier.close()


def test_values_are_received_into_one_buffer(server: RedisServer, opened: Open, pool: Pool) -> None:
    """Each copy of a piece costs a new replica time before its first tokens."""
    writes = opened()
    pool.offer(writes, *range(1, 9))
    tier = RedisTier(server.url, None, SHAPE, SECRET, TTL)
    assert written(writes, *range(1, 9))
    pieces = [keys(n, n + 1) for n in (1, 3, 5, 7)]
    buffer, buffers = memoryview(bytearray(BLOCK_BYTES)), set[int]()
    for piece in pieces:
        values = tier._fetch(piece)
        buffers |= {id(value.obj) for value in values if value is not None}
        assert all(
            SEALER.unseal_block_into(one, value, buffer) is None for one, value in zip(piece, values, strict=True)
        )
    assert buffers == {id(tier._received)}
    tier.close()


def test_an_answer_that_was_not_received_is_none_of_the_next_load(
    server: RedisServer, opened: Open, pool: Pool
) -> None:
    writes = opened()
    pool.offer(writes, *range(1, 9))
    tier = RedisTier(server.url, None, SHAPE, SECRET, TTL)
    assert written(writes, *range(1, 9))
    buffer = bytearray(2 * BLOCK_BYTES)
    for first, ahead in ((1, 3), (5, 7), (3, 1), (7, 5)):  # each load is given up with a piece asked for
        assert (
            tier.read_blocks_until_miss(keys(first, first + 1), memoryview(buffer), keys(ahead, ahead + 1)).num_blocks
            == 2
        )
        assert bytes(buffer) == b"".join(contents(first, first + 1))
    tier.close()


def test_a_read_starts_no_thread_once_connected(
    server: RedisServer, opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start one takes milliseconds where cores are busy, for each piece of a load."""
    writes = opened()
    pool.offer(writes, 1, 2)
    tier = RedisTier(server.url, None, SHAPE, SECRET, TTL)
    assert written(writes, 1, 2) and len(tier._fetch(keys(1))) == 1
    writes.close()
    monkeypatch.setattr(threading.Thread, "start", None)
    assert tier.read_blocks_until_miss(keys(1, 2), memoryview(bytearray(2 * BLOCK_BYTES))).num_blocks == 2
    monkeypatch.undo()
    tier.close()


def test_a_connection_that_the_server_has_closed_is_opened_again(server: RedisServer, opened: Open, pool: Pool) -> None:
    """As a server with a `timeout` closes those that are idle."""
    store = opened()
    pool.offer(store, 1, 2)
    assert written(store, 1, 2) and load(store, keys(1)) == contents(1)
    client(server).client_kill_filter(_type="normal", skipme=True)
    assert load(store, keys(1, 2)) == contents(1, 2) and not any(store.stats().misses.values())


def test_the_deadline_of_a_read_is_for_all_of_its_bytes() -> None:
    """A server that sends a byte now and then never reaches the timeout of a socket."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def trickle() -> None:
        theirs.sendall(b"*1\r\n$1000\r\n")
        while not ended.wait(0.02):
            theirs.sendall(b"a")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError):
        redis_link._Answer(ours, bytearray(2000), 0.3).values(1, 1000)
    ended.set()
    thread.join()
    ours.close(), theirs.close()


@pytest.mark.parametrize("length", [SEALER.value_bytes + 1, 3 * SEALER.value_bytes, 1 << 20])
def test_a_longer_value_is_a_miss_and_the_others_are_read(
    server: RedisServer, opened: Open, pool: Pool, length: int
) -> None:
    store = opened()
    pool.offer(store, 1, 2, 3)
    assert written(store, 1, 2, 3) and settled(store)
    client(server).set(
        redis_inspect.PREFIX + SEALER.space.encode() + b":b:" + SEALER.external_block_name(name(2)), bytes(length)
    )
    tier = store._catalog
    assert isinstance(tier, RedisTier)
    sizes = [-1 if value is None else len(value) for value in tier._fetch(keys(1, 2, 3, 9))]
    assert sizes == [SEALER.value_bytes, 0, SEALER.value_bytes, -1]
    assert load(store, keys(1, 2, 3)) == contents(1) and store.stats().misses["corrupt"] == 1
    assert load(store, keys(3)) == contents(3) and not store.stats().degraded


def test_sealing_takes_no_new_memory_for_each_block(server: RedisServer) -> None:
    tier = RedisTier(server.url, None, SHAPE, SECRET, TTL)
    blocks = [[(key(n), content(name(n))) for n in range(start, start + 50)] for start in (1, 51, 101)]
    tier.write_new_blocks(blocks[0])
    tracemalloc.start()
    for run in blocks[1:]:
        tracemalloc.reset_peak()
        assert tier.write_new_blocks(run) == 50
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 25 * SEALER.value_bytes, "a run of 50 blocks is in memory again"
    tier.close()


def test_through_a_unix_socket(opened: Open, pool: Pool, server: RedisServer) -> None:
    store = opened(f"unix://{server.socket_path}?db=3")
    pool.offer(store, 1)
    assert written(store, 1) and load(store, keys(1)) == contents(1) and not stored_names(server)


def test_other_models_and_secrets_see_nothing_and_can_open_nothing(
    opened: Open, pool: Pool, server: RedisServer
) -> None:
    mine, others = opened(), [opened(secret=SECRET[::-1]), opened(shape=SHAPE._replace(fingerprint=bytes(32)))]
    pool.offer(mine, 1, 2)
    assert written(mine, 1, 2) and settled(mine)
    (value, _), shown = client(server).mget(stored_names(server)), client(server).keys()
    for other in others:
        other._writer._look_at = float("-inf")  # type: ignore[reportPrivateUsage]
        other._catalog.refresh_from_other_writers()
        assert not other.contains(name(1)) and load(other, keys(1, 2)) == []
    wrong = BlockSealer(SECRET[::-1], SHAPE)
    assert all(wrong.unseal_block_into(key(n), value, memoryview(bytearray(BLOCK_BYTES))) == "corrupt" for n in (1, 2))
    everything = b"".join([*shown, value, *map(bytes, client(server).dump(stored_names(server)[0]).split())])
    assert name(1) not in everything and name(1)[:8] not in everything and key(1).tokens not in value


def test_a_key_is_that_of_hkdf() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    assert derive_key(SECRET, b"blocks") == HKDFExpand(SHA256(), 32, b"blocks").derive(SECRET)


# What must not come back ---------------------------------------------------------------------------------------------


def sealed(number: int, sealer: BlockSealer = SEALER) -> bytes:
    value = bytearray(sealer.value_bytes)
    sealer.seal_block(key(number), content(name(number)), memoryview(value))
    return bytes(value)


VALUE = sealed(1)


def opens(value: object, wanted: int = 1) -> str | None:
    return SEALER.unseal_block_into(key(wanted), value, memoryview(bytearray(BLOCK_BYTES)))


def test_a_sealed_block_opens_and_two_of_one_block_differ() -> None:
    buffer = bytearray(BLOCK_BYTES)
    assert SEALER.unseal_block_into(key(1), VALUE, memoryview(buffer)) is None and buffer == content(name(1))
    assert sealed(1) != VALUE and not damage_of_value(VALUE, SEALER.external_block_name(name(1)))
    assert (
        opens(VALUE, 2) == "corrupt" and damage_of_value(VALUE, SEALER.external_block_name(name(2))) == "value-checksum"
    )
    assert SEALER.unseal_block_into(key(1)._replace(parent=name(5)), VALUE, memoryview(buffer)) == "mismatch"
    assert SEALER.unseal_block_into(key(1)._replace(tokens=key(2).tokens), VALUE, memoryview(buffer)) == "mismatch"


def test_of_ten_thousand_harmed_values_none_is_opened() -> None:
    rng = random.Random(1)
    foreign = [sealed(1, BlockSealer(SECRET[::-1], SHAPE)), sealed(2)]
    for round_number in range(10_000):
        harmed = bytearray(VALUE if round_number % 10 else foreign[round_number % 20 // 10])
        match round_number % 4:
            case 0:
                harmed[rng.randrange(len(harmed) - 16)] ^= 1 << rng.randrange(8)
            case 1:
                del harmed[rng.randrange(len(harmed)) :]
            case 2:
                harmed += rng.randbytes(rng.randrange(1, 64))
            case _:
                at = rng.randrange(len(harmed) - 16 - 32)
                harmed[at : at + 32] = rng.randbytes(32)
        assert opens(bytes(harmed)) == "corrupt", round_number


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=8192), st.none(), st.integers(), st.lists(st.binary()), st.text()))
def test_whatever_a_server_answers_is_no_block(value: object) -> None:
    assert opens(value) == "corrupt" and SEALER.open_message(value) == b""


def test_an_empty_line_in_place_of_an_answer_is_an_error_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30.0)
        theirs.sendall(b"\r\n")
        with pytest.raises(ValueError, match="the answer is empty"):
            redis_link._Answer(ours, bytearray(4096), 30.0).values(1, 1024)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_harmed_values_of_a_real_server_are_misses_found_by_verify_and_written_again(
    opened: Open, pool: Pool, server: RedisServer, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(redis_tier, "LOOK_SECONDS", 0.0)
    store, numbers, rng = opened(), range(1, count + 1), random.Random(2)
    pool.offer(store, *numbers)
    assert written(store, *numbers) and settled(store)
    found, direct = stored_names(server), client(server)
    values = dict(zip(found, direct.mget(found), strict=True))
    for place, at in enumerate(found):
        other = values[found[place - 1]]
        cut, flipped = values[at][: rng.randrange(len(other))], bytearray(values[at])
        flipped[rng.randrange(len(flipped) - 16)] ^= 1 << rng.randrange(8)
        forms = [other, cut, rng.randbytes(len(other)), bytes(len(other) - 1) + b"x", b"", bytes(flipped)]
        direct.set(at, forms[place % len(forms)])
    report = redis_inspect.verify_redis(redis_inspect.open_inspection_link(server.url, None))
    assert report.bad.total() == count and report.num_blocks == 0
    for number in numbers:
        assert load(store, keys(number)) == []
    assert store.stats().misses["corrupt"] == count and store.stats().loaded_blocks == 0
    pool.offer(store, *numbers)
    assert written(store, *numbers) and load(store, keys(*numbers)) == contents(*numbers)


def test_what_is_distrusted_or_cleared_comes_back_in_no_process(opened: Open, pool: Pool, server: RedisServer) -> None:
    store, other = opened(), opened()
    pool.offer(store, 1, 2, 3)
    assert written(other, 1, 2, 3) and settled(store)
    store.discard_corrupt(names(2))
    assert not store.contains(name(2)) and until(lambda: len(stored_names(server)) == 2)
    assert load(other, keys(1, 2, 3)) == contents(1) and not other.contains(name(2))
    store.clear()
    assert until(lambda: not stored_names(server)) and load(other, keys(1)) == []
    pool.offer(store, 1)
    assert written(other, 1) and load(other, keys(1)) == contents(1)


# A life that ends ----------------------------------------------------------------------------------------------------


def test_blocks_expire_a_time_after_their_last_use(
    opened: Open, pool: Pool, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(ttl=TTL)
    pool.offer(store, 1, 2)
    assert written(store, 1, 2) and settled(store)
    direct, one = (
        client(server),
        redis_inspect.PREFIX + SEALER.space.encode() + b":b:" + SEALER.external_block_name(name(1)),
    )
    assert 0 < direct.ttl(one) <= TTL and len(SEALER.external_block_name(name(1))) == NAME_BYTES
    direct.expire(one, 100)
    tier = store._catalog
    assert isinstance(tier, RedisTier)
    known = tier._known  # type: ignore[reportPrivateUsage]
    known[name(1)] = long_ago = known[name(1)] - TTL
    store.mark_used(names(1))
    assert until(lambda: direct.ttl(one) > 100 and known[name(1)] > long_ago)  # the tier notes it after the server
    direct.delete(one)
    known[name(1)] = long_ago
    store.mark_used(names(1))
    assert until(lambda: not store.contains(name(1))) and store.contains(name(2))


def test_a_block_that_the_server_dropped_is_a_miss_and_forgotten(opened: Open, pool: Pool, server: RedisServer) -> None:
    store = opened()
    pool.offer(store, 1, 2, 3)
    assert written(store, 1, 2, 3) and settled(store)
    client(server).flushall()
    assert load(store, keys(1, 2, 3)) == [] and store.stats().misses["gone"] == 1
    assert not any(map(store.contains, names(1, 2, 3)))


# A server that fails -------------------------------------------------------------------------------------------------


def test_a_server_killed_and_started_again_is_used_again(opened: Open, pool: Pool, server: RedisServer) -> None:
    store = opened()
    pool.offer(store, 1, 2)
    assert written(store, 1, 2) and settled(store)
    server.kill()
    for _ in range(4):
        assert load(store, keys(1, 2)) == []
    assert store.stats().misses["io"] == 4 and "reading" in store.stats().degraded
    assert store.expected_load_seconds(1) == float("inf")
    server.start()
    assert until(lambda: store.expected_load_seconds(1) != float("inf"))
    pool.offer(store, 3)
    assert written(store, 3) and load(store, keys(3)) == contents(3) and load(store, keys(1)) == []


@pytest.mark.parametrize("kept", [False, True])
def test_a_server_that_comes_back_has_what_it_kept(
    tmp_path: Path, opened: Open, pool: Pool, server: RedisServer, kept: bool
) -> None:
    other = RedisServer(tmp_path / "other", "--appendonly", "yes" if kept else "no", "--appendfsync", "always")
    store = opened(other.url)
    pool.offer(store, 1)
    assert written(store, 1) and settled(store)
    other.kill()
    other.start()
    pool.offer(store, 2)
    assert written(store, 2) and until(lambda: store.contains(name(1)) is kept)
    assert load(store, keys(1, 2)) == (contents(1, 2) if kept else [])
    other.kill()


def test_a_server_that_is_not_there_lets_a_store_open(server: RedisServer, opened: Open, pool: Pool) -> None:
    server.kill()
    store = opened()
    pool.offer(store, 1)
    assert until(lambda: "writing" in store.stats().degraded) and not store.contains(name(1))
    server.start()
    assert written(store, 1) and until(lambda: not store.stats().degraded)


def test_a_full_server_pauses_writing_only(opened: Open, pool: Pool, server: RedisServer) -> None:
    store = opened()
    pool.offer(store, 1)
    assert written(store, 1)
    client(server).config_set("maxmemory", "1")
    pool.offer(store, 2)
    assert until(lambda: "maxmemory" in store.stats().degraded) and load(store, keys(1)) == contents(1)
    client(server).config_set("maxmemory", "0")
    assert written(store, 2)


@pytest.mark.parametrize("kind", ["drops bytes", "hangs", "trickles", "lies", "cuts", "claims much"])
def test_the_engine_never_waits_for_a_slow_or_lying_server(
    opened: Open, pool: Pool, server: RedisServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tier, "READ_SECONDS", 0.3)
    monkeypatch.setattr(redis_tier, "WRITE_SECONDS", 0.3)
    proxy, gate, rng = Proxy(server.port), threading.Event(), random.Random(3)
    store = opened(proxy.url)
    pool.offer(store, *range(1, 9))
    assert written(store, *range(1, 9)) and settled(store)
    proxy.hurt = {
        "drops bytes": lambda data: data[: len(data) // 2],
        "hangs": lambda data: data if gate.wait(PATIENCE) else None,
        "trickles": lambda data: slowly(data[:1], 0.05),
        "lies": lambda data: rng.randbytes(len(data)),
        "cuts": lambda data: None,
        "claims much": lambda data: b"*1\r\n$999999999999\r\n" + data,
    }[kind]
    for number in range(9, 40):
        load_id = store.begin_load(keys(*range(1, 9)))
        pool.offer(store, number)
        store.mark_used(names(1, number))
        assert store.poll_loads() == [] or kind == "hangs" or all(not loaded.data for loaded in store.poll_loads())
        store.cancel_load(load_id, is_late=True)
        store.stats()
    assert store.expected_load_seconds(1) > 0  # reached although the server still hangs
    gate.set()
    proxy.hurt = lambda data: data
    assert until(lambda: store.expected_load_seconds(1) != float("inf"))
    assert until(lambda: load(store, keys(1)) == contents(1))
    proxy.close()


PATIENCE = 300.0
