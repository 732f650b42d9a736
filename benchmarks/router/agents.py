"""Routing policies on sessions of coding agents, and what the names of sessions would add to `cost`.

    PYTHONPATH=src:lab/src python benchmarks/router/agents.py --sessions FOLDER [--rows ROW;ROW] [--only POLICY,POLICY]

Recorded sessions (kv-cache-tester, AgentX) with lengths, outputs and pauses divided by 16 (rows `full length`: by 1),
the first requests of each (`whole sessions`: all), all sessions behind one prefix of tools and system prompt, which the
ids of the recording do not show, and sub-agents that are made up: of each two, one begins as its parent does and one
with a prompt of its own kind. `cost` reads no names of sessions. Forms of it do: `names as key` places new prefixes by
the name of the session, its sub-agents' too; `names as hits` believes the replica of the session's last request, or of
its parent's, to have all of that prompt where the index knows of less; `two by name` is `cost` between two replicas by
two hashes of the name.
`two by content` is the same without names, by hashes of the prompt's beginning, as in DualMap (arXiv 2602.06502).
`oracle` serves each request as early as it can; `oracle of all` adds the costs to others that `cost` knows.
Virtual time; cells that are in the file are not run again.
"""

import argparse
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from headstart.router.endpoint import Endpoint
from headstart.router.policies.cost import LeastCostPolicy
from headstart.router.policies.policy import Candidate, Policy, PolicyInput, RankedCandidates
from headstart.router.policies.rendezvous import rank_by_key
from headstart.router.pricing import EVICTED
from headstart.sim.oracle_policy import OraclePolicy, ReplicaQueue
from headstart.sim.profile import REFERENCE
from headstart.sim.sim_fleet import FleetOptions, VirtualFleet, make_endpoint
from headstart.sim.sim_replica import SimReplica
from headstart.sim.sim_report import fleet_report
from headstart.sim.sim_request import SimRequest, requests_from_trace
from headstart.sim.sweep import SimulationConfig
from headstart.workload.recorded.agent_sessions import ConsecutiveIdRuns
from headstart.workload.recorded.trace_files import TraceOptions
from headstart.workload.traces import Trace, TracedRequest
from headstart_lab.router.peers import DualMapPolicy

OUT = Path(__file__).with_name("agents.json")
DIVISOR = 16  # of lengths and times, but in rows of full length
NUM_SESSIONS = 32
PER_SESSION = 24  # first requests of each
WHOLE = 100_000
MAX_PAUSE = 600.0  # seconds, before the division
SPREAD = 120.0  # seconds over which sessions begin, likewise
BLOCK_IDS = 8  # of 64 tokens before the division: blocks of 512 tokens, or of 32
SHARED_IDS = 232  # of 64 tokens before the division: tools and system prompt, alike in all sessions
AGENT_IDS = 180  # the same of sub-agents with prompts of their own kind
MAX_NAMES = 4096
BEGINNING = 2048  # tokens after the division, as the laboratory's DualMap has it
FIGURES = ("ttft_mean_ms", "ttft_p99_ms", "tpot_p99_ms", "e2e_mean_ms", "hit_rate", "errors")


def root_of(session: str) -> str:
    """Return the name of the session that a sub-agent belongs to, or its own."""
    return session.partition("/")[0]


