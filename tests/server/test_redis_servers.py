"""Real servers before a real Redis server: what one computed another reads, and a tier that fails costs no answer."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis_server import NUM_PRIMARIES, SECRET, Proxy, RedisClusterServers, RedisServer, secret_file, slowly
from server import patient
from server.harness import Server, spawn, wait_for

from headstart.model.weights.init_model import write_random_model

redis = pytest.importorskip("redis")
pytest.importorskip("cryptography")

KEY = "the-key-of-a-tenant"
HEADERS = {"Authorization": f"Bearer {KEY}"}
ADMIN_KEY = "the-key-of-an-administrator"
CACHED = 320  # whole blocks of a prompt
SIZES = ["--port", "0", "--num-blocks", "128", "--max-model-len", "512", "--heartbeat-timeout", "600"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        "tiny", tmp_path_factory.mktemp("model") / "tiny", std=0.2, dtype="float32", progress=False
    )


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@contextmanager
def serving(
    model: Path, room: Path, place: str, *secrets: bytes, command: list[str] = patient.COMMAND
) -> Iterator[Server]:
    files = ",".join(str(secret_file(room, secret)) for secret in secrets or (SECRET,))
    store = ["--kv-store", place, "--kv-store-secret", files, "--api-key", KEY, "--admin-api-key", ADMIN_KEY]
    log = room / f"log{len(list(room.glob('log*')))}"
    with spawn([*command, "serve", str(model), *SIZES, *store], log) as server:
        yield server.wait_ready()


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(CACHED + 5)]


def ask(server: Server, tokens: list[int]) -> dict[str, Any]:
    request = {"prompt": tokens, "max_tokens": 4, "temperature": 0}
    answer = server.post("/v1/completions", json=request, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    details = body["usage"]["prompt_tokens_details"]
    return {"text": body["choices"][0]["text"], "cached": details["cached_tokens"], "store": details["store_tokens"]}


def store_stats(server: Server) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return server.get("/v1/cache/stats", headers=headers).json()["store"]


def test_a_restart_with_an_empty_disk_reads_the_prefix_from_redis_and_another_secret_nothing(
    model: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    with serving(model, tmp_path, f"{tmp_path / 'kv1'},{redis_server.url}") as server:
        cold = ask(server, prompt(1))
        assert cold["cached"] == 0
        wait_for(lambda: store_stats(server)["written_blocks"] >= 2 * CACHED // 16)
        server.process.kill()
    with serving(model, tmp_path, f"{tmp_path / 'kv2'},{redis_server.url}") as server:
        assert ask(server, prompt(1)) == {"text": cold["text"], "cached": CACHED, "store": CACHED}
    with serving(model, tmp_path, redis_server.url, SECRET[::-1]) as server:
        assert store_stats(server)["blocks"] == 0 and ask(server, prompt(1)) == cold


def test_a_new_secret_seals_anew_what_the_old_one_opens(model: Path, tmp_path: Path, redis_server: RedisServer) -> None:
    old, new, found = SECRET, SECRET[::-1], {"cached": CACHED, "store": CACHED}
    with serving(model, tmp_path, redis_server.url, old) as server:
        cold = ask(server, prompt(1))
        wait_for(lambda: store_stats(server)["written_blocks"] == CACHED // 16)
    direct = redis.Redis(port=redis_server.port)
    of_old = direct.keys()
    with serving(model, tmp_path, redis_server.url, new, old) as server:
        assert ask(server, prompt(1)) == {"text": cold["text"], **found}
        wait_for(lambda: store_stats(server)["written_blocks"] == CACHED // 16)
    direct.delete(*of_old)
    with serving(model, tmp_path, redis_server.url, new, old) as server:
        assert ask(server, prompt(1)) == {"text": cold["text"], **found}
    with serving(model, tmp_path, redis_server.url, new) as server:  # the tenants' domains were those of the old one
        assert store_stats(server)["blocks"] == CACHED // 16 and ask(server, prompt(1)) == cold


def test_a_tier_that_is_slow_lossy_narrow_or_killed_costs_no_answer(
    model: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    proxy, rng = Proxy(redis_server.port), random.Random(1)
    command = [sys.executable, "-m", "headstart"]  # with the waits of the product
    with serving(model, tmp_path, proxy.url, command=command) as server:
        texts = [ask(server, prompt(seed))["text"] for seed in range(8)]
        troubles = [
            lambda data: data,
            lambda data: slowly(data, 0.5),
            lambda data: slowly(data[:512], 0.05),
            lambda data: None if rng.random() < 0.3 else data,
            lambda data: rng.randbytes(len(data)),
        ]
        for number, hurt in enumerate([*troubles, troubles[0]]):
            proxy.hurt = hurt
            if number == len(troubles):
                threading.Timer(0.1, redis_server.kill).start()
            for seed in range(8):  # more than the pool holds: each was evicted since
                assert ask(server, prompt(seed))["text"] == texts[seed]
        time.sleep(0.2)
        redis_server.start()
        wait_for(lambda: not store_stats(server)["degraded"])
        assert ask(server, prompt(1))["text"] == texts[1]
        assert "Traceback" not in server.log
    proxy.close()


@pytest.mark.long
def test_a_cluster_whose_node_is_killed_and_replaced_costs_no_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, seeds = "hunter2", range(8)
    cluster = RedisClusterServers(tmp_path / "cluster", password, num_replicas=1)
    monkeypatch.setenv("HEADSTART_KV_STORE_PASSWORD", password)
    with serving(model, tmp_path, cluster.url, command=[sys.executable, "-m", "headstart"]) as server:
        texts = [ask(server, prompt(seed))["text"] for seed in seeds]
        wait_for(lambda: store_stats(server)["written_blocks"] >= len(seeds) * CACHED // 16)
        for killed in range(NUM_PRIMARIES):  # each is replaced by its replica
            threading.Timer(0.1, cluster.nodes[killed].kill).start()
            for seed in seeds:  # more than the pool holds: each was evicted since
                assert ask(server, prompt(seed))["text"] == texts[seed]

            def reads() -> bool:
                """Return whether all of a prompt is read again, and no answer changes until then."""
                answers = [ask(server, prompt(seed)) for seed in seeds]
                assert [answer["text"] for answer in answers] == texts
                return not store_stats(server)["degraded"] and any(answer["store"] == CACHED for answer in answers)

            wait_for(reads)
            cluster.nodes[killed].start()
        assert "Traceback" not in server.log
    cluster.kill()
