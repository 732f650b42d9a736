"""WebPageAccess: what pages in a browser on this machine may ask a server, and what they may read of its answers.

A page from anywhere may have its own host name resolve to 127.0.0.1 (DNS rebinding) and is of one origin with the
server then. The Host header still has that name: a server that listens on loopback and has no keys serves loopback
names only, and `--allowed-host`. Other pages read answers only if `--cors-origin` names their origin.
"""

import ipaddress
import re
from functools import lru_cache
from typing import Any

from starlette.responses import Response

from headstart.config.options import ServerOptions
from headstart.core.errors import ConfigError
from headstart.http.http_errors import HttpError

ANY = "*"
PREFLIGHT_SECONDS = 600
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+", re.IGNORECASE)
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,1024}")
_PORT = re.compile(r":\d*\Z")
_METHODS = b"GET, POST, DELETE"
_EXPOSED = b"x-request-id, request-id, retry-after, x-should-retry"
_FORWARDING = frozenset((b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"origin"))
_FORWARDING_PREFIXES = (b"x-forwarded-", b"cf-")

Headers = list[tuple[bytes, bytes]]


class WebPageAccess:
    """The rules of one server. Raises ConfigError for an origin that is none."""

    def __init__(self, options: ServerOptions) -> None:
        self.names = frozenset(map(_host_name, options.allowed_host)) - {ANY}
        has_keys = bool(options.api_key or options.admin_api_key or options.tenants)
        self._checks_host = is_loopback(options.host) and not has_keys and ANY not in options.allowed_host
        for origin in options.cors_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"cors_origin is {origin!r}; write it like https://example.com, or * for all")
        self._origins = frozenset(origin.lower().encode() for origin in options.cors_origin)

    def check_host(self, scope: Any) -> None:
        """Raise HttpError 403 if a client on this machine uses a host name that is not served."""
        client = scope.get("client") if self._checks_host else None
        if client is not None and is_loopback(client[0]) and not has_known_host(scope, self.names):
            host = next(value for name, value in scope["headers"] if name == b"host")[:128]
            raise HttpError(
                403,
                f"the host name {host.decode('latin-1')!a} is not served on this machine; use localhost, or start the "
                "server with --allowed-host",
                code="host_not_allowed",
            )

    def answer_preflight(self, scope: Any) -> Response | None:
        """Return the answer to a preflight request of a page that may read answers; None for any other request."""
        headers = dict(scope["headers"])
        if (
            scope["method"] != "OPTIONS"
            or b"access-control-request-method" not in headers
            or not self.cors_headers(scope)
        ):
            return None
        names = headers.get(b"access-control-request-headers", b"")
        allowed = names if _HEADER_NAMES.fullmatch(names) else b""
        response = Response(status_code=204)
        response.raw_headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", allowed),
            (b"access-control-max-age", str(PREFLIGHT_SECONDS).encode()),
        ]
        return response

    def cors_headers(self, scope: Any) -> Headers:
        """Return the headers that let the page of a request read the answer; none unless its origin is listed."""
        origins = [value for name, value in scope["headers"] if name == b"origin"] if self._origins else []
        if len(origins) != 1 or not (b"*" in self._origins or origins[0].lower() in self._origins):
            return []
        return [
            (b"access-control-allow-origin", origins[0]),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]


def has_known_host(scope: Any, names: frozenset[str]) -> bool:
    """Return whether the Host of a request is an address, localhost or one of `names`; true without a Host."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return all(_is_known(host, names) for host in hosts)


def is_proxy_or_page_header(name: bytes) -> bool:
    """Return whether a header shows that a proxy or a web page is behind a request."""
    return name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES)


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether a host to listen on, or the address of a client, is of this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@lru_cache(maxsize=256)
def _is_known(host: bytes, names: frozenset[str]) -> bool:
    name = _host_name(host.decode("latin-1"))
    if name == "localhost" or name in names:
        return True
    try:  # an address was not looked up
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Return a host in lower case without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return _PORT.sub("", host) if host.count(":") == 1 else host
