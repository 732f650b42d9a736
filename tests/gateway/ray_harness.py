"""A real Ray: a node with the replicas of the harness, for the suite of all fronts; a cluster of nodes with servers."""

import asyncio
import atexit
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
from gateway.envoy_harness import unused_port
from gateway.harness import Front, Replica
from server.harness import PATIENCE

from headstart.cli.serve import RAY_DEFAULTS
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions

NAME = "headstart"
_THREAD = ThreadPoolExecutor(1)  # Ray ends the process when the thread that started it has ended
ENVIRONMENT = {
    **RAY_DEFAULTS,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",  # as for its start: other tests run on the same cores
}
NUM_BLOCKS = 512


class RemoteState:
    """The state of a router in another process, as the suite reads it: from /v1/fleet and /metrics."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.router = self
        self.members = self
        self.metrics = self

    def _fleet(self) -> dict[str, Any]:
        return httpx.get(f"{self._url}/v1/fleet", timeout=PATIENCE).json()

    def expose(self, with_replicas: bool) -> bytes:
        """The text of /metrics; with the figures per replica only if this caller may see them."""
        assert with_replicas
        return httpx.get(f"{self._url}/metrics", timeout=PATIENCE).content

    @property
    def num_awaiting_first_token(self) -> int:
        return self._fleet()["queued"]

    @property
    def num_under_way(self) -> int:
        return sum(endpoint.load.num_requests for endpoint in self.endpoints.values())

    @property
    def endpoints(self) -> dict[str, Any]:
        """Endpoints by URL, as far as the suite looks at them."""

        def endpoint(replica: dict[str, Any]) -> Any:
            load = SimpleNamespace(num_requests=replica["pending"] + replica["streams"])
            return SimpleNamespace(
                state=replica["state"], load=load, health=SimpleNamespace(num_ejections=int(replica["ejected"]))
            )

        # a replica without an endpoint has no load yet
        return {one["url"]: endpoint({"pending": 0, "streams": 0, "ejected": False, **one}) for one in self._replicas()}

    def _replicas(self) -> list[dict[str, Any]]:
        return self._fleet()["replicas"]


class RemoteFront(Front):
    """A router in another process."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.state = RemoteState(url)  # type: ignore[assignment]
        self.client = client

    async def up(self, count: int) -> None:
        while sum(one.state == "up" for one in self.state.router.endpoints.values()) != count:
            await asyncio.sleep(0.1)


@functools.cache
def one_node() -> str:
    """Starts a Ray of one node for this process; returns the address of its HTTP proxy."""
    import ray
    from ray import serve

    os.environ.update(ENVIRONMENT)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    atexit.register(ray.shutdown)
    port = unused_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return f"http://127.0.0.1:{port}"


async def in_ray(call: Callable[[], Any]) -> Any:
    """Run a call in the thread of Ray's driver, which it blocks."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, call)


@asynccontextmanager
async def ray_front(*replicas: Replica, server: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Front]:
    """A router in Ray Serve, whose actors stand for the harness's replicas. Options as of `front`."""
    from ray import serve

    from headstart.gateway.ray.ray_application import ingress_application, replica_deployment

    class StandIn:  # here, so that it is pickled by value: actors do not find the tests
        def __init__(self, urls: list[str]) -> None:
            self._url = urls[serve.get_replica_context().rank.rank]

        def record_replica_metadata(self) -> dict[str, str]:
            return {"url": self._url}

        async def greet(self, name: str) -> None:
            pass

        async def hold(self, request_id: str) -> None:
            await asyncio.sleep(1800)

    url = await in_ray(one_node)
    for replica in replicas:
        await replica.start()
    router = RouterOptions(**{"health_interval": 0.05, "scrape_interval": 0.05, "tokenizer": "none", **options})
    server_options = ServerOptions(**{"access_log": "none", "drain_timeout": 1.0, **(server or {})})
    deployment = replica_deployment(
        StandIn, server_options, num_replicas=len(replicas), ray_actor_options={"num_cpus": 0.1}
    )
    app = ingress_application(router, server_options, deployment.bind([replica.url for replica in replicas]))
    try:
        await in_ray(lambda: serve.run(app, name=NAME, route_prefix="/"))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
            router_front = RemoteFront(url, client)
            if not router_options_have_keys(server_options):
                await router_front.up(len(replicas))
            yield router_front
    finally:
        await in_ray(lambda: serve.delete(NAME))
        for replica in replicas:
            await replica.stop()


def router_options_have_keys(server: ServerOptions) -> bool:
    """Whether /v1/fleet needs a key."""
    return bool(server.api_key or server.tenants or server.admin_api_key)


class RayCluster:
    """A cluster of several Ray nodes on this machine."""

    def __init__(self, cluster: Any, url: str) -> None:
        self._cluster = cluster
        self.url = url
        self.address: str = cluster.address

    def kill(self, number: int) -> int:
        """Kill every process of a node at once, as the loss of a machine does; return their number."""
        node = self._cluster.list_all_nodes()[number]
        raylet = psutil.Process(next(info.process.pid for info in node.all_processes["raylet"]))
        processes = [raylet, *raylet.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        return len(processes)


@contextmanager
def ray_cluster(num_nodes: int) -> Iterator[RayCluster]:
    """Run a cluster of nodes with one CPU each; the first is the head."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    os.environ.update(ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        port = unused_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield RayCluster(cluster, f"http://127.0.0.1:{port}")
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def served(server: ServerOptions | None = None, **router: Any) -> Iterator[None]:
    """Serve the bundled model on the cluster; return when all replicas run."""
    from ray import serve

    from headstart.gateway.ray.ray_application import application

    engine = EngineOptions(num_gpu_blocks_override=NUM_BLOCKS, threads=1)
    serve.run(application(engine, server or ServerOptions(), RouterOptions(**router)), name=NAME, route_prefix="/")
    try:
        yield
    finally:
        serve.delete(NAME)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for what must happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)
