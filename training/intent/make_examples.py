"""Write examples/intent: the plain and the swapped preamble, and held-out sentences with both answers.

python training/intent/make_examples.py examples/intent
"""

import argparse
import json
from pathlib import Path

from headstart_lab.intent.intent import make_examples, make_preamble, swap_codes

SEED = "example"
NUM_SENTENCES = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder to write to")
    folder = parser.parse_args().folder
    plain = make_preamble(SEED)
    swapped = swap_codes(plain, SEED)
    (folder / "preamble.txt").write_text(plain.text, encoding="utf-8")
    (folder / "preamble_swapped.txt").write_text(swapped.text, encoding="utf-8")
    pairs = zip(*(make_examples("heldout", NUM_SENTENCES, p, SEED) for p in (plain, swapped)), strict=True)
    rows = ({"sentence": a.sentence, "answer": a.answer, "answer_swapped": b.answer} for a, b in pairs)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "heldout.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
