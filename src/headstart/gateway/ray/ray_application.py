"""build: the Serve application. `serve run headstart.gateway.ray.ray_application:build model=... replicas=2`.

EngineReplica: the actor of one replica. Ray places it on a node; it runs a server there as a child process.

The server is the process that `headstart serve` runs, so an engine that fails or hangs cannot take the actor's calls
along, and the end of the actor ends the server.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig
from ray.util import get_node_ip_address

from headstart.config.config_file import merge_option_sources, parse_option_texts
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions
from headstart.core.errors import ConfigError
from headstart.gateway.ray.ingress import Ingress
from headstart.gateway.replicas.replica_child import (
    ReplicaChild,
    ReplicaLaunch,
    ReplicaOptions,
    encode_replica_options,
    replica_command,
    replica_environment,
)
from headstart.http.logs import ServerLog

REQUEST_ROUTER = "headstart.gateway.ray.prefix_request_router.PrefixRequestRouter"
HEALTH_SECONDS = 2.0  # between two health checks of a replica; Ray replaces it after three that failed
MAX_ONGOING = 100_000  # requests of one actor: the bounds on requests are those of router and servers
WAIT_SECONDS = 0.5  # between two looks of a draining actor at its requests
LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")  # the router writes an access line itself
_DEPLOYMENT: Any = serve.deployment  # typed as if it were only called without options
ON_HEAD = {"node:__internal_head__": 0.001}  # where clients' connections end, too
HOLD_SECONDS = 1800.0  # after which a call ends whose ingress has died
GRACE_SECONDS = 20.0  # beyond the drain: for cut connections and pending store writes


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of an EngineReplica: `cpus` are its compute threads, `num_on_node` the replicas that a node may hold."""

    engine: EngineOptions
    server: ServerOptions
    cpus: int
    num_on_node: int


class EngineReplica:
    """One replica. Ray calls `check_health` regularly, `record_replica_metadata` once, and `__del__` after a drain."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the server and wait until it can be used. Raises RuntimeError with its message if it ends."""
        self._end_seconds = settings.server.drain_timeout + GRACE_SECONDS
        self._child = ReplicaChild("server", _launch(settings), asyncio.get_running_loop(), ServerLog())
        await self._child.settled.wait()
        self._url()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the address of the server, by which the router knows this replica."""
        return {"url": self._url()}

    def check_health(self) -> None:
        """Raise RuntimeError if the server has ended; Ray then replaces the replica."""
        self._url()

    async def greet(self, name: str) -> None:
        """Do nothing: see Introduction."""

    async def hold(self, request_id: str) -> None:
        """Last as long as a request to the server, whose end cancels this call."""
        await asyncio.sleep(HOLD_SECONDS)

    async def __del__(self) -> None:
        """Let the server finish its requests and end."""
        self._child.terminate()
        try:
            await asyncio.wait_for(self._child.over.wait(), self._end_seconds)
        finally:
            self._child.kill()

    def _url(self) -> str:
        child = self._child
        if child.address is None or child.over.is_set():
            raise RuntimeError(f"the server {child.exit_description}")
        return child.address.url


def _launch(settings: ReplicaSettings) -> ReplicaLaunch:
    server = replace(settings.server, host=get_node_ip_address(), port=0, access_log="none")
    engine = replace(settings.engine, threads=settings.cpus)
    share = 1 / max(settings.num_on_node, 1)
    options = ReplicaOptions(engine, server, num_replicas=settings.num_on_node, memory_share=share)
    return ReplicaLaunch(replica_command(), encode_replica_options(options), replica_environment(settings.cpus))


def build(args: Mapping[str, Any]) -> Application:
    """Return the application for options by name, as in headstart.toml. Raises ConfigError."""
    values = parse_option_texts({name: str(value) for name, value in args.items()})
    return application(
        merge_option_sources(EngineOptions, values),
        merge_option_sources(ServerOptions, values),
        merge_option_sources(RouterOptions, values),
    )


def application(engine: EngineOptions, server: ServerOptions, router: RouterOptions) -> Application:
    """Return the application: `router.replicas` replicas, up to `router.max_replicas` under load. Raises ConfigError.

    Without keys of clients, replicas take the requests of this application only: they listen on the network.
    """
    if engine.kv_events_config is not None:
        raise ConfigError("kv_events_config names one endpoint, and --on ray starts several replicas")
    if router.envoy != "none" or router.ext_proc is not None:
        raise ConfigError("Envoy is not used with --on ray: Ray has an HTTP proxy of its own")
    most = max(router.max_replicas or router.replicas, router.replicas)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    cpus = engine.threads or cpus_per_replica([int(node.get("CPU", 0)) for node in nodes], most)
    on_node = max([int(node.get("CPU", 0)) // cpus for node in nodes], default=1)
    gpus = 0 if engine.device == "cpu" else int(engine.device.startswith("cuda") or any("GPU" in n for n in nodes))
    replica_server, router = options_with_replica_key(server, router)
    settings = ReplicaSettings(engine, replica_server, cpus, min(max(on_node, 1), most))
    if most > router.replicas:
        scaling = {"num_replicas": None, "autoscaling_config": _autoscaling(router, most)}
    else:
        scaling = {"num_replicas": router.replicas}
    actor = {"num_cpus": cpus, "num_gpus": gpus}
    replicas = replica_deployment(EngineReplica, replica_server, ray_actor_options=actor, **scaling).bind(settings)
    return ingress_application(router, server, replicas)


def replica_deployment(actor: type[Any], server: ServerOptions, **options: Any) -> Any:
    """Return the deployment of a class of replicas, whose requests are routed by this package. `options`: Ray's."""
    routing: dict[str, Any] = {"request_router_class": REQUEST_ROUTER}
    return _DEPLOYMENT(
        actor,
        name="replica",
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=WAIT_SECONDS,
        graceful_shutdown_timeout_s=server.drain_timeout + 2 * GRACE_SECONDS,
        request_router_config=RequestRouterConfig(**routing),
        logging_config=LOGGING,
        **options,
    )


