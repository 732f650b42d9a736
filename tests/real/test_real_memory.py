"""A server with defaults in a control group, beside a process that holds half of the group's memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from server.harness import spawn, wait_for

from headstart.bundled.packaged_models import SMOLLM2

pytestmark = pytest.mark.long
ROOT = Path("/sys/fs/cgroup")
GIB = 2**30
MAX_TOKENS = 20_000  # that are written to the pool: all of the smaller one
NUM_TOKENS = 2_000  # of a prompt
JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
HOLD = "import sys; held = b'1' * int(sys.argv[1]); print('held', flush=True); sys.stdin.read()"


class Group:
    """A control group for memory, v1 or v2, with a limit and without swap."""

    def __init__(self, path: Path, limit: int, *, is_v2: bool) -> None:
        self.path, self._is_v2 = path, is_v2
        limits = {"memory.max": limit, "memory.swap.max": 0}
        if not is_v2:
            limits = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        for name in (name for name in limits if (path / name).exists()):  # without swap there is no limit of it
            (path / name).write_text(str(limits[name]), encoding="utf-8")

    def command(self, *words: str) -> list[str]:
        """A command that runs in the group."""
        return ["sh", "-c", JOIN, str(self.path), *words]

    @property
    def peak(self) -> int:
        """The most bytes that its processes held together."""
        return int((self.path / ("memory.peak" if self._is_v2 else "memory.max_usage_in_bytes")).read_text())

    @property
    def num_killed(self) -> int:
        """The number of its processes that were killed since memory was short."""
        text = (self.path / ("memory.events" if self._is_v2 else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@contextmanager
def limited(limit: int) -> Iterator[Group]:
    """A group of this limit; skips where none can be made."""
    is_v2 = (ROOT / "cgroup.controllers").exists()
    own = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    parent = ROOT if is_v2 else ROOT / "memory" / own.get("memory", "").lstrip("/")
    path = parent / f"headstart-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        if not (path / "memory.stat").exists():
            pytest.skip("groups have no limits of memory here")
        yield Group(path, limit, is_v2=is_v2)
    finally:
        wait_for(lambda: not (path / "cgroup.procs").read_text())
        path.rmdir()


@contextmanager
def holding(group: Group, num_bytes: int) -> Iterator[None]:
    """A process of the group that holds so many bytes."""
    command = group.command(sys.executable, "-c", HOLD, str(num_bytes))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield
        process.communicate()
        assert process.returncode == 0


@pytest.mark.usefixtures("smollm2_file")
@pytest.mark.parametrize(("limit", "is_first"), [(5 * GIB // 2, True), (6 * GIB, False)])
def test_a_server_answers_beside_a_process_that_holds_half_the_memory(
    limit: int, is_first: bool, tmp_path: Path
) -> None:
    """With the other first, the pool is small and is written to its end; else it is that of the whole group."""
    serve = [sys.executable, "-m", "headstart", "serve", SMOLLM2.name, "--port", "0"]
    with limited(limit) as group, ExitStack() as stack:
        if is_first:
            stack.enter_context(holding(group, limit // 2))
        server = stack.enter_context(spawn(group.command(*serve), tmp_path / "log")).wait_ready()
        if not is_first:
            stack.enter_context(holding(group, limit // 2))
        found = re.search(r"= ([\d,]+) tokens", server.log)
        assert found is not None, server.log
        num_tokens = int(found[1].replace(",", ""))
        assert (num_tokens < MAX_TOKENS) is is_first
        for number in range(min(num_tokens, MAX_TOKENS) // NUM_TOKENS + 1):
            prompt = [1_000 + (number * 7_919 + index * 31) % 40_000 for index in range(NUM_TOKENS)]
            answer = server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
            assert answer.status_code == 200, answer.text
        first = psutil.Process(server.process.pid)
        resident = sum(one.memory_full_info().pss for one in (first, *first.children(recursive=True)))
        assert server.stop() == 0
        shown = {"limit": limit, "held": limit // 2, "server": resident, "peak": group.peak, "pool_tokens": num_tokens}
        print(json.dumps(shown))  # shown by pytest -s
        assert group.num_killed == 0 and group.peak <= limit
