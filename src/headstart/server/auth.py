"""Who is asking: API keys, administrator keys, and the isolation domain that a key stands for.

Decides on the raw ASGI path, never on a URL rebuilt from headers, and denies what it does not know: a new route needs a
key until it is listed here. Keys are compared by digest in constant time. Tenants never share cache blocks: each one's
domain is an HMAC of its key with a secret that lives as long as the process.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headstart.core.errors import ConfigError
from headstart.server.http_errors import HttpError

Scope = Any  # starlette's: a mutable mapping
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"origin")


class Access(Enum):
    """What a route asks for."""

    PUBLIC = "public"
    TENANT = "tenant"  # any key, if keys are configured
    OPERATOR = "operator"  # an administrator key, if such are configured; else as TENANT
    ADMIN = "admin"  # an administrator key; without any keys at all, a caller on this machine


ACCESS = {
    "/health": Access.PUBLIC,
    "/readyz": Access.PUBLIC,
    "/livez": Access.PUBLIC,
    "/version": Access.PUBLIC,
    "/metrics": Access.OPERATOR,  # its global hit counters tell tenants of each other
    "/reset_prefix_cache": Access.ADMIN,
}


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller whose key is known, or anyone where no keys are configured."""

    label: str = ""  # for logs; says nothing about the key
    domain: bytes = b""  # isolation domain of the cache
    is_admin: bool = False


ANYONE = Principal()


class Authenticator:
    """The configured keys. Raises ConfigError for keys that could not protect anything."""

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str], secret: bytes) -> None:
        tenants, admins = tuple(dict.fromkeys(keys)), tuple(dict.fromkeys(admin_keys))
        if not all((*tenants, *admins)):
            raise ConfigError("an API key is empty; give it at least one character or leave the option out")
        if set(tenants) & set(admins):
            raise ConfigError("an API key is also an administrator key; they must differ")
        self._has_tenants, self._has_admins = bool(tenants), bool(admins)
        self._known = [
            (_digest(key.encode()), _principal(key, secret, is_admin, separate=bool(tenants)))
            for is_admin, group in ((False, tenants), (True, admins))
            for key in group
        ]

    def authorise(self, scope: Scope) -> Principal:
        """Returns who is asking for `scope["path"]`. Raises HttpError 401 or 403 if they may not."""
        access = ACCESS.get(scope["path"], Access.TENANT)
        if access is Access.PUBLIC:
            return ANYONE
        principal = self._identify(scope["headers"])
        if access is Access.OPERATOR:
            access = Access.ADMIN if self._has_admins else Access.TENANT
        if access is Access.TENANT:
            if principal is None and self._has_tenants:
                raise _unauthorised()
            return principal or ANYONE
        return self._authorise_admin(principal, scope)

    def _authorise_admin(self, principal: Principal | None, scope: Scope) -> Principal:
        if not self._known:
            if _is_local(scope):
                return Principal(is_admin=True)
            raise _forbidden("this needs an administrator key; start the server with --admin-api-key to allow it")
        if principal is None:
            raise _unauthorised()
        if not principal.is_admin:
            raise _forbidden("this key is not an administrator's; use one given by --admin-api-key")
        return principal

    def _identify(self, headers: list[tuple[bytes, bytes]]) -> Principal | None:
        """Returns whose key it is; looks at every key whatever matches, so that time tells nothing."""
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1:
            return None
        scheme, _, key = values[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest, found = _digest(key.strip()), None
        for known, principal in self._known:
            if hmac.compare_digest(known, digest):
                found = principal
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _principal(key: str, secret: bytes, is_admin: bool, *, separate: bool) -> Principal:
    """Sub-keys per purpose: what a log shows cannot be turned into a domain."""
    name = _digest(key.encode())
    domain = hmac.digest(secret, b"domain" + name, "sha256") if separate else b""
    return Principal(hmac.digest(secret, b"label" + name, "sha256").hex()[:12], domain, is_admin)


def _is_local(scope: Scope) -> bool:
    """Whether the connection comes from this machine and nothing says that it was passed on, or sent by a web page."""
    client = scope.get("client")
    if client is None or any(name in _FORWARDED for name, _ in scope["headers"]):
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def _unauthorised() -> HttpError:
    return HttpError(
        401,
        "a valid API key is needed; send it as: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, code="permission_denied")
