"""ServerState: what all requests share. Loading, ready, draining or broken; what is admitted, and how much may wait."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from headstart.config.options import ServerOptions
from headstart.core.engine import EngineInfo
from headstart.core.errors import DrainingError, HeadstartError, QueueFullError, RequestFailedError
from headstart.core.request import Request
from headstart.http.access_record import RequestRecord
from headstart.http.auth import Authenticator
from headstart.http.body_reader import BodyReader
from headstart.http.byte_budget import Budget
from headstart.http.http_errors import ClientGoneError, HttpError, rendered
from headstart.http.logs import Log
from headstart.http.long_work import LongWork
from headstart.openai.bounds import Bounds
from headstart.openai.engine_requests import Prepared
from headstart.openai.json_pieces import Turns
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.server.engine.engine_client import EngineClient
from headstart.server.generation_job import GenerationJob
from headstart.server.prefix_requests import Prefixes
from headstart.server.request_limits import MIN_HELD_BYTES, initial_bytes, max_held_bytes
from headstart.server.server_metrics import Metrics

MAX_UNSENT_BYTES = 16 << 20  # on the way to the engine before another request is taken
ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"),
    *("/health", "/readyz", "/livez", "/metrics", "/version", "/reset_prefix_cache", "/openapi.json"),
    *("/v1/cache/stats", "/v1/cache/explain", "/v1/prefixes"),
)


class Phase(Enum):
    """Where the server stands; DRAINING still answers what it admitted."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Model:
    """The loaded model, as requests need it."""

    name: str
    info: EngineInfo
    tokenizer: Tokenizer
    bounds: Bounds
    metrics: Metrics
    created: int  # seconds since 1970


