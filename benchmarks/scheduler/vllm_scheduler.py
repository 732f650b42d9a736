"""Cost of vLLM's own scheduler: the figures of `headstart bench lab scheduler`, measured the same way.

    python vllm_scheduler.py [SEED]

The last line of stdout is one JSON document; microseconds of CPU time of the one thread. Building the model runner's
output is excluded from every figure, as sampling is from Headstart's.
"""

import sys
from random import Random
from time import thread_time

from vllm_peer import VOCAB_SIZE, Peer, median, print_document, versions

BLOCK_SIZE = 16
DECODES = 256
PROMPT = 4096
CACHED = PROMPT - BLOCK_SIZE
BUDGET = 8192


def step_of_decodes(rng: Random, steps: int = 64) -> dict[str, float]:
    """Measure one step of 256 running decodes, schedule and update; one in sixteen of them fills a block."""
    peer = Peer(DECODES * 10, BLOCK_SIZE, max_seqs=DECODES, budget=BUDGET)
    for index in range(DECODES):
        prompt = rng.choices(range(VOCAB_SIZE), k=32 + index % BLOCK_SIZE)
        peer.scheduler.add_request(peer.request(f"r{index}", prompt, steps + 8))
    times: list[tuple[float, float]] = []
    while len(times) < steps:
        start = thread_time()
        output = peer.scheduler.schedule()
        scheduled = thread_time()
        computed = peer.computed(output)
        again = thread_time()
        peer.scheduler.update_from_output(output, computed)
        end = thread_time()
        if output.total_num_scheduled_tokens == DECODES == len(output.num_scheduled_tokens):
            times.append((scheduled - start, end - again))
    return {
        "step_256_decodes_us": median([schedule + update for schedule, update in times]),
        "step_256_schedule_us": median([schedule for schedule, _ in times]),
        "step_256_update_us": median([update for _, update in times]),
    }


def admit_cached(rng: Random, requests: int = 32) -> dict[str, float]:
    """Measure one unloaded request, 4,080 of its 4,096 tokens cached: created and hashed, admitted, finished."""
    peer = Peer(4 * PROMPT // BLOCK_SIZE, BLOCK_SIZE, max_seqs=DECODES, budget=BUDGET)
    scheduler = peer.scheduler
    prefix = rng.choices(range(VOCAB_SIZE), k=CACHED)
    created, admitted, finished = list[float](), list[float](), list[float]()
    for index in range(requests + 1):
        prompt = prefix + rng.choices(range(VOCAB_SIZE), k=PROMPT - CACHED)
        start = thread_time()
        request = peer.request(f"r{index}", prompt, 1)
        created.append(thread_time() - start)
        scheduler.add_request(request)
        output = scheduler.schedule()
        admitted.append(thread_time() - start)
        assert output.total_num_scheduled_tokens == (PROMPT - CACHED if index else PROMPT), "it was not cached"
        computed = peer.computed(output)
        again = thread_time()
        scheduler.update_from_output(output, computed)
        finished.append(admitted[-1] + thread_time() - again)
        assert not scheduler.has_unfinished_requests(), "a request of one output token outlived its step"
        if scheduler.has_finished_requests():
            scheduler.schedule()  # only hands out the ids of finished requests
    return {
        "admit_4096_cached_us": median(admitted[1:]),
        "finish_4096_cached_us": median(finished[1:]),
        "create_4096_us": median(created[1:]),
    }


def hash_1k(rng: Random, rounds: int = 200) -> dict[str, float]:
    """Measure hashing the 64 blocks of 1,024 tokens of a request."""
    peer = Peer(64, BLOCK_SIZE, max_seqs=DECODES, budget=BUDGET)
    request = peer.unhashed("r", rng.choices(range(VOCAB_SIZE), k=1024))
    times: list[float] = []
    for _ in range(rounds):
        start = thread_time()
        count = peer.hash(request)
        times.append(thread_time() - start)
        assert count == 64, f"{count} blocks were hashed"
    return {"hash_1k_tokens_us": median(times)}


def main() -> None:
    rng = Random(sys.argv[1] if len(sys.argv) > 1 else "0")
    seconds = step_of_decodes(rng) | admit_cached(rng) | hash_1k(rng)
    print_document({name: round(1e6 * value, 2) for name, value in seconds.items()} | {"versions": versions()})


if __name__ == "__main__":
    main()
