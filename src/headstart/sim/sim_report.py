"""FleetReport: the figures of one simulated run: latencies, goodput, hits by source, redundancy, load by replica."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headstart.sim.sim_fleet import VirtualFleet
from headstart.workload.request_record import Percentiles, Summary, summarize_records
from headstart.workload.slo import Slo


@dataclass(frozen=True, slots=True)
class FleetReport:
    """One run, summarized. Lists are by replica, in the order in which replicas joined."""

    summary: Summary
    goodput: float  # requests per second within the SLO; all that were answered if there is none
    attained: float  # share of requests within it
    holds: bool  # all succeeded, and the 90th percentile of each limited latency is within its limit
    sources: dict[str, float]  # share of prompt tokens: shared, store, followed, computed
    redundancy: float  # prompt tokens computed, again or not / those of one perfect cache for the whole fleet
    requests: tuple[int, ...]
    evictions: tuple[int, ...]
    num_preemptions: int
    num_retries: int
    num_steps: int
    busy: float  # mean share of the time that replicas spent in steps while they were up
    replica_seconds: float  # total time that replicas were up
    first_error: str  # of a failed request; empty: there is none
    prediction_error: float  # tokens: mean absolute error of the routers' expected hits

    def values(self) -> dict[str, Any]:
        """Return the figures as plain values; times in milliseconds."""
        summary = self.summary
        found: dict[str, Any] = {"requests": summary.requests, "errors": summary.errors, "seconds": summary.seconds}
        for name in ("ttft", "tpot", "e2e"):
            found |= _in_ms(name, getattr(summary, name))
        found |= {"goodput": self.goodput, "attained": self.attained, "slo_holds": self.holds}
        found |= {"hit_rate": summary.cached_share, "output_rate": summary.output_rate}
        found |= {f"from_{name}": share for name, share in self.sources.items()}
        found |= {"redundancy": self.redundancy, "prediction_error_tokens": self.prediction_error}
        found |= {"requests_by_replica": list(self.requests), "evictions_by_replica": list(self.evictions)}
        found |= {"preemptions": self.num_preemptions, "retries": self.num_retries, "steps": self.num_steps}
        return found | {"busy": self.busy, "replica_seconds": self.replica_seconds}


def fleet_report(fleet: VirtualFleet, slo: Slo | None = None) -> FleetReport:
    """Return the figures of a fleet that has run. Changes nothing."""
    slo = slo or Slo()
    records = [one.record for one in fleet.records]
    served = Counter(one.replica for one in fleet.records if one.record.ok)
    replicas = list(fleet.replicas.values())
    counters = [replica.counters() for replica in replicas]
    summary = summarize_records(records)
    up = sum(replica.up_seconds(fleet.now) for replica in replicas)
    reported = sum(router.num_reported for router in fleet.routers)
    return FleetReport(
        summary=summary,
        goodput=slo.goodput(records),
        attained=slo.attainment(records),
        holds=slo.is_met_at_percentile(records),
        sources=_sources(fleet),
        redundancy=sum(one.prefill_tokens for one in counters) / max(fleet.ideal_tokens, 1),
        requests=tuple(served[replica.name] for replica in replicas),
        evictions=tuple(replica.num_capacity_evictions for replica in replicas),
        num_preemptions=sum(one.num_preemptions for one in counters),
        num_retries=sum(one.num_attempts - 1 for one in fleet.records if one.num_attempts),
        num_steps=sum(replica.num_steps for replica in replicas),
        busy=sum(replica.busy_seconds for replica in replicas) / up if up else 0.0,
        replica_seconds=up,
        first_error=next((record.error for record in records if record.error is not None), ""),
        prediction_error=sum(router.prediction_error for router in fleet.routers) / max(reported, 1),
    )


def _sources(fleet: VirtualFleet) -> dict[str, float]:
    total = dict.fromkeys(("shared", "store", "followed", "computed"), 0)
    for one in fleet.records:
        for name in total:
            total[name] += getattr(one.breakdown, name)
    tokens = max(sum(total.values()), 1)
    return {name: count / tokens for name, count in total.items()}


def _in_ms(name: str, found: Percentiles | None) -> dict[str, float | None]:
    parts = ("mean", "p50", "p90", "p99")
    return {f"{name}_{part}_ms": None if found is None else 1e3 * getattr(found, part) for part in parts}
