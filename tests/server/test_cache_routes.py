"""/v1/cache/stats and /v1/cache/explain over HTTP: what is told, to whom, and in which words."""

import asyncio
from typing import Any

import httpx
from server.checked_engine import BLOCK_SIZE, build_checked
from server.harness import Inside, inside

KEYS: dict[str, Any] = {"api_key": ("key-a", "key-b"), "admin_api_key": ("root",)}
WORDS = "the quick brown fox jumps over the lazy dog and runs through the old forest until it is dark again "
MONDAY, TUESDAY = WORDS + "on Monday at noon", WORDS + "on Tuesday at noon"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(server: Inside, prompt: Any, key: str = "", **fields: Any) -> dict[str, Any]:
    headers = bearer(key) if key else {}
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    answer = await server.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def explain(server: Inside, key: str = "", **asked: Any) -> httpx.Response:
    headers = bearer(key) if key else {}
    if "request_id" in asked:
        return await server.client.get("/v1/cache/explain", params=asked, headers=headers)
    return await server.client.post("/v1/cache/explain", json=asked, headers=headers)


def test_a_request_is_explained_with_the_texts_where_it_parts(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked) as server:
            monday = await complete(server, MONDAY)
            tuesday = await complete(server, TUESDAY)
            found = (await explain(server, request_id=tuesday["id"])).json()
            assert (found["object"], found["reason"], found["request_id"]) == (
                "cache.explanation",
                "diverged",
                tuesday["id"],
            )
            details = tuesday["usage"]["prompt_tokens_details"]
            del details["cache_write_tokens"]
            assert found["sources"] == {**details, "computed_tokens": found["prompt_tokens"] - details["cached_tokens"]}
            near = found["near_match"]
            assert near["request_id"] == monday["id"]
            assert 0 <= near["common_tokens"] - found["reused_tokens"] < BLOCK_SIZE
            assert near["text_before"].endswith("on") or near["text_before"].endswith("on ")
            assert (
                "Tue" in near["text_before"][-3:] + near["text"]
                and "Mon" in near["text_before"][-3:] + near["other_text"]
            )
            assert len(near["text"]) <= 40 and near["token"] != near["other_token"]
            for word in (f"request {monday['id']}", repr(near["token"]["text"]), repr(near["other_token"]["text"])):
                assert word in found["message"]

    asyncio.run(scenario())


def test_a_prompt_or_a_conversation_is_explained_without_being_run(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked) as server:
            fresh = (await explain(server, prompt=MONDAY)).json()
            assert (fresh["reason"], fresh["request_id"], fresh["sources"]) == ("never_seen", None, None)
            await complete(server, MONDAY)
            known = (await explain(server, prompt=MONDAY, max_tokens=3)).json()
            assert known["reason"] in ("tail", "complete") and known["now"]["cached_tokens"] > 0
            assert known["now"]["cached_tokens"] + known["now"]["computed_tokens"] == known["prompt_tokens"]
            chat = await explain(server, messages=[{"role": "user", "content": "the fox"}])
            assert chat.status_code == 200 and chat.json()["prompt_tokens"] > 0
            stats = (await server.client.get("/v1/cache/stats")).json()
            assert stats["requests"] == {"running": 0, "waiting": 0, "failed": 0} and stats["generation_tokens"] == 1

    asyncio.run(scenario())


def test_several_choices_are_explained_by_the_first_and_several_prompts_one_at_a_time(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked) as server:
            answer = await complete(server, MONDAY, n=2)
            assert (await explain(server, request_id=answer["id"])).json()["request_id"] == answer["id"] + "-0"
            assert (await explain(server, request_id=answer["id"] + "-1")).status_code == 200
            refused = await explain(server, prompt=["the", "fox"])
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"

    asyncio.run(scenario())


def test_what_cannot_be_explained_is_refused(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked) as server:
            for asked, status, code in (
                ({"request_id": "cmpl-nobody"}, 404, "unknown_request"),
                ({"request_id": "x" * 200}, 400, "invalid_value"),
                ({"request_id": ""}, 400, "invalid_value"),
                ({"prompt": 3}, 400, "invalid_value"),
                ({}, 400, "missing_required_parameter"),
                ({"prompt": "the", "model": "other"}, 404, "model_not_found"),
            ):
                answer = await explain(server, **asked)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), asked

    asyncio.run(scenario())


def test_a_tenant_learns_nothing_of_others_and_an_administrator_all(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked, **KEYS) as server:
            secret = await complete(server, MONDAY, "key-a")
            own = await explain(server, "key-a", request_id=secret["id"])
            assert own.status_code == 200 and own.json()["reason"] == "never_seen"
            stranger = await explain(server, "key-b", request_id=secret["id"])
            nobody = await explain(server, "key-b", request_id="cmpl-nobody")
            assert stranger.status_code == nobody.status_code == 404
            assert (
                stranger.json()["error"]["message"].replace(secret["id"], "cmpl-nobody")
                == (nobody.json()["error"]["message"])
            )
            asked = (await explain(server, "key-b", prompt=TUESDAY)).json()
            assert (asked["reason"], asked["near_match"], asked["reused_tokens"]) == ("never_seen", None, 0)
            near = (await explain(server, "key-a", prompt=TUESDAY)).json()["near_match"]  # the positive control
            assert near["request_id"] == secret["id"] and "Mon" in near["text_before"][-3:] + near["other_text"]
            told = (await explain(server, "root", request_id=secret["id"])).json()
            assert told["request_id"] == secret["id"]
            assert (await explain(server, "", request_id=secret["id"])).status_code == 401

    asyncio.run(scenario())


