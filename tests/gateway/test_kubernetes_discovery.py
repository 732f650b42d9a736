"""Discovery from Kubernetes against a stub of its API server: lists, watches, and everything that interrupts them."""

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
from gateway.stub_api_server import (
    PODS,
    POOLS,
    SLICES,
    StubApiServer,
    endpoint_slice,
    pod,
    pool,
    stub_api_server,
    write_kubeconfig,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from server.harness import until

from headstart.core.errors import ConfigError
from headstart.gateway.discovery import kubernetes_api
from headstart.gateway.discovery.kubernetes_discovery import KubernetesDiscovery
from headstart.gateway.discovery.kubernetes_objects import parse_target
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.logs import ServerLog

MINE = {"app": "m"}


class Watched:
    """A watch under way at a stub."""

    def __init__(self, stub: StubApiServer) -> None:
        self.stub = stub
        self.lists: list[list[str]] = []
        self.told = StringIO()

    def changed(self, addresses: Sequence[ReplicaAddress]) -> None:
        self.lists.append([address.url.removeprefix("http://") for address in addresses])

    async def lists_now(self, *wanted: str) -> None:
        await until(lambda: self.lists and self.lists[-1] == list(wanted))

    async def watches(self, count: int) -> None:
        """Waits until so many watches have begun."""
        await until(lambda: self.stub.num_watches >= count)

    async def has_told(self, text: str) -> None:
        await until(lambda: text in self.told.getvalue())


@asynccontextmanager
async def watching(
    stub: StubApiServer, kubeconfig: Path, target: str = "inferencepool/llama", seconds: int = 60
) -> AsyncIterator[Watched]:
    watched = Watched(stub)
    discovery = KubernetesDiscovery(
        parse_target(target),
        kubeconfig=kubeconfig,
        log=ServerLog(watched.told),
        rng=random.Random(0),
        first_backoff=0.01,
        watch_seconds=(seconds, seconds),
    )
    task = asyncio.create_task(discovery.watch_replicas(watched.changed))
    try:
        yield watched
    finally:
        assert not task.done() or task.result() is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def pool_of(tmp_path: Path, *ips: str, seconds: int = 60) -> AsyncIterator[Watched]:
    """A pool whose pods are listed, and watched."""
    async with stub_api_server(tmp_path) as (stub, kubeconfig):
        await stub.put(POOLS, "llama", pool(8000, **MINE))
        for ip in ips:
            await stub.put(PODS, ip, pod(ip), MINE)
        await stub.put(PODS, "other", pod("10.9.9.9"), {"app": "other"})
        async with watching(stub, kubeconfig, seconds=seconds) as watched:
            await watched.lists_now(*(f"{ip}:8000" for ip in ips))
            await watched.watches(2)
            yield watched


def test_pods_of_a_pool_are_listed_as_they_come_and_go(tmp_path: Path) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            stub = watched.stub
            await stub.put(PODS, "new", pod(), MINE)  # not scheduled yet
            await stub.put(PODS, "new", pod("10.0.0.2"), MINE)
            await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")
            await stub.put(PODS, "10.0.0.1", pod("10.0.0.1", terminating=True), MINE)
            await watched.lists_now("10.0.0.2:8000")
            await stub.put(PODS, "new", pod("10.0.0.2"), {"app": "taken out"})  # another label: out of the selector
            await watched.lists_now()
            assert len(watched.lists) == 4 and "lists 0 replicas now, 1 before" in watched.told.getvalue()

    asyncio.run(go())


def test_a_pool_that_changes_its_selector_or_ports_changes_the_list(tmp_path: Path) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            await watched.stub.put(POOLS, "llama", pool(8000, 8001, **MINE))
            await watched.lists_now("10.0.0.1:8000", "10.0.0.1:8001")
            await watched.stub.put(POOLS, "llama", pool(8000, app="other"))
            await watched.lists_now("10.9.9.9:8000")
            await watched.watches(3)
            await watched.stub.put(PODS, "10.0.0.1", pod("10.0.0.3"), MINE)  # of the selector before: not watched
            await watched.stub.put(PODS, "more", pod("10.9.9.8"), {"app": "other"})
            await watched.lists_now("10.9.9.8:8000", "10.9.9.9:8000")
            assert not any("10.0.0.3:8000" in found for found in watched.lists)
            await watched.stub.delete(POOLS, "llama")
            await watched.lists_now()
            await watched.has_told("inferencepool/llama does not exist")
            await watched.stub.put(POOLS, "llama", pool(80, **MINE))
            await watched.lists_now("10.0.0.3:80")

    asyncio.run(go())


def test_a_pool_that_does_not_exist_yet_has_no_replicas_until_it_does(tmp_path: Path) -> None:
    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig), watching(stub, kubeconfig) as watched:
            await stub.put(PODS, "a", pod("10.0.0.1"), MINE)
            await watched.lists_now()
            await stub.put(POOLS, "llama", pool(8000))
            await watched.has_told("selects no pods")
            await stub.put(POOLS, "llama", pool(8000, **MINE))
            await watched.lists_now("10.0.0.1:8000")
            assert watched.told.getvalue().count("does not exist") == 1

    asyncio.run(go())


