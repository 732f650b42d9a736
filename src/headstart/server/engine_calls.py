"""What may be asked of a running engine from outside, by name: a closed table, done between two steps.

Arguments and answers are plain values (None, bool, int, float, str, bytes, list, dict), since they cross the process
border as msgpack. A call that raises InvalidRequestError refuses; any other exception is our mistake and fails that
call alone.
"""

from collections.abc import Callable
from typing import Any

from headstart.core.engine import Engine


def reset_prefix_cache(engine: Engine, argument: None) -> bool:
    """Forgets everything reusable; False (and nothing changes) while any sequence holds blocks."""
    return engine.reset_prefix_cache()


CALLS: dict[str, Callable[[Engine, Any], Any]] = {
    "reset_prefix_cache": reset_prefix_cache,
}
