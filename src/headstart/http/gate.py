"""The gate in front of an application: every request gets a record and an id, is authorised, and is logged."""

import time
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.http.access_record import RequestRecord
from headstart.http.auth import Authenticator
from headstart.http.http_errors import HttpError, error_response
from headstart.http.logs import Log


class Host(Protocol):
    """Whose gate it is: a server, or a router in front of servers."""

    @property
    def auth(self) -> Authenticator: ...

    @property
    def log(self) -> Log: ...

    def note(self, record: RequestRecord, error: Exception) -> None:
        """Put `error` on the record, and on the log what is not the client's own."""
        ...

    def answered(self, record: RequestRecord) -> bool:
        """A request is over; whether its access line is wanted."""
        ...


class Gate:
    """Gives every request a record and an id, checks its key, and writes its access line."""

    def __init__(self, app: ASGIApp, state: Host) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        record = RequestRecord.of(scope)
        identity = (b"x-request-id", record.request_id.encode("latin-1"))

        async def send_identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], identity]}
            await send(message)

        try:
            await self._serve(record, scope, receive, send_identified)
        finally:
            self._settle(record)

    async def _serve(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            record.principal = self._state.auth.authorise(scope)
        except HttpError as error:
            record.error = error.code
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # nobody below was meant to let it through
            self._state.note(record, error)
            if record.status is not None:
                raise  # half an answer is out: the server must cut the connection
            await error_response(error)(scope, receive, send)

    def _settle(self, record: RequestRecord) -> None:
        status = 499 if record.error == "client_closed" else record.status
        record.status = 499 if status is None else status
        if self._state.answered(record):
            now = time.monotonic()
            self._state.log.event("request", record.fields(now), text=record.text(now))