def test_the_endpoints_of_a_service_are_listed(tmp_path: Path) -> None:
    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig):
            of_service = {"kubernetes.io/service-name": "llama"}
            one, two = {"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}
            await stub.put(SLICES, "llama-a", endpoint_slice(one, http=8000, metrics=9000), of_service)
            await stub.put(SLICES, "other", endpoint_slice(two, http=8000), {"kubernetes.io/service-name": "other"})
            async with watching(stub, kubeconfig, "service/serving/llama:http") as watched:
                await watched.lists_now("10.0.0.1:8000")
                await watched.watches(1)
                await stub.put(SLICES, "llama-b", endpoint_slice(two, http=8000), of_service)
                await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")
            async with watching(stub, kubeconfig, "service/llama") as watched:
                await watched.lists_now()
                await watched.has_told("has endpoints with the ports http, metrics; name one of them")

    asyncio.run(go())


def test_long_lists_are_read_page_by_page_and_again_if_a_page_expires(tmp_path: Path) -> None:
    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig):
            stub.max_page = 2
            await stub.put(POOLS, "llama", pool(8000, **MINE))
            for n in range(5):
                await stub.put(PODS, f"p{n}", pod(f"10.0.0.{n}"), MINE)
            stub.expire_continuations = True
            async with watching(stub, kubeconfig) as watched:
                await until(lambda: sum("continue" in query for _, query in stub.requests) >= 2)
                assert watched.lists == []
                stub.expire_continuations = False
                await watched.lists_now(*(f"10.0.0.{n}:8000" for n in range(5)))
                assert len(watched.lists) == 1

    asyncio.run(go())


def test_a_dropped_watch_is_resumed_where_it_was(tmp_path: Path) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            stub = watched.stub
            num_lists = num(stub, "limit")
            await stub.put(PODS, "10.0.0.1", pod("10.0.0.9"), MINE)
            await watched.lists_now("10.0.0.9:8000")
            version = stub.version
            stub.drop()
            await stub.put(PODS, "b", pod("10.0.0.2"), MINE)  # while there is no watch
            await watched.lists_now("10.0.0.2:8000", "10.0.0.9:8000")
            await watched.watches(4)
            resumed = [query["resourceVersion"] for path, query in stub.requests if path == PODS and "watch" in query]
            assert resumed[1] == str(version)
            assert num(stub, "limit") == num_lists  # nothing was listed again
            assert len(watched.lists) == 3

    asyncio.run(go())


@pytest.mark.parametrize("is_orderly", [False, True])
def test_a_line_that_is_cut_off_is_not_applied(tmp_path: Path, is_orderly: bool) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            num_lists = num(watched.stub, "limit")
            await watched.stub.inject(b'{"type": "DELETED", "object": {"metadata": {"name": "10.0.0.1"')
            await asyncio.sleep(0.05)
            if is_orderly:
                await watched.stub.end()
            else:
                watched.stub.drop()
            await watched.watches(4)
            await watched.stub.put(PODS, "b", pod("10.0.0.2"), MINE)
            await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")
            assert len(watched.lists) == 2 and num(watched.stub, "limit") == num_lists

    asyncio.run(go())


