"""Cells of the comparison of routing policies in simulated fleets: workload x policy x seed x one changed factor.

    python benchmarks/router/policies.py --traces DIR [--stage base|factors|ablations|engines] [--quick] [--markdown]

The stage `engines` has other step costs, budgets of new tokens a step and pools, and engines that reserve whole
answers; requests state the length of their answers there. `--quick` takes a fifth of the requests, into a file of its
own. Ablations are forms of `cost`: without one of its parts, or with the true rates given. Cells that are in the file
already are not run again, so it can be stopped and continued. Virtual time: figures do not depend on the machine or
its load. Seeds are paired: the same window, arrivals and noise for every policy.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cells import BASE_ROWS, FACTORS, NUM_REQUESTS, STAGES, SUM, WORKLOADS, conversation

from headstart.core import sequence
from headstart.core.cache.kv_cache import NO_HIT, PrefixHit
from headstart.core.sched import admission
from headstart.core.sched.admission import AdmissionControl
from headstart.core.sched.waiting_queue import OrderedSequences
from headstart.router import pricing
from headstart.router.rate_learner import RateLearner, ReplicaSlowdown
from headstart.router.router import Router
from headstart.router.step_rates import StepRates
from headstart.sim.sim_fleet import FleetOptions
from headstart.sim.sim_report import fleet_report
from headstart.sim.sweep import SimulationConfig

OUT = Path(__file__).with_name("policies.json")
QUICK_OUT = Path(__file__).with_name("policies_quick.json")
QUICK = 5  # with --quick: a row has so many times fewer requests
NO_EVENTS = "no token events"  # `cost` as behind an Envoy whose picker sees no answers
PREDICTED = ("llm-d predicted", "llm-d predicted streaming")  # predicted_latency.py, which needs xgboost-cpu
POLICIES = (
    *("cost", NO_EVENTS, "oracle", "work", "llm-d", "dynamo", "smg", "lmetric", "dualmap", "least-load"),
    *PREDICTED,
)
KEYS = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms", "e2e_mean_ms", "hit_rate", "busy", "errors")
FIGURES = ("ttft_mean_ms", "ttft_p99_ms", "tpot_p99_ms", "e2e_mean_ms")
T95 = {2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 19: 2.093}  # Student's t, two-sided 95 %, by degrees of freedom

ABLATIONS = ("learning off", "true rates", "no decodes")
DECODE, STALL, MAX_PREEMPTIONS = pricing.DECODE, pricing.STALL, admission.MAX_PREEMPTIONS
CAN_ADMIT = AdmissionControl.can_admit
TRUE_RATES = StepRates(*(1e3 * seconds for seconds in (SUM.step, SUM.stream, SUM.resident, SUM.token, SUM.pair)))


def admit_without_credit(
    control: AdmissionControl, seq: sequence.Sequence, hit: PrefixHit, running: OrderedSequences, reserved: int
) -> bool:
    """Admit a sequence when all of it fits beside what the others may yet take: its own hit does not count.

    So does TensorRT-LLM's default, GUARANTEED_NO_EVICT (`getRemainingBlocksToCompletion`).
    """
    return CAN_ADMIT(control, seq, NO_HIT, running, reserved)


class _Fixed(RateLearner):
    """The rates that it was made with, and the length of answers that is assumed before any is known."""

    def record_output_length(self, num_output: int) -> None:
        pass


class _Even(ReplicaSlowdown):
    """A pace that is never learned."""

    def learn(self, ratio: float, now: float) -> None:
        pass


def ablate(router: Router, ablation: str) -> None:
    """Remove a part of `cost` from a router that has decided nothing yet, or give it the true rates."""
    loads = [endpoint.load for endpoint in router.endpoints.values()]
    if ablation == "learning off":
        learner = _Fixed(StepRates(), is_fixed=True)
        for load in loads:
            load.learner, load.pace = learner, _Even()
    elif ablation == "true rates":
        learner = RateLearner(TRUE_RATES, is_fixed=True)
        for load in loads:
            load.learner = learner


def run(row: str, policy: str, seed: int, traces: Path, count: int = NUM_REQUESTS) -> dict[str, Any]:
    """Run one cell."""
    factor = FACTORS[row]
    workload = WORKLOADS[factor.workload]
    make = workload.make
    if factor.replicas != 8:
        make = conversation(1.0, factor.replicas / 8)
    profile = replace(workload.profile, noise=factor.noise)
    if factor.cost is not None:
        profile = replace(profile, cost=factor.cost)
    name = "cost" if policy in (*ABLATIONS, NO_EVENTS, *PREDICTED) else policy
    admission.MAX_PREEMPTIONS = 0 if factor.reserves else MAX_PREEMPTIONS  # 0: none may be, so answers are reserved
    AdmissionControl.can_admit = admit_without_credit if factor.reserves else CAN_ADMIT
    options = FleetOptions(
        probe_interval=factor.probe_interval,
        relays_tokens=policy != NO_EVENTS,
        token_spacing=factor.spacing,
        tells_output=factor.tells_output,
    )
    simulation = SimulationConfig(
        profile, factor.replicas, name, seed, factor.routers, scenario=factor.scenario, options=options
    )
    if factor.believed != 1.0:
        simulation = replace(simulation, believed_blocks=int(factor.believed * profile.num_blocks))
    fleet = simulation.build_fleet()
    for router in fleet.routers:
        ablate(router, policy)
        if policy in PREDICTED:
            from predicted_latency import PredictedLatencyPolicy  # not at the top: no other policy needs xgboost

            PredictedLatencyPolicy(seed, streaming=policy == PREDICTED[1]).attach(router)
    pricing.DECODE, pricing.STALL = (0.0, 0.0) if policy == "no decodes" else (DECODE, STALL)
    fleet.run(make(traces, seed, count))
    values = fleet_report(fleet).values()
    found = {key: values[key] for key in KEYS}
    return found | {"requests_by_replica": [min(values["requests_by_replica"]), max(values["requests_by_replica"])]}


def cells(stage: str, max_seeds: int) -> Iterator[tuple[str, str, int]]:
    """Yield the cells of a stage: the same seed for all rows, then the next; the policies of most interest first."""
    rows, seeds = STAGES[stage]
    seeds = max_seeds or seeds
    for policies in (ABLATIONS,) if stage == "ablations" else (POLICIES[:5], POLICIES[5:]):
        for seed in range(seeds):
            for row in rows:
                for policy in policies:
                    yield row, policy, seed


def key(row: str, policy: str, seed: int) -> str:
    """Return the name of a cell."""
    return f"{row}|{policy}|{seed}"


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired ratios and the upper end of its 95 % interval (Student's t); the mean if unknown."""
    mean = fmean(ratios)
    spread = T95.get(len(ratios) - 1)  # none of a single seed
    return mean, mean if spread is None else mean + spread * stdev(ratios) / sqrt(len(ratios))


