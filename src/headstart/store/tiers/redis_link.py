"""RedisConnections: calls to a Redis or Valkey server or to nodes of a cluster, each with one deadline for all of it.

Everything a server answers may be wrong, late, or never come: `RedisConnections.run_with_deadline` turns all that into
TierError.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import socket
from typing import Any, TypeVar

import redis

from headstart.store.tiers.redis_nodes import REDIRECTIONS, RedisNodes
from headstart.store.tiers.tier import TierError

CONNECT_SECONDS = 1.0
MIN_SECONDS = 1e-6  # a timeout of 0 would mean not to wait
SPARE_BYTES = 64  # of a buffer for values: what a server sends before each
T = TypeVar("T")
Value = memoryview | TierError | None


class RedisConnections:
    """One connection to each server, for one thread. It is opened at the first call, and again after a failure."""

    def __init__(self, url: str, password: str | None, seconds: float) -> None:
        """`seconds`: the deadline of a call, however many bytes it moves. Raises ConfigError for an invalid URL."""
        options: dict[str, Any] = {} if password is None else {"password": password}
        options |= {"socket_timeout": seconds, "socket_connect_timeout": min(CONNECT_SECONDS, seconds), "protocol": 2}
        self._nodes, self._seconds = RedisNodes(url, options), seconds
        self._kept: dict[redis.ConnectionPool, Any] = {}  # connections of `request`
        self._asked: Sequence[bytes] = ()
        self._awaited: list[tuple[redis.ConnectionPool, list[int]]] = []  # of these names, answers that are to come
        self._errors: dict[int, TierError] = {}  # in place of these

    def run_with_deadline(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Return the result of a call. Raises TierError: no connection, an error, nonsense, or not within the deadline.

        A timeout of the socket alone would not do: a server that sends a byte now and then never reaches it.
        """
        was_late = threading.Event()

        def cut() -> None:
            was_late.set()
            self._nodes.disconnect()

        timer = threading.Timer(self._seconds if seconds is None else seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            return call()
        except Exception as error:  # a connection cut in the middle of a call fails in many ways
            raise self._failure(error, is_late=was_late.is_set()) from error
        finally:
            timer.cancel()

    def servers(self) -> dict[str, redis.Redis]:
        """Return the server, or the nodes that have keys, by name. Raises TierError."""
        return self.run_with_deadline(self._nodes.primary_clients)

    def server_of(self, key: bytes) -> str:
        """Return the name of the server of a key. Raises TierError."""
        return next(iter(self.run_with_deadline(lambda: self._nodes.key_indices_by_server([key]))))

    def ask_each(self, call: Callable[[redis.Redis], T]) -> dict[str, T]:
        """Return the result of a call at every server. Raises TierError."""
        return self.run_with_deadline(
            lambda: {name: call(server) for name, server in self._nodes.primary_clients().items()}
        )

    def execute_commands(self, commands: Sequence[tuple[Any, ...]], seconds: float | None = None) -> list[Any]:
        """Return the answers to commands, each a name, a key, and more. Raises TierError.

        A server gets its commands in order; the one that gets the last command gets its own after all others.
        """
        answers: list[Any] = [None] * len(commands)

        def send() -> None:
            servers = self._nodes.primary_clients()
            for name, places in self._nodes.key_indices_by_server([command[1] for command in commands]).items():
                pipeline = servers[name].pipeline(transaction=False)
                for place in places:
                    pipeline.execute_command(*commands[place])
                for place, answer in zip(places, pipeline.execute(raise_on_error=False), strict=True):
                    is_moved = isinstance(answer, REDIRECTIONS)
                    answers[place] = self._nodes.execute_following_redirects(commands[place]) if is_moved else answer
                    if isinstance(answer, Exception) and not is_moved:
                        raise answer

        if commands:
            self.run_with_deadline(send, seconds)
        return answers

    def send_get_commands(self, names: Sequence[bytes]) -> None:
        """Ask for the values of keys, which `receive` returns. Raises TierError: no server is known.

        An answer that was not received is dropped with its connection. Connections are kept, since to watch a call
        with a thread, as `run` does, takes longer than the call where cores are busy.
        """
        if self._awaited:
            self._drop()
        self._asked, self._errors, nodes = names, {}, self._nodes
        servers = nodes.primary_clients() if nodes.has_current_topology else self.servers()
        for name, places in nodes.key_indices_by_server(names).items():
            try:
                pool = servers[name].connection_pool
                connection = self._connection(pool)
                self._awaited.append((pool, places))
                commands = [("GET", names[place]) for place in places] if nodes.is_cluster else [("MGET", *names)]
                connection.send_packed_command(connection.pack_commands(commands))
            except Exception as error:
                self._note(error, places)

    def receive_values(self, num: int, most: int, buffer: bytearray) -> list[Value]:
        """Return `num` requested values, as views of `buffer`; None: there is none. One longer than `most` is empty.

        `buffer` has `most` and twice SPARE_BYTES for each. redis-py copies what it receives three times.
        """
        values: list[Value] = [None] * num
        view, until, moved = memoryview(buffer), time.monotonic() + self._seconds, list[int]()
        for pool, places in self._awaited:
            part, view = view[: (size := len(places) * (most + SPARE_BYTES) + SPARE_BYTES)], view[size:]
            try:
                answer = _Answer(self._kept[pool]._sock, part, until - time.monotonic())  # noqa: SLF001
                for place, value in zip(
                    places, answer.values(len(places), most, is_one=not self._nodes.is_cluster), strict=True
                ):
                    values[place] = value
            except Exception as error:
                self._note(error, places)
                moved += places if isinstance(error, ValueError) and self._nodes.is_cluster else []
        self._awaited = []
        if self._errors:
            self._drop()
        if moved:  # an error in place of a value
            with suppress(TierError):
                commands = [("GET", self._asked[place]) for place in moved]
                for place, value in zip(moved, self.execute_commands(commands, until - time.monotonic()), strict=True):
                    values[place] = None if value is None else memoryview(value)
                    del self._errors[place]
        return [self._errors.get(place, value) for place, value in enumerate(values)]

    def close(self) -> None:
        self._nodes.disconnect()

    def _connection(self, pool: redis.ConnectionPool) -> Any:
        """Return an open connection: a server closes those that are idle."""
        with suppress(Exception):
            if not self._kept[pool].can_read():
                return self._kept[pool]
        self._close_kept(pool)
        self._kept[pool] = connection = self.run_with_deadline(pool.get_connection)
        return connection

    def _drop(self) -> None:
        """Close the connections of `request`, and what they would still answer."""
        self._awaited = []
        for pool in list(self._kept):
            self._close_kept(pool)

    def _close_kept(self, pool: redis.ConnectionPool) -> None:
        if (connection := self._kept.pop(pool, None)) is not None:
            connection.disconnect()
            pool.release(connection)

    def _note(self, error: Exception, places: list[int]) -> None:
        """Note an error in place of these values."""
        self._errors |= dict.fromkeys(places, self._failure(error))

    def _failure(self, error: Exception, *, is_late: bool = False) -> TierError:
        if isinstance(error, TierError):
            return error
        self._nodes.mark_topology_stale()
        is_late = is_late or isinstance(error, (redis.TimeoutError, TimeoutError))
        text = f"no complete answer within {self._seconds:g} s" if is_late else str(error) or type(error).__name__
        return TierError(text.splitlines()[0])


class _Answer:
    """An answer of the server (RESP2), received into a buffer; it lies at `[_at, _end)` as far as it is not taken."""

    def __init__(self, sock: socket, buffer: bytearray | memoryview, seconds: float) -> None:
        """`seconds`: within which all of it must be received; TimeoutError is raised otherwise."""
        self._sock, self._view = sock, memoryview(buffer)
        self._at = self._end = 0
        self._until = time.monotonic() + seconds

    def values(self, num: int, most: int, *, is_one: bool = True) -> list[memoryview | None]:
        """Return the values of an answer to MGET, or of answers to GET. Raises OSError or ValueError if it is none."""
        if is_one and self._number(b"*") != num:
            raise ValueError("the answer has another number of values")
        return [self._value(most) for _ in range(num)]

    def _value(self, most: int) -> memoryview | None:
        length = self._number(b"$")
        if length < 0:
            return None
        kept = length <= most
        value = self._take(length) if kept else self._drop(length)
        if bytes(self._take(2)) != b"\r\n":
            raise ValueError("the answer has a value without its end")
        return value

    def _number(self, kind: bytes) -> int:
        """Take a line and return its number. Raises ValueError if it is of another kind, with the text of an error."""
        while (num := (line := self._begin()).find(b"\r\n")) < 0:
            if len(line) >= SPARE_BYTES:
                raise ValueError(line.decode("ascii", "replace"))
            self._receive()
        line = bytes(self._take(num + 2))[:-2]
        if not line.startswith(kind):
            raise ValueError(line.decode("ascii", "replace") or "the answer is empty")
        return int(line[1:])

    def _begin(self) -> bytes:
        """Return what is there of a line."""
        return bytes(self._view[self._at : min(self._end, self._at + SPARE_BYTES)])

    def _take(self, num: int) -> memoryview:
        while self._end - self._at < num:
            self._receive()
        self._at += num
        return self._view[self._at - num : self._at]

    def _drop(self, num: int) -> memoryview:
        """Remove bytes that do not fit."""
        while self._end - self._at < num:
            num -= self._end - self._at
            self._end = self._at
            self._receive()
        rest = bytes(self._view[self._at + num : self._end])
        self._end = self._at + len(rest)
        self._view[self._at : self._end] = rest
        return self._view[:0]

    def _receive(self) -> None:
        self._sock.settimeout(max(self._until - time.monotonic(), MIN_SECONDS))
        num = self._sock.recv_into(self._view[self._end :])
        if not num:
            raise ConnectionError("the server closed the connection, or sent more than it was asked for")
        self._end += num
