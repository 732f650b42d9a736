"""GrpcConnection: one HTTP/2 connection of a gRPC client, on the event loop that also picks replicas.

`grpcio` moves every message between its own threads and the event loop, which costs more CPU time than the messages
themselves (docs/experiments.md). The client is a proxy: no TLS, no compression.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

import hpack

from headstart.gateway.picker import http2_frames as h2
from headstart.gateway.picker.grpc_stream import STREAM_WINDOW, GrpcError, GrpcStream, Status
from headstart.gateway.picker.http2_frames import FrameHead, Http2Error

CONNECTION_WINDOW = 16 << 20  # bytes that a client may send on all streams before they arrive here
MAX_STREAMS = 65_536
LATE_SECONDS = 0.002  # for the ends of calls, for which no client waits
MAX_HEADER_BYTES = 64 << 10
MAX_PATHS = 64


Handler = Callable[[GrpcStream], Coroutine[Any, Any, None] | None]
"""Begins a call when its first message is there; returns the rest of it, None: the call has ended."""


class GrpcConnection(asyncio.Protocol):
    """One connection. `handlers` are the methods of all services, by path; `failed` receives unexpected errors."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        connections: "set[GrpcConnection]",
        failed: Callable[[Exception], None],
    ) -> None:
        self._handlers = handlers
        self._connections = connections
        self._failed = failed
        self._transport: asyncio.Transport | None = None
        self._file = -1
        self._buffer = bytearray()
        self._has_preface = False
        self._decoder = hpack.Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._block: tuple[FrameHead, bytearray] | None = None  # headers that are continued
        self._paths: dict[bytes, str] = {}  # by headers, until the decoder's table changes
        self._waiting: dict[int, str] = {}  # calls without a message yet, and their paths
        self._streams: dict[int, GrpcStream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last_id = 0
        self._uncredited = 0
        self._send_window = h2.DEFAULT_WINDOW
        self._peer_window = h2.DEFAULT_WINDOW  # of a new stream
        self._room: asyncio.Future[None] | None = None  # done when a window or the socket has room again
        self._is_paused = False
        self._late: list[bytes] = []

    # ------------------------------------------------------------------------------------------------------- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        socket = transport.get_extra_info("socket")
        self._file = -1 if socket is None else socket.fileno()
        opening = h2.settings_frame(max_streams=MAX_STREAMS, window=STREAM_WINDOW, header_list=MAX_HEADER_BYTES)
        self._transport.write(opening + h2.window_frame(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        for task in self._tasks.values():
            task.cancel()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._has_room()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            self._parse()
        except Http2Error as error:
            self._abort(error.code)
        except hpack.HPACKError:
            self._abort(h2.COMPRESSION_ERROR)

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
            asyncio.get_running_loop().call_later(LATE_SECONDS, self.send)

    def close(self) -> None:
        """Close the connection; its calls are cancelled."""
        self._abort(h2.NO_ERROR)

    async def send_data(self, stream: GrpcStream, stream_id: int, opening: bytes, data: bytes) -> None:
        """Send the data of one stream, after the frame `opening`, within the client's windows."""
        frames, start = [opening], 0
        while start < len(data):
            size = min(len(data) - start, h2.FRAME_BYTES, self._send_window, stream.send_window)
            if size <= 0 or self._is_paused:
                self.send(b"".join(frames))
                frames.clear()
                await self._wait_for_room()
                continue
            frames.append(h2.frame(h2.DATA, 0, stream_id, data[start : start + size]))
            start += size
            self._send_window -= size
            stream.send_window -= size
        self.send(b"".join(frames))

    async def _wait_for_room(self) -> None:
        if self._room is None or self._room.done():
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)  # other calls wait for it, too

    def _has_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _abort(self, code: int) -> None:
        self.send()
        if self._transport is not None:
            last = self._last_id.to_bytes(4) + code.to_bytes(4)
            self._transport.write(h2.frame(h2.GOAWAY, 0, 0, last))
            self._transport.close()

    # ---------------------------------------------------------------------------------------------------------- frames

    def _parse(self) -> None:
        buffer, at = self._buffer, 0
        if not self._has_preface:
            if not h2.PREFACE.startswith(buffer[: len(h2.PREFACE)]):
                raise Http2Error(h2.PROTOCOL_ERROR, "no HTTP/2")
            if len(buffer) < len(h2.PREFACE):
                return
            self._has_preface, at = True, len(h2.PREFACE)
        while len(buffer) - at >= h2.HEAD_BYTES:
            head = h2.read_head(buffer, at)
            if head.length > h2.FRAME_BYTES:
                raise Http2Error(h2.FRAME_SIZE_ERROR, "a frame that is too long")
            end = at + h2.HEAD_BYTES + head.length
            if end > len(buffer):
                break
            self._on_frame(head, bytes(buffer[at + h2.HEAD_BYTES : end]))
            at = end
        if at:
            del buffer[:at]

    def _on_frame(self, head: FrameHead, payload: bytes) -> None:
        if (head.kind == h2.CONTINUATION) != (self._block is not None):
            raise Http2Error(h2.PROTOCOL_ERROR, "headers are interrupted, or continued without a beginning")
        if head.kind == h2.DATA:
            self._on_data(head, payload)
        elif head.kind == h2.HEADERS:
            self._on_headers(head, bytearray(h2.unpadded(head, payload)))
        elif head.kind == h2.CONTINUATION:
            first, block = self._block or (head, bytearray())
            if first.stream_id != head.stream_id or len(block) + len(payload) > MAX_HEADER_BYTES:
                raise Http2Error(h2.TOO_MUCH, "headers of another stream, or too long")
            self._on_headers(first._replace(flags=first.flags | head.flags & h2.END_HEADERS), block + payload)
        elif head.kind == h2.RST_STREAM:
            self._on_reset(head)
        elif head.kind == h2.SETTINGS:
            self._on_settings(head, payload)
        elif head.kind == h2.WINDOW_UPDATE:
            self._on_window(head, payload)
        elif head.kind == h2.PING and not head.flags & h2.ACK:
            self.send(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif head.kind == h2.PUSH_PROMISE:
            raise Http2Error(h2.PROTOCOL_ERROR, "a client pushes")

    def _on_data(self, head: FrameHead, payload: bytes) -> None:
        if not 0 < head.stream_id <= self._last_id:
            raise Http2Error(h2.PROTOCOL_ERROR, "data of a stream that was never opened")
        self._uncredited += head.length
        if self._uncredited >= CONNECTION_WINDOW // 4:
            self.send(h2.window_frame(0, self._uncredited))
            self._uncredited = 0
        stream = self._streams.get(head.stream_id)
        if stream is None:
            return  # the call has ended here
        try:
            stream.received(h2.unpadded(head, payload), head.length)
        except GrpcError as error:
            self._waiting.pop(head.stream_id, None)
            self._end(head.stream_id, error.status, str(error))
            self._cancel(head.stream_id)
            return
        if head.flags & h2.END_STREAM:
            stream.ended()
        if head.stream_id in self._waiting and stream.is_ready:
            self._begin(head.stream_id, stream)

    def _on_headers(self, head: FrameHead, block: bytearray) -> None:
        if not head.flags & h2.END_HEADERS:
            self._block = (head, block)
            return
        self._block = None
        path = self._path_in(bytes(block))
        stream = self._streams.get(head.stream_id)
        if stream is not None:  # trailers
            stream.ended()
            if head.stream_id in self._waiting:
                self._begin(head.stream_id, stream)
            return
        if not head.stream_id % 2 or head.stream_id <= self._last_id:
            raise Http2Error(h2.PROTOCOL_ERROR, "a stream id that may not be opened")
        self._last_id = head.stream_id
        if len(self._streams) >= MAX_STREAMS:
            self.send(h2.frame(h2.RST_STREAM, 0, head.stream_id, h2.REFUSED.to_bytes(4)))
            return
        stream = self._streams[head.stream_id] = GrpcStream(self, head.stream_id, self._peer_window)
        self._waiting[head.stream_id] = path
        if head.flags & h2.END_STREAM:
            stream.ended()
        if stream.is_ready or path not in self._handlers:
            self._begin(head.stream_id, stream)

    def _path_in(self, block: bytes) -> str:
        """Decode headers; return the path. Headers that leave the decoder's table as it is mean the same again."""
        path = self._paths.get(block)
        if path is None:
            table = self._decoder.header_table
            before = (table.maxsize, *table.dynamic_entries)
            fields = self._decoder.decode(block, raw=True)
            path = next((value for name, value, *_ in fields if name == b":path"), b"").decode("latin-1")
            if before != (table.maxsize, *table.dynamic_entries):
                self._paths.clear()
            elif len(self._paths) < MAX_PATHS:
                self._paths[block] = path
        return path

    def _on_reset(self, head: FrameHead) -> None:
        self._waiting.pop(head.stream_id, None)
        stream = self._streams.pop(head.stream_id, None)
        if stream is not None and stream.ends_gently:
            stream.ended()
        else:
            self._cancel(head.stream_id)

    def _on_settings(self, head: FrameHead, payload: bytes) -> None:
        if head.flags & h2.ACK:
            return
        values = h2.parse_settings(payload)
        window = values.get(h2.WINDOW_SETTING, self._peer_window)
        for stream in self._streams.values():
            stream.send_window += window - self._peer_window
        self._peer_window = window
        self.send(h2.frame(h2.SETTINGS, h2.ACK, 0))
        self._has_room()

    def _on_window(self, head: FrameHead, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(h2.FRAME_SIZE_ERROR, "a WINDOW_UPDATE frame of another length than 4")
        increment = int.from_bytes(payload) & h2.MAX_WINDOW
        stream = self._streams.get(head.stream_id)
        if not head.stream_id:
            self._send_window += increment
        elif stream is not None:
            stream.send_window += increment
        if not increment or max(self._send_window, stream.send_window if stream else 0) > h2.MAX_WINDOW:
            raise Http2Error(h2.FLOW_CONTROL_ERROR, "a window that is too large, or not enlarged")
        self._has_room()

    # ----------------------------------------------------------------------------------------------------------- calls

    def _begin(self, stream_id: int, stream: GrpcStream) -> None:
        """Begin a call; most answers of replicas end theirs at once, without a task."""
        handler = self._handlers.get(self._waiting.pop(stream_id))
        try:
            if handler is None:
                raise GrpcError(Status.UNIMPLEMENTED, "there is no such method")
            rest = handler(stream)
        except GrpcError as error:
            self._end(stream_id, error.status, str(error))
            return
        if rest is None:
            self._end(stream_id, Status.OK, "")
            return
        task = self._tasks[stream_id] = asyncio.create_task(self._run(stream_id, rest))
        task.add_done_callback(lambda _: self._tasks.pop(stream_id, None))  # it may be cancelled before it begins

    async def _run(self, stream_id: int, rest: Coroutine[Any, Any, None]) -> None:
        status, message = Status.OK, ""
        try:
            await rest
        except GrpcError as error:
            status, message = error.status, str(error)
        except Exception as error:
            self._failed(error)
            status = Status.INTERNAL
        self._end(stream_id, status, message)

    def _end(self, stream_id: int, status: Status, message: str) -> None:
        """Send the end of a call, unless the client has reset it."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None and self._transport is not None:
            stream.close(status, message)

    def _cancel(self, stream_id: int) -> None:
        task = self._tasks.get(stream_id)
        if task is not None:
            task.cancel()
