"""/v1/completions and /v1/chat/completions: preparation of requests, and answers that are lists of choices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headstart.core.errors import InvalidRequestError
from headstart.http.sse import DONE, PING, error_event, event, long_event
from headstart.openai import responses
from headstart.openai.engine_requests import Origin, build_requests, chat_requests, encode_completion, tokenizer_of
from headstart.openai.json_pieces import SLICE_ITEMS
from headstart.openai.request_bodies import parse_chat, parse_completion
from headstart.openai.responses import Json
from headstart.openai.text.generation import Delta
from headstart.openai.text.shared_prompt import SharedPrompt
from headstart.server.apis.answer_format import ApiRequest, Head, ServedApi, diagnosis_of
from headstart.server.generation_job import GenerationJob
from headstart.server.server_state import Model

KEPT_ECHO_ENTRIES = 512 * 1024  # up to this size, the JSON of an echo is built once for all choices


@dataclass(frozen=True, slots=True)
class ChoiceShapes:
    """The JSON builders of one of the two APIs."""

    answer: Callable[[Json, Any, Json], Json]
    choice: Callable[..., Json]
    chunk: Callable[[Json, Any, Json | None], Json]
    chunk_choice: Callable[..., Json]
    first_choice: Callable[[int], Json] | None


class ChoiceFormat:
    """The answer of one job as choices, whole or as chunks."""

    ping = PING

    def __init__(self, shapes: ChoiceShapes, job: GenerationJob, head: Head) -> None:
        self._job = job
        self._tokenizer = head.model.tokenizer
        self._shapes = shapes
        self._head = responses.head_of(head.request_id, head.created, head.model.name)

    def collect(self, choice: int, delta: Delta) -> None:
        """Do nothing: the job's generations accumulate whole choices."""

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished answer."""
        choices, head = self._choices(), {**self._head, **self._job.diagnostics()}
        return self._shapes.answer(head, choices if in_pieces else list(choices), self._job.usage())

    def opening(self) -> bytes:
        """Return the first event of each choice, if it has one."""
        if _keeps_echo(self._job, self._job.prompts):  # choices of all prompts are interleaved
            for prompt in self._job.prompts:
                prompt.kept = {}
        first, diagnostics = self._shapes.first_choice, self._job.diagnostics()
        if first is None:
            if not diagnostics:
                return b""
            return event(self._shapes.chunk({**self._head, **diagnostics}, [], self._usage_now()))
        return b"".join(
            event(self._shapes.chunk({**self._head, **diagnostics}, [first(index)], self._usage_now()))
            for index in range(len(self._job.generations))
        )

    def events(self, choice: int, delta: Delta) -> Iterator[bytes]:
        """Yield the chunk of a delta, in parts if it has many log-probabilities."""
        shaped = self._choice(self._shapes.chunk_choice, choice, delta)
        if delta.num_entries <= SLICE_ITEMS:
            yield event(self._shapes.chunk(self._head, [shaped], self._usage_now()))
        else:
            yield from long_event(self._shapes.chunk(self._head, iter([shaped]), self._usage_now()))

    def closing(self) -> bytes:
        """Return the chunk with the usage, if it was requested, and [DONE]."""
        if not self._job.params.include_usage:
            return DONE
        return event(self._shapes.chunk(self._head, [], self._job.usage())) + DONE

    def failure(self, error: Exception) -> bytes:
        """Return the error event and [DONE]."""
        return error_event(error) + DONE

    def _choices(self) -> Iterator[Json]:
        """Yield the choices of a whole response. The JSON of an echo is kept while its prompt's choices are encoded."""
        n = self._job.params.n
        for index, generation in enumerate(self._job.generations):
            prompt = self._job.prompts[index // n]
            if index % n == 0 and _keeps_echo(self._job, [prompt]):
                prompt.kept = {}
            yield self._choice(self._shapes.choice, index, responses.whole(generation))
            if index % n == n - 1:
                prompt.kept = None

    def _usage_now(self) -> Json | None:
        return self._job.usage() if self._job.params.continuous_usage_stats else None

    def _choice(self, shape: Callable[..., Json], index: int, delta: Delta) -> Json:
        params = self._job.params
        return shape(index, delta, self._tokenizer, logprobs=params.wants_logprobs, token_ids=params.return_token_ids)


def _keeps_echo(job: GenerationJob, prompts: Sequence[SharedPrompt]) -> bool:
    """Return whether to keep the JSON of the echo of these prompts, so that it is built once for all choices."""
    width = 1 + (job.params.sampling.prompt_logprobs or 0)
    return job.params.n > 1 and sum(map(len, prompts)) * width <= KEPT_ECHO_ENTRIES


def check_model(name: str | None, model: Model) -> None:
    """Raise InvalidRequestError (model_not_found) for another model's name; None is accepted."""
    if name is not None and name not in model.names:
        shown = ascii(name if len(name) <= 60 else name[:60] + "...")
        raise InvalidRequestError(
            f"model {shown} is not served here; this server has {' and '.join(map(repr, model.names))}",
            param="model",
            code="model_not_found",
        )


def _prepare_completion(values: Mapping[str, Any], model: Model, origin: Origin) -> ApiRequest:
    body = parse_completion(values, model.bounds)
    check_model(body.model, model)
    prompts = encode_completion(body, tokenizer_of(model.tokenizer, origin, body.params), model.bounds)
    requests = build_requests(prompts, body.params, model.bounds, origin)
    diagnosis = diagnosis_of(model, origin, body.params, prompts[0], None) if len(prompts) == 1 else None
    text = body.prompts[0] if len(prompts) == 1 else None
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else []
    form = partial(ChoiceFormat, _COMPLETION_SHAPES)
    return ApiRequest(body.params, requests, form, diagnosis=diagnosis, messages=messages)


def _prepare_chat(values: Mapping[str, Any], model: Model, origin: Origin) -> ApiRequest:
    body = parse_chat(values, model.bounds)
    check_model(body.model, model)
    tokenizer = tokenizer_of(model.tokenizer, origin, body.params)
    try:
        params, requests = chat_requests(body, tokenizer, model.bounds, origin)
    except InvalidRequestError as error:
        error.param = "messages" if error.param == "prompt" else error.param
        raise
    diagnosis = diagnosis_of(model, origin, params, requests[0].prompt, body.messages)
    return ApiRequest(
        params, requests, partial(ChoiceFormat, _CHAT_SHAPES), diagnosis=diagnosis, messages=body.messages
    )


_COMPLETION_SHAPES = ChoiceShapes(
    responses.completion,
    responses.completion_choice,
    responses.completion_chunk,
    responses.completion_choice,
    None,
)
_CHAT_SHAPES = ChoiceShapes(
    responses.chat_completion,
    responses.chat_choice,
    responses.chat_chunk,
    responses.chat_chunk_choice,
    responses.chat_first_choice,
)
COMPLETIONS = ServedApi("cmpl-", _prepare_completion, renders=False)
CHAT = ServedApi("chatcmpl-", _prepare_chat)
