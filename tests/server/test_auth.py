"""Permissions: every route times every kind of caller, and tenants that share nothing."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from server.harness import Inside, Server, fake_server, inside

from headstart.config.options import ServerOptions, TenantEntry
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.engine.engine_client import EngineClient
from headstart.http.auth import Authenticator, Principal
from headstart.http.http_errors import HttpError
from headstart.http.logs import ServerLog
from headstart.server.server_state import ServerState
from headstart.store.files import read_or_create_folder_secret

OPEN = ("/health", "/readyz", "/livez", "/version", "/ping", "/", "/page/page.js")
CLOSED = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/models/fake": "GET",
    "/tokenizer_info": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/openapi.json": "GET",
    "/v1/cache/tree": "GET",
    "/v1/cache/live": "GET",
    "/page": "GET",
    "/nowhere": "GET",
}
ADMIN = {
    "/reset_prefix_cache": "POST",
    "/metrics": "GET",
    "/load": "GET",
    "/v1/prefixes": "POST",
    "/v1/prefixes/": "GET",
    "/v1/prefixes/intent": "DELETE",
    "/v1/cache/stats": "GET",
}
SPELLINGS = (
    *("/%2Fhealth", "/%2Fpage/page.js", "/HEALTH", "/health/", "/health%2f..%2fv1/models", "/v1/models?x=/health"),
    *("/v1/%6dodels", "/%"),
)


@pytest.fixture(scope="module")
def locked(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("locked") / "log"
    with fake_server(folder, log, api_key=("key-a", "key-b"), admin_api_key=("root-key",)) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "key-a")],
        [("authorization", "Basic key-a")],
        [("authorization", "Bearer key-a x")],
        [("authorization", "Bearer ' OR 1=1 --")],
        [("authorization", "Bearer \u00e9")],
        [("authorization", "Bearer key-a"), ("authorization", "Bearer wrong")],
        [("x-api-key", "key-a")],
        [("host", "a/?x=/health"), ("x-original-url", "/health"), ("x-forwarded-for", "127.0.0.1")],
        [("host", "x/health#")],
    ],
)
def test_without_a_valid_key_only_health_and_version_answer(locked: Server, headers: list[tuple[str, str]]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    with locked.client() as client:
        for path, method in {**CLOSED, **ADMIN, **dict.fromkeys(SPELLINGS, "GET")}.items():
            if headers[:1] == [("x-api-key", "key-a")] and unquote(path).startswith("/v1/models"):
                continue  # also a route of Anthropic's clients, which send the key so
            answer = client.request(method, path, headers=raw)
            assert answer.status_code == 401, path
            assert (
                answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
            )
            assert "x-request-id" in answer.headers
        for path in OPEN:
            assert client.get(path, headers=raw).status_code == 200


def test_a_tenant_may_everything_but_administer(locked: Server) -> None:
    with locked.client(headers=bearer("key-a")) as client:
        assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code == 200
        assert client.get("/v1/models").status_code == 200 and client.get("/nowhere").status_code == 404
        assert client.get("/v1/cache/explain").status_code not in (401, 403)
        for path, method in ADMIN.items():
            answer = client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")


def test_an_administrator_may_everything(locked: Server) -> None:
    with locked.client(headers=bearer("root-key")) as client:
        assert client.get("/metrics").status_code == 200 and client.post("/reset_prefix_cache").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 1}).status_code == 200


def test_keys_are_never_logged(locked: Server) -> None:
    assert "Bearer" in locked.log and "$KEY" in locked.log  # the banner's example
    for key in ("key-a", "key-b", "root-key", "wrong"):
        assert key not in locked.log


async def cached_tokens(server: Inside, key: str, salt: str | None = None) -> int:
    body = {"prompt": list(range(100)), "max_tokens": 1, "cache_salt": salt}
    answer = await server.client.post("/v1/completions", json=body, headers=bearer(key))
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_share_no_cached_prefix_and_a_salt_only_narrows(folder: str) -> None:
    async def run() -> None:
        async with inside(folder, api_key=("a", "b"), admin_api_key=("root",)) as server:
            assert await cached_tokens(server, "a") == 0
            assert await cached_tokens(server, "a") == 96
            assert await cached_tokens(server, "b") == 0
            assert await cached_tokens(server, "root") == 0
            assert await cached_tokens(server, "a", "salt") == 0
            assert await cached_tokens(server, "a", "salt") == 96
            assert await cached_tokens(server, "b", "salt") == 0  # another's salt opens nothing

    asyncio.run(run())


def test_without_keys_only_clients_on_this_machine_may_reset(folder: str) -> None:
    async def run() -> None:
        async with inside(folder) as server:
            assert (await server.client.post("/reset_prefix_cache")).status_code == 200
            for headers in ({"x-forwarded-for": "1.2.3.4"}, {"origin": "http://evil.example"}):
                assert (await server.client.post("/reset_prefix_cache", headers=headers)).status_code == 403

    asyncio.run(run())
    remote = {"path": "/reset_prefix_cache", "headers": [], "client": ("10.0.0.1", 5)}
    with pytest.raises(HttpError, match="administrator key"):
        Authenticator((), (), b"secret").authorise(remote)


def test_without_administrator_keys_no_tenant_may_administer() -> None:
    auth = Authenticator(("a",), (), b"secret")
    scope = {"path": "/reset_prefix_cache", "headers": [(b"authorization", b"Bearer a")], "client": ("127.0.0.1", 5)}
    with pytest.raises(HttpError) as caught:
        auth.authorise(scope)
    assert caught.value.status == 403
    assert auth.authorise({**scope, "path": "/metrics"}).label  # but may look


def who(auth: Authenticator, key: str) -> Principal:
    """Return the principal of a key."""
    return auth.authorise({"path": "/v1/models", "headers": [(b"authorization", b"bearer " + key.encode())]})


def test_domains_depend_on_the_key_and_on_the_secret() -> None:
    def principal(key: str, secret: bytes) -> Principal:
        return who(Authenticator(("a", "b"), (), secret), key)

    one, other, elsewhere = principal("a", b"x"), principal("b", b"x"), principal("a", b"y")
    assert len({one.domain, other.domain, elsewhere.domain}) == 3 and one == principal("a", b"x")
    assert one.label not in one.domain.hex() and one.tenant == one.label != other.label


def test_all_keys_of_a_tenant_are_one_domain_under_its_name() -> None:
    entries = (TenantEntry("acme", ("k1", "k2")), TenantEntry("b.c-d_2", ("k3",)))
    auth = Authenticator(("single",), ("root",), b"secret", entries)
    acme, same, other = who(auth, "k1"), who(auth, "k2"), who(auth, "k3")
    assert acme == same and acme.label == acme.tenant == "acme" and not acme.is_admin
    assert len({who(auth, key).domain for key in ("k1", "k3", "single", "root")} | {b""}) == 5
    assert len({who(auth, key).tenant for key in ("k1", "k3", "single", "root")} | {""}) == 5
    assert auth.domain_of_tenant("acme") == acme.domain and auth.domain_of_tenant("b.c-d_2") == other.domain
    assert Authenticator((), (), b"other", entries).domain_of_tenant("acme") != acme.domain


def test_a_key_and_a_tenant_of_the_same_name_are_two_domains() -> None:
    auth = Authenticator(("acme",), (), b"secret", (TenantEntry("acme", ("k",)),))
    assert who(auth, "acme").domain != who(auth, "k").domain


def test_a_tenant_that_is_none_has_no_domain() -> None:
    auth = Authenticator(("k",), (), b"secret", (TenantEntry("acme", ("k1",)),))
    for name in ("", "k", "acme ", "x" * 1000):
        with pytest.raises(InvalidRequestError, match=r"is not one of those in headstart\.toml: acme$"):
            auth.domain_of_tenant(name)


def test_named_tenants_alone_lock_the_server() -> None:
    auth = Authenticator((), (), b"secret", (TenantEntry("acme", ("k",)),))
    with pytest.raises(HttpError, match="API key is needed"):
        auth.authorise({"path": "/v1/models", "headers": []})


def test_without_tenants_all_clients_share_the_cache() -> None:
    auth = Authenticator((), ("root",), b"secret")
    stranger, admin = auth.authorise({"path": "/v1/models", "headers": []}), who(auth, "root")
    assert (stranger.tenant, stranger.domain) == (admin.tenant, admin.domain) == ("", b"")
    assert admin.label and admin.is_admin


@pytest.mark.parametrize(
    ("keys", "admin_keys", "tenants", "complaint"),
    [
        (("",), (), (), "--api-key has an empty key"),
        ((), ("",), (), "--admin-api-key has an empty key"),
        ((), (), (("t", ("",)),), "tenant t has an empty key"),
        (("a",), ("a",), (), "--admin-api-key has a key that --api-key has already"),
        (("a", "a"), (), (), "--api-key has a key that --api-key has already"),
        (("a",), (), (("t", ("a",)),), "tenant t has a key that --api-key has already"),
        ((), ("a",), (("t", ("a",)),), "--admin-api-key has a key that tenant t has already"),
        ((), (), (("t", ("a", "a")),), "tenant t has a key that tenant t has already"),
        ((), (), (("t", ("a",)), ("u", ("a",))), "tenant u has a key that tenant t has already"),
        ((), (), (("t", ("a",)), ("t", ("b",))), "tenant t is there twice"),
        ((), (), (("t", ()),), "tenant t has no api_keys"),
        ((), (), (("", ("a",)),), "a tenant is named ''; use 1 to 64"),
        ((), (), (("x" * 65, ("a",)),), "use 1 to 64"),
        ((), (), (("a b", ("a",)),), "named 'a b'"),
        ((), (), (("t\n", ("a",)),), "use 1 to 64"),
    ],
)
def test_keys_that_protect_nothing_or_two_things_are_refused(
    keys: tuple[str, ...], admin_keys: tuple[str, ...], tenants: tuple[tuple[str, tuple[str, ...]], ...], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Authenticator(keys, admin_keys, b"secret", [TenantEntry(name, own) for name, own in tenants])
    assert complaint in str(caught.value)


def test_no_error_and_no_printed_option_shows_a_key() -> None:
    entry = TenantEntry("t", ("a-secret", "a-secret"))
    with pytest.raises(ConfigError) as caught:
        Authenticator((), (), b"secret", (entry,))
    assert "a-secret" not in str(caught.value) + repr(entry)


def test_servers_on_one_folder_agree_on_domains_and_on_two_they_do_not(tmp_path: Path) -> None:
    entries = (TenantEntry("acme", ("k1",)),)

    def domains(folder: str) -> list[bytes]:
        auth = Authenticator(("a",), ("root",), read_or_create_folder_secret(tmp_path / folder), entries)
        return [auth.domain_of_tenant("acme"), *(who(auth, key).domain for key in ("a", "k1", "root"))]

    one, again, elsewhere = domains("x"), domains("x"), domains("y")
    assert one == again and set(one).isdisjoint(elsewhere)


def test_what_a_log_shows_of_a_key_hangs_on_no_secret_that_stays() -> None:
    first, second = (Authenticator(("a",), (), b"kept", label_secret=own) for own in (b"x", b"y"))
    assert who(first, "a").domain == who(second, "a").domain == who(Authenticator(("a",), (), b"kept"), "a").domain
    assert len({who(auth, "a").label for auth in (first, second, Authenticator(("a",), (), b"kept"))}) == 3


def test_every_server_names_keys_by_a_secret_of_its_own() -> None:
    async def labels() -> set[str]:
        options = ServerOptions(api_key=("a",))
        states = [ServerState(options, EngineClient(), ServerLog(), b"kept" * 8) for _ in range(2)]
        assert len({who(state.auth, "a").domain for state in states}) == 1
        return {who(state.auth, "a").label for state in states}

    assert len(asyncio.run(labels())) == 2
