"""The verbs that the laboratory adds to `headstart bench ...`, and those of `headstart bench lab ...`.

Importing this module must stay cheap and free of torch, like headstart.bench.cli.bench_cli.
"""

import typer

from headstart_lab.cli.cli_burst import shared_burst
from headstart_lab.cli.engine_table import ENGINE, KERNELS, STORE
from headstart_lab.cli.experiment_verb import Verb, add_verbs
from headstart_lab.cli.router_table import FLEET, ROUTER

BENCH = (
    Verb("shared-burst", shared_burst, "A burst behind one new prefix: prefill redundancy.", alias="twins"),
    FLEET,
)
LAB = (*ENGINE, *STORE, *KERNELS, *ROUTER)
app = typer.Typer(rich_markup_mode=None)
lab = typer.Typer(
    help="Experiments on engine, store and router: small, exact, most of them without a real model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
add_verbs(app, BENCH)
add_verbs(lab, LAB)
app.add_typer(lab, name="lab", short_help="Experiments on engine, store and router.")
