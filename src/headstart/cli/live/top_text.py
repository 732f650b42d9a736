"""The screen of `headstart top`: figures and prefix tree of a server, or the replicas of a router, as lines of text."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headstart.core.errors import HeadstartError
from headstart.http.logs import escape_unprintable

BAR = 30  # columns
MARKS = "#=-.+"  # of the parts of a bar, in their order
MAX_CAUSES = 5
MAX_TENANTS = 6
MAX_DECISIONS = 6
_KV = {"referenced": "in use", "pinned_idle": "pinned", "idle": "evictable", "scratch": "free"}
_STATES = {"in_use": "in use", "reused": "reused", "cached": "cached once"}


class CauseLoss(msgspec.Struct):
    """Tokens computed for one cause."""

    cause: str
    tokens: int
    remedy: str


class TenantFigures(msgspec.Struct):
    """Prompt tokens of a tenant; `evicted_tokens`: computed again, `evicted_by` tenants. `cause`: of most losses."""

    tenant: str
    prompt_tokens: int
    cached_tokens: int
    evicted_tokens: int
    evicted_by: dict[str, int] = {}
    cause: str | None = None


class ReplicaFigures(msgspec.Struct):
    """A replica as its router knows it."""

    url: str
    state: str
    pending: int = 0
    streams: int = 0
    backlog_ms: float = 0.0
    slowness: float = 1.0
    cache: dict[str, Any] = {}


class LiveFrame(msgspec.Struct):
    """A frame of /v1/cache/live, of a server or of a router; see docs/live-page.md."""

    object: str
    model: str = ""
    window_seconds: float = 0.0
    sources: dict[str, int] = {}
    hit_rate: float | None = None
    losses: list[CauseLoss] = []
    tenants: list[TenantFigures] = []
    running: int | None = None
    waiting: int = 0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    ttft_ms: dict[str, float | None] = {}
    kv_tokens: dict[str, int] = {}
    policy: str = ""
    queued: int = 0
    replicas: list[ReplicaFigures] = []
    decisions: list[dict[str, Any]] = []


class TreeReply(msgspec.Struct):
    """The answer of /v1/cache/tree."""

    tokens: int
    capacity_tokens: int
    num_runs: int
    columns: list[str]
    runs: list[list[Any]]
    tenants: dict[str, int] = {}  # cached tokens


def render_screen(address: str, figures: Any, tree: Any | None, *, columns: int, rows: int) -> list[str]:
    """Return at most `rows` lines of at most `columns` characters. `tree` None: of a router.

    Raises HeadstartError for answers that are not those of this version.
    """
    try:
        frame = msgspec.convert(figures, LiveFrame)
        reply = None if tree is None else msgspec.convert(tree, TreeReply)
        made = [f"Headstart  {frame.model or 'router'}  {address}", ""]
        made += _fleet(frame) if frame.object == "fleet.figures" else _server(frame)
        if reply is not None:
            made += [*_tenants(frame.tenants, reply.tenants), *_tree(reply, columns)]
    except (msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
        raise HeadstartError(f"{address} does not answer as this version does ({error})") from error
    return [escape_unprintable(line)[:columns] for line in made[:rows]]


def _server(frame: LiveFrame) -> Iterator[str]:
    if frame.running is not None:
        yield (
            f"running {frame.running}, waiting {frame.waiting} | TTFT {_times(frame.ttft_ms)} | tok/s: prompt "
            f"{frame.prompt_tokens_per_s:.0f}, output {frame.output_tokens_per_s:.0f} | hit {_share(frame.hit_rate)}"
        )
    if frame.kv_tokens:
        yield f"KV       {_bar({name: frame.kv_tokens.get(key, 0) for key, name in _KV.items()})}"
    yield f"prompts  {_bar(frame.sources)}"
    total = sum(frame.sources.values())
    yield from ("", f"computed, by cause, in the last {frame.window_seconds:.0f} s:")
    for lost in frame.losses[:MAX_CAUSES]:
        share = lost.tokens / total if total else None
        yield f"  {lost.cause.replace('_', ' '):<18} {lost.tokens:>9,} {_share(share):>6}  {lost.remedy}"
    if not frame.losses:
        yield "  nothing"


def _tenants(tenants: list[TenantFigures], held: Mapping[str, int]) -> Iterator[str]:
    if len(tenants) < 2:
        return
    yield from (
        "",
        f"{'tenant':<20} {'prompts':>10} {'reused':>6} {'computed':>10} {'evicted':>9} {'cached':>9}  cause",
    )
    for one in tenants[:MAX_TENANTS]:
        share, computed = _share(one.cached_tokens / (one.prompt_tokens or 1)), one.prompt_tokens - one.cached_tokens
        numbers = f"{one.prompt_tokens:>10,} {share:>6} {computed:>10,} {one.evicted_tokens:>9,}"
        names = ["itself" if name == one.tenant else name for name in one.evicted_by]
        cause = f"evicted by {', '.join(names)}" if one.cause == "evicted" else (one.cause or "-").replace("_", " ")
        yield f"{one.tenant:<20} {numbers} {held.get(one.tenant, 0):>9,}  {cause}"


def _fleet(frame: LiveFrame) -> Iterator[str]:
    yield f"waiting {frame.queued} | TTFT {_times(frame.ttft_ms)} | policy {frame.policy}"
    yield from (
        "",
        f"{'replica':<32} {'state':<10} {'waiting':>7} {'streams':>7} {'backlog':>9} {'slowness':>8}  cache",
    )
    for one in frame.replicas:
        cache = ", ".join(
            f"{name} {value}" for name, value in one.cache.items() if isinstance(value, int | float | str)
        )
        numbers = f"{one.pending:>7} {one.streams:>7} {one.backlog_ms:>6.0f} ms {one.slowness:>8.2f}"
        yield f"{one.url:<32} {one.state:<10} {numbers}  {cache}"
    yield from ("", "last decisions: prompt tokens, replica, reason; price of each")
    for made in frame.decisions[:MAX_DECISIONS]:
        prices = ", ".join(f"{one['endpoint']} {one['cost_ms']:.1f} ms" for one in made["candidates"])
        yield f"  {made['prompt_tokens']:>7,}  {made['endpoint']}  {made['reason']}; {prices}"
    if not frame.decisions:
        yield "  none yet"


def _tree(reply: TreeReply, columns: int) -> Iterator[str]:
    yield from ("", f"prefix tree: {reply.tokens:,} of {reply.capacity_tokens:,} tokens, {reply.num_runs:,} runs")
    depths: list[int] = []
    for values in reply.runs:
        run = dict(zip(reply.columns, values, strict=True))
        depths.append(depths[run["parent"]] + 1 if run["parent"] >= 0 else 0)
        below, indent = run["subtree_tokens"], "  " * depths[-1]
        bar = "#" * max(round(BAR * below / (reply.tokens or 1)), 1)
        state = _STATES.get(run["state"], "?") + (", pinned" if run["pinned"] else "")
        text = " ".join(str(run["text"]).split())
        yield f"  {indent + bar:<{BAR + 4}} {below:>9,}  {run['users']:>3} users  {state:<19} {text}"[:columns]


def _bar(parts: Mapping[str, int]) -> str:
    total = sum(parts.values())
    marked = [(name, value, mark) for (name, value), mark in zip(parts.items(), MARKS, strict=False) if value]
    marks = "".join(mark * round(BAR * value / total) for _, value, mark in marked)
    named = ", ".join(f"{name} {value:,} {mark}" for name, value, mark in marked)
    return f"[{marks[:BAR]:<{BAR}}] {named or 'none'}"


def _times(times: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'-' if value is None else f'{value:.0f} ms'}" for name, value in times.items())


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
