"""KubernetesDiscovery: the replicas of an InferencePool or of a Service, from watches of the API server."""

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from headstart.gateway.discovery.discovery import Changed, DiscoveredReplicas, ReplicaListNotifier
from headstart.gateway.discovery.kubernetes_api import (
    FIRST_BACKOFF,
    WATCH_SECONDS,
    KubernetesApi,
    KubernetesApiError,
    Reflector,
    WatchedResource,
    connect_to_cluster,
)
from headstart.gateway.discovery.kubernetes_objects import (
    EndpointSlice,
    InferencePool,
    KubernetesTarget,
    Pod,
    port_names,
    replicas_of_pool,
    replicas_of_slices,
)
from headstart.http.logs import ServerLog

POOLS = ("/apis/inference.networking.k8s.io/v1", "inferencepools")
PODS = ("/api/v1", "pods")
SLICES = ("/apis/discovery.k8s.io/v1", "endpointslices")

T = TypeVar("T", Pod, InferencePool, EndpointSlice)


class KubernetesDiscovery:
    """One replica per address and port of the target's pods that are not terminating."""

    def __init__(
        self,
        target: KubernetesTarget,
        *,
        kubeconfig: Path | None = None,
        log: ServerLog | None = None,
        rng: random.Random | None = None,
        first_backoff: float = FIRST_BACKOFF,
        watch_seconds: tuple[int, int] = WATCH_SECONDS,
        allow_loopback: bool = False,
    ) -> None:
        """`kubeconfig` None: the service account of the pod, else the user's kubeconfig.

        `allow_loopback`: endpoints at loopback addresses are replicas too, as in tests.
        """
        self._target = target
        self._kubeconfig = kubeconfig
        self._log = log or ServerLog()
        self._rng = rng or random.Random()
        self._first_backoff = first_backoff
        self._watch_seconds = watch_seconds
        self._allow_loopback = allow_loopback

    def describe(self) -> str:
        return str(self._target)

    async def watch_replicas(self, changed: Changed) -> None:
        """As Discovery.watch_replicas; the first call follows the first complete answer of the API server.

        Raises ConfigError if there is no cluster, or kubernetes_asyncio is not installed.
        """
        api = await connect_to_cluster(self._kubeconfig)
        try:
            listing = ReplicaListNotifier(self.describe(), changed, self._log, items="endpoints")
            if self._target.kind == "service":
                await self._watch_service(api, listing)
            else:
                await self._watch_pool(api, listing)
        finally:
            await api.close()

    async def _watch_service(self, api: KubernetesApi, listing: ReplicaListNotifier) -> None:
        def listed(slices: Mapping[str, EndpointSlice]) -> None:
            found = replicas_of_slices(slices.values(), self._target.port, allow_loopback=self._allow_loopback)
            ports = port_names(slices.values())
            if ports and not any(found) and (self._target.port not in ports or not self._target.port):
                listing.log_complaint(
                    f"has endpoints with the ports {', '.join(ports)}; name one of them after a colon"
                )
            listing.publish_if_changed(found)

        selector = {"labelSelector": f"kubernetes.io/service-name={self._target.name}"}
        await self._reflector(api, listing, EndpointSlice, SLICES, selector, listed).run()

    async def _watch_pool(self, api: KubernetesApi, listing: ReplicaListNotifier) -> None:
        """Watch the pool, and the pods of its selector. Pods of a new selector replace those of the old one at once."""
        pool: InferencePool | None = None
        selected: tuple[bool, str] | None = None  # whether the pool exists, its selector; None: not read yet
        pods: Mapping[str, Pod] = {}
        watching: asyncio.Task[None] | None = None

        def update() -> None:
            if pool is None:
                listing.publish_if_changed(DiscoveredReplicas())
            else:
                listing.publish_if_changed(replicas_of_pool(pool, pods.values(), allow_loopback=self._allow_loopback))

        def pods_listed(found: Mapping[str, Pod]) -> None:
            nonlocal pods
            pods = found
            update()

        def pool_listed(pools: Mapping[str, InferencePool]) -> None:
            nonlocal pool, selected, pods, watching
            pool, before = pools.get(self._target.name), selected
            selector = pool.label_selector_param if pool else ""
            selected = pool is not None, selector
            if selected == before:
                if listing.is_known:
                    update()
                return
            if watching is not None:
                watching.cancel()
                watching = None
            if selector:
                query = {"labelSelector": selector}
                watching = group.create_task(self._reflector(api, listing, Pod, PODS, query, pods_listed).run())
            else:
                listing.log_complaint("selects no pods" if pool else "does not exist")
                pods = {}
                update()

        async with asyncio.TaskGroup() as group:
            query = {"fieldSelector": f"metadata.name={self._target.name}"}
            await self._reflector(api, listing, InferencePool, POOLS, query, pool_listed).run()

    def _reflector(
        self,
        api: KubernetesApi,
        listing: ReplicaListNotifier,
        kind: type[T],
        collection: tuple[str, str],
        selector: Mapping[str, str],
        changed: Callable[[Mapping[str, T]], None],
    ) -> Reflector[T]:
        group, plural = collection

        def failed(error: KubernetesApiError | None) -> None:
            listing.log_failure(plural, f"{self.describe()}: {error}" if error is not None else "")

        path = f"{group}/namespaces/{self._target.namespace or api.namespace}/{plural}"
        return Reflector(
            api,
            WatchedResource(kind, path, selector),
            changed,
            failed,
            rng=self._rng,
            first_backoff=self._first_backoff,
            watch_seconds=self._watch_seconds,
        )
