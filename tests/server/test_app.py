"""The routes of a whole server: shapes, ids, limits of the queue, health, and a process free of torch."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.fake_engine import MAX_MODEL_LEN, Gate
from server.harness import PATIENCE, ROOT, Server, address_of, fake_command, fake_server, inside, spawn, until, wait_for


def test_a_completion_says_what_it_read_and_what_was_cached(server: Server) -> None:
    prompt = "the quick brown fox jumps over the lazy dog and runs away from the big bad bear " * 2
    first, second = (server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4}).json() for _ in range(2))
    assert first["object"] == "text_completion" and first["id"].startswith("cmpl-") and first["model"] == "fake"
    assert prompt.startswith(first["choices"][0]["text"]) and first["choices"][0]["finish_reason"] == "length"
    usage = first["usage"]
    assert usage["completion_tokens"] == 4 and usage["total_tokens"] == usage["prompt_tokens"] + 4
    details = usage["prompt_tokens_details"]
    assert details.pop("cache_write_tokens") == usage["prompt_tokens"] // 16 * 16
    assert set(details.values()) == {0} and "cached_tokens" in details
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16 > 0
    assert first["id"] != second["id"]


def test_prompts_times_n_come_back_in_order(server: Server) -> None:
    body = {"prompt": [[5, 6], [7, 8]], "n": 2, "max_tokens": 2, "return_token_ids": True, "logprobs": 1}
    answer = server.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[5, 6], [5, 6], [7, 8], [7, 8]]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[-0.5, -0.5]] * 4
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 8


def test_echo_and_a_stop_string(server: Server) -> None:
    body = {"prompt": "the quick brown fox", "max_tokens": 30, "stop": "brown", "echo": True}
    choice = server.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "the quick brown foxthe quick " and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "brown"


def test_a_chat_answers_as_the_assistant(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "the quick"}], "max_completion_tokens": 3}
    answer = server.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 3


def test_models_tokenize_detokenize_and_version(server: Server) -> None:
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["fake"] and listed[0]["max_model_len"] == MAX_MODEL_LEN
        assert client.get("/v1/models/fake").json() == listed[0]
        missing = client.get("/v1/models/a/b")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        text = "the quick brown é 東京"
        tokens = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
        chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert chat["count"] > 2
        assert re.fullmatch(r"\d+\.\d+.*", client.get("/version").json()["version"])
        assert {"/v1/completions", "/v1/chat/completions"} <= set(client.get("/openapi.json").json()["paths"])


def test_health_and_life_are_told(server: Server) -> None:
    for path in ("/health", "/readyz", "/livez"):
        assert server.get(path).json() == {"status": "ok"}


def test_unknown_routes_and_methods_are_openai_errors(server: Server) -> None:
    with server.client() as client:
        missing = client.get("/v1/engines")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_route")
        assert client.post("/v1/completions/", json={}).status_code == 404
        wrong = client.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [("my-id_1.2", "my-id_1.2"), ("x" * 500, "x" * 128), ("a\tb<c>", "abc"), ("", None), ("é", None)],
)
def test_the_request_id_is_echoed_clean_or_made_up(server: Server, sent: str, expected: str | None) -> None:
    answer = server.get("/nowhere", headers={"x-request-id": sent.encode()})
    found = answer.headers["x-request-id"]
    assert found == expected if expected else re.fullmatch(r"req-[0-9a-f]{32}", found)


def test_requests_with_one_label_do_not_meet(server: Server) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers={"x-request-id": "same"}, timeout=PATIENCE) as client:
            bodies = [{"prompt": [i, i + 1], "max_tokens": 8, "return_token_ids": True} for i in range(40)]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            assert [a.json()["choices"][0]["token_ids"] for a in answers] == [[i, i + 1] * 4 for i in range(40)]

    asyncio.run(run())


def test_one_access_line_per_request_and_no_content(server: Server) -> None:
    canary = "canary" * 5
    body = {"prompt": f"the quick {canary}", "max_tokens": 2, "user": canary, "cache_salt": canary}
    headers = {"x-request-id": "logged", "authorization": f"Bearer {canary}"}
    assert server.post("/v1/completions", json=body, headers=headers).status_code == 200
    lines = wait_for(lambda: [line for line in server.log.splitlines() if '"logged"' in line])
    (record,) = map(json.loads, lines)
    assert record["event"] == "request" and record["status"] == 200 and record["path"] == "/v1/completions"
    assert record["completion_tokens"] == 2 and record["finish_reason"] == "length" and record["ttft_ms"] >= 0
    assert (
        record["queue_ms"] >= 0 and record["cached_tokens"] == record["pinned_tokens"] == record["shared_tokens"] == 0
    )
    assert record["computed_tokens"] == record["prompt_tokens"]
    assert canary not in server.log and canary not in server.get("/metrics").text


def test_the_queue_is_bounded_in_requests_and_in_tokens(folder: str, gate: Gate) -> None:
    async def run(options: dict[str, int], prompt: list[int]) -> None:
        async with inside(gate.holds(folder, 0), **options) as server:
            assert await server.engine.call("reset_prefix_cache")
            first = asyncio.create_task(server.complete([1, 2], max_tokens=1))
            await until(lambda: server.engine.num_awaiting_first_token)
            second = await server.complete(prompt, max_tokens=1)
            assert second.status_code == 429 and second.json()["error"]["code"] == "queue_full"
            assert int(second.headers["retry-after"]) >= 1
            assert second.json()["error"]["type"] == "rate_limit_error"
            gate.open()
            assert (await first).status_code == 200
            # alone, even what exceeds the bound gets its turn
            assert (await server.complete(prompt, max_tokens=1)).status_code == 200

    asyncio.run(run({"max_num_queued_reqs": 1}, [3]))
    gate.close()
    asyncio.run(run({"max_num_queued_tokens": 4}, [3] * 5))


def test_while_loading_the_server_says_so(folder: str, tmp_path) -> None:
    command = fake_command(f"{folder}?load=1000", port=0)
    with spawn(command, tmp_path / "log") as server:
        url = wait_for(lambda: address_of(server.process.pid))
        assert httpx.get(f"{url}/livez", timeout=PATIENCE).status_code == 200
        for path in ("/health", "/v1/models", "/metrics"):
            answer = httpx.get(url + path, timeout=PATIENCE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        assert server.stop() == 0 and "stopped while loading" in server.log


def test_a_port_in_use_is_one_line_and_code_2_before_anything_loads(server: Server, folder: str) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    command = fake_command(f"{folder}?load=1000", port=port)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"port {port}" in done.stderr and "in use" in done.stderr and "--port" in done.stderr


@pytest.mark.parametrize(
    ("query", "options", "message"),
    [
        ("config=1", {}, "there is no such model; name another"),
        ("", {"api_key": ("a",), "admin_api_key": ("a",)}, "has a key that --api-key has already"),
        ("", {"api_key": ("",)}, "--api-key has an empty key"),
        ("", {"host": "256.1.1.1"}, "no address to listen on"),
    ],
)
def test_options_that_cannot_work_are_one_line_and_code_2(
    folder: str, tmp_path, query: str, options: dict, message: str
) -> None:
    with spawn(fake_command(f"{folder}?{query}", **options), tmp_path / "log") as server:
        assert server.wait() == 2
        assert message in server.log and "Traceback" not in server.log and server.log.count("\n") == 1


def test_the_http_process_never_imports_torch() -> None:
    code = "import sys, headstart.server.run_server, headstart.cli.build_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}).returncode == 0


def test_statistics_are_written_when_there_was_traffic(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "log", stats_interval=0.2, access_log="none") as server:

        def told() -> list[dict[str, Any]]:
            """The lines that count prompts, when everything is over."""
            lines = [json.loads(line) for line in server.log.splitlines() if '"statistics"' in line]
            return (
                [line for line in lines if line["hit_rate"] is not None] if lines and not lines[-1]["running"] else []
            )

        server.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 5})
        (record,) = wait_for(told)
        assert record["generated_tokens_per_s"] > 0 and record["hit_rate"] == 0
        assert record["hit_rate_shared"] == record["hit_rate_pinned"] == 0 and record["prefill_redundancy"] == 1
        assert '"request"' not in server.log
