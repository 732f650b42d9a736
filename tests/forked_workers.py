"""A plugin of pytest: `--forks 3` runs the tests in three processes, forked from the one that has collected them.

Modules are imported and tests collected once, not by each process. A process takes one test file after the other, the
longest first, and keeps fixtures of the session until it ends. A test without a report, because its process died,
fails with that process's exit code.
"""

import atexit
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_SECONDS = 10.0  # until it is noticed that a process has ended if one below it keeps its socket, and for an end
_LENGTH = struct.Struct("I")
_FILE = struct.Struct("H")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run test files in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in forked processes. Nothing where none are wanted, nor where collecting has failed."""
    option = session.config.option
    if not option.forks or option.collectonly or (session.testsfailed and not option.continue_on_collection_errors):
        return None
    by_path: dict[Path, list[pytest.Item]] = {}
    for item in session.items:
        by_path.setdefault(item.path, []).append(item)
    files = list(by_path.values())
    reading, writing = os.pipe()  # of numbers of files: whichever process is free takes the next
    os.write(writing, b"".join(_FILE.pack(number) for number in range(len(files))))
    os.close(writing)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    assert threading.active_count() == 1, f"threads before a fork: {threading.enumerate()}"
    sys.stdout.flush()
    sys.stderr.flush()
    workers = {_Worker(session, files, reading, number) for number in range(min(option.forks, len(files)))}
    os.close(reading)
    try:
        _collect_reports(session, workers)
    finally:
        for worker in workers:
            worker.end()
    return True


def _collect_reports(session: pytest.Session, workers: "set[_Worker]") -> None:
    """Pass on what the processes report until all have ended; fail the tests of which nothing came."""
    running, unfinished, codes = set(workers), {item.nodeid: item for item in session.items}, set[int]()
    hook = session.config.hook
    while running:
        heard = select.select(list(running), [], [], MOST_SECONDS)[0]
        for worker in heard or [worker for worker in running if worker.has_ended()]:
            message = worker.receive() if heard else None
            if message is None:
                running.remove(worker)
                codes.add(worker.end())
                continue
            name, content = message
            if name == "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=content)
                continue
            report: pytest.TestReport = hook.pytest_report_from_serializable(config=session.config, data=content)
            if report.when == "teardown":
                del unfinished[report.nodeid]
            hook.pytest_runtest_logreport(report=report)
            if report.failed:  # a run that is stopped has no summary
                print(f" {report.nodeid}", flush=True)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    for item in unfinished.values():
        text = f"not run to its end: a process of the tests ended with the exit codes {sorted(codes)}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        hook.pytest_runtest_logreport(report=report)


class _Worker:
    """One forked process, as the process sees it that has collected the tests."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]], numbers: int, place: int) -> None:
        self._stream, theirs = socket.socketpair()
        self._pid = os.fork()
        self._code: int | None = None
        if self._pid == 0:
            self._stream.close()
            _run_and_exit(session, files, numbers, theirs, place)
        theirs.close()

    def fileno(self) -> int:
        return self._stream.fileno()

    def receive(self) -> tuple[str, Any] | None:
        """Return a message, or None if the process has ended."""
        head = self._stream.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        body = self._stream.recv(length, socket.MSG_WAITALL)
        return pickle.loads(body) if len(body) == length else None

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> int:
        """Interrupt the process, which ends its fixtures, later kill it, unless it has ended; return its exit code."""
        if self._code is None:
            os.kill(self._pid, signal.SIGINT)
            while not self.has_ended():
                if not select.select([self], [], [], MOST_SECONDS)[0] or not self._stream.recv(1 << 16):
                    break
            os.kill(self._pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._stream.close()
        return self._code


# ------------------------------------------------------------------------------------------------ in a forked process


def _run_and_exit(
    session: pytest.Session, files: list[list[pytest.Item]], numbers: int, stream: socket.socket, place: int
) -> None:
    """Run files of tests until none is left, then the exit functions registered here, without tearing down modules."""
    code = 1
    atexit._clear()
    try:
        _settle(session, place)
        messages = _Messages(session.config, stream)
        session.config.pluginmanager.register(messages)
        messages.sends = True  # warnings of the collection, which registering repeats, are known
        _run(session, _take_items(files, numbers))
        atexit._run_exitfuncs()
        code = 0
    except KeyboardInterrupt:  # the process that has collected says so
        pass
    except BaseException:  # of pytest itself: tests' own are in reports
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _settle(session: pytest.Session, place: int) -> None:
    """Separate what a forked process would share: the temporary folder, the files of captured output, the terminal."""
    config: Any = session.config
    factory = config._tmp_path_factory
    factory._basetemp = Path(factory.getbasetemp()) / f"process{place}"
    factory._basetemp.mkdir(mode=0o700)
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # its writer is asked for colours
        terminal._tw._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open to the end


def _take_items(files: list[list[pytest.Item]], numbers: int) -> Iterator[pytest.Item]:
    while number := os.read(numbers, _FILE.size):
        yield from files[_FILE.unpack(number)[0]]


def _run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    """Run them. The next file is taken when the last test of this one starts: it says which fixtures are kept."""
    item = next(items, None)
    try:
        while item is not None and not session.shouldfail and not session.shouldstop:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
    finally:
        session._setupstate.teardown_exact(None)


class _Messages:
    """Sends reports and warnings to the process that has collected the tests."""

    def __init__(self, config: pytest.Config, stream: socket.socket) -> None:
        self._config = config
        self._stream = stream
        self.sends = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        plain = warnings.WarningMessage(  # its own class may not be one that can be pickled
            str(warning_message.message), UserWarning, warning_message.filename, warning_message.lineno
        )
        self._send("warning", {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location})

    def _send(self, name: str, content: object) -> None:
        if not self.sends:
            return
        body = pickle.dumps((name, content))
        self._stream.sendall(_LENGTH.pack(len(body)) + body)
