"""Gate: ASGI middleware that gives every request a record and an id, checks host and key, and logs it."""

import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.http.access_record import AccessRecord
from headstart.http.auth import Authenticator
from headstart.http.http_errors import ApiHttpRules, HttpError, error_response
from headstart.http.logs import ServerLog
from headstart.http.tracing.tracer import Tracer
from headstart.http.web_pages import WebPageAccess


class GateHost(Protocol):
    """The state that a gate needs, implemented by the server and the router."""

    auth: Authenticator
    pages: WebPageAccess
    log: ServerLog
    tracer: Tracer | None

    def record_request_error(self, record: AccessRecord, error: Exception) -> None:
        """Set `error` on the record, and log it if it is not the client's mistake."""
        ...

    def count_and_decide_logging(self, record: AccessRecord) -> bool:
        """Count a finished request; return whether to log its access line."""
        ...


class AccessMiddleware:
    """ASGI middleware: creates each request's record and id, checks its key, and writes its access line."""

    def __init__(
        self, app: ASGIApp, state: GateHost, api_of: Callable[[str], ApiHttpRules], *, root_path: str = ""
    ) -> None:
        """`api_of` returns the rules of the API that a path belongs to; `root_path` is taken off paths that have it."""
        self._app = app
        self._root = "/" + root_path.strip("/") if root_path.strip("/") else ""
        self._api_of = api_of
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._root and scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        record = AccessRecord.create_in_scope(scope)
        api = self._api_of(record.path)
        own = [*request_id_headers(api, record.request_id), *self._state.pages.cors_headers(scope)]

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        try:
            await self._serve(api, record, scope, receive, send_identified)
        finally:
            self._settle(record)

    async def _serve(self, api: ApiHttpRules, record: AccessRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._state.pages.check_host(scope)
            preflight = self._state.pages.answer_preflight(scope)
            if preflight is None:
                record.principal = self._state.auth.authorise(scope, takes_x_api_key=api.takes_x_api_key)
        except HttpError as error:
            record.error = error.code
            await error_response(error, api, record.request_id)(scope, receive, send)
            return
        if preflight is not None:
            await preflight(scope, receive, send)
            return
        tracer = self._state.tracer
        if tracer is not None and api.operation and record.path == api.path and record.method == "POST":
            record.trace = tracer.begin(record, api.operation, scope["headers"])  # no one without a key fills the queue
        if scope["method"] == "HEAD":  # the protocol leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # not expected: handlers convert their exceptions
            self._state.record_request_error(record, error)
            if record.status is not None:
                raise  # the response has started: the server must cut the connection
            await error_response(error, api, record.request_id)(scope, receive, send)

    def _settle(self, record: AccessRecord) -> None:
        status = 499 if record.error == "client_closed" else record.status
        record.status = 499 if status is None else status
        if self._state.tracer is not None:
            self._state.tracer.end_trace(record, time.monotonic())
        if self._state.count_and_decide_logging(record):
            now = time.monotonic()
            self._state.log.event("request", record.fields(now), text=record.text(now))


def request_id_headers(api: ApiHttpRules, request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the headers by which every answer names its request."""
    value = request_id.encode("latin-1")
    named = [(b"x-request-id", value)]
    return named if api.id_header is None else [*named, (api.id_header, value)]
