"""ServedApi: how a server prepares the requests of one API; AnswerFormatter: the form in which it sends an answer.

inference.py sends every answer in the same way, whatever its format.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headstart.apis.answer_schemas import RouteResponseSchemas
from headstart.apis.api import LINES, Api
from headstart.apis.ollama_api import LATEST
from headstart.core.errors import InvalidRequestError
from headstart.core.request import Request as EngineRequest
from headstart.http.sse import encode_named_event
from headstart.openai.chat.chat_parts import ChatOutputParts
from headstart.openai.chat.chat_translation import TranslatedChatRequest
from headstart.openai.engine_requests import RequestOrigin, build_chat_requests, tokenizer_for_request
from headstart.openai.generation_params import GenerationParams
from headstart.openai.json_pieces import encode_json
from headstart.openai.request_bodies import ChatBody
from headstart.openai.request_model import RequestModel
from headstart.openai.responses import Json
from headstart.openai.text.generation import OutputDelta
from headstart.server.apis.answer_diagnosis import AnswerDiagnosis, chat_source_hashes
from headstart.server.generation_job import ApiRequest, GenerationJob
from headstart.server.server_state import ServedModel


class AnswerFormatter(Protocol):
    """The answer to one client request in the form of its API. One of `whole` and the events is used."""

    def collect_delta(self, choice: int, delta: OutputDelta) -> None:
        """Process a delta of an answer that is sent whole; by default the job's generations collect it."""

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished answer; `in_pieces`: long lists in it may be iterators."""
        ...

    def opening_events(self) -> bytes:
        """Return the events before the first delta."""
        ...

    def events(self, choice: int, delta: OutputDelta) -> Iterator[bytes]:
        """Yield the events of a delta, each part built on demand: one may contain a long list."""
        ...

    def closing_events(self) -> bytes:
        """Return the events after the last delta, up to the end of the stream."""
        ...

    def failed_stream_events(self, error: Exception) -> bytes | None:
        """Return the events that end a stream that failed; None: those of the API."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsAnswerFormatter(AnswerFormatter):
    """An answer of one choice that is made of parts, whole or as objects of a stream.

    `added` returns the objects of a delta, and adds it to `parts`. `failed` may return the object that ends a stream
    with an error.
    """

    api: Api
    parts: ChatOutputParts
    finished: Callable[[], Json]
    first: Callable[[], list[Json]] = list
    added: Callable[[OutputDelta], list[Json]]
    last: Callable[[], list[Json]]
    failed: Callable[[Exception], list[Json] | None] = lambda error: None

    def collect_delta(self, choice: int, delta: OutputDelta) -> None:
        """Add a delta to the parts."""
        self.parts.add_delta(delta)

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished answer."""
        return self.finished()

    def opening_events(self) -> bytes:
        """Return the objects before the first delta."""
        return self._encoded(self.first())

    def events(self, choice: int, delta: OutputDelta) -> Iterator[bytes]:
        """Yield the objects of a delta."""
        yield self._encoded(self.added(delta))

    def closing_events(self) -> bytes:
        """Return the last objects."""
        return self._encoded(self.last())

    def failed_stream_events(self, error: Exception) -> bytes | None:
        """Return the objects that end a stream that failed, if they are not those of the API."""
        objects = self.failed(error)
        return None if objects is None else self._encoded(objects)

    def _encoded(self, objects: list[Json]) -> bytes:
        if self.api.end.media_type == LINES:
            return b"".join(encode_json(one) + b"\n" for one in objects)
        return b"".join(map(encode_named_event, objects))


class AnswerIdentity(NamedTuple):
    """The values that identify one answer."""

    request_id: str
    created: int  # seconds since 1970
    model: ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApi:
    """One of the generation APIs at a server.

    `name`, `summary`, `answers` and `bodies` are for /openapi.json; `answers` None: it is documented elsewhere.
    `renders`: its prompts are rendered by the chat template, which may take seconds. `num_stored_bytes`: the bytes of
    stored responses that a body of a tenant continues or refers to.
    """

    api: Api
    id_prefix: str
    prepare: Callable[[Mapping[str, Any], ServedModel, RequestOrigin], ApiRequest]
    renders: bool = True
    num_stored_bytes: Callable[[Mapping[str, Any], str], int] | None = None
    name: str = ""
    summary: str = ""
    answers: RouteResponseSchemas | None = None
    bodies: tuple[type[RequestModel], ...] = ()


class TranslatedChat(NamedTuple):
    """A chat in the form of another API, validated and rendered."""

    body: ChatBody
    params: GenerationParams
    requests: list[EngineRequest]
    diagnosis: AnswerDiagnosis | None

    @classmethod
    def from_request(
        cls, chat: TranslatedChatRequest, model: ServedModel, origin: RequestOrigin, *, shortens: bool = False
    ) -> "TranslatedChat":
        """Return the chat; `shortens`: max_tokens is lowered to what fits. Raises InvalidRequestError."""
        with chat.renaming_error_fields():
            body = chat.to_chat_body(model.bounds)
            check_model_name(body.model, model)
            tokenizer = tokenizer_for_request(model.tokenizer, origin, body.params)
            params, requests = build_chat_requests(body, tokenizer, model.bounds, origin, shortens=shortens)
        diagnosis = make_answer_diagnosis(model, origin, params, requests[0], body.messages, chat.message_names)
        return cls(body, params, requests, diagnosis)

    def to_api_request(
        self,
        chat: TranslatedChatRequest,
        answer: Callable[[GenerationJob, AnswerIdentity], AnswerFormatter],
        num_extra_bytes: int = 0,
    ) -> ApiRequest:
        """Return the client request."""
        named = chat.without_values().renaming_error_fields
        return ApiRequest(
            self.params, self.requests, answer, num_extra_bytes, named, self.diagnosis, self.body.messages
        )


def check_model_name(name: str | None, model: ServedModel) -> None:
    """Raise InvalidRequestError (model_not_found) for another model's name; None is accepted, and Ollama's tag."""
    if name is not None and name not in model.names and name.removesuffix(LATEST) not in model.names:
        shown = ascii(name if len(name) <= 60 else name[:60] + "...")
        raise InvalidRequestError(
            f"model {shown} is not served here; this server has {' and '.join(map(repr, model.names))}",
            param="model",
            code="model_not_found",
        )


def make_answer_diagnosis(
    model: ServedModel,
    origin: RequestOrigin,
    params: GenerationParams,
    request: EngineRequest,
    messages: Sequence[Mapping[str, Any]] | None,
    names: Sequence[str] = (),
) -> AnswerDiagnosis | None:
    """Return the diagnosis of a request's prompt; `messages` None: of a completion. None if nothing is remembered."""
    memory = model.fingerprints
    if memory is None and params.comparison_id is None:
        return None
    prompt = chat_source_hashes(messages, params, origin.domain), request.prompt
    return AnswerDiagnosis(memory, origin, prompt, params.comparison_id, model.info.block_size, names)
