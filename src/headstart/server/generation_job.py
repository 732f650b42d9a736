"""ApiRequest: a prepared client request. GenerationJob: its engine requests, from submission to the last token."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from headstart.core.batch import PrefillChunkTiming, PromptTokenBreakdown, RequestStepOutput
from headstart.core.errors import InvalidRequestError, RequestFailedError
from headstart.core.request import CacheMode, FinishReason, Request
from headstart.engine.engine_client import EngineClient
from headstart.http.access_record import AccessRecord
from headstart.http.answer_report import UsageReportHeader
from headstart.http.byte_budget import ByteLease
from headstart.http.tracing.request_trace import RequestTrace
from headstart.openai.engine_requests import RequestOrigin
from headstart.openai.forms.skipped import SkippedCounts
from headstart.openai.generation_params import GenerationParams
from headstart.openai.responses import Json, usage_object
from headstart.openai.text.generation import GeneratedOutput, OutputDelta
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.openai.text.stop_strings import StopStringAutomata
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.reuse.near_prompts import WindowEntry
from headstart.server.apis.answer_diagnosis import AnswerDiagnosis
from headstart.server.prompt_doctor import AvoidableTextEstimator
from headstart.server.request_limits import (
    RESERVED_TOKENS,
    bytes_of_params,
    bytes_per_output_token,
    num_logprob_entries,
)
from headstart.server.server_metrics import ServerMetrics


class ChoiceDelta(NamedTuple):
    """A new delta of one choice."""

    choice: int
    delta: OutputDelta


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A client request of one API: parameters, engine requests, and the format of its answer."""

    params: GenerationParams
    requests: list[Request]
    answer: Callable[..., Any]  # of a GenerationJob and a Head: an AnswerFormatter (server/apis/answer_format.py)
    num_extra_bytes: int = 0  # held by `params` and `answer` until the job ends
    named: Callable[[], AbstractContextManager[None]] = nullcontext  # renames fields in errors raised inside
    diagnosis: AnswerDiagnosis | None = None  # None: the prompt is neither compared nor remembered
    messages: Sequence[Mapping[str, Any]] = ()  # of the chat, or the text of a completion as one message
    examined: WindowEntry | None = None  # the prompt, if the doctor may examine it
    skipped: SkippedCounts = ()  # left out of the prompt

    def without_messages(self, doctor: AvoidableTextEstimator, origin: RequestOrigin) -> "ApiRequest":
        """Return the request as it waits: only the doctor may still refer to its messages, unless they are large."""
        params, examined = self.params, None
        if self.messages and params.cache is CacheMode.READ_WRITE:
            definitions = () if params.tools is None else params.tools.definitions
            num_tokens = len(self.requests[0].prompt)
            examined = doctor.build_window_entry(origin, params.cache_salt, self.messages, definitions, num_tokens)
        held = self.num_extra_bytes + bytes_of_params(params)
        return replace(self, messages=(), examined=examined, num_extra_bytes=held)


