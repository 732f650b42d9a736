"""NgramIndex: finds earlier occurrences of the last tokens of a sequence, as LZ77 finds matches (RFC 1951, section 4).

Tokens are entered once, in order, each in constant time: every run of `length` tokens is hashed, and positions with one
hash form a chain, newest first. A lookup follows a bounded number of links and compares the tokens before each
position. Memory is 8 bytes per token, and the tokens are not copied. Nothing depends on hash seeds of the process.
"""

from array import array
from typing import NamedTuple
from zlib import crc32

MAX_LINKS = 16  # positions that one lookup compares
MIN_BUCKETS = 256


class NgramMatch(NamedTuple):
    """An earlier occurrence of a sequence's last `length` tokens; `end` is the position behind it."""

    end: int
    length: int
    others: tuple[int, ...]  # ends of older occurrences of as many tokens, newest first


class NgramIndex:
    """The runs of `length` tokens of one growing array of token ids, which is given to each call."""

    def __init__(self, length: int, capacity: int) -> None:
        """`capacity` is the number of tokens expected; more are entered too, with longer chains."""
        self.num_entered = 0  # tokens whose runs can be found
        self._length = length
        buckets = max(1 << max(capacity - 1, 1).bit_length(), MIN_BUCKETS)
        self._mask = buckets - 1
        self._heads = array("i", bytes(4 * buckets))  # by hash: end of the newest run; 0: none
        self._links = array("i")  # by end of a run, less `length`: end of the run before it in the chain; 0: none

    def index_tokens(self, tokens: "array[int]", end: int) -> None:
        """Enter the runs of `tokens[:end]` that are not entered yet."""
        heads, links, length, mask = self._heads, self._links, self._length, self._mask
        for at in range(max(self.num_entered + 1, length), end + 1):
            bucket = crc32(tokens[at - length : at]) & mask
            links.append(heads[bucket])
            heads[bucket] = at
        self.num_entered = max(self.num_entered, end)

    def find_longest(self, tokens: "array[int]", last: "array[int]") -> NgramMatch | None:
        """Return the longest occurrence in `tokens` of the end of `last`; of equal ones the newest. Changes nothing.

        At least `length` and at most `len(last)` tokens match. At least one token follows the occurrence.
        """
        length, links = self._length, self._links
        if len(last) < length:
            return None
        best, ends = 0, list[int]()
        end = self._heads[crc32(last[-length:]) & self._mask]
        for _ in range(MAX_LINKS):
            if not end:
                break
            if end < len(tokens):
                matched = _num_equal(tokens, end, last)
                if matched > best:
                    best, ends = matched, [end]
                elif matched == best:
                    ends.append(end)
            end = links[end - length]
        return NgramMatch(ends[0], best, tuple(ends[1:])) if best >= length else None


def _num_equal(tokens: "array[int]", end: int, last: "array[int]") -> int:
    """Return the number of tokens before `end` that equal the last ones of `last`."""
    most = min(end, len(last))
    num, span = 0, 1  # tokens known to be equal; the next ones to compare
    while num < most:
        span = min(span, most - num)
        if tokens[end - num - span : end - num] == last[len(last) - num - span : len(last) - num]:
            num, span = num + span, 2 * span
        elif span == 1:
            break
        else:
            most = num + span - 1  # they differ somewhere, so not all of them are equal
            span = span // 2
    return num