def test_bookmarks_spare_a_new_list_after_a_compaction(tmp_path: Path) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            stub = watched.stub
            num_lists = num(stub, "limit")
            await stub.bookmark(POOLS)
            await stub.bookmark(PODS)
            await until(lambda: stub.num_sent["BOOKMARK"] == 2)
            await asyncio.sleep(0.05)
            stub.compacted = stub.version - 1  # everything before the bookmarks
            stub.drop()
            await watched.watches(4)
            await stub.put(PODS, "b", pod("10.0.0.2"), MINE)
            await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")
            assert num(stub, "limit") == num_lists

    asyncio.run(go())


@pytest.mark.parametrize("how", ["event", "status", "other status"])
def test_a_version_that_is_gone_is_listed_again(tmp_path: Path, how: str) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            stub = watched.stub
            if how == "event":
                stub.compact()
            else:
                status = 410 if how == "status" else 504  # 504: a version of the future
                stub.watch_refusals = {POOLS: status, PODS: status}
            del stub.objects[PODS]["10.0.0.1"]  # of which no watch will tell
            stub.objects[PODS]["b"] = {**pod("10.0.0.2"), "metadata": {"name": "b", "labels": MINE}}
            stub.drop()
            await watched.lists_now("10.0.0.2:8000")

    asyncio.run(go())


def test_watches_that_end_on_time_are_continued_without_a_word(tmp_path: Path) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1", seconds=1) as watched:
            num_lists = num(watched.stub, "limit")
            await watched.watches(6)
            assert num(watched.stub, "limit") == num_lists and watched.told.getvalue() == ""

    asyncio.run(go())


