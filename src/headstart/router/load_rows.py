"""LoadRowCache: the state of all loads of a fleet as one array, of which only rows that have changed are read again.

A price needs the state of every replica, and between two prices few of them change.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_CHANGED = 65_536  # loads that changed; more than that: replicas that were removed, so nothing is kept

Prices = Callable[[int, int, int, int, int, int], None]
"""The loop of `cost_at_each` in compiled code: of the number of replicas, and addresses of arguments and results."""


class PriceableLoad(Protocol):
    """The state of one load."""

    @property
    def pricing_row(self) -> tuple[float, ...]: ...


class LoadRowCache:
    """The rows of the loads that were asked for last."""

    def __init__(self) -> None:
        self._changed: set[PriceableLoad] = set()
        self._loads: list[PriceableLoad] = []
        self._numbers: dict[PriceableLoad, int] = {}
        self._array = np.zeros((0, 0))

    def mark_changed(self, load: PriceableLoad) -> None:
        """Record that the row of a load is another one now."""
        self._changed.add(load)
        if len(self._changed) > MAX_CHANGED:
            self._changed.clear()
            self._loads = []

    def rows_for_loads(self, loads: Sequence[PriceableLoad]) -> NDArray[np.float64]:
        """Return an array of a row per load; read-only, and valid until the next call."""
        if loads != self._loads:
            self._loads = list(loads)
            self._numbers = {load: number for number, load in enumerate(loads)}
            self._array = np.array([load.pricing_row for load in loads], dtype=np.float64, order="F")  # read by columns
        else:
            for load in self._changed:
                number = self._numbers.get(load)
                if number is not None:
                    self._array[number] = load.pricing_row
        self._changed.clear()
        return self._array
