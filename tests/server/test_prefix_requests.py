"""Pinned prefixes over HTTP: loading, adding, listing, removing, who may, and what a request then finds."""

import asyncio
from typing import Any

import pytest
from server.checked_engine import BLOCK_SIZE, build_checked
from server.harness import PATIENCE, Inside, inside

from headstart.config.options import PrefixEntry, TenantEntry
from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.prefix_tokens import parse_prefix

BOUNDS = RequestBounds(vocab_size=450, max_model_len=256, eos_token_ids=())
FIXED = list(range(2, 42))  # ten blocks
TEXT = "play some music in the living room, please; set an alarm for 7:30 tomorrow"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def cached(server: Inside, prompt: Any, key: str = "") -> int:
    body = {"prompt": prompt, "max_tokens": 1}
    answer = await server.client.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def listed(server: Inside, key: str = "") -> dict[str, dict[str, Any]]:
    answer = await server.client.get("/v1/prefixes", headers=bearer(key))
    assert answer.json()["object"] == "list"
    return {entry["name"]: entry for entry in answer.json()["data"]}


def test_entries_are_warm_before_the_first_request_and_bad_ones_stop_nothing(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = (
        PrefixEntry("text", text=TEXT),
        PrefixEntry("#2", error="it has no name; give it one"),
        PrefixEntry("nobody", "stranger", text=TEXT),
        PrefixEntry("short", text="a"),
        PrefixEntry("text", text="again " + TEXT),
        PrefixEntry("chat", messages=({"role": "system", "content": TEXT},)),
        PrefixEntry("odd", messages=({"role": "owner", "content": TEXT},)),
        PrefixEntry("huge", text=TEXT * 100),
    )

    async def run() -> None:
        async with inside(folder, build_checked, prefixes=entries) as server:
            found = (await server.client.get("/v1/prefixes")).json()["data"]
            assert [(entry["name"], entry["state"]) for entry in found] == [
                *(("text", "ready"), ("chat", "ready")),
                *((name, "malformed") for name in ("#2", "nobody", "short", "text", "odd", "huge")),
            ]
            assert await cached(server, TEXT + " and one more") == found[0]["tokens"] >= 16
            question = {"messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": "why"}]}
            answer = await server.client.post("/v1/chat/completions", json={**question, "max_tokens": 1})
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] == details["pinned_tokens"] == found[1]["tokens"] >= 16

    asyncio.run(run())
    lines = capsys.readouterr().err
    for complaint in (
        "prefix '#2' is not there: it has no name",
        "prefix 'nobody' is not there: tenant 'stranger' is not one of those in headstart.toml: none",
        "prefix 'short' is not there: prefix 'short' has",
        "prefix 'text' is not there: there is a prefix 'text' already",
        "prefix 'odd' is not there: messages[0].role is 'owner'",
        "prefix 'huge' is not there: ",
        "2 of 8 prefixes are warm after",
    ):
        assert complaint in lines
    assert TEXT not in lines


