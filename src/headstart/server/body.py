"""Reading a request's body: counted while it comes, never longer than allowed, never waited for without end."""

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.core.errors import QueueFullError
from headstart.server.http_errors import ClientGoneError, HttpError, error_response

BODY_SECONDS = 30.0  # between two pieces of a body
ROOM = 64
LINGER_SECONDS = 2.0  # how long a refused body is still read, so that the refusal reaches its sender
LINGER_BYTES = 8 * 1024 * 1024


class BodyReader:
    """Reads bodies of at most `max_bytes`, and holds at most ROOM times as much of unfinished ones."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0  # bytes of bodies whose end has not come yet

    async def read(self, request: Request) -> bytes:
        """Returns the body. Raises HttpError 413, 415, 408, QueueFullError, and ClientGoneError."""
        _check_headers(request, self._max_bytes)
        body = bytearray()
        try:
            while True:
                piece, is_last = await _next_piece(request)
                body += piece
                self._held += len(piece)
                if len(body) > self._max_bytes:
                    raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
                if is_last:
                    return bytes(body)
                if self._held > ROOM * self._max_bytes:
                    raise QueueFullError(f"{self._held} bytes of unfinished bodies are held: try again later")
        finally:
            self._held -= len(body)


class Refusal(Response):
    """The answer to a body that is too large: sent first, then a bounded rest of the body is read and dropped.

    A connection closed on unread data is reset, and a reset may overtake the answer.
    """

    def __init__(self, error: HttpError) -> None:
        answer = error_response(error)
        super().__init__(answer.body, answer.status_code, dict(answer.headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_CLOSE = {"connection": "close"}


async def _next_piece(request: Request) -> tuple[bytes, bool]:
    """Returns some bytes, and whether they are the last."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            message = await request.receive()
    except TimeoutError:
        text = f"no more of the body came within {BODY_SECONDS:.0f} s"
        raise HttpError(408, text, code="timeout", headers=_CLOSE) from None
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), not message.get("more_body")


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = "the body must be JSON; send it with the header Content-Type: application/json"
        raise HttpError(415, message, code="unsupported_media_type", headers=_CLOSE)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        message = "compressed bodies are not read; send the body without Content-Encoding"
        raise HttpError(415, message, code="unsupported_media_type", headers=_CLOSE)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(length[:20], max_bytes)


def _too_large(size: str, max_bytes: int) -> HttpError:
    message = f"the body has {size} bytes; at most {max_bytes} are read: send less, or raise --max-body-bytes"
    return HttpError(413, message, code="body_too_large", headers=_CLOSE)


async def _drop(receive: Receive) -> None:
    dropped = 0
    while dropped < LINGER_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
