"""Greedy answers of llama.cpp on the same GGUF and prompts: python llamacpp.py FILE OURS OUT.

Runs in the environment that benchmarks/peers/build_llamacpp.sh makes, or with another build of llama-cpp-python's
bindings (--module). Tokenizes each rendered text itself, and answers our prompt ids token by token.
"""

import argparse
import importlib
import json
from pathlib import Path


def main() -> None:
    """Write llama.cpp's prompt ids and answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("ours", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--module", default="llama_cpp")
    given = parser.parse_args()
    bindings = importlib.import_module(given.module)
    llama = bindings.Llama(given.file, n_ctx=2048, n_threads=2, verbose=False, logits_all=False)
    rows = []
    for row in json.loads(given.ours.read_text(encoding="utf-8"))["rows"]:
        prompt = llama.tokenize(row["text"].encode(), add_bos=False, special=True)
        answer: list[int] = []
        for token in llama.generate(row["prompt"], temp=0.0, top_k=1, repeat_penalty=1.0):
            answer.append(token)
            if len(answer) == len(row["tokens"]):
                break
        rows.append({"prompt": prompt, "tokens": answer})
    given.out.write_text(json.dumps({"version": bindings.__version__, "rows": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
