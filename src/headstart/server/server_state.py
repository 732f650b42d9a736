"""ServerState: the state that all requests of a server share: phase, model, admitted jobs, and admission limits."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from headstart.apis.api_table import APIS, OTHER
from headstart.config.options import ServerOptions
from headstart.core.engine_info import EngineInfo
from headstart.core.errors import DrainingError, HeadstartError, QueueFullError, RequestFailedError
from headstart.core.request import Request
from headstart.engine.engine_client import EngineClient
from headstart.http.access_record import AccessRecord
from headstart.http.auth import Authenticator
from headstart.http.body_reader import HELD_BYTES, BudgetedBodyReader
from headstart.http.byte_budget import ByteBudget, may_tenant_hold_more
from headstart.http.http_errors import ClientGoneError, HttpError, error_status_body_headers
from headstart.http.logs import ServerLog
from headstart.http.long_work import InlineOrThreadRunner, TenantFairSlots
from headstart.http.tracing.tracer import make_tracer
from headstart.http.web_pages import WebPageAccess
from headstart.openai.bounds import RequestBounds
from headstart.openai.json_pieces import EncodingTurns
from headstart.openai.responses_api.response_memory import StoredResponses
from headstart.openai.sandbox.sandbox_pool import MAX_PROCESSES
from headstart.openai.structured.grammar_check import GrammarChecker
from headstart.openai.text.shared_prompt import EchoedPrompt
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.server.apis.answer_diagnosis import FingerprintCache
from headstart.server.generation_job import ApiRequest, GenerationJob
from headstart.server.prefix_requests import ServerPrefixes
from headstart.server.prompt_doctor import AvoidableTextEstimator
from headstart.server.prompt_log import RecentBodyLog
from headstart.server.request_limits import MIN_HELD_BYTES, admitted_requests_byte_budget, bytes_at_admission
from headstart.server.server_metrics import ServerMetrics

ROUTES = (
    *(path for api in (*APIS, OTHER) for path in (api.path, *api.other_paths, *api.get_paths) if path),
    "/v1/models",
    *("/tokenizer_info", "/ping", "/load"),
    *("/health", "/readyz", "/livez", "/metrics", "/version", "/reset_prefix_cache", "/openapi.json"),
    *("/v1/cache/stats", "/v1/cache/explain", "/v1/cache/requests", "/v1/prefixes"),
    *("/v1/cache/tree", "/v1/cache/live", "/"),
)


class ServerPhase(Enum):
    """The phase of the server. In DRAINING, admitted requests are still answered."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model with its tokenizer, bounds and metrics."""

    name: str
    info: EngineInfo
    tokenizer: Tokenizer
    bounds: RequestBounds
    metrics: ServerMetrics
    created: int  # seconds since 1970
    grammars: GrammarChecker
    doctor: AvoidableTextEstimator
    fingerprints: FingerprintCache | None = None  # of answered requests' prompts, for comparisons
    names: tuple[str, ...] = ()  # all that requests may use; `name`, the first, is in answers