class NamesAsKey(LeastCostPolicy):
    """`cost`, whose new prefixes are placed by the name of the session instead of their own hash."""

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by cost; replicas of about equal cost by the name of the session."""
        session = view.request.session
        return super().rank(view if session is None else view._replace(key=root_of(session).encode()))


class NamesAsHits(LeastCostPolicy):
    """`cost`, which expects the last prompt of a session, or its parent's, where it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self._last: OrderedDict[str, tuple[str, int]] = OrderedDict()  # session -> replica, tokens of the prompt

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by cost; a replica that has more of the prompt by name than by its index is priced by that."""
        choice, session = super().rank(view), view.request.session or ""
        own = self._last.get(session)
        name, tokens = own or self._last.get(root_of(session), ("", 0))
        home = next((one for one in choice.ranked if one.name == name), None)
        hit = min(tokens, view.num_prompt_tokens - 1)
        memo = (session, view.num_prompt_tokens)
        if home is None or home.name == choice.ranked[0].name or hit <= max(view.candidates.hit_tokens):
            return choice._replace(memo=memo)
        if home.endpoint.prompt_cost(view.num_prompt_tokens, hit, view.now).cost_without_evictions >= min(
            choice.scores
        ):
            return choice._replace(memo=memo)
        order = sorted(range(len(choice.ranked)), key=lambda place: choice.ranked[place].name != name)
        first = tuple(choice.ranked[place] for place in order)
        return RankedCandidates(first, tuple(choice.scores[place] for place in order), "by name", memo)

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Remember where the session is; the oldest are forgotten."""
        assert isinstance(choice.memo, tuple)
        session, tokens = choice.memo
        self._last[session] = (endpoint.name, tokens)
        self._last.move_to_end(session)
        if len(self._last) > MAX_NAMES:
            self._last.popitem(last=False)


