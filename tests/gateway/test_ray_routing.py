"""Ray's request router and the router of this package: their meeting, with Ray's own classes and no cluster."""

import asyncio
import pickle
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from gateway.harness import TEXTS, Front, Replica, front, reset, run, texts, two
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from server.harness import until

from headstart.core.errors import NoReplicaError
from headstart.gateway.ray import ingress
from headstart.gateway.ray.ingress import RayRequestPlacer
from headstart.gateway.ray.placement_ticket import PlacementRequest, RayReplicaListNotifier
from headstart.gateway.ray.prefix_request_router import PrefixRequestRouter

LONG = "a shared beginning of many words, " * 40
APP = DeploymentID("replica", "headstart")


class RunningReplica:
    """A replica as Ray's router sees it."""

    def __init__(self, url: str) -> None:
        self.replica_id = ReplicaID(url, APP)
        self.replica_metadata = {"url": url}
        self.max_ongoing_requests = 100

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Lease:
    """A call of a replica's actor."""

    def __init__(self, name: str, future: Any) -> None:
        self.name, self.future = name, future
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.future.cancel()

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future).__await__()


class Handle:
    """A handle of the deployment; its router runs in a thread of its own, as in a Ray actor."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.loop = asyncio.new_event_loop()
        self.asks = True  # whether Ray's router gets round to routing
        self._method = ""
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.router = self._run(self._make())

    async def _make(self) -> PrefixRequestRouter:
        return PrefixRequestRouter(
            deployment_id=APP, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def set_replicas(self, *urls: str) -> None:
        """Ray lists these replicas from now on."""

        async def update() -> None:
            self.router.update_replicas([RunningReplica(url) for url in urls])  # type: ignore[misc]

        self._run(update())

    def lose(self, url: str) -> None:
        """Ray notices the death of an actor."""

        async def lost() -> None:
            self.router.on_replica_actor_died(ReplicaID(url, APP))

        self._run(lost())

    def options(self, method_name: str) -> Any:
        return SimpleNamespace(remote=lambda ticket: self._remote(method_name, ticket))

    def _remote(self, name: str, ticket: Any) -> Lease:
        async def call() -> Any:
            if not self.asks:
                await asyncio.Event().wait()
            metadata = RequestMetadata(request_id="r", internal_request_id=str(len(self.leases)))
            pending = PendingRequest([ticket], {}, metadata)
            return await self.router._choose_replica_for_request(pending)

        lease = Lease(name, asyncio.run_coroutine_threadsafe(call(), self.loop))
        self.leases.append(lease)
        return lease

    @property
    def holds(self) -> list[Lease]:
        return [lease for lease in self.leases if lease.name == "hold"]

    def close(self) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def ray_handle() -> Iterator[Handle]:
    handle = Handle()
    try:
        yield handle
    finally:
        handle.close()


@asynccontextmanager
async def ray_front(handle: Handle, *replicas: Replica, **options: Any) -> AsyncIterator[Front]:
    """A router whose replicas Ray lists, and whose requests pass through Ray's request router."""
    placement = RayRequestPlacer(handle)
    async with front(placed=placement.hold_replica_for_attempt, health_interval=60.0, **options) as router:
        for replica in replicas:
            await replica.start()
        try:
            handle.set_replicas(*(replica.url for replica in replicas))
            await placement.report_replicas_to(RayReplicaListNotifier(router.state.members.on_replicas_changed))
            await router.up(len(replicas))
            yield router
        finally:
            for replica in replicas:
                await replica.stop()


def test_requests_go_where_the_policy_says_and_hold_a_call_as_long_as_they_last() -> None:
    async def test() -> None:
        one, other = two()
        with ray_handle() as handle:
            async with ray_front(handle, one, other) as router:
                for number in range(4):
                    assert (await router.complete(f"{LONG} question {number}")).status_code == 200
                assert sorted([len(one.bodies), len(other.bodies)]) == [0, 4]
                assert len(handle.holds) == 4 and all(lease.is_cancelled for lease in handle.holds)
                used = one if one.bodies else other

                used.gate.clear()
                stream = asyncio.create_task(router.complete(LONG, stream=True))
                await until(lambda: len(used.bodies) == 5)
                await until(handle.holds[-1].future.done)
                assert handle.holds[-1].future.result().replica_metadata["url"] == used.url  # Ray counts it there
                assert not handle.holds[-1].is_cancelled
                used.gate.set()
                assert texts((await stream).text) == TEXTS
                await until(lambda: handle.holds[-1].is_cancelled)

    run(test())


def test_cached_tokens_of_answers_are_reported_to_the_router() -> None:
    async def test() -> None:
        replica = Replica()
        with ray_handle() as handle:
            async with ray_front(handle, replica) as router:
                await router.complete(list(range(64)))
                assert router.state.router.num_reported == 1
                await router.complete([*range(64), 1])
                assert router.state.router.num_reported == 2
                assert router.state.router.prediction_error == 64  # the replica reported 0 cached tokens

    run(test())


