"""ResponseEventBuilder: the output of one response, as a whole object and as the events of a stream."""

from collections.abc import Iterator

from headstart.openai.chat.chat_parts import ChatOutputPart, ChatOutputPartKind, ChatOutputParts, ChatOutputPartUpdate
from headstart.openai.responses import Json
from headstart.openai.responses_api.response_objects import ResponseTemplate, content_part
from headstart.openai.text.generation import OutputDelta

_INCOMPLETE = "max_output_tokens"
_TEXT_EVENTS = {
    ChatOutputPartKind.CONTENT: "response.output_text",
    ChatOutputPartKind.REASONING: "response.reasoning_text",
}
_FUNCTION = "response.function_call_arguments"
_CUSTOM = "response.custom_tool_call_input"


class ResponseEventBuilder:
    """Builder of one response. Every event of a stream has the next sequence number."""

    def __init__(self, shape: ResponseTemplate, *, generates: bool = True) -> None:
        """`generates` False: the request only prewarms, and its response is complete without output."""
        self._generates = generates
        self.parts = ChatOutputParts()
        self._shape = shape
        self.num_events = 0

    def opening_events(self) -> list[Json]:
        """Return the events that begin a stream."""
        started = self._shape.response("in_progress", [])
        return [
            self._event("response.created", {"response": started}),
            self._event("response.in_progress", {"response": started}),
        ]

    def add(self, delta: OutputDelta) -> list[Json]:
        """Process a delta and return its events."""
        return [event for step in self.parts.add_delta(delta) for event in self._of_step(step)]

    def closing_events_and_response(self, usage: Json) -> tuple[list[Json], Json]:
        """Return the last events of a finished response, and the response. An empty one has a message without text."""
        events: list[Json] = []
        if not self.parts.parts and self._generates:
            part = ChatOutputPart(ChatOutputPartKind.CONTENT, 0)
            self.parts.parts.append(part)
            events += self._begin(part)
        last = self.parts.current_part()
        response = self.finished_response(usage)
        status = "incomplete" if self._is_incomplete else "completed"
        if last is not None:
            events += self._end(last, status)
        events.append(self._event(f"response.{status}", {"response": response}))
        return events, response

    def failure_events(self, error: Json) -> list[Json]:
        """Return the event that ends a stream whose response failed; `error` has code and message."""
        output = [self._shape.item(part, "incomplete") for part in self.parts.parts]
        response = self._shape.response("failed", output, error=error)
        return [self._event("response.failed", {"response": response})]

    def finished_response(self, usage: Json) -> Json:
        """Return the finished response; an empty one has a message without text. Changes nothing."""
        parts = self.parts.parts or [ChatOutputPart(ChatOutputPartKind.CONTENT, 0)] * self._generates
        output = [self._shape.item(part, "completed") for part in parts]
        if not self._is_incomplete:
            return self._shape.response("completed", output, usage)
        output[-1]["status"] = "incomplete"
        return self._shape.response("incomplete", output, usage, reason=_INCOMPLETE)

    @property
    def _is_incomplete(self) -> bool:
        return self._generates and self.parts.finish_reason == "length"

    def _of_step(self, step: ChatOutputPartUpdate) -> Iterator[Json]:
        if step.closed is not None:
            yield from self._end(step.closed, "completed")
        if step.is_new:
            yield from self._begin(step.part)
        if step.text:
            if step.part.kind is ChatOutputPartKind.TOOL_CALL:
                if self._shape.call_item_form(step.part).item == "function_call":
                    yield self._event(f"{_FUNCTION}.delta", {**self._place(step.part), "delta": step.text})
                return  # the payload of another call is known at its end
            name = _TEXT_EVENTS[step.part.kind]
            logprobs: Json = {"logprobs": []} if step.part.kind is ChatOutputPartKind.CONTENT else {}
            yield self._event(f"{name}.delta", {**self._place(step.part), "delta": step.text, **logprobs})

    def _begin(self, part: ChatOutputPart) -> Iterator[Json]:
        if part.kind is not ChatOutputPartKind.TOOL_CALL or self._shape.call_item_form(part).is_text_payload:
            yield from self._added(part, is_empty=True)  # another call has no fields before its end

    def _added(self, part: ChatOutputPart, *, is_empty: bool) -> Iterator[Json]:
        item = self._shape.item(part, "in_progress", is_empty=is_empty)
        yield self._event("response.output_item.added", {"output_index": part.index, "item": item})
        if part.kind is not ChatOutputPartKind.TOOL_CALL:
            empty = content_part(part.kind, "")
            yield self._event("response.content_part.added", {**self._place(part), "part": empty})

    def _end(self, part: ChatOutputPart, status: str) -> Iterator[Json]:
        place, text = self._place(part), part.text
        if part.kind is ChatOutputPartKind.TOOL_CALL:
            yield from self._end_of_call(part, place)
        else:
            logprobs: Json = {"logprobs": []} if part.kind is ChatOutputPartKind.CONTENT else {}
            yield self._event(f"{_TEXT_EVENTS[part.kind]}.done", {**place, "text": text, **logprobs})
            yield self._event("response.content_part.done", {**place, "part": content_part(part.kind, text)})
        item = self._shape.item(part, status)
        yield self._event("response.output_item.done", {"output_index": part.index, "item": item})

    def _end_of_call(self, part: ChatOutputPart, place: Json) -> Iterator[Json]:
        form = self._shape.call_item_form(part)
        if not form.is_text_payload:
            yield from self._added(part, is_empty=False)
        assert part.call is not None
        if form.item == "function_call":
            yield self._event(f"{_FUNCTION}.done", {**place, "name": part.call.name, "arguments": part.text})
        elif form.item == "custom_tool_call":
            text = form.payload_from_arguments(part.text)
            yield self._event(f"{_CUSTOM}.delta", {**place, "delta": text})
            yield self._event(f"{_CUSTOM}.done", {**place, "input": text})

    def _place(self, part: ChatOutputPart) -> Json:
        place: Json = {"item_id": self._shape.output_item_id(part), "output_index": part.index}
        return place if part.kind is ChatOutputPartKind.TOOL_CALL else {**place, "content_index": 0}

    def _event(self, kind: str, fields: Json) -> Json:
        number = self.num_events
        self.num_events += 1
        return {"type": kind, "sequence_number": number, **fields}


def error_event_data(body: Json, sequence_number: int = 0) -> Json:
    """Return the data of an error event, from OpenAI's error object."""
    fields = {name: body["error"][name] for name in ("code", "message", "param")}
    return {"type": "error", "sequence_number": sequence_number, **fields}
