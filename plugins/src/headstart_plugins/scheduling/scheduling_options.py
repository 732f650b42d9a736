"""The options of the scheduler plug-in, read from the engine's own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

KEY = "headstart"


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Each can be switched off; with all of them off, the engine schedules as without the plug-in."""

    promised_blocks: bool = False  # a request waits for a block that a running prefill is going to write
    lpm_k: int = 1  # of every k admissions the first is the oldest request, the others have the longest cached prefix
    page_aligned: bool = False  # prefill chunks that are not the last end on block boundaries
    max_prefills: int = 0  # prompts that are computed at the same time in several chunks; 0: any number


def read_options(additional_config: object) -> SchedulingOptions:
    """Return the options below the key `headstart` of a mapping; the defaults if it has none.

    Raises ValueError for unknown options and for values of another type or below the minimum.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"additional_config: {KEY!r} is {given!r}; it must be an object of options")
    known = {field.name: type(field.default) for field in fields(SchedulingOptions)}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"additional_config: {KEY} has no option {name!r}; it has {', '.join(known)}")
        if type(value) is not known[name]:
            raise ValueError(f"additional_config: {KEY}.{name} is {value!r}; it must be of type {known[name].__name__}")
    options = SchedulingOptions(**given)
    if options.lpm_k < 1:
        raise ValueError(f"additional_config: {KEY}.lpm_k is {options.lpm_k}; it must be at least 1")
    if options.max_prefills < 0:
        raise ValueError(f"additional_config: {KEY}.max_prefills is {options.max_prefills}; use 0 for no limit")
    return options
