"""GatewayState: the state that all requests of one router share."""

import asyncio
import hmac
import secrets
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from math import inf
from typing import Any

import aiohttp

from headstart.config.options import RouterOptions, ServerOptions
from headstart.core.errors import DrainingError, HeadstartError
from headstart.gateway.cache_stats import broadcast_for_single_answer, fetch_all_replica_stats, fleet_stats_json
from headstart.gateway.gateway_metrics import GatewayMetrics
from headstart.gateway.gateway_routes import ROUTER_ACCESS, ROUTES, ClientKeyDomains
from headstart.gateway.held_bytes import MAX_HELD_BYTES
from headstart.gateway.proxy.flow_control import FlowControl, RetryBudget
from headstart.gateway.proxy.proxy import Placed, ProxiedCall, ReplicaProxy, place_by_own_router
from headstart.gateway.proxy.request_reader import RequestParser, SenderRoutingInfo, session_from_headers
from headstart.gateway.proxy.upstream import UnstreamedReplicaAnswer
from headstart.gateway.replica_tokenizers import find_tokenizer_of_models
from headstart.gateway.replicas.kv_event_subscriptions import ApproximateIndexFactory, KVEventSubscriptions
from headstart.gateway.replicas.replica_address import server_url_of
from headstart.gateway.replicas.replica_monitor import MonitoredReplica, ReplicaMonitor
from headstart.gateway.routing_explanation import RequestHistory
from headstart.http.access_record import AccessRecord
from headstart.http.auth import Authenticator, Principal
from headstart.http.body_reader import BudgetedBodyReader
from headstart.http.decision_log_writer import DecisionLog
from headstart.http.http_errors import ClientGoneError, HttpError, error_status_body_headers
from headstart.http.logs import ServerLog
from headstart.http.packed_metrics import histogram_quantile
from headstart.http.tracing.request_trace import RequestTrace
from headstart.http.tracing.tracer import make_tracer
from headstart.http.web_pages import WebPageAccess
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.router.index.modelled_pool import ModelledPool, PoolFactory
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.policies.policy_table import make_policy
from headstart.router.router import Router

TTFT_SECONDS = 30.0  # of the times in figures
MAX_TTFT_SAMPLES = 256


