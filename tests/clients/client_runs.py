"""Runs of client scripts: one process per client and pair of servers, and what its checks said."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from clients.environments import Client

RUN_SECONDS = 1800
_QUIET = {  # nothing is sent anywhere but to the servers
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AI_SDK_LOG_WARNINGS": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG")  # of this process's environment: no keys, no proxies, no source paths


def quiet_environment() -> dict[str, str]:
    """Return the environment of a client's process."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | _QUIET


def run_checks(client: Client, command: Sequence[str], urls: Sequence[str]) -> dict[str, str | None]:
    """Run a client's script against the servers; return the error of each check, None for one that passed."""
    options = {"capture_output": True, "text": True, "timeout": RUN_SECONDS, "cwd": Path(command[0]).parent}
    done = subprocess.run([*command, *urls], env=quiet_environment(), **options)
    outcomes = {check: f"it did not run:\n{done.stderr}" for check in client.checks()}
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    return outcomes | {line["check"]: line["error"] for line in lines}
