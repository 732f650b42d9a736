"""`headstart doctor`: the resources of this machine."""

import json
from typing import Annotated

import typer

from headstart.engine.engine_checks import check_engine_installed
from headstart.model.setup.threads import configure_num_threads


def doctor(
    threads: Annotated[
        int, typer.Option(metavar="N", help="Compute threads to assume; 0: as many as the cgroup grants.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Show the resources of this machine, and problems with them."""
    check_engine_installed()
    configure_num_threads(threads)
    from headstart.model.setup.doctor import make_doctor_report

    found = make_doctor_report(threads)
    print(json.dumps(found.as_dict()) if as_json else found.text())
