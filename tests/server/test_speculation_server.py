"""`headstart serve --speculative-config`: streams, usage and metrics when several tokens come in one step."""

import json
import sys
from pathlib import Path
from typing import Any

from server.harness import Server, spawn
from server.test_server_metrics import samples

from headstart.model.weights.init_model import write_random_model

BODY: dict[str, Any] = {
    "prompt": list(range(40)),
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
}


def streamed(server: Server, body: dict[str, Any]) -> tuple[str, list[str], dict[str, int]]:
    """Text, logged tokens and usage of a stream."""
    text, tokens, usage = "", list[str](), dict[str, int]()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for line in server.post("/v1/completions", json=asked).text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["text"]
            tokens += (choice["logprobs"] or {}).get("tokens", [])
    return text, tokens, usage


def test_an_answer_that_repeats_an_earlier_one_is_drafted_and_the_same(tmp_path: Path) -> None:
    model = write_random_model("tiny", tmp_path / "tiny", std=0.2, dtype="float32", progress=False)
    options = ["--port", "0", "--num-blocks", "128", "--max-model-len", "256", "--heartbeat-timeout", "600"]
    options += ["--speculative-config", '{"method": "ngram"}']
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options], tmp_path / "log") as running:
        server = running.wait_ready()
        first = server.post("/v1/completions", json=BODY).json()
        steps = samples(server)["headstart:steps_total"]
        text, tokens, usage = streamed(server, BODY)
        (choice,) = first["choices"]
        assert (text, tokens) == (choice["text"], choice["logprobs"]["tokens"])
        assert usage["completion_tokens"] == first["usage"]["completion_tokens"] == len(tokens) == 40
        cut = server.post("/v1/completions", json={**BODY, "stop": [text[20:24]]}).json()
        assert cut["choices"][0]["finish_reason"] == "stop" and text.startswith(cut["choices"][0]["text"])
        found = samples(server)
        assert found["headstart:steps_total"] - steps < 40
        assert found["headstart:spec_decode_num_accepted_tokens_total"] > 20
        assert found["headstart:spec_decode_num_draft_tokens_total"] >= 20
        assert found["headstart:spec_decode_num_drafts_total"] >= 2
