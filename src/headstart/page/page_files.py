"""PageFiles: the files of the live page, and their headers. They hold no data: the page fetches all it shows.

The content security policy allows scripts, styles and requests of this server only, and no page may embed the page.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from headstart.http.http_errors import HttpError

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_OWN = "'self'"
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_OWN}; style-src {_OWN}; connect-src {_OWN}; img-src {_OWN}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageFiles:
    """The files by path. `is_on` False: there are none."""

    def __init__(self, *, is_on: bool) -> None:
        self._files: dict[str, tuple[bytes, str, str]] = {}  # path -> content, media type, entity tag
        for file in sorted(FOLDER.iterdir()) if is_on else ():
            data = file.read_bytes()
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            self._files[path] = data, _TYPES[file.suffix], f'"{hashlib.sha256(data).hexdigest()[:16]}"'

    def file_response(self, request: Request) -> Response:
        """Return the file at a path. Raises HttpError 404 if there is none."""
        found = self._files.get(request.scope["path"])
        if found is None:
            raise HttpError(404, "there is no such route; see /openapi.json", code="unknown_route")
        data, media_type, tag = found
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=media_type)