class ServerState:
    """The state of one server. Raises ConfigError for invalid keys."""

    def __init__(
        self,
        options: ServerOptions,
        engine: EngineClient,
        log: ServerLog,
        domain_secret: bytes | None = None,
        *,
        num_shares: int = 1,
    ) -> None:
        """`domain_secret`: the secret that tenants' domains are derived from; None: a random one for this process.

        `num_shares`: the number of servers and routers of one command, which divide the memory for requests.
        """
        self.options = options
        self.engine = engine
        self.log = log
        secret, own = domain_secret or secrets.token_bytes(32), secrets.token_bytes(32)
        self.tracer = make_tracer(options.otlp_endpoint, "headstart-server", log)
        self.pages = WebPageAccess(options)
        self.auth = Authenticator(
            options.api_key,
            options.admin_api_key,
            secret,
            options.tenants,
            label_secret=own,
            host_names=self.pages.names,
        )
        self.bodies = BudgetedBodyReader(options.max_body_bytes, HELD_BYTES // num_shares)
        self.long_work = InlineOrThreadRunner()
        self.checks = TenantFairSlots(MAX_PROCESSES)  # of grammars
        self.turns = EncodingTurns()
        self.prefixes = ServerPrefixes(engine, self.auth.domain_of_tenant)
        self.responses = StoredResponses(options.response_store_size, options.response_store_ttl)
        self.prompt_log = RecentBodyLog(options.prompt_log_size // num_shares, frozenset(options.prompt_rule))
        self.phase = ServerPhase.LOADING
        self.idle = asyncio.Event()  # set while no admitted request is unanswered
        self.idle.set()
        self._model: ServedModel | None = None
        self._num_shares = num_shares
        self._held = ByteBudget(MIN_HELD_BYTES // num_shares, "prompts and answers")
        self._jobs: set[GenerationJob] = set()

    def make_served_model(self, info: EngineInfo) -> ServedModel:
        """Return a Model for the engine's loaded model. Raises ConfigError without a tokenizer."""
        names = self.options.served_model_name or (info.served_name,)
        name = names[0]
        tokenizer = SegmentedTokenizer(Tokenizer.from_folder(Path(info.model)))
        metrics = ServerMetrics(name, ROUTES)
        metrics.register_engine_collectors(self.engine)
        if self.tracer is not None:
            metrics.watch_tracer(self.tracer)
        self.engine.on_step = lambda stats: metrics.iteration_tokens.observe(stats.last_batch_tokens)
        bounds = RequestBounds.for_engine(info, self.options, tokenizer.content_forms)
        grammars = GrammarChecker(info, info.eos_token_ids or tokenizer.eos_token_ids)
        fingerprints = FingerprintCache(self.options.diagnostics_size) if self.options.diagnostics_size else None
        doctor = AvoidableTextEstimator(
            self.options.doctor_share, lambda: time.process_time() + self.engine.stats.step_seconds
        )
        metrics.watch_prompt_doctor(fingerprints, doctor)
        return ServedModel(
            name, info, tokenizer, bounds, metrics, int(time.time()), grammars, doctor, fingerprints, names
        )

    def start_admitting(self, model: ServedModel) -> None:
        """Start to admit requests."""
        self._model = model
        self._held.max_bytes = admitted_requests_byte_budget(model.info, self.options, self._num_shares)
        if self.phase is ServerPhase.LOADING:
            self.phase = ServerPhase.READY

    def start_draining(self) -> None:
        """Stop admitting new requests."""
        self.phase = ServerPhase.DRAINING

    @property
    def metrics_if_loaded(self) -> ServerMetrics | None:
        """The metrics, None until the model is loaded."""
        return None if self._model is None else self._model.metrics

    @property
    def loaded_model(self) -> ServedModel:
        """The loaded model. Raises HttpError 503 while loading."""
        if self._model is None:
            raise HttpError(503, "the model is still loading", code="loading", headers={"retry-after": "2"})
        return self._model

    @property
    def num_jobs(self) -> int:
        """The number of client requests that are admitted and not answered yet."""
        return len(self._jobs)

    def check_ready(self) -> ServedModel:
        """Return the model if requests are admitted. Raises EngineDeadError, DrainingError, HttpError 503.

        Without a heartbeat for `heartbeat_timeout` seconds nothing is admitted: new requests could wait forever.
        Requests in flight are kept, since the engine may recover; then the server is ready again.
        """
        if self.engine.dead is not None:
            raise self.engine.dead
        if self.phase is ServerPhase.DRAINING:
            raise DrainingError("the server is shutting down and takes no new requests; send it to another one")
        model = self.loaded_model
        now = time.monotonic()
        if not self.is_alive(now):
            silent = self.engine.seconds_since_heartbeat_due(now)
            message = (
                f"the engine has not been heard for {silent:.0f} s and the limit is "
                f"{self.options.heartbeat_timeout:g} s: send the request to another server or try again later"
            )
            raise HttpError(503, message, code="engine_silent", headers={"retry-after": "1"})
        return model

    def is_alive(self, now: float) -> bool:
        """Return whether the engine's last heartbeat is recent; while the model loads, none is expected."""
        if self.engine.dead is not None:
            return False
        return self._model is None or self.engine.seconds_since_heartbeat_due(now) <= self.options.heartbeat_timeout

    def admit_and_submit(self, asked: ApiRequest, prompts: list[EchoedPrompt], record: AccessRecord) -> GenerationJob:
        """Submit the requests of one client request to the engine, all or none.

        Raises QueueFullError if the waiting queue or the byte budget is full. A full queue takes requests of a tenant
        that uses less than its share of it, and every valid request of one for which nothing waits, whatever its size.
        """
        model = self.check_ready()
        try:
            self._check_queue(asked.requests)
            num_bytes = bytes_at_admission(asked.requests, asked.params) + asked.num_extra_bytes
            lease = self._held.lease(num_bytes, record.principal.tenant)
        except QueueFullError:
            model.metrics.count_rejected()
            raise
        record.submitted_at = time.monotonic()
        if record.trace is not None and record.trace.is_sampled:
            asked = replace(asked, requests=[replace(request, is_traced=True) for request in asked.requests])
        job = GenerationJob(self.engine, model.tokenizer, asked, prompts, record, model.metrics, lease)
        self._jobs.add(job)
        self.idle.clear()
        return job

    def close_generation_job(self, job: GenerationJob) -> None:
        """Close an admitted job."""
        job.close()
        if job.examined is not None and self._model is not None and job.record.finish_reason not in ("abort", "error"):
            tenant = job.record.principal.tenant
            self._model.doctor.examine_finished(tenant, job.examined, job.breakdown, job.evicted.total())
            job.examined = None
        self._jobs.discard(job)
        if not self._jobs:
            self.idle.set()

    def record_request_error(self, record: AccessRecord, error: Exception) -> None:
        """Set `error` on the request's record, and log it with details if it is not the client's mistake."""
        _, body, _ = error_status_body_headers(error)
        record.error = body["error"]["code"]
        if isinstance(error, RequestFailedError):
            self.log.event("request_failed", {"request_id": record.request_id, "error": str(error)}, level="error")
        elif not isinstance(error, HeadstartError | HttpError | ClientGoneError):
            self.log.log_exception("internal_error", error, record.request_id)

    def count_and_decide_logging(self, record: AccessRecord) -> bool:
        """Count a finished request; return whether to log its access line."""
        if self.metrics_if_loaded is not None and record.status is not None:
            self.metrics_if_loaded.count_answer(record.path, record.method, record.status)
        access_log = self.options.access_log
        return record.should_log(access_log, on_terminal=access_log == "auto" and self.log.is_terminal)

    def cancel_all_jobs(self, error: Exception) -> None:
        """Cancel every job with `error`."""
        for job in list(self._jobs):
            job.fail(error)

    def _check_queue(self, requests: Sequence[Request]) -> None:
        engine, options = self.engine, self.options
        own = engine.queued.get(requests[0].tenant)
        if own is None:
            return
        num_tokens = sum(len(request.prompt) for request in requests)
        for waiting, mine, more, limit, what in (
            (engine.num_awaiting_first_token, own.num_requests, len(requests), options.max_num_queued_reqs, "requests"),
            (engine.num_waiting_tokens, own.num_tokens, num_tokens, options.max_num_queued_tokens, "prompt tokens"),
        ):
            if not may_tenant_hold_more(waiting, mine, more, limit, len(engine.queued)):
                raise QueueFullError(f"{waiting} {what} are waiting and {limit} may: try again later")
