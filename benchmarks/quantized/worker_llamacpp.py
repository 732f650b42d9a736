"""Time llama.cpp or ik_llama.cpp on a GGUF file, in its own environment; the last line is one JSON document.

One sequence through `llama_decode`, greedy: a prompt in calls of at most `ubatch` tokens, then single tokens. The
argmax of each token's logits is part of its time, as it is for any caller.
"""

import argparse
import importlib
import json
import time
from typing import Any

import numpy as np

LIBRARIES = {"llama.cpp": "llama_cpp.llama_cpp", "ik_llama.cpp": "ik_llama_cpp._ctypes_api"}


class Engine:
    """A model with one sequence."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.lib: Any = importlib.import_module(LIBRARIES[arguments.library])
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        if not arguments.repack:
            params.use_extra_bufts = False
        self.model = self.lib.llama_model_load_from_file(arguments.file.encode(), params)
        assert self.model, f"{arguments.library} cannot load {arguments.file}"
        params = self.lib.llama_context_default_params()
        params.n_ctx = -(-(arguments.prompt + arguments.tokens + 1) // 256) * 256
        params.n_batch = params.n_ubatch = arguments.ubatch
        params.n_threads = params.n_threads_batch = arguments.threads
        if arguments.library == "llama.cpp":
            params.flash_attn_type = int(arguments.flash)
        else:
            params.flash_attn = arguments.flash
        self.context = self.lib.llama_init_from_model(self.model, params)
        assert self.context, "no context"
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.batch = self.lib.llama_batch_init(arguments.ubatch, 0, 1)
        self.position = 0

    def clear(self) -> None:
        """Forget the sequence."""
        if hasattr(self.lib, "llama_get_memory"):
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        else:
            self.lib.llama_kv_cache_clear(self.context)
        self.position = 0

    def decode(self, tokens: list[int]) -> int:
        """Append tokens in one call; return the most likely next token."""
        self.batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            self.batch.token[index], self.batch.pos[index] = token, self.position + index
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, 0
            self.batch.logits[index] = index == len(tokens) - 1
        code = self.lib.llama_decode(self.context, self.batch)
        assert code == 0, code
        self.position += len(tokens)
        logits = self.lib.llama_get_logits_ith(self.context, len(tokens) - 1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def main() -> None:
    """Print the times of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--flash", type=int, default=0)
    parser.add_argument("--repack", type=int, default=1, help="0: llama.cpp leaves the weights as in the file")
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    arguments = parser.parse_args()
    engine, rng = Engine(arguments), np.random.default_rng(0)
    prompt = rng.integers(300, min(engine.vocab_size, 30000), arguments.prompt).tolist()
    prefill: list[float] = []
    token: list[float] = []
    for run in range(arguments.runs + 1):  # the first warms up
        engine.clear()
        following, began = 0, time.perf_counter()
        for at in range(0, len(prompt), arguments.ubatch):
            following = engine.decode(prompt[at : at + arguments.ubatch])
        middle = time.perf_counter()
        for _ in range(arguments.tokens):
            following = engine.decode([following])
        if run:
            prefill.append(middle - began)
            token.append((time.perf_counter() - middle) / arguments.tokens)
    print(json.dumps({"prefill": prefill, "token": token}))


if __name__ == "__main__":
    main()
