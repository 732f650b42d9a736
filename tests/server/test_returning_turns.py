"""Turns that come back have the tokens of their text, in all three chat APIs, streamed or not.

The model's weights are random, so the tokens of its answers are seldom those of the tokenizer: `test_control` shows it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from server.harness import Server, parse_events

TOKENS = 24


class Answer(NamedTuple):
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int


Ask = Callable[[Server, list[dict[str, str]], bool], Answer]


def _events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    answer = server.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


def chat(server: Server, messages: list[dict[str, str]], stream: bool) -> Answer:
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
    if stream:
        events = _events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})[:-1]
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        usage = events[-1]["usage"]
    else:
        answer = server.post("/v1/chat/completions", json=body).json()
        text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(text, usage["prompt_tokens"], cached, usage["completion_tokens"])


def responses(server: Server, messages: list[dict[str, str]], stream: bool) -> Answer:
    body = {"input": messages, "max_output_tokens": TOKENS, "temperature": 0, "store": False}
    if stream:
        answer = _events(server, "/v1/responses", body)[-1]["response"]
    else:
        answer = server.post("/v1/responses", json=body).json()
    usage = answer["usage"]
    text = answer["output"][0]["content"][0]["text"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Answer(text, usage["input_tokens"], cached, usage["output_tokens"])


def messages_api(server: Server, messages: list[dict[str, str]], stream: bool) -> Answer:
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "model": "tiny"}
    if stream:
        events = _events(server, "/v1/messages", body)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        text = "".join(delta.get("text", "") for delta in deltas)
        usage = next(event["usage"] for event in events if event["type"] == "message_delta")
    else:
        answer = server.post("/v1/messages", json=body).json()
        text, usage = answer["content"][0]["text"], answer["usage"]
    cached, written = usage["cache_read_input_tokens"], usage.get("cache_creation_input_tokens") or 0
    return Answer(text, usage["input_tokens"] + cached + written, cached, usage["output_tokens"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, responses, messages_api])
def test_a_turn_that_comes_back_has_the_tokenizers_tokens_whatever_was_generated(
    real_server: Server, ask: Ask, stream: bool
) -> None:
    """Otherwise one request with odd tokens for a text would change the prompts of later ones."""
    messages = [{"role": "user", "content": f"By {ask.__name__} {stream}: name a river that ends in the sea, please."}]
    for _ in range(3):
        answer = ask(real_server, messages, stream)
        assert answer.num_prompt_tokens == real_server.post("/tokenize", json={"messages": messages}).json()["count"]
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And another one?"}]


def test_control(real_server: Server) -> None:
    """The tokens of an answer differ from those of its text."""
    messages = [{"role": "user", "content": "By the control: name a river that ends in the sea, please."}]
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    choice = real_server.post("/v1/chat/completions", json=body).json()["choices"][0]
    text = choice["message"]["content"]
    canonical = real_server.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert canonical != choice["token_ids"]
