"""One HTTP call to a running server, for the verbs that query or administer it. Standard library only."""

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener, getproxies, proxy_bypass

from headstart.core.errors import HeadstartError
from headstart.http.web_pages import is_loopback

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("HEADSTART_ADMIN_API_KEY", "HEADSTART_API_KEY")  # the first key of the first that is set
TIMEOUT = 60.0  # seconds


def api_key_from_environ(environ: Mapping[str, str]) -> str | None:
    """Return the API key from the environment, None if unset. Not from argv, which every user of a machine can read."""
    values = (environ.get(variable, "").split(",")[0].strip() for variable in KEY_VARIABLES)
    return next((value for value in values if value), None)


def call_server(
    url: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout: float = TIMEOUT,
    is_stream: bool = False,
) -> Any:
    """Return the JSON response of a server, or with `is_stream` that of the only event of a stream.

    Raises HeadstartError with its message, or why it cannot be reached.
    """
    address = url.rstrip("/").removesuffix("/v1")
    headers = {"content-type": "application/json"}
    if key := api_key_from_environ(os.environ):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    proxy = proxy_for_address(address)
    opener = build_opener() if proxy else build_opener(ProxyHandler({}))
    through = f" through the proxy {proxy}, which the environment names" if proxy else ""
    try:
        with opener.open(Request(address + path, data, headers, method=method), timeout=timeout) as answer:
            text = answer.read()
            if is_stream:
                text = text.removeprefix(b"data: ")
            return json.loads(text) if text else None
    except HTTPError as error:
        raise HeadstartError(_error_message(error, bool(key)) + through) from error
    except (URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise HeadstartError(
            f"no server answers at {address}{through} ({reason}); start one, or name another with --url"
        ) from error
    except ValueError as error:
        raise HeadstartError(f"{address} is not a headstart server, or not an address ({error}){through}") from error


def proxy_for_address(address: str) -> str | None:
    """Return the proxy of the environment for an address, without its password; None for this machine."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    proxy = getproxies().get(parts.scheme)
    if proxy is None or is_loopback(host) or proxy_bypass(host):
        return None
    return proxy.rpartition("@")[2]


def _error_message(error: HTTPError, has_key: bool) -> str:
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"the server answered {error.code} {error.reason}"
    hint = "" if has_key or error.code not in (401, 403) else f" (the key is read from {' or '.join(KEY_VARIABLES)})"
    return f"{message}{hint}"
