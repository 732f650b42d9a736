"""Fan-out: administrative requests sent to every replica: pinned prefixes and cache resets.

The router has checked the administrator's key; replicas see the caller's own key, or `--replica-api-key`.
"""

import asyncio
from collections.abc import Sequence

import aiohttp

from headstart.gateway.proxy.replies import check_head, read_answer
from headstart.gateway.proxy.upstream import Answer, headers_on
from headstart.http.http_errors import HttpError
from headstart.http.web_pages import is_forwarding

FANOUT_SECONDS = 300.0  # a prefix is computed before its answer comes


async def send_to_all(
    session: aiohttp.ClientSession,
    urls: Sequence[str],
    method: str,
    target: str,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    own: dict[str, str],
) -> Answer:
    """Send a request to all replicas at once and return the first answer that is an error, else the first answer.

    `target`: path and query. Raises HttpError 503 if there is no replica, and 502 if a replica gave no answer: then the
    other replicas may have done it.
    """
    if not urls:
        raise HttpError(503, "no replica is up", code="no_replicas", headers={"retry-after": "1"})
    sent = headers_on([(name, value) for name, value in headers if not is_forwarding(name)], own)

    async def send(url: str) -> Answer:
        timeout = aiohttp.ClientTimeout(total=FANOUT_SECONDS)
        async with session.request(
            method, url + target, headers=sent, data=body, timeout=timeout, allow_redirects=False
        ) as response:
            check_head(response, target.partition("?")[0])
            return await read_answer(response, target.partition("?")[0])

    answers = await asyncio.gather(*map(send, urls), return_exceptions=True)
    silent = [url for url, answer in zip(urls, answers, strict=True) if isinstance(answer, BaseException)]
    if silent:
        message = f"{len(silent)} of {len(urls)} replicas gave no answer; ask again when all are up"
        raise HttpError(502, message, code="replica_unreachable")
    found = [answer for answer in answers if isinstance(answer, Answer)]
    return next((answer for answer in found if answer.status >= 400), found[0])
