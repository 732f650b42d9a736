"""Search for the highest sustainable load: geometric steps bracket it, then bisection. Pure: the caller measures."""

from collections.abc import Callable
from math import sqrt

# Shares of the rate of requests one after the other: where a search begins, and below which it gives up. Rates far
# below are hardly other than single requests, and take minutes each.
START_LOAD, LEAST_LOAD = 0.5, 0.2


def highest_rate(
    holds: Callable[[float], bool],
    start: float,
    *,
    factor: float = 1.6,
    precision: float = 1.1,
    max_points: int = 14,
    least: float = 0.0,
) -> float:
    """Return the highest measured rate at which `holds(rate)` is true; 0 if there is none of at least `least`.

    Steps from `start` by `factor` until one rate holds and a higher one does not, then halves the gap (geometrically)
    until the two are within `precision` of each other. Measures at most `max_points` rates, each of them once.
    """
    if start <= 0 or factor <= 1 or precision <= 1:
        raise ValueError(f"start {start} must be above 0, factor {factor} and precision {precision} above 1")
    low, high, rate = 0.0, 0.0, start  # low holds, high does not; 0: not known yet
    for _ in range(max_points):
        if holds(rate):
            low = rate
        else:
            high = rate
        if low and high:
            if high / low <= precision:
                break
            rate = sqrt(low * high)
        elif low:
            rate = low * factor
        elif high <= least:
            break
        else:
            rate = max(high / factor, least)
    return low
