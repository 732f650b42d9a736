"""`headstart plan`: the smallest fleet and the policy that meet a service level objective, by simulation."""

from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench.cli import cli_run
from headstart.cli.simulation.workload_flags import (
    Blocks,
    Count,
    Decisions,
    DivideLengths,
    Rate,
    Scenario,
    SessionsAtOnce,
    Skip,
    SkipAbove,
    Synthetic,
    Trace,
    TraceBlockSize,
    TraceTimeUnit,
    WorkloadChoice,
    parse_duration,
    parse_name_list,
    parse_pool_sizes,
    trace_options_of_flags,
)
from headstart.core.errors import ConfigError

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.measurement.report import BenchmarkReport

EXAMPLES = """Examples:
  headstart plan --trace conversation_trace.jsonl --slo-ttft 2s --slo-tpot 50ms
  headstart plan --synthetic decode-heavy --rate 14 --slo-tpot 30ms --profile qwen3-32b@2xh100"""


def plan(
    trace: Trace = None,
    decisions: Decisions = None,
    synthetic: Synthetic = None,
    rate: Rate = 14.0,
    speed: Annotated[float, typer.Option(metavar="X", min=0.001, help="Times the recorded rate.")] = 1.0,
    count: Count = 0,
    skip: Skip = 0,
    trace_block_size: TraceBlockSize = 0,
    trace_time_unit: TraceTimeUnit = "",
    divide_lengths: DivideLengths = 1,
    skip_above: SkipAbove = 0,
    sessions_at_once: SessionsAtOnce = 0,
    policy: Annotated[str, typer.Option(metavar="NAME,...", help="Routing policies; all: every one.")] = "cost",
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="reference, MODEL@2xGPU (datasheets), or a calibrated file.")
    ] = "reference",
    blocks: Blocks = "0",
    max_replicas: Annotated[int, typer.Option(metavar="N", min=1, help="The largest fleet to try.")] = 256,
    scenario: Scenario = None,
    slo_ttft: Annotated[str | None, typer.Option(metavar="TIME", help="Limit of its 90th percentile: 500ms.")] = None,
    slo_tpot: Annotated[str | None, typer.Option(metavar="TIME", help="The same, per output token: 50ms.")] = None,
    slo_e2e: Annotated[str | None, typer.Option(metavar="TIME", help="The same, to the last token: 20s.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of noise and synthetic traffic.")] = 0,
) -> None:
    """Find the smallest simulated fleet, and the routing policy, that meet latency limits.

    A fleet meets them if no request fails and the 90th percentile of every limited latency is within its limit. With
    several sizes of --blocks, there is a fleet for each.
    """
    with cli_run.report_usage_errors():
        options = trace_options_of_flags(
            trace_block_size, trace_time_unit, divide_lengths, skip_above, sessions_at_once
        )
        workload = WorkloadChoice(trace, decisions, synthetic, rate, count, skip, options)
        given = (("--slo-ttft", slo_ttft), ("--slo-tpot", slo_tpot), ("--slo-e2e", slo_e2e))
        seconds = [parse_duration(flag, text) for flag, text in given]
        if not any(seconds):
            raise ConfigError("give a limit: --slo-ttft, --slo-tpot or --slo-e2e, such as --slo-ttft 500ms")
        policies = parse_name_list("--policy", policy)
        counts, shares = parse_pool_sizes("--blocks", blocks)

    def run(bar: "ProgressBar") -> "BenchmarkReport":
        from headstart.sim.fleet_plan import PlanConfig, run_fleet_plan
        from headstart.workload.slo import Slo

        config = PlanConfig(
            workload=workload.with_loaded_trace(bar),
            policies=policies,
            profile=profile,
            blocks=counts,
            pool_shares=shares,
            speed=speed,
            max_replicas=max_replicas,
            scenario=scenario,
            slo=Slo(*seconds),
            seed=seed,
        )
        return run_fleet_plan(config, bar)

    cli_run.run_and_exit(run, None)
