"""A gateway's Envoy in front of two pools with a picker each, as in the conformance test `weighted_two_pools`.

The HTTPRoute of that test (tests/data/crds does not hold it: it is a manifest) sends 70 % of its requests to one
InferencePool and 30 % to another. A gateway makes of it one route with two weighted clusters, each of which names the
picker that is asked. Bodies are sent as the endpoint picker protocol wants: FULL_DUPLEX_STREAMED.
"""

import asyncio
import json
import math
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.envoy_harness import envoy_binary, unused_port
from gateway.harness import Replica, front, run, two
from server.harness import PATIENCE, until, wait_for

from headstart.gateway.picker.endpoint_addresses import ReplicaIpAddresses
from headstart.gateway.picker.envoy_config import TYPE
from headstart.gateway.picker.ext_proc_messages import DESTINATION, LB, SERVED
from headstart.gateway.picker.picker_fronts import PickerServer

WEIGHTS = {"primary": 70, "secondary": 30}
NUM_CONVERSATIONS, NUM_TURNS = 100, 4


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def cluster(name: str, ports: list[int], **fields: Any) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": address(port)}} for port in ports]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assignment, **fields}


def pool(name: str, ports: list[int]) -> dict[str, Any]:
    override = {
        "@type": f"{TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": LB, "path": [{"key": DESTINATION}]}}],
        "selected_host_key": {"key": LB, "path": [{"key": SERVED}]},
        "fallback_policy": {"policies": [_policy("round_robin", "RoundRobin")]},
    }
    policies = [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
    return cluster(name, ports, load_balancing_policy={"policies": policies})


def _policy(name: str, kind: str) -> dict[str, Any]:
    config = {"@type": f"{TYPE}.extensions.load_balancing_policies.{name}.v3.{kind}"}
    return {"typed_extension_config": {"name": name, "typed_config": config}}


def picker(name: str, port: int) -> dict[str, Any]:
    http2 = {
        "@type": f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    return cluster(f"{name}-picker", [port], typed_extension_protocol_options=options)


def gateway_config(port: int, pools: dict[str, list[int]], pickers: dict[str, int]) -> dict[str, Any]:
    def service(name: str) -> dict[str, Any]:
        return {"envoy_grpc": {"cluster_name": f"{name}-picker"}}

    kind = f"{TYPE}.extensions.filters.http.ext_proc.v3"
    processor = {
        "@type": f"{kind}.ExternalProcessor",
        "grpc_service": service("primary"),
        "message_timeout": "30s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {"forwarding_namespaces": {"untyped": [LB]}, "receiving_namespaces": {"untyped": [LB]}},
    }
    weighted = [
        {
            "name": name,
            "weight": weight,
            "typed_per_filter_config": {
                "picker": {"@type": f"{kind}.ExtProcPerRoute", "overrides": {"grpc_service": service(name)}}
            },
        }
        for name, weight in WEIGHTS.items()
    ]
    route = {"match": {"prefix": "/"}, "route": {"weighted_clusters": {"clusters": weighted}, "timeout": "0s"}}
    router = {"@type": f"{TYPE}.extensions.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "picker", "typed_config": processor}, {"name": "router", "typed_config": router}],
    }
    chains = [{"filters": [{"name": "http", "typed_config": manager}]}]
    clusters = [pool(name, ports) for name, ports in pools.items()]
    clusters += [picker(name, where) for name, where in pickers.items()]
    listener = {"name": "gateway", "address": address(port), "filter_chains": chains}
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


@contextmanager
def gateway(config: dict[str, Any], folder: Path) -> Iterator[None]:
    path = folder / "gateway.json"
    path.write_text(json.dumps(config))
    words = [str(envoy_binary()), "--config-path", str(path), "--disable-hot-restart", "--concurrency", "1"]
    with (folder / "log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as envoy:
        try:
            yield
        finally:
            envoy.kill()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
def test_two_weighted_pools_each_with_its_own_picker(tmp_path: Path) -> None:
    async def test() -> None:
        fleets = {name: two() for name in WEIGHTS}
        for fleet in fleets.values():
            for replica in fleet:
                await replica.start()
        async with AsyncExitStack() as stack:
            routers, pickers, ports = {}, {}, {}
            for name, fleet in fleets.items():
                routers[name] = await stack.enter_async_context(front(*fleet))
                addresses = ReplicaIpAddresses()
                addresses.on_replicas_changed([replica.address for replica in fleet])
                pickers[name] = PickerServer(routers[name].state, addresses)
                ports[name] = await pickers[name].start("127.0.0.1:0")
            port = unused_port()
            pools = {name: [int(one.url.rpartition(":")[2]) for one in fleet] for name, fleet in fleets.items()}
            stack.enter_context(gateway(gateway_config(port, pools, ports), tmp_path))
            await asyncio.to_thread(wait_for, lambda: answers(port))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                for turn in range(NUM_TURNS):
                    for number in range(NUM_CONVERSATIONS):
                        prompt = f"conversation {number}: " + "words in common, " * 20 + "and more, " * turn
                        response = await client.post("/v1/completions", json={"prompt": prompt})
                        assert response.status_code == 200
            await until(lambda: not any(router.state.num_under_way for router in routers.values()))
            for name, fleet in fleets.items():
                decided = routers[name].state.metrics.expose(with_replicas=True)
                assert all(one.url.encode() in decided for one in fleet), "its picker decides within its pool"
                others = [one for other, fleet in fleets.items() if other != name for one in fleet]
                assert not any(one.url.encode() in decided for one in others)
                _assert_prefixes_stay_together(fleet)
            _assert_split({name: sum(len(one.bodies) for one in fleet) for name, fleet in fleets.items()})
            for server in pickers.values():
                await server.close()
            await asyncio.sleep(0)
        for fleet in fleets.values():
            for replica in fleet:
                await replica.stop()

    run(test())


def _assert_split(counts: dict[str, int]) -> None:
    """Four standard deviations of the binomial distribution."""
    total = NUM_CONVERSATIONS * NUM_TURNS
    assert sum(counts.values()) == total
    for name, weight in WEIGHTS.items():
        share = weight / 100
        assert abs(counts[name] - share * total) <= 4 * math.sqrt(total * share * (1 - share)), counts
    print("requests by pool", counts)


def _assert_prefixes_stay_together(fleet: list[Replica]) -> None:
    """Most turns of a conversation that a pool serves go to the replica that has served it before."""
    where: dict[str, Counter[str]] = {}
    for replica in fleet:
        for body in replica.bodies:
            where.setdefault(body["prompt"].partition(":")[0], Counter())[replica.url] += 1
    repeated = [counts for counts in where.values() if counts.total() > 1]
    together = sum(len(counts) == 1 for counts in repeated)
    assert repeated and together >= 0.9 * len(repeated), (together, len(repeated))
