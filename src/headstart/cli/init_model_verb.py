"""`headstart init-model`: a model with random weights."""

from pathlib import Path
from typing import Annotated

import typer

from headstart.engine.engine_checks import check_engine_installed
from headstart.model.setup.threads import configure_num_threads
from headstart.model.weights.shapes import SHAPES, check_random_weights

EXAMPLES = """Example:
  headstart init-model --shape llama-100m models/m100 && headstart serve models/m100"""


def init_model(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not hold anything yet.")],
    shape: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(SHAPES)}.",
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
    check_engine_installed()
    check_random_weights(shape, std=std, dtype=dtype)
    configure_num_threads()
    from headstart.model.weights.init_model import write_random_model as write_model

    print(write_model(shape, out, std=std, seed=seed, dtype=dtype, overwrite=overwrite))
