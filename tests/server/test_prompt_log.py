"""Recent request bodies for the doctor: a tenant's own only, after the rules, bounded, and none by default."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from server.checked_engine import build_checked
from server.harness import Inside, Server, fake_server, inside

from headstart.cli.main import main
from headstart.openai.canonical.prompt_rules import NO_RULES
from headstart.openai.tokenizer.tenant_cache import TENANT_BYTES
from headstart.server.prompt_log import ENTRY_BYTES, LoggedBody, RecentBodyLog

CHAT = "/v1/chat/completions"
RULES = " ".join(f"Rule {name}: never leave the {name} open over night." for name in ("door", "safe", "gate", "well"))


def body(number: int, secret: str = "") -> dict[str, Any]:
    system = f"It is 2026-11-23 11:{number:02d}.\n{RULES} {secret}"
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}], "max_tokens": 1}


def short(number: int) -> dict[str, Any]:
    """A body that fits the checked engine."""
    return {"messages": [{"role": "system", "content": f"It is 11:{number:02d}.\n{RULES[:160]}"}], "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def kept(server: Inside, key: str, **query: Any) -> list[dict[str, Any]]:
    answer = await server.client.get("/v1/cache/requests", params=query, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return [one["body"] for one in answer.json()["data"]]


def test_a_key_sees_its_own_tenants_requests_only(folder: str) -> None:
    async def scenario() -> None:
        keys: dict[str, Any] = {"api_key": ("key-a", "key-b"), "admin_api_key": ("root",), "prompt_log_size": 1 << 20}
        async with inside(f"{folder}?length=4096", **keys) as server:
            for key, secret in (("key-a", "alpha"), ("key-b", "beta"), ("key-a", "gamma")):
                answer = await server.client.post(CHAT, json=body(1, secret), headers=bearer(key))
                assert answer.status_code == 200, answer.text
            assert await kept(server, "key-a") == [body(1, "alpha"), body(1, "gamma")]  # the positive control
            assert await kept(server, "key-b") == [body(1, "beta")]
            assert await kept(server, "root") == [], "an administrator reads no tenant's prompts"
            assert await kept(server, "key-a", last=1) == [body(1, "gamma")]
            for key, status in (("wrong", 401), ("", 401)):
                answer = await server.client.get("/v1/cache/requests", headers=bearer(key))
                assert answer.status_code == status and "alpha" not in answer.text
            refused = await server.client.get("/v1/cache/requests?last=0", headers=bearer("key-a"))
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "last"
            secret_free = await server.client.post(
                CHAT, json=body(2, "bypassed") | {"cache": "bypass"}, headers=bearer("key-a")
            )
            assert secret_free.status_code == 200, secret_free.text
            assert "bypassed" not in json.dumps(await kept(server, "key-a"))

    asyncio.run(scenario())


def test_nothing_is_kept_by_default(server: Server) -> None:
    assert server.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
    answer = server.get("/v1/cache/requests")
    assert answer.status_code == 404 and "--prompt-log-size" in answer.json()["error"]["message"]


def test_the_bytes_of_a_tenant_and_of_all_are_bounded() -> None:
    size = len(json.dumps(body(10)).encode()) + ENTRY_BYTES
    max_bytes = 64 * size
    log = RecentBodyLog(max_bytes, NO_RULES)
    for tenant in "abcdefgh":
        for number in range(32):
            log.add(tenant, LoggedBody(CHAT, json.dumps(body(10 + number)).encode(), ""))
    counts = {tenant: len(log.last_bodies_of_tenant(tenant, 100)) for tenant in "abcdefgh"}
    assert counts["h"] == (max_bytes // 4 - TENANT_BYTES) // size and sum(counts.values()) * size < max_bytes
    assert log.last_bodies_of_tenant("h", 1)[0]["body"] == body(41)


def test_what_is_kept_is_the_prompt_after_the_rules() -> None:
    log = RecentBodyLog(1 << 20, frozenset({"billing_header"}))
    sent = {"messages": [{"role": "system", "content": f"x-anthropic-billing-header: cch=1;\n{RULES}"}]}
    log.add("", LoggedBody(CHAT, json.dumps(sent).encode(), ""))
    assert log.last_bodies_of_tenant("", 1)[0]["body"]["messages"][0]["content"] == RULES


def test_an_explanation_names_field_and_cost_from_the_tenants_own_requests(folder: str) -> None:
    async def scenario() -> None:
        keys: dict[str, Any] = {"api_key": ("key-a", "key-b"), "prompt_log_size": 1 << 20}
        async with inside(folder, build_checked, **keys) as server:
            answers = [
                await server.client.post(CHAT, json=short(number), headers=bearer(key))
                for number, key in ((1, "key-a"), (2, "key-b"), (3, "key-a"))
            ]
            assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
            ids = [answer.json()["id"] for answer in answers]

            async def findings(key: str, **query: Any) -> list[dict[str, Any]]:
                call = server.client.post if "messages" in query else server.client.get
                options: dict[str, Any] = {"json": query} if "messages" in query else {"params": query}
                answer = await call("/v1/cache/explain", headers=bearer(key), **options)
                assert answer.status_code == 200, answer.text
                assert all(found["message"] in answer.json()["message"] for found in answer.json()["findings"])
                return answer.json()["findings"]

            (found,) = await findings("key-a", request_id=ids[2])  # the positive control
            assert (found["cause"], found["field"]) == ("timestamp", "messages[0].content")
            assert 6 <= found["character"] <= 22 and found["tokens"] == pytest.approx(40, abs=8)
            assert "costs about" in found["message"] and "move it behind" in found["message"]
            assert await findings("key-b", request_id=ids[1]) == [], "the only near requests are another tenant's"
            assert await findings("key-a", **short(4)) and await findings("key-b", **short(4))
            assert await findings("key-a", request_id=ids[0]) == []

    asyncio.run(scenario())


def test_lint_against_a_server_names_what_its_requests_lose(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(f"{folder}?length=4096", tmp_path / "log", prompt_log_size=1 << 20) as server:
        for number in (1, 2, 3):
            assert server.post(CHAT, json=body(number)).status_code == 200
        assert main(["lint", "--against", server.url, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["requests"] == 3 and [one["cause"] for one in report["causes"]] == ["timestamp"]
        more = tmp_path / "more.jsonl"
        more.write_text(json.dumps(body(4)))
        assert main(["lint", str(more), "--against", server.url, "--last", "1"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("2 requests") and "timestamp" in text
