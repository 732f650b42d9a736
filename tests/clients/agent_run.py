"""One run of a coding agent against a scripted server: python -m clients.agent_run AGENT BINARY ROOM.

Runs in a network namespace of its own (`unshare --user --net`), which has loopback only, so that an agent can reach
nothing but the server. The model calls a tool of the agent that reads a file, and repeats what the tool returns; of
aider, which has no tools, it repeats the file in the prompt.
Prints one JSON object: exit code, output, and what the server has left out of prompts.
"""

import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

from clients.scripted_agent import scripted, scripted_server

WORD = "rhubarb-1848"  # only in the file
RUN_SECONDS = 300
TEMPLATE = scripted(
    """
{%- set results = messages[-2:] | selectattr('role', 'equalto', 'tool') | map(attribute='content') | list %}
{%- set told = messages | map(attribute='content') | join(' ') %}
{%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list %}
{%- macro call(name, arguments) %}<tool_call>
{"name": "{{ name }}", "arguments": {{ arguments }}}
</tool_call>
{% endmacro %}
{%- if results %}The note says: {{ results[-1] }}
{%- elif 'Bash' in names %}{{ call('Bash', '{"command": "cat note.txt", "description": "Read the note"}') }}
{%- elif 'bash' in names %}{{ call('bash', '{"command": "cat note.txt", "description": "Read the note"}') }}
{%- elif 'exec_command' in names %}{{ call('exec_command', '{"cmd": "cat note.txt"}') }}
{%- elif 'run_commands' in names %}{{ call('run_commands', '{"commands": ["cat note.txt"]}') }}
{%- elif 'The word is ' in told %}The note says: {{ told.split('The word is ')[1].split('\n')[0] }}
{%- else %}No tool.
{%- endif %}"""
)
CODEX = """model = "fake"
model_provider = "local"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "HEADSTART_KEY"
wire_api = "responses"
"""
CLINE = {  # as written by: cline auth -p openai-compatible -k none -m fake -b {url}/v1
    "version": 1,
    "lastUsedProvider": "openai-compatible",
    "modes": {},
    "providers": {
        "openai-compatible": {
            "settings": {"provider": "openai-compatible", "apiKey": "none", "model": "fake", "baseUrl": "{url}/v1"},
            "updatedAt": "2026-11-27T00:00:00.000Z",
            "tokenSource": "manual",
        }
    },
}
AIDER = ["--openai-api-key", "none", "--yes-always", "--no-git", "--no-check-update", "--analytics-disable"]
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "small_model": "local/fake",
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"fake": {"limit": {"context": 32768, "output": 4096}}},
        }
    },
}
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
_ASK = "What does note.txt say?"


def main(agent: str, binary: str, room: Path) -> None:
    bring_up_loopback()
    home, work = room / "home", room / "work"
    for folder in (".codex", ".config/opencode", ".cline/data/settings"):
        (home / folder).mkdir(parents=True)
    work.mkdir()
    (work / "note.txt").write_text(f"The word is {WORD}.\n", encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home / ".codex"), **QUIET}
    with scripted_server(room, TEMPLATE) as server:
        (home / ".codex" / "config.toml").write_text(CODEX.format(url=server.url), encoding="utf-8")
        (home / ".config/opencode/opencode.json").write_text(json.dumps(OPENCODE).replace("{url}", server.url))
        (home / ".cline/data/settings/providers.json").write_text(json.dumps(CLINE).replace("{url}", server.url))
        environment |= {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none", "HEADSTART_KEY": "none"}
        words = {
            "claude-code": [binary, "-p", _ASK, "--model", "fake", "--allowedTools", "Bash(cat:*)"],
            "codex": [binary, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", _ASK],
            "opencode": [binary, "run", "--model", "local/fake", _ASK],
            "cline": [binary, "-P", "openai-compatible", "-m", "fake", _ASK],
            "aider": [
                *(binary, *AIDER, "--openai-api-base", f"{server.url}/v1", "--no-show-model-warnings"),
                *("--model", "openai/fake", "--message", _ASK, "note.txt"),
            ],
        }[agent]
        options = {"capture_output": True, "text": True, "cwd": work, "stdin": subprocess.DEVNULL}
        done = subprocess.run(words, env=environment, timeout=RUN_SECONDS, **options)
        skipped = dict(
            re.findall(r'headstart:skipped_total\{.*kind="([^"]+)".*\} ([1-9]\S*)', server.get("/metrics").text)
        )
    print(json.dumps({"code": done.returncode, "out": done.stdout, "err": done.stderr, "skipped": skipped}))


def bring_up_loopback() -> None:
    """Set the flag UP of the interface `lo`, which is down in a new namespace."""
    with socket.socket() as any_socket:
        up_loopback_running = 0x1 | 0x8 | 0x40
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", up_loopback_running))  # SIOCSIFFLAGS


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
