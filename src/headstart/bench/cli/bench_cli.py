"""The verbs of `headstart bench ...`, in the order of --help: the package's own, and those of the laboratory.

Importing this module must stay cheap and free of torch: each verb sets the thread settings first, then imports what
it needs. The laboratory is imported when one of its verbs, or the list of verbs, is asked for.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from headstart.bench.cli import cli_reuse, cli_suite, laboratory

BENCH = {
    "rotations": (cli_reuse.bench_rotations, "48 rotated prompts, cold and warm (vLLM #3402)."),
    "intent": (cli_reuse.bench_intent, "900 shared + 100 own tokens, caching off and on."),
    "shared-prefix": (cli_suite.bench_shared_prefix, "Groups of prompts with a shared prefix each; any rate."),
    "decode": (cli_suite.bench_decode, "Streams behind one cached prefix, or one each."),
    "prefill": (cli_suite.bench_prefill, "Time to the first token by length, cold and warm."),
    "trace": (cli_suite.bench_trace, "Recorded traffic: Mooncake, agents, Azure."),
}
LAB = {
    "shared-burst": "A burst behind one new prefix: prefill redundancy.",
    "twins": "Former name of shared-burst.",
    "fleet": "Real replicas behind our router and others.",
    "lab": "Experiments on engine, store and router.",
}
ORDER = ("rotations", "intent", "shared-prefix", "shared-burst", "twins", "decode", "prefill", "trace", "fleet", "lab")


class BenchCommandGroup(TyperGroup):
    """The verbs of `headstart bench`. Without the laboratory, its verbs name the command that installs it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        return list(ORDER)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb; None: there is none of that name."""
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in LAB:
            return own
        verbs = laboratory.find_lab_entry_point("verbs")
        group: Any = typer.main.get_command(_without(cmd_name) if verbs is None else verbs.load())
        return group.get_command(ctx, cmd_name)


app = typer.Typer(
    cls=BenchCommandGroup,
    help="Measure an engine in this process, or any OpenAI endpoint (--against URL). Tables for people go to stderr; "
    "the last line of stdout is one JSON document.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for _name, (_run, _summary) in BENCH.items():
    app.command(_name, short_help=_summary)(_run)


def _without(name: str) -> typer.Typer:
    """Return an app with a verb that says how the laboratory is installed, whatever its arguments are."""
    found = typer.Typer(rich_markup_mode=None)
    found.callback()(lambda: None)  # a group, although it has only one verb

    def refuse() -> None:
        raise laboratory.lab_not_installed_error(f"headstart bench {name}")

    refuse.__doc__ = str(laboratory.lab_not_installed_error(f"headstart bench {name}"))
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    found.command(name, short_help=LAB[name], hidden=name == "twins", context_settings=anything)(refuse)
    return found
