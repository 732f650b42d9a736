"""Bounded reads of replicas' answers to probes: /health, /v1/models, /metrics."""

import aiohttp

MAX_HEALTH = 2**16  # bytes
MAX_MODELS = 2**21  # 3,000 adapters with all fields that vLLM lists for each
MAX_METRICS = 2**22  # vLLM's page of one engine has 100 KB


async def read_prefix(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body, or its first `max_bytes`; a connection with more data is closed."""
    parts: list[bytes] = []
    left = max_bytes
    while left > 0 and (part := await response.content.read(min(left, 2**16))):
        parts.append(part)
        left -= len(part)
    if not left and not response.content.at_eof():
        response.close()
    return b"".join(parts)


def whole_lines(body: bytes, max_bytes: int) -> str:
    """Return the text of a body that was read up to `max_bytes`, without a line that may have been cut."""
    whole = body if len(body) < max_bytes else body[: body.rfind(b"\n") + 1]
    return whole.decode(errors="replace")
