"""The settings of `bench fleet`, and the results of its runs."""

from dataclasses import astuple, dataclass, field

from headstart.core.errors import ConfigError
from headstart.measurement.machine import ContentionLog
from headstart.router.policies.policy_table import policy_names
from headstart.workload.request_record import RequestRecord
from headstart.workload.synthetic import RequestShape
from headstart_lab.runners.route_process import Entrant

BLOCK_SIZE = 16
BASELINE = "round-robin"
SYSTEM, QUESTION = 3000, 128  # tokens, as in gateway-api-inference-extension; swapped for low hit
TITLES = {"high": "high hit", "low": "low hit", "decode": "decode-heavy"}
SHARED, OWN = 1536, 512  # tokens of a decode-heavy chat
LONGEST = 4  # its longest output / the median


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Sizes. A rate of 0 is replaced by `load` times the measured capacity of round robin."""

    replicas: int = 4
    policies: tuple[str, ...] = ("cost", "weighted", "prefix-threshold", "least-load", "round-robin")
    peers: tuple[Entrant, ...] = ()
    groups: int = 12
    prompts: int = 8
    output: int = 16  # tokens
    context: int = 4096  # of the model: prompts are scaled down to it
    runs: int = 1
    high_rate: float = 0.0  # requests per second
    low_rate: float = 0.0
    decode_rate: float = 0.0
    load: float = 0.7
    decode_output: int = 0  # median output of decode-heavy chats in tokens; 0: without that workload
    workloads: tuple[str, ...] = ()  # keys of TITLES; empty: all

    @property
    def scale(self) -> float:
        """Return the factor that scales the lengths of gateway-api-inference-extension so that they fit the context."""
        return min((self.context - self.output) / (SYSTEM + QUESTION), 1.0)

    @property
    def shapes(self) -> dict[str, RequestShape]:
        """Return the lengths by workload."""
        long, short = int(SYSTEM * self.scale), int(QUESTION * self.scale)
        found = {"high": RequestShape(long, short, self.output), "low": RequestShape(short, long, self.output)}
        if self.decode_output:
            found["decode"] = RequestShape(SHARED, OWN, self.decode_output)
        return found

    @property
    def kinds(self) -> list[str]:
        """Return the workloads that are measured."""
        return [kind for kind in self.shapes if not self.workloads or kind in self.workloads]

    @property
    def rates(self) -> dict[str, float]:
        """Return the requested rates by workload."""
        return {"high": self.high_rate, "low": self.low_rate, "decode": self.decode_rate}

    @property
    def pool_blocks(self) -> int:
        """Return the KV blocks of each replica: a third of the groups' system prompts of high hit."""
        return self.groups * self.shapes["high"].shared // 3 // BLOCK_SIZE

    def check(self) -> None:
        """Raise ConfigError if a replica cannot hold a single request."""
        unknown = [kind for kind in self.workloads if kind not in self.shapes]
        if unknown:
            raise ConfigError(
                f"--workload {unknown[0]}: use one of {', '.join(TITLES)}; decode needs --decode-output-tokens"
            )
        longest = LONGEST * self.decode_output + SHARED + OWN
        if self.decode_output and longest > self.context:
            raise ConfigError(
                f"--decode-output-tokens {self.decode_output}: the longest chat has {longest} tokens, "
                f"and the context {self.context}"
            )
        need = -(-max(sum(astuple(shape)) for shape in self.shapes.values()) // BLOCK_SIZE)
        if self.pool_blocks < need:
            raise ConfigError(
                f"--groups {self.groups}: a third of their system prompts is {self.pool_blocks} blocks, "
                f"and one request needs {need}; use more groups"
            )

    def entrants(self) -> list[Entrant]:
        """Return all routers, in the order of the report. Raises ConfigError."""
        unknown = [name for name in self.policies if name not in policy_names()]
        if unknown:
            raise ConfigError(f"routing policy {unknown[0]!r} is unknown; use one of {', '.join(policy_names())}")
        return [*(Entrant(name, policy=name) for name in self.policies), *self.peers]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one router on one workload."""

    records: tuple[RequestRecord, ...]
    shares: tuple[float, ...]  # of the prompt tokens, by replica
    prediction_errors: tuple[int, ...] = ()  # tokens, by the decision log: of our routers only
    router_cpu: float = 0.0  # seconds
    version: str = ""

    @property
    def ttfts(self) -> list[float]:
        """Return the times to first token of successful requests, in milliseconds."""
        return [1e3 * record.ttft for record in self.records if record.ok and record.ttft is not None]

    @property
    def tpots(self) -> list[float]:
        """Return the times per output token after the first of successful requests, in milliseconds."""
        return [1e3 * record.tpot for record in self.records if record.ok and record.tpot is not None]

    @property
    def latencies(self) -> list[float]:
        """Return the end-to-end latencies of successful requests, in milliseconds."""
        return [1e3 * record.e2e for record in self.records if record.ok and record.e2e is not None]

    @property
    def hit_rate(self) -> float:
        """Return cached prompt tokens / prompt tokens, from the usage in the replicas' answers."""
        done = [record for record in self.records if record.ok]
        return sum(record.cached_tokens for record in done) / max(sum(record.prompt_tokens for record in done), 1)

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]


@dataclass(slots=True)
class Measured:
    """All runs: by workload, by router."""

    trials: dict[str, dict[str, list[Trial]]]
    rates: dict[str, float] = field(default_factory=dict[str, float])
    borne: dict[str, float] = field(default_factory=dict[str, float])  # requests/s by round robin, under full load
    log: ContentionLog = field(default_factory=ContentionLog.empty)
