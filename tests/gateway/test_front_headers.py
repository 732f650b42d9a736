"""Headers on their way through a router: repeated ones stay repeated, those of one connection end there."""

import asyncio
from typing import Any

from aiohttp import web
from gateway.harness import Front, Replica, front, run

Heads = list[list[tuple[str, str]]]
BODY = b'{"prompt": "x"}'


async def ask(router: Front, *lines: str, path: str = "/v1/completions") -> str:
    """The head of the answer to a request with these header lines as they are: clients would tidy them."""
    url = router.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    first = (f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(BODY)}")
    writer.write("\r\n".join([*first, *lines, "", ""]).encode() + BODY)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return head.decode().lower()


def remembering(heads: Heads, **headers: str) -> Any:
    """A script: notes all headers of a request, and answers with these."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        heads.append([(name.lower(), value) for name, value in request.headers.items()])
        response = web.json_response({"choices": [{"index": 0, "text": "abc"}]})
        for name, value in headers.items():
            for part in value.split("|"):
                response.headers.add(name.replace("_", "-"), part)
        return response

    return answer


def test_repeated_headers_stay_repeated_both_ways() -> None:
    async def go() -> None:
        replica, heads = Replica(), Heads()
        replica.script = remembering(heads, www_authenticate="Basic|Bearer")
        async with front(replica) as router:
            head = await ask(router, "x-own: a", "X-Own: b", "accept: text/plain", "accept: */*")
            sent = heads[0]
            assert [value for name, value in sent if name == "x-own"] == ["a", "b"]
            assert [value for name, value in sent if name == "accept"] == ["text/plain", "*/*"]
            assert "www-authenticate: basic\r\nwww-authenticate: bearer\r\n" in head

    run(go())


def test_repeated_headers_of_an_administrators_answer_stay_repeated() -> None:
    async def go() -> None:
        replica = Replica()
        replica.script = remembering(Heads(), www_authenticate="Basic|Bearer")
        async with front(replica) as router:
            await router.up(1)
            head = await ask(router, path="/v1/prefixes")
            assert head.count("www-authenticate: ") == 2 and head.count("content-length: ") == 1

    run(go())


def test_headers_that_connection_names_end_at_the_router() -> None:
    async def go() -> None:
        replica, heads = Replica(), Heads()
        replica.script = remembering(
            heads, Connection="X-RateLimit-A, keep-alive", x_ratelimit_a="1", x_ratelimit_b="2"
        )
        async with front(replica) as router:
            head = await ask(router, "connection: close, X-Secret", "connection: x-other", "x-secret: 1", "X-Other: 2")
            names = [name for name, _ in heads[0]]
            assert "x-secret" not in names and "x-other" not in names
            assert "x-ratelimit-a" not in head and "x-ratelimit-b: 2" in head

    run(go())


def test_no_client_makes_a_replica_believe_that_it_is_on_its_machine() -> None:
    """A replica without keys takes any client on its machine for an administrator, and the router may be there."""
    claims = (
        *("connection: x-forwarded-for", "connection: close, X-Forwarded-For", "x-forwarded-for:"),
        *("x-forwarded-for: 127.0.0.1", "connection: forwarded, x-real-ip, x-forwarded-for"),
    )

    async def go() -> None:
        replica, heads = Replica(), Heads()
        replica.script = remembering(heads)
        async with front(replica) as router:
            for claim in claims:
                await ask(router, claim)
                told = [value for name, value in heads[-1] if name == "x-forwarded-for"]
                assert len(told) == 1 and told[0].endswith("127.0.0.1"), claim

    run(go())


def test_a_clients_own_copy_of_what_the_router_says_is_not_sent_on() -> None:
    """One key, one request id; no header that has another path or method be understood than the one that was judged."""

    async def go() -> None:
        replica, heads = Replica(), Heads()
        replica.script = remembering(heads)
        async with front(replica, replica_api_key="inner") as router:
            await ask(
                *(
                    router,
                    "authorization: Bearer a",
                    "Authorization: Bearer b",
                    "x-request-id: one",
                    "X-Request-Id: two",
                ),
                *("x-original-url: /v1/sleep", "x-rewrite-url: /v1/sleep", "x-http-method-override: DELETE"),
            )
            sent = heads[0]
            assert [value for name, value in sent if name == "authorization"] == ["Bearer inner"]
            assert [value for name, value in sent if name == "x-request-id"] == ["one"]
            assert not [name for name, _ in sent if name.startswith(("x-original", "x-rewrite", "x-http-method"))]

    run(go())


def test_routing_headers_of_a_router_behind_this_one_are_not_passed_on() -> None:
    async def go() -> None:
        replica = Replica()
        replica.script = remembering(Heads(), x_headstart_replica="http://10.0.0.7:1", x_headstart_route="{}")
        async with front(replica) as router:
            head = await ask(router, "x-forwarded-for: 10.0.0.1")
            assert "10.0.0.7" not in head and "x-headstart-route" not in head

    run(go())
