"""Authentication: API keys, administrator keys, and the tenant and isolation domain of a key.

Decisions use the raw ASGI path, never a URL rebuilt from headers. Unknown paths are denied by default: a new route
needs a key until it is listed here. Keys are compared by digest in constant time. A tenant is a [[tenant]] of
headstart.toml with all its keys, or a single --api-key. Tenants share no cache blocks except public ones: a tenant's
domain is an HMAC of its name or key with a secret, so clients cannot compute or guess it. The secret lives as long as
the process, or as the store: a process that is to find a tenant's stored blocks must derive the same domain. Logs
identify a key by an HMAC with another secret, which is never persisted.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from headstart.config.options import TenantEntry
from headstart.core.errors import ConfigError, InvalidRequestError
from headstart.http.http_errors import HttpError
from headstart.http.web_pages import has_known_host, is_loopback, is_proxy_or_page_header

Scope = Any  # starlette's: a mutable mapping
_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequiredAccess(Enum):
    """The access level that a route requires."""

    PUBLIC = "public"
    TENANT = "tenant"  # any key, if keys are configured
    OWN = "own"  # any tenant's key, for the tenant's own data; as ADMIN if no tenant has a key
    OPERATOR = "operator"  # an administrator key if any is configured; else as TENANT
    MONITOR = "monitor"  # as OPERATOR; without any keys at all as ADMIN
    ADMIN = "admin"  # an administrator key; without any keys at all, a client on this machine


ACCESS = {
    "/": RequiredAccess.PUBLIC,  # the live page, which has no data
    "/health": RequiredAccess.PUBLIC,
    "/readyz": RequiredAccess.PUBLIC,
    "/livez": RequiredAccess.PUBLIC,
    "/version": RequiredAccess.PUBLIC,
    "/ping": RequiredAccess.PUBLIC,
    "/load": RequiredAccess.OPERATOR,  # as /metrics
    "/metrics": RequiredAccess.OPERATOR,  # its global hit counters reveal the traffic of other tenants
    "/reset_prefix_cache": RequiredAccess.ADMIN,
    "/v1/prefixes": RequiredAccess.ADMIN,  # public prefixes affect all tenants
    "/v1/cache/stats": RequiredAccess.OPERATOR,  # as /metrics
    "/v1/cache/explain": RequiredAccess.OWN,  # shows parts of prompts
    "/v1/cache/requests": RequiredAccess.OWN,  # shows prompts
    "/v1/cache/tree": RequiredAccess.OWN,  # shows parts of prompts
    "/v1/cache/live": RequiredAccess.OWN,
    "/v1/fleet": RequiredAccess.ADMIN,  # of a router: addresses and load of replicas
}
_ADMIN_TREE = "/v1/prefixes/"  # and all paths below
_PUBLIC_TREE = "/page/"  # the files of the live page


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated client, or any client if no keys are configured."""

    label: str = ""  # for logs: the tenant's name, or an HMAC of the key
    domain: bytes = b""  # isolation domain of the cache
    is_admin: bool = False
    tenant: str = ""  # the tenant whose share of the cache it uses: the label, or "" if no tenant has a key


ANYONE = Principal()


