"""Sessions of coding agents, one JSON object each: the format of kv-cache-tester, AgentX and AIPerf's `weka_trace`.

A session has requests with a time, lengths and an id per full block of `block_size` tokens, and sub-agents with
requests of their own. Ids are local to a session unless it says otherwise, so each session's are numbered anew. A
request comes after the answer of the one before by the recorded pause; a sub-agent's first one after the request that
started it, and a request that follows a sub-agent after all answers of that.

Ids are kept as runs of consecutive numbers: a turn of 100,000 tokens takes a few hundred bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeGuard, cast, overload

from headstart.common_prefix import common_prefix_length
from headstart.core.errors import ConfigError
from headstart.workload.traces import Trace, TracedRequest, check_traced_request, check_workload_duration

MAX_ID = (1 << 31) - 1  # ids are tokens of a simulation
EPSILON = 1e-3  # seconds by which recorded ends and starts may be rounded


class ConsecutiveIdRuns(Sequence[int]):
    """A sequence of ids as runs of consecutive ones. A slice from the beginning is one again."""

    __slots__ = ("_length", "runs")

    def __init__(self, runs: tuple[range, ...]) -> None:
        self.runs = runs
        self._length = sum(map(len, runs))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.runs)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self.truncated_to(stop) if (start, step) == (0, 1) else tuple(self)[index]
        at = index + self._length if index < 0 else index
        for run in self.runs if at >= 0 else ():
            if at < len(run):
                return run[at]
            at -= len(run)
        raise IndexError(index)

    def truncated_to(self, count: int) -> "ConsecutiveIdRuns":
        """Return the first `count` ids."""
        found: list[range] = []
        for run in self.runs:
            if count <= 0:
                break
            found.append(run[:count])
            count -= len(run)
        return ConsecutiveIdRuns(tuple(found))


class SessionReader:
    """Reads sessions one after the other; their requests have numbers, and ids of their own, over all of them."""

    def __init__(self) -> None:
        self.block_size = 0  # of all sessions; 0 before the first
        self.requests: list[TracedRequest] = []
        self._names: set[str] = set()
        self._shared: dict[int, int] = {}  # ids of sessions that share theirs
        self._next_id = 0
        self._next_rest = MAX_ID  # ids of tokens behind the last full block, which no other request has

    def add_session(self, session: Mapping[str, Any]) -> None:
        """Read one session. Raises ConfigError for what is none."""
        name = str(session.get("id"))
        try:
            size = int(session["block_size"])
            if self.block_size not in (0, size) or size < 1:
                raise ValueError(f"its ids stand for {size} tokens each, those of the others for {self.block_size}")
            if name in self._names:
                raise ValueError("there is another one of this id")
            self.block_size = size
            self._names.add(name)
            ids = self._shared if session.get("hash_id_scope") == "global" else {}
            self._add_requests(name, session["requests"], ids)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigError(f"session {name[:60]!r} cannot be read: {error!r}"[:400]) from error

    def trace(self) -> Trace:
        """Return all sessions, each from time 0."""
        if not self.requests:
            raise ConfigError("the trace has no requests")
        requests = sorted(self.requests, key=lambda request: request.at)
        check_workload_duration(requests[-1].at)
        return Trace("sessions", tuple(requests), self.block_size)

    def _add_requests(self, session: str, rows: Sequence[Mapping[str, Any]], ids: dict[int, int]) -> None:
        thread = _Thread(session, ids)
        agents: list[_Thread] = []  # whose end the next request may wait for
        start = float(rows[0]["t"]) if rows else 0.0
        for row in rows:
            at = float(row["t"])
            if row.get("type") != "subagent":
                ended = [agent for agent in agents if agent.done and agent.done[-1][1] <= at - start + EPSILON]
                agents = [agent for agent in agents if agent not in ended]
                self._add_request(thread, row, at - start, [agent.done[-1] for agent in ended])
                continue
            agents.append(_Thread(f"{session}/{row['agent_id']}", ids, session))
            before = thread.ended(at - start)
            for inner in row["requests"]:
                own = float(inner["t"])
                is_relative = own + EPSILON < at  # to the sub-agent's beginning, not to the session's
                self._add_request(agents[-1], inner, own - start + (at if is_relative else 0.0), before)
                before = []

    def _add_request(self, thread: "_Thread", row: Mapping[str, Any], at: float, others: "list[_Done]") -> None:
        """Add one request, which comes after the answer of the one before in its thread, and of `others`."""
        length, output, size = int(row["in"]), int(row["out"]), self.block_size
        check_traced_request(at, length, output)
        names = _ids_of(row["hash_ids"])
        if len(names) < length // size:
            raise ValueError(f"a prompt has {len(names)} blocks of {size} for {length} tokens")
        ids = thread.runs(names[: -(-length // size)], self._number)
        if len(ids) * size < length:
            ids = ConsecutiveIdRuns((*ids.runs, range(self._next_rest, self._next_rest + 1)))
            self._next_rest -= 1
        before = [*thread.ended(at), *others]
        number = len(self.requests)
        thread.done.append(_Done(number, at + max(float(row.get("api_time") or 0.0), 0.0)))
        self.requests.append(
            TracedRequest(
                at,
                length,
                output,
                ids,
                session=thread.session,
                parent=thread.parent,
                number=number,
                after=tuple(one.number for one in before),
                pause=max(at - max((one.end for one in before), default=0.0), 0.0),
            )
        )

    def _number(self, name: int, ids: dict[int, int]) -> int:
        """Return the number of an id over all sessions."""
        if name not in ids:
            if self._next_id >= self._next_rest:
                raise ValueError(f"more than {MAX_ID} different blocks")
            ids[name] = self._next_id
            self._next_id += 1
        return ids[name]


class _Done(NamedTuple):
    """A request and the time at which its answer ended, in seconds of its session."""

    number: int
    end: float


class _Thread:
    """The requests of one agent, in order."""

    def __init__(self, session: str, ids: dict[int, int], parent: str = "") -> None:
        self.session = session
        self.parent = parent
        self.done: list[_Done] = []
        self._ids = ids
        self._names: list[int] = []
        self._runs = ConsecutiveIdRuns(())

    def ended(self, at: float) -> list[_Done]:
        """Return the last request whose answer had ended at a time; recorded requests may overlap."""
        found = next((one for one in reversed(self.done) if one.end <= at + EPSILON), None)
        return [] if found is None else [found]

    def runs(self, names: list[int], number_of: Callable[[int, dict[int, int]], int]) -> ConsecutiveIdRuns:
        """Return ids as runs; those that the request before begins with are not looked at again."""
        same = common_prefix_length(names, self._names)
        runs = list(self._runs.truncated_to(same).runs)
        for name in names[same:]:
            number = number_of(name, self._ids)
            if runs and runs[-1].stop == number:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
        self._names, self._runs = names, ConsecutiveIdRuns(tuple(runs))
        return self._runs


def _ids_of(value: object) -> list[int]:
    found = cast("list[int]", value) if isinstance(value, list) else []
    if found != value or set(map(type, found)) - {int}:
        raise ValueError("hash_ids is no list of numbers")
    return found


def is_agent_session(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a JSON value is a session."""
    return isinstance(value, dict) and {"requests", "block_size"} <= value.keys()
