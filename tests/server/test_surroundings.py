"""What stands between a client and a server, or comes along: HEAD, byte order marks."""

import pytest
from server.harness import Server

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
