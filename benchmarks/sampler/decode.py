"""Decoding with sampled tokens beside greedy decoding, in turn; see README.md. The last line of stdout is JSON."""

import argparse
import json
import random
import sys
import time
from array import array
from statistics import median

from headstart import LLM
from headstart.core.request import Request, SamplingParams

MODES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=64),
    "temperature 1": SamplingParams(temperature=1.0, max_tokens=64),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95, max_tokens=64),
    "top_k 20, top_p 0.8": SamplingParams(temperature=1.0, top_k=20, top_p=0.8, max_tokens=64),
}
STREAMS, PREFIX, SUFFIX = 32, 1024, 16  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of 32 streams, greedy and sampled in turn.")
    parser.add_argument("--model", required=True, help="folder of headstart init-model --shape llama-100m[-152k]")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    llm = LLM(options.model, dtype="bfloat16", max_model_len=2048, kv_cache_memory="1GiB")
    rng = random.Random(0)
    prefix = [rng.randrange(llm.info.vocab_size) for _ in range(PREFIX)]
    llm.generate([prefix], {"max_tokens": 1}, progress=False)
    wall: dict[str, list[float]] = {mode: [] for mode in MODES}
    cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(options.rounds + 1):
        modes = list(MODES)
        rng.shuffle(modes)
        for mode in modes:
            seconds, cpu_seconds, tokens = decode(llm, prefix, MODES[mode], rng)
            if number:  # the first round is a warm-up
                wall[mode].append(tokens / seconds)
                cpu[mode].append(1e3 * cpu_seconds / tokens)
        print(f"round {number} of {options.rounds}", file=sys.stderr)
    rows = {
        mode: {
            "tokens_per_s": round(median(wall[mode]), 1),
            "spread": [round(min(wall[mode]), 1), round(max(wall[mode]), 1)],
            "of_greedy": round(median(a / b for a, b in zip(wall[mode], wall["greedy"], strict=True)), 3),
            "cpu_ms_per_token": round(median(cpu[mode]), 3),
            "cpu_of_greedy": round(median(b / a for a, b in zip(cpu[mode], cpu["greedy"], strict=True)), 3),
        }
        for mode in MODES
    }
    print(json.dumps({"vocab_size": llm.info.vocab_size, "rounds": options.rounds, "rows": rows}))


def decode(llm: LLM, prefix: list[int], sampling: SamplingParams, rng: random.Random) -> tuple[float, float, int]:
    """Return wall and CPU seconds, and the tokens, of the steps in which all streams decode."""
    engine, pending = llm.engine, set[str]()
    for _ in range(STREAMS):
        name = f"r{rng.getrandbits(64)}"
        tail = [rng.randrange(llm.info.vocab_size) for _ in range(SUFFIX)]
        engine.add_request(Request(name, array("i", prefix + tail), sampling))
        pending.add(name)
    while pending:
        pending -= {output.request_id for output in engine.step() if output.token_ids}
    began, cpu_began, tokens = time.perf_counter(), time.process_time(), 0
    while engine.has_work and engine.stats().num_running == STREAMS:
        tokens += sum(len(output.token_ids) for output in engine.step())
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    while engine.has_work:
        engine.step()
    return seconds, cpu_seconds, tokens


if __name__ == "__main__":
    main()