def ingress_application(router: RouterOptions, server: ServerOptions, replicas: Application) -> Application:
    """Return the application whose ingress routes to `replicas`."""
    ingress = _DEPLOYMENT(
        serve.ingress()(Ingress),
        name="ingress",
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_wait_loop_s=WAIT_SECONDS,
        graceful_shutdown_timeout_s=server.drain_timeout + GRACE_SECONDS,
        logging_config=LOGGING,
    )
    return ingress.bind(router, server, replicas)


def cpus_per_replica(nodes: list[int], replicas: int) -> int:
    """Return the CPUs of each of so many replicas: as many as let all of them be placed; 1 if they do not fit anyway.

    `nodes`: the CPUs of each node.
    """
    for cpus in range(max(nodes, default=1), 1, -1):
        if sum(node // cpus for node in nodes) >= replicas:
            return cpus
    return 1


def options_with_replica_key(server: ServerOptions, router: RouterOptions) -> tuple[ServerOptions, RouterOptions]:
    """Return the options of the replicas' servers, and the router's.

    If clients have keys, replicas check the same keys. Else only the router has one, which is made up here.
    """
    if server.api_key or server.tenants:
        return server, router
    secret = secrets.token_urlsafe(32)
    closed = (secrets.token_urlsafe(32),)  # with any key, a server refuses clients without one; this one is never used
    return (
        replace(server, api_key=closed, admin_api_key=(*server.admin_api_key, secret)),
        replace(router, replica_api_key=secret),
    )


def _autoscaling(router: RouterOptions, most: int) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=router.replicas,
        max_replicas=most,
        target_ongoing_requests=router.target_ongoing_requests,
        upscale_delay_s=router.upscale_delay,
        downscale_delay_s=router.downscale_delay,
        look_back_period_s=max(min(router.upscale_delay, router.downscale_delay, 30.0), 1.0),
        metrics_interval_s=1.0,
    )
