"""HEAD requests, byte order marks, root paths, Unix sockets and model names at servers and routers."""

import sys
from pathlib import Path

import httpx
import pytest
from server.harness import Server, fake_server, spawn, wait_for

from headstart.core.errors import ConfigError
from headstart.http.lifecycle import open_listener

BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("path", ["/health", "/readyz", "/livez", "/version", "/v1/models", "/metrics"])
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    with server.client() as client:
        head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_a_byte_order_mark_before_a_body_is_no_mistake(server: Server) -> None:
    for path, body in (
        ("/v1/completions", b'{"prompt": "fox", "max_tokens": 1}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "fox"}], "max_tokens": 1}'),
        ("/tokenize", b'{"prompt": "fox"}'),
    ):
        assert server.post(path, content=BOM + body).status_code == 200
    assert server.post("/v1/completions", content=BOM + BOM + b"{}").status_code == 400


def test_a_prefix_that_a_proxy_leaves_in_paths_is_taken_off(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "log", root_path="/llm/") as server:
        for path in ("/llm/v1/models", "/v1/models", "/llm/health"):
            assert server.get(path).status_code == 200
        body = {"prompt": "fox", "max_tokens": 1}
        assert server.post("/llm/v1/completions", json=body).status_code == 200
        for path in ("/llmv1/models", "/llm", "/llm/llm/health"):
            assert server.get(path).status_code == 404


def test_all_names_of_a_model_are_listed_and_accepted(folder: str, tmp_path: Path) -> None:
    with fake_server(folder, tmp_path / "log", served_model_name=["first", "gpt-4o", "a/b"]) as server:
        names = [card["id"] for card in server.get("/v1/models").json()["data"]]
        assert names == ["first", "gpt-4o", "a/b"]
        for name in names:
            assert server.get(f"/v1/models/{name}").json()["id"] == name
            answer = server.post("/v1/completions", json={"prompt": "fox", "max_tokens": 1, "model": name})
            assert answer.json()["model"] == "first"
        refused = server.post("/v1/completions", json={"prompt": "fox", "model": "b"})
        assert refused.status_code == 404 or refused.json()["error"]["code"] == "model_not_found"
        assert "'first' and 'gpt-4o' and 'a/b'" in refused.json()["error"]["message"]


def test_a_unix_socket_is_served_and_removed_at_the_end(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with fake_server(folder, tmp_path / "log", uds=str(path)) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url=server.url) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "fox", "max_tokens": 1}).status_code == 200
        assert f"curl --unix-socket {path} http://localhost/v1/" in server.log
        with pytest.raises(ConfigError, match="another process listens there"):
            open_listener("", 0, str(path))
        assert server.stop() == 0
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    open_listener("", 0, path).close()
    with open_listener("", 0, path):
        assert Path(path).is_socket()
    with pytest.raises(ConfigError, match="cannot listen on --uds"):
        open_listener("", 0, str(tmp_path / "no" / "folder"))


def test_a_router_listens_on_a_unix_socket_too(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "headstart", "route", "--replica", server.url, "--uds", str(path)]
    with spawn(command, tmp_path / "log") as router:
        wait_for(lambda: "routes to" in router.log or router.process.poll() is not None)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.head("/v1/models").status_code == 200
            answer = client.post("/v1/completions", content=BOM + b'{"prompt": "fox", "max_tokens": 1}')
            assert answer.status_code == 200, answer.text
        assert router.stop() == 0
    assert not path.exists()
