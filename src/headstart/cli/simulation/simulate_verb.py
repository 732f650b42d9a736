"""`headstart simulate`: a fleet in virtual time on a recorded or synthetic workload; and `simulate calibrate`."""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.bench.cli import cli_run
from headstart.bench.cli.bench_flags import BenchTarget
from headstart.cli.help_text import PanelHelpCommand, PanelHelpGroup
from headstart.cli.simulation.workload_flags import (
    Blocks,
    Count,
    Decisions,
    DivideLengths,
    ProfileName,
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
    parse_number_list,
    parse_pool_sizes,
    trace_options_of_flags,
)
from headstart.core.errors import ConfigError

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.measurement.report import BenchmarkReport
    from headstart.measurement.runner import EngineSetup

EXAMPLES = """Examples:
  headstart simulate --trace conversation_trace.jsonl --replicas 8 --policy cost,least-load
  headstart simulate --trace conversation_trace.jsonl --replicas 4,8 --profile qwen3-32b@2xh100 --plot fleet.png
  headstart simulate --synthetic decode-heavy --rate 14 --blocks 800 --seeds 5
  headstart simulate --trace conversation_trace.jsonl --replicas 1 --blocks 5%,20% --eviction-policy lru,lhd
  headstart simulate --decisions route.jsonl --policy cost,weighted
  headstart simulate calibrate llama-100m --out here.json"""
app = typer.Typer(cls=PanelHelpGroup, rich_markup_mode=None, invoke_without_command=True, epilog=EXAMPLES)


@app.callback()
def simulate(
    ctx: typer.Context,
    trace: Trace = None,
    decisions: Decisions = None,
    synthetic: Synthetic = None,
    rate: Rate = 14.0,
    speed: Annotated[str, typer.Option(metavar="X,...", help="Times the recorded rate.")] = "1",
    count: Count = 0,
    skip: Skip = 0,
    trace_block_size: TraceBlockSize = 0,
    trace_time_unit: TraceTimeUnit = "",
    divide_lengths: DivideLengths = 1,
    skip_above: SkipAbove = 0,
    sessions_at_once: SessionsAtOnce = 0,
    replicas: Annotated[str, typer.Option(metavar="N,...", help="Replicas behind the router.")] = "8",
    policy: Annotated[str, typer.Option(metavar="NAME,...", help="Routing policies; all: every one.")] = "cost",
    routers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Independent routers, each with a share of the traffic.")
    ] = 1,
    profile: ProfileName = "reference",
    blocks: Blocks = "0",
    eviction: Annotated[
        str, typer.Option("--eviction-policy", metavar="NAME,...", help="2q, lru, lhd. Default: the profile's.")
    ] = "",
    noise: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Of a step's time; 0.1: 10 %. Default: profile.")
    ] = None,
    scenario: Scenario = None,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs per combination; figures are means.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="The first seed.")] = 0,
    slo_ttft: Annotated[str | None, typer.Option(metavar="TIME", help="Limit for goodput, such as 500ms.")] = None,
    slo_tpot: Annotated[str | None, typer.Option(metavar="TIME", help="The same, per output token.")] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Processes.")] = 1,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Also draw the result into this file.")] = None,
) -> None:
    """Simulate a fleet in virtual time: the engine's own scheduler and cache, the router's own policies.

    Only the duration of a step is modelled. Lists with commas are combined. The table goes to stderr; the last line of
    stdout is one JSON document.
    """
    if ctx.invoked_subcommand is not None:
        return
    with cli_run.report_usage_errors():
        options = trace_options_of_flags(
            trace_block_size, trace_time_unit, divide_lengths, skip_above, sessions_at_once
        )
        workload = WorkloadChoice(trace, decisions, synthetic, rate, count, skip, options)
        if noise is not None and not isfinite(noise):
            raise ConfigError(f"--noise {noise}: a finite share of a step's time")
        counts, shares = parse_pool_sizes("--blocks", blocks)
        limits = parse_duration("--slo-ttft", slo_ttft), parse_duration("--slo-tpot", slo_tpot)
        settings: dict[str, Any] = {
            "policies": parse_name_list("--policy", policy),
            "replicas": [int(value) for value in parse_number_list("--replicas", replicas, int)],
            "speeds": parse_number_list("--speed", speed, float),
            "profiles": parse_name_list("--profile", profile),
            "blocks": counts,
            "pool_shares": shares,
            "evictions": parse_name_list("--eviction-policy", eviction) if eviction else (),
        }

    def run(bar: "ProgressBar") -> "BenchmarkReport":
        from headstart.sim.fleet_sweep import SweepConfig, run_fleet_sweep
        from headstart.workload.slo import Slo

        config = SweepConfig(
            workload=workload.with_loaded_trace(bar),
            scenario=scenario,
            routers=routers,
            noise=noise,
            seeds=seeds,
            seed=seed,
            jobs=jobs,
            slo=Slo(*limits),
            **settings,
        )
        return run_fleet_sweep(config, bar)

    cli_run.run_and_exit(run, plot)


@app.command(cls=PanelHelpCommand)
def calibrate(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, hub id or shape; without: the bundled model.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the profile to this .json file.")] = None,
    dtype: Annotated[str, typer.Option(metavar="TEXT", help="auto | bfloat16 | float32.")] = "auto",
    threads: Annotated[int, typer.Option(metavar="N", help="Compute threads; 0: one per granted core.")] = 1,
    blocks: Annotated[int, typer.Option(metavar="N", min=64, help="KV blocks of the engine and the profile.")] = 2048,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the prompts.")] = 0,
    output: Annotated[int, typer.Option("--output-tokens", metavar="N", min=2, help="Output tokens per request.")] = 24,
) -> None:
    """Fit a step cost to real steps of a model on this machine, and print its error on held-out steps."""

    def run(setup: "EngineSetup", bar: "ProgressBar") -> "BenchmarkReport":
        from headstart.sim.calibration import CalibrationConfig, run_calibration

        return run_calibration(setup, CalibrationConfig(out=out, blocks=blocks, output=output), bar)

    cli_run.run_model_bench_and_exit(run, BenchTarget(model or "", dtype=dtype, threads=threads, asked_seed=seed))
