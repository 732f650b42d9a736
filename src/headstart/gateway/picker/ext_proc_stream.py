"""ExtProcStream: one HTTP request as Envoy's external processing filter presents it, over one gRPC stream.

It is the ASGI server of the router's own application: the request's headers and body arrive as ASGI events. What the
application sends becomes an immediate response, unless it has the request forwarded: then `forward` names the replicas
and sends the body back to Envoy, and the rest of the stream is about the replica's answer. Protocol: Gateway API
inference extension, proposal 004, v1.0.0.

Our own Envoy (envoy_filters.py) keeps the body until the picker has replied (STREAMED, not FULL_DUPLEX_STREAMED),
and reports the head of the answer on a stream of its own, which names the request by the metadata CALL.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Message

from headstart.gateway.picker import ext_proc_pb2 as pb
from headstart.gateway.picker.ext_proc_messages import (
    ANSWER_HEADERS,
    BY_ENVOY,
    CALL,
    CHUNK_BYTES,
    DESTINATION,
    FULL_DUPLEX,
    LB,
    SERVED,
    STREAMED,
    Headers,
    client_address,
    decode_headers,
    decode_request,
    endpoint_subset,
    header_mutation,
    headers_as_bytes,
    metadata_text,
    replaced_body_response,
    split_body,
    streamed_body_response,
    strip_own_envoy_hop,
)
from headstart.gateway.picker.grpc_stream import GrpcError, GrpcStream
from headstart.http.spooled_body import SpooledBody

EXTENSION = "headstart.picker"
"""The key of the ASGI scope's extensions under which an application finds the ExtProcStream."""


class ExtProcPeer:
    """The messages of one request. `read` and `write` raise CancelledError when Envoy gives the request up."""

    def __init__(self, stream: GrpcStream) -> None:
        self._stream = stream

    async def read(self) -> pb.ProcessingRequest | None:
        """Return the next message; None at the end. One that cannot be read ends the call, which is cancelled."""
        message = await self._stream.read()
        if message is None:
            return None
        try:
            return decode_request(message)
        except GrpcError as error:
            await self._stream.abort(error.status, str(error))

    async def write(self, *responses: pb.ProcessingResponse) -> None:
        """Send messages together."""
        await self._stream.write(*[response.SerializeToString() for response in responses])

    def treat_cancel_as_end(self) -> None:
        """Let `read` return None in place of a cancellation from now on, after the messages before it."""
        self._stream.ends_gently = True


class ReplicaAnswerHead(NamedTuple):
    """The head of a replica's answer."""

    status: int
    headers: Headers  # names in lower case
    served: str  # address of the replica, as Envoy reports it; empty: not reported
    is_whole: bool  # no body follows


