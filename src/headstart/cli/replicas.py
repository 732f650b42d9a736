"""`headstart serve --replicas N`: replicas and a router in one command; the machine's resources are divided."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headstart.cli.route import envoy_fronts_of_options
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions
from headstart.core.errors import ConfigError
from headstart.gateway.replicas.replica_child import (
    ReplicaLaunch,
    ReplicaOptions,
    encode_replica_options,
    replica_command,
    replica_environment,
)
from headstart.gateway.replicas.subprocesses import LocalReplicas
from headstart.gateway.run_gateway import run_router
from headstart.gguf.gguf_reader import has_gguf_suffix
from headstart.gguf.tokenizer_json import FILE_NAME
from headstart.http.lifecycle import EXIT_INTERRUPTED
from headstart.http.logs import ServerLog
from headstart.http.web_pages import ANY, is_loopback
from headstart.model.kernels.block_hashes import load_compiled_hash_chain
from headstart.model.kernels.compiled_pool import compiled_pool_factory
from headstart.model.setup.gpus import VISIBLE_GPUS, check_gpu_sharing, count_gpus, visible_gpu_ids
from headstart.model.setup.sizes import cpu_memory, format_bytes, parse_bytes
from headstart.model.setup.threads import configure_num_threads

REPLICA_HOST = "127.0.0.1"


def serve_replicas(engine: EngineOptions, server: ServerOptions, router: RouterOptions) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code of server.run_server.serve. Raises ConfigError.

    The router stops first, so that no admitted request is lost; then all replica processes are stopped.
    """
    gpus = visible_gpu_ids(engine.device, count_gpus(engine.device), os.environ.get(VISIBLE_GPUS))
    cores = configure_num_threads(engine.threads, environ={**os.environ})
    share = engine_options_of_one_replica(engine, router.replicas, cores=cores, gpus=gpus)
    command, variables = replica_command(), replica_environment(share.threads)
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:  # private: events contain prompts

        def make_launch(name: str, slot: int) -> ReplicaLaunch:
            events, replay = (
                (f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay")
                if router_uses_kv_events(server)
                else (None, None)
            )
            options = ReplicaOptions(
                with_kv_events(share, events, replay),
                replica_server_options(server, router.replicas),
                ServerLog().is_terminal,
                router.replicas,
            )
            return ReplicaLaunch(
                command, encode_replica_options(options), variables | gpu_environment(gpus, slot), events, replay
            )

        fleet = LocalReplicas(
            make_launch,
            router.replicas,
            about=resources_text(share, gpus),
            drain_seconds=server.drain_timeout,
            overlaps=not gpus,  # a GPU has no memory for the old replica and the new one
        )
        return _routed(fleet, router_options_with_tokenizer(router, engine), server)


def _routed(fleet: LocalReplicas, router: RouterOptions, server: ServerOptions) -> int:
    with fleet:
        code = run_router(
            router,
            server,
            fleet,
            envoy_fronts_of_options(router, server),
            load_compiled_hash_chain(),
            compiled_pool_factory(),
        )
        if code == EXIT_INTERRUPTED:  # by a second Ctrl-C: do not wait for the replicas
            fleet.kill_all()
        return code


def router_uses_kv_events(server: ServerOptions) -> bool:
    """Return whether the router subscribes to KV events. Not with tenants, since events do not name the tenant."""
    return not server.api_key and not server.tenants


def with_kv_events(engine: EngineOptions, events: str | None, replay: str | None) -> EngineOptions:
    """Return the engine options with KV events published at these ZMQ endpoints, unchanged if there are none."""
    if events is None:
        return engine
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
    return replace(engine, kv_events_config=json.dumps(config))


def router_options_with_tokenizer(router: RouterOptions, engine: EngineOptions) -> RouterOptions:
    """Return the router options with the tokenizer of the model's folder or file; else it is found by its name."""
    path = Path(engine.model).expanduser()
    is_there = (path / FILE_NAME).is_file() or (has_gguf_suffix(path) and path.is_file())
    return replace(router, tokenizer=engine.model) if router.tokenizer == "auto" and is_there else router


def replica_server_options(server: ServerOptions, replicas: int) -> ServerOptions:
    """Return the server options of a replica: local address, free port, no access lines (the router writes them).

    What a server remembers of requests is divided among the replicas. Where the router has no local address, an Envoy
    may pass on any host name of its clients.
    """
    return replace(
        server,
        host=REPLICA_HOST,
        port=0,
        uds=None,
        root_path="",
        access_log="none",
        allowed_host=server.allowed_host if is_loopback(server.host) else (ANY,),
        response_store_size=server.response_store_size // replicas,
        diagnostics_size=server.diagnostics_size // replicas,
        prompt_log_size=server.prompt_log_size // replicas,
    )


def engine_options_of_one_replica(
    engine: EngineOptions, replicas: int, *, cores: int, available: int | None = None, gpus: Sequence[str] = ()
) -> EngineOptions:
    """Return the options of one of several replicas, with its share of the cores and of the memory, or one of the GPUs.

    An explicit size of the KV pool is divided among the replicas; else each has its share of `available` bytes (None:
    the memory available now) or of --memory-limit. --num-blocks and --gpu-memory-utilization apply to each replica.
    Raises ConfigError, also for fewer GPUs than replicas.
    """
    if engine.kv_events_config is not None:
        raise ConfigError(
            "kv_events_config names one endpoint, and --replicas starts several; the router subscribes to all anyway"
        )
    check_gpu_sharing(replicas, gpus, engine.gpu_memory_utilization)
    device = "cuda" if gpus else engine.device
    share = replace(engine, threads=max(cores // replicas, 1), device=device)
    if engine.memory_limit is not None:
        limit = parse_bytes(engine.memory_limit)
    elif device.startswith("cuda"):  # the memory of the GPU is not known here
        return _with_pool(share, replicas)
    else:
        limit = cpu_memory().available if available is None else available
    return _with_pool(replace(share, memory_limit=str(max(limit // replicas, 1))), replicas)


def _with_pool(engine: EngineOptions, replicas: int) -> EngineOptions:
    if engine.kv_cache_memory is None:
        return engine
    return replace(engine, kv_cache_memory=str(max(parse_bytes(engine.kv_cache_memory) // replicas, 1)))


def gpu_environment(gpus: Sequence[str], slot: int) -> dict[str, str]:
    """Return the variable that lets replica number `slot` see only its GPU; {} without GPUs."""
    return {VISIBLE_GPUS: gpus[slot % len(gpus)]} if gpus else {}


def resources_text(share: EngineOptions, gpus: Sequence[str] = ()) -> str:
    """Return the resources of each replica as text for the banner."""
    parts = [f"each with {share.threads} thread{'' if share.threads == 1 else 's'}"]
    if gpus:
        parts.append(f"one of {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}")
    if share.memory_limit is not None:
        parts.append(f"up to {format_bytes(parse_bytes(share.memory_limit))} of memory")
    if share.num_gpu_blocks_override is not None:
        parts.append(f"{share.num_gpu_blocks_override} KV blocks")
    elif share.kv_cache_memory is not None:
        parts.append(f"{format_bytes(parse_bytes(share.kv_cache_memory))} of KV")
    return ", ".join(parts)
