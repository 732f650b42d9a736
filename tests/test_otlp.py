"""Traces over OTLP, through a router and a server in processes of their own: to a receiver, and to a real collector."""

import gzip
import json
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server.harness import Server, fake_command, quiet_port, spawn, wait_for
from tokenizer_folders import BYTE_LEVEL, write

from headstart.model.weights.init_model import write_random_model
from headstart_lab.router.failover_processes import quiet_ports

pytest.importorskip("opentelemetry.sdk", reason="the extra [otlp] is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
SERVER, CLIENT = 2, 3  # kinds
Spans = dict[str, list[Any]]


class Receiver:
    """An OTLP/HTTP endpoint on loopback that keeps what it receives, by service."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Any]] = defaultdict(list)
        self.headers: list[dict[str, str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                found = ExportTraceServiceRequest.FromString(body)
                for resource in found.resource_spans:
                    service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
                    for scope in resource.scope_spans:
                        receiver.spans[service].extend(scope.spans)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def of(self, service: str) -> Spans:
        """The spans of a service by name."""
        found: Spans = defaultdict(list)
        for span in list(self.spans[service]):
            found[span.name].append(span)
        return found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def rotel(target: str, folder: Path) -> Iterator[str]:
    """A collector of its own, which passes traces on to `target`; its address."""
    package = pytest.importorskip("rotel", reason="the collector is not installed")
    ports = quiet_ports(2)
    options = {
        "--otlp-http-endpoint": f"127.0.0.1:{ports[0]}",
        "--otlp-grpc-endpoint": f"127.0.0.1:{ports[1]}",
        "--pid-file": str(folder / "pid"),
        "--log-file": str(folder / "agent.log"),
        "--exporter": "otlp",
        "--otlp-exporter-endpoint": target,
        "--otlp-exporter-protocol": "http",
    }
    agent = Path(package.__file__).parent / "rotel-agent"
    with (folder / "rotel.log").open("wb") as log:
        process = subprocess.Popen(
            [agent, "start", *(w for pair in options.items() for w in pair)], stdout=log, stderr=log
        )
    try:
        wait_for(lambda: is_listening(ports[0]))
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        process.terminate()
        process.wait()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headstart", *words]


@contextmanager
def fleet(serve: list[str], endpoint: str, folder: Path) -> Iterator[tuple[Server, Server]]:
    """A server and a router in front of it."""
    with ExitStack() as stack:
        server = stack.enter_context(spawn(serve, folder / "server.log")).wait_ready()
        words = ("route", "--replica", server.url, "--port", "0", "--otlp-endpoint", endpoint, "--tokenizer", "none")
        router = stack.enter_context(spawn(command(*words), folder / "router.log")).wait_ready()
        yield server, router


def fake(endpoint: str, folder: Path) -> list[str]:
    model = write(folder / "model", BYTE_LEVEL)
    return fake_command(str(model), otlp_endpoint=endpoint)


def real(endpoint: str, folder: Path) -> list[str]:
    model = write_random_model("tiny", folder / "tiny", std=0.2, dtype="float32", progress=False)
    sizes = ("--num-blocks", "256", "--max-model-len", "512", "--max-num-batched-tokens", "32", "--max-num-seqs", "8")
    return command(
        "serve", str(model), *sizes, "--port", "0", "--heartbeat-timeout", "600", "--otlp-traces-endpoint", endpoint
    )


@pytest.mark.parametrize(
    ("serve", "uses_rotel"),
    [
        pytest.param(fake, False, marks=pytest.mark.long),
        (real, True),
    ],  # the router of the second sends to no collector
    ids=["fake engine", "rotel"],
)
def test_a_whole_trace_arrives_with_the_right_parents(
    serve: Callable[[str, Path], list[str]], uses_rotel: bool, receiver: Receiver, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        endpoint = stack.enter_context(rotel(receiver.url, tmp_path)) if uses_rotel else receiver.url
        server, router = stack.enter_context(fleet(serve(endpoint, tmp_path), receiver.url, tmp_path))
        prompt = "the swordfish " * 16
        answer = router.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 4}, headers={**CALLER, "authorization": "Bearer k"}
        )
        assert answer.status_code == 200, answer.text
        wait_for(lambda: receiver.spans["headstart-server"] and receiver.spans["headstart-router"])
        assert router.stop() == 0 and server.stop() == 0
    at_router, at_server = receiver.of("headstart-router"), receiver.of("headstart-server")
    (root,) = [span for spans in at_router.values() for span in spans if span.kind == SERVER]
    (attempt,) = [span for spans in at_router.values() for span in spans if span.kind == CLIENT]
    (replica,) = [span for spans in at_server.values() for span in spans if span.kind == SERVER]
    assert {one.trace_id.hex() for spans in (at_router, at_server) for same in spans.values() for one in same} == {
        TRACE
    }
    assert root.parent_span_id.hex() == SPAN and root.trace_state == replica.trace_state == "vendor=1"
    assert attempt.parent_span_id == root.span_id and replica.parent_span_id == attempt.span_id
    phases = ("receive", "tokenize", "queue", "prefill", "decode")
    assert all(one.parent_span_id == replica.span_id for name in phases for one in at_server[name])
    assert all(len(at_server[name]) == 1 for name in phases) and [e.name for e in replica.events][-1] == "first_token"
    assert {span.parent_span_id for span in at_server["prefill_chunk"]} <= {at_server["prefill"][0].span_id}
    assert (len(at_server["prefill_chunk"]) > 1) is (serve is real)  # a fake engine has no chunks
    told = {attribute.key: attribute.value for attribute in replica.attributes}
    assert told["gen_ai.response.id"].string_value == answer.json()["id"]
    assert told["gen_ai.usage.input_tokens"].int_value == answer.json()["usage"]["prompt_tokens"]
    assert root.start_time_unix_nano <= replica.start_time_unix_nano < replica.end_time_unix_nano
    assert "swordfish" not in json.dumps([str(span) for spans in receiver.spans.values() for span in spans])


def test_variables_of_opentelemetry_choose_headers_service_and_samples(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=42")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with spawn(fake(receiver.url, tmp_path), tmp_path / "log") as server:
        server.wait_ready()
        for headers in ({}, CALLER):
            server.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert server.stop() == 0
    assert {span.trace_id.hex() for span in receiver.spans["mine"]} == {TRACE}
    assert receiver.headers[0]["x-key"] == "42"


def test_without_a_collector_requests_are_answered_and_spans_counted(tmp_path: Path) -> None:
    with spawn(fake(f"http://127.0.0.1:{quiet_port()}", tmp_path), tmp_path / "log") as server:
        server.wait_ready()
        for _ in range(3):
            assert server.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log and "Transient" not in server.log