class ExtProcStream:
    """One request."""

    def __init__(
        self, peer: ExtProcPeer, first: pb.ProcessingRequest, *, trusts_address: bool = False, call_id: str = ""
    ) -> None:
        """`first` is the first message, with the headers of the request; `call_id` names it to our own Envoy.

        `trusts_address`: Envoy is our own, and the first proxy: it reports the client's address, and has appended one
        to x-forwarded-for. Otherwise the address is unknown, and no client counts as one on this machine.
        """
        self._peer = peer
        self._head = first.request_headers
        self._response_mode = first.protocol_config.response_body_mode
        mode = first.protocol_config.request_body_mode
        self._keeps_body = mode == STREAMED and first.protocol_config.send_body_without_waiting_for_header_response
        self.is_usable = mode in (0, FULL_DUPLEX) or self._keeps_body or self._head.end_of_stream
        self.call_id = call_id if self._keeps_body else ""
        self.subset = endpoint_subset(first.metadata_context)
        self._is_own = trusts_address
        self._source = client_address(first.attributes.values()) if trusts_address else ""
        self._is_read = False  # the request's body
        self._num_pieces = 0  # of it
        self._has_trailers = False
        self._is_over = False  # Envoy has ended the stream
        self._start: Message | None = None  # of an immediate response
        self._pieces: list[bytes] = []
        self._checker: ExtProcPeer | None = None  # the stream that waits for the head of the answer
        self._checked: asyncio.Future[None] | None = None

    async def run_app(self, app: ASGIApp) -> None:
        """Serve the request by an application."""
        try:
            await app(self._scope(), self.asgi_receive, self.asgi_send)
        finally:
            self._release_checker()

    def attach_answer_peer(self, peer: ExtProcPeer) -> Coroutine[Any, Any, None]:
        """Have the head of the answer, or an immediate response in its place, sent on another stream, from now on.

        Return a coroutine that ends when it was sent.
        """
        self._checker, self._checked = peer, asyncio.get_running_loop().create_future()
        return self._until_checked(self._checked)

    async def _until_checked(self, checked: "asyncio.Future[None]") -> None:
        await checked

    def _release_checker(self) -> None:
        self._checker = None
        if self._checked is not None and not self._checked.done():
            self._checked.set_result(None)

    # ------------------------------------------------------------------------------------------ ASGI, for applications

    async def asgi_receive(self) -> Message:
        """Return the next ASGI event of the request."""
        if self._is_read:
            return {"type": "http.disconnect"}
        if self._head.end_of_stream:
            self._is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        message = await self._next()
        kind = None if message is None else message.WhichOneof("request")
        if message is not None and kind == "request_body":
            self._num_pieces += 1
            self._is_read = message.request_body.end_of_stream
            return {"type": "http.request", "body": message.request_body.body, "more_body": not self._is_read}
        self._is_read = True
        self._has_trailers = kind == "request_trailers"
        if not self._has_trailers:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": False}

    async def asgi_send(self, message: Message) -> None:
        """Collect an immediate response and send it when it is complete. What comes after the stream is dropped."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._start = message
        elif self._start is not None:
            self._pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                start, self._start = self._start, None
                await self._respond_at_once(start, b"".join(self._pieces))

    async def _respond_at_once(self, start: Message, body: bytes) -> None:
        headers = [header for header in start["headers"] if header[0] not in BY_ENVOY]
        response = pb.ImmediateResponse(
            status=pb.HttpStatus(code=start["status"]), headers=header_mutation(headers), body=body, details="headstart"
        )
        await (self._checker or self._peer).write(pb.ProcessingResponse(immediate_response=response))
        self._release_checker()

    # ------------------------------------------------------------------------------------------- for forwarded requests

    async def forward(
        self,
        endpoints: Iterable[str],
        body: bytes | SpooledBody,
        headers: Mapping[str, str],
        removed: Iterable[str],
        answer_headers: Mapping[str, str],
    ) -> None:
        """Have Envoy forward the request to the first of `endpoints` that takes it, with this body and these headers.

        `endpoints` are addresses, IP:port, the preferred one first. `answer_headers`: set by our own Envoy on answers
        that it does not have checked.
        """
        picked = ",".join(endpoints)
        named = [] if self._is_own else [(DESTINATION.encode(), picked.encode())]  # our own Envoy reads the metadata
        dropped = [DESTINATION, *removed] if self._is_own else removed
        mutation = header_mutation([*named, *headers_as_bytes(headers)], dropped)
        common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
        response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        metadata: dict[str, Any] = {DESTINATION: picked}
        if self.call_id:
            metadata |= {CALL: self.call_id, ANSWER_HEADERS: dict(answer_headers)}
            self._peer.treat_cancel_as_end()  # the head of the answer may arrive together with the end
        response.dynamic_metadata.update({LB: metadata})
        if self._head.end_of_stream:
            await self._peer.write(response)
        elif self._keeps_body:
            await self._replace_body(response, body)
        else:
            await self._send_body(response, body)

    async def _replace_body(self, head: pb.ProcessingResponse, body: bytes | SpooledBody) -> None:
        """Reply to the head and to each piece of the body that Envoy keeps; `body` is divided among the pieces."""
        size = -(-len(body) // self._num_pieces)
        ready, num_left = [head], self._num_pieces
        async for piece in split_body(body, size):
            ready.append(replaced_body_response(piece))
            num_left -= 1
            if len(piece) > CHUNK_BYTES:
                await self._peer.write(*ready)
                ready = []
        await self._peer.write(*ready, *[replaced_body_response(b"") for _ in range(num_left)])

    async def _send_body(self, response: pb.ProcessingResponse, body: bytes | SpooledBody) -> None:
        sent, ready = 0, [response]  # a short body is sent together with the head
        async for chunk in split_body(body, CHUNK_BYTES):
            sent += len(chunk)
            is_last = sent == len(body) and not self._has_trailers
            await self._peer.write(*ready, streamed_body_response(chunk, is_last=is_last))
            ready = []
        if not len(body) and not self._has_trailers:
            ready.append(streamed_body_response(b"", is_last=True))
        if self._has_trailers:
            ready.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        await self._peer.write(*ready)

    async def read_answer_head(self) -> ReplicaAnswerHead | None:
        """Return the head of the answer; None: the request ended without one."""
        while (message := await self._next()) is not None:
            if message.WhichOneof("request") != "response_headers":
                continue
            pairs = decode_headers(message.response_headers.headers)
            text = next((value for name, value in pairs if name == b":status"), b"")
            status = int(text) if len(text) == 3 and text.isdigit() else 0
            served = metadata_text(message.metadata_context, LB, SERVED)
            headers = [header for header in pairs if not header[0].startswith(b":")]
            return ReplicaAnswerHead(status, headers, served, message.response_headers.end_of_stream)
        return None

    async def release_answer_head(self, head: ReplicaAnswerHead) -> None:
        """Let the answer begin, with the headers of the `http.response.start` that was sent in place of its own."""
        assert self._start is not None, "the application has not sent the head of its response"
        kept, self._start = self._start["headers"], None
        if self.call_id and self._checker is None:
            return  # Envoy does not wait
        names = {name for name, _ in kept} | BY_ENVOY | {b"date"}
        removed = sorted({name.decode("latin-1") for name, _ in head.headers if name not in names})
        common = pb.CommonResponse(header_mutation=header_mutation(kept, removed))
        response = pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))
        await (self._checker or self._peer).write(response)
        self._release_checker()

    async def relay_answer_body(self, read: Callable[[bytes], Any]) -> bool:
        """Pass the body of the answer, each piece of which `read` receives if Envoy sends them.

        Return whether the end of the answer arrived; False if Envoy does not send bodies, or the answer was cut off.
        """
        is_whole = False
        while (message := await self._next()) is not None:
            kind = message.WhichOneof("request")
            if kind == "response_body":
                body = message.response_body
                is_whole = is_whole or body.end_of_stream
                read(body.body)
                common = pb.CommonResponse()
                if self._response_mode == FULL_DUPLEX:
                    streamed = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
                    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
                await self._peer.write(pb.ProcessingResponse(response_body=pb.BodyResponse(response=common)))
            elif kind == "response_trailers":
                is_whole = True
                await self._peer.write(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
        return is_whole

    async def _next(self) -> pb.ProcessingRequest | None:
        message = None if self._is_over else await self._peer.read()
        self._is_over = message is None
        return message

    @property
    def receives_answer_bodies(self) -> bool:
        """Whether Envoy sends the bodies of answers."""
        return self._response_mode != 0

    # ------------------------------------------------------------------------------------------------------------

    def _scope(self) -> dict[str, Any]:
        pairs = decode_headers(self._head.headers)
        pseudo = {name: value for name, value in pairs if name.startswith(b":")}
        headers = [header for header in pairs if not header[0].startswith(b":")]
        if b":authority" in pseudo:
            headers.insert(0, (b"host", pseudo[b":authority"]))
        if self._source:
            headers = strip_own_envoy_hop(headers)
        target, _, query = pseudo.get(b":path", b"/").partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": pseudo.get(b":method", b"GET").decode("latin-1"),
            "scheme": pseudo.get(b":scheme", b"http").decode("latin-1"),
            "path": unquote_to_bytes(target).decode("utf-8", "replace"),
            "raw_path": target,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": (self._source, 0) if self._source else None,
            "server": None,
            "extensions": {EXTENSION: self},
        }
