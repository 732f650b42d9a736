"""Traces of a server: W3C context, spans of all phases, what is never in them, a queue that no request waits for."""

import asyncio
import io
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from server.checked_engine import build_checked
from server.collected import Collected, named, texts
from server.harness import Inside, fake_command, inside, spawn, until, wait_for

from headstart.core.errors import ConfigError
from headstart.http.access_record import AccessRecord
from headstart.http.logs import ServerLog
from headstart.http.tracing import tracer as tracing
from headstart.http.tracing.request_trace import RequestTrace, TraceParent
from headstart.http.tracing.tracer import Tracer, make_tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{SPAN}-01"
EXPORTER = "opentelemetry.sdk.trace"


@pytest.fixture(autouse=True)
def exports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.01)


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test's coroutine on a loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def headers(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"traceparent", value.encode()) for value in values]


@pytest.mark.parametrize(
    ("values", "sampled"),
    [
        ([CALLER], True),
        ([f"00-{TRACE}-{SPAN}-00"], False),
        ([f"00-{TRACE}-{SPAN}-03"], True),
        ([f"cc-{TRACE}-{SPAN}-01-what-comes-later"], True),
        ([f"00-{TRACE}-{SPAN}-01-more"], None),
        ([f"ff-{TRACE}-{SPAN}-01"], None),
        ([f"00-{'0' * 32}-{SPAN}-01"], None),
        ([f"00-{TRACE}-{'0' * 16}-01"], None),
        ([f"00-{TRACE.upper()}-{SPAN}-01"], None),
        ([f"00-{TRACE}-{SPAN}"], None),
        ([CALLER, CALLER], None),
        ([""], None),
        ([], None),
    ],
)
def test_a_callers_span_is_read_as_w3c_says(values: list[str], sampled: bool | None) -> None:
    found = TraceParent.from_headers([*headers(*values), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")])
    expected = None if sampled is None else TraceParent(int(TRACE, 16), int(SPAN, 16), sampled, "a=1,b=2")
    assert found == expected


@pytest.mark.parametrize("state", [b"a=" + b"x" * 600, b"a=\x01", b"a=\xe4"])
def test_a_tracestate_that_may_not_be_passed_on_is_dropped_alone(state: bytes) -> None:
    found = TraceParent.from_headers([*headers(CALLER), (b"tracestate", state)])
    assert found is not None and found.state == ""


def record() -> AccessRecord:
    return AccessRecord.create_in_scope({"headers": [], "method": "POST", "path": "/v1/completions"})


def add(tracer: Tracer, count: int) -> None:
    """Ends so many traces of one span."""
    for _ in range(count):
        one = record()
        one.trace, one.status = tracer.begin(one, "chat", []), 200
        tracer.end_trace(one, one.arrival)


def test_spans_beyond_the_queue_are_dropped_and_counted_while_the_collector_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "MAX_WAITING_SPANS", 4)
    collected = Collected()
    collected.gate.clear()
    tracer = Tracer(collected, ServerLog(io.StringIO()))
    add(tracer, 10)  # none of them waits
    assert tracer.num_dropped == 6
    collected.gate.set()
    wait_for(lambda: tracer.num_exported == 4)
    add(tracer, 2)
    tracer.close()
    assert (tracer.num_exported, tracer.num_dropped, len(collected.traces)) == (6, 6, 6)


def test_many_spans_are_exported_before_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 1e6)
    monkeypatch.setattr(tracing, "BATCH_SPANS", 3)
    tracer = Tracer(Collected(), ServerLog(io.StringIO()))
    for exported in (3, 6):
        add(tracer, 3)
        wait_for(lambda exported=exported: tracer.num_exported == exported)
    tracer.close()


def test_a_collector_that_refuses_costs_spans_and_two_lines_in_the_log() -> None:
    collected, stream = Collected(), io.StringIO()
    collected.answer = False
    tracer = Tracer(collected, ServerLog(stream), "the collector at c")
    for failed in (1, 2):
        add(tracer, 1)
        wait_for(lambda failed=failed: tracer.num_failed == failed)
    collected.answer = True
    add(tracer, 1)
    tracer.close()
    assert (tracer.num_failed, tracer.num_exported) == (2, 1)
    assert stream.getvalue().splitlines() == [
        "headstart: the collector at c does not accept spans; they are dropped until it does",
        "headstart: the collector at c accepts spans again",
    ]


