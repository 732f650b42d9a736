"""wire: a request that crosses the process border is the request that was sent."""

import dataclasses
from array import array

from headstart.core.request import CacheMode, Request, Retention, SamplingParams
from headstart.server.wire import FrameSplitter, Submit, decode_to_engine, encode_frame


def test_every_field_of_a_request_crosses_the_border() -> None:
    request = Request(
        request_id="r",
        prompt=array("i", [0, 1, 2**31 - 1]),
        sampling=SamplingParams(max_tokens=3, seed=-5, logit_bias=((3, -1.5),), stop_token_ids=(7,), logprobs=2),
        arrival=1.5,
        domain=b"\x00\xff",
        adapter="a",
        priority=-2,
        cache=CacheMode.READ_ONLY,
        tenant="acme",
        retention=Retention(80, 60.5),
    )
    plain = Request("r", request.prompt)
    same = [
        field.name
        for field in dataclasses.fields(Request)
        if getattr(request, field.name) == getattr(plain, field.name)
    ]
    assert same == ["request_id", "prompt"], "give every other field a value that is not its default"
    (payload,) = FrameSplitter().feed(encode_frame(Submit.of(request)))
    message = decode_to_engine(payload)
    assert isinstance(message, Submit)
    assert message.request() == request and isinstance(message.request().retention, Retention)
