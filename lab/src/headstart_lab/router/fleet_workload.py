"""Texts of an exact number of tokens, and the workloads of `bench fleet` made of them.

Texts, not token ids: other routers route by text. Every word is one token of the model's tokenizer, independent of its
neighbours, so lengths are exact and a shared beginning is shared token by token.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from headstart.core.errors import ConfigError
from headstart.workload.jobs import Job
from headstart.workload.synthetic import RequestShape, unit_poisson_arrivals
from headstart_lab.router.fleet_trial import LONGEST, FleetConfig

MIN_WORDS = 32
MAX_WORDS = 512
SIGMA = 1.0  # of the logarithm of a decode-heavy output's length


@dataclass(frozen=True, slots=True)
class Question:
    """One request: its text, and the same as a job with its token ids."""

    text: str
    job: Job
    group: int


class Words:
    """Words that are one token each. Raises ConfigError if the tokenizer has too few."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids: dict[str, int] = {}
        for token in sorted(tokenizer.get_vocab().values()):
            word = tokenizer.decode([token])
            if len(word) > 2 and word.startswith(" ") and word[1:].isascii() and word[1:].isalpha():
                self._ids[word] = token
        self._ids = {word: token for word, token in self._ids.items() if _ids(tokenizer, word * 3) == [token] * 3}
        self._words = sorted(self._ids)[:MAX_WORDS]
        if len(self._words) < MIN_WORDS or not self._agrees(tokenizer):
            raise ConfigError("this model's tokenizer has no words of one token each; use a shape, such as llama-3m")

    @classmethod
    def of_model(cls, folder: str) -> "Words":
        """Return the words of a model's tokenizer. Raises ConfigError."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is not there: the texts of this benchmark are made of the model's own tokens")
        return cls(Tokenizer.from_file(str(path)))

    def draw(self, num_tokens: int, rng: Random) -> list[str]:
        """Return `num_tokens` random words."""
        return rng.choices(self._words, k=num_tokens)

    def ids(self, words: Sequence[str]) -> "array[int]":
        """Return the token ids of the words, packed."""
        return array("i", [self._ids[word] for word in words])

    def _agrees(self, tokenizer: Tokenizer) -> bool:
        words = self.draw(1000, Random(0))
        return _ids(tokenizer, "".join(words)) == self.ids(words).tolist()


def make_questions(words: Words, config: FleetConfig, kind: str, rate: float, rng: Random) -> list[Question]:
    """Return the requests of one run of a workload, Poisson arrivals at `rate` requests per second."""
    due = [at / rate for at in unit_poisson_arrivals(config.groups * config.prompts, rng)]
    make = decode_heavy if kind == "decode" else shared_prefix
    return make(words, config.groups, config.prompts, config.shapes[kind], due, rng)


def shared_prefix(
    words: Words, groups: int, prompts: int, shape: RequestShape, due: Sequence[float], rng: Random
) -> list[Question]:
    """Return SGLang's generated-shared-prefix: `groups` x `prompts` questions behind system prompts, in random order.

    `due`: ascending arrival times in seconds; there may be fewer than questions.
    """
    made: list[tuple[int, list[str]]] = []
    for group in range(groups):
        prefix = words.draw(shape.shared, rng)
        made += [(group, prefix + words.draw(shape.own, rng)) for _ in range(prompts)]
    rng.shuffle(made)
    return [
        Question("".join(text), Job(words.ids(text), shape.output, at), group)
        for (group, text), at in zip(made, due, strict=False)
    ]


def decode_heavy(
    words: Words, groups: int, prompts: int, shape: RequestShape, due: Sequence[float], rng: Random
) -> list[Question]:
    """Return chats with long outputs: the group by Zipf's law, lognormal lengths with median `shape.output`.

    An output has at most LONGEST times the median. `due` as for `shared_prefix`.
    """
    prefixes = [words.draw(shape.shared, rng) for _ in range(groups)]
    weights = list(accumulate(1 / rank for rank in range(1, groups + 1)))
    questions: list[Question] = []
    for at in due[: groups * prompts]:
        group = rng.choices(range(groups), cum_weights=weights)[0]
        text = prefixes[group] + words.draw(shape.own, rng)
        output = min(max(round(rng.lognormvariate(log(shape.output), SIGMA)), 1), LONGEST * shape.output)
        questions.append(Question("".join(text), Job(words.ids(text), output, at), group))
    return questions


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids
