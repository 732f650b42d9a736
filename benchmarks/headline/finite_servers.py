"""Recorded sessions of coding agents at real servers: all memory, a pool of a share and a folder, the pool alone.

    python benchmarks/headline/finite_servers.py --sessions agentx/ --model m100 >finite_servers.json

Of the sessions that are not left out, the first requests of every `--every`th are sent by `headstart bench trace
--against`, all at once, with lengths divided and pauses shortened, to a new `headstart serve` for each kind of memory.
The context must hold the longest prompt. Figures are the server's own counters and the client's latencies. The last
line of stdout is JSON.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from headstart.core.errors import ConfigError
from headstart.measurement.machine import describe_machine, describe_versions
from headstart.workload.recorded.trace_files import TraceOptions
from headstart.workload.traces import Trace

BLOCK = 16
PARTS = ("unlimited", "folder", "alone")


def chosen_sessions(options: argparse.Namespace, folder: Path) -> tuple[Trace, int]:
    """Link the files of the chosen sessions into a folder; return their trace, with divided lengths, and their number.

    A file is a session.
    """
    files: list[Path] = []
    for file in sorted(options.sessions.glob("*.json*")):
        try:
            TraceOptions(skip_above=options.skip_above).read(file)
            files.append(file)
        except ConfigError:  # nothing of it is left
            continue
    for file in files[:: options.every]:
        (folder / file.name).symlink_to(file.resolve())
    trace = TraceOptions(divisor=options.divisor).read(folder)
    return trace.first(options.limit), len(files[:: options.every])


def serve(options: argparse.Namespace, num_blocks: int, store: Path | None, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headstart", "serve", options.model, "--port", str(port)]
    command += ["--num-blocks", str(num_blocks), "--threads", str(options.threads), "--served-model-name", "model"]
    command += ["--kv-store", str(store)] if store is not None else []
    server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True)
    while server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return server
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server has ended")


def measure(options: argparse.Namespace, sessions: Path, num_blocks: int, store: Path | None) -> dict[str, Any]:
    url = f"http://127.0.0.1:{options.port}"
    server = serve(options, num_blocks, store, options.port)
    try:
        command = [sys.executable, "-m", "headstart", "bench", "trace", "--trace", str(sessions), "--against", url]
        command += [
            "--model",
            "model",
            "--divide-lengths",
            str(options.divisor),
            "--limit",
            str(options.limit),
            "--seed",
            "1",
        ]
        command += ["--speed", str(options.speed), "--timeout", "1200"]
        client = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        stats = httpx.get(f"{url}/v1/cache/stats", timeout=30).json()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    return {"num_blocks": num_blocks, "client": json.loads(client.stdout.splitlines()[-1]), "stats": stats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, required=True, help="folder of recorded sessions, one a file")
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--divisor", type=int, default=32)
    parser.add_argument("--every", type=int, default=3, help="take every nth session")
    parser.add_argument("--limit", type=int, default=0, help="the first requests of these sessions; 0: all")
    parser.add_argument("--speed", type=float, default=100.0, help="pauses are so many times as short")
    parser.add_argument("--skip-above", type=int, default=200_000, help="tokens, before the division")
    parser.add_argument("--share", type=float, default=0.05, help="of the distinct blocks, in the small pool")
    parser.add_argument("--port", type=int, default=8491)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    with tempfile.TemporaryDirectory(prefix="headstart-finite-") as name:
        sessions = Path(name) / "sessions"
        sessions.mkdir()
        trace, num_sessions = chosen_sessions(options, sessions)
        paths = [one.hash_ids[: one.length // trace.block_size] for one in trace.requests]
        distinct = len({block for path in paths for block in path}) * trace.block_size // BLOCK
        document: dict[str, Any] = {"benchmark": "finite_servers", **vars(options), "sessions": num_sessions}
        document |= {"model": Path(options.model).name, "requests": len(paths), "distinct_blocks": distinct}
        document |= {"prompt_tokens": sum(one.length for one in trace.requests)}
        document["longest"] = max(one.length + one.output for one in trace.requests)
        print(document, file=sys.stderr)
        small = int(options.share * distinct)
        sizes = {"unlimited": (2 * distinct, None), "folder": (small, Path(name) / "kv"), "alone": (small, None)}
        for part in options.parts:
            document[part] = measure(options, sessions, *sizes[part])
    print(json.dumps(document | {"machine": describe_machine(), "versions": describe_versions()}))


if __name__ == "__main__":
    main()
