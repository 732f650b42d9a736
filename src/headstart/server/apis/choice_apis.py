"""/v1/completions and /v1/chat/completions, from the body to the last event: answers that are lists of choices.

In order: bodies to engine requests, one format for both APIs, the choices of a completion, those of a chat.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headstart.apis import answer_schemas, api_table
from headstart.core.errors import InvalidRequestError
from headstart.http.sse import DONE, encode_event, encode_event_in_parts
from headstart.openai.chat.chat_delta import ChatDelta, ToolCallDelta
from headstart.openai.engine_requests import (
    RequestOrigin,
    build_chat_requests,
    build_requests,
    encode_completion,
    tokenizer_for_request,
)
from headstart.openai.json_pieces import SLICE_ITEMS, LazilyEncodedList
from headstart.openai.request_bodies import ChatRequest, CompletionRequest, parse_chat, parse_completion
from headstart.openai.responses import Json, json_list_lazy_if_long, token_text_or_bytes
from headstart.openai.text.generation import GeneratedOutput, OutputDelta
from headstart.openai.text.logprob_table import TokenEntry
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.server.apis.answer_format import (
    AnswerFormatter,
    AnswerIdentity,
    ServedApi,
    check_model_name,
    make_answer_diagnosis,
)
from headstart.server.generation_job import ApiRequest, GenerationJob
from headstart.server.server_state import ServedModel

KEPT_ECHO_ENTRIES = 512 * 1024  # up to this size, the JSON of an echo is built once for all choices


def _prepare_completion(values: Mapping[str, Any], model: ServedModel, origin: RequestOrigin) -> ApiRequest:
    body = parse_completion(values, model.bounds)
    check_model_name(body.model, model)
    prompts = encode_completion(body, tokenizer_for_request(model.tokenizer, origin, body.params), model.bounds)
    requests = build_requests(prompts, body.params, model.bounds, origin)
    diagnosis = make_answer_diagnosis(model, origin, body.params, requests[0], None) if len(prompts) == 1 else None
    text = body.prompts[0] if len(prompts) == 1 else None
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else []
    form = partial(ChoiceAnswerFormatter, _COMPLETION_SHAPES)
    return ApiRequest(body.params, requests, form, diagnosis=diagnosis, messages=messages)


def _prepare_chat(values: Mapping[str, Any], model: ServedModel, origin: RequestOrigin) -> ApiRequest:
    body = parse_chat(values, model.bounds)
    check_model_name(body.model, model)
    tokenizer = tokenizer_for_request(model.tokenizer, origin, body.params)
    try:
        params, requests = build_chat_requests(body, tokenizer, model.bounds, origin)
    except InvalidRequestError as error:
        error.param = "messages" if error.param == "prompt" else error.param
        raise
    diagnosis = make_answer_diagnosis(model, origin, params, requests[0], body.messages)
    form = partial(ChoiceAnswerFormatter, _CHAT_SHAPES)
    return ApiRequest(params, requests, form, diagnosis=diagnosis, messages=body.messages)


@dataclass(frozen=True, slots=True)
class ChoiceShapes:
    """The names of one of the two APIs' objects, and the builders of their choices."""

    whole: str
    chunk: str
    choice: Callable[..., Json]
    chunk_choice: Callable[..., Json]
    first_choice: Callable[[int], Json] | None = None


