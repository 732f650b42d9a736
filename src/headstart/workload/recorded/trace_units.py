"""Units of a trace's numbers: tokens per block id, and seconds per unit of time. Recognised, never guessed.

Tokens per id follow from the lengths: an id per full block, and perhaps one for the rest, of every prompt. A size is
taken if it is the only power of two that fits all prompts, or the only number at all. Times since 1970 tell their
unit; others have that of their format, if they can have it. What stays open is a ConfigError that names the option.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

from headstart.core.errors import ConfigError

SECONDS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Units of time by name, in seconds."""
DOCUMENTED: Mapping[str, float] = {"mooncake": 1e-3, "bailian": 1.0}
"""The unit of times that count from the beginning of a trace, by format; agents' count from 1970."""
MAX_RATE = 50.0  # requests per second on average: beyond it a documented unit is not believed
BLOCK_SIZE_FLAG, TIME_UNIT_FLAG = "--trace-block-size", "--trace-time-unit"


@dataclass(frozen=True, slots=True)
class TraceUnits:
    """Units that the user states; 0 and "": to be recognised. Raises ConfigError for an unknown unit."""

    block_size: int = 0  # tokens per id
    time: str = ""  # a key of SECONDS

    def __post_init__(self) -> None:
        if self.time and self.time not in SECONDS:
            raise ConfigError(f"{TIME_UNIT_FLAG} {self.time}: one of {', '.join(SECONDS)}")


RECOGNISED = TraceUnits()


class _Range(NamedTuple):
    """Block sizes that fit."""

    low: int
    high: float

    @property
    def powers(self) -> list[int]:
        """The powers of two that fit."""
        return [1 << exponent for exponent in range(1, 25) if self.low <= 1 << exponent <= self.high]


def tokens_per_id(prompts: Sequence[tuple[int, int]], given: int = 0) -> int:
    """Return the tokens per id of prompts, each (number of ids, tokens). Raises ConfigError if it is not certain.

    `given`: the size that the user states, which is only checked: a prompt needs an id per full block.
    """
    if given:
        short = next(((ids, tokens) for ids, tokens in prompts if ids < tokens // given), None)
        if short is not None:
            raise ConfigError(f"{BLOCK_SIZE_FLAG} {given}: a prompt of {short[1]} tokens has only {short[0]} ids")
        return given
    ranges = [found for found in (_with_rest(prompts), _full_only(prompts)) if found.low <= found.high]
    sizes = sorted({size for found in ranges for size in found.powers})
    if not sizes and all(found.low == found.high for found in ranges):
        sizes = sorted({found.low for found in ranges})
    if len(sizes) == 1:
        return sizes[0]
    if not ranges:
        raise ConfigError(f"no number of tokens per id fits the lengths of all prompts; state it: {BLOCK_SIZE_FLAG} N")
    if len(sizes) > 4 or not sizes:
        high = max(found.high for found in ranges)
        fitting = f"{min(found.low for found in ranges)} {f'to {high}' if isfinite(high) else 'or more'}"
    else:
        fitting = " or ".join(map(str, sizes))
    raise ConfigError(f"an id may stand for {fitting} tokens, by the prompts' lengths; state it: {BLOCK_SIZE_FLAG} N")


def seconds_per_unit(times: Sequence[float], documented: float | None, units: TraceUnits) -> float:
    """Return the seconds per unit of times. Raises ConfigError if it is not certain.

    `documented`: the unit of the format for times that count from the beginning of the trace, if it has one.
    """
    if units.time:
        return SECONDS[units.time]
    start, span = min(times), max(times) - min(times)
    since_1970 = next((scale for scale in SECONDS.values() if 1e9 <= start * scale < 1e10), None)
    if since_1970 is not None:
        return since_1970
    if documented == 1.0 or not span > 0:
        return documented or 1.0
    rate = (len(times) - 1) / span  # requests per unit
    if documented is not None and rate / documented <= MAX_RATE and all(at.is_integer() for at in times):
        return documented
    choices = ", ".join(f"{rate / scale:,.3g} in {unit}" for unit, scale in SECONDS.items() if unit != "ns")
    raise ConfigError(
        f"the unit of the times is not certain: requests per second would be {choices}; state it: {TIME_UNIT_FLAG} s"
    )


def _with_rest(prompts: Sequence[tuple[int, int]]) -> _Range:
    """Return the sizes with one id per block, also for the rest of a prompt."""
    low = max(-(-tokens // ids) if ids else 1 << 62 for ids, tokens in prompts)
    return _Range(low, min((-(-tokens // (ids - 1)) - 1 if ids > 1 else inf for ids, tokens in prompts), default=inf))


def _full_only(prompts: Sequence[tuple[int, int]]) -> _Range:
    """Return the sizes with one id per full block only."""
    low = max(tokens // (ids + 1) + 1 for ids, tokens in prompts)
    return _Range(low, min((tokens // ids if ids else inf for ids, tokens in prompts), default=inf))
