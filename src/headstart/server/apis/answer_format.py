"""AnswerFormat: the form in which one API sends an answer; ServedApi: the preparation of its requests.

inference.py sends every answer in the same way, whatever its format.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from headstart.apis.api import EVENTS
from headstart.core.request import CacheMode
from headstart.core.request import Request as EngineRequest
from headstart.openai.engine_requests import Origin
from headstart.openai.forms.skipped import SkippedCounts
from headstart.openai.generation_params import GenerationParams
from headstart.openai.responses import Json
from headstart.openai.text.generation import Delta
from headstart.reuse.near_prompts import WindowEntry
from headstart.server.apis.answer_diagnosis import AnswerDiagnosis, shape_of
from headstart.server.generation_job import GenerationJob
from headstart.server.request_limits import params_bytes
from headstart.server.server_state import Model


class AnswerFormat(Protocol):
    """The answer to one client request in the form of its API. One of `whole` and the events is used."""

    ping: bytes  # keeps a stream alive that has begun

    def collect(self, choice: int, delta: Delta) -> None:
        """Process a delta of an answer that is sent whole."""
        ...

    def whole(self, *, in_pieces: bool) -> Json:
        """Return the finished answer; `in_pieces`: long lists in it may be iterators."""
        ...

    def opening(self) -> bytes:
        """Return the events before the first delta."""
        ...

    def events(self, choice: int, delta: Delta) -> Iterator[bytes]:
        """Yield the events of a delta, each part built on demand: one may contain a long list."""
        ...

    def closing(self) -> bytes:
        """Return the events after the last delta, up to the end of the stream."""
        ...

    def failure(self, error: Exception) -> bytes:
        """Return the events that end a stream that failed."""
        ...


class Head(NamedTuple):
    """The values that identify one answer."""

    request_id: str
    created: int  # seconds since 1970
    model: Model


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A client request of one API: parameters, engine requests, and the format of its answer."""

    params: GenerationParams
    requests: list[EngineRequest]
    answer: Callable[[GenerationJob, Head], AnswerFormat]
    num_extra_bytes: int = 0  # held by `params` and `answer` until the job ends
    named: Callable[[], AbstractContextManager[None]] = nullcontext  # renames fields in errors raised inside
    diagnosis: AnswerDiagnosis | None = None  # None: the prompt is neither compared nor remembered
    messages: Sequence[Mapping[str, Any]] = ()  # of the chat, or the text of a completion as one message
    examined: WindowEntry | None = None  # the prompt, if the doctor may examine it
    skipped: SkippedCounts = ()  # left out of the prompt

    def without_messages(self, model: Model, origin: Origin) -> "ApiRequest":
        """Return the request as it waits: only the doctor may still refer to its messages, unless they are large."""
        params, examined = self.params, None
        if self.messages and params.cache is CacheMode.READ_WRITE:
            definitions = () if params.tools is None else params.tools.definitions
            num_tokens = len(self.requests[0].prompt)
            examined = model.doctor.entry(origin, params.cache_salt, self.messages, definitions, num_tokens)
        held = self.num_extra_bytes + params_bytes(params)
        return replace(self, messages=(), examined=examined, num_extra_bytes=held)


@dataclass(frozen=True, slots=True)
class ServedApi:
    """One of the generation APIs. `renders`: its prompts are rendered by the chat template, which may take seconds.

    `media_type`: of a stream; lines of JSON have no comments between them.
    `num_stored_bytes`: the bytes of stored responses that a body of a tenant continues or refers to.
    """

    id_prefix: str
    prepare: Callable[[Mapping[str, Any], Model, Origin], ApiRequest]
    renders: bool = True
    media_type: str = EVENTS
    num_stored_bytes: Callable[[Mapping[str, Any], str], int] | None = None


def diagnosis_of(
    model: Model,
    origin: Origin,
    params: GenerationParams,
    prompt: "array[int]",
    messages: Sequence[Mapping[str, Any]] | None,
    names: Sequence[str] = (),
) -> AnswerDiagnosis | None:
    """Return the diagnosis of a request's prompt; `messages` None: of a completion. None if nothing is remembered."""
    memory = model.fingerprints
    if memory is None and params.comparison_id is None:
        return None
    shape = shape_of(messages, params, origin.domain)
    return AnswerDiagnosis(memory, origin, (shape, prompt), params.comparison_id, model.info.block_size, names)
