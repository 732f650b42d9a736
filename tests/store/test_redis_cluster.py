"""RedisTier with a real cluster of three nodes: one that moves keys, dies or hangs makes misses and no error."""

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis_server import NUM_PRIMARIES, SECRET, RedisClusterServers, RedisServer
from stored import BLOCK_BYTES, SHAPE, Pool, contents, key, keys, load, name, names, settled, until, written

redis = pytest.importorskip("redis")
pytest.importorskip("cryptography")

from headstart.cli.main import main  # noqa: E402
from headstart.store.disk import SingleTierStore  # noqa: E402
from headstart.store.tiers import redis_tier  # noqa: E402
from headstart.store.tiers.redis_link import RedisConnections  # noqa: E402
from headstart.store.tiers.redis_tier import RedisTier  # noqa: E402

PASSWORD = "hunter2"
NUM = 120
NUMBERS = range(1, NUM + 1)
Open = Callable[..., SingleTierStore]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterServers]:
    servers = RedisClusterServers(tmp_path_factory.mktemp("cluster"), PASSWORD)
    yield servers
    servers.kill()


@pytest.fixture
def cluster(servers: RedisClusterServers) -> RedisClusterServers:
    """Return the cluster, well and empty."""

    def is_well() -> bool:
        found = [client(node).cluster("info") for node in servers.nodes]
        return all(info["cluster_state"] == "ok" and info["cluster_slots_ok"] == "16384" for info in found)

    assert until(is_well)
    for node in servers.nodes:
        client(node).flushall()
    return servers


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def opened(cluster: RedisClusterServers, pool: Pool) -> Iterator[Open]:
    made: list[SingleTierStore] = []

    def opens() -> SingleTierStore:
        made.append(SingleTierStore(RedisTier(cluster.url, PASSWORD, SHAPE, SECRET, 600), BLOCK_BYTES))
        made[-1].start_writing_from(pool)
        return made[-1]

    yield opens
    for store in made:
        store.close()


def client(node: RedisServer) -> Any:
    return redis.Redis(port=node.port, password=PASSWORD)


def stored_keys(node: RedisServer, part: str = "b:*") -> list[bytes]:
    return client(node).keys(f"headstart:kv:*:{part}")


def tier_of(store: SingleTierStore) -> RedisTier:
    tier = store._catalog
    assert isinstance(tier, RedisTier)
    return tier


def place_of(cluster: RedisClusterServers, stored: bytes) -> RedisServer:
    """Return the node that has a key."""
    return next(node for node in cluster.nodes if client(node).keys(stored))


def test_blocks_are_spread_over_all_nodes_and_read_by_another_process(
    cluster: RedisClusterServers, opened: Open, pool: Pool
) -> None:
    writes, reads = opened(), opened()
    pool.offer(writes, *NUMBERS)
    assert written(reads, *NUMBERS) and load(reads, keys(*NUMBERS)) == contents(*NUMBERS)
    spread = [len(stored_keys(node)) for node in cluster.nodes]
    assert sum(spread) == NUM and min(spread) > NUM // 6
    tier = tier_of(reads)
    wanted, buffer = keys(*NUMBERS), memoryview(bytearray(NUM * BLOCK_BYTES))
    for _ in range(2):  # in pieces, each asked for while one is opened; the second time what was asked for is dropped
        ahead = keys(1, 2, 3)
        assert tier.read_blocks_until_miss(wanted, buffer, ahead).num_blocks == NUM and bytes(buffer) == b"".join(
            contents(*NUMBERS)
        )
    assert tier.read_blocks_until_miss(ahead, buffer).num_blocks == 3 and not any(reads.stats().misses.values())
    writes.close()
    later = opened()
    assert later.stats().num_blocks == NUM and load(later, keys(*NUMBERS)) == contents(*NUMBERS)


def test_blocks_are_written_to_all_nodes_before_one_learns_of_them(cluster: RedisClusterServers) -> None:
    nodes = RedisConnections(cluster.url, PASSWORD, 30.0)._nodes
    stored = [b"%d" % number for number in NUMBERS]
    for last in stored[:12]:
        found = list(nodes.key_indices_by_server([*stored, last]).items())
        assert len(found) == NUM_PRIMARIES and found[-1][1][-1] == NUM
        assert sorted(place for _, places in found for place in places) == list(range(NUM + 1))
    nodes.disconnect()


