"""The memory of a fuzzed server is that of all its processes."""

import subprocess

import psutil

from headstart_lab.fuzz.fuzz import Memory, family

NESTED = "sleep 600 & sh -c 'sleep 600 & echo ready; wait'; wait"


def test_every_process_below_a_server_counts() -> None:
    with subprocess.Popen(["sh", "-c", NESTED], stdout=subprocess.PIPE, text=True, process_group=0) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        root = psutil.Process(server.pid)
        processes = [root, *root.children(recursive=True)]
        try:
            assert len(processes) == 4 and set(family(root)) == set(processes)
            assert Memory(server.pid).poll() == sum(process.memory_info().rss for process in processes)
        finally:
            for process in processes:
                process.kill()
    assert family(root) == [root]
