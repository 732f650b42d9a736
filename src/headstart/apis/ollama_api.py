"""Ollama's API as server and router know it: errors are one text, streams are lines of JSON."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headstart.apis.api import LINES, AnyJsonObject, Api, StreamEnding
from headstart.ollama.ollama_answers import encode_json_lines, ollama_error_body
from headstart.ollama.ollama_request import is_raw_completion, translate_chat_body, translate_generate_body
from headstart.openai.bounds import RequestBounds
from headstart.openai.responses import Json

OLLAMA_TREE = "/api/"
LATEST = ":latest"  # a tag that clients of Ollama add to the name of a model


def _failed(status: int, body: Json, request_id: str, num_events: int) -> bytes:
    return encode_json_lines([ollama_error_body(status, body, request_id)])


def _refused(status: int, body: bytes, request_id: str, num_events: int) -> bytes:
    return body.replace(b"\n", b" ") + b"\n"


def _generate(values: Mapping[str, Any], bounds: RequestBounds) -> Mapping[str, Any]:
    """Return the chat of a body; a raw prompt is the text of a chat whose template adds nothing."""
    return translate_generate_body({**values, "raw": False} if is_raw_completion(values) else values, bounds).values


_END = StreamEnding(re.compile(rb'"done"\s*:\s*true|^\s*\{\s*"error"'), _failed, _refused, media_type=LINES, ping=b"")
_ANSWER = msgspec.json.Decoder(AnyJsonObject)
OLLAMA_CHAT = Api(
    path="/api/chat",
    other_paths=("/api/show", "/api/embed", "/api/embeddings"),
    get_paths=("/api/tags", "/api/ps", "/api/version"),
    answer=_ANSWER,
    chat_values=lambda values, bounds: translate_chat_body(values, bounds).values,
    error_body=ollama_error_body,
    end=_END,
    streams_by_default=True,
)
OLLAMA_GENERATE = Api(
    path="/api/generate",
    operation="text_completion",
    answer=_ANSWER,
    chat_values=_generate,
    error_body=ollama_error_body,
    end=_END,
    streams_by_default=True,
)
