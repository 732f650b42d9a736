"""`headstart doctor`: the resources of this machine."""

import json
from typing import Annotated

import typer

from headstart.engine.engine_checks import check_installed
from headstart.model.setup.threads import prepare_threads


def doctor(
    threads: Annotated[
        int, typer.Option(metavar="N", help="Compute threads to assume; 0: as many as the cgroup grants.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Show the resources of this machine, and problems with them."""
    check_installed()
    prepare_threads(threads)
    from headstart.model.setup.doctor import report

    found = report(threads)
    print(json.dumps(found.as_dict()) if as_json else found.text())
