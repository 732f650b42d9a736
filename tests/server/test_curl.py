"""curl, as the README uses it, against `headstart serve` with the real engine."""

import json
import shutil
import subprocess

import pytest
from server.harness import Server, parse_events

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
JSON = ("-H", "Content-Type: application/json")


def curl(server: Server, path: str, *arguments: str, text: str | None = None) -> str:
    command = ["curl", "-sS", "--max-time", "300", server.url + path, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=400).stdout


def test_the_second_reply_shows_cached_tokens(real_server: Server) -> None:
    body = json.dumps({"model": "tiny", "prompt": "curl says hello to the server " * 8, "max_tokens": 8})
    first, second = (json.loads(curl(real_server, "/v1/completions", *JSON, "-d", body)) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_stream_arrives_event_by_event(real_server: Server) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True})
    output = curl(real_server, "/v1/chat/completions", "-N", *JSON, "-d", body)
    events = parse_events(output)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant" and events[-1] == "[DONE]"


def test_a_form_is_told_to_send_json(real_server: Server) -> None:
    output = curl(real_server, "/v1/completions", "-d", '{"prompt": "a"}', "-w", "%{http_code}")
    assert output.endswith("415") and "Content-Type: application/json" in output


def test_a_chunked_upload_works_and_a_huge_one_is_refused(real_server: Server) -> None:
    chunked = ("-H", "Transfer-Encoding: chunked", *JSON, "-d", "@-")
    body = json.dumps({"prompt": "a" + " " * 200, "max_tokens": 1})
    assert json.loads(curl(real_server, "/v1/completions", *chunked, text=body))["choices"]
    huge = json.dumps({"prompt": "a" * 8_000_000})
    output = curl(real_server, "/v1/completions", *chunked, "-w", "%{http_code}", text=huge)
    assert output.endswith("413") and "body_too_large" in output
    output = curl(real_server, "/v1/completions", *JSON, "-d", "@-", "-w", "%{http_code}", text=huge)
    assert output.endswith("413")


def test_health_and_metrics_are_plain_gets(real_server: Server) -> None:
    assert json.loads(curl(real_server, "/health")) == {"status": "ok"}
    assert "vllm:num_requests_running" in curl(real_server, "/metrics")
