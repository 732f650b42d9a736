"""LiveStreams: streams of figures as server-sent events, one frame each second. Bounded in number and per tenant."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.http.http_errors import HttpError
from headstart.http.long_work import wait_for_disconnect
from headstart.http.sse import HEADERS, WRITE_SECONDS, encode_error_event, encode_event
from headstart.openai.responses import Json
from headstart.openai.value_checks import parse_positive_query_count

FRAME_SECONDS = 1.0
MAX_STREAMS = 64
MAX_STREAMS_PER_TENANT = 8
MAX_FRAMES = 1_000_000
Frame = Callable[[], Awaitable[Json]]


class LiveStreams:
    """The open streams of one server or router."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    async def stream_response(
        self, request: Request, tenant: str, frame: Frame, *, max_frames: int = MAX_FRAMES
    ) -> Response:
        """Return a stream of frames that ends after `frames` of the query, or when `frame` raises an error.

        `max_frames`: of one stream, whatever the query says.

        Raises HttpError 429 for too many streams, InvalidRequestError, and what the first call of `frame` raises.
        """
        num_frames = min(
            parse_positive_query_count("frames", request.query_params.get("frames", str(MAX_FRAMES)), MAX_FRAMES),
            max_frames,
        )
        if self._open.total() >= MAX_STREAMS or self._open[tenant] >= MAX_STREAMS_PER_TENANT:
            message = f"{self._open[tenant]} streams of figures are open and {MAX_STREAMS_PER_TENANT} may be"
            raise HttpError(429, message, code="too_many_streams", headers={"retry-after": "5"})
        return _Stream(await frame(), frame, num_frames, self._open, tenant)


class _Stream(Response):
    """The response; it counts itself as open while it is sent."""

    def __init__(self, first: Json, frame: Frame, num_frames: int, opened: Counter[str], tenant: str) -> None:
        super().__init__(None, 200, HEADERS, "text/event-stream")
        del self.headers["content-length"]
        self._first, self._frame, self._num_frames = first, frame, num_frames
        self._opened, self._tenant = opened, tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._opened[self._tenant] += 1
        gone = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._events(gone, send)
        except TimeoutError:
            pass  # the client does not read
        finally:
            gone.cancel()
            self._opened[self._tenant] -= 1
            if not self._opened[self._tenant]:
                del self._opened[self._tenant]

    async def _events(self, gone: "asyncio.Task[None]", send: Send) -> None:
        data, left = encode_event(self._first), self._num_frames
        while not gone.done():
            left -= 1
            async with asyncio.timeout(WRITE_SECONDS):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if left:
                await asyncio.wait([gone], timeout=FRAME_SECONDS)
                try:
                    data = encode_event(await self._frame())
                    continue
                except Exception as error:
                    data = encode_error_event(error)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
