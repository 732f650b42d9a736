"""Greedy tokens of the engine and of Transformers' `generate` for one checkpoint, both in fp32."""

import json
from pathlib import Path
from random import Random
from typing import Any

from oracle import VOCAB, EngineUnderTest, Reference, Tally, check_tokens, greedy, run_staggered

PROMPT_TOKENS, NUM_TOKENS = 40, 12  # longer than the windows of the tiny models


def differences(folder: Path, *, seed: int = 0, num_prompts: int = 2) -> list[str]:
    """Say where the engine's tokens differ from Transformers'. Raises ConfigError if we refuse the checkpoint."""
    under_test = EngineUnderTest(folder)
    reference, rng, tally = Reference(folder), Random(seed), Tally()
    for number in range(num_prompts):
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
        due, gaps = reference.generate(prompt, NUM_TOKENS)
        engine = under_test.build(64, 4, caching=True, budget=16)
        got = run_staggered(engine, [greedy("r", prompt, NUM_TOKENS)], rng, Tally())["r"]
        check_tokens(under_test, f"prompt {number}", prompt, got, due, gaps, tally)
    return tally.wrong


def edit(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change keys of a checkpoint's config.json in place, and return the folder."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in remove}
    (folder / "config.json").write_text(json.dumps({**kept, **changes}))
    return folder
