"""ConnectionTable: the cap on open connections, and which one is closed."""

import resource
import subprocess
import sys

from headstart.http.protocol.connections import OWN_FILES, ConnectionTable


class Noting:
    """A connection that notes that it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def close_idle(self) -> None:
        self.is_closed = True


def test_the_connection_that_has_been_idle_longest_is_closed() -> None:
    table, connections = ConnectionTable(3), [Noting() for _ in range(6)]
    assert all(table.admit(connection) for connection in connections[:3])
    table.set_busy(connections[0])
    assert table.admit(connections[3]) and connections[1].is_closed
    table.set_idle(connections[0])
    assert table.admit(connections[4]) and connections[2].is_closed and not connections[0].is_closed
    assert table.admit(connections[5]) and connections[3].is_closed and len(table) == 3


def test_busy_connections_are_never_closed() -> None:
    table, connections = ConnectionTable(2), [Noting() for _ in range(3)]
    for connection in connections[:2]:
        assert table.admit(connection)
        table.set_busy(connection)
    assert not table.admit(connections[2])
    table.set_idle(connections[2])  # it is not in the table, and does not get in that way
    table.remove(connections[2])
    table.remove(connections[0])
    assert len(table) == 1 and table.admit(connections[2])
    assert not any(connection.is_closed for connection in connections)


def test_the_cap_follows_the_queue_and_the_files_a_process_may_open() -> None:
    script = (
        "import resource, sys\n"
        "from headstart.http.protocol.connections import max_server_connections\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
        "cap = max_server_connections(int(sys.argv[3]), files_each=int(sys.argv[4]))\n"
        "print(cap, resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )

    def cap(*numbers: int) -> tuple[int, int]:
        shown = subprocess.run([sys.executable, "-c", script, *map(str, numbers)], capture_output=True, check=True)
        first, second = map(int, shown.stdout.split())
        return first, second

    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 20_000)
    assert cap(300, hard, 1024, 1) == (min(4096, hard - OWN_FILES), hard)  # the soft limit is raised
    assert cap(300, hard, 5000, 1)[0] == min(10_000, hard - OWN_FILES)
    assert cap(600, 1000, 1024, 2)[0] == (1000 - OWN_FILES) // 2
    assert cap(100, 100, 1024, 1)[0] == 16
