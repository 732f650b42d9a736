"""The entrants: how each driver is started, and how much time it may take for one repetition of a row.

Every driver gets the same number of threads and the same spin count: an idle OpenMP thread sleeps after a moment, so
that waiting drivers use no core.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SPIN_COUNT = 1000  # iterations, as Headstart sets it


class Room(NamedTuple):
    """The room that a driver must have for the rows of a comparison."""

    streams: int  # requests at once, as in its warm-up
    prompts: int  # of one repetition, all of which it can hold in its cache
    context: int  # tokens of the longest request, output included
    kv_gib: int = 3  # of a KV pool


@dataclass(frozen=True, slots=True)
class Entrant:
    """One entrant. `environment` is the folder that setup.sh made for it; None: Headstart's own Python."""

    name: str
    driver: str  # file in this folder
    environment: str | None = None
    arguments: tuple[str, ...] = ()
    is_thorough: bool = True  # False: long rows once, and a coarse search for the highest rate
    title: str = ""  # name in tables
    rows: tuple[str, ...] = ()  # the only ones it serves; empty: all
    samples: bool = False  # whether its driver supports sampling, not only greedy jobs
    without_bf16: bool = False  # takes part only where the CPU has no bf16 instructions
    form_of: str = ""  # another set-up of this entrant: the tables show the faster of the two
    has_slots: bool = False  # whether its KV cache is a number of sequences of one size
    has_pool: bool = False  # whether its KV cache is a pool of blocks, of a size in GiB


ENTRANTS = (
    Entrant("ours", "ours.py", title="Headstart", samples=True, has_pool=True),
    Entrant("vllm", "vllm_engine.py", "vllm", title="vLLM", samples=True, has_pool=True),
    Entrant(
        "vllm_float32",
        "vllm_engine.py",
        "vllm",
        ("--dtype", "float32"),
        title="vLLM, float32",
        samples=True,
        without_bf16=True,
        has_pool=True,
        form_of="vllm",
    ),
    Entrant(
        "ours_int8",
        "ours.py",
        None,
        ("--quantization", "int8"),
        title="Headstart int8",
        samples=True,
        has_pool=True,
    ),
    Entrant("llamacpp", "llamacpp.py", "llamacpp", is_thorough=False, title="llama.cpp", has_slots=True),
    Entrant(
        "llamacpp_unified",
        "llamacpp.py",
        "llamacpp",
        ("--unified", "--slots", "40"),
        is_thorough=False,
        title="llama.cpp, one buffer",
        rows=("decode_shared", "twins"),
        form_of="llamacpp",
        has_slots=True,
    ),
    Entrant(
        "llamacpp_q8",
        "llamacpp.py",
        "llamacpp",
        ("--type", "q8_0"),
        is_thorough=False,
        title="llama.cpp Q8_0",
        has_slots=True,
    ),
    Entrant("transformers", "transformers_cb.py", "transformers", is_thorough=False, title="Transformers"),
    Entrant("openvino", "openvino_engine.py", "openvino", title="OpenVINO", samples=True, has_pool=True),
    Entrant(
        "openvino_bf16",
        "openvino_engine.py",
        "openvino",
        ("--kv", "bf16"),
        title="OpenVINO, KV in bf16",
        rows=("rotations", "shared_prefix", "twins"),
        form_of="openvino",
        has_pool=True,
    ),
)
ROSTER = {entrant.name: entrant for entrant in ENTRANTS}


def python_of(entrant: Entrant, environments: Path) -> Path:
    """Return the interpreter that runs a driver; it may not exist."""
    return (
        Path(sys.executable) if entrant.environment is None else environments / entrant.environment / "bin" / "python"
    )


def command_of(entrant: Entrant, environments: Path, model: str, threads: int, room: Room) -> list[str]:
    """Return the command line of a driver."""
    common = ["--model", model, "--threads", str(threads), "--streams", str(room.streams)]
    if entrant.has_slots:
        common += ["--slots", str(room.prompts), "--context", str(room.context)]
    if entrant.has_pool:
        common += ["--kv-gib", str(room.kv_gib)]
    return [str(python_of(entrant, environments)), str(HERE / entrant.driver), *common, *entrant.arguments]


def variables_of(entrant: Entrant, threads: int, spin_count: int = SPIN_COUNT) -> dict[str, str | None]:
    """Return the variables merged into the environment of a driver; None removes a variable."""
    own: dict[str, str | None] = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": str(spin_count),
        "KMP_BLOCKTIME": "1",  # ms
    }
    return own if entrant.environment is None else {**own, "PYTHONPATH": None, "PYTHONHOME": None}
