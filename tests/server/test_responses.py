"""protocol: OpenAI's shapes, as the openai package itself reads them."""

from typing import Any

import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizer_folders import BYTE_LEVEL, METASPACE, build

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.errors import (
    ConfigError,
    DrainingError,
    EngineDeadError,
    HeadstartError,
    InvalidRequestError,
    QueueFullError,
    RequestTooLargeError,
)
from headstart.core.request import SamplingDefaults
from headstart.openai import responses as protocol
from headstart.openai.json_pieces import encode_json
from headstart.openai.text.generation import OutputDelta
from headstart.openai.text.logprob_table import TokenEntry
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.server.apis import choice_apis as choices

TOKENIZER = Tokenizer(build(BYTE_LEVEL))
HEAD = {"id": "cmpl-1", "created": 1_700_000_000, "model": "tiny", "system_fingerprint": None}
USAGE = protocol.usage_object(10, 3, PromptTokenBreakdown(shared=8, computed=2))
THE, FOX = TOKENIZER.encode("the fox")
ENTRIES = (TokenEntry(THE, -0.1, ((THE, -0.1), (FOX, -2.0)), 0), TokenEntry(FOX, -3.0, ((THE, -0.2),), 3))
DELTA = OutputDelta("the fox", (THE, FOX), ENTRIES, "stop")
CHOICE: dict[str, Any] = {"logprobs": True, "token_ids": True}


def test_a_completion_is_what_the_openai_package_expects() -> None:
    answer = choices.answer_document(
        HEAD, "text_completion", [choices.completion_choice(0, DELTA, TOKENIZER, **CHOICE)], USAGE
    )
    read = Completion.model_validate_json(encode_json(answer), strict=True)
    assert read.choices[0].text == "the fox" and read.choices[0].finish_reason == "stop"
    logprobs = read.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["the", " fox"] and logprobs.text_offset == [0, 3]
    assert logprobs.token_logprobs == [-0.1, -3.0]
    assert logprobs.top_logprobs == [{"the": -0.1, " fox": -2.0}, {" fox": -3.0, "the": -0.2}]


def test_a_chat_completion_is_what_the_openai_package_expects() -> None:
    answer = choices.answer_document(
        HEAD, "chat.completion", [choices.chat_choice(0, DELTA, TOKENIZER, **CHOICE)], USAGE
    )
    read = ChatCompletion.model_validate_json(encode_json(answer), strict=True)
    choice = read.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "the fox")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first, second = choice.logprobs.content
    assert (first.token, first.bytes) == ("the", list(b"the"))
    assert [top.token for top in first.top_logprobs] == ["the", " fox"]
    assert (second.token, second.logprob) == (" fox", -3.0)


def test_chunks_of_a_chat_are_what_the_openai_package_expects() -> None:
    sent = [
        choices.chat_first_choice(0),
        choices.chat_chunk_choice(0, OutputDelta("the"), TOKENIZER, logprobs=False, token_ids=False),
        choices.chat_chunk_choice(0, DELTA, TOKENIZER, **CHOICE),
    ]
    chunks = [choices.answer_document(HEAD, "chat.completion.chunk", [choice], None) for choice in sent]
    chunks.append(choices.answer_document(HEAD, "chat.completion.chunk", [], USAGE))
    read = [ChatCompletionChunk.model_validate_json(encode_json(chunk), strict=True) for chunk in chunks]
    assert read[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in read[:3]] == ["", "the", "the fox"]
    assert [chunk.choices[0].finish_reason for chunk in read[:3]] == [None, None, "stop"]
    assert read[3].choices == [] and read[3].usage is not None and read[3].usage.total_tokens == 13


def test_events_are_one_line() -> None:
    assert b"\n" not in encode_json(choices.answer_document(HEAD, "text_completion", [{"text": "a\nb"}], None))


def test_usage_always_tells_the_cached_tokens() -> None:
    read = CompletionUsage.model_validate(protocol.usage_object(10, 3, PromptTokenBreakdown(computed=10)))
    assert read.total_tokens == 13
    assert read.prompt_tokens_details is not None and read.prompt_tokens_details.cached_tokens == 0


