"""One HTTP call to a running server, for the verbs that query or administer it. Standard library only."""

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from headstart.core.errors import HeadstartError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("HEADSTART_ADMIN_API_KEY", "HEADSTART_API_KEY")  # the first key of the first that is set
TIMEOUT = 60.0  # seconds


def key_from(environ: Mapping[str, str]) -> str | None:
    """Return the API key from the environment, None if unset. Not from argv, which every user of a machine can read."""
    values = (environ.get(variable, "").split(",")[0].strip() for variable in KEY_VARIABLES)
    return next((value for value in values if value), None)


def call_server(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON response of a server. Raises HeadstartError with its message, or why it cannot be reached."""
    address = url.rstrip("/").removesuffix("/v1")
    headers = {"content-type": "application/json"}
    if key := key_from(os.environ):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(address + path, data, headers, method=method), timeout=TIMEOUT) as answer:
            text = answer.read()
            return json.loads(text) if text else None
    except HTTPError as error:
        raise HeadstartError(_error_message(error, bool(key))) from error
    except (URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise HeadstartError(
            f"no server answers at {address} ({reason}); start one, or name another with --url"
        ) from error
    except ValueError as error:
        raise HeadstartError(f"{address} is not a headstart server, or not an address ({error})") from error


def _error_message(error: HTTPError, has_key: bool) -> str:
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"the server answered {error.code} {error.reason}"
    hint = "" if has_key or error.code not in (401, 403) else f" (the key is read from {' or '.join(KEY_VARIABLES)})"
    return f"{message}{hint}"
