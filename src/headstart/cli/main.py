"""The command line: `headstart serve | route | generate | simulate | plan | bench | ...`.

This module only assembles the verbs. The command line is the only code that reads argv and environment. The module of a
verb is imported when the verb is named, and what it needs when it runs: --help stays fast, and thread settings are made
before torch is imported. A usage error is one line on stderr and exit code 2.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from headstart import __version__
from headstart.cli.help_text import PanelHelpCommand, usage_error_message
from headstart.config.config_file import DEBUG_VARIABLE
from headstart.core.errors import HeadstartError
from headstart.http.logs import escape_unprintable


class LazyVerb(NamedTuple):
    """Where a verb is defined: a function, or `app`, a group of verbs. Imported when the verb is looked up."""

    module: str
    name: str = "app"
    short_help: str | None = None

    def command(self, verb: str) -> Any:
        """Import the module and return the command."""
        module = import_module(self.module)
        found = getattr(module, self.name)
        if self.name != "app":
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(verb, cls=PanelHelpCommand, epilog=getattr(module, "EXAMPLES", None))(found)
            return typer.main.get_command(alone)
        group = typer.main.get_group(found)
        group.name, group.short_help = verb, self.short_help
        return group


VERBS = {
    "serve": LazyVerb("headstart.cli.serve", "serve"),
    "route": LazyVerb("headstart.cli.route", "route"),
    "generate": LazyVerb("headstart.cli.generate", "generate"),
    "doctor": LazyVerb("headstart.cli.doctor_verb", "doctor"),
    "init-model": LazyVerb("headstart.cli.init_model_verb", "init_model"),
    "explain": LazyVerb("headstart.cli.explain", "explain"),
    "top": LazyVerb("headstart.cli.live.top_verb", "top"),
    "ps": LazyVerb("headstart.cli.live.ps_verb", "ps"),
    "lint": LazyVerb("headstart.cli.lint.lint_verb", "lint"),
    "plan": LazyVerb("headstart.cli.simulation.plan_verb", "plan"),
    "simulate": LazyVerb(
        "headstart.cli.simulation.simulate_verb", short_help="Simulate a fleet in virtual time, on recorded traffic."
    ),
    "bench": LazyVerb("headstart.bench.cli.bench_cli"),
    "prefix": LazyVerb("headstart.cli.prefix", short_help="Show and change the pinned prefixes of a running server."),
    "store": LazyVerb("headstart.cli.store"),
}


class _Commands(Mapping[str, Any]):
    """The commands of VERBS by name, each made when it is looked up: a start takes the imports of one verb."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, verb: str) -> Any:
        if verb not in self._made:
            self._made[verb] = VERBS[verb].command(verb)
        return self._made[verb]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class _Verbs(TyperGroup):
    """The group of all verbs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()


app = typer.Typer(
    cls=_Verbs,
    help="Serve language models without ever computing the same prefix twice. Start with: headstart serve",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
        if isinstance(error.__context__, KeyboardInterrupt):  # a second Ctrl-C, in the middle of a step
            return _fail("interrupted", 130)
        if isinstance(error, _USAGE_ERROR):
            message = usage_error_message(error, sys.argv[1:] if argv is None else argv)
            return _fail(message, 2) if message else 2  # empty: a group without a verb has printed its help
        if debug:
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"this should not have happened: {what}; {DEBUG_VARIABLE}=1 shows where", 1)


def _fail(message: str, code: int) -> int:
    shown = escape_unprintable(message, "\n")  # it may quote a server
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
