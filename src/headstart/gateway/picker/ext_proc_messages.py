"""Messages of Envoy's external processing protocol from plain values, plain values from them, and names of metadata."""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.grpc_stream import GrpcError, GrpcStatusCode
from headstart.http.spooled_body import SpooledBody

CHUNK_BYTES = 62_000  # of a body that is sent back, per message; Envoy's limit is 64 kB
STREAMED, FULL_DUPLEX = 1, 4  # modes of request bodies; the latter is FULL_DUPLEX_STREAMED
DESTINATION = "x-gateway-destination-endpoint"
SERVED, SUBSET = f"{DESTINATION}-served", f"{DESTINATION}-subset"
CALL, ANSWER_HEADERS = "x-headstart-call", "x-headstart-answer"
"""Metadata for our own Envoy: the id of a request, and the headers that its answer gets."""
LB = "envoy.lb"  # a namespace of metadata
_SUBSET_HINT = f"{LB}.subset_hint"  # another one
_APPEND, _OVERWRITE = 0, 2
BY_ENVOY = frozenset((b"content-length", b"connection", b"transfer-encoding"))
Headers = list[tuple[bytes, bytes]]
MAX_HEAD_BYTES = 128 << 10  # of a message without its body: Envoy's limit for headers is 60 KiB by default
MAX_HEADERS = 1_000  # of a message; Envoy's limit is 100 by default
_BODIES = frozenset((4, 5))  # fields of ProcessingRequest: request_body, response_body
_MAX_FIELDS = 64


def decode_request(message: bytes) -> pb.ProcessingRequest:
    """Return a message. Raises GrpcError for one that cannot be decoded, or has parts that take a multiple of it."""
    if len(message) > MAX_HEAD_BYTES and _num_head_bytes(message) > MAX_HEAD_BYTES:
        raise GrpcError(GrpcStatusCode.RESOURCE_EXHAUSTED, "a message that is too long")
    try:
        found = pb.ProcessingRequest.FromString(message)
    except DecodeError:
        raise GrpcError(GrpcStatusCode.INVALID_ARGUMENT, "a message that cannot be decoded") from None
    if len(found.request_headers.headers.headers) + len(found.response_headers.headers.headers) > MAX_HEADERS:
        raise GrpcError(GrpcStatusCode.RESOURCE_EXHAUSTED, "too many headers")
    return found


def _num_head_bytes(message: bytes) -> int:
    """Return the bytes of all fields but bodies; the length of the message if it has many, or odd ones."""
    at, total = 0, 0
    for _ in range(_MAX_FIELDS):
        if at >= len(message):
            return total
        start = at
        tag, at = _varint(message, at)
        size, at = _varint(message, at) if tag & 7 == 2 else (len(message) if tag & 7 else 0, at)
        at = at + size if tag & 7 else _varint(message, at)[1]
        total += 0 if tag >> 3 in _BODIES and tag & 7 == 2 else at - start
    return len(message)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place (protobuf's encoding, at most ten bytes), and the place behind it."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at : at + 10], strict=False):
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            break
    return value, at


def client_address(attributes: Iterable[Any]) -> str:
    """Return the client's address without its port, from the attributes of a request; empty: not reported."""
    for struct in attributes:
        if "source.address" in struct and isinstance(address := struct["source.address"], str):
            return address.rpartition(":")[0].strip("[]")
    return ""


def strip_own_envoy_hop(headers: Headers) -> Headers:
    """Return headers without x-forwarded-proto and the address in x-forwarded-for, which are from our own Envoy."""
    kept = Headers()
    for name, value in headers:
        if name == b"x-forwarded-proto":  # Envoy has replaced a client's
            continue
        before = value.rpartition(b",")[0].strip() if name == b"x-forwarded-for" else value
        if before or name != b"x-forwarded-for":
            kept.append((name, before))
    return kept


def decode_headers(headers: pb.HeaderMap) -> Headers:
    return [
        (entry.key.encode("latin-1", "replace"), entry.raw_value or entry.value.encode()) for entry in headers.headers
    ]


def headers_as_bytes(headers: Mapping[str, str]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def header_mutation(headers: Headers, removed: Iterable[str] = ()) -> pb.HeaderMutation:
    """Return the mutation that sets headers, repeats kept, and removes others."""
    options, names = list[pb.HeaderValueOption](), set[bytes]()
    for name, value in headers:
        header = pb.HeaderValue(key=name.decode("latin-1"), raw_value=value)
        options.append(pb.HeaderValueOption(header=header, append_action=_APPEND if name in names else _OVERWRITE))
        names.add(name)
    return pb.HeaderMutation(set_headers=options, remove_headers=removed)


def streamed_body_response(chunk: bytes, *, is_last: bool) -> pb.ProcessingResponse:
    streamed = pb.StreamedBodyResponse(body=chunk, end_of_stream=is_last)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
    return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


def replaced_body_response(piece: bytes) -> pb.ProcessingResponse:
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(body=piece))
    return pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


async def split_body(body: bytes | SpooledBody, size: int) -> AsyncIterator[bytes]:
    """Yield a body in pieces of `size` bytes, the last one shorter."""
    if isinstance(body, bytes):
        for start in range(0, len(body), size):
            yield body[start : start + size]
        return
    held = bytearray()
    async for piece in body.pieces():
        held += piece
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)


def endpoint_subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Return the addresses that the request is restricted to; None: it is not."""
    if _SUBSET_HINT not in metadata.filter_metadata or SUBSET not in metadata.filter_metadata[_SUBSET_HINT]:
        return None
    hint: Any = metadata.filter_metadata[_SUBSET_HINT][SUBSET]  # a list of addresses, or one text with commas
    texts = hint.split(",") if isinstance(hint, str) else hint if isinstance(hint, Iterable) else ()
    return frozenset(text.strip() for text in texts if isinstance(text, str) and text.strip())


def call_id_from_metadata(message: pb.ProcessingRequest) -> str:
    """Return the id of the request that an answer is for; empty: it has none."""
    return metadata_text(message.metadata_context, LB, CALL)


def metadata_text(metadata: pb.Metadata, namespace: str, key: str) -> str:
    if namespace not in metadata.filter_metadata or key not in metadata.filter_metadata[namespace]:
        return ""
    value = metadata.filter_metadata[namespace][key]
    return value if isinstance(value, str) else ""
