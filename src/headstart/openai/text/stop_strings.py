"""StopStringSearch: finds the first stop string in a growing text, and the length of the text that must be held back.

One Knuth-Morris-Pratt automaton per stop string: constant work per character and string, and the result does not
depend on how the text is split into tokens. The string that ends first matches; of two that end at the same character,
the longer one.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that was found at [start, end) of the whole text."""

    text: str
    start: int
    end: int


class StopStringAutomata:
    """The automata of the stop strings of a request: immutable, shared by all its choices."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = sorted(stops, key=len, reverse=True)
        self.failures = [_failure_links(stop) for stop in self.stops]


class StopStringSearch:
    """The state of the search in one text."""

    def __init__(self, patterns: StopStringAutomata) -> None:
        self._stops = patterns.stops
        self._failures = patterns.failures
        self._matched = [0] * len(self._stops)  # per string: length of its longest prefix that is a suffix of the text
        self._length = 0

    @property
    def num_held(self) -> int:
        """Number of trailing characters that may become part of a stop string."""
        return max(self._matched, default=0)

    def feed_and_find_match(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """Process the next piece of text and return the first match, if any; None unless `armed`."""
        if not self._stops:
            return None
        for char in text:
            self._length += 1
            for index, stop in enumerate(self._stops):
                if self._advance(index, char) == len(stop):
                    if armed:
                        return StopMatch(stop, self._length - len(stop), self._length)
                    self._matched[index] = self._failures[index][-1]
        return None

    def _advance(self, index: int, char: str) -> int:
        stop, links, matched = self._stops[index], self._failures[index], self._matched[index]
        while matched and stop[matched] != char:
            matched = links[matched - 1]
        if stop[matched] == char:
            matched += 1
        self._matched[index] = matched
        return matched


def _failure_links(pattern: str) -> list[int]:
    """Return for each prefix the length of its longest proper prefix that is also its suffix (Knuth et al. 1977)."""
    links = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[index] != pattern[matched]:
            matched = links[matched - 1]
        if pattern[index] == pattern[matched]:
            matched += 1
        links[index] = matched
    return links