def dominators(row: str, found: dict[str, Any]) -> list[str]:
    """Return the policies that are not worse than `cost` in any of the four figures, and better in one.

    Means over the seeds that both have; `oracle` is not a policy that could be used.
    """
    names = list[str]()
    for policy in POLICIES:
        seeds = paired_seeds(row, ("cost", policy), found)
        if policy in ("cost", NO_EVENTS, "oracle") or not seeds:
            continue
        ours, theirs = (
            [fmean(found[key(row, one, seed)][name] for seed in seeds) for name in FIGURES] for one in ("cost", policy)
        )
        if theirs != ours and all(a <= b for a, b in zip(theirs, ours, strict=True)):
            names.append(policy)
    return names


def paired_seeds(row: str, policies: Sequence[str], found: dict[str, Any]) -> list[int]:
    """Return the seeds of which all these cells are there."""
    return [seed for seed in range(20) if all(key(row, policy, seed) in found for policy in policies)]


def markdown(found: dict[str, Any]) -> str:
    """Return the table: a row per row of cells, TTFT mean / p99, TPOT p99 and end to end.

    A column with fewer of the row's seeds has their number in brackets.
    """
    shown = [policy for policy in POLICIES if any(name.split("|")[1] == policy for name in found)]
    ends = f"cost / oracle [95 %] | {NO_EVENTS} / oracle | cost / best peer: TTFT, end to end | dominated by"
    lines = [f"| | {' | '.join(shown)} | {ends} |", "|---" * (len(shown) + 5) + "|"]
    for row in FACTORS:
        seeds = paired_seeds(row, ("cost", "oracle"), found)
        if not seeds:
            continue
        columns: list[str] = []
        for policy in shown:
            done = [found[key(row, policy, seed)] for seed in seeds if key(row, policy, seed) in found]
            number = f" ({len(done)})" if len(done) < len(seeds) else ""
            columns.append(_figures(done) + number if done else "-")
        worse = ", ".join(dominators(row, found)) or "-"
        ratios = (
            f"{_over_oracle('cost', row, found)} | {_over_oracle(NO_EVENTS, row, found)} | {_over_best(row, found)}"
        )
        lines.append(f"| {row} ({len(seeds)}) | {' | '.join(columns)} | {ratios} | {worse} |")
    return "\n".join(lines)