class ServerState:
    """One server. Raises ConfigError for keys that make no sense."""

    def __init__(
        self, options: ServerOptions, engine: EngineClient, log: Log, domain_secret: bytes | None = None
    ) -> None:
        """`domain_secret` is what tenants' domains are derived from; None: one that nobody else will ever have."""
        self.options = options
        self.engine = engine
        self.log = log
        secret, own = domain_secret or secrets.token_bytes(32), secrets.token_bytes(32)
        self.auth = Authenticator(options.api_key, options.admin_api_key, secret, options.tenants, label_secret=own)
        self.bodies = BodyReader(options.max_body_bytes)
        self.long_work = LongWork()
        self.turns = Turns()
        self.prefixes = Prefixes(engine, self.auth.domain_of)
        self.phase = Phase.LOADING
        self.idle = asyncio.Event()  # nothing admitted is unanswered
        self.idle.set()
        self._model: Model | None = None
        self._held = Budget(MIN_HELD_BYTES, "prompts and answers")
        self._jobs: set[GenerationJob] = set()

    def prepare(self, info: EngineInfo) -> Model:
        """Returns the model that the engine has loaded, as requests need it. Raises ConfigError without a tokenizer."""
        name = self.options.served_model_name or info.served_name
        tokenizer = SegmentedTokenizer(Tokenizer.from_folder(Path(info.model)))
        metrics = Metrics(name, ROUTES)
        metrics.watch(self.engine)
        self.engine.on_step = lambda stats: metrics.iteration_tokens.observe(stats.last_batch_tokens)
        bounds = Bounds.of(info, self.options)
        return Model(name, info, tokenizer, bounds, metrics, int(time.time()))

    def open(self, model: Model) -> None:
        """Begins to admit requests."""
        self._model = model
        self._held.max_bytes = max_held_bytes(model.info, self.options)
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def drain(self) -> None:
        """Admit nothing new from now on."""
        self.phase = Phase.DRAINING

    @property
    def metrics(self) -> Metrics | None:
        """The metrics, once there is a model."""
        return None if self._model is None else self._model.metrics

    @property
    def model(self) -> Model:
        """The loaded model. Raises HttpError 503 while there is none."""
        if self._model is None:
            raise HttpError(503, "the model is still loading", code="loading", headers={"retry-after": "2"})
        return self._model

    @property
    def num_jobs(self) -> int:
        """Client requests admitted and not answered yet."""
        return len(self._jobs)

    def check_ready(self) -> Model:
        """Return the model if requests are admitted. Raises EngineDeadError, DrainingError, HttpError 503.

        An engine that was not heard for `heartbeat_timeout` admits nothing: requests sent to it would wait without an
        end. Those it has already are kept, since it may go on; then the server is ready again.
        """
        if self.engine.dead is not None:
            raise self.engine.dead
        if self.phase is Phase.DRAINING:
            raise DrainingError("the server is shutting down and takes no new requests; send it to another one")
        model = self.model
        now = time.monotonic()
        if not self.is_alive(now):
            silent = self.engine.silent_seconds(now)
            message = (
                f"the engine has not been heard for {silent:.0f} s and the limit is "
                f"{self.options.heartbeat_timeout:g} s: send the request to another server or try again later"
            )
            raise HttpError(503, message, code="engine_silent", headers={"retry-after": "1"})
        return model

    def is_alive(self, now: float) -> bool:
        """Return whether the engine was heard lately; while it loads it is not expected to speak."""
        if self.engine.dead is not None:
            return False
        return self._model is None or self.engine.silent_seconds(now) <= self.options.heartbeat_timeout

    def admit(self, prepared: Prepared, record: RequestRecord) -> GenerationJob:
        """Hands the requests of one client request to the engine, all or none.

        Raises QueueFullError while too much waits or is held. When nothing waits anything is taken, so that whatever is
        valid gets its turn.
        """
        model = self.check_ready()
        try:
            self._check_queue(prepared.requests)
            lease = self._held.lease(initial_bytes(prepared.requests, prepared.params))
        except QueueFullError:
            model.metrics.rejected()
            raise
        job = GenerationJob(self.engine, model.tokenizer, prepared, record, model.metrics, lease)
        self._jobs.add(job)
        self.idle.clear()
        return job

    def release(self, job: GenerationJob) -> None:
        """Closes a job that was admitted."""
        job.close()
        self._jobs.discard(job)
        if not self._jobs:
            self.idle.set()

    def note(self, record: RequestRecord, error: Exception) -> None:
        """Puts `error` on the request's record, and on the log with all details if it is not the client's."""
        _, body, _ = rendered(error)
        record.error = body["error"]["code"]
        if isinstance(error, RequestFailedError):
            self.log.event("request_failed", {"request_id": record.request_id, "error": str(error)}, level="error")
        elif not isinstance(error, HeadstartError | HttpError | ClientGoneError):
            self.log.failure("internal_error", error, record.request_id)

    def answered(self, record: RequestRecord) -> bool:
        """Counts a request that is over; whether its access line is wanted."""
        if self.metrics is not None and record.status is not None:
            self.metrics.answered(record.path, record.method, record.status)
        access_log = self.options.access_log
        return record.is_logged(access_log, on_terminal=access_log == "auto" and self.log.is_terminal)

    def cancel_all(self, error: Exception) -> None:
        """Ends every job with `error`."""
        for job in list(self._jobs):
            job.cancel(error)

    def _check_queue(self, requests: Sequence[Request]) -> None:
        engine, options = self.engine, self.options
        if engine.num_unsent_bytes > MAX_UNSENT_BYTES:  # of requests that were given up again, perhaps
            raise QueueFullError(
                f"{engine.num_unsent_bytes} bytes wait for the engine and {MAX_UNSENT_BYTES} may: try again later"
            )
        if engine.num_waiting == 0:
            return
        num_tokens = sum(len(request.prompt) for request in requests)
        for waiting, more, limit, what in (
            (engine.num_waiting, len(requests), options.max_num_queued_reqs, "requests"),
            (engine.num_waiting_tokens, num_tokens, options.max_num_queued_tokens, "prompt tokens"),
        ):
            if waiting + more > limit:
                raise QueueFullError(f"{waiting} {what} are waiting and {limit} may: try again later")
