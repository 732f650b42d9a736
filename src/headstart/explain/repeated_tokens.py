"""Repeated tokens: tokens behind a divergence that both prompts have, at the same or at another offset. Pure."""

from array import array

MAX_TOKENS = 32 * 1024  # of each prompt behind the divergence
_ITEM = array("i").itemsize


def num_repeated(this: "array[int]", other: "array[int]", start: int, size: int) -> int:
    """Return the number of tokens of `this` from `start` on that stand in `other` behind `start`, in runs of `size`.

    Runs are looked for in order of `this`; one of `other` may be found more than once.
    """
    own, found = _packed(this, start), _packed(other, start)
    width = size * _ITEM
    places = {found[at : at + width]: at for at in range(len(found) - width, -1, -_ITEM)}  # the first place of each
    count = at = 0
    while at + width <= len(own):
        place = places.get(own[at : at + width])
        if place is None:
            at += _ITEM
            continue
        length = _common(own, at, found, place)
        count += length // _ITEM
        at += length
    return count


def _packed(tokens: "array[int]", start: int) -> bytes:
    return tokens[start : start + MAX_TOKENS].tobytes()


def _common(own: bytes, at: int, found: bytes, place: int) -> int:
    """Return the number of equal bytes, a multiple of a token's, from `at` and `place` on."""
    low, high = 0, min(len(own) - at, len(found) - place) // _ITEM
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * _ITEM, middle * _ITEM
        if own[at + start : at + end] == found[place + start : place + end]:
            low = middle
        else:
            high = middle - 1
    return low * _ITEM
