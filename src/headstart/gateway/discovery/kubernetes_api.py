"""KubernetesApi: reads lists and watches of objects from the API server of a cluster.

Inside a cluster the service account of the pod is used (its token is read again when it rotates), elsewhere the
kubeconfig. Objects are returned as JSON; kubernetes_asyncio does configuration, credentials and TLS.

Reflector: a copy of the objects of one kind, kept current by a list and the watches that follow it.

The protocol is that of Kubernetes' API: a list has a resource version, a watch begins at one, every event and bookmark
moves it on. A watch that ends or is dropped is resumed from the last version. If the server no longer has that version
(410 Gone), the objects are listed again. Errors are retried with exponential backoff and jitter; meanwhile the last
known objects stay.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.kubernetes_objects import (
    ApiStatus,
    Bookmark,
    EndpointSlice,
    InferencePool,
    ListPage,
    Pod,
    WatchEvent,
)

CONNECT_SECONDS = 10.0
LIST_SECONDS = 30.0  # for one page of a list
SLACK_SECONDS = 10.0  # by which a watch may outlast its timeout
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
MAX_ERROR = 65_536  # bytes of an error that are read

Query = dict[str, str]
PAGE = 100  # objects of one page of a list
WATCH_SECONDS = (60, 120)  # a connection that is dead without a sign is noticed after this
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 30.0  # seconds
GONE = 410

T = TypeVar("T", Pod, InferencePool, EndpointSlice)


class KubernetesApiError(Exception):
    """A request to the API server that was not answered with objects. `status` 0: there was no answer at all."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """A connection to the API server of a cluster. Close it at the end."""

    def __init__(self, client: Any, namespace: str, reload: Callable[[], Awaitable[None]] | None = None) -> None:
        """`client` is an ApiClient of kubernetes_asyncio, `namespace` the one of the pod or of the kubeconfig.

        `reload` reads the credentials again, after the server refused them.
        """
        self._client = client
        self.namespace = namespace
        self._reload = reload

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def list_page(self, path: str, query: Query) -> bytes:
        """Return one page of a list as JSON. Raises KubernetesApiError."""
        async with self._answer(path, query, aiohttp.ClientTimeout(total=LIST_SECONDS)) as response:
            return await response.read()

    async def watch(self, path: str, query: Query, seconds: int) -> AsyncGenerator[bytes]:
        """Yield the complete lines of a watch that the server ends after `seconds`. Raises KubernetesApiError.

        A line that the end of the connection cuts off is dropped.
        """
        timeout = aiohttp.ClientTimeout(
            sock_connect=CONNECT_SECONDS, sock_read=seconds + SLACK_SECONDS, total=seconds + 2 * SLACK_SECONDS
        )
        query = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        async with self._answer(path, query, timeout) as response:
            while (line := await response.content.readline()).endswith(b"\n"):
                yield line

    @asynccontextmanager
    async def _answer(
        self, path: str, query: Query, timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a GET and yield an answer of status 200; errors on the way, also later, become KubernetesApiError."""
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._client.call_api(
                path,
                "GET",
                query_params=list(query.items()),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
            assert response is not None
            if response.status == 401 and self._reload is not None:
                await self._reload()
            if response.status != 200:
                raise _refusal(response.status, await response.content.read(MAX_ERROR))
            yield response
        except TimeoutError as error:
            raise KubernetesApiError(0, "the API server does not answer") from error
        except (HttpProcessingError, ValueError) as error:
            raise KubernetesApiError(500, f"the API server's answer cannot be read ({str(error)[:200]})") from error
        except (aiohttp.ClientError, OSError) as error:
            raise KubernetesApiError(0, f"no connection to the API server ({error or type(error).__name__})") from error
        finally:
            if response is not None:
                response.close()


async def connect_to_cluster(kubeconfig: Path | None = None) -> KubernetesApi:
    """Return a connection to the cluster of `kubeconfig`; None: of this pod, else of the user's kubeconfig.

    Raises ConfigError if there is no cluster, or if kubernetes_asyncio is not installed.
    """
    try:
        from kubernetes_asyncio import client, config
    except ImportError:
        raise ConfigError(
            "discovery from Kubernetes needs kubernetes_asyncio; install it: pip install 'headstart[kubernetes]'"
        ) from None
    settings = client.Configuration()
    if kubeconfig is None:
        with suppress(config.ConfigException):  # not in a pod
            config.load_incluster_config(client_configuration=settings)
            return KubernetesApi(client.ApiClient(settings), _namespace_of_pod())

    async def load() -> Any:
        path = None if kubeconfig is None else str(kubeconfig)
        try:
            return await config.load_kube_config(config_file=path, client_configuration=settings, persist_config=False)
        except Exception as error:  # of many types: YAML, missing keys, plugins for credentials
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"no Kubernetes cluster: {reason}; run in a pod with a service account, or set KUBECONFIG"
            ) from None

    async def reload() -> None:
        with suppress(ConfigError):  # a kubeconfig that is being written; the next refusal reads it again
            await load()

    context = ((await load()).current_context or {}).get("context") or {}
    return KubernetesApi(client.ApiClient(settings), str(context.get("namespace") or "default"), reload)


