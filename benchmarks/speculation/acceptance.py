"""Drafts without a model, teacher-forced: acceptance.py --tokenizer FOLDER [--report FILE].

Replays recorded outputs token by token through the engine's own drafting, one request after the other, and counts
steps, drafts and accepted tokens. A step of t tokens costs base + slope * t, with the slope stated relative to a step
of one token, so nothing is timed: the counts are the same on every machine. `modelled_speedup` is tokens / cost.

The last line of stdout is JSON.
"""

import argparse
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from texts import Case, Texts
from tokenizers import Tokenizer

from headstart.core.cache.block_pool import BlockPool
from headstart.core.cache.kv_cache import KVCache
from headstart.core.request import Request, SamplingParams
from headstart.core.speculation.speculation import Speculator
from headstart.core.speculation.speculation_config import SpeculationConfig
from headstart.measurement.machine import print_figures_with_machine

KINDS = ("miniswe", "taubench", "quotes", "json", "shuffled", "random")
SLOPES = (0.024, 0.085, 0.2)
MOST_TOKENS = 1_000_000
RANDOM_TOKENS = 10_000
BLOCK = 16
BUDGET = 2048


def replay(cases: Sequence[Case], slope: float, *, earlier_outputs: bool) -> dict[str, Any]:
    """Return the counts of one kind; without `earlier_outputs`, drafts come from the request's own tokens only."""
    speculation = Speculator(SpeculationConfig(), KVCache(BlockPool(2), BLOCK), MOST_TOKENS)
    speculation.cost.base, speculation.cost.slope = 1.0 - slope, slope
    num_steps, cost, drafted, accepted = 0, 0.0, 0, 0
    for number, case in enumerate(cases):
        if not earlier_outputs:
            speculation.clear()
        request = Request(str(number), array("i", case.prompt), SamplingParams(max_tokens=len(case.output)))
        seq = speculation._cache.new_sequence(request, number)
        seq.token_ids.append(case.output[0])
        seq.num_computed_tokens = len(case.prompt)
        for _ in range(len(case.prompt) // BUDGET + 1):  # the prompt is indexed
            speculation.propose_drafts([(seq, 1)], 0)
        while seq.num_output_tokens < len(case.output):
            draft = speculation.propose_drafts([(seq, 1)], BUDGET).get(request.request_id, array("i"))
            due = case.output[seq.num_output_tokens :]
            num = 0
            while num < len(draft) and draft[num] == due[num]:
                num += 1
            if draft:
                speculation.record_verified(seq, len(draft), num)
            seq.token_ids.extend(due[: num + 1])
            seq.num_computed_tokens = len(seq.token_ids) - 1
            num_steps, cost = num_steps + 1, cost + 1.0 + slope * len(draft)
            drafted, accepted = drafted + len(draft), accepted + num
        speculation.on_finished(seq)
    tokens = sum(len(case.output) - 1 for case in cases)
    return {
        "slope": slope,
        "earlier_outputs": earlier_outputs,
        "outputs": len(cases),
        "tokens": tokens,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance": round(accepted / max(drafted, 1), 3),
        "tokens_per_step": round(tokens / num_steps, 3),
        "modelled_speedup": round(tokens / cost, 3),
    }


def main() -> None:
    """Replay all kinds at all slopes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json")
    parser.add_argument("--traces", default="../shared/traces")
    parser.add_argument("--documents", default="/usr/share", help="folder with .json and .rst files")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(Path(args.tokenizer) / "tokenizer.json"))
    texts = Texts(tokenizer, Path(args.traces), Path(args.documents), MOST_TOKENS, tokenizer.get_vocab_size())
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        _, cases = texts.cases(kind, RANDOM_TOKENS if kind == "random" else MOST_TOKENS)
        for slope in SLOPES:
            for earlier_outputs in (False, True):
                row = {"kind": kind, **replay(cases, slope, earlier_outputs=earlier_outputs)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    print_figures_with_machine({"tokenizer": Path(args.tokenizer).name, "rows": rows})


if __name__ == "__main__":
    main()
