"""The verbs of `headstart bench` that compare prefix reuse in this process with none, or measure any server.

Importing this module must stay cheap and free of torch, like bench_cli.py, which registers the verbs.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench.cli import cli_run, laboratory
from headstart.bench.cli.bench_flags import BenchTarget, Quick, Runs, SloE2e, SloTpot, SloTtft, add_target_flags

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.measurement.report import BenchmarkReport
    from headstart.measurement.runner import EngineSetup, JobRunner


@add_target_flags("quantization", "caching")
def bench_rotations(
    *,
    where: BenchTarget,
    runs: Runs = 3,
    quick: Quick = False,
) -> None:
    """Send 48 rotations of 1,025 tokens, cold and warm: only uncached tokens use the budget (vLLM #3402)."""
    if not where.is_in_process:
        from headstart.bench.suite import SuitePlan
        from headstart.bench.suite_plans import rotations_scenario_builder as build

        plan = SuitePlan(
            "rotations", build(48, 1025, 3), runs=1 if quick else runs, setup={"requests": 48, "length": 1025}
        )
        cli_run.run_suite_plan(plan, where)
        return

    def bench(setup: "EngineSetup", bar: "ProgressBar") -> "BenchmarkReport":
        from headstart.bench.rotations import TokenRotationsConfig, run_rotations

        config = TokenRotationsConfig(runs=1, decode_rounds=6) if quick else TokenRotationsConfig(runs=runs)
        return run_rotations(setup, config, bar)

    cli_run.run_model_bench_and_exit(bench, where.with_default_model())


@add_target_flags("quantization", "caching")
def bench_intent(
    *,
    where: BenchTarget,
    load: Annotated[bool, typer.Option(help="Latency and Poisson load, on --model (default: the bundled one).")] = True,
    accuracy: Annotated[
        bool | None, typer.Option(help="Answers of the bundled model, float32. Default: without --model only.")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="With --accuracy: also answers constrained by a JSON Schema.")
    ] = False,
    examples: Annotated[int, typer.Option(min=1, help="Held-out sentences used by --accuracy.")] = 80,
    runs: Runs = 3,
    draws: Annotated[int, typer.Option(min=1, help="Poisson draws; the search runs once for each.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals per measured rate, at least.")] = 10,
    min_requests: Annotated[int, typer.Option(min=1, help="Requests per measured rate, at least.")] = 20,
    quick: Quick = False,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_e2e: SloE2e = None,
) -> None:
    """Send 900 shared and 100 own tokens, 30 out, prefix caching off and on: TTFT, decode stall, highest rate.

    Published figures: --seconds 30 --min-requests 40 --examples 200.
    With --against: unloaded requests, then the highest rate within the limits, or four times the unloaded latency.
    """
    if not where.is_in_process:
        from headstart.bench.rate_report import (
            RateSearchConfig,
            RateSearchPlan,
            cached_prefix_workload,
            run_rate_search,
        )

        config = RateSearchConfig(5.0, 10, 1.3) if quick else RateSearchConfig(seconds, min_requests)
        slo = cli_run.slo_from_ms(slo_ttft, slo_tpot, slo_e2e)

        def search(runner: "JobRunner", new_seed: int, bar: "ProgressBar") -> "BenchmarkReport":
            plan = RateSearchPlan("intent", cached_prefix_workload(), new_seed, slo, config, is_guarded=False)
            return run_rate_search(runner, plan, bar)

        cli_run.run_bench_on_target(search, where, 0)
        return

    asked = accuracy if accuracy is not None else schema or not where.model
    found = laboratory.find_lab_entry_point("accuracy") if asked else None
    if asked and found is None:
        with cli_run.report_usage_errors():
            missing = laboratory.lab_not_installed_error("the accuracy of answers")
            if accuracy or schema or not load:
                raise missing
            print(f"not measured: {missing}", file=sys.stderr)

    def bench(setup: "EngineSetup", bar: "ProgressBar") -> "BenchmarkReport":
        from headstart.bench.intent_report import QUICK, IntentConfig, run_intent

        config = QUICK if quick else IntentConfig(runs=runs, draws=draws, seconds=seconds, min_requests=min_requests)
        num = min(examples, 40) if quick else examples
        add_accuracy = found.load()(num, schema, setup.threads) if found is not None else None
        return run_intent(setup, config if load else None, bar, add_accuracy=add_accuracy)

    cli_run.run_model_bench_and_exit(bench, where)