class ChoiceAnswerFormatter(AnswerFormatter):
    """The answer of one job as choices, whole or as chunks."""

    def __init__(self, shapes: ChoiceShapes, job: GenerationJob, head: AnswerIdentity) -> None:
        self._job = job
        self._tokenizer = head.model.tokenizer
        self._shapes = shapes
        self._head: Json = {
            "id": head.request_id,
            "created": head.created,
            "model": head.model.name,
            "system_fingerprint": None,
        }

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished answer."""
        choices, head = self._choices(), {**self._head, **self._job.diagnostics()}
        return answer_document(head, self._shapes.whole, choices if in_pieces else list(choices), self._job.usage())

    def opening_events(self) -> bytes:
        """Return the first event of each choice, if it has one."""
        if _keeps_echo(self._job, self._job.prompts):  # choices of all prompts are interleaved
            for prompt in self._job.prompts:
                prompt.kept = {}
        first, diagnostics = self._shapes.first_choice, self._job.diagnostics()
        if first is not None:
            choices = [[first(index)] for index in range(len(self._job.generations))]
        else:
            choices = [list[Json]()] if diagnostics else []
        return b"".join(encode_event(self._chunk(each, self._usage_now(), diagnostics)) for each in choices)

    def events(self, choice: int, delta: OutputDelta) -> Iterator[bytes]:
        """Yield the chunk of a delta, in parts if it has many log-probabilities."""
        shaped = self._choice(self._shapes.chunk_choice, choice, delta)
        if delta.num_logprob_entries <= SLICE_ITEMS:
            yield encode_event(self._chunk([shaped], self._usage_now()))
        else:
            yield from encode_event_in_parts(self._chunk(iter([shaped]), self._usage_now()))

    def closing_events(self) -> bytes:
        """Return the chunk with the usage, if it was requested, and [DONE]."""
        if not self._job.params.include_usage:
            return DONE
        return encode_event(self._chunk([], self._job.usage())) + DONE

    def _chunk(self, choices: Any, usage: Json | None, diagnostics: Json | None = None) -> Json:
        head = {**self._head, **diagnostics} if diagnostics else self._head
        return answer_document(head, self._shapes.chunk, choices, usage)

    def _choices(self) -> Iterator[Json]:
        """Yield the choices of a whole response. The JSON of an echo is kept while its prompt's choices are encoded."""
        n = self._job.params.n
        for index, generation in enumerate(self._job.generations):
            prompt = self._job.prompts[index // n]
            if index % n == 0 and _keeps_echo(self._job, [prompt]):
                prompt.kept = {}
            yield self._choice(self._shapes.choice, index, _whole(generation))
            if index % n == n - 1:
                prompt.kept = None

    def _usage_now(self) -> Json | None:
        return self._job.usage() if self._job.params.continuous_usage_stats else None

    def _choice(self, shape: Callable[..., Json], index: int, delta: OutputDelta) -> Json:
        params = self._job.params
        return shape(index, delta, self._tokenizer, logprobs=params.wants_logprobs, token_ids=params.return_token_ids)


def _keeps_echo(job: GenerationJob, prompts: Sequence[EchoedPrompt]) -> bool:
    """Return whether to keep the JSON of the echo of these prompts, so that it is built once for all choices."""
    width = 1 + (job.params.sampling.prompt_logprobs or 0)
    return job.params.n > 1 and sum(map(len, prompts)) * width <= KEPT_ECHO_ENTRIES


def _whole(generation: GeneratedOutput) -> OutputDelta:
    """Return a finished generation as one Delta."""
    return OutputDelta(
        generation.output_text,
        tuple(generation.token_ids),
        generation.logprobs,
        generation.finish_reason,
        generation.stop_reason,
        error=generation.error,
        echo=generation.echo,
        prompt_logprobs=generation.prompt.logprobs if generation.wants_prompt_logprobs else (),
        chat=generation.chat,
    )


def answer_document(head: Json, name: str, choices: Any, usage: Json | None) -> Json:
    """Return an answer, or an event of one; `head`: id, created (seconds since 1970), model and the like."""
    return {**head, "object": name, "choices": choices, "usage": usage}


def _shaped(
    index: int, content: Json, delta: OutputDelta, tokenizer: Tokenizer, *, token_ids: bool, is_chunk: bool = False
) -> Json:
    """Return a choice with the extensions of OpenAI's API that were requested, under vLLM's names."""
    choice: Json = {"index": index, **content, "finish_reason": delta.finish_reason}
    if delta.finish_reason or not is_chunk:
        choice["stop_reason"] = delta.stop_reason
    if token_ids:
        choice["token_ids"] = delta.token_ids
    if len(delta.prompt_logprobs):
        choice["prompt_logprobs"] = prompt_logprobs_json(delta.prompt_logprobs, tokenizer)
    return choice


def prompt_logprobs_json(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> list[Json | None] | LazilyEncodedList:
    """Return vLLM's format: null for the first token, then per position the token and its best alternatives by id."""

    def shape(entry: TokenEntry | None) -> Json | None:
        if entry is None:
            return None
        candidates = dict(entry.top) | {entry.token_id: entry.logprob}
        return {
            str(i): {"logprob": p, "decoded_token": token_text_or_bytes(tokenizer, i)} for i, p in candidates.items()
        }

    if len(entries) <= SLICE_ITEMS:
        return [None, *map(shape, entries)]
    return LazilyEncodedList(((None,), entries), shape)


# --------------------------------------------------------------------------------------------------------- completions


def completion_choice(index: int, delta: OutputDelta, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> Json:
    """Return a choice, whole or of a chunk."""
    content = {
        "text": delta.text if delta.echo is None else delta.echo.text + delta.text,
        "logprobs": completion_logprobs(delta.logprobs, tokenizer, delta.echo) if logprobs else None,
    }
    return _shaped(index, content, delta, tokenizer, token_ids=token_ids)


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, echo: EchoedPrompt | None = None) -> Json:
    """Return log-probabilities in the completions format: four lists, one item per token, an echoed prompt first."""

    def name(entry: TokenEntry) -> str:
        return token_text_or_bytes(tokenizer, entry.token_id)

    def top(entry: TokenEntry) -> dict[str, float] | None:
        alternatives = {} if entry.logprob is None else {name(entry): entry.logprob}
        for token_id, logprob in entry.top:
            alternatives.setdefault(token_text_or_bytes(tokenizer, token_id), logprob)
        return alternatives or None

    shapes: dict[str, Callable[[TokenEntry], Any]] = {
        "tokens": name,
        "token_logprobs": lambda entry: entry.logprob,
        "top_logprobs": top,
        "text_offset": lambda entry: entry.offset,
    }
    return {key: json_list_lazy_if_long(entries, shape, echo, key) for key, shape in shapes.items()}


# --------------------------------------------------------------------------------------------------------------- chats


def chat_choice(index: int, delta: OutputDelta, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> Json:
    """Return a choice of a whole chat."""
    message = {"role": "assistant", "content": delta.text, "refusal": None, **message_fields(delta.chat)}
    content = {"message": message, "logprobs": chat_logprobs(delta.logprobs, tokenizer) if logprobs else None}
    return _shaped(index, content, delta, tokenizer, token_ids=token_ids)


def message_fields(chat: ChatDelta | None) -> Json:
    """Return the parts of a message that differ from plain text; content is null beside calls or reasoning only."""
    if chat is None:
        return {}
    parts = _new_parts(chat)
    for call in parts.get("tool_calls", ()):
        del call["index"]
    return {"content": None if chat.tool_calls or chat.reasoning else "", **parts}


def chat_first_choice(index: int) -> Json:
    """Return the first choice of a streamed message: the role and empty text."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def chat_chunk_choice(index: int, delta: OutputDelta, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool) -> Json:
    """Return a choice of a streamed chat."""
    content = {
        "delta": _new_parts(ChatDelta(delta.text) if delta.chat is None else delta.chat),
        "logprobs": chat_logprobs(delta.logprobs, tokenizer) if logprobs else None,
    }
    return _shaped(index, content, delta, tokenizer, token_ids=token_ids, is_chunk=True)


def _new_parts(chat: ChatDelta) -> Json:
    """Return the new parts of a message; reasoning under both of vLLM's names."""
    parts: Json = {}
    if chat.reasoning:
        parts |= {"reasoning": chat.reasoning, "reasoning_content": chat.reasoning}
    if chat.content:
        parts["content"] = chat.content
    if chat.tool_calls:
        parts["tool_calls"] = [_tool_call(call) for call in chat.tool_calls]
    return parts


def _tool_call(call: ToolCallDelta) -> Json:
    if not call.call_id:
        return {"index": call.call_index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.call_index, "id": call.call_id, "type": "function", "function": function}


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> Json:
    """Return log-probabilities in the chat format: an object per token, with its bytes."""

    def token(token_id: int, logprob: float | None) -> Json:
        text, written = tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))
        return {"token": text, "logprob": logprob, "bytes": written}

    def shape(entry: TokenEntry) -> Json:
        return {**token(entry.token_id, entry.logprob), "top_logprobs": [token(*each) for each in entry.top]}

    return {"content": json_list_lazy_if_long(entries, shape), "refusal": None}


_COMPLETION_SHAPES = ChoiceShapes("text_completion", "text_completion", completion_choice, completion_choice)
_CHAT_SHAPES = ChoiceShapes(
    "chat.completion", "chat.completion.chunk", chat_choice, chat_chunk_choice, chat_first_choice
)
COMPLETIONS = ServedApi(
    api=api_table.COMPLETIONS,
    id_prefix="cmpl-",
    prepare=_prepare_completion,
    renders=False,
    name="completions",
    summary="Complete prompts.",
    answers=answer_schemas.COMPLETIONS,
    bodies=(CompletionRequest,),
)
CHAT = ServedApi(
    api=api_table.CHAT,
    id_prefix="chatcmpl-",
    prepare=_prepare_chat,
    name="chat_completions",
    summary="Generate the next message of a conversation.",
    answers=answer_schemas.CHATS,
    bodies=(ChatRequest,),
)
