"""Requests that vLLM 0.32 answered, drawn from the ranges it documents: at least 99 % are answered here too."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server.harness import PATIENCE, Server, spawn

from headstart_lab.fuzz import legal_requests

VERDICTS = json.loads((Path(__file__).parents[2] / "benchmarks/legal-requests/vllm-0.32.0.json").read_text())
NUM_REQUESTS = 1000


@pytest.fixture(scope="module")
def bundled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`headstart serve` with nothing configured: the defaults are what is judged."""
    log = tmp_path_factory.mktemp("legal") / "log"
    with spawn([sys.executable, "-m", "headstart", "serve", "--port", "0", "--no-access-log"], log) as running:
        yield running.wait_ready()


def accepted_by_vllm() -> list[Any]:
    """The drawn requests that vLLM answered with 200, checked to be the very ones that it was asked."""
    drawn = legal_requests.draw(VERDICTS["count"], VERDICTS["seed"])
    lines = "".join(json.dumps(request, ensure_ascii=False) + "\n" for request in drawn)
    assert hashlib.sha256(lines.encode()).hexdigest() == VERDICTS["drawn_sha256"]
    return [request for request, verdict in zip(drawn, VERDICTS["statuses"], strict=True) if verdict == "1"]


def check(server: Server, requests: list[Any]) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: legal_requests.ask(server.url, request, timeout=PATIENCE), requests))
    statuses = Counter(answer["status"] for answer in answers)
    refusals = Counter(answer["error"][:200] for answer in answers if answer["status"] != 200)
    assert statuses[200] >= 0.99 * len(requests), (statuses, refusals.most_common(5))
    assert max(statuses) < 500, refusals.most_common(5)


def test_requests_that_vllm_accepts_are_answered(bundled_server: Server) -> None:
    check(bundled_server, accepted_by_vllm()[:NUM_REQUESTS:10])


@pytest.mark.long
def test_a_thousand_requests_that_vllm_accepts_are_answered(bundled_server: Server) -> None:
    requests = accepted_by_vllm()[:NUM_REQUESTS]
    assert len(requests) == NUM_REQUESTS
    check(bundled_server, requests)
