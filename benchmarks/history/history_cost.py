"""CPU time of token-exact history per request: python benchmarks/history/history_cost.py MODEL_FOLDER > result.json.

A chat of 20 turns is tokenized again with one more turn, with and without the turns in memory, by turns (A B A B)
in one process, and the turn that was generated is stored. CPU time of the process, medians of the rounds, microseconds.
"""

import json
import statistics
import sys
import time
from array import array
from random import Random

from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tokenizer.turn_memory import TurnMemory

ROUNDS, TURNS, ANSWER_TOKENS = 200, 20, 200
WORDS = ("river", "engine", "ledger", "window", "harbour", "ticket", "garden", "printer", "valley", "signal")


def measure(base: Tokenizer) -> dict[str, object]:
    memory = TurnMemory()
    tokenizers = {"off": SegmentedTokenizer(base), "on": SegmentedTokenizer(base, turns=memory)}
    times: dict[str, list[float]] = {"off": [], "on": [], "stored": []}
    rng, num_chars, num_tokens, answer = Random(1), 0, 0, ""
    for round_number in range(ROUNDS):
        text = ""
        for turn in range(TURNS + 1):
            question = f"{round_number} {' '.join(rng.choices(WORDS, k=40))}"
            text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            last = turn == TURNS
            for name in ("off", "on") if round_number % 2 else ("on", "off"):
                start = time.process_time()
                conversation = tokenizers[name].encode_conversation(text)
                if last:
                    times[name].append(time.process_time() - start)
                num_tokens = len(conversation.token_ids)
                if conversation.turn is not None:
                    generated = base.encode(" ".join(rng.choices(WORDS, k=ANSWER_TOKENS)), add_special_tokens=False)
                    start = time.process_time()
                    conversation.turn.ended(array("i", generated))
                    if last:
                        times["stored"].append(time.process_time() - start)
                    answer = base.decode(generated)
            text += f"{answer}<|im_end|>\n"
        num_chars = len(text)
    medians = {name: round(statistics.median(values) * 1e6, 1) for name, values in times.items()}
    stats = memory.stats
    return {
        "rounds": ROUNDS,
        "turns": TURNS,
        "prompt_chars": num_chars,
        "prompt_tokens": num_tokens,
        "microseconds": medians,
        "held_bytes": stats.num_bytes,
        "turns_found": stats.num_whole,
        "bytes_per_generated_token": round(stats.num_bytes / (ROUNDS * (TURNS + 1) * ANSWER_TOKENS), 2),
    }


if __name__ == "__main__":
    print(json.dumps(measure(Tokenizer.from_folder(sys.argv[1])), indent=1))
