"""A Redis server of a test's own, on loopback and in its folder, and a proxy that delays, limits, cuts or corrupts."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

PATIENCE = 300.0  # seconds until a test gives up waiting for a server
NUM_PRIMARIES = 3
SECRET = b"0123456789abcdef" * 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class RedisServer:
    """`redis-server` in a folder; skips the test where there is none."""

    def __init__(self, folder: Path, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("there is no redis-server")
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.socket_path = free_port(), folder / "redis.sock"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--unixsocket", str(self.socket_path), "--save", "", *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.01)
        raise AssertionError("redis-server does not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class RedisClusterServers:
    """Nodes of a cluster, each a `redis-server`: some primaries, and then as many replicas for each."""

    def __init__(self, folder: Path, password: str, num_replicas: int = 0) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--requirepass", password]
        options += ["--masterauth", password, "--cluster-require-full-coverage", "no"]
        self.nodes = [
            RedisServer(folder / str(number), *options, "--cluster-port", str(free_port()))
            for number in range(NUM_PRIMARIES * (1 + num_replicas))
        ]
        places = [f"127.0.0.1:{node.port}" for node in self.nodes]
        self.run("--cluster", "create", *places, "--cluster-replicas", str(num_replicas), "--cluster-yes", at=password)

    @property
    def url(self) -> str:
        """Names two nodes, so that one of them may be down."""
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"

    @staticmethod
    def run(*words: str, at: str) -> None:
        """Run redis-cli with the password `at`."""
        done = subprocess.run(["redis-cli", "--no-auth-warning", "-a", at, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


class Proxy:
    """Between a client and a server, in threads of its own; `hurt` gets the bytes of answers and may change them.

    It may also return None, which closes the connection.
    """

    def __init__(self, port: int, hurt: Callable[[bytes], bytes | None] = lambda data: data) -> None:
        self._to, self.hurt = port, hurt
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                try:
                    server = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # it is down: so is this connection, and the next one is tried again
                    client.close()
                    continue
                self._sockets += [client, server]
                for source, target, hurt in ((client, server, lambda data: data), (server, client, self._answer)):
                    threading.Thread(target=self._pump, args=(source, target, hurt), daemon=True).start()

    def _answer(self, data: bytes) -> bytes | None:
        return self.hurt(data)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, hurt: Callable[[bytes], bytes | None]) -> None:
        with suppress(OSError):
            while (data := source.recv(1 << 16)) and (out := hurt(data)) is not None:
                target.sendall(out)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def slowly(data: bytes, seconds: float) -> bytes:
    time.sleep(seconds)
    return data


def secret_file(folder: Path, secret: bytes = SECRET) -> Path:
    path = folder / f"secret-{secret[:4].hex()}"
    path.write_bytes(secret)
    path.chmod(0o600)
    return path
