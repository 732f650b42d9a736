"""The command line: `headstart serve | route | generate | simulate | plan | bench | ...`.

This module only assembles the verbs. The command line is the only code that reads argv and environment. Verbs import
what they need when they run: --help stays fast, and thread settings are made before torch is imported. A usage error is
one line on stderr and exit code 2.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from headstart import __version__
from headstart.bench.cli.bench_cli import app as bench
from headstart.cli import explain, generate, init_model_verb, route, serve
from headstart.cli.doctor_verb import doctor
from headstart.cli.help_text import GroupedCommand, usage_message
from headstart.cli.lint import lint_verb
from headstart.cli.live import ps_verb, top_verb
from headstart.cli.prefix import app as prefix
from headstart.cli.simulation import plan_verb
from headstart.cli.simulation.simulate_verb import app as simulate
from headstart.cli.store import app as store
from headstart.config.config_file import DEBUG_VARIABLE
from headstart.core.errors import HeadstartError
from headstart.http.logs import printable

app = typer.Typer(
    help="Serve language models without ever computing the same prefix twice. Start with: headstart serve",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=GroupedCommand, epilog=serve.EXAMPLES)(serve.serve)
app.command(cls=GroupedCommand, epilog=route.EXAMPLES)(route.route)
app.command(cls=GroupedCommand, epilog=generate.EXAMPLES)(generate.generate)
app.command(cls=GroupedCommand)(doctor)
app.command("init-model", cls=GroupedCommand, epilog=init_model_verb.EXAMPLES)(init_model_verb.init_model)
app.command(cls=GroupedCommand, epilog=explain.EXAMPLES)(explain.explain)
app.command(cls=GroupedCommand, epilog=top_verb.EXAMPLES)(top_verb.top)
app.command(cls=GroupedCommand)(ps_verb.ps)
app.command(cls=GroupedCommand, epilog=lint_verb.EXAMPLES)(lint_verb.lint)
app.command(cls=GroupedCommand, epilog=plan_verb.EXAMPLES)(plan_verb.plan)
app.add_typer(simulate, name="simulate", short_help="Simulate a fleet in virtual time, on recorded traffic.")
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
    shown = printable(message, "\n")  # it may quote a server
    print(f"headstart: {shown}", file=sys.stderr)
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
