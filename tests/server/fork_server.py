"""Servers forked from one process that has imported their modules, in place of processes that import them anew.

A forked server is what `python -m headstart ...` is, but for the seconds of its imports: a process group, standard
streams, environment, signal handlers, event loop, threads and an exit code of its own, ended by the interpreter as
ever. Its engine is a process below it, forked before the server has any thread. The process that forks has one thread.
/proc/PID/cmdline of both names this module; processes that a server starts besides are true ones.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

_NUMBER = struct.Struct("i")
_MAX_MESSAGE = 128 << 10  # bytes of a command and its environment
_ENGINE = "headstart.engine.engine_process"
_LOCK = threading.Lock()
_STARTED: dict[tuple[str, ...], "ForkServer"] = {}
OF_LIBRARIES = (  # set by tests' imports, and by engines in the tests' own process: 1 thread, as servers have there
    *("PYTEST_", "RAY_CLIENT_MODE", "TORCHINDUCTOR_CACHE_DIR"),
    *("MKL_NUM_THREADS", "KMP_BLOCKTIME"),
)
SURROUNDINGS = dict(os.environ)  # of the tests; a command with others is not forked
SERVING = ("headstart.cli.main", "headstart.cli.build_engine", "headstart.server.run_server")
FAKE = (*SERVING, "headstart.gateway.run_gateway", "server.fake_engine")
REAL = (*SERVING, "headstart.engine.assembly")
CAN_FORK = hasattr(os, "pidfd_open")


class Forked:
    """A forked process, as its Popen would be."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel  # the exit code stays in it: threads may wait beside each other

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            waiting = select.poll()  # which takes all numbers of descriptors
            waiting.register(self._channel, select.POLLIN)
            if not waiting.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
            (self.returncode,) = _NUMBER.unpack(self._channel.recv(_NUMBER.size, socket.MSG_PEEK))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its exit code is on the way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process with these modules, which forks servers until this process ends, and those forked from it."""

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._stream, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "server.fork_server", str(theirs.fileno()), *modules],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # which has threads from its import on
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def fork(self, words: list[str], environment: Mapping[str, str], umask: int, descriptors: list[int]) -> Forked:
        """Return the process of `python WORDS`. `descriptors`: of its output, its input, and one named by its words."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"words": words, "environment": dict(environment), "folder": os.getcwd(), "umask": umask}
        with theirs:
            socket.send_fds(self._stream, [json.dumps(order).encode()], [theirs.fileno(), *descriptors])
        return Forked(*_NUMBER.unpack(ours.recv(_NUMBER.size)), ours)


def fork(
    words: list[str],
    environment: Mapping[str, str],
    log: int,
    modules: tuple[str, ...],
    *,
    umask: int = -1,
    stdin: int | None = None,
    given: int | None = None,
) -> Forked | None:
    """Fork `python WORDS` from the process with these modules, or return None if its surroundings are not the tests'.

    Modules may read the environment when they are imported; so an unusual one takes a true start. `given`: a descriptor
    whose number in the process follows the words.
    """
    unusual = {name for name, _ in {*os.environ.items()} ^ {*SURROUNDINGS.items()} if not name.startswith(OF_LIBRARIES)}
    if unusual or not CAN_FORK:
        return None
    with _LOCK:
        if modules not in _STARTED:
            _STARTED[modules] = ForkServer(modules, environment)
    with open(os.devnull, "rb") as nothing:
        descriptors = [log, nothing.fileno() if stdin is None else stdin, *([] if given is None else [given])]
        return _STARTED[modules].fork(words, environment, umask, descriptors)


def fork_piped(words: list[str], environment: Mapping[str, str], modules: tuple[str, ...]) -> Forked | None:
    """As `fork`, with pipes to the process's stdin and from its output, as of Popen."""
    (theirs_in, our_in), (our_out, theirs_out) = os.pipe(), os.pipe()
    stdin, stdout = open(our_in, "wb"), open(our_out, "rb")  # noqa: SIM115  # open as long as the process
    with open(theirs_in, "rb"), open(theirs_out, "wb"):
        forked = fork(words, environment, theirs_out, modules, stdin=theirs_in)
    if forked is None:
        stdin.close()
        stdout.close()
        return None
    forked.stdin, forked.stdout = stdin, stdout
    return forked


