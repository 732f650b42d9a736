"""Proxies of the environment: never for this machine, and named where one is in the way."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headstart.cli import main as cli
from headstart.cli.client_request import proxy_for_address

DEAD = "http://somebody:secret@127.0.0.1:9"


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, DEAD)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def address() -> Iterator[str]:
    """A server with the prompt log of a request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps({"data": [{"body": {"prompt": "a"}}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("proxied")
def test_this_machine_is_never_asked_through_a_proxy(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "--against", address]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("proxied")
@pytest.mark.parametrize(
    "argv", [["lint", "--against"], ["prefix", "list", "--url"], ["explain", "cmpl-1", "--url"]], ids=" ".join
)
def test_the_error_names_the_proxy_that_did_not_answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*argv, "http://models.invalid:8000"]) == 2
    said = capsys.readouterr().err
    assert "through the proxy 127.0.0.1:9" in said and "secret" not in said


@pytest.mark.usefixtures("proxied")
def test_exceptions_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("localhost:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000"):
        assert proxy_for_address(f"http://{host}") is None
    assert proxy_for_address("http://models.invalid") == "127.0.0.1:9"
    monkeypatch.setenv("no_proxy", "models.invalid")
    assert proxy_for_address("http://models.invalid") is None


def test_a_log_may_begin_with_a_byte_order_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert cli.main(["lint", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2
