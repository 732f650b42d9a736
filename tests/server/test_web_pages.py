"""Web pages in a browser on the server's machine: DNS rebinding, proxies that hide a remote client, and CORS."""

import asyncio
from typing import Any

import pytest
from gateway.harness import Replica, front
from server.harness import inside

from headstart.cli.replicas import replica_server_options
from headstart.config.options import ServerOptions, TenantEntry
from headstart.core.errors import ConfigError
from headstart.http.auth import Authenticator
from headstart.http.http_errors import HttpError
from headstart.http.web_pages import WebPageAccess, is_proxy_or_page_header

READ = ["/v1/cache/explain?request_id=r", "/metrics", "/v1/cache/requests", "/v1/prefixes", "/v1/models", "/health"]


def scope(host: str | None, client: str | None = "127.0.0.1", path: str = "/metrics", **headers: str) -> dict[str, Any]:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if host is not None:
        sent.append((b"host", host.encode()))
    return {"path": path, "method": "GET", "headers": sent, "client": None if client is None else (client, 5)}


def test_a_rebound_name_reads_nothing_of_a_server(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, prompt_log_size=1 << 20) as server:
            for path in READ:
                found = await server.client.get(path, headers={"host": "evil.example:8000"})
                assert (found.status_code, found.json()["error"]["code"]) == (403, "host_not_allowed"), path
                assert "'evil.example:8000'" in found.text
            sent = await server.client.post("/v1/completions", json={"prompt": "a"}, headers={"host": "evil.example"})
            assert sent.status_code == 403
            for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
                assert (await server.client.get("/metrics", headers={"host": host})).status_code == 200

    asyncio.run(run())


def test_a_rebound_name_reads_nothing_of_a_router() -> None:
    async def run() -> None:
        async with front(Replica()) as router:
            await router.up(1)
            for path in ("/v1/fleet", "/v1/cache/stats", *READ[:2]):
                found = await router.client.get(path, headers={"host": "evil.example"})
                assert (found.status_code, found.json()["error"]["code"]) == (403, "host_not_allowed"), path
            assert (await router.client.get("/v1/fleet")).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "host", "client", "is_served"),
    [
        ({}, "evil.example", "127.0.0.1", False),
        ({}, "localhost.evil.example", "127.0.0.1", False),
        ({}, "127.0.0.1.evil.example:80", "127.0.0.1", False),
        ({}, "[evil.example]", "127.0.0.1", False),
        ({"host": "localhost"}, "evil.example", "::1", False),
        ({"host": "127.0.0.2"}, "evil.example", "127.0.0.1", False),
        ({"allowed_host": ("box.example",)}, "BOX.example:8000", "127.0.0.1", True),
        ({"allowed_host": ("box.example",)}, "evil.example", "127.0.0.1", False),
        ({"allowed_host": ("*",)}, "evil.example", "127.0.0.1", True),
        ({"host": "0.0.0.0"}, "box.example", "127.0.0.1", True),  # a sidecar or a proxy passes on any name
        ({"api_key": ("k",)}, "box.example", "127.0.0.1", True),  # a page has no key
        ({"tenants": (TenantEntry("t", ("k",)),)}, "box.example", "127.0.0.1", True),
        ({}, "box.example", "10.0.0.1", True),  # of a gateway, for which a router picks replicas
        ({}, "box.example", None, True),
        ({}, None, "127.0.0.1", True),
    ],
)
def test_which_host_names_are_served(options: dict[str, Any], host: str, client: str, is_served: bool) -> None:
    pages = WebPageAccess(ServerOptions(**options))
    if is_served:
        pages.check_host(scope(host, client))
    else:
        with pytest.raises(HttpError, match="allowed-host"):
            pages.check_host(scope(host, client))


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_whatever_is_served_a_foreign_name_administers_nothing(host: str) -> None:
    auth = Authenticator(
        (), (), b"secret", host_names=WebPageAccess(ServerOptions(host=host, allowed_host=("*", "box"))).names
    )
    for name, is_admin in (("evil.example", False), ("localhost:1", True), ("box:8000", True), (None, True)):
        asked = scope(name, path="/reset_prefix_cache")
        if is_admin:
            assert auth.authorise(asked).is_admin
        else:
            with pytest.raises(HttpError, match="administrator key"):
                auth.authorise(asked)


@pytest.mark.parametrize(
    "header",
    [
        *("via", "forwarded", "x_forwarded_for", "x_forwarded_host", "x_forwarded_proto", "x_real_ip", "origin"),
        *("cf_connecting_ip", "cf_ray", "true_client_ip"),
    ],
)
def test_what_a_proxy_adds_marks_a_client_as_remote(header: str) -> None:
    asked = scope("localhost", path="/reset_prefix_cache", **{header: "x"})
    assert is_proxy_or_page_header(header.replace("_", "-").encode())
    with pytest.raises(HttpError, match="administrator key"):
        Authenticator((), (), b"secret").authorise(asked)


def test_pages_of_listed_origins_read_answers_and_others_do_not(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, cors_origin=("https://app.example",)) as server:
            client = server.client
            asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-a"}
            good, bad = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
            allowed = await client.options("/v1/chat/completions", headers={**good, **asks})
            assert allowed.status_code == 204 and allowed.headers["access-control-allow-origin"] == good["origin"]
            assert allowed.headers["access-control-allow-headers"] == "authorization, x-a"
            refused = await client.options("/v1/chat/completions", headers={**bad, **asks})
            assert refused.status_code >= 400
            for headers, is_read in ((good, True), (bad, False), ({}, False)):
                for path, status in (("/v1/models", 200), ("/v1/nothing", 404)):
                    answer = await client.get(path, headers=headers)
                    found = answer.headers.get("access-control-allow-origin")
                    assert (answer.status_code, found) == (status, good["origin"] if is_read else None)
            assert (await client.get("/v1/prefixes", headers=good)).status_code == 403  # still a page, no administrator

    asyncio.run(run())


def test_no_cors_headers_by_default(folder: str) -> None:
    async def run() -> None:
        async with inside(folder) as server:
            answer = await server.client.get("/v1/models", headers={"origin": "http://localhost:3000"})
            assert answer.status_code == 200 and not any("access-control" in name for name in answer.headers)

    asyncio.run(run())


def test_an_origin_that_is_none_is_refused_at_the_start() -> None:
    for origin in ("example.com", "https://a b", "https://a/path", ""):
        with pytest.raises(ConfigError, match="cors_origin"):
            WebPageAccess(ServerOptions(cors_origin=(origin,)))


def test_replicas_of_one_command_take_the_names_that_their_router_takes() -> None:
    assert replica_server_options(ServerOptions(allowed_host=("box",)), 2).allowed_host == ("box",)
    assert replica_server_options(ServerOptions(host="0.0.0.0"), 2).allowed_host == ("*",)
