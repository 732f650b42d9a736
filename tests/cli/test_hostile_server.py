"""The verbs that ask a server, against one that answers with escape sequences: none reaches the terminal."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headstart.cli import main as cli

EVIL = "a\x1b]0;title\x07\x1b[31m\x9b2J\u202eb[bold]c[/bold][link=http://x.example]d[/link]\x7f\x08"
PREFIX = dict(
    name=EVIL, tenant=EVIL, state=EVIL, tokens=1, blocks=1, hits=1, tokens_saved=1, last_used=None, error=EVIL
)


@contextmanager
def hostile(status: int, answer: Any) -> Iterator[str]:
    """A server that answers all requests alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(answer, ensure_ascii=False).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["explain", "cmpl-1"], {"message": f"{EVIL}\n{EVIL}"}),
        (["prefix", "list"], {"data": [PREFIX]}),
        (["prefix", "add", "x", "text"], PREFIX),
        (["prefix", "remove", "x"], PREFIX),
        (["lint", "--against"], {"data": [{"body": {"messages": [{"role": EVIL, "content": EVIL * 9}]}}] * 2}),
    ],
)
def test_no_escape_sequence_of_a_server_is_printed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    as_json: bool,
    words: list[str],
    answer: dict[str, Any],
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    body = answer if status == 200 else {"error": {"message": EVIL}}
    with hostile(status, body) as url:
        cli.main([*words, *([url] if words[0] == "lint" else ["--url", url]), *(["--json"] if as_json else [])])
    told = capsys.readouterr()
    printed = told.out + told.err
    assert printed and all(char.isprintable() or char == "\n" for char in printed), printed
    if words == ["prefix", "list"] and status == 200 and not as_json:
        assert "[bold]c[/bold]" in printed  # as it is, and no markup
