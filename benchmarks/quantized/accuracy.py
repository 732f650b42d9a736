"""Logits of a GGUF file with activations of 16 and 8 bits, and of llama.cpp, beside float32: `python accuracy.py FILE`.

The texts are recorded agents (shared/traces), a window of tokens each; the tokenizer is that of a checkpoint's folder.
float32 unpacks the weights, so what differs is what the products round. A table on stderr, one JSON document as the
last line of stdout: Kullback-Leibler divergence from float32 in nats, perplexity, share of equal most likely tokens.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from headstart.model.setup.sizing import apply_threads
from headstart.model.weights.model_loader import load_model
from headstart_lab.engine.int8 import logits

FORMS = {"float32": ("float32", 16), "16 bits": ("bfloat16", 16), "8 bits": ("bfloat16", 8)}
TEXT = 40_000  # characters of a trace that are enough
LLAMACPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
windows = json.loads(sys.argv[2])
engine = Llama(sys.argv[1], n_ctx=len(windows[0]), n_batch=len(windows[0]), logits_all=True, verbose=False)
found = []
for window in windows:
    engine.reset()
    engine.eval(window)
    found.append(np.array(engine.scores[: len(window)], dtype=np.float32))
np.save(sys.argv[3], np.stack(found))
"""


def main() -> None:
    """Compare all forms at every position."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of the same model.")
    parser.add_argument("--traces", type=Path, nargs="+", required=True, help="JSON lines with input and output.")
    parser.add_argument("--windows", type=int, default=4, help="Of each trace.")
    parser.add_argument("--tokens", type=int, default=512, help="Of a window.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llamacpp", help="An interpreter with llama-cpp-python.")
    options = parser.parse_args()
    apply_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    windows = [window for path in options.traces for window in read_windows(path, tokenizer, options)]
    found = {name: ours(options.file, form, windows) for name, form in FORMS.items()}
    if options.llamacpp:
        found["llama.cpp"] = by_llamacpp(options.llamacpp, options.file, windows)
    expected = found["float32"]
    results = {name: compared(each, expected, windows) for name, each in found.items()}
    for name, values in results.items():
        print(f"{name:>10}: " + ", ".join(f"{key} {value:.5f}" for key, value in values.items()), file=sys.stderr)
    setup = {"file": options.file.name, "windows": len(windows), "tokens": options.tokens}
    print(json.dumps(setup | {"results": results}))


def read_windows(path: Path, tokenizer: Tokenizer, options: argparse.Namespace) -> list[list[int]]:
    """Return the first windows of the texts of a trace, one long text of each session."""
    text, seen = "", set()
    with path.open(encoding="utf-8") as lines:
        for entry in map(json.loads, lines):
            if entry["session_id"] in seen:
                continue
            part = f"{entry['input']}\n{entry['output']}\n"
            text += part
            if len(part) > 1500:
                seen.add(entry["session_id"])
            if len(text) > TEXT:
                break
    ids = tokenizer.encode(text).ids
    return [ids[i * options.tokens : (i + 1) * options.tokens] for i in range(options.windows)]


def ours(file: Path, form: tuple[str, int], windows: list[list[int]]) -> torch.Tensor:
    """Return the logits [windows, tokens, vocab] of one form."""
    loaded = load_model(file, dtype=form[0], device="cpu", activation_bits=form[1])
    return torch.stack([logits(loaded, window) for window in windows])


def by_llamacpp(python: str, file: Path, windows: list[list[int]]) -> torch.Tensor:
    """Return the same of llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits.npy")
        subprocess.run([python, "-c", LLAMACPP, str(file), json.dumps(windows), str(out)], check=True)
        return torch.from_numpy(np.load(out))


def compared(found: torch.Tensor, expected: torch.Tensor, windows: list[list[int]]) -> dict[str, float]:
    """Return the figures of one form, means over all positions."""
    divergence = same = loss = 0.0
    for mine, theirs, window in zip(found, expected, windows, strict=True):
        log_mine, log_theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
        divergence += float((log_theirs.exp() * (log_theirs - log_mine)).sum(-1).mean())
        same += float(mine.argmax(-1).eq(theirs.argmax(-1)).float().mean())
        loss += float(F.cross_entropy(mine[:-1], torch.tensor(window[1:])))
    count = len(windows)
    return {
        "divergence_nats": divergence / count,
        "perplexity": math.exp(loss / count),
        "same_top_token": same / count,
    }


if __name__ == "__main__":
    main()
