"""UsageReportHeader: the header by which a Headstart server reports usage and prefill time before the body of an
answer.

A proxy that reads no bodies, such as Envoy with an endpoint picker, learns from it. A client gets it if it sends the
header REPORT_HEADER with any value.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

REPORT_HEADER = b"x-headstart-report"
_FORM = re.compile(
    rb"id=([A-Za-z0-9._:-]{1,128}); prompt_tokens=(\d{1,12}); cached_tokens=(\d{1,12}); prefill_ms=(\d{1,12}\.\d{1,3})"
)


class UsageReportHeader(NamedTuple):
    """The report of one answer. `prefill_ms`: from the first turn in the engine to the first token."""

    answer_id: str
    prompt_tokens: int
    cached_tokens: int
    prefill_ms: float

    def encode(self) -> bytes:
        """Return the value of the header."""
        usage = f"prompt_tokens={self.prompt_tokens}; cached_tokens={self.cached_tokens}"
        return f"id={self.answer_id}; {usage}; prefill_ms={max(self.prefill_ms, 0.0):.3f}".encode("latin-1")


def decode_report_header(headers: Iterable[tuple[bytes, bytes]]) -> UsageReportHeader | None:
    """Return the report in a response's headers, names in lower case; None: there is none, or it is invalid."""
    for name, value in headers:
        if name == REPORT_HEADER and (found := _FORM.fullmatch(value)) is not None:
            return UsageReportHeader(found[1].decode(), int(found[2]), int(found[3]), float(found[4]))
    return None
