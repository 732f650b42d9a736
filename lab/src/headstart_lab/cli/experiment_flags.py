"""Flags that several experiments have. Free of torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.bench.cli.bench_flags import Dtype, Plot, Quick, Runs, Threads, VerbFlag

Model = Annotated[
    str,
    typer.Option(help="Folder, hub id, or a shape such as tiny, llama-100m (random weights, made once and kept)."),
]
Seed = Annotated[int, typer.Option(help="Seed of prompts, arrivals and random weights.")]
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


def flag(default: Any, text: str, *names: str, kind: Any = None, **option: Any) -> VerbFlag:
    """Return a flag with this help text. `kind`: its type, if not that of the default; `names`: unless the field's."""
    return VerbFlag(Annotated[kind or type(default), typer.Option(*names, help=text, **option)], default)


TRACE_UNITS = {
    "trace_block_size": flag(0, "Tokens per id of the trace; 0: by the lengths of its prompts.", min=0),
    "trace_time_unit": flag(
        "", "Of the trace: s, ms, us, ns. Default: the format's, if it is possible.", show_default=False
    ),
}
SEED = {"seed": VerbFlag(Seed, 0)}
THREADS = {"threads": VerbFlag(Threads, 0)}
SETUP = {"model": VerbFlag(Model, "tiny"), "dtype": VerbFlag(Dtype, "auto"), **THREADS, **SEED}
THREE_RUNS, FIVE_RUNS = {"runs": VerbFlag(Runs, 3)}, {"runs": VerbFlag(Runs, 5)}
FOLDER = {"folder": VerbFlag(Folder, None)}
QUICK, PLOT = {"quick": VerbFlag(Quick, False)}, {"plot": VerbFlag(Plot, None)}
