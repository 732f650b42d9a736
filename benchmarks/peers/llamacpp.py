"""Driver of llama.cpp: `--form library` (its batch API, its best case) or `--form server`.

Runs in the environment made by build_llamacpp.sh. The GGUF file is written once per model and type, in that
environment.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gguf_file import FILE_TYPES, ensure_gguf
from llamacpp_library import LibraryStepper, Settings, system_info
from llamacpp_server import ServerRunner, versions
from serve import Job, claim_stdout, drive, serve

WARM_UP = [Job([7 + stream, *range(300)], 4, 0.0) for stream in range(4)]  # runs every code path once


def main() -> None:
    args = _arguments()
    answers = claim_stdout()
    model = Path(args.model)
    home = Path(sys.prefix)
    path = ensure_gguf(model, home / "models" / f"{model.name}-{args.type}.gguf", args.type)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    told: dict[str, Any] = {"form": args.form, "type": args.type, **asdict(settings), "system": system_info()}
    told["gomp_spincount"] = os.environ.get("GOMP_SPINCOUNT")
    about = {"versions": versions(), "settings": told}
    warm_up = WARM_UP[: args.streams]
    label = "llamacpp" if args.type == "bf16" else f"llamacpp_{args.type}"
    if args.form == "library":
        engine = LibraryStepper(str(path), settings)
        drive(engine, warm_up)
        engine.reset()
        ready = {"label": label, "vocab_size": engine.vocab_size, "about": about}
        serve(answers, ready, engine.reset, lambda jobs, concurrency, limit: drive(engine, jobs, concurrency, limit))
        return
    with ServerRunner(home / "build" / "bin" / "llama-server", path, settings) as runner:
        runner.run(warm_up)
        runner.try_clear_prefix_cache()
        serve(answers, {"label": label, "vocab_size": runner.vocab_size, "about": about}, runner.reset, runner.run)


def _arguments() -> Namespace:
    defaults = Settings()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--type", choices=FILE_TYPES, default="bf16", help="of the weights")
    parser.add_argument("--form", choices=("library", "server"), default="library")
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--streams", type=int, default=4, help="requests at once, in the warm-up: at most 4")
    parser.add_argument("--slots", type=int, default=defaults.slots, help="sequences at once")
    parser.add_argument("--context", type=int, default=defaults.context, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="tokens in a call")
    parser.add_argument("--ubatch", type=int, default=defaults.ubatch, help="tokens in a graph")
    parser.add_argument("--unified", action="store_true", default=defaults.unified, help="one KV buffer for all")
    parser.add_argument("--flash", action="store_true", default=defaults.flash, help="flash attention")
    parser.add_argument(
        "--kv", choices=("f16", "bf16", "f32", "q8_0"), default=defaults.kv, help="type of keys, values"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
