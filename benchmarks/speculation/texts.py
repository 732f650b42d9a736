"""Texts for the benchmark of speculation: prompts with the outputs that are forced, as token ids.

miniswe, taubench   recorded outputs of agents (LMCache/lmcache-agent-trace, Apache-2.0), in the order of the trace. The
                    recorded inputs leave out the agent's own earlier turns, so less can be quoted than in real prompts
quotes              three passages of files that come with Debian and Python packages, and an answer that begins with a
                    sentence of a taubench output and quotes two sentences of one passage
json                documents of the JSON Schema test suite (MIT), and the same document with one string changed
shuffled            miniswe outputs with their tokens in random order, behind their prompts: frequent tokens and short
                    matches as in text, but nothing that could be predicted
random              uniformly random tokens behind random prompts

Outputs in which a run of eight tokens occurs more than twice are left out: they are loops of a weak model.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer

LOOP_TOKENS, LOOP_TIMES = 8, 2
MIN_OUTPUT = 16
VOCAB = 32_000  # of random tokens
INSTRUCTION = "\n\nAnswer from the passages above, and quote the sentences that matter.\n"
EDIT = "\n\nReturn the whole document with the first description changed.\n"
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


class Case(NamedTuple):
    """One request: its prompt, and the output that it is given."""

    prompt: list[int]
    output: list[int]


def is_loop(tokens: list[int]) -> bool:
    """Return whether a run of LOOP_TOKENS tokens occurs more than LOOP_TIMES times."""
    runs = Counter(tuple(tokens[at : at + LOOP_TOKENS]) for at in range(len(tokens) - LOOP_TOKENS + 1))
    return max(runs.values(), default=0) > LOOP_TIMES


class Texts:
    """The cases of each kind, read with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, traces: Path, documents: Path, max_prompt: int, vocab_size: int) -> None:
        """`vocab_size` is that of the model that computes; if it is smaller, ids are renumbered as they occur."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._renumbered: dict[int, int] = {}
        self._traces = traces
        self._documents = documents
        self._max_prompt = max_prompt  # tokens; requests with longer prompts are left out

    def cases(self, kind: str, num_tokens: int, earlier: int = 0) -> tuple[list[Case], list[Case]]:
        """Return `earlier` cases, and those behind them with at least `num_tokens` output tokens together.

        Both are fewer if there are no more.
        """
        before: list[Case] = []
        found: list[Case] = []
        total = 0
        for case in getattr(self, f"_{kind}")():
            if len(case.output) < MIN_OUTPUT or is_loop(case.output):
                continue
            if len(before) < earlier:
                before.append(case)
                continue
            if len(case.prompt) > self._max_prompt:
                continue
            found.append(case)
            total += len(case.output)
            if total >= num_tokens:
                break
        return before, found

    def _miniswe(self) -> Iterator[Case]:
        return self._trace("agent_miniswe")

    def _taubench(self) -> Iterator[Case]:
        return self._trace("agent_taubench")

    def _trace(self, name: str) -> Iterator[Case]:
        for line in (self._traces / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            call = json.loads(line)
            if call["output"] and call["input"]:
                yield Case(self._ids(call["input"]), self._ids(call["output"]))

    def _outputs(self, name: str) -> list[str]:
        lines = (self._traces / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [output for line in lines if (output := json.loads(line)["output"])]

    def _quotes(self) -> Iterator[Case]:
        rng = Random(1)
        passages = [text for text in self._passages() if len(_SENTENCE.split(text)) >= 6]
        openings = [_SENTENCE.split(text)[0] for text in self._outputs("agent_taubench")]
        rng.shuffle(passages)
        for at in range(0, len(passages) - 2, 3):
            three = passages[at : at + 3]
            sentences = _SENTENCE.split(rng.choice(three))
            first = rng.randrange(len(sentences) - 1)
            quote = " ".join(sentences[first : first + 2])
            answer = f'{rng.choice(openings)} "{quote}"'
            yield Case(self._ids("\n\n".join(three) + INSTRUCTION), self._ids(answer))

    def _passages(self) -> Iterator[str]:
        for path in sorted(Path("/usr/share/common-licenses").glob("*")) + sorted(self._documents.rglob("*.rst")):
            if path.is_symlink():
                continue
            words = path.read_text(encoding="utf-8", errors="replace").split()
            for at in range(0, len(words) - 250, 250):
                yield " ".join(words[at : at + 250])

    def _json(self) -> Iterator[Case]:
        seen: set[str] = set()
        paths = sorted(self._documents.rglob("*.json"))
        Random(2).shuffle(paths)
        for path in paths:
            text = path.read_text(encoding="utf-8")
            if not 800 <= len(text) <= 4000 or text in seen or '"description": "' not in text:
                continue
            seen.add(text)
            edited = re.sub(r'"description": "[^"]*"', '"description": "a new description of it"', text, count=1)
            yield Case(self._ids(text + EDIT), self._ids(edited))

    def _shuffled(self) -> Iterator[Case]:
        rng = Random(3)
        for case in self._miniswe():
            output = list(case.output)
            rng.shuffle(output)
            yield Case(case.prompt[:1000], output)

    def _random(self) -> Iterator[Case]:
        rng = Random(4)
        while True:
            yield Case(rng.choices(range(VOCAB), k=200), rng.choices(range(VOCAB), k=75))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._tokenizer.get_vocab_size() <= self._vocab_size:
            return ids
        known = self._renumbered
        new = [known.setdefault(token, len(known)) for token in ids]
        assert len(known) <= self._vocab_size, f"{len(known)} different tokens, of {self._vocab_size} ids"
        return new