def _namespace_of_pod() -> str:
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def _refusal(status: int, body: bytes) -> KubernetesApiError:
    """Return the error of an answer other than 200; the server's own message names the user, verb and resource."""
    try:
        message = msgspec.json.decode(body, type=ApiStatus).message
    except msgspec.DecodeError:
        message = ""
    return KubernetesApiError(status, f"the API server answers {status}" + (f": {message[:500]}" if message else ""))


@dataclass(frozen=True, slots=True)
class WatchedResource(Generic[T]):
    """Objects to be watched: their type, their path under the API server, and their selector as query parameters."""

    kind: type[T]
    path: str
    selector: Mapping[str, str]


class Reflector(Generic[T]):
    """A current copy of the objects of a resource, by name."""

    def __init__(
        self,
        api: KubernetesApi,
        resource: WatchedResource[T],
        changed: Callable[[Mapping[str, T]], None],
        failed: Callable[[KubernetesApiError | None], None],
        *,
        rng: random.Random,
        first_backoff: float = FIRST_BACKOFF,
        watch_seconds: tuple[int, int] = WATCH_SECONDS,
    ) -> None:
        """`changed` gets all objects after each list and change; `failed` gets each error, and None after a success."""
        self._api = api
        self._resource = resource
        self._changed = changed
        self._failed = failed
        self._rng = rng
        self._first_backoff = first_backoff
        self._watch_seconds = watch_seconds
        self._objects: dict[str, T] = {}
        self._version = ""  # resource version of the copy; empty: it must be listed

    async def run(self) -> None:
        """List and watch until cancelled."""
        backoff, loop = self._first_backoff, asyncio.get_running_loop()
        while True:
            if not self._version and not await self._relisted():
                await self._pause(backoff)
                backoff = min(2 * backoff, LAST_BACKOFF)
                continue
            version, began = self._version, loop.time()
            try:
                await self._watch()
            except KubernetesApiError as error:
                if error.status != GONE:
                    self._failed(error)
                if error.status:  # the server cannot continue this watch
                    self._version = ""
            is_progress = self._version not in ("", version) or loop.time() - began >= self._watch_seconds[0]
            if is_progress:
                backoff = self._first_backoff
            else:
                await self._pause(backoff)
                backoff = min(2 * backoff, LAST_BACKOFF)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._rng.uniform(0.5, 1.0))

    async def _relisted(self) -> bool:
        try:
            await self._list()
        except KubernetesApiError as error:
            self._failed(error)
            return False
        self._failed(None)
        return True

    async def _list(self) -> None:
        """Replace the copy by a list, read page by page. Raises KubernetesApiError, and then changes nothing."""
        found: dict[str, T] = {}
        continuation = ""
        while True:
            query = {**self._resource.selector, "limit": str(PAGE)}
            if continuation:
                query["continue"] = continuation
            body = await self._api.list_page(self._resource.path, query)
            page = _decoded(body, ListPage)
            for item in page.items:
                one = _decoded(item, self._resource.kind)
                found[one.metadata.name] = one
            continuation = page.metadata.continuation
            if not continuation:
                break
        if not page.metadata.resource_version:
            raise KubernetesApiError(0, "the API server's list has no resourceVersion")
        self._objects, self._version = found, page.metadata.resource_version
        self._changed(self._objects)

    async def _watch(self) -> None:
        """Follow one watch to its end. Raises KubernetesApiError."""
        query = {**self._resource.selector, "resourceVersion": self._version}
        seconds = self._rng.randint(*self._watch_seconds)
        async with aclosing(self._api.watch(self._resource.path, query, seconds)) as lines:
            async for line in lines:
                self._apply(_decoded(line, WatchEvent))
                self._failed(None)

    def _apply(self, event: WatchEvent) -> None:
        """Apply one event to the copy. Raises KubernetesApiError if it is an error, or cannot be read."""
        if event.type == "ERROR":
            status = _decoded(event.object, ApiStatus)
            raise KubernetesApiError(status.code or 500, f"the API server ends a watch: {status.message[:500]}")
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):  # BOOKMARK
            self._version = _decoded(event.object, Bookmark).metadata.resource_version or self._version
            return
        one = _decoded(event.object, self._resource.kind)
        if event.type == "DELETED":
            self._objects.pop(one.metadata.name, None)
        else:
            self._objects[one.metadata.name] = one
        self._version = one.metadata.resource_version or self._version
        self._changed(self._objects)


D = TypeVar("D")


def _decoded(text: bytes | msgspec.Raw, kind: type[D]) -> D:
    """Return a decoded JSON document. Raises KubernetesApiError if it is none, or lacks fields."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KubernetesApiError(500, f"the API server's {kind.__name__} cannot be read ({error})") from None
