"""Reflector: a copy of the objects of one kind, kept current by a list and the watches that follow it.

The protocol is that of Kubernetes' API: a list has a resource version, a watch begins at one, every event and bookmark
moves it on. A watch that ends or is dropped is resumed from the last version. If the server no longer has that version
(410 Gone), the objects are listed again. Errors are retried with exponential backoff and jitter; meanwhile the last
known objects stay.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headstart.gateway.discovery.kubernetes.kubernetes_api import ApiError, KubernetesApi
from headstart.gateway.discovery.kubernetes.kubernetes_objects import (
    Bookmark,
    EndpointSlice,
    InferencePool,
    Page,
    Pod,
    Status,
    WatchEvent,
)

PAGE = 100  # objects of one page of a list
WATCH_SECONDS = (60, 120)  # a connection that is dead without a sign is noticed after this
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 30.0  # seconds
GONE = 410

T = TypeVar("T", Pod, InferencePool, EndpointSlice)


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """Objects to be watched: their type, their path under the API server, and their selector as query parameters."""

    kind: type[T]
    path: str
    selector: Mapping[str, str]


class Reflector(Generic[T]):
    """A current copy of the objects of a resource, by name."""

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource[T],
        changed: Callable[[Mapping[str, T]], None],
        failed: Callable[[ApiError | None], None],
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
            except ApiError as error:
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
        except ApiError as error:
            self._failed(error)
            return False
        self._failed(None)
        return True

    async def _list(self) -> None:
        """Replace the copy by a list, read page by page. Raises ApiError, and then changes nothing."""
        found: dict[str, T] = {}
        continuation = ""
        while True:
            query = {**self._resource.selector, "limit": str(PAGE)}
            if continuation:
                query["continue"] = continuation
            body = await self._api.list_page(self._resource.path, query)
            page = _decoded(body, Page)
            for item in page.items:
                one = _decoded(item, self._resource.kind)
                found[one.metadata.name] = one
            continuation = page.metadata.continuation
            if not continuation:
                break
        if not page.metadata.resource_version:
            raise ApiError(0, "the API server's list has no resourceVersion")
        self._objects, self._version = found, page.metadata.resource_version
        self._changed(self._objects)

    async def _watch(self) -> None:
        """Follow one watch to its end. Raises ApiError."""
        query = {**self._resource.selector, "resourceVersion": self._version}
        seconds = self._rng.randint(*self._watch_seconds)
        async with aclosing(self._api.watch(self._resource.path, query, seconds)) as lines:
            async for line in lines:
                self._apply(_decoded(line, WatchEvent))
                self._failed(None)

    def _apply(self, event: WatchEvent) -> None:
        """Apply one event to the copy. Raises ApiError if it is an error, or cannot be read."""
        if event.type == "ERROR":
            status = _decoded(event.object, Status)
            raise ApiError(status.code or 500, f"the API server ends a watch: {status.message[:500]}")
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
    """Return a decoded JSON document. Raises ApiError if it is none, or lacks fields."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(500, f"the API server's {kind.__name__} cannot be read ({error})") from None
