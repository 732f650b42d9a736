"""Answers of Ollama's API: whole ones, the lines of a stream, and descriptions of the served model."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headstart.openai.chat.chat_parts import ChatOutputPart, ChatOutputPartKind, ChatOutputParts
from headstart.openai.json_pieces import encode_json
from headstart.openai.responses import Json
from headstart.openai.text.generation import OutputDelta
from headstart.openai.tools.call_arguments import parse_call_arguments


class RequestDurations(NamedTuple):
    """Durations of a request, in seconds."""

    total: float
    prompt: float  # of prefill
    output: float  # of decoding


class OllamaAnswerBuilder:
    """The output of one request. `is_chat`: of /api/chat, else of /api/generate."""

    def __init__(self, model: str, created: float, *, is_chat: bool) -> None:
        """`created`: seconds since 1970."""
        self.parts = ChatOutputParts()
        self._head: Json = {"model": model, "created_at": format_timestamp(created)}
        self._is_chat = is_chat

    def add(self, delta: OutputDelta) -> list[Json]:
        """Process a delta and return its lines. A call is a line once it is complete."""
        lines: list[Json] = []
        for step in self.parts.add_delta(delta):
            if step.closed is not None and step.closed.kind is ChatOutputPartKind.TOOL_CALL:
                lines.append(self._line(calls=[_call(step.closed)]))
            if step.part.kind is ChatOutputPartKind.CONTENT and step.text:
                lines.append(self._line(content=step.text))
            elif step.part.kind is ChatOutputPartKind.REASONING and step.text:
                lines.append(self._line(thinking=step.text))
        return lines

    def closing_events(self, usage: Json, durations: RequestDurations) -> list[Json]:
        """Return the last lines of a stream; `usage` as of a chat."""
        last = self.parts.current_part()
        calls = (
            [] if last is None or last.kind is not ChatOutputPartKind.TOOL_CALL else [self._line(calls=[_call(last)])]
        )
        return [*calls, self._done(self._line(), usage, durations)]

    def whole(self, usage: Json, durations: RequestDurations) -> Json:
        """Return the finished answer."""
        parts = self.parts.parts
        texts = {kind: "".join(part.text for part in parts if part.kind is kind) for kind in ChatOutputPartKind}
        calls = [_call(part) for part in parts if part.kind is ChatOutputPartKind.TOOL_CALL]
        line = self._line(
            content=texts[ChatOutputPartKind.CONTENT], thinking=texts[ChatOutputPartKind.REASONING], calls=calls
        )
        return self._done(line, usage, durations)

    def _line(self, *, content: str = "", thinking: str = "", calls: list[Json] | None = None) -> Json:
        more: Json = {"thinking": thinking} if thinking else {}
        more |= {"tool_calls": calls} if calls else {}
        if not self._is_chat:
            return {**self._head, "response": content, **more, "done": False}
        return {**self._head, "message": {"role": "assistant", "content": content, **more}, "done": False}

    def _done(self, line: Json, usage: Json, durations: RequestDurations) -> Json:
        return {
            **line,
            "done": True,
            "done_reason": "length" if self.parts.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(durations.total),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_cached_count": usage["prompt_tokens_details"]["cached_tokens"],
            "prompt_eval_duration": _nanoseconds(durations.prompt),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(durations.output),
        }


def encode_json_lines(lines: list[Json]) -> bytes:
    """Return lines of JSON."""
    return b"".join(encode_json(line) + b"\n" for line in lines)


def ollama_error_body(status: int, body: Json, request_id: str) -> Json:
    """Return OpenAI's error object in Ollama's form: a text. Code and type are Headstart's own, for routers."""
    error = body["error"]
    return {"error": error["message"], "code": error["code"], "type": error["type"]}


def ollama_model_list(cards: Iterator[Mapping[str, Any]] | list[Mapping[str, Any]]) -> Json:
    """Return the answer of /api/tags and /api/ps from the objects of /v1/models. Sizes are not known: 0."""
    return {"models": [_tag(card) for card in cards]}


def ollama_model_description(card: Mapping[str, Any], capabilities: list[str], template: str) -> Json:
    """Return the answer of /api/show from the object of /v1/models."""
    tag = _tag(card)
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in card["default_sampling_params"].items()),
        "template": template,
        "details": tag["details"],
        "model_info": {"general.architecture": "headstart", "headstart.context_length": card["max_model_len"]},
        "capabilities": capabilities,
        "modified_at": tag["modified_at"],
    }


def format_timestamp(seconds: float) -> str:
    """Return a time since 1970 in Ollama's form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _tag(card: Mapping[str, Any]) -> Json:
    unknown: Json = dict.fromkeys(("parent_model", "format", "family"), "")
    unknown |= {"families": [], "parameter_size": "", "quantization_level": ""}
    return {
        "name": card["id"],
        "model": card["id"],
        "modified_at": format_timestamp(card.get("created") or 0),
        "size": 0,
        "digest": "",
        "details": unknown,
    }


def _call(part: ChatOutputPart) -> Json:
    assert part.call is not None
    return {"function": {"name": part.call.name, "arguments": parse_call_arguments(part.text)}}


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
