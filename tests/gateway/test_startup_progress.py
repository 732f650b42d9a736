"""Which replicas are loading: a status line on a terminal, lines elsewhere."""

import io

from headstart.gateway.replicas.subprocesses import StartupProgress
from headstart.http.logs import ServerLog


def tell(progress: StartupProgress) -> None:
    """The life of three replicas: the first alone, one that ends, one that is ready."""
    with progress:
        progress.record_process_started("r0")
        progress.record_outcome("r0", is_ready=True)
        progress.record_process_started("r1")
        progress.record_process_started("r2")
        progress.record_outcome("r2", is_ready=False)
        progress.record_outcome("r1", is_ready=True)


def test_elsewhere_than_on_a_terminal_each_change_is_a_line() -> None:
    stream = io.StringIO()
    tell(StartupProgress(["r0", "r1", "r2"], ServerLog(stream)))
    assert stream.getvalue().splitlines() == [
        "headstart: replica r0 is loading",
        "headstart: replica r0 is ready (1 of 3)",
        "headstart: replica r1 is loading",
        "headstart: replica r2 is loading",
        "headstart: replica r2 ended while loading",
        "headstart: replica r1 is ready (2 of 3)",
    ]


def test_on_a_terminal_one_line_says_who_is_loading_and_leaves_nothing() -> None:
    stream = io.StringIO()
    tell(StartupProgress(["r0", "r1", "r2"], ServerLog(stream, is_terminal=True)))
    *shown, last = stream.getvalue().split("\r\x1b[2K")
    assert [line.rstrip("\r") for line in shown if line] == [
        "starting replicas: 0 of 3 ready, loading r0",
        "starting replicas: 1 of 3 ready",
        "starting replicas: 1 of 3 ready, loading r1",
        "starting replicas: 1 of 3 ready, loading r1, r2",
        "starting replicas: 1 of 3 ready, loading r1",
        "starting replicas: 2 of 3 ready",
    ]
    assert last == "" and "\n" not in stream.getvalue()


def test_of_many_replicas_the_first_are_named() -> None:
    stream = io.StringIO()
    with StartupProgress([f"r{n}" for n in range(30)], ServerLog(stream, is_terminal=True)) as progress:
        for number in range(30):
            progress.record_process_started(f"r{number}")
    assert "starting replicas: 0 of 30 ready, loading r0, r1, r2, r3, r4, r5, ...\r" in stream.getvalue()
