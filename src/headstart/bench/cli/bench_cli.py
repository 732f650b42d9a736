"""The verbs of `headstart bench ...` and `headstart bench lab ...`, in the order of --help.

Importing this module must stay cheap and free of torch: each verb sets the thread settings first, then imports what
it needs.
"""

import typer

from headstart.bench.cli import cli_reuse, cli_suite
from headstart_lab.cli.engine_table import ENGINE, KERNELS, STORE
from headstart_lab.cli.experiment_verb import Verb, add_verbs
from headstart_lab.cli.router_table import FLEET, ROUTER

BENCH = (
    Verb("rotations", cli_reuse.rotations, "48 rotated prompts, cold and warm (vLLM #3402)."),
    Verb("intent", cli_reuse.intent, "900 shared + 100 own tokens, caching off and on."),
    Verb("shared-prefix", cli_suite.shared_prefix, "Groups of prompts with a shared prefix each; any rate."),
    Verb("shared-burst", cli_reuse.shared_burst, "A burst behind one new prefix: prefill redundancy.", alias="twins"),
    Verb("decode", cli_suite.decode, "Streams behind one cached prefix, or one each."),
    Verb("prefill", cli_suite.prefill, "Time to the first token by length, cold and warm."),
    Verb("trace", cli_suite.trace, "Recorded traffic: Mooncake, agents, Azure."),
    FLEET,
)
LAB = (*ENGINE, *STORE, *KERNELS, *ROUTER)
app = typer.Typer(
    help="Measure an engine in this process, or any OpenAI endpoint (--against URL). Tables for people go to stderr; "
    "the last line of stdout is one JSON document.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
lab = typer.Typer(
    help="Experiments on engine, store and router: small, exact, most of them without a real model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
add_verbs(app, BENCH)
add_verbs(lab, LAB)
app.add_typer(lab, name="lab", short_help="Experiments on engine, store and router.")
