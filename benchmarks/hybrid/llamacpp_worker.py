"""Time llama.cpp on a GGUF file: the worker of peers.py, in the environment of benchmarks/peers/build_llamacpp.sh."""

import json
import sys
import time

from llama_cpp import Llama


class Worker:
    """One sequence at a time, all threads, flash attention."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        self.model = Llama(path, n_ctx=context, n_batch=2048, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
                           flash_attn=True, verbose=False)  # fmt: skip
        self.kept: tuple[list[int], object] | None = None

    def first_token(self, tokens: list[int]) -> float:
        """Return the seconds of a prompt; its state before the last token is kept for `cached`, outside of the time."""
        self.model.reset()
        began = time.perf_counter()
        self.model.eval(tokens[:-1])
        middle = time.perf_counter()
        self.kept = tokens, self.model.save_state()
        last = time.perf_counter()
        self.model.eval(tokens[-1:])
        return middle - began + time.perf_counter() - last

    def cached(self, tokens: list[int]) -> float:
        """Return the seconds of the same prompt from the kept state of all tokens but the last."""
        assert self.kept is not None and self.kept[0] == tokens
        self.model.reset()
        began = time.perf_counter()
        self.model.load_state(self.kept[1])
        self.model.eval(tokens[-1:])
        return time.perf_counter() - began

    def decode(self, tokens: list[int], num: int) -> float:
        """Return the seconds of each of `num` tokens behind a prompt."""
        self.model.reset()
        self.model.eval(tokens)
        began = time.perf_counter()
        for _ in range(num):
            self.model.eval([int(self.model.scores[self.model.n_tokens - 1].argmax())])
        return (time.perf_counter() - began) / num


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(json.dumps(getattr(worker, name)(*values)), flush=True)


if __name__ == "__main__":
    main()
