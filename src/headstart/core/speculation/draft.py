"""Draft: a guess of the next tokens, and how far all occurrences agree on it."""

from array import array
from typing import NamedTuple

from headstart.core.speculation.ngram_index import NgramMatch

END = -1  # no token id: stands behind each text of several in one array


class Draft(NamedTuple):
    """The tokens that followed the newest of the longest occurrences of a sequence's last tokens."""

    tokens: "array[int]"
    match_length: int  # tokens of the occurrence
    num_agreed: int  # first tokens that followed all other occurrences of that length too

    def truncated(self, num: int) -> "Draft":
        """Return the draft of the first `num` tokens."""
        return Draft(self.tokens[:num], self.match_length, min(self.num_agreed, num))


def draft_from_match(text: "array[int]", match: NgramMatch, num: int, *, repeats: bool = False) -> Draft | None:
    """Return up to `num` tokens behind a match; None if its text ends there.

    `repeats`: the text is the sequence itself; an occurrence that overlaps its end goes on with its own tokens.
    """
    tokens = _behind(text, match.end, num, repeats=repeats)
    if not tokens:
        return None
    agreed = (_num_common(tokens, _behind(text, end, num, repeats=repeats)) for end in match.others)
    return Draft(tokens, match.length, min(agreed, default=len(tokens)))


def draft_of_longer_match(one: Draft | None, other: Draft | None) -> Draft | None:
    """Return the draft behind the longer match; of equally long ones `one`, which the other may agree with."""
    if one is None or other is None:
        return one or other
    if one.match_length != other.match_length:
        return one if one.match_length > other.match_length else other
    return one._replace(num_agreed=min(one.num_agreed, other.num_agreed, _num_common(one.tokens, other.tokens)))


def _behind(text: "array[int]", end: int, num: int, *, repeats: bool) -> "array[int]":
    tokens = text[end : end + num]
    if repeats:
        while len(tokens) < num:
            tokens.extend(tokens[: num - len(tokens)])
    elif END in tokens:
        return tokens[: tokens.index(END)]
    return tokens


def _num_common(one: "array[int]", other: "array[int]") -> int:
    if one == other:
        return len(one)
    most = min(len(one), len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)
