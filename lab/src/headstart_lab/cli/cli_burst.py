"""The verb `shared-burst`: in this process, or on any server.

Importing this module must stay cheap and free of torch, like lab_cli.py, which registers the verb.
"""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench.cli import cli_run
from headstart.bench.cli.bench_flags import BenchTarget, Quick, Runs, add_target_flags

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.measurement.report import BenchmarkReport
    from headstart.measurement.runner import EngineSetup


@add_target_flags("quantization", "caching")
def shared_burst(
    *,
    where: BenchTarget,
    requests: Annotated[int, typer.Option(min=2, help="Requests at once.")] = 32,
    prefix_tokens: Annotated[int, typer.Option(min=16, help="New tokens that all of them share.")] = 2048,
    own_tokens: Annotated[int, typer.Option(min=1, help="Unshared tokens of each prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 16,
    long_prefill_token_threshold: Annotated[int, typer.Option(min=0, help="Cap on a prefill's tokens per step.")] = 0,
    tree: Annotated[
        str, typer.Option(metavar="BxL", help="B branches share 256 tokens more each, with L leaves each; e.g. 4x8.")
    ] = "",
    same: Annotated[bool, typer.Option("--same", help="All prompts are identical.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="The first request is aborted during prefill.")] = False,
    poison: Annotated[bool, typer.Option("--poison", help="The first request fails during prefill.")] = False,
    every: Annotated[bool, typer.Option("--every", help="All forms, with default caps and tree.")] = False,
    baseline: Annotated[bool, typer.Option(help="Also compute every prompt in full, for time and tokens.")] = True,
    runs: Runs = 3,
    quick: Quick = False,
) -> None:
    """Send simultaneous requests behind one new prefix: prompt tokens computed against the least possible."""
    if not where.is_in_process:
        from headstart.bench.suite import SuitePlan
        from headstart.core.errors import ConfigError
        from headstart_lab.engine.burst_forms import Form, check_form, parse_tree
        from headstart_lab.engine.burst_forms import twins as build

        with cli_run.report_usage_errors():
            if abort or poison or every or long_prefill_token_threshold:
                raise ConfigError("--abort, --poison, --every and the prefill cap need an engine in this process")
            form = check_form(
                Form(requests, prefix_tokens, own_tokens, output_tokens, tree=parse_tree(tree), same=same)
            )
        plan = SuitePlan("twins", build(form), runs=1 if quick else runs, setup={"form": form.name, **asdict(form)})
        cli_run.run_suite_plan(plan, where)
        return

    def bench(setup: "EngineSetup", bar: "ProgressBar") -> "BenchmarkReport":
        from headstart_lab.engine.burst_forms import Form, every_form, parse_tree
        from headstart_lab.engine.shared_burst import run_twins

        base = Form(requests, prefix_tokens, own_tokens, output_tokens, long_prefill_token_threshold)
        loss = "poison" if poison else "abort" if abort else ""
        forms = every_form(base) if every else [replace(base, tree=parse_tree(tree), same=same, loss=loss)]
        return run_twins(setup, forms, runs=1 if quick else runs, baseline=baseline and not quick, bar=bar)

    cli_run.run_model_bench_and_exit(bench, where.with_default_model())
