"""A name that stands for replicas: what it resolves to, when that changes, and when it fails."""

import asyncio
from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from server.harness import until

from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import DnsDiscovery
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.http.logs import ServerLog


def watch(answers: list[Any], *, port: int = 8000) -> tuple[list[list[str]], str]:
    """The lists told while a resolver gives `answers` in turn (an exception: it fails), and what was told people."""
    lists: list[list[str]] = []
    told, left = StringIO(), list(answers)

    async def resolve(name: str, asked_port: int) -> Sequence[Any]:
        assert (name, asked_port) == ("replicas", port)
        if not left:
            await asyncio.Event().wait()
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(2, 1, 6, "", (host, port)) for host in answer]

    def changed(addresses: Sequence[ReplicaAddress]) -> None:
        lists.append([address.url for address in addresses])

    async def run() -> None:
        discovery = DnsDiscovery("replicas", port, log=ServerLog(told), ask_seconds=0.0, resolve=resolve)
        task = asyncio.create_task(discovery.watch_replicas(changed))
        await until(lambda: not left)
        for _ in range(3):  # the last answer is taken
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return lists, told.getvalue()


def test_every_address_is_a_replica_once_whatever_their_order() -> None:
    lists, told = watch([["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]])
    assert lists == [["http://10.0.0.1:8000", "http://10.0.0.2:8000"]] and told == ""


def test_an_address_of_six_is_put_in_brackets() -> None:
    assert watch([["fd00::7"]], port=80)[0] == [["http://[fd00::7]:80"]]


def test_a_change_is_told_and_a_failure_keeps_the_last() -> None:
    failure = OSError(-3, "try again")
    lists, told = watch([["10.0.0.1"], failure, failure, ["10.0.0.1"], failure, ["10.0.0.3"]])
    assert lists == [["http://10.0.0.1:8000"], ["http://10.0.0.3:8000"]]
    assert told.count("does not resolve") == 2 and "going on with the 1 replicas known" in told


def test_a_name_that_does_not_resolve_at_first_has_no_replicas_until_it_does() -> None:
    lists, told = watch([OSError(-2, "unknown"), ["10.0.0.1"]])
    assert lists == [[], ["http://10.0.0.1:8000"]] and "going on with the 0 replicas known" in told


def test_the_system_resolves_addresses_and_refuses_what_is_no_name() -> None:
    lists: list[list[str]] = []

    async def run(name: str) -> None:
        discovery = DnsDiscovery(name, 8000, log=ServerLog(StringIO()))
        task = asyncio.create_task(discovery.watch_replicas(lambda found: lists.append([one.url for one in found])))
        await until(lambda: lists)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run("127.0.0.1"))
    assert lists == [["http://127.0.0.1:8000"]]
    lists.clear()
    asyncio.run(run("a..b"))
    assert lists == [[]]


def test_addresses_of_the_machine_itself_are_no_replicas_of_a_name() -> None:
    bad = ["127.0.0.1", "169.254.169.254", "::1", "0.0.0.0"]
    lists, told = watch([[*bad, "10.0.0.1"], [*bad, "10.0.0.1"]])
    assert lists == [["http://10.0.0.1:8000"]] and told.count("has 4 addresses that no replica can have") == 1


def test_a_name_without_addresses_keeps_those_known() -> None:
    lists, told = watch([["10.0.0.1"], []])
    assert lists == [["http://10.0.0.1:8000"]] and "it has no addresses" in told


@pytest.mark.parametrize("port", [0, 70_000])
def test_a_port_that_is_none_is_a_mistake(port: int) -> None:
    with pytest.raises(ConfigError, match="names no service"):
        DnsDiscovery("replicas", port)
