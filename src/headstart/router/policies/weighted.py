"""The policy `weighted`: the weighted sum of scores, like the gateway of gateway-api-inference-extension.

Its default weights are the gateway's own since its chart of 2025: queue 2, kv usage 2, prefix 3. Ties go to the highest
key weight for the prompt's first new block; the gateway chooses at random.
"""

from collections.abc import Mapping
from math import log
from random import Random
from typing import cast

from headstart.core.errors import ConfigError
from headstart.router.endpoint import Endpoint
from headstart.router.policies.policy import PolicyInput, RankedCandidates, rank_by_number
from headstart.router.policies.scorers import SCORERS, Scorer

GATEWAY_WEIGHTS: dict[str, float] = {"queue": 2.0, "kv-usage": 2.0, "prefix": 3.0}
Term = tuple[float, Scorer]


class WeightedPolicy:
    """The replica with the highest weighted sum of scores; or, with `rng`, at random in proportion to the sums.

    Raises:
        ConfigError: a weight names no scorer, is negative, or there is none.
    """

    name = "weighted"

    def __init__(self, weights: Mapping[str, float] | None = None, *, rng: Random | None = None) -> None:
        weights = GATEWAY_WEIGHTS if weights is None else weights
        unknown = [name for name in weights if name not in SCORERS]
        if unknown:
            raise ConfigError(f"there is no scorer {unknown[0]!r}; there are {', '.join(SCORERS)}")
        if not weights or min(weights.values()) < 0:
            raise ConfigError(f"weights {dict(weights)}: give at least one, none below 0")
        self._terms: list[Term] = [(weight, SCORERS[name]()) for name, weight in weights.items()]
        self._rng = rng

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank by the weighted sum of scores; the memo holds that of each scorer."""
        sums, memos = [0.0] * len(view.candidates), list[object]()
        for factor, scorer in self._terms:
            scores, memo = scorer.score(view)
            assert all(0.0 <= score <= 1.0 for score in scores), f"{scorer} scores {scores}; 0 to 1 was agreed"
            sums = [total + factor * score for total, score in zip(sums, scores, strict=True)]
            memos.append(memo)
        if self._rng is None:
            choice = rank_by_number(view, [-total for total in sums], "highest score", tuple(memos))
            return choice._replace(scores=tuple(-score for score in choice.scores))
        return self._draw(view, sums, tuple(memos), self._rng)

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Pass each scorer its memo."""
        memos = cast("tuple[object, ...]", choice.memo)  # as `choose` made it
        for (_, scorer), memo in zip(self._terms, memos, strict=True):
            scorer.record_pick(memo, endpoint)

    def _draw(self, view: PolicyInput, sums: list[float], memo: object, rng: Random) -> RankedCandidates:
        """Draw a random order in proportion to the sums (Efraimidis and Spirakis, 2006)."""
        draws = [log(1.0 - rng.random()) / total if total > 0 else float("-inf") for total in sums]
        order = sorted(range(len(sums)), key=draws.__getitem__, reverse=True)
        return RankedCandidates(view.candidates.reordered(order), tuple(sums[i] for i in order), "drawn by score", memo)
