"""The command line: `headstart serve | route | generate | prefix | store | doctor | bench | init-model`.

The command line is the only code that reads argv and environment. Verbs import their modules when they run: --help
stays fast, and thread settings are made before torch is imported. A usage error is one line on stderr and exit code 2.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart import __version__
from headstart.bench.cli.bench_cli import app as bench
from headstart.cli.cli_options import Sources, complete_folder, takes_options
from headstart.cli.explain import EXAMPLES as EXPLAIN_EXAMPLES
from headstart.cli.explain import explain
from headstart.cli.help_text import GroupedCommand, usage_message
from headstart.cli.prefix import app as prefix
from headstart.cli.store import app as store
from headstart.config.config_file import DEBUG_VARIABLE, settle
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions
from headstart.core.errors import ConfigError, HeadstartError
from headstart.model.setup.threads import prepare_threads
from headstart.model.weights.shapes import check_weights

_SERVE_EXAMPLES = """Examples:
  headstart serve                                 the bundled model on http://127.0.0.1:8000
  headstart serve Qwen/Qwen3-0.6B --port 9000     a model from the hub, downloaded once
  headstart serve ./my-model --replicas 4         four of them share this machine behind one router
  HEADSTART_API_KEY=secret headstart serve ./my-model --max-model-len 8192"""
_ROUTE_EXAMPLES = """Examples:
  headstart route --replica http://10.0.0.7:8000 --replica http://10.0.0.8:8000 --host 0.0.0.0
  headstart route --discover file:replicas.txt --port 9000
  curl -sD- localhost:8000/v1/completions -H 'x-headstart-explain: 1' -d '{"prompt": "Hi"}' -o/dev/null"""
_GENERATE_EXAMPLES = """Examples:
  headstart generate --model Qwen/Qwen3-0.6B --chat "Why is the sky blue?"
  headstart generate --model ./my-model --temperature 0 --json < prompt.txt"""
_INIT_EXAMPLES = """Example:
  headstart init-model --shape llama-100m models/m100 && headstart serve models/m100"""

NOT_OF_A_SERVER = ("replica", "discover", "replica_api_key")
"""Router options that do not apply when the router starts its own replicas."""
NOT_OF_A_ROUTER = (
    *("served_model_name", "max_num_queued_tokens", "max_n", "max_prompts", "max_logprobs", "heartbeat_timeout"),
    *("stats_interval", "replicas"),
)
"""Server options that apply to replicas, not to a router."""

app = typer.Typer(
    help="Serve language models without ever computing the same prefix twice. Start with: headstart serve",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.add_typer(prefix, name="prefix", short_help="Show and change the pinned prefixes of a running server.")
app.add_typer(store, name="store", short_help="Inspect, check and clear a folder of stored blocks.")
_USAGE_ERROR = typer.BadParameter.__mro__[1]  # base class of all usage errors


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (invalid run, bug), 2 (usage error), 130 (Ctrl-C), 141 (pipe)."""
    debug = bool(os.environ.get(DEBUG_VARIABLE))
    try:
        code = app(args=None if argv is None else list(argv), prog_name="headstart", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # `headstart ... | head`: stdout was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except HeadstartError as error:
        if debug:
            raise
        return _fail(str(error), 2)
    except Exception as error:
        if isinstance(error, _USAGE_ERROR):
            message = usage_message(error, sys.argv[1:] if argv is None else argv)
            return _fail(message, 2) if message else 2  # empty: a group without a verb has printed its help
        if debug:
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"this should not have happened: {what}; {DEBUG_VARIABLE}=1 shows where", 1)


def _fail(message: str, code: int) -> int:
    print(f"headstart: {message}", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"headstart {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command(cls=GroupedCommand, epilog=_SERVE_EXAMPLES)
@takes_options(EngineOptions, ServerOptions, RouterOptions, skip=("model", *NOT_OF_A_SERVER))
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder or hub id; without one, the bundled intent model.",
            autocompletion=complete_folder,
        ),
    ] = None,
    sources: Sources,
) -> None:
    """Serve a model through the OpenAI API; with --replicas, several times behind one router.

    Every option may also stand in ./headstart.toml (port = 9000) or in the environment (HEADSTART_PORT=9000).
    Flags win over the environment, the environment over the file. Keep keys out of argv: others can see it.
    """
    named: Sources = () if model is None else ({"model": model},)
    engine, server = settle(EngineOptions, *named, *sources), settle(ServerOptions, *sources)
    router = settle(RouterOptions, *sources)
    _check(engine)
    if router.replicas > 1:
        from headstart.cli.replicas import serve_replicas

        raise typer.Exit(serve_replicas(engine, server, router))
    from headstart.cli.build_engine import build_engine
    from headstart.server.run_server import serve as run_server

    raise typer.Exit(run_server(build_engine, engine, server))


