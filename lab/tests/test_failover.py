"""Replicas that are killed and restarted: the whole lab once, and how a client tells the outcome of a request."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random

import pytest
from aiohttp import web

from headstart_lab.router.failover import (
    QUICK,
    FailoverConfig,
    _Found,
    _report,
    eject_seconds,
    run_failover,
)
from headstart_lab.router.failover_load import Load, Outcome, is_typed
from headstart_lab.router.failover_processes import pauses, takes_requests

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
TYPED = b'event: error\ndata: {"error": {"message": "m", "type": "server_error", "code": "replica_lost"}}\n\n'
DONE = b"data: [DONE]\n\n"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.mark.long
def test_no_request_is_lost_when_replicas_are_killed_and_restarted() -> None:
    report = run_failover(replace(QUICK, seed=3))
    values = report.values
    assert report.problems == []
    assert values["kill.rounds"] == 2 and values["kill.lost"] == 0
    assert values["kill.typed_errors"] == values["kill.started"]
    assert values["kill.eject_seconds_max"] >= 0
    assert values["rolling.requests"] >= 100 and values["rolling.lost"] == values["rolling.non_2xx"] == 0
    assert len(report.setup["restart_seconds"]) == 2


@pytest.mark.parametrize("mean_seconds", [0.5, 20.0, 1e9])
def test_no_pause_of_a_poisson_clock_goes_beyond_its_end(mean_seconds: float) -> None:
    """A mean far above the length of a run let it sleep for days."""
    found, now = list[float](), lambda: 100.0 + sum(found)
    for pause in pauses(Random(7), mean_seconds, 140.0, now):
        found.append(pause)
        assert now() < 140.0
    assert {0.5: 60 < len(found) < 100, 20.0: 0 < len(found) < 6, 1e9: not found}[mean_seconds]


def ask(answer: Answer, *, is_stream: bool) -> Outcome:
    """Return the client's record of one answer."""

    async def run() -> Outcome:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        load = Load(f"http://127.0.0.1:{port}", Random(0), 4)
        load.num_sent = 1 if is_stream else 0  # every second one is a stream
        before = load.num_sent
        await load.closed(1, lambda: load.num_sent == before)
        await runner.cleanup()
        (outcome,) = load.outcomes
        return outcome

    return asyncio.run(run())


def stream_of(*pieces: bytes, is_cut: bool = False) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is True
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-headstart-replica": "r"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


@pytest.mark.parametrize(
    ("pieces", "is_cut", "started", "ended", "typed"),
    [
        ((TOKEN, DONE), False, True, True, False),
        ((TOKEN, TYPED, DONE), False, True, False, True),
        ((TYPED, DONE), False, False, False, True),
        ((TOKEN, b'data: {"error": "lost"}\n\n', DONE), False, True, False, False),
        ((TOKEN,), False, True, False, False),
        ((TOKEN,), True, True, False, False),
        ((b": warming up\n\n",), False, False, False, False),
    ],
)
def test_a_stream_is_what_came_of_it(
    pieces: tuple[bytes, ...], is_cut: bool, started: bool, ended: bool, typed: bool
) -> None:
    outcome = ask(stream_of(*pieces, is_cut=is_cut), is_stream=True)
    assert (outcome.started, outcome.ended, outcome.typed) == (started, ended, typed), outcome
    assert outcome.is_stream and outcome.status == 200 and outcome.replica == "r"
    assert outcome.is_lost == (not started) and bool(outcome.error) == (not ended)


def test_a_whole_answer_is_there_or_lost() -> None:
    async def good(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "a"}]})

    async def refused(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "m", "type": "t", "code": "no_replicas"}}, status=503)

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    assert ask(good, is_stream=False).ended and not ask(good, is_stream=False).is_lost
    no = ask(refused, is_stream=False)
    assert (no.status, no.typed, no.is_lost) == (503, True, True)
    gone = ask(cut, is_stream=False)
    assert (gone.status, gone.typed, gone.is_lost) == (None, False, True) and "Disconnected" in gone.error


def test_an_error_is_typed_if_it_says_what_it_is() -> None:
    whole = {"message": "m", "type": "t", "code": "c"}
    assert is_typed({"error": whole})
    assert not any(is_typed({"error": {**whole, key: None}}) for key in whole)
    assert not is_typed({"error": "lost"}) and not is_typed({})


def test_ejection_is_the_last_request_sent_to_the_dead() -> None:
    sent = [("a", 9.9), ("a", 10.2), ("b", 10.9), ("a", 10.4), ("a", 13.0), ("a", 20.5)]
    decisions = [{"endpoint": url, "at": at} for url, at in sent]
    kills = [("a", 10.0, 12.5), ("b", 30.0, 31.0), ("a", 20.0, 22.0)]
    assert eject_seconds(decisions, kills) == pytest.approx([0.4, 0.0, 0.5])


def test_a_replica_takes_requests_if_it_is_up_and_not_ejected() -> None:
    assert takes_requests({"state": "up", "ejected": False})
    assert not takes_requests({"state": "up", "ejected": True})
    assert not takes_requests({"state": "draining", "ejected": False})
    assert not takes_requests({"state": "absent"}) and not takes_requests(None)


def test_what_clients_notice_invalidates_the_report() -> None:
    good = Outcome(True, 0.0, 200, started=True, ended=True)
    cut = Outcome(True, 0.0, 200, started=True, error="torn")
    typed = Outcome(True, 0.0, 200, started=True, typed=True, error="replica_lost")
    lost = Outcome(False, 0.0, 502, typed=True, error="unreachable")
    found = _Found(killed=[good, typed], rolled=[good, good], kills=[("a", 0.0, 1.0)], restarts=[1.0])
    clean = _report(FailoverConfig(), found, [0.25])
    assert clean.problems == []
    assert (clean.values["kill.started"], clean.values["kill.typed_errors"]) == (1, 1)
    assert clean.values["kill.eject_seconds_max"] == 0.25
    bad = _report(FailoverConfig(), replace(found, killed=[good, cut, lost], rolled=[good, lost, typed]), [])
    assert bad.problems == [
        "kill: 1 requests were lost, the first with: 502 unreachable",
        "kill: 1 streams ended without a typed error, the first with: torn",
        "rolling: 2 requests failed, the first with: 502 unreachable",
    ]
    assert (bad.values["kill.lost"], bad.values["rolling.lost"], bad.values["rolling.non_2xx"]) == (1, 2, 1)
