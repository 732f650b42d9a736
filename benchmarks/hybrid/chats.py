"""Count what a hybrid reuses in chats of 20 turns, beside a model with attention alone and the same bytes of KV.

    OMP_NUM_THREADS=1 python benchmarks/hybrid/chats.py > chats.json

Tiny random models whose states are as large, in tokens of KV, as those of Qwen3.5-9B and LFM2-1.2B. Chats are rendered
by a chat template, answers keep their tokens, and all chats take their next turn together. Counters, no times.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from model.tiny import make_checkpoint  # noqa: E402

from headstart import LLM  # noqa: E402
from headstart.core.cache.hashing import is_checkpoint_page_hash  # noqa: E402
from headstart.model.weights.init_model import write_random_model  # noqa: E402
from headstart.openai.tokenizer.tokenizer import Tokenizer  # noqa: E402

KV = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
MODELS = {  # hybrid and model with attention alone, both with the same bytes of KV per token
    "qwen3_5_text": ({**KV, **DELTA, "num_hidden_layers": 4, "full_attention_interval": 4}, 1),
    "lfm2": ({"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 8,
              "layer_types": ["conv"] * 6 + ["full_attention"] * 2}, 2),
}  # fmt: skip
CHATS, ANSWER, MARK = 6, 24, "<<answer>>"
SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument(
        "--pools", type=float, nargs="+", default=[1.25, 2.5, 5.0, 10.0], help="times the tokens of all chats"
    )
    options = parser.parse_args()
    rows = [row for family in MODELS for row in compared(family, options.turns, options.pools)]
    print(json.dumps({**vars(options), "chats": CHATS, "answer_tokens": ANSWER, "rows": rows}))


def compared(family: str, turns: int, pools: list[float]) -> list[dict]:
    """Return a row for each size of the pool: the shares of prompt tokens that are reused."""
    settings, num_layers = MODELS[family]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folders = {
            kind: write_random_model("tiny", Path(name) / kind, progress=False) for kind in ("hybrid", "attention")
        }
        make_checkpoint(family, folders["hybrid"], vocab_size=512, max_position_embeddings=8192, **settings)
        kv = KV | {"num_hidden_layers": num_layers, "max_position_embeddings": 8192}
        make_checkpoint("llama", folders["attention"], vocab_size=512, **kv)
        total = CHATS * served(folders["attention"], turns, 65536)["longest"]
        for pool in pools:
            row = {"family": family, "pool_tokens": int(pool * total) // 16 * 16}
            for kind, folder in folders.items():
                row |= {f"{kind}_{key}": value for key, value in served(folder, turns, row["pool_tokens"]).items()}
            row["share"] = (
                row["hybrid_cached"] / row["hybrid_prompt"] / (row["attention_cached"] / row["attention_prompt"])
            )
            rows.append(row)
            print(row, file=sys.stderr)
    return rows


def texts(turns: int) -> list[list[str]]:
    """Return what the users of all chats write."""
    rng = Random(0)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 8))) for _ in range(300)]
    return [[" ".join(rng.choices(words, k=rng.randint(8, 30))) for _ in range(turns)] for _ in range(CHATS)]


def prompt_of(tokenizer: Tokenizer, users: list[str], answers: list[list[int]]) -> list[int]:
    """Return the tokens of a chat rendered up to the next answer, with the tokens of those so far."""
    said = [{"role": "assistant", "content": MARK}] * len(answers)
    turns = [message for pair in zip([user(text) for text in users], [*said, None], strict=False) for message in pair]
    pieces = tokenizer.render_chat_text([SYSTEM, *filter(None, turns)]).split(MARK)
    assert len(pieces) == len(answers) + 1
    tokens = list(tokenizer.encode(pieces[0], add_special_tokens=False))
    for answer, piece in zip(answers, pieces[1:], strict=True):
        tokens += [*answer, *tokenizer.encode(piece, add_special_tokens=False)]
    return tokens


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def served(folder: Path, turns: int, pool_tokens: int) -> dict:
    """Return the counters of a model that serves all chats, turn by turn."""
    options = {"num_gpu_blocks_override": pool_tokens // 16, "max_model_len": 4096, "max_num_seqs": CHATS}
    with LLM(str(folder), dtype="bfloat16", **options) as llm:
        answers: list[list[list[int]]] = [[] for _ in range(CHATS)]
        users, share, sampling = texts(turns), 0.0, {"temperature": 0, "max_tokens": ANSWER, "ignore_eos": True}
        for turn in range(turns):
            prompts = [prompt_of(llm.tokenizer, users[chat][: turn + 1], answers[chat]) for chat in range(CHATS)]
            for chat, done in enumerate(llm.generate(prompts, sampling, progress=False)):
                answers[chat].append(done.token_ids)
            published = llm.engine.scheduler.pool.published
            assert isinstance(published, dict)
            share += sum(map(is_checkpoint_page_hash, published)) / max(len(published), 1) / turns
        counters = llm.engine.stats().counters
        return {
            "prompt": counters.prompt_tokens,
            "cached": counters.cached_tokens,
            "state_share": round(share, 3),
            "state_tokens": 16 * llm.engine.scheduler.cache.checkpoints.num_pages,
            "longest": len(prompts[0]) + ANSWER,
        }


if __name__ == "__main__":
    main()
