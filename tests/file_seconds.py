"""A plugin of pytest: seconds by test file. Processes begin with the longest files, and none may take too much CPU.

The order is that of `file_seconds.json`, which `--record-file-seconds` writes. CPU time is that of the tests' process
and of processes it waited for, not of forked servers; unlike the elapsed time it does not depend on other processes.
"""

import json
import resource
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

RECORD = Path(__file__).with_suffix(".json")
MIN_RECORDED = 1.0  # files that take less come last, in the usual order


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the child processes it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seconds by file")
    group.addoption("--max-file-seconds", type=float, help="fail if the tests of a file take more seconds of CPU time")
    group.addoption(
        "--record-file-seconds", action="store_true", help=f"write {RECORD.name}: run all tests, on an idle machine"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileSeconds(config), "file_seconds_of_run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files by their recorded seconds, the longest first, if they are shared out between processes."""
    if getattr(config.option, "forks", 0):
        seconds = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


class FileSeconds:
    """The sums of one run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._before = cpu_seconds()
        self._cpu: Counter[str] = Counter()
        self._elapsed: Counter[str] = Counter()

    def pytest_runtest_logstart(self) -> None:
        self._before = cpu_seconds()  # a forked process began at 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_seconds()
        report.__dict__["cpu_seconds"], self._before = now - self._before, now  # goes to the process that sums
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self._cpu[file] += report.__dict__.get("cpu_seconds", 0.0)
        self._elapsed[file] += report.duration

    def _too_long(self) -> dict[str, float]:
        limit = self._config.option.max_file_seconds
        return {} if limit is None else {file: cpu for file, cpu in self._cpu.items() if cpu > limit}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._too_long():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._config.option.record_file_seconds:
            seconds = {file: round(each, 1) for file, each in self._elapsed.most_common() if each >= MIN_RECORDED}
            RECORD.write_text(json.dumps(seconds, indent=0) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for file, cpu in self._too_long().items():
            limit = self._config.option.max_file_seconds
            terminalreporter.write_line(f"FAILED {file}: {cpu:.0f} s of CPU time, {limit:.0f} are allowed", red=True)
