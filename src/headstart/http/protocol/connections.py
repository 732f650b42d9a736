"""ConnectionTable: the open connections of one server, and the cap on them.

A connection without a request in flight is idle. At the cap, the connection that has been idle longest is closed in
favour of a new one, so that silent clients cannot block others. A new connection is refused only if every open one has
a request in flight.
"""

import resource
from typing import Protocol

MIN_CONNECTIONS = 4096  # the minimum cap, whatever the size of the queue
OWN_FILES = 256  # descriptors that are not client connections: logs, stores, the engine, health probes
MAX_OPEN_FILES = 65_536


class Connection(Protocol):
    """An open connection."""

    def close_idle(self) -> None:
        """Close the connection, which has no request in flight."""
        ...


class ConnectionTable:
    """The open connections, at most `max_connections`."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that has been idle longest comes first

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection as idle, closing the longest idle one at the cap. Return False if none is idle."""
        if len(self._open) >= self.max_connections:
            if not self._idle:
                return False
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.close_idle()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def set_busy(self, connection: Connection) -> None:
        """Mark the connection as having a request in flight."""
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """Mark the connection as idle."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a connection; one that is not in the table is ignored."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


def max_server_connections(max_queued_requests: int, *, files_each: int) -> int:
    """Return the cap on connections of a server that needs `files_each` file descriptors per connection.

    Twice the requests that may wait, at least MIN_CONNECTIONS, and no more than `raise_connection_limit`.
    """
    return min(max(MIN_CONNECTIONS, 2 * max_queued_requests), raise_connection_limit(files_each=files_each))


def raise_connection_limit(*, files_each: int) -> int:
    """Return the number of connections that the process's limit on open files allows, at least 16.

    The soft limit is raised to the hard one first: the usual 1024 is too few for the streams of one server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return max(16, (files - OWN_FILES) // files_each)
