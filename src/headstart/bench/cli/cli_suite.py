"""The verbs of `headstart bench` that measure a local engine or any server by one definition of each workload.

Importing this module must stay cheap and free of torch, like bench_cli.py, which registers the verbs.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench.cli import cli_run
from headstart.bench.cli.bench_flags import BenchTarget, Runs, SloE2e, SloTpot, SloTtft, add_target_flags

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.measurement.report import BenchmarkReport
    from headstart.measurement.runner import JobRunner

PrefixTokens = Annotated[int, typer.Option(min=0, help="Shared tokens.")]
OwnTokens = Annotated[int, typer.Option(min=1, help="Unshared tokens of each prompt.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate (ignore_eos).")]
Concurrency = Annotated[int, typer.Option(min=0, help="Closed loop: concurrent requests; 0: at their arrival times.")]


@add_target_flags()
def bench_shared_prefix(
    *,
    where: BenchTarget,
    groups: Annotated[int, typer.Option(min=1, help="Groups of prompts; each shares a prefix.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 8,
    prefix_tokens: PrefixTokens = 1024,
    own_tokens: OwnTokens = 64,
    output_tokens: OutputTokens = 32,
    rate: Annotated[
        str, typer.Option(metavar="R", help="Poisson requests/s, or: search (for the highest within limits).")
    ] = "",
    concurrency: Concurrency = 0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_e2e: SloE2e = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of arrivals per rate of a search.")] = 30,
    runs: Runs = 3,
) -> None:
    """Serve SGLang's generated-shared-prefix: all at once, in a closed loop, or at a Poisson rate.

    Without limits a search allows four times the latency of an unloaded request.
    """
    from headstart.bench.rate_report import RateSearchConfig, RateSearchPlan, run_rate_search
    from headstart.bench.suite import SuitePlan
    from headstart.bench.suite_plans import SharedPrefixGroups, parse_rate
    from headstart.workload.synthetic import RequestShape

    slo = cli_run.slo_from_ms(slo_ttft, slo_tpot, slo_e2e)
    shape = RequestShape(prefix_tokens, own_tokens, output_tokens)
    with cli_run.report_usage_errors():
        found = parse_rate(rate)
    sizes = SharedPrefixGroups(groups, prompts, shape, found or 0.0, 0 if found else concurrency)
    if found is not None:
        cli_run.run_suite_plan(
            SuitePlan("shared-prefix", sizes.build_scenario, runs=runs, slo=slo, setup=sizes.setup_facts), where
        )
        return

    def search(runner: "JobRunner", new_seed: int, bar: "ProgressBar") -> "BenchmarkReport":
        plan = RateSearchPlan(
            "shared-prefix",
            sizes.load_scenario_builder,
            new_seed,
            slo,
            RateSearchConfig(seconds),
            is_guarded=where.is_in_process,
        )
        return run_rate_search(runner, replace(plan, setup=sizes.setup_facts), bar)

    cli_run.run_bench_on_target(search, where, cli_run.MAX_BLOCKS)


@add_target_flags()
def bench_decode(
    *,
    where: BenchTarget,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 32,
    prefixes: Annotated[str, typer.Option(help="both | shared | distinct.")] = "both",
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: greedy; above 0: sampled.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="With a temperature; 1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="With a temperature; 0: off.")] = 0,
    prefix_tokens: PrefixTokens = 1024,
    own_tokens: OwnTokens = 16,
    output_tokens: OutputTokens = 128,
    runs: Runs = 3,
) -> None:
    """Run streams that decode at once behind cached prefixes; tokens/s count from the last first token on."""
    from headstart.bench.suite import SuitePlan
    from headstart.bench.suite_plans import decode_scenario_builder as build
    from headstart.workload.jobs import TokenSampling
    from headstart.workload.synthetic import RequestShape

    with cli_run.report_usage_errors():
        sampling = TokenSampling(temperature, top_p, top_k)
        made = build(prefixes, streams, RequestShape(prefix_tokens, own_tokens, output_tokens), sampling)
    sizes = {
        "streams": streams,
        "prefix_tokens": prefix_tokens,
        "own_tokens": own_tokens,
        "output_tokens": output_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
    }
    cli_run.run_suite_plan(SuitePlan("decode", made, runs=runs, setup=sizes), where)


@add_target_flags()
def bench_prefill(
    *,
    where: BenchTarget,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "128,512,1000,2000",
    cached_share: Annotated[float, typer.Option(min=0, max=1, help="Cached share of a warm prompt.")] = 0.9,
    requests: Annotated[int, typer.Option(min=1, help="Prompts per length and repetition.")] = 3,
    runs: Runs = 3,
) -> None:
    """Send prompts one at a time, one token out: time to the first token, all new and with a cached beginning."""
    from headstart.bench.suite import SuitePlan, run_suite
    from headstart.bench.suite_plans import add_ttft_by_length_chart, parse_lengths
    from headstart.bench.suite_plans import prefill_scenario_builder as build

    with cli_run.report_usage_errors():
        parsed = parse_lengths(lengths)
    sizes = {"lengths": parsed, "cached_share": cached_share, "requests": requests}
    plan = SuitePlan("prefill", build(parsed, cached_share, requests), runs=runs, setup=sizes)

    def bench(runner: "JobRunner", new_seed: int, bar: "ProgressBar") -> "BenchmarkReport":
        return add_ttft_by_length_chart(
            run_suite(runner, replace(plan, seed=new_seed, is_guarded=where.is_in_process), bar), parsed
        )

    cli_run.run_bench_on_target(bench, where, requests * sum(2 * length // 16 + 4 for length in parsed))


@add_target_flags()
def bench_trace(
    *,
    where: BenchTarget,
    trace: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="Mooncake, Bailian or agent jsonl, Azure csv, a session or a folder of them; detected from content.",
        ),
    ],
    limit: Annotated[int, typer.Option(min=0, help="Use the first N requests; 0: all.")] = 100,
    skip_above: Annotated[
        int,
        typer.Option(
            min=0, help="Leave out longer prompts, or sessions with one, in the bench_trace's tokens; 0: none."
        ),
    ] = 0,
    trace_block_size: Annotated[
        int, typer.Option(min=0, help="Tokens per id of the bench_trace; 0: by the lengths of its prompts.")
    ] = 0,
    trace_time_unit: Annotated[
        str,
        typer.Option(
            help="Of the bench_trace: s, ms, us, ns. Default: the format's, if it is possible.", show_default=False
        ),
    ] = "",
    divide_lengths: Annotated[
        int, typer.Option(min=1, help="Divide all lengths of a bench_trace with ids by N, also outputs.")
    ] = 1,
    sessions_at_once: Annotated[
        int, typer.Option(min=0, help="Sessions of the bench_trace at a time; 0: all as recorded.")
    ] = 0,
    speed: Annotated[float, typer.Option(min=0.001, help="Arrival rate relative to the recorded one.")] = 1,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=0, help="Scale all lengths so that the longest prompt has this many; 0: never.")
    ] = 0,
    concurrency: Concurrency = 0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_e2e: SloE2e = None,
    runs: Runs = 1,
) -> None:
    """Replay recorded traffic: its arrivals, its lengths and its shared prefixes, with synthetic tokens."""
    from headstart.bench.suite import SuitePlan
    from headstart.bench.suite_plans import avoidable_prompt_token_share, describe_loop, trace_scenario_builder
    from headstart.measurement.progress_bar import progress_bar
    from headstart.workload.recorded.trace_files import TraceOptions
    from headstart.workload.recorded.trace_units import TraceUnits

    with cli_run.report_usage_errors(), progress_bar() as bar:
        units = TraceUnits(trace_block_size, trace_time_unit)
        options = TraceOptions(units, divide_lengths, skip_above, sessions_at_once)
        bar.start_stage(f"reading {trace.name}")
        found = options.read(trace).first(limit)
    factor = found.fitting_length_factor(max_prompt_tokens)
    sizes = {
        "trace": trace.name,
        **options.report_facts(found),
        "requests": len(found.requests),
        "avoidable_share": avoidable_prompt_token_share(found),
        "speed": speed,
        "factor": factor,
        "loop": describe_loop(found, concurrency),
    }
    made = trace_scenario_builder(found, speed=speed, factor=factor, concurrency=concurrency)
    slo = cli_run.slo_from_ms(slo_ttft, slo_tpot, slo_e2e)
    cli_run.run_suite_plan(SuitePlan("trace", made, runs=runs, slo=slo, setup=sizes), where)