def test_a_silent_connection_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch whose server neither sends nor ends: the connection is dead."""
    monkeypatch.setattr(kubernetes_api, "SLACK_SECONDS", 0.1)

    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1", seconds=1) as watched:
            for path in (POOLS, PODS):  # from now on the stub's watches are later than they were asked to be
                watched.stub.late.add(path)
            await watched.watches(4)
            await watched.has_told("the API server does not answer; going on with the 1 replicas known")
            await watched.stub.put(PODS, "b", pod("10.0.0.2"), MINE)
            await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")

    asyncio.run(go())


def test_failures_are_told_once_and_what_is_known_stays(tmp_path: Path) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            stub = watched.stub
            stub.refused.add(PODS)
            before = len(stub.requests)
            stub.compact()
            stub.drop()
            await until(lambda: num_of(stub, PODS, before) >= 5)
            told = watched.told.getvalue()
            assert told.count("pods is forbidden: no RBAC policy matched; going on with the 1 replicas known") == 1
            assert len(watched.lists) == 1
            stub.refused.clear()
            await stub.put(PODS, "b", pod("10.0.0.2"), MINE)
            await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")

    asyncio.run(go())


def test_a_cluster_without_that_api_is_waited_for(tmp_path: Path) -> None:
    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig):
            pools = stub.objects.pop(POOLS)
            async with watching(stub, kubeconfig) as watched:
                await watched.has_told("answers 404: the server could not find the requested resource")
                assert watched.lists == []
                stub.objects[POOLS] = pools
                await watched.lists_now()

    asyncio.run(go())


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b'{"type": "ADDED", "object": {"metadata": 7}}\n', b"\xff\n", b"{" * 5_000_000]
)
def test_a_watch_that_cannot_be_read_is_replaced_by_a_list(tmp_path: Path, line: bytes) -> None:
    async def go() -> None:
        async with pool_of(tmp_path, "10.0.0.1") as watched:
            await watched.stub.inject(line)
            await watched.has_told("going on with the 1 replicas known")
            await watched.stub.put(PODS, "b", pod("10.0.0.2"), MINE)
            await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")
            assert max(map(len, watched.told.getvalue().splitlines())) < 1_000

    asyncio.run(go())


def test_repeated_failures_are_retried_ever_more_slowly(tmp_path: Path) -> None:
    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig):
            stub.refusals = [500] * 1_000
            async with watching(stub, kubeconfig):
                await asyncio.sleep(0.5)
                assert len(stub.requests) <= 8  # after 10, 20, 40, ... ms, less up to a half
                await until(lambda: len(stub.requests) >= 3)

    asyncio.run(go())


def test_a_token_that_is_refused_is_read_again(tmp_path: Path) -> None:
    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig):
            write_kubeconfig(kubeconfig, stub.url, token="an-old-one")
            async with watching(stub, kubeconfig) as watched:
                await watched.has_told("answers 401: Unauthorized")
                write_kubeconfig(kubeconfig, stub.url)
                await watched.lists_now()

    asyncio.run(go())


def test_without_a_cluster_or_the_extra_it_is_a_mistake_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        await KubernetesDiscovery(parse_target("service/s"), kubeconfig=tmp_path / "none").watch_replicas(
            lambda _: None
        )

    with pytest.raises(ConfigError, match=r"no Kubernetes cluster: .*set KUBECONFIG"):
        asyncio.run(go())
    (tmp_path / "none").write_text("[")
    with pytest.raises(ConfigError, match="no Kubernetes cluster") as caught:
        asyncio.run(go())
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(ConfigError, match=r"pip install 'headstart\[kubernetes\]'"):
        asyncio.run(go())


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "end", "delete", "move", "drop", "compact", "refuse", "bookmark", "pool"]),
        st.integers(0, 3),
    ),
    max_size=25,
)


@settings(max_examples=25)
@given(OPERATIONS)
def test_whatever_happens_the_list_is_that_of_the_cluster_in_the_end(operations: list[tuple[str, int]]) -> None:
    async def go() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with stub_api_server(Path(folder)) as (stub, kubeconfig):
                await stub.put(POOLS, "llama", pool(8000, **MINE))
                async with watching(stub, kubeconfig) as watched:
                    for what, n in operations:
                        await apply(stub, what, n)
                        await asyncio.sleep(0.002 * (n % 2))
                    await watched.lists_now(*listed(stub))

    asyncio.run(go())


async def apply(stub: StubApiServer, what: str, n: int) -> None:
    """Apply one operation of the property test."""
    name = f"p{n}"
    match what:
        case "put":
            await stub.put(PODS, name, pod(f"10.0.0.{n}"), MINE)
        case "end":
            await stub.put(PODS, name, pod(f"10.0.0.{n}", terminating=True), MINE)
        case "move":
            await stub.put(PODS, name, pod(f"10.0.1.{n}"), {"app": "m" if n else "other"})
        case "delete" if name in stub.objects[PODS]:
            await stub.delete(PODS, name)
        case "drop":
            stub.drop()
        case "compact":
            stub.compact()
        case "refuse":
            stub.refusals = [500, 429, 410, 403][: n + 1]
        case "bookmark":
            await stub.bookmark(PODS)
        case "pool":
            await stub.put(POOLS, "llama", pool(8000 + n, app="m" if n else "other"))
        case _:
            pass


def listed(stub: StubApiServer) -> list[str]:
    """The replicas of the cluster, without any of the code under test."""
    spec = stub.objects[POOLS]["llama"]["spec"]
    [port], labels = [one["number"] for one in spec["targetPorts"]], spec["selector"]["matchLabels"]
    pods = [one for one in stub.objects[PODS].values() if one["metadata"]["labels"] == labels]
    return sorted(f"{one['status']['podIP']}:{port}" for one in pods if "deletionTimestamp" not in one["metadata"])


def num(stub: StubApiServer, key: str) -> int:
    """The number of requests with a parameter."""
    return sum(key in query for _, query in stub.requests)


def num_of(stub: StubApiServer, path: str, since: int) -> int:
    return sum(asked == path for asked, _ in stub.requests[since:])


def test_endpoints_that_no_replica_can_have_are_told_once_and_left_out(tmp_path: Path) -> None:
    async def go() -> None:
        async with stub_api_server(tmp_path) as (stub, kubeconfig):
            await stub.put(POOLS, "llama", pool(8000, app="m"))
            await stub.put(PODS, "m-0", pod("10.0.0.1"), {"app": "m"})
            await stub.put(PODS, "m-1", pod("169.254.169.254"), {"app": "m"})
            async with watching(stub, kubeconfig) as watched:
                await watched.has_told("no replica can have, as 169.254.169.254:8000")
                await stub.put(PODS, "m-2", pod("10.0.0.2"), {"app": "m"})
                await watched.lists_now("10.0.0.1:8000", "10.0.0.2:8000")
                assert watched.told.getvalue().count("no replica can have") == 1

    asyncio.run(go())