class Authenticator:
    """The configured keys. Raises ConfigError for empty keys and for keys that are given twice."""

    def __init__(
        self,
        keys: Iterable[str],
        admin_keys: Iterable[str],
        secret: bytes,
        tenants: Iterable[TenantEntry] = (),
        *,
        label_secret: bytes | None = None,
        access: Mapping[str, RequiredAccess] = ACCESS,
        host_names: frozenset[str] = frozenset(),
    ) -> None:
        """Domains derive from `secret`, labels of keys in logs from `label_secret` (default: the same).

        `access` is the access level by path; paths that are not in it need a tenant's key. `host_names`: further names
        of this machine, by which a client on it may be an administrator.
        """
        labels = secret if label_secret is None else label_secret
        self._access = access
        self._host_names = host_names
        singles, admins, named = tuple(keys), tuple(admin_keys), tuple(tenants)
        _check_keys([("--api-key", singles), *_keys_by_tenant(named), ("--admin-api-key", admins)])
        self._has_tenants, self._has_admins = bool(singles or named), bool(admins)
        self._domains = {entry.name: _domain(secret, b"tenant", entry.name.encode()) for entry in named}
        of_tenants = {name: Principal(name, domain, tenant=name) for name, domain in self._domains.items()}
        of_admins = {key: _of_key(key, secret, labels, separate=self._has_tenants) for key in admins}
        self._known = [
            *((_digest(key.encode()), _of_key(key, secret, labels, separate=True)) for key in singles),
            *((_digest(key.encode()), of_tenants[entry.name]) for entry in named for key in entry.api_keys),
            *((_digest(key.encode()), replace(one, is_admin=True)) for key, one in of_admins.items()),
        ]

    def domain_of_tenant(self, tenant: str) -> bytes:
        """Return the isolation domain of a [[tenant]]. Raises InvalidRequestError for an unknown name."""
        if tenant not in self._domains:
            known = ", ".join(self._domains) or "none"
            raise InvalidRequestError(
                f"tenant {tenant[:64]!a} is not one of those in headstart.toml: {known}", param="tenant"
            )
        return self._domains[tenant]

    def authorise(self, scope: Scope, *, takes_x_api_key: bool = False) -> Principal:
        """Return the client's Principal for `scope["path"]`. Raises HttpError 401 or 403 if access is denied."""
        path = scope["path"]
        access = RequiredAccess.ADMIN if path.startswith(_ADMIN_TREE) else self._access.get(path, RequiredAccess.TENANT)
        if path.startswith(_PUBLIC_TREE):
            access = RequiredAccess.PUBLIC
        if access is RequiredAccess.PUBLIC:
            return ANYONE
        lists_models = path == "/v1/models" or path.startswith("/v1/models/")  # as Anthropic's clients do
        principal = self._identify(scope["headers"], takes_x_api_key=takes_x_api_key or lists_models)
        if access is RequiredAccess.OWN:
            access = RequiredAccess.TENANT if self._has_tenants else RequiredAccess.ADMIN
        if access is RequiredAccess.MONITOR:
            access = RequiredAccess.OPERATOR if self._known else RequiredAccess.ADMIN
        if access is RequiredAccess.OPERATOR:
            access = RequiredAccess.ADMIN if self._has_admins else RequiredAccess.TENANT
        if access is RequiredAccess.TENANT:
            if principal is None and self._has_tenants:
                raise _unauthorised()
            return principal or ANYONE
        return self._authorise_admin(principal, scope)

    def is_admin(self, principal: Principal, scope: Scope) -> bool:
        """Return whether an authorized client also has Access.ADMIN. Changes nothing."""
        return principal.is_admin or (not self._known and self._is_local(scope))

    def _authorise_admin(self, principal: Principal | None, scope: Scope) -> Principal:
        if not self._known:
            if self._is_local(scope):
                return Principal(is_admin=True)
            raise _forbidden("this needs an administrator key; start the server with --admin-api-key to allow it")
        if principal is None:
            raise _unauthorised()
        if not principal.is_admin:
            raise _forbidden("this key is not an administrator's; use one given by --admin-api-key")
        return principal

    def _is_local(self, scope: Scope) -> bool:
        """Return whether the client is on this machine, and nothing shows a proxy or a web page as the origin."""
        client = scope.get("client")
        if client is None or not is_loopback(client[0]) or not has_known_host(scope, self._host_names):
            return False
        return not any(is_proxy_or_page_header(name) for name, _ in scope["headers"])

    def _identify(self, headers: list[tuple[bytes, bytes]], *, takes_x_api_key: bool) -> Principal | None:
        """Return the Principal of the request's key. Compares all keys, so that timing reveals no match."""
        key = _key_in(headers, takes_x_api_key=takes_x_api_key)
        if key is None:
            return None
        digest, found = _digest(key.strip()), None
        for known, principal in self._known:
            if hmac.compare_digest(known, digest):
                found = principal
        return found


def _key_in(headers: list[tuple[bytes, bytes]], *, takes_x_api_key: bool) -> bytes | None:
    """Return the key of `Authorization: Bearer`, else of `x-api-key` if that is taken; None without exactly one."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values and takes_x_api_key:
        keys = [value for name, value in headers if name == b"x-api-key"]
        return keys[0] if len(keys) == 1 else None
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _keys_by_tenant(tenants: Iterable[TenantEntry]) -> list[tuple[str, tuple[str, ...]]]:
    """Return name and keys of each tenant. Raises ConfigError for invalid or duplicate names, and without keys."""
    groups: dict[str, tuple[str, ...]] = {}
    for entry in tenants:
        if not _TENANT_NAME.fullmatch(entry.name):
            raise ConfigError(f"a tenant is named {entry.name[:64]!a}; use 1 to 64 of A-Z a-z 0-9 . _ -")
        if f"tenant {entry.name}" in groups:
            raise ConfigError(f"tenant {entry.name} is there twice; give all its api_keys in one [[tenant]]")
        if not entry.api_keys:
            raise ConfigError(f"tenant {entry.name} has no api_keys, so no client can use it; give it at least one")
        groups[f"tenant {entry.name}"] = entry.api_keys
    return list(groups.items())


def _check_keys(groups: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Raise ConfigError for an empty key and for a key that is given twice, whose tenant would be ambiguous."""
    holders: dict[str, str] = {}
    for holder, keys in groups:
        for key in keys:
            if not key:
                raise ConfigError(f"{holder} has an empty key; give it at least one character or leave it out")
            if key in holders:
                raise ConfigError(f"{holder} has a key that {holders[key]} has already; every key may be given once")
            holders[key] = holder


def _of_key(key: str, secret: bytes, labels: bytes, *, separate: bool) -> Principal:
    """Return the Principal of a single key. Its label and its domain cannot be derived from each other."""
    name = _digest(key.encode())
    label = hmac.digest(labels, b"label" + name, "sha256").hex()[:12]
    domain = _domain(secret, b"key", name) if separate else b""
    return Principal(label, domain, tenant=label if separate else "")


def _domain(secret: bytes, kind: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, b"domain/" + kind + b"/" + name, "sha256")


def _unauthorised() -> HttpError:
    return HttpError(
        401,
        "a valid API key is needed; send it as: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, code="permission_denied")