def test_a_prefix_is_added_listed_used_and_removed(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            assert await listed(server) == {}
            answer = await server.client.post("/v1/prefixes", json={"name": "fixed", "token_ids": [*FIXED, 99]})
            assert (answer.status_code, answer.json()["state"]) == (201, "ready")
            assert await cached(server, [*FIXED, 99, 98]) == len(FIXED)
            entry = (await listed(server))["fixed"]
            assert (entry["tokens"], entry["blocks"]) == (len(FIXED), len(FIXED) // BLOCK_SIZE)
            assert (entry["hits"], entry["tokens_saved"], entry["tenant"]) == (1, len(FIXED), "")
            assert abs(entry["last_used"] - asyncio.get_running_loop().time()) > 1e6  # seconds since 1970
            answer = await server.client.delete("/v1/prefixes/fixed")
            assert answer.json() == {"name": "fixed", "deleted": True} and await listed(server) == {}
            answer = await server.client.delete("/v1/prefixes/fixed")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "prefix_not_found")

    asyncio.run(run())


def test_adding_need_not_wait(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked) as server:
            body = {"name": "fixed", "token_ids": FIXED, "wait": False}
            answer = await server.client.post("/v1/prefixes", json=body)
            assert (answer.status_code, answer.json()["state"]) == (201, "warming")
            async with asyncio.timeout(PATIENCE):
                while (await listed(server))["fixed"]["state"] != "ready":
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_one_that_cannot_be_computed_is_told_and_gone(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, prefixes=(PrefixEntry("text", text=TEXT),)) as server:
            answer = await server.client.post("/v1/prefixes", json={"name": "bad", "token_ids": [*FIXED[:-1], 449]})
            assert answer.status_code == 500
            assert "prefix 'bad' could not be computed: not finite" in answer.json()["error"]["message"]
            assert set(await listed(server)) == {"text"}

    asyncio.run(run())


def test_a_corrected_entry_takes_the_place_of_the_malformed_one(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, prefixes=(PrefixEntry("p", error="no"), PrefixEntry("q"))) as server:
            assert {entry["state"] for entry in (await listed(server)).values()} == {"malformed"}
            assert (await server.client.post("/v1/prefixes", json={"name": "p", "token_ids": FIXED})).status_code == 201
            assert (await listed(server))["p"]["state"] == "ready"
            assert (await server.client.delete("/v1/prefixes/q")).status_code == 200
            assert set(await listed(server)) == {"p"}

    asyncio.run(run())


def test_a_reset_keeps_pinned_prefixes_unless_asked(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, prefixes=(PrefixEntry("text", text=TEXT),)) as server:
            own = list(range(100, 140))
            await cached(server, own)
            assert (await server.client.post("/reset_prefix_cache")).status_code == 200
            assert await cached(server, own) == 0 and await cached(server, TEXT + " now") >= 16
            assert (await server.client.post("/reset_prefix_cache?pinned=true")).status_code == 200
            assert await cached(server, TEXT + " now") >= 16  # computed again, before or with it
            answer = await server.client.post("/reset_prefix_cache?pinned=1")
            assert answer.json()["error"]["message"] == "pinned is '1'; it must be true or false"

    asyncio.run(run())


def test_a_tenants_prefix_is_its_own_and_a_public_one_is_everyones(folder: str) -> None:
    entries = (PrefixEntry("public", text=TEXT), PrefixEntry("own", "acme", text="for acme alone: " + TEXT))
    tenants = (TenantEntry("acme", ("a1", "a2")), TenantEntry("other", ("o",)))

    async def run() -> None:
        keys = {"admin_api_key": ("root",), "api_key": ("k",)}
        async with inside(folder, build_checked, prefixes=entries, tenants=tenants, **keys) as server:
            for key in ("a1", "a2", "o", "k", "root"):
                assert await cached(server, TEXT + " now", key) >= 16, key
            prompt = "for acme alone: " + TEXT + " now"
            assert await cached(server, prompt, "o") == await cached(server, prompt, "k") == 0
            assert await cached(server, prompt, "a1") >= 32 and await cached(server, prompt, "a2") >= 32
            assert (await listed(server, "root"))["own"]["hits"] == 2
            body = {"name": "x", "token_ids": FIXED, "tenant": "stranger"}
            answer = await server.client.post("/v1/prefixes", json=body, headers=bearer("root"))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tenant")

    asyncio.run(run())


def test_only_administrators_may_look_or_touch(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, build_checked, api_key=("k",), admin_api_key=("root",)) as server:
            calls = (("GET", ""), ("POST", ""), ("DELETE", "/fixed"), ("DELETE", "/"), ("GET", "/fixed"))
            for method, path in calls:
                for key, status in (("", 401), ("wrong", 401), ("k", 403)):
                    answer = await server.client.request(method, "/v1/prefixes" + path, headers=bearer(key))
                    assert answer.status_code == status, (method, path, key)
            body = {"name": "fixed", "token_ids": FIXED}
            assert (await server.client.post("/v1/prefixes", json=body, headers=bearer("root"))).status_code == 201
            assert (await server.client.delete("/v1/prefixes/fixed", headers=bearer("root"))).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "name is missing"),
        ({"name": 3, "text": "x"}, "name is 3"),
        ({"name": "x" * 65, "text": "x"}, "name has 65 characters"),
        ({"name": "x"}, "exactly one of text, messages and token_ids"),
        ({"name": "x", "text": "x", "token_ids": [1]}, "exactly one of"),
        ({"name": "x", "text": 3}, "text is 3; it must be a string"),
        ({"name": "x", "text": "\ud800"}, "lone surrogate"),
        ({"name": "x", "messages": []}, "messages is empty"),
        ({"name": "x", "token_ids": [450]}, "token_ids is 450; it must be between 0 and 449"),
        ({"name": "x", "token_ids": [1] * 257}, "token_ids has 257 entries"),
        ({"name": "x", "token_ids": "1"}, "token_ids is '1'"),
        ({"name": "x", "text": "x", "wait": 1}, "wait is 1; it must be true or false"),
        ({"name": "x", "text": "x", "tennant": "a"}, "tennant is unknown"),
        ({"name": "x", "text": "x", "tenant": ["a"]}, "tenant is a list"),
    ],
)
def test_a_wrong_body_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_prefix(values, BOUNDS)
    assert complaint in str(caught.value)