def test_a_hanging_collector_does_not_hold_the_end_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.05)
    collected = Collected()
    collected.gate.clear()
    tracer = Tracer(collected, ServerLog(io.StringIO()))
    add(tracer, 1)
    tracer.close()
    assert collected.is_shut_down


def test_an_exporter_with_a_bug_does_not_end_the_export() -> None:
    class Broken(Collected):
        def export(self, traces: Any) -> bool:
            if not self.answer:
                raise ValueError("a bug")
            return super().export(traces)

    collected = Broken()
    collected.answer = False
    tracer = Tracer(collected, ServerLog(io.StringIO()))
    add(tracer, 1)
    wait_for(lambda: tracer.num_failed == 1)
    collected.answer = True
    add(tracer, 1)
    wait_for(lambda: tracer.num_exported == 1)
    tracer.close()


async def traced(server: Inside, prompt: Any, **fields: Any) -> RequestTrace:
    """The trace of a completion."""
    collected = Collected()
    server.state.tracer = Tracer(collected, ServerLog(io.StringIO()))
    await server.complete(prompt, **fields)
    await until(lambda: collected.traces)
    server.state.tracer.close()
    return collected.traces[0]


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_trace_has_every_phase_in_order_and_the_chunks_of_the_prompt(folder: str, stream: bool) -> None:
    async with inside(folder, build_checked) as server:
        server.client.headers.update({"traceparent": CALLER, "tracestate": "a=1"})
        trace = await traced(server, "a secret of twenty", max_tokens=3, stream=stream)
    phases = [span for span in trace.spans[1:] if span.name != "prefill_chunk"]
    assert [span.name for span in phases] == ["receive", "tokenize", "queue", "prefill", "decode"]
    assert all(one.end == other.start for one, other in pairwise(phases))
    root, prefill, chunks = trace.root, phases[3], named(trace, "prefill_chunk")
    assert (root.name, root.kind, root.parent_id, trace.trace_id) == (
        "text_completion checked",
        "server",
        int(SPAN, 16),
        int(TRACE, 16),
    )
    assert {span.parent_id for span in phases} == {root.span_id} and {c.parent_id for c in chunks} == {prefill.span_id}
    assert root.start == phases[0].start and root.end >= phases[-1].end and trace.state == "a=1"
    assert sum(chunk.attributes["headstart.tokens"] for chunk in chunks) == root.attributes["gen_ai.usage.input_tokens"]
    assert root.attributes["gen_ai.request.max_tokens"] == root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",) and not root.error
    assert [event.name for event in root.events] == ["admission", "first_token"]


@on_a_loop
async def test_the_admission_tells_where_the_prompt_came_from(folder: str) -> None:
    async with inside(folder, build_checked) as server:
        await server.complete("the same prompt of many tokens", max_tokens=1)
        trace = await traced(server, "the same prompt of many tokens", max_tokens=1)
    admission, cached = trace.root.events[0], trace.root.attributes["gen_ai.usage.cache_read.input_tokens"]
    assert cached and admission.attributes["headstart.prompt_tokens.shared"] == cached
    computed = sum(chunk.attributes["headstart.tokens"] for chunk in named(trace, "prefill_chunk"))
    assert computed == admission.attributes["headstart.prompt_tokens.computed"]


@on_a_loop
async def test_neither_prompt_nor_answer_nor_key_is_in_a_trace(folder: str) -> None:
    async with inside(folder, build_checked, api_key=("sk-very-secret",)) as server:
        server.client.headers["authorization"] = "Bearer sk-very-secret"
        trace = await traced(server, "swordfish", max_tokens=4, user="alice", stop="marlin")
        refused = await traced(server, "swordfish", max_tokens=-7, logit_bias={"swordfish": 1})
    for said in (texts(trace), texts(refused)):
        assert not re.search("swordfish|sk-very|alice|marlin", said)
    assert trace.root.attributes["headstart.tenant"]


@on_a_loop
async def test_a_refused_request_is_an_error_of_its_caller(folder: str) -> None:
    async with inside(folder, build_checked) as server:
        trace = await traced(server, "x", max_tokens=-1)
    assert trace.root.attributes["http.response.status_code"] == 400
    assert trace.root.error == "invalid_value" and not trace.root.is_failed
    assert [span.name for span in trace.spans] == ["text_completion"]


@on_a_loop
async def test_only_generation_is_traced_and_a_caller_may_have_it_left_out(folder: str) -> None:
    async with inside(folder, build_checked) as server:
        collected = Collected()
        server.state.tracer = Tracer(collected, ServerLog(io.StringIO()))
        await server.client.get("/health")
        await server.client.post("/tokenize", json={"prompt": "x"})
        await server.client.get("/v1/completions")
        await server.client.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x"}]})
        await server.client.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": CALLER[:-1] + "0"})
        server.state.tracer.close()
    assert collected.traces == []


