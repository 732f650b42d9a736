"""GrpcConnection: one HTTP/2 connection of a gRPC client, on the event loop that also picks replicas.

`grpcio` moves every message between its own threads and the event loop, which costs more CPU time than the messages
themselves, and `h2` costs five times the CPU time of this file, without limits for floods (benchmarks/experiments.md).
The client is a proxy: no TLS, no compression. It is not trusted: frames are handled in slices between which the loop
does other work, those that no call needs have a budget, and windows, calls and bytes are bounded (peer_limits.py).
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import hpack

from headstart.gateway.picker import http2_frames as h2
from headstart.gateway.picker.grpc_calls import (
    EARNING_BYTES,
    PER_CALL,
    PER_MESSAGE,
    PER_SENT,
    WAITING_SECONDS,
    ConnectionFrameBudget,
    GrpcConnectionCalls,
    GrpcConnectionTable,
    Handler,
)
from headstart.gateway.picker.grpc_stream import STREAM_WINDOW, GrpcError, GrpcStatusCode, GrpcStream
from headstart.gateway.picker.http2_frames import FrameHeader, Http2Error
from headstart.http.sse import WRITE_SECONDS

CONNECTION_WINDOW = 16 << 20  # bytes on their way on all streams; those that arrived are bounded by peer_limits.py
CLOSING_SECONDS = 2.0  # for a client to read the end of its connection
LATE_SECONDS = 0.002  # for the ends of calls, for which no client waits
MAX_HEADER_BYTES = 64 << 10
MAX_CONTINUATIONS = 8  # frames of one header block: as many as its bytes need, and some
HEADER_UNIT = 64  # bytes of headers that cost as much to decode as a frame
MAX_PATHS = 64
SLICE = 256  # frames, messages and units of headers that are handled before those of other connections


class GrpcConnection(asyncio.Protocol):
    """One connection. `handlers` are the methods of all services, by path; `failed` receives unexpected errors."""

    def __init__(
        self, handlers: Mapping[str, Handler], callers: GrpcConnectionTable, failed: Callable[[Exception], None]
    ) -> None:
        self._callers = callers
        self._calls = GrpcConnectionCalls(self, handlers, callers, failed)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._file = -1
        self._buffer = bytearray()
        self._has_preface = False
        self._is_closing = False
        self._budget = ConnectionFrameBudget(self._loop.time())
        self._work = 0  # of this slice
        self._is_queued = False  # frames wait for their turn
        self._sweep: asyncio.TimerHandle | None = None
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._block: tuple[FrameHeader, bytearray, int] | None = None  # headers that are continued, by how many frames
        self._paths: dict[bytes, str] = {}  # by headers, until the decoder's table changes
        self._last_id = 0
        self._uncredited = 0
        self._replies: list[bytes] = []  # to frames of this slice
        self._send_window = h2.DEFAULT_WINDOW
        self._peer_window = h2.DEFAULT_WINDOW  # of a new stream
        self._room: asyncio.Future[None] | None = None  # done when a window or the socket has room again
        self._is_paused = False  # writing
        self._is_reading = True
        self._late: list[bytes] = []

    # ------------------------------------------------------------------------------------------------------- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._callers.admit(self):
            self._is_closing = True
            self._transport.abort()
            return
        socket = transport.get_extra_info("socket")
        self._file = -1 if socket is None else socket.fileno()
        opening = h2.settings_frame(
            max_streams=self._callers.max_calls, window=STREAM_WINDOW, header_list=MAX_HEADER_BYTES
        )
        self._transport.write(opening + h2.window_update_frame(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW))
        self._sweep = self._loop.call_later(WAITING_SECONDS, self._end_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._is_closing = True
        self._buffer.clear()
        if self._sweep is not None:
            self._sweep.cancel()
        self._callers.remove(self)
        self._calls.close()

    def pause_writing(self) -> None:
        self._is_paused = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._update_reading()
        self._has_room()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._buffer += data
        if not self._is_queued:
            self._is_queued = True
            self._callers.handle_or_queue_frames(self)
            self._update_reading()

    def handle_some_frames(self) -> tuple[int, bool]:
        """Handle some frames; return the work that they took, and whether there are more."""
        self._is_queued, self._work = False, 0
        if self._is_closing:
            return 0, False
        self._budget.refill(self._loop.time())
        try:
            self._is_queued = self._parse()
        except Http2Error as error:
            self._abort(error.code)
        except hpack.HPACKError:
            self._abort(h2.COMPRESSION_ERROR)
        self._reply()
        self._update_reading()
        return self._work, self._is_queued

    def _update_reading(self) -> None:
        """Read no more while frames wait for their slice, or replies for the client."""
        is_reading = not (self._is_paused or self._is_queued)
        if self._transport is None or self._is_closing or is_reading == self._is_reading:
            return
        self._is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _end_late(self) -> None:
        """End calls, and a connection, that have begun and do not go on."""
        if not self._has_preface:
            self._abort(h2.PROTOCOL_ERROR)
            return
        self._calls.end_calls_without_message(self._loop.time())
        self._sweep = self._loop.call_later(WAITING_SECONDS, self._end_late)

    def send(self, data: bytes = b"") -> None:
        """Send frames at once: uvloop would write them only when the caller has done the rest of its work."""
        if self._late:
            data = b"".join((*self._late, data))
            self._late.clear()
        if self._transport is None or not data:
            return
        if self._file >= 0 and not self._transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # it is full, or broken: the transport waits, or reports it
                data = data[os.write(self._file, data) :]
        if data:
            self._transport.write(data)

    def send_later(self, data: bytes) -> None:
        """Send frames together with the next ones, at the latest after LATE_SECONDS: a write costs a system call."""
        self._late.append(data)
        if len(self._late) == 1:
            self._loop.call_later(LATE_SECONDS, self.send)

    def count_held_bytes(self, num_bytes: int) -> None:
        """Count bytes of messages that are held; negative ones are freed. The call may end by it."""
        self._callers.count_bytes_shedding_calls(num_bytes)

    def end_call(self, stream_id: int, status: GrpcStatusCode, message: str) -> None:
        """End a call that may be running: it is cancelled."""
        self._calls.end(stream_id, status, message)

    def calls(self) -> Iterable[GrpcStream]:
        """Return the open calls."""
        return self._calls.open.values()

    def close_idle(self) -> None:
        """Close the connection, which has no call."""
        self._abort(h2.NO_ERROR)

    def close(self) -> None:
        """Close the connection; its calls are cancelled."""
        self._abort(h2.NO_ERROR)

    async def send_data(self, stream: GrpcStream, stream_id: int, opening: bytes, data: bytes) -> None:
        """Send the data of one stream, after the frame `opening`, within the client's windows."""
        frames, start = [opening], 0
        while start < len(data):
            window = min(self._send_window, stream.send_window + self._peer_window)
            size = min(len(data) - start, h2.FRAME_BYTES, window)
            if size <= 0 or self._is_paused:
                self.send(b"".join(frames))
                frames.clear()
                await self._wait_for_room(stream)
                continue
            self._budget.grant_frames(PER_SENT)
            frames.append(h2.make_frame(h2.DATA, 0, stream_id, data[start : start + size]))
            start += size
            self._send_window -= size
            stream.send_window -= size
        self.send(b"".join(frames))

    async def _wait_for_room(self, stream: GrpcStream) -> None:
        if self._room is None or self._room.done():
            self._room = self._loop.create_future()
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await asyncio.shield(self._room)  # other calls wait for it, too
        except TimeoutError:
            await stream.abort(GrpcStatusCode.DEADLINE_EXCEEDED, "the client does not read")

    def _has_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _reply(self) -> None:
        if self._replies:
            replies, self._replies = b"".join(self._replies), []
            self.send(replies)

    def _abort(self, code: int) -> None:
        self._reply()
        self.send()
        if self._transport is not None and not self._is_closing:
            self._is_closing = True
            last = self._last_id.to_bytes(4) + code.to_bytes(4)
            self._transport.write(h2.make_frame(h2.GOAWAY, 0, 0, last))
            self._transport.close()
            self._buffer.clear()
            self._loop.call_later(CLOSING_SECONDS, self._transport.abort)

    # ---------------------------------------------------------------------------------------------------------- frames

    def _parse(self) -> bool:
        """Handle the frames in the buffer; return whether complete ones are left for another slice."""
        buffer, at = self._buffer, 0
        if not self._has_preface:
            if not h2.PREFACE.startswith(buffer[: len(h2.PREFACE)]):
                raise Http2Error(h2.PROTOCOL_ERROR, "no HTTP/2")
            if len(buffer) < len(h2.PREFACE):
                return False
            self._has_preface, at = True, len(h2.PREFACE)
        is_more = False
        while len(buffer) - at >= h2.HEAD_BYTES:
            head = h2.read_frame_header(buffer, at)
            if head.length > h2.FRAME_BYTES:
                raise Http2Error(h2.FRAME_SIZE_ERROR, "a frame that is too long")
            end = at + h2.HEAD_BYTES + head.length
            if end > len(buffer):
                break
            is_more = self._work >= SLICE
            if is_more:
                break
            self._work += 1
            self._spend(1)
            self._on_frame(head, bytes(buffer[at + h2.HEAD_BYTES : end]))
            at = end
        if at:
            del buffer[:at]
        return is_more

    def _spend(self, count: float) -> None:
        if not self._budget.spend_frames(count):
            raise Http2Error(h2.TOO_MUCH, "too many frames that no call needs")

    def _on_frame(self, head: FrameHeader, payload: bytes) -> None:
        if (head.kind == h2.CONTINUATION) != (self._block is not None):
            raise Http2Error(h2.PROTOCOL_ERROR, "headers are interrupted, or continued without a beginning")
        if head.kind == h2.DATA:
            self._on_data(head, payload)
        elif head.kind == h2.HEADERS:
            self._on_headers(head, bytearray(h2.strip_padding_and_priority(head, payload)))
        elif head.kind == h2.CONTINUATION:
            first, block, count = self._block or (head, bytearray(), 0)
            is_long = len(block) + len(payload) > MAX_HEADER_BYTES or count == MAX_CONTINUATIONS
            if first.stream_id != head.stream_id or is_long:
                raise Http2Error(h2.TOO_MUCH, "headers of another stream, or too long")
            block += payload
            self._on_headers(first._replace(flags=first.flags | head.flags & h2.END_HEADERS), block, count + 1)
        elif head.kind == h2.RST_STREAM:
            self._calls.on_stream_reset(head.stream_id)
        elif head.kind == h2.SETTINGS:
            self._on_settings(head, payload)
        elif head.kind == h2.WINDOW_UPDATE:
            self._on_window(head, payload)
        elif head.kind == h2.PING and not head.flags & h2.ACK:
            if head.length != 8:
                raise Http2Error(h2.FRAME_SIZE_ERROR, "a PING frame of another length than 8")
            self._replies.append(h2.make_frame(h2.PING, h2.ACK, 0, payload))
        elif head.kind == h2.PUSH_PROMISE:
            raise Http2Error(h2.PROTOCOL_ERROR, "a client pushes")

    def _on_data(self, head: FrameHeader, payload: bytes) -> None:
        if not 0 < head.stream_id <= self._last_id:
            raise Http2Error(h2.PROTOCOL_ERROR, "data of a stream that was never opened")
        self._budget.grant_frames(head.length / EARNING_BYTES)
        self._uncredited += head.length
        if self._uncredited >= CONNECTION_WINDOW // 4:
            self._replies.append(h2.window_update_frame(0, self._uncredited))
            self._uncredited = 0
        stream = self._calls.open.get(head.stream_id)
        if stream is None:
            return  # the call has ended here
        try:
            count = stream.feed_data(h2.strip_padding_and_priority(head, payload), head.length)
        except GrpcError as error:
            self._calls.end(head.stream_id, error.status, str(error))
            return
        self._work += count
        self._budget.grant_frames(PER_MESSAGE * min(count, 1))
        if head.flags & h2.END_STREAM:
            stream.on_client_end()
        if stream.is_ready and self._calls.begin_waiting_call(head.stream_id):
            self._budget.grant_frames(PER_CALL)

    def _on_headers(self, head: FrameHeader, block: bytearray, num_continuations: int = 0) -> None:
        if not head.flags & h2.END_HEADERS:
            self._block = (head, block, num_continuations)
            return
        self._block = None
        path = self._path_in(bytes(block))
        stream = self._calls.open.get(head.stream_id)
        if stream is not None:  # trailers
            stream.on_client_end()
            self._calls.begin_waiting_call(head.stream_id)
            return
        if not head.stream_id % 2 or head.stream_id <= self._last_id:
            raise Http2Error(h2.PROTOCOL_ERROR, "a stream id that may not be opened")
        self._last_id = head.stream_id
        if not self._calls.try_add(head.stream_id, path, is_over=bool(head.flags & h2.END_STREAM)):
            self._replies.append(h2.make_frame(h2.RST_STREAM, 0, head.stream_id, h2.REFUSED.to_bytes(4)))

    def _path_in(self, block: bytes) -> str:
        """Decode headers; return the path. Headers that leave the decoder's table as it is mean the same again."""
        path = self._paths.get(block)
        if path is None:
            self._work += len(block) // HEADER_UNIT
            self._spend(len(block) // HEADER_UNIT)
            table = self._decoder.header_table
            before = (table.maxsize, *table.dynamic_entries)
            fields = self._decoder.decode(block, raw=True)
            path = next((value for name, value, *_ in fields if name == b":path"), b"").decode("latin-1")
            if before != (table.maxsize, *table.dynamic_entries):
                self._paths.clear()
            elif len(self._paths) < MAX_PATHS:
                self._paths[block] = path
        return path

    def _on_settings(self, head: FrameHeader, payload: bytes) -> None:
        if head.flags & h2.ACK:
            return
        self._spend(head.length // h2.SETTING_BYTES)
        self._work += head.length // h2.SETTING_BYTES
        values = h2.parse_settings(payload)
        self._peer_window = values.get(h2.WINDOW_SETTING, self._peer_window)
        self._replies.append(h2.make_frame(h2.SETTINGS, h2.ACK, 0))
        self._has_room()

    def _on_window(self, head: FrameHeader, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(h2.FRAME_SIZE_ERROR, "a WINDOW_UPDATE frame of another length than 4")
        increment = int.from_bytes(payload) & h2.MAX_WINDOW
        stream = self._calls.open.get(head.stream_id)
        if not head.stream_id:
            self._send_window += increment
        elif stream is not None:
            stream.send_window += increment
        largest = max(self._send_window, stream.send_window + self._peer_window if stream else 0)
        if not increment or largest > h2.MAX_WINDOW:
            raise Http2Error(h2.FLOW_CONTROL_ERROR, "a window that is too large, or not enlarged")
        self._has_room()
