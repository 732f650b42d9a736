"""LogprobTable: log-probabilities of many tokens and of their alternatives, packed in arrays.

12 bytes an alternative, where tuples of Python objects take about 110. Reads like a sequence of TokenEntry.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from headstart.core.batch import TokenLogprob


class TokenEntry(NamedTuple):
    """Log-probability of one token and its best alternatives, and where its text begins in the whole text."""

    token_id: int
    logprob: float | None  # None: the first token of an echoed prompt, which nothing precedes
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first
    offset: int  # characters


class LogprobTable(Sequence[TokenEntry]):
    """Grows at its end only."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._logprobs = array("d")
        self._offsets = array("i")
        self._ends = array("i")  # of each token's alternatives in the two below
        self._top_ids = array("i")
        self._top_logprobs = array("d")

    def append(self, known: TokenLogprob, offset: int = 0) -> None:
        """Add one token, whose text begins at character `offset`."""
        self._token_ids.append(known.token_id)
        self._logprobs.append(known.logprob)
        self._offsets.append(offset)
        for token_id, logprob in known.top:
            self._top_ids.append(token_id)
            self._top_logprobs.append(logprob)
        self._ends.append(len(self._top_ids))

    def extend(self, entries: Iterable[TokenEntry]) -> None:
        """Add tokens that have a log-probability."""
        for entry in entries:
            assert entry.logprob is not None, f"token {entry.token_id} has no log-probability"
            self.append(TokenLogprob(entry.token_id, entry.logprob, entry.top), entry.offset)

    def known(self, index: int) -> TokenLogprob:
        """Return one token without its place in the text."""
        entry = self._entry(index)
        return TokenLogprob(entry.token_id, self._logprobs[index], entry.top)

    def __len__(self) -> int:
        return len(self._token_ids)

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - it grows

    def _entry(self, index: int) -> TokenEntry:
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        top = tuple(zip(self._top_ids[start:end], self._top_logprobs[start:end], strict=True))
        return TokenEntry(self._token_ids[index], self._logprobs[index], top, self._offsets[index])
