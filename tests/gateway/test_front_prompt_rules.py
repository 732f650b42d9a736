"""Rules for prompts at a router: equal prompts in other forms share the cache of an engine that knows no rules."""

from collections.abc import Iterator
from typing import Any

import pytest
from gateway.harness import RealReplica, front, run
from server.harness import Server, fake_server

from headstart.gateway.proxy.request_reader import RequestParser

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SYSTEM = "You are a careful agent. Keep to these rules and answer briefly. " * 4


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with fake_server(f"{folder}?step=0.001", tmp_path_factory.mktemp("ruled") / "log") as running:
        yield running


def body(number: int) -> dict[str, Any]:
    system = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};\n{SYSTEM}"
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize("rules", [(), ("billing_header",)], ids=["off", "on"])
def test_a_nonce_costs_the_cache_only_without_its_rule(server: Server, rules: tuple[str, ...]) -> None:
    async def go() -> None:
        async with front(RealReplica(server.url), reader=RequestParser(rules=frozenset(rules))) as router:
            await router.up(1)
            answers = [await router.client.post(CHAT, json=body(100 * len(rules) + number)) for number in (1, 2)]
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            cached = answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > len(SYSTEM) // 2 if rules else cached < 64, cached
            header = answers[1].headers.get("x-headstart-prompt-rules")
            assert header == ("billing_header=1" if rules else None)
            text = (await router.client.get("/metrics")).text
            assert ('headstart:router_prompt_rules_total{rule="billing_header"} 2.0' in text) is bool(rules)

    run(go())


def test_a_stream_and_anthropics_api_have_the_header_too(server: Server) -> None:
    async def go() -> None:
        reader = RequestParser(rules=frozenset(("billing_header", "dates")))
        async with front(RealReplica(server.url), reader=reader) as router:
            await router.up(1)
            streamed = await router.client.post(CHAT, json=body(7) | {"stream": True})
            assert streamed.headers["x-headstart-prompt-rules"] == "billing_header=1"
            system, *rest = body(8)["messages"]
            name = (await router.client.get("/v1/models")).json()["data"][0]["id"]
            sent = {"model": name, "system": system["content"] + "It is 12:30.", "messages": rest, "max_tokens": 1}
            answer = await router.client.post(MESSAGES, json=sent)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-headstart-prompt-rules"] == "billing_header=1, dates=1"

    run(go())
