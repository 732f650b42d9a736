"""The settings that each of several replicas on one machine gets, and the whole command once."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.harness import spawn, wait_for

from headstart.cli.replica_process import options_with_cpu_memory_limit
from headstart.cli.replicas import (
    engine_options_of_one_replica,
    gpu_environment,
    replica_server_options,
    resources_text,
    router_options_with_tokenizer,
    router_uses_kv_events,
    with_kv_events,
)
from headstart.config.options import EngineOptions, PrefixEntry, RouterOptions, ServerOptions, TenantEntry
from headstart.core.errors import ConfigError
from headstart.engine.kv_event_publisher import parse_kv_events_config
from headstart.gateway.replicas.replica_child import replica_environment
from headstart.model.weights.init_model import write_random_model

GIB = 2**30


def share(replicas: int, cores: int, **engine: Any) -> EngineOptions:
    return engine_options_of_one_replica(EngineOptions(**engine), replicas, cores=cores, available=12 * GIB)


@pytest.mark.parametrize(("cores", "replicas", "threads"), [(8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 5, 1)])
def test_cores_are_divided_and_everyone_gets_at_least_one(cores: int, replicas: int, threads: int) -> None:
    assert share(replicas, cores).threads == threads


def test_memory_is_divided_and_an_explicit_limit_is_that_of_all() -> None:
    assert share(3, 8).memory_limit == str(4 * GIB)
    assert share(3, 8, memory_limit="6GiB").memory_limit == str(2 * GIB)
    assert share(3, 8, device="cuda:0").memory_limit is None  # that is another memory
    assert share(3, 8, device="cuda:0", memory_limit="6GiB").memory_limit == str(2 * GIB)


def test_every_replica_has_a_gpu_and_no_part_of_the_machines_memory() -> None:
    for device in ("auto", "cuda", "cuda:1"):
        got = engine_options_of_one_replica(
            EngineOptions(device=device), 2, cores=8, available=12 * GIB, gpus=("3", "GPU-x")
        )
        assert (got.device, got.memory_limit, got.threads) == ("cuda", None, 4)  # it sees one GPU, the first
    assert [gpu_environment(("3", "GPU-x"), slot) for slot in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in ("3", "GPU-x", "3")
    ]
    assert gpu_environment((), 1) == {}
    with pytest.raises(ConfigError, match="--replicas 3: "):
        engine_options_of_one_replica(EngineOptions(), 3, cores=8, gpus=("0", "1"))
    got = engine_options_of_one_replica(EngineOptions(gpu_memory_utilization=0.3), 3, cores=8, gpus=("0",))
    assert got.gpu_memory_utilization == 0.3  # each one's, as in vLLM


def test_a_replica_on_a_gpu_takes_no_share_of_the_hosts_memory() -> None:
    for device, gpus, limit in (("auto", 1, None), ("cuda", 1, None), ("auto", 0, "50"), ("cpu", 0, "50")):
        got = options_with_cpu_memory_limit(EngineOptions(device=device), 0.5, available=100, num_gpus=gpus)
        assert got.memory_limit == limit, device


def test_an_explicit_pool_is_that_of_all_and_blocks_are_each_ones() -> None:
    got = share(2, 8, kv_cache_memory="3GiB", num_gpu_blocks_override=100)
    assert (got.kv_cache_memory, got.num_gpu_blocks_override) == (str(3 * GIB // 2), 100)
    with pytest.raises(ConfigError, match="'lots' is not a size"):
        share(2, 8, kv_cache_memory="lots")


@given(st.integers(1, 64), st.integers(1, 256), st.integers(1, 2**40))
def test_nothing_is_given_twice(replicas: int, cores: int, available: int) -> None:
    got = engine_options_of_one_replica(
        EngineOptions(kv_cache_memory=str(available)), replicas, cores=cores, available=available
    )
    assert got.memory_limit is not None and got.kv_cache_memory is not None
    assert got.threads >= 1 and replicas * got.threads <= max(cores, replicas)
    for share in (int(got.memory_limit), int(got.kv_cache_memory)):
        assert share >= 1 and replicas * share <= max(available, replicas)


def test_everything_else_is_the_same_for_all() -> None:
    engine = EngineOptions(model="m", kv_store="/store", block_size=32, seed=7)
    got = engine_options_of_one_replica(engine, 2, cores=2, available=GIB)
    assert (got.model, got.kv_store, got.block_size, got.seed) == ("m", "/store", 32, 7)
    server = ServerOptions(
        host="0.0.0.0",
        port=80,
        api_key=("k",),
        tenants=(TenantEntry("acme", ("a",)),),
        prefixes=(PrefixEntry("p", text="t"),),
        max_n=3,
    )
    behind = replica_server_options(server, 2)
    assert (behind.host, behind.port, behind.access_log) == ("127.0.0.1", 0, "none")
    assert (behind.api_key, behind.tenants, behind.prefixes, behind.max_n) == (
        server.api_key,
        server.tenants,
        server.prefixes,
        3,
    )


def test_what_servers_remember_of_requests_is_divided_among_replicas() -> None:
    server = ServerOptions(response_store_size=1 << 20, diagnostics_size=4096, prompt_log_size=300)
    behind = replica_server_options(server, 4)
    assert (behind.response_store_size, behind.diagnostics_size, behind.prompt_log_size) == (1 << 18, 1024, 75)


def test_one_endpoint_for_events_cannot_be_that_of_several() -> None:
    with pytest.raises(ConfigError, match="--replicas starts several"):
        share(2, 2, kv_events_config='{"enable_kv_cache_events": true}')


def test_the_banner_says_what_each_got() -> None:
    assert resources_text(share(2, 2)) == "each with 1 thread, up to 6.0 GiB of memory"
    assert (
        resources_text(share(2, 8, kv_cache_memory="2GiB"))
        == "each with 4 threads, up to 6.0 GiB of memory, 1.0 GiB of KV"
    )
    assert resources_text(share(2, 8), ("0", "1")).startswith("each with 4 threads, one of 2 GPUs, ")
    assert resources_text(share(2, 8, num_gpu_blocks_override=9, device="cuda")) == "each with 4 threads, 9 KV blocks"


def test_replicas_find_the_modules_of_this_process_and_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    found = replica_environment(3)
    assert found["OMP_NUM_THREADS"] == "3" and all(part in found["PYTHONPATH"].split(os.pathsep) for part in sys.path)


def test_one_command_serves_a_model_twice_behind_a_router(tmp_path: Path) -> None:
    model = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    (tmp_path / "headstart.toml").write_text(
        'replicas = 2\nnum-blocks = 64\nstats-interval = 0.0\n[[tenant]]\nname = "acme"\napi_keys = ["secret-key"]\n'
    )
    command = [sys.executable, "-m", "headstart", "serve", str(model), "--port", "0"]
    command += ["--config", str(tmp_path / "headstart.toml")]
    with spawn(command, tmp_path / "log", truly=True) as server:
        found = wait_for(lambda: re.search(r"(http://[^\s\"]+?)/v1", server.log) or server.process.poll())
        assert isinstance(found, re.Match), server.log  # the first address there is, as a script would find it
        server.url = found[1]
        headers = {"authorization": "Bearer secret-key"}
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        assert server.get("/health").status_code == 200  # the banner comes when the replicas are there
        answers = [server.post("/v1/completions", json={**body, "seed": n}, headers=headers) for n in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4, server.log
        assert server.post("/v1/completions", json=body).status_code == 401
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) == 6  # two fronts, and of each an engine and a process that renders chats
        assert not any("secret-key" in part for one in family for part in (*one.cmdline(), *one.environ().values()))
        assert server.stop(signal.SIGTERM) == 0
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)
    assert re.search(r"routes to 2 replicas on this machine, each with \d+ thread", server.log)
    assert "replica r0 is loading" in server.log and "replica r1 is ready (2 of 2)" in server.log
    assert "  replicas 2 of 2 up, serving tiny" in server.log
    assert "63 KV blocks" in server.log or "1,008 tokens" in server.log
    assert "secret-key" not in server.log


def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headstart", "serve", str(tmp_path / "nope"), "--replicas", "2", "--port", "0"]
    with spawn(command, tmp_path / "log") as server:
        assert server.wait() == 2
        assert server.log.count("nope") == 1, server.log


def test_the_router_hears_its_replicas_unless_tenants_have_keys() -> None:
    assert router_uses_kv_events(ServerOptions()) and router_uses_kv_events(ServerOptions(admin_api_key=("a",)))
    assert not router_uses_kv_events(ServerOptions(api_key=("k",))) and not router_uses_kv_events(
        ServerOptions(tenants=(TenantEntry("t", ("k",)),))
    )
    engine = with_kv_events(EngineOptions(seed=7), "ipc:///x", "ipc:///y")
    found = parse_kv_events_config(engine.kv_events_config)
    assert found is not None and (found.endpoint, found.replay_endpoint) == ("ipc:///x", "ipc:///y")
    assert engine.seed == 7 and with_kv_events(EngineOptions(), None, None) == EngineOptions()


def test_the_router_counts_in_the_models_own_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert router_options_with_tokenizer(RouterOptions(), EngineOptions(model=str(tmp_path))).tokenizer == str(tmp_path)
    assert router_options_with_tokenizer(RouterOptions(), EngineOptions(model="Qwen/Qwen3-0.6B")).tokenizer == "auto"
    assert router_options_with_tokenizer(RouterOptions(), EngineOptions()).tokenizer == "auto"
    assert (
        router_options_with_tokenizer(RouterOptions(tokenizer="none"), EngineOptions(model=str(tmp_path))).tokenizer
        == "none"
    )