def test_a_read_starts_no_thread_once_connected(
    cluster: RedisClusterServers, opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    pool.offer(store, *NUMBERS)
    assert written(store, *NUMBERS) and load(store, keys(*NUMBERS)) == contents(*NUMBERS)
    store.close()
    tier = RedisTier(cluster.url, PASSWORD, SHAPE, SECRET, 600)
    assert tier.read_blocks_until_miss(keys(*NUMBERS), memoryview(bytearray(NUM * BLOCK_BYTES))).num_blocks == NUM
    monkeypatch.setattr("threading.Thread.start", None)
    assert tier.read_blocks_until_miss(keys(*NUMBERS), memoryview(bytearray(NUM * BLOCK_BYTES))).num_blocks == NUM
    monkeypatch.undo()
    tier.close()


def test_keys_that_move_are_read_and_written_while_and_after_they_move(
    cluster: RedisClusterServers, opened: Open, pool: Pool
) -> None:
    store = opened()
    pool.offer(store, *NUMBERS)
    assert written(store, *NUMBERS) and load(store, keys(*NUMBERS)) == contents(*NUMBERS) and settled(store)
    stored = tier_of(store)._name(name(7))
    source = place_of(cluster, stored)
    target = next(node for node in cluster.nodes if node is not source)
    here, there = client(source), client(target)
    slot, here_id, there_id = here.cluster("keyslot", stored), here.cluster("myid"), there.cluster("myid")
    there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", here_id)
    here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", there_id)
    here.execute_command("MIGRATE", "127.0.0.1", target.port, stored, 0, 5000, "AUTH", PASSWORD)
    assert not client(source).keys(stored)
    for state in ("ASK", "MOVED"):
        assert load(store, keys(*NUMBERS)) == contents(*NUMBERS), state
        store.discard_corrupt(names(7))
        assert until(lambda: not client(target).keys(stored)), state
        pool.offer(store, 7)
        assert written(store, 7) and client(target).keys(stored), state
        if state == "ASK":
            for node in cluster.nodes:
                client(node).execute_command("CLUSTER SETSLOT", slot, "NODE", there_id)
    assert load(store, keys(*NUMBERS)) == contents(*NUMBERS) and store.stats().num_degraded == 0


@pytest.mark.parametrize("has_index", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_node_that_dies_makes_misses_and_what_the_others_have_is_used_again(
    cluster: RedisClusterServers, opened: Open, pool: Pool, has_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tier, "LOOK_SECONDS", 0.0)
    store = opened()
    pool.offer(store, *NUMBERS)
    assert written(store, *NUMBERS) and settled(store)
    node = next(node for node in cluster.nodes if bool(stored_keys(node, "index")) is has_index)
    here = stored_keys(node)
    lost = {number for number in NUMBERS if tier_of(store)._name(name(number)) in here}
    node.kill()
    for attempt in range(1, 5):
        assert load(store, keys(*NUMBERS)) == (contents(*range(1, min(lost))) if attempt < 4 else [])
        assert store.stats().misses["io"] == attempt
    assert "reading" in store.stats().degraded
    node.start()
    kept = [number for number in NUMBERS if number not in lost]
    assert until(lambda: store.expected_load_seconds(1) != float("inf"))
    assert until(lambda: {number for number in NUMBERS if not store.contains(name(number))} == lost)
    assert until(lambda: all(load(store, [key(number)]) == contents(number) for number in kept))
    pool.offer(store, *lost)
    assert written(store, *lost) and load(store, keys(*NUMBERS)) == contents(*NUMBERS)
    assert until(lambda: opened().stats().num_blocks == NUM), "also with an index that was lost"


def test_a_node_that_hangs_pauses_reads_and_writes_and_is_used_again_once_it_answers(
    cluster: RedisClusterServers, opened: Open, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tier, "READ_SECONDS", 0.3)
    monkeypatch.setattr(redis_tier, "WRITE_SECONDS", 0.3)
    store = opened()
    pool.offer(store, *NUMBERS)
    assert written(store, *NUMBERS) and load(store, keys(*NUMBERS)) == contents(*NUMBERS)
    node = cluster.nodes[0]
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    try:
        assert len(load(store, keys(*NUMBERS))) < NUM and store.stats().misses["io"] == 1
        pool.offer(store, NUM + 1, NUM + 2)
        assert until(lambda: "writing" in store.stats().degraded)
    finally:
        node.process.send_signal(signal.SIGCONT)
    assert until(lambda: load(store, keys(*NUMBERS)) == contents(*NUMBERS))
    assert written(store, NUM + 1, NUM + 2)


def test_all_of_a_cluster_is_shown_verified_and_cleared(
    cluster: RedisClusterServers,
    opened: Open,
    pool: Pool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown() -> Any:
        return json.loads(capsys.readouterr().out)

    monkeypatch.setenv("HEADSTART_KV_STORE_PASSWORD", PASSWORD)
    store = opened()
    pool.offer(store, *NUMBERS)
    assert written(store, *NUMBERS) and settled(store)
    redis.RedisCluster("127.0.0.1", cluster.nodes[0].port, password=PASSWORD).set("mine", 1)
    assert main(["store", "stat", cluster.url, "--json"]) == 0 and shown()["blocks"] == NUM
    assert main(["store", "verify", cluster.url, "--json"]) == 0 and shown()["sound"]
    damaged = [stored_keys(node)[0] for node in cluster.nodes]
    for node, stored in zip(cluster.nodes, damaged, strict=True):
        client(node).setrange(stored, 99, b"damage")
    assert main(["store", "verify", cluster.url, "--json"]) == 1
    assert shown()["bad"] == {"value-checksum": NUM_PRIMARIES}
    assert main(["store", "clear", cluster.url, "--yes"]) == 0 and f"removed {NUM} blocks" in capsys.readouterr().out
    assert [len(stored_keys(node)) for node in cluster.nodes] == [0] * NUM_PRIMARIES
    assert [found for node in cluster.nodes for found in client(node).keys("*")] == [b"mine"]
