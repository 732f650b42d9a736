"""A real server, once: what it answers, what it counts, and that nothing of it survives its death."""

from pathlib import Path
from random import Random
from socket import SHUT_RDWR

import psutil
import pytest

from headstart.core.errors import ConfigError
from headstart.measurement.machine import ContentionLog
from headstart.workload.synthetic import random_tokens
from headstart_lab.runners.served_replica import Answer, Launch, ask_in_turn, differing, problems, replica

FLAGS = ("--num-blocks", "64", "--threads", "1", "--dtype", "float32")


def test_a_server_answers_counts_and_dies_as_a_whole(tiny: str, tmp_path: Path) -> None:
    prompts = [random_tokens(64, 512, Random(seed)) for seed in (1, 2)]
    log = ContentionLog.empty()
    others = psutil.Process().children(recursive=True)
    with replica(Launch(tiny, tmp_path, FLAGS, ("right",)), None) as server:
        first = ask_in_turn(server, prompts, key="right", log=log)
        again = ask_in_turn(server, prompts, key="right")
        (refused,) = ask_in_turn(server, prompts[:1], key="wrong")
        counted = server.prompt_tokens(key="right")
        ask_in_turn(server, prompts[:1], key="right")
        connection = server._connection.sock
        assert connection is not None
        connection.shutdown(SHUT_RDWR)  # as the server does with a connection that was idle for long
        (after_idling,) = ask_in_turn(server, prompts[:1], key="right")
        children = [one for one in psutil.Process().children(recursive=True) if one not in others]
        server.kill()
        survivors = [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert [answer.error for answer in (*first, *again)] == [None] * 4
    assert [answer.computed_tokens for answer in (*first, *again)] == [64, 64, 1, 1]
    assert all(len(answer.tokens) == 1 and answer.ttft > 0 for answer in first) and differing(first, again) == 0
    assert after_idling.error is None
    assert refused.error is not None and "401" in refused.error
    assert (counted["computed"], counted["shared"]) == (130, 126)
    assert len(children) == 3 and survivors == []  # the HTTP front, its engine, and what renders its chats
    assert server.dtype == "float32" and server.ready_seconds > 0 and len(log.kept) == 1


def test_a_server_that_cannot_start_is_quoted(tiny: str, tmp_path: Path) -> None:
    launch = Launch(tiny, tmp_path, ("--block-size", "17"))
    with pytest.raises(ConfigError, match="block_size is 17"), replica(launch, None):
        pass


def test_the_store_and_every_key_are_on_the_command_line(tmp_path: Path) -> None:
    command = Launch("", tmp_path, (), ("a", "b")).command(tmp_path / "store")
    assert command[-6:] == ["--api-key", "a", "--api-key", "b", "--kv-store", str(tmp_path / "store")]
    assert "--kv-store" not in Launch("", tmp_path).command(None)
    assert command[2:5] == ["headstart", "serve", "--host"], "the bundled model, not this folder"


def test_failures_and_differences_are_counted() -> None:
    good, other, bad = Answer(0.1, ("a",), 8, 0), Answer(0.1, ("b",), 8, 0), Answer(0.0, (), 8, 0, "HTTP 500")
    assert differing([good, good], [good, other]) == 1
    assert problems("x", [good, other]) == []
    assert problems("x", [good, bad, bad]) == ["x: 2 requests failed, the first with: HTTP 500"]
