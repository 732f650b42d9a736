"""MessageEventBuilder: the output of one request of the Messages API, as a whole message and as the events of a
stream."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.openai.chat.chat_parts import ChatOutputPart, ChatOutputPartKind, ChatOutputParts, ChatOutputPartUpdate
from headstart.openai.responses import Json
from headstart.openai.text.generation import OutputDelta
from headstart.openai.tools.call_arguments import parse_call_arguments


@dataclass(frozen=True, slots=True)
class CacheBreakpointSummary:
    """The cache breakpoints of a prompt. `num_tokens` up to the last one, whole blocks only; 0 without any."""

    num_tokens: int = 0
    is_long: bool = False  # the longest lifetime is an hour


class MessageEventBuilder:
    """Builder of one message.

    `marks`: the cache breakpoints of its prompt. `fills_context`: fewer tokens than max_tokens fit into the context.
    """

    def __init__(
        self, message_id: str, model: str, marks: CacheBreakpointSummary, *, fills_context: bool = False
    ) -> None:
        self.parts = ChatOutputParts()
        self._message_id = message_id
        self._model = model
        self._marks = marks
        self._cut_reason = "model_context_window_exceeded" if fills_context else "max_tokens"

    def opening_events(self, usage: Json) -> list[Json]:
        """Return the event that begins a stream; `usage` as of a chat."""
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def add(self, delta: OutputDelta) -> list[Json]:
        """Process a delta and return its events."""
        return [event for step in self.parts.add_delta(delta) for event in self._of_step(step)]

    def closing_events(self, usage: Json) -> list[Json]:
        """Return the last events of a finished message."""
        last = self.parts.current_part()
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            *([] if last is None else _end_of(last)),
            {"type": "message_delta", "delta": delta, "usage": self._usage(usage)},
            {"type": "message_stop"},
        ]

    def message(self, usage: Json) -> Json:
        """Return the finished message."""
        return self._message([_block(part) for part in self.parts.parts], *self._stop(), usage)

    def _message(self, content: list[Json], reason: str | None, sequence: str | None, usage: Json) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Json) -> Json:
        """Return the usage. The three counts of input tokens add up to those of the prompt."""
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        created = max(self._marks.num_tokens - cached, 0)
        an_hour = created if self._marks.is_long else 0
        return {
            "input_tokens": prompt - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created - an_hour,
                "ephemeral_1h_input_tokens": an_hour,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.parts.num_reasoning_tokens},
        }

    def _stop(self) -> tuple[str, str | None]:
        """Return stop_reason and stop_sequence."""
        parts = self.parts
        if parts.finish_reason == "length":
            return self._cut_reason, None
        if parts.has_calls:
            return "tool_use", None
        if isinstance(parts.stop_reason, str):
            return "stop_sequence", parts.stop_reason
        return "end_turn", None

    def _of_step(self, step: ChatOutputPartUpdate) -> Iterator[Json]:
        part = step.part
        if step.closed is not None:
            yield from _end_of(step.closed)
        if step.is_new:
            yield {"type": "content_block_start", "index": part.index, "content_block": _block(part, is_empty=True)}
        if step.text:
            yield {"type": "content_block_delta", "index": part.index, "delta": _delta(part.kind, step.text)}


def _end_of(part: ChatOutputPart) -> Iterator[Json]:
    if part.kind is ChatOutputPartKind.REASONING:
        delta = {"type": "signature_delta", "signature": _signature(part.text)}
        yield {"type": "content_block_delta", "index": part.index, "delta": delta}
    yield {"type": "content_block_stop", "index": part.index}


def _signature(thinking: str) -> str:
    """Return a signature, which clients need to send the thinking back. It is not checked."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def _delta(kind: ChatOutputPartKind, text: str) -> Json:
    match kind:
        case ChatOutputPartKind.TOOL_CALL:
            return {"type": "input_json_delta", "partial_json": text}
        case ChatOutputPartKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case ChatOutputPartKind.CONTENT:
            return {"type": "text_delta", "text": text}


def _block(part: ChatOutputPart, *, is_empty: bool = False) -> Json:
    """Return the content block of a part; `is_empty`: as it is before any text."""
    text = "" if is_empty else part.text
    match part.kind:
        case ChatOutputPartKind.TOOL_CALL:
            assert part.call is not None
            return {
                "type": "tool_use",
                "id": part.call.call_id,
                "name": part.call.name,
                "input": parse_call_arguments(text),
            }
        case ChatOutputPartKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": "" if is_empty else _signature(text)}
        case ChatOutputPartKind.CONTENT:
            return {"type": "text", "text": text, "citations": None}
