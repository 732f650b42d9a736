"""ConnectionTable: the open connections of one server, and the cap on them.

A connection on which no request is being answered is idle. At the cap the connection that has been idle longest is
closed in favour of a new one, so that silent clients cannot keep others out; a new one is refused only if every open
connection has a request under way.
"""

import resource
from typing import Protocol

MIN_CONNECTIONS = 4096  # room for this many streams, however small the queue is
OWN_FILES = 256  # descriptors that are not connections of clients: logs, stores, the engine, health looks
MAX_OPEN_FILES = 65_536


class Connection(Protocol):
    """An open connection."""

    def close_idle(self) -> None:
        """Close the connection, on which nothing is being answered."""
        ...


class ConnectionTable:
    """At most `max_connections` open connections."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that has been idle longest comes first

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Enter a new connection, idle; an idle one gives up its place if there is none. False: there is no place."""
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
        """Note that a request is being answered on the connection."""
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """Note that nothing is being answered on the connection any more."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection; one that is not in the table is ignored."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


def connection_cap(max_queued_requests: int, *, files_each: int) -> int:
    """Return how many connections a server takes, which needs `files_each` descriptors for each.

    Twice as many as requests may wait, at least MIN_CONNECTIONS, and never more than this process may open files: its
    soft limit is raised to the hard one first, since 1024, a usual soft limit, is less than the streams of one server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return max(16, min(max(MIN_CONNECTIONS, 2 * max_queued_requests), (files - OWN_FILES) // files_each))
