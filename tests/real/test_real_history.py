"""Chats of 20 turns at temperature 1: with token-exact history each turn reuses all blocks before it; without, not."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from real.chats import FOLLOW_UPS, OPENINGS
from server.harness import Server, spawn

pytestmark = pytest.mark.long

CHATS, TURNS, TOKENS, BLOCK = 3, 20, 32, 16


class Reuse(NamedTuple):
    """Sums over all turns but the first of each chat."""

    num_turns: int = 0
    num_incomplete: int = 0  # turns that did not reuse all full blocks before them
    num_possible: int = 0  # tokens in these blocks
    num_cached: int = 0


@contextmanager
def running(model: Path, log: Path, *options: str) -> Generator[Server]:
    command = [sys.executable, "-m", "headstart", "serve", str(model), "--port", "0", *options]
    with spawn([*command, "--heartbeat-timeout", "600"], log) as process:
        yield process.wait_ready()


def run_chats(server: Server) -> Reuse:
    """Run the chats, one turn of each after the other."""
    chats = [[{"role": "user", "content": f"Chat {number}. {OPENINGS[number]}"}] for number in range(CHATS)]
    ends, total = [0] * CHATS, Reuse()
    for turn in range(TURNS):
        for number, messages in enumerate(chats):
            body = {"messages": messages, "max_tokens": TOKENS, "temperature": 1, "seed": 100 * number + turn}
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
            assert response.status_code == 200, response.text
            answer = response.json()
            usage, possible = answer["usage"], ends[number] // BLOCK * BLOCK
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if turn:
                more = (1, cached < possible, possible, min(cached, possible))
                total = Reuse(*map(sum, zip(total, more, strict=True)))
            ends[number] = usage["total_tokens"] - 1
            follow_up = {"role": "user", "content": FOLLOW_UPS[turn % len(FOLLOW_UPS)]}
            messages += [answer["choices"][0]["message"], follow_up]
    return total


def test_every_turn_reuses_all_blocks_before_it_only_with_token_exact_history(smollm2: Path, tmp_path: Path) -> None:
    with running(smollm2, tmp_path / "off", "--history-size", "0") as server:
        off = run_chats(server)
        assert server.metric("headstart:history_tokens_total") == 0
    with running(smollm2, tmp_path / "on") as server:
        on = run_chats(server)
        counted = [line for line in server.get("/metrics").text.splitlines() if line.startswith("headstart:history_")]
    print(json.dumps({"off": off._asdict(), "on": on._asdict(), "metrics": counted}), file=sys.stderr)
    assert off.num_incomplete > 0  # else this shows nothing
    assert on.num_incomplete == 0 and on.num_cached == on.num_possible