class GenerationJob:
    """The engine requests of one client request, submitted on creation; `close` aborts them and must be called."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        asked: ApiRequest,
        prompts: list[EchoedPrompt],
        record: AccessRecord,
        metrics: ServerMetrics,
        lease: ByteLease,
    ) -> None:
        """`prompts`: of the requests, in order. `lease` covers the bytes that the request holds; the job owns it."""
        params, requests = asked.params, asked.requests
        self.params = params
        self.record = record
        self.prompts = prompts
        stops = StopStringAutomata(params.stop)
        self.generations = [
            GeneratedOutput(tokenizer, request, params, prompt=prompts[index // params.n], stops=stops)
            for index, request in enumerate(requests)
        ]
        self._lease = lease
        self._initial_bytes = lease.num_bytes
        self._output_bytes = bytes_per_output_token(params)
        self._reserved_tokens = sum(min(request.sampling.max_tokens, RESERVED_TOKENS) for request in requests)
        self._num_tokens = 0
        self.breakdown = PromptTokenBreakdown()  # the sources of the prompts' tokens so far
        self.evicted = Counter[str | None]()  # computed prompt tokens in blocks that had been evicted, by tenant
        self.examined = asked.examined
        self.diagnosis = asked.diagnosis
        self._block_size = 1 if engine.info is None else engine.info.block_size
        self._early: dict[
            int, list[tuple[float, RequestStepOutput]]
        ] = {}  # outputs of choices whose echo is still incomplete
        self._max_tokens = requests[0].sampling.max_tokens
        self._engine = engine
        self._metrics = metrics
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._last_token_at = [record.arrival] * len(requests)
        self._first_token_at: list[float | None] = [None] * len(requests)
        self._scheduled_at = [record.arrival] * len(requests)
        self._trace_id = "" if record.trace is None else record.trace.hex_trace_id
        self._chunks: list[tuple[int, PrefillChunkTiming]] = []  # of traced prompts, by choice
        self._open = set(self._index)
        self._stream = engine.submit(requests)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has finished."""
        return not self._open

    @property
    def num_logprob_entries(self) -> int:
        """Number of entries of a whole response so far; see request_limits.py."""
        return num_logprob_entries(sum(len(prompt.token_ids) for prompt in self.prompts), self._num_tokens, self.params)

    async def next_deltas(self, timeout: float) -> list[ChoiceDelta]:
        """Return the deltas since the last call, [] after `timeout` seconds without any.

        Raises RequestFailedError if a choice failed, EngineDeadError, and the error passed to `cancel`.
        """
        found: list[ChoiceDelta] = []
        for at, output in await self._stream.next_batch(timeout):
            index = self._index[output.request_id]
            prompt = self.prompts[index // self.params.n]
            if prompt.is_complete or not self._waits(index, output):
                self._take(index, output, at, found)
            else:
                self._early.setdefault(index, []).append((at, output))
            if self._early and prompt.is_complete:
                self._catch_up(index - index % self.params.n, found)
        unreserved = max(self._num_tokens - self._reserved_tokens, 0)
        self._lease.force_resize(self._initial_bytes + unreserved * self._output_bytes)
        return found

    def fail(self, error: Exception) -> None:
        """Make the next `news` raise `error`."""
        self._stream.fail(error)

    def usage(self) -> Json:
        """Return OpenAI's usage object for the output so far."""
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return usage_object(num_prompt_tokens, self._num_tokens, self.breakdown, self._num_written)

    def diagnostics(self) -> Json:
        """Return the diagnostics of the prompt cache under Headstart's own name; empty unless requested."""
        diagnosis = self.diagnosis
        found = (
            None if diagnosis is None else diagnosis.cache_diagnosis(self.breakdown.num_cached, self.evicted.total())
        )
        if diagnosis is None or found is None:
            return {}
        return {
            "cache_diagnostics": {**diagnosis.cache_diagnostics_json(found), "rules": dict(self.params.applied_rules)}
        }

    @property
    def _num_written(self) -> int:
        """The prompt tokens in full blocks that were computed and published."""
        if self.params.cache is not CacheMode.READ_WRITE:
            return 0
        size, total = self._block_size, 0
        for index in range(0, len(self.generations), self.params.n):
            generation = self.generations[index]
            num_cached = -(-generation.breakdown.num_cached // size)
            total += max(generation.num_prompt_tokens // size - num_cached, 0) * size
        return total

    def usage_header(self, answer_id: str) -> UsageReportHeader | None:
        """Return the usage and the prefill time for a proxy that does not read the answer; None before a token."""
        first, scheduled = self.record.first_token_at, self.record.scheduled_at
        if first is None or scheduled is None:
            return None
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return UsageReportHeader(answer_id, num_prompt_tokens, self.breakdown.num_cached, (first - scheduled) * 1e3)

    def close(self) -> None:
        """Abort unfinished requests, release the lease, and complete the record and the metrics."""
        for _ in self._open:
            self._metrics.record_finished("abort")
        self._engine.abort_requests(tuple(self._open))
        self._open.clear()
        self._lease.release()
        usage = self.usage()
        self.record.num_prompt_tokens = usage["prompt_tokens"]
        self.record.num_tokens = usage["completion_tokens"]
        self.record.breakdown = self.breakdown
        self._metrics.record_prompt_tokens(self.record.principal.tenant, self.record.breakdown, self.evicted)
        self.record.finish_reason = self.generations[0].finish_reason or "abort"
        if self.record.trace is not None and self.record.trace.is_sampled:
            _add_spans(self.record.trace, self.record, self._chunks, time.monotonic())

    def _take(self, index: int, output: RequestStepOutput, at: float, found: list[ChoiceDelta]) -> None:
        """Process one output of a choice and append its delta to `found`. Raises RequestFailedError."""
        generation = self.generations[index]
        before, was = generation.num_tokens, generation.breakdown
        delta = generation.update(output)
        self._num_tokens += generation.num_tokens - before
        if generation.breakdown is not was and index % self.params.n == 0:  # a prompt counts once, by its first choice
            parts = zip(self.breakdown, generation.breakdown, was, strict=True)
            self.breakdown = PromptTokenBreakdown(*(total + new - old for total, new, old in parts))
            self.evicted[output.evicted_by] += output.num_evicted_tokens
        if delta.finish_reason in ("error", "abort"):
            self._open.discard(output.request_id)
            self._metrics.record_finished("error")
            if output.is_invalid:
                raise InvalidRequestError(output.error or "", param=self.params.grammar_field)
            raise RequestFailedError(delta.error or "it was aborted in the engine")
        if output.prefill:
            self._chunks += ((index, chunk) for chunk in output.prefill)
        self._count(index, output, at)
        if delta.finish_reason is not None:
            if self._first_token_at[index] is None:  # a request without output
                self._begin(index, output.scheduled_at, at)
            self._finish(index, output.request_id, delta, at)
        if delta.has_output:
            found.append(ChoiceDelta(index, delta))

    def _waits(self, index: int, output: RequestStepOutput) -> bool:
        """Return whether a choice must wait for the prompt's logprobs, which only the prompt's first choice receives.

        Only a stream sends them with the first token; a whole response is written at the end.
        """
        failed = output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        return self.params.stream and self.params.echo and index % self.params.n != 0 and not failed

    def _catch_up(self, first: int, found: list[ChoiceDelta]) -> None:
        """Process the outputs that were held until the prompt of these choices was complete."""
        for index in range(first, first + self.params.n):
            for at, output in self._early.pop(index, ()):
                self._take(index, output, at, found)

    def _count(self, index: int, output: RequestStepOutput, at: float) -> None:
        if not output.token_ids:
            return
        if self._first_token_at[index] is None:
            self._begin(index, output.scheduled_at, at)
            self._metrics.time_to_first_token.observe(at - self.record.arrival, self._trace_id)
        else:
            self._metrics.inter_token_latency.observe(at - self._last_token_at[index])
        self._last_token_at[index] = at

    def _begin(self, index: int, scheduled_at: float, at: float) -> None:
        """Record the first token of a choice.

        Both processes read the same clock. `scheduled_at` is clamped, since the engine may have read it before arrival.
        """
        record = self.record
        scheduled_at = self._scheduled_at[index] = max(scheduled_at, record.arrival)
        self._first_token_at[index] = at
        record.first_token_at = record.first_token_at or at
        record.scheduled_at = min(record.scheduled_at or scheduled_at, scheduled_at)

    def _finish(self, index: int, request_id: str, delta: OutputDelta, at: float) -> None:
        self._open.discard(request_id)
        if delta.must_abort:
            self._engine.abort_requests((request_id,))
        generation, first = self.generations[index], self._first_token_at[index] or at
        self.record.last_token_at = at
        metrics, trace_id = self._metrics, self._trace_id
        metrics.record_finished(delta.finish_reason or "")
        metrics.e2e_latency.observe(time.monotonic() - self.record.arrival, trace_id)
        scheduled = self._scheduled_at[index]
        metrics.queue_time.observe(scheduled - self.record.arrival, trace_id)
        metrics.prefill_time.observe(first - scheduled, trace_id)
        metrics.inference_time.observe(at - scheduled, trace_id)
        metrics.decode_time.observe(at - first, trace_id)
        metrics.prompt_tokens.observe(generation.num_prompt_tokens)
        metrics.prefill_computed.observe(generation.breakdown.computed)
        metrics.generation_tokens.observe(generation.num_tokens)
        metrics.params_n.observe(self.params.n)
        metrics.params_max_tokens.observe(self._max_tokens)
        if generation.num_tokens > 1:
            metrics.time_per_output_token.observe((at - first) / (generation.num_tokens - 1))


def _add_spans(
    trace: RequestTrace, record: AccessRecord, chunks: Iterable[tuple[int, PrefillChunkTiming]], now: float
) -> None:
    """Add the phases of a generation that has ended to its trace; one that was cut off ends `now`."""
    start: float | None = record.arrival
    for name, end in record.phase_ends():
        if start is None:
            return
        span = trace.add(name, start, now if end is None else end)
        if name == "prefill":
            for choice, chunk in chunks:
                more = {"headstart.choice": choice, "headstart.tokens": chunk.num_tokens}
                trace.add("prefill_chunk", chunk.planned_at, chunk.planned_at + chunk.elapsed, span, **more)
        start = end
