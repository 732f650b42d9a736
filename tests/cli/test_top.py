"""`headstart top` and `headstart ps`: what they show of running servers, of none, and of servers that lie."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gateway.harness import unused_url
from server.harness import spawn

from headstart.cli.live import top_verb
from headstart.cli.live.ps_verb import serving_verb_of
from headstart.cli.live.top_text import render_screen
from headstart.cli.main import main
from headstart.core.errors import HeadstartError
from headstart.model.weights.init_model import write_random_model

FRAME: dict[str, Any] = {
    "object": "cache.figures",
    "model": "m",
    "window_seconds": 300.0,
    "sources": {"pinned": 0, "shared": 300, "store": 0, "followed": 0, "computed": 100},
    "hit_rate": 0.75,
    "losses": [{"cause": "tool_order", "tokens": 60, "remedy": "sort them by name"}],
    "running": 2,
    "waiting": 1,
    "ttft_ms": {"p50": 12.0, "p95": None},
    "kv_tokens": {"scratch": 50, "idle": 25, "pinned_idle": 0, "referenced": 25},
}
TREE: dict[str, Any] = {
    "tokens": 96,
    "capacity_tokens": 960,
    "num_runs": 2,
    "columns": ["id", "parent", "tokens", "subtree_tokens", "users", "state", "pinned", "tenant", "text"],
    "runs": [
        ["a", -1, 64, 96, 2, "in_use", True, "", "You are\na helper"],
        ["b", 0, 32, 32, 0, "cached", False, "", "of \x1b[31mred"],
    ],
}
FLEET: dict[str, Any] = {
    "object": "fleet.figures",
    "policy": "cost",
    "queued": 3,
    "ttft_ms": {"p50": 1.0, "p95": 2.0},
    "replicas": [{"url": "http://r1", "state": "up", "pending": 4, "cache": {"blocks": 7, "more": {}}}],
    "decisions": [
        {
            "prompt_tokens": 38,
            "endpoint": "http://r1",
            "reason": "least cost",
            "candidates": [{"endpoint": "http://r1", "cost_ms": 5.04}],
        }
    ],
}


def shown(figures: Any, tree: Any = None, columns: int = 120, rows: int = 50) -> list[str]:
    return render_screen("http://s", figures, tree, columns=columns, rows=rows)


def test_the_screen_of_a_server() -> None:
    assert shown(FRAME, TREE) == [
        "Headstart  m  http://s",
        "",
        "running 2, waiting 1 | TTFT p50 12 ms, p95 - | tok/s: prompt 0, output 0 | hit 75 %",
        "KV       [########--------..............] in use 25 #, evictable 25 -, free 50 .",
        "prompts  [======================++++++++] shared 300 =, computed 100 +",
        "",
        "computed, by cause, in the last 300 s:",
        "  tool order                60   15 %  sort them by name",
        "",
        "prefix tree: 96 of 960 tokens, 2 runs",
        "  ##############################            96    2 users  in use, pinned      You are a helper",
        "    ##########                              32    0 users  cached once         of \\x1b[31mred",
    ]


def test_the_screen_of_a_router() -> None:
    lines = shown(FLEET)
    assert lines[2] == "waiting 3 | TTFT p50 1 ms, p95 2 ms | policy cost"
    assert lines[5].split() == ["http://r1", "up", "4", "0", "0", "ms", "1.00", "blocks", "7"]
    assert lines[-1] == "       38  http://r1  least cost; http://r1 5.0 ms"


def test_the_screen_names_the_tenants_if_there_are_several() -> None:
    rows = [
        {"tenant": "mail", "prompt_tokens": 400, "cached_tokens": 100, "evicted_tokens": 200, "cause": None},
        {"tenant": "desk", "prompt_tokens": 400, "cached_tokens": 300, "evicted_tokens": 0, "cause": "tool_order"},
    ]
    lines = shown({**FRAME, "tenants": rows}, {**TREE, "tenants": {"mail": 64, "desk": 32}})
    assert [line.split() for line in lines if line.startswith(("tenant", "mail", "desk"))] == [
        ["tenant", "prompts", "reused", "computed", "evicted", "cached", "cause"],
        ["mail", "400", "25", "%", "300", "200", "64", "-"],
        ["desk", "400", "75", "%", "100", "0", "32", "tool", "order"],
    ]
    assert shown({**FRAME, "tenants": rows[:1]}, TREE) == shown(FRAME, TREE)


def test_the_screen_fits_a_terminal_and_shows_a_tenants_figures() -> None:
    lines = shown(FRAME, TREE, columns=40, rows=11)
    assert len(lines) == 11 and max(map(len, lines)) <= 40
    own = {name: FRAME[name] for name in ("object", "model", "window_seconds", "sources", "hit_rate", "losses")}
    assert any(line.startswith("prompts") for line in shown(own))


@pytest.mark.parametrize(
    ("figures", "tree"),
    [
        ([], None),
        ({}, None),
        ({**FRAME, "losses": [{}]}, None),
        ({**FRAME, "tenants": [{"tenant": "t"}] * 2}, TREE),
        ({**FRAME, "sources": {"shared": -1, "computed": 1}}, {"runs": 3}),
        (FRAME, {**TREE, "runs": [["a", 7, 1, 1, 0, "in_use", False, "", ""]]}),
        (FRAME, {**TREE, "runs": [["a"]]}),
        (FRAME, {**TREE, "runs": [["a", "x", None, None, None, None, None, None, None]]}),
        ({**FLEET, "decisions": [{}]}, None),
        ({**FLEET, "decisions": [{"prompt_tokens": "x", "endpoint": 1, "reason": 2, "candidates": 3}]}, None),
    ],
)
def test_other_answers_are_an_error_in_one_line(figures: Any, tree: Any) -> None:
    with pytest.raises(HeadstartError, match="does not answer as this version does"):
        shown(figures, tree)


def test_a_server_that_is_gone_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    url = unused_url()
    lines = top_verb._patient(url, 40, 20)
    assert "no server answers" in lines[0] and max(map(len, lines)) <= 40 and "--url" in " ".join(lines)
    assert main(["top", "--once", "--url", url]) == 2 and "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (["/venv/bin/python", "/venv/bin/headstart", "serve", "m"], "serve"),
        (["python", "-m", "headstart", "route", "--replica", "x"], "route"),
        (["headstart", "serve"], "serve"),
        (["headstart", "bench", "serve"], None),
        (["vllm", "serve", "m"], None),
        (["grep", "headstart"], None),
        ([], None),
    ],
)
def test_which_processes_serve(words: list[str], verb: str | None) -> None:
    assert serving_verb_of(words) == verb


def test_top_and_ps_find_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    words = [sys.executable, "-m", "headstart", "serve", str(model), "--port", "0", "--num-blocks", "64"]
    with spawn([*words, "--heartbeat-timeout", "600"], tmp_path / "log", truly=True) as server:  # found by its words
        server.wait_ready()
        server.post("/v1/completions", json={"prompt": "the fox and the river " * 8, "max_tokens": 1})
        assert main(["top", "--once", "--url", server.url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"Headstart  tiny  {server.url}" and any("the fox" in line for line in lines)
        assert main(["ps", "--json"]) == 0
        found = {one["url"]: one for one in json.loads(capsys.readouterr().out)}
        mine = found[server.url]
        assert (mine["verb"], mine["state"], mine["model"], mine["pid"]) == (
            "serve",
            "ready",
            "tiny",
            server.process.pid,
        )
        assert main(["ps"]) == 0 and server.url in capsys.readouterr().out
