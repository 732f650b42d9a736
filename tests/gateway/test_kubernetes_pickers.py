"""Several routers on one pool: they find the same replicas, agree on cold prefixes, and see each other's load."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from io import StringIO
from pathlib import Path
from random import Random

import grpc.aio
import httpx
import pytest
from gateway.harness import Front, Replica, front
from gateway.stub_api_server import PODS, POOLS, SLICES, StubApiServer, endpoint_slice, pod, pool, stub_api_server
from server.harness import PATIENCE, quiet_port, spawn, until

from headstart.gateway.discovery.kubernetes_discovery import KubernetesDiscovery
from headstart.gateway.discovery.kubernetes_objects import parse_target
from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.picker_fronts import HEALTH
from headstart.http.logs import ServerLog
from headstart.router.routing_request import RoutingPrompt, RoutingRequest, router_root


@asynccontextmanager
async def picker(kubeconfig: Path) -> AsyncIterator[Front]:
    """A router whose replicas come from the stub."""
    async with front() as router:
        target, log = parse_target("service/llama"), ServerLog(StringIO())
        discovery = KubernetesDiscovery(target, kubeconfig=kubeconfig, log=log, allow_loopback=True)
        watching = asyncio.create_task(discovery.watch_replicas(router.state.members.on_replicas_changed))
        try:
            yield router
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def add(stub: StubApiServer, name: str, replica: Replica) -> None:
    """List a replica at the stub, in a slice of its own: each has a port of its own on this machine."""
    one = endpoint_slice({"addresses": ["127.0.0.1"], "targetRef": {"kind": "Pod", "name": name}}, http=replica.port)
    await stub.put(SLICES, name, one, {"kubernetes.io/service-name": "llama"})


def picks(router: Front, count: int = 40) -> list[str]:
    """The replicas chosen for prompts that no router has seen."""
    rng, now = Random(7), time.monotonic()
    prompts = [RoutingPrompt([rng.randrange(1_000) for _ in range(64)], router_root("m")) for _ in range(count)]
    return [router.state.router.pick(RoutingRequest(prompt), now).endpoint.name for prompt in prompts]


def test_pickers_agree_on_cold_prefixes_and_see_each_others_load(tmp_path: Path) -> None:
    async def go() -> None:
        async with AsyncExitStack() as stack:
            stub, kubeconfig = await stack.enter_async_context(stub_api_server(tmp_path))
            replicas = [await Replica("m").start() for _ in range(3)]
            for replica in replicas:
                stack.push_async_callback(replica.stop)
            for n, replica in enumerate(replicas):
                await add(stub, f"m-{n}", replica)
            one, two = [await stack.enter_async_context(picker(kubeconfig)) for _ in range(2)]
            for router in (one, two):
                await router.up(3)
            assert picks(one) == picks(two) and len(set(picks(one))) == 3

            before = picks(one)
            await stub.delete(SLICES, "m-1")
            for router in (one, two):
                await until(lambda router=router: len(router.state.router.endpoints) == 2)
            assert picks(one) == picks(two)
            moved = [a for a, b in zip(before, picks(one), strict=True) if a != b]
            assert set(moved) == {replicas[1].url}  # all other prefixes stay where they were

            for router in (one, two):  # both learn what a request costs at each replica
                loads = [endpoint.load for endpoint in router.state.router.endpoints.values()]
                for n in range(100):
                    if all(load.mean_prefill_ms for load in loads):
                        break
                    await router.complete(f"{n} {n}")
                assert all(load.mean_prefill_ms for load in loads)
            busy = replicas[0]
            busy.waiting = 1_000_000  # requests that a third picker sent there
            for router in (one, two):
                await until(lambda router=router: busy.url not in picks(router))

    asyncio.run(go())


def test_the_container_of_the_manifest_serves_a_pool_over_http_and_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of deploy/kubernetes/picker.yaml as a process, with a kubeconfig in place of a service account."""

    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig):
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            port = quiet_port()
            words = ["route", "--discover=kubernetes:inferencepool/llama", f"--ext-proc=127.0.0.1:{port}"]
            words.append("--allow-loopback-endpoints")
            command = [sys.executable, "-m", "headstart", *words, "--port", "0", "--tokenizer", "none"]
            with spawn([*command, "--health-interval", "0.1"], tmp_path / "log") as router:
                await asyncio.to_thread(router.wait_ready)
                channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
                async with channel, httpx.AsyncClient(base_url=router.url, timeout=PATIENCE) as client:
                    assert (await client.get("/readyz")).status_code == 503 and await health(channel) == "NOT_SERVING"
                    replica = await Replica("m").start()
                    await stub.put(POOLS, "llama", pool(replica.port, app="m"))
                    await stub.put(PODS, "m-0", pod("127.0.0.1"), {"app": "m"})
                    while await health(channel) != "SERVING":
                        await asyncio.sleep(0.02)
                    answer = await client.post("/v1/completions", json={"prompt": "Hello"})
                    assert answer.status_code == 200 and replica.bodies
                    await stub.delete(PODS, "m-0")
                    while await health(channel) != "NOT_SERVING":
                        await asyncio.sleep(0.02)
                    await replica.stop()
                assert await asyncio.to_thread(router.stop) == 0

    asyncio.run(go())


async def health(channel: grpc.aio.Channel) -> str:
    """The status of the service `readiness`, as a probe of a kubelet asks for it."""
    check = channel.unary_unary(
        f"/{HEALTH}/Check", pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
    )
    answer = await check(pb.HealthCheckRequest(service="readiness"))
    return {1: "SERVING", 2: "NOT_SERVING"}[answer.status]