def test_usage_tells_where_cached_tokens_came_from() -> None:
    read = CompletionUsage.model_validate(protocol.usage_object(10, 3, PromptTokenBreakdown(4, 2, 0, 1, 3)))
    assert read.prompt_tokens_details is not None and read.prompt_tokens_details.cached_tokens == 7
    sources = {"pinned_tokens": 4, "shared_tokens": 2, "store_tokens": 0, "followed_tokens": 1}
    assert read.prompt_tokens_details.model_extra == sources


def test_tokens_that_are_no_text_are_written_as_bytes() -> None:
    tokenizer = Tokenizer(build(METASPACE))
    byte = tokenizer.backend.token_to_id("<0xE2>")
    assert protocol.token_text_or_bytes(tokenizer, byte) == "bytes:\\xe2"
    logprobs = choices.chat_logprobs([TokenEntry(byte, -1.0, (), 0)], tokenizer)
    assert logprobs["content"][0]["bytes"] == [0xE2]


def test_the_first_token_of_an_echo_has_no_logprob() -> None:
    logprobs = choices.completion_logprobs([TokenEntry(THE, None, (), 0)], TOKENIZER)
    assert logprobs == {"tokens": ["the"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequestError("x", param="n"), 400, "invalid_request_error", "invalid_value"),
        (RequestTooLargeError("x"), 400, "invalid_request_error", "context_length_exceeded"),
        (InvalidRequestError("x", code="model_not_found"), 404, "not_found_error", "model_not_found"),
        (QueueFullError("x"), 429, "rate_limit_error", "queue_full"),
        (DrainingError("x"), 503, "server_error", "draining"),
        (EngineDeadError("x"), 503, "server_error", "engine_dead"),
    ],
)
def test_every_error_has_its_status_and_code(error: HeadstartError, status: int, kind: str, code: str) -> None:
    got, body = protocol.error_status_and_object(error)
    assert (got, body["error"]["type"], body["error"]["code"]) == (status, kind, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_errors_of_the_operator_are_not_told_to_clients() -> None:
    status, body = protocol.error_status_and_object(ConfigError("/secret/path is missing"))
    assert status == 500 and "secret" not in body["error"]["message"]


def test_logprobs_of_the_prompt_are_told_by_token_id() -> None:
    delta = DELTA._replace(prompt_logprobs=(TokenEntry(FOX, -3.0, ((THE, -0.1),), 0),))
    choice = choices.completion_choice(0, delta, TOKENIZER, **CHOICE)
    expected = {
        str(THE): {"logprob": -0.1, "decoded_token": "the"},
        str(FOX): {"logprob": -3.0, "decoded_token": " fox"},
    }
    assert choice["prompt_logprobs"] == [None, expected]
    assert "prompt_logprobs" not in choices.completion_choice(0, DELTA, TOKENIZER, **CHOICE)


def test_a_model_is_what_the_openai_package_expects() -> None:
    def listed(*exceptions: str) -> protocol.Json:
        defaults = SamplingDefaults(top_k=5)
        return protocol.model_list_response(
            [
                protocol.model_object(
                    "m",
                    5,
                    64,
                    block_size=16,
                    num_blocks=7,
                    max_num_batched_tokens=64,
                    tokenizer="",
                    defaults=defaults,
                    exceptions=exceptions,
                )
            ]
        )

    assert Model.model_validate(listed()["data"][0]).id == "m" and listed()["object"] == "list"
    assert listed()["data"][0]["exact_reuse"] == {"holds": True, "exceptions": []}
    assert listed("cuda")["data"][0]["exact_reuse"] == {"holds": False, "exceptions": ["cuda"]}


def test_token_lists_are_told_with_their_count() -> None:
    assert protocol.tokenize_response([3, 4], TOKENIZER, 64, with_texts=False)["count"] == 2
    assert protocol.detokenization_response("x") == {"prompt": "x"}
