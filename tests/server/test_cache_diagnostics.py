"""Cache diagnostics and prewarming over HTTP, against the types of the current openai and anthropic packages.

The real engine with a tiny model and two tenants.
"""

import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response as OpenAIResponse
from server.harness import PATIENCE, Server, parse_events, spawn, wait_for
from server.test_response_models import fits

from headstart.apis import answer_schemas as schema
from headstart.model.weights.init_model import write_random_model
from headstart.server.cache_api import cache_schema

ANN, BOB = {"authorization": "Bearer ann"}, {"authorization": "Bearer bob"}
RULES = "You are the guide of a museum of rivers. Name one river, and never guess. " * 4
TOOL = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    room = tmp_path_factory.mktemp("diagnostics")
    model = write_random_model("tiny", room / "tiny", std=0.2, dtype="float32", progress=False)
    options = ["--port", "0", "--num-blocks", "512", "--heartbeat-timeout", "600", "--tool-call-parser", "hermes"]
    keys = ["--api-key", "ann", "--api-key", "bob"]
    with spawn([sys.executable, "-m", "headstart", "serve", str(model), *options, *keys], room / "log") as running:
        yield running.wait_ready()


def post(server: Server, path: str, body: dict[str, Any], who: dict[str, str] = ANN) -> dict[str, Any]:
    answer = server.post(path, json=body, headers=who)
    assert answer.status_code == 200, answer.text
    return answer.json()


def respond(server: Server, text: str, who: dict[str, str] = ANN, **fields: Any) -> dict[str, Any]:
    body = {"instructions": RULES, "input": text, "max_output_tokens": 4, "temperature": 0, **fields}
    answer = post(server, "/v1/responses", body, who)
    fits(schema.RESPONSE, answer)
    assert OpenAIResponse.model_validate(answer, strict=False)
    return answer


def compared(server: Server, text: str, earlier: str, who: dict[str, str] = ANN, **fields: Any) -> dict[str, Any]:
    return respond(server, text, who, prompt_cache_options={"comparison_response_id": earlier}, **fields)


def test_responses_say_what_ended_the_reuse(server: Server) -> None:
    first = respond(server, "Which one is the longest?")
    assert first["prompt_cache_diagnostics"] is None and "cache_diagnostics" not in first
    assert first["prompt_cache_options"] == {"mode": "implicit", "ttl": "30m", "comparison_response_id": None}
    again = compared(server, "Which one is the longest?", first["id"])
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert again["prompt_cache_options"]["comparison_response_id"] == first["id"]
    changed = compared(server, "Which one is the longest?", first["id"], instructions="Today. " + RULES)
    told = changed["prompt_cache_diagnostics"]
    assert (told["type"], told["reason"]) == ("cache_miss", "input_changed")
    assert told["cache_missed_tokens"] > 0 and told["comparison_reusable_tokens"] < first["usage"]["input_tokens"]
    own = changed["cache_diagnostics"]
    assert (own["result"], own["cause"], own["field"]) == ("miss", "system_changed", "instructions")
    assert own["compared_tokens"] == first["usage"]["input_tokens"]
    typed = OpenAIResponse.model_validate(changed)
    assert typed.prompt_cache_diagnostics is not None and typed.prompt_cache_diagnostics.type == "cache_miss"
    assert typed.prompt_cache_diagnostics.reason == "input_changed"


