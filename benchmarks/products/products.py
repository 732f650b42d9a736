"""Products of bfloat16 and fp32 weights by our kernels and by torch, by turns; see README.md. The last line is JSON."""

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

from headstart.model.kernels.library import cpu_flags, cpu_model, kernel_library_in_use
from headstart.model.layers.linear import FusedLinear, WeightForm
from headstart.model.setup.sizing import apply_threads
from headstart.model.weights.shapes import SHAPES

ROWS = (1, 4, 16, 32, 128, 512)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, default=0, help="0: every core granted.")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    apply_threads(options.threads)
    found = kernel_library_in_use()
    if found is None:
        parser.error("there are no compiled kernels here")
    shape = SHAPES[options.shape]
    sizes = {name: size for name, size in shape.tensors() if name.startswith("model.layers.0.") and len(size) == 2}
    rows = []
    for dtype in DTYPES.values():
        for name, (outputs, inputs) in sizes.items():
            weight = torch.randn(outputs, inputs).to(dtype) * 0.02
            forms = {
                "kernels": FusedLinear(weight.clone(), form=WeightForm(found, dtype=dtype)),
                "torch": FusedLinear(weight.clone(), form=WeightForm(None, dtype=dtype)),
            }
            for count in ROWS:
                rows.append(measured(forms, name, torch.randn(count, inputs).to(dtype), options.rounds))
                print(
                    "{dtype:>9} {name:<42} {rows:>4} rows  torch / kernels {ratio:.2f}".format(**rows[-1]),
                    file=sys.stderr,
                )
    amx = sorted(flag for flag in cpu_flags() if flag.startswith("amx"))
    print(json.dumps({"cpu": cpu_model(), "amx": amx, "variant": found.variant, "shape": options.shape, "rows": rows}))


def measured(forms: dict[str, FusedLinear], name: str, x: torch.Tensor, rounds: int) -> dict[str, object]:
    """Return the least seconds of each form, taken by turns, and how many rows of torch differ from rows alone."""
    least = {form: min(times) for form, times in turns({form: lambda f=f: f(x) for form, f in forms.items()}, rounds)}
    together = {form: linear(x) for form, linear in forms.items()}
    differing = {
        form: sum(not torch.equal(linear(x[at : at + 1])[0], together[form][at]) for at in range(len(x)))
        for form, linear in forms.items()
    }
    return {
        "name": name,
        "dtype": str(x.dtype).removeprefix("torch."),
        "rows": len(x),
        **least,
        "ratio": least["torch"] / least["kernels"],
        "differing_rows": differing,
    }


def turns(runs: dict[str, Callable[[], object]], rounds: int) -> list[tuple[str, list[float]]]:
    """Return the seconds of each run, taken by turns; the first turn is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - began)
    return list(times.items())


if __name__ == "__main__":
    main()
