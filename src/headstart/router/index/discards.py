"""Discards: tables and pools that are no longer used, freed in slices.

Freeing a table of a million entries takes as long as a hundred requests do. A caller that replaces a full table by an
empty one adds the full one here, and frees a slice of it with every later operation.
"""

from typing import Any, Protocol


class IncrementallyFreed(Protocol):
    """A pool that can be freed in slices."""

    def dismantle_some(self, num: int) -> int:
        """Free up to about `num` entries; return the number freed, 0 when nothing is left."""
        ...


Discard = dict[Any, Any] | list[Any] | IncrementallyFreed


class Discards:
    """Objects to free later. `free_later` takes the only reference; a caller that keeps another one must not use it."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[Discard] = []

    def __bool__(self) -> bool:
        return bool(self._items)

    def free_later(self, *items: Discard) -> None:
        """Add objects to be freed."""
        self._items += items

    def free_discarded_entries(self, num: int) -> int:
        """Free up to `num` entries; return the number freed, 0 when nothing is left."""
        freed = 0
        while self._items and freed < num:
            count = _shrink(self._items[-1], num - freed)
            freed += count
            if not count:
                self._items.pop()
        return freed


def _shrink(item: Discard, num: int) -> int:
    if not isinstance(item, (dict, list)):
        return item.dismantle_some(num)
    count = min(num, len(item))
    if isinstance(item, list):
        del item[len(item) - count :]
        return count
    for _ in range(count):
        item.popitem()
    return count
