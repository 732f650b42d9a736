"""Shared by the tests of KV event consumers: a loop with an end, and patience in small pieces."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from server.harness import PATIENCE

from headstart.gateway.kv_events import kv_event_consumer as kv_event_sockets
from headstart.gateway.kv_events import kv_event_consumer as kv_events
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a consumer check often what it checks now and then."""
    monkeypatch.setattr(kv_events, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(kv_events, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(kv_events, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(kv_events, "RENEW_SECONDS", 0.3)
    monkeypatch.setattr(kv_event_sockets, "RECONNECT_MILLISECONDS", 10)


@asynccontextmanager
async def listening(consumer: KVEventConsumer) -> AsyncGenerator[None]:
    task = asyncio.create_task(consumer.run())
    try:
        yield
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