class TwoByName(LeastCostPolicy):
    """`cost` between the two replicas that two hashes of the session's name choose; the others are fallbacks."""

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by cost, the two first."""
        choice, key = super().rank(view), self.key(view)
        names = [one.name for one in choice.ranked]
        first = rank_by_key(b"1" + key, names)[0]
        pair = {first, rank_by_key(b"2" + key, [name for name in names if name != first])[0]}
        order = sorted(range(len(names)), key=lambda place: names[place] not in pair)
        scores = tuple(choice.scores[place] for place in order)
        return RankedCandidates(tuple(choice.ranked[place] for place in order), scores, "one of two", choice.memo)

    def key(self, view: PolicyInput) -> bytes:
        """Return what is hashed."""
        return root_of(view.request.session or "").encode()


class TwoByContent(TwoByName):
    """The same by the prompt's beginning."""

    def key(self, view: PolicyInput) -> bytes:
        """Return the hash of the block at `BEGINNING` tokens."""
        size = view.candidates.endpoints[0].block_size
        block_hashes = view.request.prompt.block_hashes(size)
        return block_hashes[min(BEGINNING // size, len(block_hashes)) - 1] if block_hashes else view.key


class OracleOfAll(OraclePolicy):
    """`oracle` with the costs to others that `cost` adds: evictions and decodes. Alone it has neither."""

    def _seconds(self, view: PolicyInput, candidate: Candidate) -> float:
        replica, endpoint = self._replicas[candidate.name], candidate.endpoint
        size = replica.profile.block_size
        known = ReplicaQueue(replica).num_cached_blocks(view.request.prompt.block_hashes(size)) * size
        prompt = view.num_prompt_tokens, min(known, view.num_prompt_tokens - 1)
        to_others = EVICTED * endpoint.eviction_cost_ms(*prompt) + endpoint.prompt_cost(*prompt, view.now).decode
        return super()._seconds(view, candidate) + to_others / 1e3


FORMS: dict[str, Callable[[Mapping[str, SimReplica]], Policy]] = {
    "names as key": lambda replicas: NamesAsKey(),
    "names as hits": lambda replicas: NamesAsHits(),
    "two by name": lambda replicas: TwoByName(),
    "two by content": lambda replicas: TwoByContent(),
    "oracle": OraclePolicy,
    "oracle of all": OracleOfAll,
}
POLICIES = (
    "cost",
    "names as key",
    "names as hits",
    "two by name",
    "two by content",
    "lmetric",
    "dualmap",
    "llm-d",
    "oracle",
    "oracle of all",
)


@dataclass(frozen=True)
class Row:
    """A fleet of eight replicas. `pool`: tokens of each, before the division."""

    pool: int = 250_000
    routers: int = 1
    sub_agents: int = 0  # of each session
    or_fewer: bool = False  # sub-agents: 1 to that number
    divisor: int = DIVISOR
    per_session: int = PER_SESSION
    restarts: bool = False  # of all routers at half of the time: their indexes are empty then


ROWS = {
    "as recorded, pools of 0.25M": Row(),
    "as recorded, pools of 1M": Row(pool=1_000_000),
    "4 sub-agents": Row(sub_agents=4),
    "4 sub-agents, 4 routers": Row(sub_agents=4, routers=4),
    "4 sub-agents, 2 routers": Row(sub_agents=4, routers=2),
    "4 sub-agents, 2 routers that restart": Row(sub_agents=4, routers=2, restarts=True),
    "full length, pools of 0.25M": Row(divisor=1),
    "full length, pools of 1M": Row(pool=1_000_000, divisor=1),
    "full length, pools of 4M": Row(pool=4_000_000, divisor=1),
    "full length, whole sessions, pools of 0.25M": Row(divisor=1, per_session=WHOLE),
    "full length, whole sessions, pools of 1M": Row(pool=1_000_000, divisor=1, per_session=WHOLE),
    "full length, whole sessions, pools of 4M": Row(pool=4_000_000, divisor=1, per_session=WHOLE),
    "full length, 1 to 8 sub-agents": Row(pool=1_000_000, divisor=1, sub_agents=8, or_fewer=True),
    "full length, 1 to 8 sub-agents, 2 routers": Row(1_000_000, 2, 8, or_fewer=True, divisor=1),
    "full length, 1 to 8 sub-agents, 4 routers": Row(1_000_000, 4, 8, or_fewer=True, divisor=1),
}


def workload(trace: Trace, row: Row, seed: int) -> list[SimRequest]:
    """Return the first requests of some sessions, with their sub-agents."""
    rng = Random(f"agents/{seed}")
    names = sorted({one.root_session for one in trace.requests})
    chosen = {name: rng.uniform(0.0, SPREAD) for name in rng.sample(names, NUM_SESSIONS)}
    limit = int(0.9 * row.pool) // row.divisor
    kept: dict[str, list[TracedRequest]] = {name: [] for name in chosen}
    for one in trace.requests:
        if (
            one.root_session in kept
            and len(kept[one.root_session]) < row.per_session
            and one.length + one.output <= limit
        ):
            shared = () if one.parent else (range(1 << 30, (1 << 30) + min(SHARED_IDS, len(one.hash_ids))),)
            own = ConsecutiveIdRuns(tuple(_behind(one.hash_ids, SHARED_IDS if shared else 0)))
            at = one.at + chosen[one.root_session] if not one.after else one.at
            ids = ConsecutiveIdRuns((*shared, *own.runs))
            kept[one.root_session].append(replace(one, at=at, hash_ids=ids, pause=min(one.pause, MAX_PAUSE)))
    requests = [one for rows in kept.values() for one in rows]
    numbers = {one.number for one in requests}
    starts = [  # the request before may have been too long
        one if set(one.after) & numbers or not one.after else replace(one, at=chosen[one.root_session], after=())
        for one in requests
    ]
    found = requests_from_trace(replace(trace, requests=tuple(starts)), speed=float(row.divisor))
    return _with_sub_agents(found, row, rng)


def _behind(ids: Any, count: int) -> list[range]:
    """Return the runs of ids behind the first `count`."""
    found: list[range] = []
    for run in ids.runs:
        found += [run[count:]] if len(run) > count else []
        count = max(count - len(run), 0)
    return found


def _with_sub_agents(requests: list[SimRequest], row: Row, rng: Random) -> list[SimRequest]:
    """Return the requests and those of the row's sub-agents in each session, behind some of its requests."""
    found, size, next_id = list(requests), requests[0].id_size, 1_500_000_000
    own = [index for index, one in enumerate(requests) if one.session and "/" not in one.session]
    by_session: dict[str, list[int]] = {}
    for index in own:
        by_session.setdefault(str(requests[index].session), []).append(index)
    for session, indices in by_session.items():
        for number in range(rng.randint(1, row.sub_agents) if row.or_fewer else row.sub_agents):
            parent = rng.choice(indices)
            kind = range((1 << 30) + 1000, (1 << 30) + 1000 + AGENT_IDS)
            ids = requests[parent].block_ids if number % 2 else ConsecutiveIdRuns((kind,))
            assert isinstance(ids, ConsecutiveIdRuns)
            before, runs = parent, ids.truncated_to(requests[parent].prompt_tokens // size).runs
            for turn in range(rng.randint(3, 10)):
                more = rng.randint(10, 60)  # ids of a result, 640 to 3,840 tokens
                runs = (*runs, range(next_id, next_id + more))
                next_id += more
                prompt = ConsecutiveIdRuns(runs)
                pause = rng.expovariate(1 / 5.0) / row.divisor if turn else 0.0
                one = replace(requests[parent], session=f"{session}/made{number}", block_ids=prompt, pause=pause)
                length = len(prompt) * size
                found.append(replace(one, prompt_tokens=length, output_tokens=224 // row.divisor, after=(before,)))
                before = len(found) - 1
            waits = [index for index in indices if parent in requests[index].after]
            for index in waits:
                found[index] = replace(found[index], after=(*found[index].after, before))
    return found


def run(trace: Trace, name: str, policy: str, seed: int) -> dict[str, Any]:
    """Run one cell."""
    row = ROWS[name]
    requests = workload(trace, row, seed)
    block = BLOCK_IDS * 64 // row.divisor
    profile = replace(REFERENCE, block_size=block, num_blocks=row.pool // row.divisor // block)
    base, make = "cost" if policy in FORMS else policy, FORMS.get(policy)
    if policy == "dualmap":  # longer than what all sessions begin with
        make = lambda _: DualMapPolicy(BEGINNING * DIVISOR // row.divisor)  # noqa: E731
    fleet = SimulationConfig(profile, 8, base, seed, row.routers, options=FleetOptions()).build_fleet(make)
    if row.restarts:
        _restart_at_half(fleet, len(requests))
    fleet.run(requests)
    values = fleet_report(fleet).values()
    tokens = sum(one.prompt_tokens for one in requests)
    bound = 1.0 - fleet.ideal_tokens / tokens
    served = values["requests_by_replica"]
    found = {key: values[key] for key in FIGURES}
    return found | {"requests": len(requests), "hit_bound": bound, "by_replica": [min(served), max(served)]}


def _restart_at_half(fleet: VirtualFleet, num_requests: int) -> None:
    """Empty the indexes of all routers, and what their policies remember, once half of the requests have ended."""

    def on_record(record: object) -> None:
        if len(fleet.records) == num_requests // 2:
            for router in fleet.routers:
                router.policy = type(router.policy)() if not isinstance(router.policy, OraclePolicy) else router.policy
                for replica in fleet.replicas.values():
                    router.add(make_endpoint(replica))

    fleet.on_record = on_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, required=True, help="folder of the sessions")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", default="", help="rows, with semicolons")
    parser.add_argument("--only", default="", help="policies, with commas")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    found: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    traces = {divisor: TraceOptions(divisor=divisor).read(asked.sessions) for divisor in (1, DIVISOR)}
    policies = asked.only.split(",") if asked.only else POLICIES
    for seed in range(asked.seeds):
        for row in asked.rows.split(";") if asked.rows else ROWS:
            for policy in policies:
                key, start = f"{row}/{policy}/{seed}", time.process_time()
                if key not in found:
                    found[key] = run(traces[ROWS[row].divisor], row, policy, seed)
                    asked.out.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
                    text = " ".join(f"{name} {value}" for name, value in found[key].items())
                    print(f"{key}: {text}, {time.process_time() - start:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
