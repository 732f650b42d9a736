"""Ray Serve on a cluster of three nodes, with real servers: a lost node, hit rates, scaling, commands."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from gateway.envoy_harness import unused_port
from gateway.harness import RealReplica, front, run
from gateway.ray_harness import ENVIRONMENT, NUM_BLOCKS, RayCluster, ray_cluster, served, wait_until
from server.harness import PATIENCE, parse_events

from headstart.config.options import ServerOptions

pytestmark = pytest.mark.long
KEYS = ServerOptions(api_key=("k",), admin_api_key=("boss",))
ADMIN = {"authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3) as found:
        yield found


def body(group: int, question: int, *, stream: bool = False, max_tokens: int = 16) -> dict[str, Any]:
    """A request of a group with a common beginning."""
    prompt = f"group {group} of the requests begins so, " * 30 + f"and this is question {question}"
    return {"prompt": prompt, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}


async def ask(client: httpx.AsyncClient, sent: dict[str, Any]) -> str:
    """Sends a request; returns its outcome: ok, broken: by an error after the first token, or what else went wrong."""
    if not sent["stream"]:
        response = await client.post("/v1/completions", json=sent)
        return "ok" if response.status_code == 200 else f"{response.status_code} {response.text[:200]}"
    text = ""
    async with client.stream("POST", "/v1/completions", json=sent) as response:
        async for piece in response.aiter_text():
            text += piece
    events = parse_events(text)
    errors = [event["error"] for event in events if event != "[DONE]" and "error" in event]
    tokens = [event for event in events if event != "[DONE]" and event.get("choices")]
    if not errors:
        return "ok" if events and events[-1] == "[DONE]" else f"cut: {text[-200:]}"
    return "broken" if tokens and errors[0]["code"] == "replica_lost" else f"lost: {errors[0]}"


def replicas(url: str) -> list[dict[str, Any]]:
    return httpx.get(f"{url}/v1/fleet", headers=ADMIN, timeout=PATIENCE).json()["replicas"]


def num_up(url: str) -> int:
    return sum(one["state"] == "up" for one in replicas(url))


def test_hits_are_those_of_the_python_front(cluster: RayCluster) -> None:
    requests = [body(number * 7 % 24, number, max_tokens=2) for number in range(240)]

    async def share(client: httpx.AsyncClient) -> float:
        """The share of cached tokens of all requests, from empty caches."""
        assert (await client.post("/reset_prefix_cache", headers=ADMIN)).status_code == 200
        await asyncio.sleep(1)
        found = [await client.post("/v1/completions", json=request) for request in requests]
        usages = [answer.json()["usage"] for answer in found]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return cached / sum(usage["prompt_tokens"] for usage in usages)

    async def test() -> None:
        key = {"authorization": "Bearer k"}
        urls = [replica["url"] for replica in replicas(cluster.url)]
        direct = [RealReplica(url) for url in urls]
        async with httpx.AsyncClient(base_url=cluster.url, headers=key, timeout=PATIENCE) as client:
            keys = {"api_key": KEYS.api_key, "admin_api_key": KEYS.admin_api_key}
            async with front(*direct, server=keys, tokenizer="auto") as python:
                python.client.headers.update(key)
                shares = [await share(one) for one in (client, python.client) * 2]
        ours, theirs = (shares[0] + shares[2]) / 2, (shares[1] + shares[3]) / 2
        print(f"cached tokens: Ray {shares[0]:.4f} {shares[2]:.4f}, Python front {shares[1]:.4f} {shares[3]:.4f}")
        assert abs(ours - theirs) <= 0.02 and ours > 0.5

    with served(KEYS, replicas=3):
        wait_until(lambda: num_up(cluster.url) == 3)
        run(test())


def test_replicas_are_added_and_removed_under_load_without_a_failed_request(cluster: RayCluster) -> None:
    async def test() -> None:
        outcomes: list[str] = []
        used: list[str] = []
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE) as client:

            async def load(client_number: int) -> None:
                number = 0
                while wanted > client_number:
                    number += 1
                    outcomes.append(await ask(client, body(client_number, number, stream=number % 2 == 0)))

            async def listed() -> list[str]:
                fleet = (await client.get("/v1/fleet")).json()["replicas"]
                return [one["url"] for one in fleet if one["state"] == "up"]

            wanted = 12
            loads = [asyncio.create_task(load(number)) for number in range(wanted)]
            while len(await listed()) < 3:
                await asyncio.sleep(0.2)
            for number in range(60):  # new replicas are used at once
                response = await client.post("/v1/completions", json=body(100 + number, 0))
                used.append(response.headers["x-headstart-replica"])
            assert set(used) == set(await listed()) and len(set(used)) == 3
            wanted = 1  # one client goes on
            while len(await listed()) > 1:
                await asyncio.sleep(0.2)
            wanted = 0
            await asyncio.gather(*loads)
        print(f"{len(outcomes)} requests under load, {len(used)} beside it")
        assert set(outcomes) == {"ok"}

    scaling = {"max_replicas": 3, "target_ongoing_requests": 2.0, "upscale_delay": 1.0, "downscale_delay": 4.0}
    with served(replicas=1, **scaling):
        wait_until(lambda: num_up(cluster.url) == 1)
        run(test())


def test_serve_run_takes_options_by_name(cluster: RayCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", cluster.address, "--non-blocking"]
    target = "headstart.gateway.ray.ray_application:build"
    given = ["replicas=1", f"num_blocks={NUM_BLOCKS}", "threads=1"]
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run([*command, target, *given], check=True, env=environment, cwd=tmp_path, timeout=PATIENCE)
    wait_until(lambda: num_up(cluster.url) == 1)
    assert httpx.post(f"{cluster.url}/v1/completions", json=body(0, 0), timeout=PATIENCE).status_code == 200
    from ray import serve

    serve.delete("default")


@pytest.mark.parametrize("joins", [True, False])
def test_the_command_stops_what_it_started(cluster: RayCluster, tmp_path: Path, joins: bool) -> None:
    environment = {**os.environ, **ENVIRONMENT, **({"RAY_ADDRESS": cluster.address} if joins else {})}
    words = ["serve", "--on", "ray", "--threads", "1", "--num-blocks", str(NUM_BLOCKS), "--port", str(unused_port())]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headstart", *words], stderr=log, stdout=log, env=environment, cwd=tmp_path
        )

    def text() -> str:
        return (tmp_path / "log").read_text()

    try:
        wait_until(lambda: "routes to 1 replicas" in text() or process.poll() is not None)
        assert process.poll() is None, text()
        started = psutil.Process(process.pid).children(recursive=True)
        url = cluster.url if joins else text().partition("replicas on a Ray started here at ")[2].split("/v1")[0]
        assert httpx.post(f"{url}/v1/completions", json=body(0, 0), timeout=PATIENCE).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0, text()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
    finally:
        process.kill()
    if joins:
        import ray
        from ray import serve

        assert len([node for node in ray.nodes() if node["Alive"]]) == 3 and not serve.status().applications


def test_z_a_lost_node_costs_no_request_that_has_no_token_yet(cluster: RayCluster) -> None:
    """The last one: afterwards the cluster has two nodes."""

    async def test() -> None:
        limits = httpx.Limits(max_connections=None)
        outcomes: list[str] = []
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE, limits=limits) as client:
            waiting = asyncio.Semaphore(16)

            async def one(number: int) -> None:
                async with waiting:
                    sent = body(number % 12, number, stream=number % 2 == 0, max_tokens=24)
                    outcomes.append(await ask(client, sent))

            tasks = [asyncio.create_task(one(number)) for number in range(1000)]
            while len(outcomes) < 300:
                await asyncio.sleep(0.05)
            killed = await asyncio.to_thread(cluster.kill, 1)
            await asyncio.gather(*tasks)
        counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        print(f"{killed} processes killed; outcomes {json.dumps(counts)}")
        assert set(counts) <= {"ok", "broken"} and counts["ok"] >= 900

    with served(replicas=3):
        wait_until(lambda: num_up(cluster.url) == 3)
        lost = {one["url"] for one in replicas(cluster.url)}
        run(test())
        wait_until(lambda: len(replicas(cluster.url)) == 2)  # the index of the third is gone with it
        assert {one["url"] for one in replicas(cluster.url)} < lost
