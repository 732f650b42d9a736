"""A stub of Kubernetes' API server over real HTTP: lists in pages, watches with versions, bookmarks and compaction."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/serving/inferencepools"
PODS = "/api/v1/namespaces/serving/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
TOKEN = "a-token"


class StubApiServer:
    """Objects by collection path and name. Every change has a version of its own, as in etcd."""

    def __init__(self, namespace: str = "serving") -> None:
        self.namespace = namespace
        self.version = 100
        self.objects: dict[str, dict[str, dict[str, Any]]] = {self.path(one): {} for one in (POOLS, PODS, SLICES)}
        self.history: list[tuple[int, str, str, dict[str, Any], dict[str, Any] | None]] = []
        self.compacted = 0  # the newest version that no watch can begin at any more
        self.refusals: list[int] = []  # statuses of the next requests, whatever they ask for
        self.watch_refusals: dict[str, int] = {}  # status of the next watch of a path
        self.refused: set[str] = set()  # paths that are forbidden
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.num_watches = 0
        self.num_sent: Counter[str] = Counter()  # events sent, by kind
        self.max_page = 1_000
        self.continuations: dict[str, list[dict[str, Any]]] = {}
        self.expire_continuations = False
        self.late: set[str] = set()  # paths whose watches do not end on time
        self.url = ""
        self._changed = asyncio.Condition()
        self._transports: set[asyncio.Transport] = set()
        self._injected: list[bytes] = []
        self._num_ends = 0

    # ------------------------------------------------------------------------------------------------ what tests do

    def path(self, path: str) -> str:
        """The path of a collection in the stub's namespace."""
        return path.replace("/serving/", f"/{self.namespace}/")

    async def put(self, path: str, name: str, body: dict[str, Any], labels: Mapping[str, str] | None = None) -> None:
        """Create or replace an object."""
        before = self.objects[path].get(name)
        self.version += 1
        metadata = {**body.get("metadata", {}), "name": name, "resourceVersion": str(self.version)}
        metadata["labels"] = dict(labels if labels is not None else metadata.get("labels", {}))
        one = {**copy.deepcopy(body), "metadata": metadata}
        self.objects[path][name] = one
        self.history.append((self.version, path, "MODIFIED" if before else "ADDED", one, before))
        await self._wake()

    async def delete(self, path: str, name: str) -> None:
        """Delete an object."""
        before = self.objects[path].pop(name)
        self.version += 1
        gone = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.version)}}
        self.history.append((self.version, path, "DELETED", gone, before))
        await self._wake()

    def compact(self) -> None:
        """Forget all history: watches at earlier versions are answered with 410."""
        self.version += 1
        self.compacted = self.version
        self.history.clear()

    async def bookmark(self, path: str) -> None:
        """Send a bookmark of the current version to all watches of a path."""
        self.version += 1
        self.history.append(
            (self.version, path, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}, None)
        )
        await self._wake()

    async def inject(self, line: bytes) -> None:
        """Write bytes into every watch, as they are."""
        self._injected.append(line)
        await self._wake()

    def drop(self) -> None:
        """Cut all connections."""
        for transport in list(self._transports):
            transport.abort()

    async def end(self) -> None:
        """End all watches in an orderly way, before their time."""
        self._num_ends += 1
        await self._wake()

    # ------------------------------------------------------------------------------------------------------- answers

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append((request.path, query))
        if self.refusals:
            status = self.refusals.pop(0)
            return _status(status, "Refused", f"refused with {status}")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized", "Unauthorized")
        if request.path in self.refused:
            return _status(403, "Forbidden", f"{request.path.rsplit('/')[-1]} is forbidden: no RBAC policy matched")
        if request.path not in self.objects:
            return _status(404, "NotFound", "the server could not find the requested resource")
        if query.get("watch") == "true":
            if status := self.watch_refusals.pop(request.path, 0):
                return _status(status, "Refused", f"refused with {status}")
            return await self._watch(request, query)
        return self._list(request.path, query)

    def _list(self, path: str, query: dict[str, str]) -> web.Response:
        token = query.get("continue", "")
        if token and (self.expire_continuations or token not in self.continuations):
            return _status(410, "Expired", "The provided continue parameter is too old")
        found = (
            self.continuations.pop(token)
            if token
            else [one for _, one in sorted(self.objects[path].items()) if _matches(one, query)]
        )
        size = min(int(query["limit"]), self.max_page)
        metadata = {"resourceVersion": str(self.version)}
        if len(found) > size:
            metadata["continue"] = f"page-{len(self.requests)}"
            self.continuations[metadata["continue"]] = found[size:]
        return web.json_response({"kind": "List", "metadata": metadata, "items": found[:size]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        version = int(query["resourceVersion"])
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._transports.add(transport)
        self.num_watches += 1
        num_injected, num_ends = len(self._injected), self._num_ends
        seconds = 1e6 if request.path in self.late else float(query["timeoutSeconds"])
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            while True:
                if version < self.compacted:
                    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    await response.write(_line("ERROR", gone))
                    return response
                for at, path, kind, one, before in list(self.history):
                    if at > version and path == request.path:
                        version = at
                        if line := _event(kind, one, before, query):
                            await response.write(line)
                            self.num_sent[kind] += 1
                for line in self._injected[num_injected:]:
                    await response.write(line)
                num_injected = len(self._injected)
                if num_ends < self._num_ends:
                    return response
                if any(at > version and path == request.path for at, path, *_ in self.history):
                    continue
                async with self._changed:
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
        except TimeoutError:
            return response
        finally:
            self._transports.discard(transport)


def _event(kind: str, one: dict[str, Any], before: dict[str, Any] | None, query: dict[str, str]) -> bytes:
    """A line of a watch; an object that begins or ceases to match the selector is added or deleted."""
    if kind == "BOOKMARK":
        return _line(kind, one)
    was, is_now = before is not None and _matches(before, query), kind != "DELETED" and _matches(one, query)
    if was and is_now:
        return _line("MODIFIED", one)
    if is_now:
        return _line("ADDED", one)
    return _line("DELETED", one) if was else b""


def _matches(one: dict[str, Any], query: dict[str, str]) -> bool:
    labels, metadata = one["metadata"].get("labels", {}), one["metadata"]
    pairs = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    field = query.get("fieldSelector", "")
    return all(labels.get(key) == value for key, value in pairs) and field in ("", f"metadata.name={metadata['name']}")


def _line(kind: str, one: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)


@asynccontextmanager
async def stub_api_server(folder: Path, namespace: str = "serving") -> AsyncIterator[tuple[StubApiServer, Path]]:
    """A running stub, and a kubeconfig of it."""
    stub = StubApiServer(namespace)
    app = web.Application()
    app.router.add_get("/{path:.*}", stub.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield stub, write_kubeconfig(folder / "kubeconfig", stub.url, namespace=namespace)
    finally:
        await runner.cleanup()


def write_kubeconfig(path: Path, url: str, token: str = TOKEN, namespace: str = "serving") -> Path:
    """A kubeconfig whose context is in that namespace."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return path


def pod(ip: str = "", *, phase: str = "Running", terminating: bool = False) -> dict[str, Any]:
    """A pod."""
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if terminating else {}
    status = {"phase": phase, **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}


def pool(*ports: int, **labels: str) -> dict[str, Any]:
    """An InferencePool."""
    spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports]}
    return {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "spec": spec}


def endpoint_slice(*endpoints: dict[str, Any], family: str = "IPv4", **ports: int) -> dict[str, Any]:
    """An EndpointSlice."""
    listed = [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports.items()]
    return {"addressType": family, "endpoints": list(endpoints), "ports": listed}
