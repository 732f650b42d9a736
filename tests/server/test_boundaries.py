"""The end of tools and system messages, which the front end tells an engine of a hybrid: found by the second chat."""

import sys
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest
from model.tiny import make_checkpoint
from server.harness import Server, spawn
from tokenizer_folders import BYTE_LEVEL, KINDS, TEMPLATE, build

from headstart import LLM
from headstart.common_prefix import common_prefix_length
from headstart.model.weights.init_model import write_random_model
from headstart.openai.bounds import RequestBounds
from headstart.openai.engine_requests import RequestOrigin, build_chat_requests, encode_chat
from headstart.openai.request_bodies import parse_chat
from headstart.openai.tokenizer.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
BOUNDS = RequestBounds(vocab_size=100_000, max_model_len=100_000, min_boundary=20)
SYSTEM = {"role": "system", "content": "You run the lazy dog away from the big bad bear, please. " * 4}
TOOL = {"name": "run", "description": "Run away from it.", "parameters": {"type": "object", "properties": {}}}
BLOCK = 16


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def told(
    tokenizer: Tokenizer, messages: list[Any], bounds: RequestBounds = BOUNDS, **fields: Any
) -> "tuple[int, array[int]]":
    """Return the boundary that the engine is told, and the prompt."""
    body = parse_chat({"messages": messages, **fields}, bounds)
    _, (first, *others) = build_chat_requests(body, tokenizer, bounds, RequestOrigin("x"))
    assert all(request.boundary == first.boundary for request in others)
    assert first.prompt == encode_chat(body, tokenizer, bounds)
    return first.boundary, first.prompt


@pytest.mark.parametrize("template", [None, *sorted(path.name for path in TEMPLATES.glob("*.jinja"))])
@pytest.mark.parametrize("tools", [False, True])
def test_the_boundary_is_where_chats_with_other_messages_part(template: str | None, *, tools: bool) -> None:
    source = TEMPLATE if template is None else (TEMPLATES / template).read_text(encoding="utf-8")
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer(build(BYTE_LEVEL), named_tokens=named, chat_template=source, eos_token_ids=(1,))
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]} if tools and "tools" in source else {}
    (boundary, prompt), (_, other) = (
        told(tokenizer, [SYSTEM, user(text)], n=2, **fields) for text in ("run away", "the fox")
    )
    assert abs(boundary - common_prefix_length(prompt, other)) <= 1
    assert boundary > 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["\u00a7 3", "the fox", "", "\n\nplay", "1"])
def test_the_boundary_holds_with_any_tokenizer_and_any_message(kind: str, first: str) -> None:
    tokenizer = Tokenizer(build(kind), chat_template=TEMPLATE, eos_token_ids=(1,))
    (boundary, prompt), (_, other) = (told(tokenizer, [SYSTEM, user(text)]) for text in (first, "quick brown"))
    assert abs(boundary - common_prefix_length(prompt, other)) <= (3 if first.startswith("\u00a7") else 1)


def test_no_boundary_is_told_where_nothing_or_little_is_shared() -> None:
    tokenizer = Tokenizer(build(BYTE_LEVEL), chat_template=TEMPLATE, eos_token_ids=(1,))
    assert told(tokenizer, [user("the fox")])[0] == 0
    assert told(tokenizer, [SYSTEM])[0] == 0  # it is the end of the prompt
    assert told(tokenizer, [{"role": "system", "content": "Hi"}, user("the fox " * 30)])[0] == 0
    assert told(tokenizer, [SYSTEM, user("the fox")], RequestBounds(vocab_size=1000, max_model_len=1000))[0] == 0


def test_a_template_that_refuses_another_message_hides_the_boundary_only() -> None:
    refusing = TEMPLATE + "{% if messages[-1]['content'] == '\u00a7' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = Tokenizer(build(BYTE_LEVEL), chat_template=refusing, eos_token_ids=(1,))
    assert told(tokenizer, [SYSTEM, user("the fox")])[0] == 0


# ------------------------------------------------------------------------------------------------------ whole engines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid with a tokenizer and a chat template."""
    folder = write_random_model("tiny", tmp_path_factory.mktemp("boundaries") / "model", progress=False)
    return make_checkpoint("lfm2", folder, vocab_size=512)


def words(seed: int, num: int) -> str:
    rng = Random(seed)
    return " ".join(rng.choice(["fox", "dog", "bear", "runs", "quick", "lazy"]) for _ in range(num))


def test_the_second_chat_of_an_engine_in_process_begins_behind_the_system_message(model: Path) -> None:
    with LLM(str(model), num_blocks=300, dtype="float32") as llm:
        assert llm.info.checkpoint_tokens > 0
        system = {"role": "system", "content": words(0, 60)}
        chats = [[system, user(words(seed, 20))] for seed in (1, 2)]
        first, second = (llm.chat(chat, {"temperature": 0, "max_tokens": 4}, progress=False)[0] for chat in chats)
        shared = common_prefix_length(first.prompt_token_ids, second.prompt_token_ids)
        assert first.num_cached_tokens == 0 and second.num_cached_tokens == shared // BLOCK * BLOCK > 50


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = ["--port", "0", "--num-blocks", "512", "--max-model-len", "512", "--dtype", "float32"]
    command = [sys.executable, "-m", "headstart", "serve", str(model), *options]
    with spawn(command, tmp_path_factory.mktemp("log") / "log") as running:
        yield running.wait_ready()


def test_the_second_chat_of_a_server_begins_behind_tools_and_system_message(server: Server) -> None:
    cached, ids = list[int](), list[str]()
    for seed in (1, 2):
        messages = [{"role": "system", "content": words(3, 60)}, user(words(seed, 20))]
        answer = server.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4}).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        ids.append(answer["id"])
    assert cached[0] == 0 and cached[1] > 50
    explained = server.get(f"/v1/cache/explain?request_id={ids[1]}").json()
    assert (explained["reason"], explained["reused_tokens"]) == ("diverged", cached[1]), explained


def test_a_breakpoint_inside_a_message_is_a_boundary(server: Server) -> None:
    document = {"type": "text", "text": words(5, 80), "cache_control": {"type": "ephemeral"}}
    read = list[int]()
    for question in ("fox", "bear and dog"):
        content = [document, {"type": "text", "text": question}]
        body = {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        read.append(server.post("/v1/messages", json=body).json()["usage"]["cache_read_input_tokens"])
    assert read[0] == 0 and read[1] > 60
