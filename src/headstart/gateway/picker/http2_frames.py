"""HTTP/2 frames (RFC 9113) as far as a gRPC server needs them: headers, limits, and the frames that it sends."""

from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED, CANCEL, COMPRESSION_ERROR, TOO_MUCH = (
    *(0x0, 0x1, 0x3, 0x6),
    *(0x7, 0x8, 0x9, 0xB),
)
MAX_STREAMS_SETTING, WINDOW_SETTING, FRAME_SETTING, HEADER_LIST_SETTING = 0x3, 0x4, 0x5, 0x6
HEAD_BYTES = 9
SETTING_BYTES = 6
FRAME_BYTES = 16_384  # of a payload; no other size is offered
DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1


class Http2Error(Exception):
    """The peer violates the protocol: the connection is closed with this error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameHeader(NamedTuple):
    """The head of a frame."""

    length: int
    kind: int
    flags: int
    stream_id: int


def read_frame_header(data: bytes | bytearray, at: int) -> FrameHeader:
    """Return the head of the frame that begins at `at`."""
    length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
    return FrameHeader(length, data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9]) & MAX_WINDOW)


def make_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    head = len(payload).to_bytes(3) + bytes((kind, flags))
    return head + stream_id.to_bytes(4) + payload


def settings_frame(**values: int) -> bytes:
    """Return a SETTINGS frame with max_streams, window and header_list, as far as given."""
    ids = {"max_streams": MAX_STREAMS_SETTING, "window": WINDOW_SETTING, "header_list": HEADER_LIST_SETTING}
    payload = b"".join(ids[name].to_bytes(2) + value.to_bytes(4) for name, value in values.items())
    return make_frame(SETTINGS, 0, 0, payload)


def parse_settings(payload: bytes) -> dict[int, int]:
    """Return the values by setting. Raises Http2Error."""
    if len(payload) % SETTING_BYTES:
        raise Http2Error(FRAME_SIZE_ERROR, "a SETTINGS frame of another length than multiples of 6")
    starts = range(0, len(payload), SETTING_BYTES)
    found = {
        int.from_bytes(payload[start : start + 2]): int.from_bytes(payload[start + 2 : start + 6]) for start in starts
    }
    if found.get(WINDOW_SETTING, 0) > MAX_WINDOW:
        raise Http2Error(FLOW_CONTROL_ERROR, "a window that is too large")
    if not FRAME_BYTES <= found.get(FRAME_SETTING, FRAME_BYTES) <= 2**24 - 1:
        raise Http2Error(PROTOCOL_ERROR, "a frame size out of bounds")
    return found


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return make_frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def strip_padding_and_priority(head: FrameHeader, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without padding and priority. Raises Http2Error."""
    start, end = 0, len(payload)
    if head.flags & PADDED:
        if not payload or payload[0] >= len(payload):
            raise Http2Error(PROTOCOL_ERROR, "padding of the length of the frame")
        start, end = 1, len(payload) - payload[0]
    if head.kind == HEADERS and head.flags & HAS_PRIORITY:
        start += 5
        if start > end:
            raise Http2Error(FRAME_SIZE_ERROR, "a HEADERS frame without its priority")
    return payload[start:end] if (start, end) != (0, len(payload)) else payload


def hpack_literal_header(name: str, value: str) -> bytes:
    """Return a header field in HPACK (RFC 7541, 6.2.2), without indexing; both are shorter than 127 bytes."""
    assert len(name) < 127 and len(value) < 127, f"{name} has {len(value)} bytes"
    return b"\0" + bytes((len(name),)) + name.encode("latin-1") + bytes((len(value),)) + value.encode("latin-1")


STATUS_200 = b"\x88"  # an entry of HPACK's static table
