"""BodyWriter: writes parts of a streamed response body in a plain call, for applications that relay many small parts.

It is an extension of the ASGI scope. An application that does not use it, or a server without it, sends as ASGI says.
"""

from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "headstart.body_writer"


class BodyWriter:
    """Writes to the response of one request between its start and its end, both of which are sent by `send`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether `write` may be called: the response is chunked, and the connection takes more without a wait."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        """Write a part that is not empty and not the last one."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def add_writer_to_scope(scope: MutableMapping[str, Any], cycle: RequestResponseCycle) -> None:
    """Add the writer of a request to its scope."""
    if scope["method"] != "HEAD":
        scope["extensions"] = {EXTENSION: BodyWriter(cycle)}


def writer_of_scope(scope: MutableMapping[str, Any]) -> BodyWriter | None:
    """Return the writer that the server offers for a request; None: only `send` can be used."""
    return scope.get("extensions", {}).get(EXTENSION)
