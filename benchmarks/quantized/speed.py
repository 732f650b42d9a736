"""Single stream and prefill on a GGUF file beside other engines: `python speed.py FILE --llamacpp PYTHON --ik PYTHON`.

Every engine runs in its own process, pinned to the same cores, by turns (A B A B). The settings of llama.cpp are
searched first, one short process each: threads, flash attention and ubatch; the best one for tokens and the best one
for prompts are then measured. Progress on stderr, one JSON document as the last line of stdout.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
UBATCHES = (128, 512, 1024)


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to run the worker of one engine."""

    name: str
    command: tuple[str, ...]


def run(
    engine: Engine, arguments: argparse.Namespace, *, runs: int, prompt: int, tokens: int
) -> dict[str, list[float]]:
    """Return the times of one process, pinned to the chosen cores."""
    cores = {int(core) for core in arguments.cores.split(",")}
    sizes = ["--runs", str(runs), "--prompt", str(prompt), "--tokens", str(tokens)]
    environ = os.environ | {"OMP_NUM_THREADS": str(len(cores))}
    environ.pop("GOMP_SPINCOUNT", None)  # every engine has its own default: Headstart 1,000, llama.cpp libgomp's
    done = subprocess.run(
        [*engine.command, *sizes],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def candidates(python: str, library: str, arguments: argparse.Namespace) -> list[Engine]:
    """Return llama.cpp with every combination of settings that is searched."""
    worker = str(HERE / "worker_llamacpp.py")
    cores = len(arguments.cores.split(","))
    found: list[Engine] = []
    counts = arguments.threads or range(1, cores + 1)
    for threads, flash, ubatch in itertools.product(counts, (0, 1), arguments.ubatches):
        settings = ("--threads", str(threads), "--flash", str(flash), "--ubatch", str(ubatch))
        if library == "llama.cpp":
            settings = (*settings, "--repack", arguments.repack)
        name = f"{library} threads={threads} flash={flash} ubatch={ubatch}"
        found.append(Engine(name, (python, worker, arguments.file, "--library", library, *settings)))
    return found


def best_settings(found: list[Engine], arguments: argparse.Namespace) -> dict[str, Engine]:
    """Return the engine with the least time per token, and the one with the least time of a prompt."""
    times: dict[str, list[tuple[float, Engine]]] = {"token": [], "prefill": []}
    for engine in found:
        told = run(engine, arguments, runs=1, prompt=min(512, arguments.prompt), tokens=min(32, arguments.tokens))
        for key, entries in times.items():
            entries.append((min(told[key]), engine))
        print(f"{engine.name}: {1e3 * min(told['token']):.2f} ms, {min(told['prefill']):.3f} s", file=sys.stderr)
    return {key: min(entries, key=lambda entry: entry[0])[1] for key, entries in times.items()}


def main() -> None:
    """Search, measure by turns, and print medians with all samples."""
    arguments = _arguments()
    threads = str(len(arguments.cores.split(",")))
    settings = ("--threads", threads, "--activation-bits", arguments.activation_bits)
    ours = (sys.executable, str(HERE / "worker_ours.py"), arguments.file, *settings)
    best: dict[str, dict[str, Engine]] = {
        "headstart": dict.fromkeys(("token", "prefill"), Engine("headstart", ours)),
    }
    for library, python in (("llama.cpp", arguments.llamacpp), ("ik_llama.cpp", arguments.ik)):
        if python is not None:
            best[library] = best_settings(candidates(python, library, arguments), arguments)
    if arguments.openvino is not None:
        worker = (arguments.openvino, str(HERE / "worker_openvino.py"), arguments.file, "--threads", threads)
        best["openvino"] = dict.fromkeys(("token", "prefill"), Engine("openvino", worker))
    samples: dict[str, dict[str, list[float]]] = {name: {"token": [], "prefill": []} for name in best}
    for turn in range(arguments.turns):
        for name, engines in best.items():
            for engine in dict.fromkeys(engines.values()):
                told = run(engine, arguments, runs=arguments.runs, prompt=arguments.prompt, tokens=arguments.tokens)
                for key in samples[name]:
                    samples[name][key] += told[key] if engines[key] == engine else []
            middle = {key: median(values) for key, values in samples[name].items()}
            shown = f"{1e3 * middle['token']:.2f} ms per token, {middle['prefill']:.3f} s per prompt"
            print(f"turn {turn + 1}, {name}: {shown}", file=sys.stderr)
    figures: dict[str, Any] = {
        name: {
            "settings": {key: engine.name for key, engine in best[name].items()},
            "median": {key: median(values) for key, values in times.items()},
            "samples": times,
        }
        for name, times in samples.items()
    }
    for name in best:
        figures[name]["over_headstart"] = {
            key: figures[name]["median"][key] / figures["headstart"]["median"][key] for key in ("token", "prefill")
        }
    setup = {"file": Path(arguments.file).name, "prompt": arguments.prompt, "tokens": arguments.tokens}
    print(json.dumps({"setup": setup | {"cores": arguments.cores}, "engines": figures}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--llamacpp", help="python of an environment with llama-cpp-python")
    parser.add_argument("--ik", help="python of an environment with ik-llama-cpp-python")
    parser.add_argument("--openvino", help="python of an environment with openvino-genai, as it is")
    parser.add_argument("--cores", default=",".join(map(str, sorted(os.sched_getaffinity(0)))))
    parser.add_argument("--threads", nargs="+", type=int, help="numbers of threads to search; default: all")
    parser.add_argument("--ubatches", nargs="+", type=int, default=UBATCHES, help="to search")
    parser.add_argument("--repack", default="1", help="0: llama.cpp multiplies by the weights as in the file")
    parser.add_argument("--prompt", type=int, default=1491)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--activation-bits", default="16", help="of Headstart; the others round to 8")
    parser.add_argument("--runs", type=int, default=3, help="of one process")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