def test_the_next_turn_of_a_stored_response_is_a_hit(server: Server) -> None:
    first = respond(server, "Which river ends in the Black Sea, then?")
    options = {"comparison_response_id": first["id"]}
    later = respond(server, "And another?", previous_response_id=first["id"], prompt_cache_options=options)
    assert later["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    details = later["usage"]["input_tokens_details"]
    assert details["cached_tokens"] >= later["cache_diagnostics"]["reusable_tokens"] > 0
    assert details["cache_write_tokens"] == later["usage"]["input_tokens"] // 16 * 16 - details["cached_tokens"]


def test_changed_tools_are_named(server: Server) -> None:
    tools = [{"type": "function", "name": name, "parameters": TOOL} for name in ("rivers", "lakes")]
    first = respond(server, "Which one?", tools=tools)
    changed = compared(server, "Which one?", first["id"], tools=tools[::-1])
    assert changed["prompt_cache_diagnostics"]["reason"] == "tools_changed"
    assert (changed["cache_diagnostics"]["cause"], changed["cache_diagnostics"]["field"]) == (
        "tools_reordered",
        "tools",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_another_tenant_finds_nothing_and_the_same_tenant_does(server: Server, stream: bool) -> None:
    first = respond(server, "Where is the source of the Danube?")
    own = compared(server, "Where is the end of the Danube?", first["id"])
    assert own["cache_diagnostics"]["result"] in ("hit", "miss") and own["cache_diagnostics"]["common_tokens"] > 16
    body = {"instructions": RULES, "input": "Where is the source of the Danube?", "max_output_tokens": 2}
    body |= {"prompt_cache_options": {"comparison_response_id": first["id"]}, "stream": stream}
    answer = server.post("/v1/responses", json=body, headers=BOB)
    event = parse_events(answer.text)[-1] if stream else {"response": answer.json()}
    assert event["response"]["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    told = event["response"]["cache_diagnostics"]
    assert (told["result"], told["compared_tokens"], told["common_tokens"]) == ("not_found", 0, 0)
    unknown = compared(server, "Where is the source of the Danube?", "resp_" + "0" * 32)
    assert unknown["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert {**told, "compared_id": "", "cached_tokens": 0} == {
        **unknown["cache_diagnostics"], "compared_id": "", "cached_tokens": 0
    }  # fmt: skip


def test_streamed_responses_have_the_diagnostics_at_their_end(server: Server) -> None:
    first = respond(server, "Which one is the widest of all?")
    body = {"instructions": "x" + RULES, "input": "Which?", "max_output_tokens": 2, "stream": True}
    body |= {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    events = parse_events(server.post("/v1/responses", json=body, headers=ANN).text)
    for event in events:
        fits(schema.RESPONSE_EVENT, event)
    assert events[0]["response"]["prompt_cache_diagnostics"] is None
    assert events[-1]["response"]["prompt_cache_diagnostics"]["type"] == "cache_miss"
    assert list(events[-1]["response"])[-1] == "usage"


def chat(server: Server, content: str, who: dict[str, str] = ANN, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": content}]
    return post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 3, **fields}, who)


def test_chats_have_the_diagnostics_under_our_own_name(server: Server) -> None:
    first = chat(server, "Which is the coldest river of Siberia?")
    options = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    later = chat(server, "Which is the warmest lake of Africa?", **options)
    fits(schema.CHAT_COMPLETION, later)
    assert later["cache_diagnostics"]["cause"] == "messages_changed"
    assert later["cache_diagnostics"]["field"] == "messages[1]"
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Which?"}]
    body = {"messages": messages, "max_tokens": 3, "stream": True, **options}
    chunks = parse_events(server.post("/v1/chat/completions", json=body, headers=ANN).text)[:-1]
    for chunk in chunks:
        fits(schema.CHAT_CHUNK, chunk)
    assert chunks[0]["cache_diagnostics"]["compared_id"] == first["id"]
    assert all("cache_diagnostics" not in chunk for chunk in chunks[1:])
    assert "cache_diagnostics" not in first
    other = chat(server, "Which is the warmest lake of Africa?", BOB, **options)
    assert other["cache_diagnostics"]["result"] == "not_found"


def test_completions_compare_prompts(server: Server) -> None:
    first = post(server, "/v1/completions", {"prompt": RULES + "One.", "max_tokens": 2})
    options = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    later = post(server, "/v1/completions", {"prompt": "Two. " + RULES, "max_tokens": 2, **options})
    fits(schema.COMPLETION, later)
    assert later["cache_diagnostics"]["cause"] == "prompt_changed"
    again = post(server, "/v1/completions", {"prompt": RULES + "One.", "max_tokens": 2, **options})
    assert again["cache_diagnostics"]["result"] == "hit"


def test_messages_have_anthropics_diagnostics(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="ann", timeout=PATIENCE) as client:
        ask: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "system": RULES}
        asked: Any = [{"role": "user", "content": "Which river is in Rome, the city of hills and cats?"}]
        first = client.messages.create(**ask, messages=asked, diagnostics={"previous_message_id": None})
        assert first.diagnostics is None
        link: Any = {"previous_message_id": first.id}
        turns: Any = [*asked, {"role": "assistant", "content": "Tiber"}, {"role": "user", "content": "And in Paris?"}]
        assert client.messages.create(**ask, messages=turns, diagnostics=link).diagnostics is None
        changed = client.messages.create(**{**ask, "system": "It is noon. " + RULES}, messages=asked, diagnostics=link)
        assert changed.diagnostics is not None and changed.diagnostics.cache_miss_reason is not None
        assert changed.diagnostics.cache_miss_reason.type == "system_changed"
        assert changed.diagnostics.cache_miss_reason.cache_missed_input_tokens > 0
        with client.messages.stream(
            **ask, messages=[{"role": "user", "content": "Now which one?"}], diagnostics=link
        ) as stream:
            final = stream.get_final_message()
        assert final.diagnostics is not None and final.diagnostics.cache_miss_reason is not None
        assert final.diagnostics.cache_miss_reason.type == "messages_changed"
    with anthropic.Anthropic(base_url=server.url, api_key="bob", timeout=PATIENCE) as client:
        other = client.messages.create(**ask, messages=asked, diagnostics=link)
        assert other.diagnostics is not None and other.diagnostics.cache_miss_reason is not None
        assert other.diagnostics.cache_miss_reason.type == "previous_message_not_found"


def generated(server: Server) -> float:
    text = server.get("/metrics", headers=ANN).text
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_t")
    )


@pytest.mark.parametrize("stream", [False, True])
def test_prewarming_computes_and_generates_nothing(server: Server, stream: bool) -> None:
    before = generated(server)
    question = f"Which of them is the deepest, when streamed {stream}?"
    with openai.OpenAI(base_url=server.url + "/v1", api_key="ann", timeout=PATIENCE) as client:
        ask: Any = {
            "model": "tiny",
            "instructions": RULES,
            "input": question,
            "prompt_cache_options": {"prewarm": True},
        }
        if stream:
            with client.responses.stream(**ask) as events:
                warm = events.get_final_response()
        else:
            warm = client.responses.create(**ask)
        assert warm.status == "completed" and warm.output == [] and warm.usage is not None
        assert warm.usage.output_tokens == 0 and warm.usage.input_tokens > 32
        details = warm.usage.input_tokens_details
        assert details.cached_tokens + details.cache_write_tokens == warm.usage.input_tokens // 16 * 16
        assert generated(server) == before
        ask |= {"prompt_cache_options": {"comparison_response_id": warm.id}, "max_output_tokens": 2}
        later = client.responses.create(**ask)
        assert later.usage is not None
        assert later.usage.input_tokens_details.cached_tokens >= warm.usage.input_tokens // 16 * 16 - 1
        assert later.prompt_cache_diagnostics is not None and later.prompt_cache_diagnostics.type == "cache_hit"
        turn = client.responses.create(model="tiny", input="And?", previous_response_id=warm.id, max_output_tokens=2)
        assert turn.usage is not None


@pytest.mark.parametrize("stream", [False, True])
def test_messages_with_max_tokens_0_prewarm(server: Server, stream: bool) -> None:
    before = generated(server)
    asked: Any = [{"role": "user", "content": f"Streamed: {stream}. " + "Which of them is the oldest? " * 3}]
    with anthropic.Anthropic(base_url=server.url, api_key="ann", timeout=PATIENCE) as client:
        ask: Any = {"model": "tiny", "system": RULES, "messages": asked, "cache_control": {"type": "ephemeral"}}
        if stream:
            with client.messages.stream(**ask, max_tokens=0) as events:
                warm = events.get_final_message()
        else:
            warm = client.messages.create(**ask, max_tokens=0)
        assert warm.content == [] and warm.stop_reason == "max_tokens" and warm.usage.output_tokens == 0
        assert warm.usage.cache_creation_input_tokens and generated(server) == before
        later = client.messages.create(**ask, max_tokens=2)
        assert (later.usage.cache_read_input_tokens or 0) >= warm.usage.cache_creation_input_tokens
    body = {"system": RULES, "messages": asked, "max_tokens": 0, "model": "tiny"}
    fits(schema.MESSAGE, post(server, "/v1/messages", body))


@pytest.mark.parametrize("stream", [False, True])
def test_chats_prewarm_too(server: Server, stream: bool) -> None:
    before = generated(server)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": RULES + str(stream)}], "stream": stream}
    body |= {"prompt_cache_options": {"prewarm": True}, "max_tokens": 9, "min_tokens": 3}
    answer = server.post("/v1/chat/completions", json=body, headers=ANN)
    assert answer.status_code == 200, answer.text
    if stream:
        choices = [choice for event in parse_events(answer.text)[:-1] for choice in event["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == ""
        assert choices[-1]["finish_reason"] == "length"
    else:
        (choice,) = fits(schema.CHAT_COMPLETION, answer.json())["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert generated(server) == before


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt": "a", "echo": True, "prompt_cache_options": {"prewarm": True}}, "echo"),
    ({"prompt": "a", "cache": "bypass", "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"prompt": "a", "prompt_cache_options": {"prewarm": 1}}, "prompt_cache_options.prewarm"),
    ({"prompt": "a", "prompt_cache_options": {"comparison_response_id": "x" * 129}},
     "prompt_cache_options.comparison_response_id"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
])  # fmt: skip
def test_what_cannot_be_prewarmed_or_compared_is_refused(server: Server, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", json=body, headers=ANN)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_changing_front_shows_in_the_statistics_of_the_cache(server: Server) -> None:
    long_rules = "".join(
        f"Room {room} of the museum shows a river, and its guide answers in a word. " for room in range(9)
    )
    for minute in range(6):
        front = f"It is 2026-11-23 10:{minute:02d}:07 now.\n"
        system = {"role": "system", "content": front + long_rules}
        body = {"messages": [system, {"role": "user", "content": "Which?"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", json=body, headers=ANN).status_code == 200

    def losses() -> Any:
        found = server.get("/v1/cache/stats", headers=ANN).json()
        fits(cache_schema.CACHE_STATISTICS, found)
        return found if "timestamp" in found["losses"]["causes"] else None

    found = wait_for(losses)
    assert 0 < found["losses"]["avoidable_share"] < 1 and found["losses"]["examined_requests"] >= 2
    assert all(row["avoidable"] <= row["examined"] for row in found["tenants"].values())
    assert "museum" not in str(found)
    lines = server.get("/metrics", headers=ANN).text.splitlines()
    named = [
        line for line in lines if line.startswith("headstart:avoidable_tokens_by_cause_total") and "timestamp" in line
    ]
    assert len(named) == 1 and float(named[0].rsplit(" ", 1)[1]) > 0
