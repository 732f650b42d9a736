"""Traces of a router: its spans, one for each attempt, and the trace context that replicas receive."""

import io
from typing import Any

import httpx
import pytest
from gateway.harness import Front, Replica, front, reset, run, two
from server.collected import Collected, named, texts
from server.harness import until

from headstart.gateway.proxy.upstream import request_header_changes
from headstart.http.logs import ServerLog
from headstart.http.tracing import tracer as tracing
from headstart.http.tracing.request_trace import RequestTrace
from headstart.http.tracing.tracer import Tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


@pytest.fixture(autouse=True)
def exports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.01)


async def traced(router: Front, samples: bool = True, **fields: Any) -> tuple[RequestTrace, httpx.Response]:
    """The trace of a completion at the router, and its answer."""
    collected = Collected()
    collected.samples = samples
    router.state.tracer = Tracer(collected, ServerLog(io.StringIO()))
    answer = await router.complete("a secret", **fields)
    assert answer.status_code == 200, answer.text
    await until(lambda: collected.traces)
    return collected.traces[0], answer


@pytest.mark.parametrize("stream", [False, True])
def test_the_span_of_an_attempt_is_the_parent_of_the_replicas(stream: bool) -> None:
    async def scenario() -> None:
        replica = Replica()
        async with front(replica) as router:
            await router.up(1)
            trace, _ = await traced(router, headers=CALLER, stream=stream)
        (attempt,) = named(trace, "POST /v1/completions")
        assert replica.heads[-1]["traceparent"] == f"00-{TRACE}-{attempt.span_id:016x}-01"
        assert replica.heads[-1]["tracestate"] == "vendor=1"
        assert [span.name for span in trace.spans] == ["text_completion", attempt.name]
        assert min(trace.root.attributes[f"headstart.{part}_ms"] for part in ("receive", "route")) >= 0
        root = trace.root
        assert (f"{trace.trace_id:032x}", f"{root.parent_id:016x}", root.kind) == (TRACE, SPAN, "server")
        assert {span.parent_id for span in trace.spans[1:]} == {root.span_id}
        assert root.start <= attempt.start <= attempt.end <= root.end and attempt.kind == "client"
        assert attempt.attributes["url.full"] == replica.url + "/v1/completions" and not attempt.error
        assert [event.name for event in root.events] == ["first_token"] and "secret" not in texts(trace)

    run(scenario())


def test_every_attempt_is_a_span_of_its_own() -> None:
    async def scenario() -> None:
        replicas = two()
        async with front(*replicas) as router:
            await router.up(2)
            for replica in replicas:
                replica.script = first_only(replicas)
            trace, _ = await traced(router)
        lost, answered = named(trace, "POST /v1/completions")
        assert (lost.error, lost.is_failed, answered.error) == ("lost", True, "")
        assert lost.end <= answered.start and lost.attributes["url.full"] != answered.attributes["url.full"]
        (told,) = [head["traceparent"] for replica in replicas for head in replica.heads[-1:] if replica.script is None]
        assert told.split("-")[2] == f"{answered.span_id:016x}" and trace.root.parent_id == 0

    def first_only(replicas: list[Replica]) -> Any:
        async def script(request: Any, body: Any) -> Any:
            for replica in replicas:
                if replica.script is not None and str(request.url.origin()) != replica.url:
                    replica.script = None
            await reset(request, body)

        return script

    run(scenario())


def test_without_tracing_the_callers_context_goes_on_untouched() -> None:
    async def scenario() -> None:
        replica = Replica()
        async with front(replica) as router:
            await router.up(1)
            await router.complete(headers=CALLER)
        assert {name: replica.heads[-1][name] for name in CALLER} == CALLER

    run(scenario())


def test_an_invalid_context_begins_a_new_trace_without_its_state() -> None:
    async def scenario() -> None:
        replica = Replica()
        async with front(replica) as router:
            await router.up(1)
            trace, _ = await traced(router, headers=CALLER | {"traceparent": "00-broken"})
        assert trace.root.parent_id == 0 and replica.heads[-1]["traceparent"].startswith(f"00-{trace.trace_id:032x}-")
        assert "tracestate" not in replica.heads[-1]

    run(scenario())


def test_envoy_removes_the_state_of_a_context_that_is_not_continued() -> None:
    theirs = [(name.encode(), value.encode()) for name, value in CALLER.items()]
    ours = CALLER["traceparent"]
    assert request_header_changes(theirs, {"traceparent": ours})[1] == ["tracestate"]
    assert request_header_changes(theirs, {"traceparent": ours, "tracestate": "vendor=1"})[1] == []
    assert request_header_changes(theirs, {})[1] == []


@pytest.mark.parametrize("headers", [{}, {"traceparent": f"00-{TRACE}-{SPAN}-00"}])
def test_a_trace_that_is_not_sampled_is_not_sampled_at_the_replica_either(headers: dict[str, str]) -> None:
    async def scenario() -> None:
        replica, collected = Replica(), Collected()
        collected.samples = False
        async with front(replica) as router:
            await router.up(1)
            router.state.tracer = Tracer(collected, ServerLog(io.StringIO()))
            await router.complete(headers=headers)
            router.state.tracer.close()
        assert replica.heads[-1]["traceparent"].endswith("-00") and not collected.traces

    run(scenario())


def test_times_of_router_and_replica_are_in_one_answer() -> None:
    async def script(request: Any, body: Any) -> Any:
        from aiohttp import web

        told = {"choices": [{"index": 0, "text": "abc"}]}
        return web.json_response(told, headers={"server-timing": "queue;dur=0.1, prefill;dur=2.5"})

    async def scenario() -> None:
        replica = Replica()
        replica.script = script
        async with front(replica) as router:
            await router.up(1)
            answer = await router.complete()
        told = answer.headers.get_list("server-timing", split_commas=True)
        assert [part.split(";")[0] for part in told] == ["queue", "prefill", "route"]

    run(scenario())


def test_the_first_token_has_an_exemplar_and_spans_are_counted() -> None:
    async def scenario() -> None:
        async with front(Replica()) as router:
            await router.up(1)
            trace, _ = await traced(router)
            assert router.state.tracer is not None
            router.state.metrics.watch_tracer(router.state.tracer)
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            await until(lambda: router.state.tracer and router.state.tracer.num_exported)
            page = await router.client.get("/metrics", headers=accept)
        assert f'trace_id="{trace.hex_trace_id}"' in page.text and page.text.endswith("# EOF\n")
        assert f'headstart:trace_spans_total{{outcome="exported"}} {len(trace.spans)}.0' in page.text

    run(scenario())