class GatewayState:
    """The state of one router. Raises ConfigError for invalid combinations of options. Needs a running loop."""

    def __init__(
        self,
        options: RouterOptions,
        server_options: ServerOptions,
        session: aiohttp.ClientSession,
        reader: RequestParser,
        log: ServerLog,
        decisions: DecisionLog | None = None,
        placed: Placed = place_by_own_router,
        pools: PoolFactory | None = None,
    ) -> None:
        self.options = options
        self.server_options = server_options
        self.reader = reader
        self.log = log
        self._session = session
        self._tokenizer_log: ServerLog | None = None  # the tokenizer of the replicas is looked for if there is one
        secret = _domain_secret(options.replica_api_key)
        admin_keys = server_options.admin_api_key
        self.tracer = make_tracer(server_options.otlp_endpoint, "headstart-router", log)
        self.pages = WebPageAccess(server_options)
        self.auth = Authenticator(
            server_options.api_key,
            admin_keys,
            secret,
            server_options.tenants,
            access=ROUTER_ACCESS,
            host_names=self.pages.names,
        )
        self.bodies = BudgetedBodyReader(server_options.max_body_bytes, MAX_HELD_BYTES)
        self.router = Router(
            make_policy(options.routing_policy),
            shadow_policies=[make_policy(name) for name in options.shadow_policy],
            log=None if decisions is None else decisions.enqueue,
            match_all=None if pools is None else pools.match_in_all_pools,
            prices=None if pools is None else pools.pricing_kernel,
        )
        of_tenants = (key for tenant in server_options.tenants for key in tenant.api_keys)
        known = (options.replica_api_key, *server_options.api_key, *of_tenants)
        probe_key = next((key for key in known if key and key not in admin_keys), None)
        self.members = ReplicaMonitor(
            self.router,
            session,
            log,
            observer=self,
            health_interval=options.health_interval,
            scrape_interval=options.scrape_interval,
            headers={"authorization": f"Bearer {probe_key}"} if probe_key else {},
        )
        self._indexes = ApproximateIndexFactory(
            log, at_pick=options.learn_at == "pick", make_pool=pools or ModelledPool
        )
        self.client_keys = ClientKeyDomains(secrets.token_bytes(32), self.members.members)
        self.listening = KVEventSubscriptions(
            self._indexes.make, lambda: options.tokenizer == "none" or reader.tokenizer is not None
        )
        self.budget = RetryBudget(options.retry_budget)
        max_pending = server_options.max_num_queued_reqs
        self.proxy = ReplicaProxy(self.router, session, options, max_pending, self.budget, placed)
        self.memory = RequestHistory(self.router, server_options.diagnostics_size)
        self.metrics = GatewayMetrics(ROUTES)
        self.metrics.watch_state(self)
        if self.tracer is not None:
            self.metrics.watch_tracer(self.tracer)
        self._ttft: deque[tuple[float, tuple[int, ...]]] = deque(
            [(-inf, self.metrics.ttft.counts)], maxlen=MAX_TTFT_SAMPLES
        )
        self.draining = False
        self.num_under_way = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    @property
    def num_awaiting_first_token(self) -> int:
        """The number of requests without a first token."""
        return self.proxy.num_awaiting_first_token

    @property
    def flow(self) -> FlowControl:
        """The requests that are held."""
        return self.proxy.flow

    def check_ready(self) -> None:
        """Raise DrainingError while draining, and HttpError 503 while no replica accepts requests."""
        self._check(has_replicas=self._has_replicas)

    def check_admission(self) -> None:
        """Raise the same, but for a replica that has just left requests may wait."""
        self._check(has_replicas=self._has_replicas or self.proxy.replica_wait.expects_a_replica(time.monotonic()))

    def _check(self, *, has_replicas: bool) -> None:
        if self.draining:
            raise DrainingError("the router is shutting down and takes no new requests; send it to another one")
        if not has_replicas:
            states = ", ".join(sorted({member.state for member in self.members.members.values()})) or "none is listed"
            raise HttpError(503, f"no replica is up: {states}", code="no_replicas", headers={"retry-after": "1"})

    @property
    def _has_replicas(self) -> bool:
        return any(member.state == "up" for member in self.members.members.values())

    def sender_of_request(
        self, principal: Principal, headers: list[tuple[bytes, bytes]], *, reads_answer: bool = True
    ) -> SenderRoutingInfo:
        """Return the sender of a request. If replicas see one key only, a salt separates the tenants there too.

        If the router has no tenants and forwards keys, the client's key decides (client_keys.py).
        """
        is_salted = bool(principal.domain) and self.options.replica_api_key is not None
        domain = principal.domain or (self.client_keys.domain(headers) if self._passes_keys_on else b"")
        return SenderRoutingInfo(domain, is_salted, session_from_headers(headers), reads_answer)

    @property
    def _passes_keys_on(self) -> bool:
        """Whether replicas see the clients' keys."""
        return self.options.replica_api_key is None

    @contextmanager
    def count_in_flight(self) -> Generator[None]:
        """Count an admitted request as in flight: shutdown waits until all have ended."""
        self.num_under_way += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_under_way -= 1
            if not self.num_under_way:
                self.idle.set()

    def record_end(self, record: AccessRecord, call: ProxiedCall) -> None:
        """Record the outcome of a request for its access line, the metrics and the explainer."""
        record.first_token_at, record.num_tokens = call.first_token_at, call.output_tokens
        if call.outcome == "lost":
            record.error = "replica_lost"
        if call.first_token_at is not None:
            trace_id = call.trace.hex_trace_id if call.trace else ""
            self.metrics.ttft.observe(call.first_token_at - record.arrival, trace_id)
        self.metrics.count_call_outcome(call)
        if record.status not in (401, 403):  # otherwise any client could evict requests that tenants may explain
            self.memory.record_ended(call, record.principal)
        decision = call.in_flight
        if call.trace is not None and call.trace.is_sampled:
            _add_spans(call, call.trace, record)
        if decision is not None:
            record.num_prompt_tokens = decision.view.num_prompt_tokens
            record.route = {
                "replica": decision.endpoint.name,
                "reason": decision.choice.reason,
                "predicted_tokens": decision.candidate.hit_tokens,
                "cached_tokens": decision.cached_tokens,
                "attempts": call.num_attempts,
            }
            member = self.members.members.get(decision.endpoint.name)
            if member is not None and self._passes_keys_on:
                self.client_keys.learn_key_acceptance(call.headers, call.path, record.status, member)

    async def broadcast_admin_request(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> UnstreamedReplicaAnswer:
        """Send an administrator's request to every replica that is up. Raises HttpError if one does not answer."""
        urls = self.server_urls_of_up_replicas
        answer = await self.broadcast_to_urls(urls, method, target, headers, body)
        if target.startswith("/reset_prefix_cache") and answer.status == 200:
            for name, endpoint in self.router.endpoints.items():
                if server_url_of(name) in urls:
                    endpoint.index.on_cache_reset()
        return answer

    async def cache_stats(self, principal: Principal, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
        """Return the cache statistics of all replicas that are up, as far as the caller may see them.

        Raises HttpError if there is no replica, or none reports statistics.
        """
        found = await fetch_all_replica_stats(
            self._session, self.server_urls_of_up_replicas, headers, self._own_headers
        )
        return fleet_stats_json(found, is_admin=principal.is_admin, is_own_key=self._passes_keys_on)

    async def broadcast_to_urls(
        self, urls: list[str], method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes = b""
    ) -> UnstreamedReplicaAnswer:
        """Send a client's request to replicas; see broadcast_for_single_answer."""
        return await broadcast_for_single_answer(self._session, urls, method, target, headers, body, self._own_headers)

    @property
    def server_urls_of_up_replicas(self) -> list[str]:
        """The URLs of the servers whose replicas are up, each once."""
        up = [member.address.url for member in self.members.members.values() if member.state == "up"]
        return list(dict.fromkeys(map(server_url_of, up)))

    @property
    def _own_headers(self) -> dict[str, str]:
        """Headers that replace a client's own in requests to every replica."""
        key = self.options.replica_api_key
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def count_and_decide_logging(self, record: AccessRecord) -> bool:
        """Count a request that has ended; return whether its access line is written."""
        if record.status is not None:
            self.metrics.count_answer(record.path, record.method, record.status)
        access_log = self.server_options.access_log
        return record.should_log(access_log, on_terminal=access_log == "auto" and self.log.is_terminal)

    def record_request_error(self, record: AccessRecord, error: Exception) -> None:
        """Set `error` on the request's record, and log it with its traceback if it is an internal error."""
        _, body, _ = error_status_body_headers(error)
        record.error = body["error"]["code"]
        if not isinstance(error, HeadstartError | HttpError | ClientGoneError):
            self.log.log_exception("internal_error", error, record.request_id)

    async def close(self) -> None:
        """Stop probing replicas and listening to their events."""
        await self.members.close()
        await self.listening.close()
        await self.proxy.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    @property
    def num_in_flight(self) -> int:
        """The requests without a first token, and those at replicas with one."""
        members = self.members.members.values()
        loads = [member.endpoint.load for member in members if member.endpoint is not None]
        return self.num_awaiting_first_token + sum(load.num_streams for load in loads)

    def describe(self) -> dict[str, Any]:
        """Return the description of all replicas: state, load and predicted cache content."""
        now = time.monotonic()
        router = self.router
        return {
            "object": "fleet",
            "policy": router.policy.name,
            "queued": self.num_awaiting_first_token,
            "prediction_error_tokens": router.prediction_error,
            "reports": router.num_reported,
            "regrets": {
                name: {"decisions": r.decisions, "agreed": r.agreed, "ms": round(r.total_ms, 1)}
                for name, r in router.regrets.items()
            },
            "replicas": [self._described(member, now) for member in self.members.members.values()],
        }

    def live_frame(self) -> dict[str, Any]:
        """Return a frame of /v1/cache/live: the description of all replicas, recent times and decisions."""
        now, ttft = time.monotonic(), self.metrics.ttft
        self._ttft.append((now, ttft.counts))
        _, before = next((one for one in reversed(self._ttft) if now - one[0] >= TTFT_SECONDS), self._ttft[0])
        counts = [b - a for a, b in zip(before, ttft.counts, strict=True)]
        times = {name: histogram_quantile(ttft.bounds, counts, share) for name, share in (("p50", 0.5), ("p95", 0.95))}
        return {
            **self.describe(),
            "object": "fleet.figures",
            "ttft_ms": {name: None if value is None else round(1000 * value, 1) for name, value in times.items()},
            "decisions": self.proxy.decisions.list_and_extend_watch(now),
        }

    def _described(self, member: MonitoredReplica, now: float) -> dict[str, Any]:
        endpoint, found = (
            member.endpoint,
            {"url": member.address.url, "state": member.state, "engine": member.metrics.kind},
        )
        if endpoint is None:
            return found
        rates = endpoint.load.rates
        return {
            **found,
            "models": [card.id for card in member.models],
            "ejected": not endpoint.health.is_up(now),
            "pending": endpoint.load.num_awaiting_first_token,
            "streams": endpoint.load.num_streams,
            "backlog_ms": round(endpoint.backlog_ms(now), 1),
            "slowness": round(endpoint.slowdown_versus_fleet(now), 2),
            "rates_ms": {name: value for name, value in rates._asdict().items()},
            "cache": {"block_size": endpoint.block_size, **endpoint.index.describe()},
        }

    # ------------------------------------------------------------------------------- observer of the replica monitor

    def open_replica_index(self, member: MonitoredReplica) -> PrefixIndex:
        """Return the index of a replica's cache, from KV events where it publishes them."""
        return self.listening.open_replica_index(member)

    def on_probed(self, member: MonitoredReplica) -> None:
        """Note the result of a probe."""
        self.listening.on_probe(member)
        self.proxy.silence.on_probe(member)
        if member.state == "up":
            self.proxy.replica_wait.on_replica_up()
        self.proxy.flow.release_held_requests()

    def on_replica_removing(self, url: str) -> None:
        """Forget a removed replica."""
        self._indexes.on_replica_removing(url)
        self.listening.on_replica_removing(url)
        self.proxy.silence.on_replica_removing(url)
        self.proxy.replica_wait.on_replica_removing(url)

    def on_models_changed(self) -> None:
        """Map the model names that are served now, and load their tokenizer if that was requested."""
        self.reader.served = self.members.fleet_models_by_name()
        models = {served.model for served in self.reader.served.values()}
        self.reader.default_model = next(iter(models)) if len(models) == 1 else ""
        if self._tokenizer_log is not None and self.reader.tokenizer is None:
            found = find_tokenizer_of_models(self.members.distinct_model_cards())
            if found is not None:
                self.reader.tokenizer = SegmentedTokenizer(found)
                self._tokenizer_log.write_line("headstart: prompts are counted in the replicas' own tokens")

    def load_tokenizer_when_known(self, log: ServerLog) -> None:
        """Load the replicas' tokenizer once they report their models, if it is on this machine, and log that."""
        self._tokenizer_log = log
        self.on_models_changed()


def _domain_secret(replica_api_key: str | None) -> bytes:
    """Return the secret of tenants' domains: of all routers with one key for replicas, else of this process alone."""
    key = (replica_api_key or "").encode() or secrets.token_bytes(32)
    return hmac.digest(key, b"headstart-router: domains of tenants", "sha256")


def _add_spans(call: ProxiedCall, trace: RequestTrace, record: AccessRecord) -> None:
    """Complete the trace of a request that has ended at the router."""
    now, received_at = time.monotonic(), record.received_at or record.arrival
    call.end_attempt_span(now)
    sent_at = next((span.start for span in trace.spans if span.kind == "client"), now)
    trace.root.attributes |= {  # not spans: encoding one costs as much as seven attributes
        "headstart.receive_ms": (received_at - record.arrival) * 1e3,
        "headstart.route_ms": (sent_at - received_at) * 1e3,
    }
    names = {"gen_ai.request.model": call.reading.request.model[:128], "gen_ai.response.id": call.answer_id}
    trace.root.attributes |= {name: value for name, value in names.items() if value}
    decision = call.in_flight
    if decision is not None and decision.cached_tokens is not None:
        trace.root.attributes["gen_ai.usage.cache_read.input_tokens"] = decision.cached_tokens
