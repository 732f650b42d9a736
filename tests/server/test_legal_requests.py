"""Requests that vLLM 0.32 answered, drawn from the ranges it documents: at least 99 % are answered here too."""

import hashlib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from server.harness import PATIENCE, Server, spawn

FOLDER = Path(__file__).parents[2] / "benchmarks" / "legal-requests"
VERDICTS = json.loads((FOLDER / "vllm-0.32.0.json").read_text())
NUM_REQUESTS = 1000


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """benchmarks/legal-requests/legal_requests.py, which draws and asks."""
    specification = importlib.util.spec_from_file_location("legal_requests", FOLDER / "legal_requests.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bundled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`headstart serve` with nothing configured: the defaults are what is judged."""
    log = tmp_path_factory.mktemp("legal") / "log"
    with spawn([sys.executable, "-m", "headstart", "serve", "--port", "0", "--no-access-log"], log) as running:
        yield running.wait_ready()


def accepted_by_vllm(tool: ModuleType) -> list[Any]:
    """The drawn requests that vLLM answered with 200, checked to be the very ones that it was asked."""
    drawn = tool.draw(VERDICTS["count"], VERDICTS["seed"])
    lines = "".join(json.dumps(request, ensure_ascii=False) + "\n" for request in drawn)
    assert hashlib.sha256(lines.encode()).hexdigest() == VERDICTS["drawn_sha256"]
    return [request for request, verdict in zip(drawn, VERDICTS["statuses"], strict=True) if verdict == "1"]


def check(tool: ModuleType, server: Server, requests: list[Any]) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: tool.ask(server.url, request, timeout=PATIENCE), requests))
    statuses = Counter(answer["status"] for answer in answers)
    refusals = Counter(answer["error"][:200] for answer in answers if answer["status"] != 200)
    assert statuses[200] >= 0.99 * len(requests), (statuses, refusals.most_common(5))
    assert max(statuses) < 500, refusals.most_common(5)


def test_requests_that_vllm_accepts_are_answered(tool: ModuleType, bundled_server: Server) -> None:
    check(tool, bundled_server, accepted_by_vllm(tool)[:NUM_REQUESTS:5])


@pytest.mark.long
def test_a_thousand_requests_that_vllm_accepts_are_answered(tool: ModuleType, bundled_server: Server) -> None:
    requests = accepted_by_vllm(tool)[:NUM_REQUESTS]
    assert len(requests) == NUM_REQUESTS
    check(tool, bundled_server, requests)