@app.command(cls=GroupedCommand, epilog=_ROUTE_EXAMPLES)
@takes_options(RouterOptions, ServerOptions, skip=NOT_OF_A_ROUTER)
def route(*, sources: Sources) -> None:
    """Route each request to the replica with the earliest expected first token.

    Replicas are servers with the OpenAI API: Headstart, vLLM, SGLang. Clients see one server.
    """
    router, server = settle(RouterOptions, *sources), settle(ServerOptions, *sources)
    from headstart.gateway.run_gateway import route as run_router

    raise typer.Exit(run_router(router, server))


@app.command(cls=GroupedCommand, epilog=_GENERATE_EXAMPLES)
@takes_options(EngineOptions)
def generate(
    *,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="One or several; none or '-': all of stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Render prompts with the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message for --chat; @FILE reads it from FILE.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens to generate per prompt.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="0: always the likeliest token (default: the model's, else 1).")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="X", help="Sample from the likeliest tokens that make up this share.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeat for several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, with token counts.")] = False,
    sources: Sources,
) -> None:
    """Generate text once, without a server. Text on stdout, progress on stderr."""
    options = settle(EngineOptions, *sources)
    if system is not None and not chat:
        raise ConfigError("--system needs --chat: without a chat template there are no roles")
    texts = _prompts(prompts or [])
    wishes = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": stop or None}
    sampling = {name: value for name, value in wishes.items() if value is not None}
    before = [{"role": "system", "content": _system(system)}] if system is not None else []
    _check(options)
    from headstart.llm import LLM

    with LLM(**{name: getattr(options, name) for name in EngineOptions.__dataclass_fields__}) as llm:
        if chat:
            completions = llm.chat([[*before, {"role": "user", "content": text}] for text in texts], sampling)
        else:
            completions = llm.generate(texts, sampling)
    for done in completions:
        print(json.dumps(_summary(done), ensure_ascii=False) if as_json else done.text, flush=True)
    if failed := [done.error for done in completions if done.error is not None]:
        raise HeadstartError(f"{len(failed)} of {len(completions)} prompts failed: {failed[0]}")


@app.command(cls=GroupedCommand)
def doctor(
    threads: Annotated[
        int, typer.Option(metavar="N", help="Compute threads to assume; 0: as many as the cgroup grants.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Show the resources of this machine, and problems with them."""
    prepare_threads(threads)
    from headstart.model.setup.doctor import report

    found = report(threads)
    print(json.dumps(found.as_dict()) if as_json else found.text())


@app.command("init-model", cls=GroupedCommand, epilog=_INIT_EXAMPLES)
def init_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not hold anything yet.")],
    shape: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="tiny, llama-3m, llama-100m, llama-100m-152k (its vocabulary), tinyllama-1.1b, qwen2.5-0.5b, "
            "qwen3-0.6b, llama-2-7b.",
        ),
    ],
    std: Annotated[
        float, typer.Option(metavar="X", help="Standard deviation of weights: 0.02 as in real models, 0.2 for tests.")
    ] = 0.02,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same weights.")] = 0,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="bfloat16 | float16 | float32.")] = "bfloat16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that OUT already holds.")] = False,
) -> None:
    """Write a model with random weights.

    It has the shape of a real architecture, which determines speed and memory, and needs no download.
    """
    check_weights(shape, std=std, dtype=dtype)
    prepare_threads()
    from headstart.model.weights.init_model import init_model as write_model

    print(write_model(shape, out, std=std, seed=seed, dtype=dtype, overwrite=overwrite))


app.command(cls=GroupedCommand, epilog=EXPLAIN_EXAMPLES)(explain)


def _check(options: EngineOptions) -> None:
    """Raise ConfigError for options that no engine can be built with, before torch is imported."""
    from headstart.engine_checks import check_engine

    check_engine(options)


def _prompts(arguments: list[str]) -> list[str]:
    if arguments and arguments != ["-"]:
        return arguments
    if not arguments and sys.stdin.isatty():
        raise ConfigError('no prompt: give one, as in headstart generate "The sky is", or pipe it in')
    return [sys.stdin.read()]


def _system(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the system message from {text[1:]}: {error}") from error


def _summary(done: Any) -> dict[str, Any]:
    return {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "prompt_tokens": len(done.prompt_token_ids),
        "cached_tokens": done.num_cached_tokens,
        "completion_tokens": len(done.token_ids),
        "token_ids": done.token_ids,
    }