def test_another_tenant_that_evicted_a_prompt_is_not_named(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked, **KEYS) as server:
            for prompt in (MONDAY, [1] * 250, [2] * 100):
                await complete(server, prompt, "key-a")
            floods = [(await complete(server, [i] * 250, "key-b"))["id"] for i in (3, 4)]
            found = (await explain(server, "key-a", prompt=MONDAY)).json()
            assert found["reason"] == "evicted" and found["near_match"] is None
            assert (found["eviction"]["by"], found["eviction"]["by_another_tenant"]) == (None, True)
            assert "another tenant" in found["message"] and not any(flood in found["message"] for flood in floods)
            told = (await explain(server, "root", prompt=MONDAY)).json()
            assert told["eviction"] is None  # in the administrator's own domain it never was

    asyncio.run(scenario())


def test_without_keys_only_this_machine_may_read_prompts(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked) as server:
            answer = await complete(server, MONDAY)
            elsewhere = await server.client.get(
                "/v1/cache/explain", params={"request_id": answer["id"]}, headers={"x-forwarded-for": "10.0.0.1"}
            )
            assert elsewhere.status_code == 403

    asyncio.run(scenario())


def test_the_statistics_grow_by_what_was_asked_and_always_add_up(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked, **KEYS) as server:
            get = lambda: server.client.get("/v1/cache/stats", headers=bearer("root"))  # noqa: E731
            before = (await get()).json()
            first = await complete(server, MONDAY, "key-a")
            await asyncio.gather(*(complete(server, MONDAY, "key-a") for _ in range(3)))
            after = (await get()).json()
            prompt = first["usage"]["prompt_tokens"]
            tokens = after["prompt_tokens"]
            assert before["prompt_tokens"]["total"] == 0 and tokens["total"] == 4 * prompt
            assert tokens["cached"] == sum(tokens[source] for source in ("pinned", "shared", "store", "followed"))
            assert tokens["cached"] + tokens["computed"] == tokens["total"]
            assert after["prefill_redundancy"] == after["prefill_tokens"] / after["ideal_tokens"] == 1
            blocks = after["blocks"]
            assert blocks["total"] == sum(blocks[state] for state in ("scratch", "idle", "pinned_idle", "referenced"))
            (mine,) = after["tenants"].values()
            assert mine["cached"] == tokens["cached"] and mine["computed"] == tokens["computed"]
            assert (await server.client.get("/v1/cache/stats", headers=bearer("key-a"))).status_code == 403

    asyncio.run(scenario())


def test_without_administrators_a_tenant_reads_no_row_but_its_own(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked, api_key=("key-a", "key-b")) as server:
            for key in ("key-a", "key-b"):
                await complete(server, MONDAY, key)
            found = (await server.client.get("/v1/cache/stats", headers=bearer("key-a"))).json()
            assert len(found["tenants"]) == 1
            text = (await server.client.get("/metrics", headers=bearer("key-a"))).text
            assert "headstart:kv_blocks" in text and "tenant_prompt_tokens" not in text

    asyncio.run(scenario())


def test_the_metrics_say_the_same(folder: str) -> None:
    async def scenario() -> None:
        async with inside(folder, build_checked) as server:
            for _ in range(2):
                await complete(server, MONDAY)
            text = (await server.client.get("/metrics")).text
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            stats = (await server.client.get("/v1/cache/stats")).json()
            for source in ("pinned", "shared", "store", "followed", "computed"):
                name = f'headstart:prompt_tokens_total{{model_name="checked",source="{source}"}}'
                assert float(values[name]) == stats["prompt_tokens"][source]
            for state in ("scratch", "idle", "pinned_idle", "referenced"):
                assert (
                    float(values[f'headstart:kv_blocks{{model_name="checked",state="{state}"}}'])
                    == (stats["blocks"][state])
                )
            for cause in ("capacity", "failed", "reset"):
                assert f'headstart:evictions_total{{cause="{cause}",model_name="checked"}}' in values
            hits = 'vllm:prompt_tokens_by_source_total{model_name="checked",source="local_cache_hit"}'
            assert float(values[hits]) == stats["prompt_tokens"]["cached"] > 0
            for name in ("queue_time", "prefill_time", "inference_time"):
                count = f'vllm:request_{name}_seconds_count{{model_name="checked"}}'
                assert float(values[count]) == 2
            assert float(values['vllm:request_queue_time_seconds_sum{model_name="checked"}']) < 30

    asyncio.run(scenario())
