"""LogprobTable: log-probabilities of many tokens and of their alternatives, packed in arrays.

12 bytes per alternative; tuples of Python objects take about 110. It is a sequence of TokenEntry.
"""

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from headstart.core.batch import TokenLogprob


class TokenEntry(NamedTuple):
    """Log-probabilities of one token and its best alternatives, and the offset of its text in the whole text."""

    token_id: int
    logprob: float | None  # None for the first token of an echoed prompt
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first
    offset: int  # characters


class LazyTokenEntries(Sequence[TokenEntry]):
    """A sequence of entries that are made when they are read."""

    @abstractmethod
    def _entry(self, index: int) -> TokenEntry:
        """Return the entry at an index from 0."""

    @overload
    def __getitem__(self, index: int) -> TokenEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenEntry]: ...
    def __getitem__(self, index: int | slice) -> TokenEntry | list[TokenEntry]:
        if isinstance(index, slice):
            return [self._entry(at) for at in range(*index.indices(len(self)))]
        return self._entry(range(len(self))[index])

    def __iter__(self) -> Iterator[TokenEntry]:
        return map(self._entry, range(len(self)))


class LogprobTable(LazyTokenEntries):
    """An append-only table of TokenEntry.

    The values of a token are adjacent: its logprob and those of its alternatives; its id, its offset and their ids.
    """

    def __init__(self) -> None:
        self._logprobs = array("d")
        self._integers = array("i")  # one more value per token than in _logprobs
        self._ends = array("i")  # end of each token's values in _logprobs

    def append(self, known: TokenLogprob, offset: int = 0) -> None:
        """Add one token, whose text begins at character `offset`."""
        self._logprobs.append(known.logprob)
        self._integers.append(known.token_id)
        self._integers.append(offset)
        for token_id, logprob in known.top:
            self._integers.append(token_id)
            self._logprobs.append(logprob)
        self._ends.append(len(self._logprobs))

    def extend(self, entries: Iterable[TokenEntry]) -> None:
        """Add tokens that have a log-probability."""
        for entry in entries:
            assert entry.logprob is not None, f"token {entry.token_id} has no log-probability"
            self.append(TokenLogprob(entry.token_id, entry.logprob, entry.top), entry.offset)

    def token_logprob_at(self, index: int) -> TokenLogprob:
        """Return one token without its offset in the text."""
        entry = self._entry(index)
        return TokenLogprob(entry.token_id, self._logprobs[self._start(index)], entry.top)

    def __len__(self) -> int:
        return len(self._ends)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # pyrefly: ignore[implicit-any-attribute]  # it is mutable

    def _start(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _entry(self, index: int) -> TokenEntry:
        start, end = self._start(index), self._ends[index]
        logprob, *logprobs = self._logprobs[start:end]
        token_id, offset, *token_ids = self._integers[start + index : end + index + 1]
        return TokenEntry(token_id, logprob, tuple(zip(token_ids, logprobs, strict=True)), offset)
