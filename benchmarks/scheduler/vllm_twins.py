"""A burst behind one new prefix through vLLM's own scheduler: the number of prompt tokens that it schedules.

    python vllm_twins.py

The forms of `headstart bench shared-burst`. Nothing is computed: the tokens that its scheduler schedules are counted.
The last line of stdout is one JSON document.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from vllm_peer import VOCAB_SIZE, Peer, print_document, versions

REQUESTS, PREFIX, OWN, OUTPUT = 32, 2048, 32, 16
BRANCHES, LEAVES, BRANCH = 4, 8, 256
BLOCK_SIZES = (16, 128)  # Headstart's, and vLLM's default on a CPU
BUDGETS = (2048, 8192)  # vLLM's defaults of server and library
CAPS = (0, 256)


def prompts(form: str, rng: Random) -> tuple[list[list[int]], int]:
    """Return (prompts, tokens to compute if nothing is computed twice)."""

    def tokens(length: int) -> list[int]:
        return rng.choices(range(VOCAB_SIZE), k=length)

    root = tokens(PREFIX)
    if form == "burst":
        return [root + tokens(OWN) for _ in range(REQUESTS)], PREFIX + REQUESTS * OWN
    stems = [root + tokens(BRANCH) for _ in range(BRANCHES)]
    ideal = PREFIX + BRANCHES * BRANCH + BRANCHES * LEAVES * OWN
    return [stem + tokens(OWN) for stem in stems for _ in range(LEAVES)], ideal


def measure(form: str, block_size: int, budget: int, cap: int, seed: int) -> dict[str, Any]:
    """Measure one burst on an empty cache, in a pool that holds all requests without any sharing."""
    requests, ideal = prompts(form, Random(seed))
    num_blocks = len(requests) * (max(map(len, requests)) + OUTPUT) // block_size + 2 * len(requests)
    peer = Peer(num_blocks, block_size, max_seqs=256, budget=budget, cap=cap)
    for index, prompt in enumerate(requests):
        peer.scheduler.add_request(peer.request(f"r{index}", prompt, OUTPUT))
    scheduled, steps = peer.run()
    prefill = scheduled - len(requests) * (OUTPUT - 1)  # the first output token comes with the prompt
    return {
        "form": form if form == "burst" else f"tree {BRANCHES}x{LEAVES}",
        "cap": cap,
        "block_size": block_size,
        "budget": budget,
        "prefill_computed": prefill,
        "ideal": ideal,
        "redundancy": round(prefill / ideal, 4),
        "steps": steps,
    }


def every_form(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the results of all forms under all settings."""
    for form in ("burst", "tree"):
        for cap in CAPS:
            for block_size in BLOCK_SIZES:
                for budget in BUDGETS:
                    yield measure(form, block_size, budget, cap, seed)


def main() -> None:
    setup = {"requests": REQUESTS, "prefix_tokens": PREFIX, "own_tokens": OWN, "branch_tokens": BRANCH, "seed": 0}
    print_document({"bench": "twins", "forms": list(every_form(0)), "setup": setup, "versions": versions()})


if __name__ == "__main__":
    main()
