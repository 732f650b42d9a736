"""`headstart bench ...`: one verb per benchmark; those of `headstart bench lab` are in cli_lab.py.

Importing this module must stay cheap and free of torch: each verb settles the thread settings first, then imports what
it needs.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.bench import cli_run
from headstart.bench.cli_lab import lab
from headstart.bench.cli_run import Dtype, Model, Plot, Quick, Runs, Seed, Threads

if TYPE_CHECKING:
    from headstart.bench.engines import Setup
    from headstart.bench.progress import Bar
    from headstart.bench.report import Report

app = typer.Typer(
    help="Measure this engine. Tables for people go to stderr; the last line of stdout is one JSON document.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(lab, name="lab", short_help="Experiments on the engine's laws.")


@app.command(short_help="48 rotated prompts, cold and warm (vLLM #3402).")
def rotations(
    model: Model = "tiny",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    runs: Runs = 3,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """48 rotations of 1,025 tokens, cold and warm: only what is not cached counts (vLLM #3402)."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.rotations import RotationsConfig, run_rotations

        config = RotationsConfig(runs=1, decode_rounds=6) if quick else RotationsConfig(runs=runs)
        return run_rotations(setup, config, bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@app.command(short_help="900 shared + 100 own tokens, caching off and on.")
def intent(
    model: Model = "",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    load: Annotated[bool, typer.Option(help="Latency and Poisson load, on --model (default: the bundled one).")] = True,
    accuracy: Annotated[
        bool | None, typer.Option(help="Answers of the bundled model, float32. Default: without --model only.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Held-out sentences asked for --accuracy.")] = 200,
    runs: Runs = 3,
    draws: Annotated[int, typer.Option(min=1, help="Poisson draws; the search runs once for each.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals per measured rate, at least.")] = 30,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """900 shared and 100 own tokens in, 30 out, prefix caching off and on: TTFT, decode stall, highest request rate."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.intent import run_intent
        from headstart.bench.intent_accuracy import AccuracyConfig, bundled_answers
        from headstart.bench.intent_load import QUICK, IntentConfig

        config = QUICK if quick else IntentConfig(runs=runs, draws=draws, seconds=seconds)
        asked = accuracy if accuracy is not None else not model
        questions = AccuracyConfig(examples=min(examples, 40) if quick else examples) if asked else None
        answer = bundled_answers(setup.threads, bar) if asked else None
        return run_intent(setup, config if load else None, questions, bar, answer=answer)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@app.command(short_help="A burst behind one new prefix: computed how often?")
def twins(
    model: Model = "tiny",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    seed: Seed = 0,
    requests: Annotated[int, typer.Option(min=2, help="Requests at once.")] = 32,
    prefix_tokens: Annotated[int, typer.Option(min=16, help="New tokens that all of them share.")] = 2048,
    own_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt's own.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 16,
    long_prefill_token_threshold: Annotated[int, typer.Option(min=0, help="Cap on a prefill's tokens per step.")] = 0,
    tree: Annotated[
        str, typer.Option(metavar="BxL", help="B branches share 256 tokens more each, with L leaves each; e.g. 4x8.")
    ] = "",
    same: Annotated[bool, typer.Option("--same", help="One prompt, many times.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="The first request is aborted in mid prefill.")] = False,
    poison: Annotated[bool, typer.Option("--poison", help="The first request fails in mid prefill.")] = False,
    every: Annotated[bool, typer.Option("--every", help="All forms, of default caps and tree.")] = False,
    baseline: Annotated[bool, typer.Option(help="Also compute every prompt in full, for time and tokens.")] = True,
    runs: Runs = 3,
    quick: Quick = False,
    plot: Plot = None,
) -> None:
    """Requests that come at once behind one new prefix: how many prompt tokens are computed, and how many had to be."""

    def bench(setup: "Setup", bar: "Bar") -> "Report":
        from headstart.bench.twins import run_twins
        from headstart.bench.twins_forms import Form, every_form, parse_tree

        base = Form(requests, prefix_tokens, own_tokens, output_tokens, long_prefill_token_threshold)
        loss = "poison" if poison else "abort" if abort else ""
        forms = every_form(base) if every else [replace(base, tree=parse_tree(tree), same=same, loss=loss)]
        return run_twins(setup, forms, runs=1 if quick else runs, baseline=baseline and not quick, bar=bar)

    cli_run.run_on_model(bench, model, dtype, threads, seed, plot)


@app.command(short_help="Shared prefixes against a running server.")
def load(
    against: Annotated[str, typer.Option(metavar="URL", help="Any OpenAI endpoint, e.g. http://127.0.0.1:8000.")],
    model: Annotated[str, typer.Option(help="Model name to send; default: the first of /v1/models.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.", show_default=False)] = "",
    rate: Annotated[float, typer.Option(min=0, help="Poisson requests per second; 0: closed loop.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time in the closed loop.")] = 8,
    groups: Annotated[int, typer.Option(min=1, help="Groups of prompts; each shares a prefix.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per group.")] = 8,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens a group shares.")] = 512,
    own_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt's own.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate (ignore_eos).")] = 16,
    vocab_size: Annotated[int, typer.Option(min=2, help="Prompts are random token ids below this.")] = 512,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a request may take.")] = 300,
    seed: Seed = 0,
    plot: Plot = None,
) -> None:
    """Streamed requests with shared prefixes against a running server: TTFT, TPOT, latency, cached share.

    One seed is one set of prompts: a second run with it finds them cached.
    """

    def bench(bar: "Bar") -> "Report":
        from headstart.bench.load import LoadConfig, Target, run_load
        from headstart.workload.synthetic import Shape

        shape = Shape(prefix_tokens, own_tokens, output_tokens)
        config = LoadConfig(groups, prompts, shape, vocab_size, rate, concurrency, seed)
        return run_load(Target(against, model, api_key, timeout), config, bar)

    cli_run.finish(bench, plot)