def start(environment: Mapping[str, str]) -> None:
    """Start the processes that fork, for this process and for those that are forked from it."""
    for modules in (FAKE, REAL) if CAN_FORK else ():
        _STARTED[modules] = ForkServer(modules, environment)


# ----------------------------------------------------------------------------------------------- in the other process


class _Seated(subprocess.Popen[bytes]):
    """The engine's process for its parent, the server: forked already."""

    def __init__(self, pid: int) -> None:
        self._seat = pid
        super().__init__([_ENGINE])

    def _execute_child(self, *_: object) -> None:
        self.pid, self._child_created = self._seat, True


def _forked_command() -> list[str]:
    """Fork until the tests end; return in a forked process, with the words of its command."""
    stream = socket.socket(fileno=int(sys.argv[1]))
    stream.set_inheritable(False)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in the servers leave the modules alone, as if they were small
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(stream, _MAX_MESSAGE, 4)
        if not message:
            sys.exit()
        tasks = len(list(Path("/proc/self/task").iterdir()))
        assert tasks == 1, f"{tasks} threads before a fork"
        if os.fork() == 0:
            break
        for each in descriptors:
            os.close(each)
    stream.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel, (log, stdin, *given) = socket.socket(fileno=descriptors[0]), descriptors[1:]
    pid = os.fork()
    if pid:
        for each in descriptors[1:]:
            os.close(each)
        _keep(pid, channel)
    channel.close()
    order = json.loads(message)
    os.setpgid(0, 0)
    os.chdir(order["folder"])
    if order["umask"] >= 0:
        os.umask(order["umask"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for each in (1, 2):
        os.dup2(log, each)
    os.close(log)
    words: list[str] = order["words"]
    if given:  # to a process that a server starts
        sys.path[:] = order["environment"]["PYTHONPATH"].split(os.pathsep)
        words.append(str(*given))
    else:
        sys.path[0] = order["folder"] if words[0] == "-m" else ""
        words = words if "route" in words[:3] else _seat_engine(words)
    if given or words[1] != _ENGINE:  # that of a seat has its own
        os.dup2(stdin, 0)
    os.close(stdin)
    return words


def _keep(pid: int, channel: socket.socket) -> None:
    """Report the process id and later the exit code of a child, and end; if the tests have ended, kill it."""
    with suppress(OSError):
        channel.send(_NUMBER.pack(pid))
        if channel in select.select([os.pidfd_open(pid), channel], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        channel.send(_NUMBER.pack(code))
    os._exit(0)


def _seat_engine(words: list[str]) -> list[str]:
    """Fork the process that becomes the engine when the server starts one; return the words of either's command."""
    seat, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setpgid(0, 0)
        os.dup2(2, 1)
        message, descriptors, _, _ = socket.recv_fds(seat, _MAX_MESSAGE, 1)
        seat.close()
        if not message:  # the server has ended without an engine
            os._exit(0)
        order = json.loads(message)
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.path[:] = order["path"]
        return ["-m", _ENGINE, str(descriptors[0])]
    seat.close()
    client = importlib.import_module("headstart.engine.engine_client")

    def spawn(descriptor: int) -> _Seated:
        order = {"environment": dict(os.environ), "path": [path for path in sys.path if path]}
        socket.send_fds(ours, [json.dumps(order).encode()], [descriptor])
        ours.close()
        return _Seated(pid)

    setattr(client, "_spawn", spawn)  # noqa: B010  # private, and of this process alone
    return words


def _run(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    if words[0] == "-m":
        sys.modules.pop(words[1], None)
        sys.argv[1:] = words[2:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _run(_forked_command())
