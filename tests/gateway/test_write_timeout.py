"""A client that takes nothing is given up; one that is only slow, or that nothing is sent to, is not."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from gateway.harness import Replica, front

from headstart.gateway.proxy import proxy
from headstart.gateway.proxy.proxy import ProxiedCall, SendWithClientTimeout
from headstart.gateway.proxy.request_reader import SenderRoutingInfo
from headstart.http.http_errors import ClientGoneError

SECONDS = 0.05


class Client:
    """Takes a message whenever its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.taken: list[Any] = []

    async def send(self, message: Any) -> None:
        await self.gate.wait()
        self.taken.append(message)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def here() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


def test_who_takes_nothing_is_given_up() -> None:
    async def go() -> None:
        patient = SendWithClientTimeout(Client().send, here(), SECONDS)
        with pytest.raises(asyncio.CancelledError):
            await patient({"type": "http.response.body"})
        here().uncancel()
        assert patient.is_over

    run(go())


def test_time_counts_only_while_something_is_being_sent() -> None:
    async def go() -> None:
        client = Client()
        client.gate.set()
        patient = SendWithClientTimeout(client.send, here(), SECONDS)
        for number in range(3):
            await patient({"number": number})
            await asyncio.sleep(SECONDS)  # the client delays no message
        patient.close()
        assert not patient.is_over and [message["number"] for message in client.taken] == [0, 1, 2]

    run(go())


def test_nothing_happens_after_it_was_closed() -> None:
    async def go() -> None:
        client = Client()
        patient = SendWithClientTimeout(client.send, here(), SECONDS)
        sending = asyncio.ensure_future(patient({"number": 1}))
        await asyncio.sleep(0)
        patient.close()
        await asyncio.sleep(2 * SECONDS)
        client.gate.set()
        await sending
        assert not patient.is_over and len(client.taken) == 1

    run(go())


def test_a_stream_whose_client_takes_nothing_ends_and_is_no_fault_of_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        replica = Replica()
        replica.gate.clear()  # the rest of the answer is still to come
        async with front(replica) as router:
            body = b'{"prompt": [1, 2, 3], "max_tokens": 3, "stream": true}'
            reading = router.state.reader.read("/v1/completions", body, SenderRoutingInfo())
            call = ProxiedCall(
                "/v1/completions", [(b"content-type", b"application/json")], "127.0.0.1", reading, "req-1"
            )
            monkeypatch.setattr(proxy, "WRITE_SECONDS", SECONDS)
            with pytest.raises(ClientGoneError):
                await router.state.proxy.serve(call, {}, receive, Client().send)
            assert call.outcome == "gone" and router.state.proxy.budget.num_active == 0
            assert router.state.proxy.num_awaiting_first_token == 0 and call.failures == []

    run(go())