@on_a_loop
async def test_a_request_without_a_key_is_not_traced(folder: str) -> None:
    async with inside(folder, build_checked, api_key=("k",)) as server:
        collected = Collected()
        server.state.tracer = Tracer(collected, ServerLog(io.StringIO()))
        refused = await server.complete("x")
        server.state.tracer.close()
    assert refused.status_code == 401 and collected.traces == []


def timings(header: str) -> dict[str, float]:
    return {part.split(";dur=")[0]: float(part.split(";dur=")[1]) for part in header.split(", ")}


@pytest.mark.parametrize(
    ("stream", "phases"),
    [
        (False, ["receive", "tokenize", "queue", "prefill", "decode"]),
        (True, ["receive", "tokenize", "queue", "prefill"]),  # the head is sent with the first token
    ],
)
@on_a_loop
async def test_an_answer_tells_its_times(folder: str, stream: bool, phases: list[str]) -> None:
    async with inside(folder, build_checked) as server:
        answer = await server.complete("hello", max_tokens=200, stream=stream)
    found = timings(answer.headers["server-timing"])
    assert list(found)[:4] == phases[:4] and (stream or list(found) == phases)
    assert min(found.values()) >= 0


async def scrape(server: Inside, accept: str | None, **headers: str) -> tuple[str, str]:
    answer = await server.client.get("/metrics", headers={**({"accept": accept} if accept else {}), **headers})
    assert answer.status_code == 200
    return answer.text, answer.headers["content-type"]


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@on_a_loop
async def test_openmetrics_has_exemplars_and_the_same_samples(folder: str) -> None:
    async with inside(folder, build_checked) as server:
        await server.complete("hello", max_tokens=2)
        trace = await traced(server, "hello", max_tokens=2)
        await scrape(server, None)  # which counts itself
        plain, plain_type = await scrape(server, None)
        text, media_type = await scrape(server, PROMETHEUS)
    assert media_type.startswith("application/openmetrics-text") and plain_type.startswith("text/plain")
    families = list(parse_openmetrics(text))

    def keys(families: Any) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}

    assert keys(families) == keys(parse_plain(plain))
    found = {s.name: s.exemplar.labels for family in families for s in family.samples if s.exemplar}
    assert "vllm:time_to_first_token_seconds_bucket" in found and "vllm:e2e_request_latency_seconds_bucket" in found
    assert {labels["trace_id"] for labels in found.values()} == {trace.hex_trace_id} and "trace_id" not in plain


@on_a_loop
async def test_a_tenant_sees_no_exemplars_of_others(folder: str) -> None:
    async with inside(folder, build_checked, api_key=("one", "two")) as server:
        server.client.headers["authorization"] = "Bearer one"
        await traced(server, "hello", max_tokens=2)
        text, media_type = await scrape(server, PROMETHEUS, authorization="Bearer two")
    assert "trace_id" not in text and media_type.startswith("text/plain")


@on_a_loop
async def test_the_access_line_names_the_trace(folder: str) -> None:
    one = record()
    assert one.fields(one.arrival)["trace_id"] is None
    tracer = Tracer(Collected(), ServerLog(io.StringIO()))
    one.trace = tracer.begin(one, "chat", headers(CALLER))
    assert one.fields(one.arrival)["trace_id"] == TRACE
    tracer.close()


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://", "4318", ""])
def test_an_endpoint_that_is_none_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint is .* such as http://localhost:4318"):
        make_tracer(endpoint, "s", ServerLog(io.StringIO()))


def test_without_the_extra_the_option_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headstart.http.tracing.otlp_exporter", raising=False)
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigError, match=r"^--otlp-endpoint needs opentelemetry\S*: pip install 'headstart\[otlp\]'$"):
        make_tracer("http://localhost:4318", "s", ServerLog(io.StringIO()))


def test_without_the_option_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys, headstart.server.run_server, headstart.gateway.run_gateway;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_server_with_such_an_endpoint_does_not_start(folder: str, tmp_path: Path) -> None:
    with spawn(fake_command(folder, otlp_endpoint="nonsense"), tmp_path / "log") as server:
        assert server.wait() == 2
        assert server.log.startswith("headstart: otlp_endpoint is 'nonsense';") and server.log.count("\n") == 1