def test_a_request_without_an_answer_is_sent_to_another_replica() -> None:
    async def test() -> None:
        one, other = two()
        with ray_handle() as handle:
            async with ray_front(handle, one, other) as router:
                await router.complete(LONG)
                used, spare = (one, other) if one.bodies else (other, one)
                used.script = reset
                assert (await router.complete(LONG)).status_code == 200
                assert len(spare.bodies) == 1 and len(handle.holds) == 3
                assert all(lease.is_cancelled for lease in handle.holds)

    run(test())


def test_a_new_replica_is_used_and_a_lost_one_is_forgotten_with_its_index() -> None:
    async def test() -> None:
        one, other = two()
        await other.start()
        with ray_handle() as handle:
            async with ray_front(handle, one) as router:
                await router.complete(LONG)
                endpoint = router.state.router.endpoints[one.url]
                handle.set_replicas(one.url, other.url)
                await router.up(2)
                handle.lose(one.url)
                await until(lambda: list(router.state.router.endpoints) == [other.url])
                assert (await router.complete(LONG)).status_code == 200 and len(other.bodies) == 1
                handle.set_replicas(one.url, other.url)
                await router.up(2)
                assert router.state.router.endpoints[one.url] is not endpoint
        await other.stop()

    run(test())


def test_without_a_replica_a_request_is_refused_without_a_call() -> None:
    async def test() -> None:
        replica = Replica()
        with ray_handle() as handle:
            async with ray_front(handle, replica, replica_wait=0.0) as router:
                handle.set_replicas()
                await until(lambda: not router.state.router.endpoints)
                response = await router.complete()
                assert response.status_code == 503 and response.json()["error"]["code"] == "no_replicas"
                assert not handle.holds

    run(test())


def test_a_ray_that_does_not_route_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        replica = Replica()
        with ray_handle() as handle:
            async with ray_front(handle, replica, replica_wait=0.0) as router:
                handle.asks = False
                assert (await router.complete()).status_code == 503
                assert [lease.is_cancelled for lease in handle.holds] == [True]
                endpoint = router.state.router.endpoints[replica.url]
                assert endpoint.load.num_requests == 0 and endpoint.health.num_ejections == 0

    monkeypatch.setattr(ingress, "PLACE_SECONDS", 0.1)
    run(test())


def test_a_client_that_leaves_before_the_decision_leaves_nothing_behind() -> None:
    async def test() -> None:
        replica = Replica()
        with ray_handle() as handle:
            async with ray_front(handle, replica) as router:
                handle.asks = False
                request = asyncio.create_task(router.complete())
                await until(lambda: len(handle.holds) == 1)
                request.cancel()
                await until(lambda: handle.holds[0].is_cancelled and not router.state.num_under_way)
                assert router.state.router.endpoints[replica.url].load.num_requests == 0

    run(test())


def test_a_ticket_is_answered_once_and_travels_as_its_id() -> None:
    async def test() -> None:
        refusals: list[str] = []
        in_flight: Any = SimpleNamespace(endpoint=SimpleNamespace(name="b"), fallbacks=("a",))
        ticket = PlacementRequest("id", RayReplicaListNotifier(lambda found: None), lambda names: in_flight)
        ticket.refused = lambda: refusals.append("refused")
        assert await ticket.rank_replicas(["a", "b"]) == ["b", "a"] and not refusals
        assert await ticket.rank_replicas(["a"]) == () and refusals == ["refused"]
        assert pickle.loads(pickle.dumps(ticket)) == "id"

        def none(names: Any) -> Any:
            raise NoReplicaError("none", reasons={})

        hopeless = PlacementRequest("id", ticket.fleet, none)
        assert await hopeless.rank_replicas(["a"]) == ()
        assert isinstance(hopeless.decision.exception(), NoReplicaError)

    run(test())


def test_rays_loop_is_never_blocked_by_a_decision() -> None:
    async def test() -> None:
        replica = Replica()
        with ray_handle() as handle:
            async with ray_front(handle, replica) as router:
                place = router.state.proxy.choose_and_record

                def slow(*args: Any) -> Any:
                    time.sleep(0.5)
                    return place(*args)

                router.state.proxy.choose_and_record = slow  # type: ignore[method-assign]
                beats = 0

                async def beat() -> None:
                    nonlocal beats
                    while True:
                        await asyncio.sleep(0.01)
                        beats += 1

                beating = asyncio.run_coroutine_threadsafe(beat(), handle.loop)
                assert (await router.complete()).status_code == 200
                beating.cancel()
                assert beats >= 5  # of 50

    run(test())
