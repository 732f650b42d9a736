"""Tenants of a router whose replicas see one key only, in front of a real server that checks its salts."""

from collections.abc import Iterator
from typing import Any

import pytest
from gateway.harness import Front, RealReplica, front, run
from server.harness import Server, fake_server


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with fake_server(folder, tmp_path_factory.mktemp("salts") / "log", api_key=("inner",)) as running:
        yield running


async def cached_tokens(router: Front, key: str, prompt: list[int], **fields: Any) -> int:
    headers = {"authorization": f"Bearer {key}"}
    answer = await router.complete(prompt, headers=headers, max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("salt", ["a", "s" * 128, None], ids=["short", "longest", "none"])
def test_a_cache_salt_of_any_legal_length_narrows_its_tenants_cache_and_no_other(server: Server, salt: Any) -> None:
    async def go() -> None:
        replica = RealReplica(server.url)
        async with front(replica, server={"api_key": ("one", "two")}, replica_api_key="inner") as router:
            await router.up(1)
            prompt = [1 + len(salt or "")] * 64
            assert [await cached_tokens(router, "one", prompt, cache_salt=salt) for _ in range(2)] == [0, 48]
            assert await cached_tokens(router, "two", prompt, cache_salt=salt) == 0
            assert await cached_tokens(router, "one", prompt, cache_salt="another") == 0

    run(go())


def test_routers_with_one_replica_key_share_a_tenants_cache_and_so_does_one_that_is_started_again(
    server: Server,
) -> None:
    async def go() -> None:
        prompt, keys = [7] * 64, {"api_key": ("one", "two")}
        for expected in (0, 48):
            async with front(RealReplica(server.url), server=keys, replica_api_key="inner") as router:
                await router.up(1)
                assert await cached_tokens(router, "one", prompt) == expected
        async with front(RealReplica(server.url), server=keys, replica_api_key="inner") as router:
            await router.up(1)
            assert await cached_tokens(router, "two", prompt) == 0, "another tenant's"

    run(go())
