"""The length of the common prefix of two runs of tokens, bytes, characters or block ids."""

from collections.abc import Sequence


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of leading items that are equal, by bisection: comparing slices is fast.

    Both are of one type: texts, bytes, arrays, lists or tuples, of which slices are equal if their items are.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