def _over_oracle(policy: str, row: str, found: dict[str, Any]) -> str:
    """Return the mean TTFT / that of the oracle over their common seeds, with its bound if these are more than two."""
    name, seeds = FIGURES[0], paired_seeds(row, (policy, "oracle"), found)
    if not seeds:
        return "-"
    mean, upper = bounds([found[key(row, policy, n)][name] / found[key(row, "oracle", n)][name] for n in seeds])
    return f"{mean:.3f} [{upper:.3f}]" if len(seeds) > 2 else f"{mean:.3f}"


def _over_best(row: str, found: dict[str, Any]) -> str:
    """Return mean TTFT and end to end / those of the best other policy in each, over the seeds that both have."""
    ratios = dict[str, tuple[float, str]]()
    for figure in (FIGURES[0], FIGURES[3]):
        for policy in (one for one in POLICIES if one not in ("cost", NO_EVENTS, "oracle")):
            if seeds := paired_seeds(row, ("cost", policy), found):
                ours, theirs = (fmean(found[key(row, one, n)][figure] for n in seeds) for one in ("cost", policy))
                ratios[figure] = max(ratios.get(figure, (0.0, "")), (ours / theirs, policy))
    return ", ".join(f"{ratio:.2f} ({policy})" for ratio, policy in ratios.values()) or "-"


def ablation_markdown(found: dict[str, Any]) -> str:
    """Return the table of the ablations: each figure / that of `cost`, the mean of paired seeds, with its interval."""
    lines = [f"| | cost | {' | '.join(ABLATIONS)} |", "|---" * (len(ABLATIONS) + 2) + "|"]
    for row in BASE_ROWS:
        seeds = paired_seeds(row, ("cost", *ABLATIONS), found)
        if not seeds:
            continue
        ours = [found[key(row, "cost", n)] for n in seeds]
        columns = [_figures(ours)]
        for ablation in ABLATIONS:
            theirs = [found[key(row, ablation, n)] for n in seeds]
            texts: list[str] = []
            for name in FIGURES:
                ratios = [a[name] / b[name] for a, b in zip(theirs, ours, strict=True)]
                mean, upper = bounds(ratios)
                texts.append(f"{mean:.3f} ± {upper - mean:.3f}" if name == FIGURES[0] else f"{mean:.2f}")
            columns.append(f"{texts[0]} / {'; '.join(texts[1:])}")
        lines.append(f"| {row} ({len(seeds)}) | {' | '.join(columns)} |")
    return "\n".join(lines)


def _figures(cells: Sequence[dict[str, Any]]) -> str:
    """Return the means over cells: TTFT mean / p99 in s; TPOT p99 in ms; end to end in s."""
    ttft, p99, tpot, e2e = (fmean(one[name] for one in cells) for name in FIGURES)
    return f"{ttft / 1e3:.3g} / {p99 / 1e3:.3g}; {tpot:.3g}; {e2e / 1e3:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no cell after so many")
    parser.add_argument("--stage", choices=tuple(STAGES), default="base")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of a row; 0: 5")
    parser.add_argument("--rows", default="", help="rows, with semicolons")
    parser.add_argument("--only", default="", help="policies, with commas")
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests; figures of their own")
    parser.add_argument("--out", type=Path, help="file of the cells; processes at a time need one each")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table (of the ablations, in that stage) and run nothing"
    )
    asked = parser.parse_args()
    asked.out = asked.out or (QUICK_OUT if asked.quick else OUT)
    found: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    if asked.markdown:
        print(ablation_markdown(found) if asked.stage == "ablations" else markdown(found))
        return
    start = time.monotonic()
    for row, policy, seed in cells(asked.stage, asked.seeds):
        name = key(row, policy, seed)
        if name in found or (asked.only and policy not in asked.only.split(",")):
            continue
        if asked.rows and row not in asked.rows.split(";"):
            continue
        if time.monotonic() - start > asked.seconds:
            break
        found[name] = run(row, policy, seed, asked.traces, NUM_REQUESTS // (QUICK if asked.quick else 1))
        asked.out.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        print(name, round(found[name]["ttft_mean_ms"], 1), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
