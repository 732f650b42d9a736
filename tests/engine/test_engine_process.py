"""The engine in its own process: messages, faults of one request, faults of all, and the end."""

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace
from server.fake_engine import MAX_MODEL_LEN, Gate, build_fake
from server.harness import PATIENCE, unsent_bytes, until, wait_for, waiting_bytes

from headstart.config.options import EngineOptions
from headstart.core.engine_info import EngineStats
from headstart.core.errors import ConfigError, EngineDeadError, HeadstartError, InvalidRequestError, RequestFailedError
from headstart.core.request import FinishReason, Request, SamplingParams
from headstart.engine.engine_client import EngineClient
from headstart.engine.wire import (
    EngineUpdate,
    FrameSplitter,
    LongStep,
    Message,
    Stop,
    Submit,
    UnsentRequests,
    decode_to_engine,
    encode_frame,
)

pytestmark = pytest.mark.usefixtures("true_processes")


def request(name: str, *prompt: int, max_tokens: int = 3) -> Request:
    return Request(name, array("i", prompt), SamplingParams(max_tokens=max_tokens, logit_bias=((1, 2.5),)))


async def tokens_of(client: EngineClient, *requests: Request) -> dict[str, list[int]]:
    """Runs the requests as one client request to their ends."""
    stream, open_ids = client.submit(requests), {r.request_id for r in requests}
    found: dict[str, list[int]] = {r.request_id: [] for r in requests}
    while open_ids:
        for _, output in await stream.next_batch(PATIENCE):
            found[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None:
                open_ids.discard(output.request_id)
    return found


async def started(model: str = "/none") -> EngineClient:
    client = EngineClient()
    await client.start(build_fake, EngineOptions(model=model))
    return client


def test_tenants_take_turns_in_the_outbox_and_what_is_given_up_is_not_sent() -> None:
    outbox = UnsentRequests()
    for name in "abcd":
        (message,) = Submit.messages_from_requests([request(f"{name}{number}", 7, number) for number in range(2)])
        outbox.push(replace(message, tenant="first" if name < "d" else "second"))
    assert waiting_bytes(outbox) == 4 * 2 * 2 * 4
    assert (
        outbox.remove_request("b0")
        and outbox.remove_request("b1")
        and outbox.remove_request("c0")
        and not outbox.remove_request("c0")
    )
    assert waiting_bytes(outbox) == 3 * 2 * 2 * 4
    sent: list[list[str]] = []
    while (message := outbox.pop()) is not None:
        sent.append([each.request_id for each in message.requests()])
        assert not any(outbox.remove_request(name) for name in sent[-1])
    assert sent == [["a0", "a1"], ["d0", "d1"], ["c1"]] and waiting_bytes(outbox) == 0


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_that_waits_in_the_outbox_is_sent_when_the_engine_reads(loop: Any) -> None:
    async def run() -> None:
        client = await started("/none?length=100000")
        try:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            long = [client.submit([request(name, *[9] * 60_000, max_tokens=1)]) for name in "abc"]
            assert unsent_bytes(client) > 2 * 60_000 * 4
            client.abort_requests(("b",))
            os.kill(client.pid, signal.SIGCONT)
            for stream in (long[0], long[2]):
                ((_, output),) = await stream.next_batch(PATIENCE)
                assert output.finish_reason is FinishReason.LENGTH
            assert unsent_bytes(client) == 0 and await long[1].next_batch(0.01) == []
        finally:
            await client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


def test_a_request_survives_the_wire_unchanged() -> None:
    original = Request("a", array("i", [1, -2, 2**31 - 1]), SamplingParams(seed=-5, stop_token_ids=(7,)), 1.5, b"\x00d")
    (submit,) = Submit.messages_from_requests([original])
    (payload,) = FrameSplitter().feed(encode_frame(submit))
    message = decode_to_engine(payload)
    assert isinstance(message, Submit) and message.requests() == [original]


def test_frames_are_found_however_the_bytes_are_cut() -> None:
    data = encode_frame(Stop()) * 3
    splitter = FrameSplitter()
    assert sum(len(list(splitter.feed(data[i : i + 1]))) for i in range(len(data))) == 3
    assert len(list(splitter.feed(data))) == 3


def test_a_frame_of_absurd_length_is_an_error_and_not_an_allocation() -> None:
    with pytest.raises(ValueError, match="claims"):
        list(FrameSplitter().feed(b"\xff\xff\xff\xff"))


def test_an_engine_that_said_a_step_would_be_long_is_not_silent_until_it_is_much_longer() -> None:
    def told(client: EngineClient, message: Message) -> float:
        (payload,) = FrameSplitter().feed(encode_frame(message))
        client.handle_frame(payload)
        return client.last_heard

    async def run() -> None:
        client = EngineClient()
        heard = told(client, EngineUpdate([], EngineStats()))
        assert client.seconds_since_heartbeat_due(heard + 4) == 4
        heard = told(client, LongStep(10.0))
        assert client.seconds_since_heartbeat_due(heard + 29) == 0
        assert client.seconds_since_heartbeat_due(heard + 33) == pytest.approx(3)
        heard = told(client, EngineUpdate([], EngineStats()))
        assert client.seconds_since_heartbeat_due(heard + 4) == 4

    asyncio.run(run())


def test_requests_run_side_by_side_and_stats_follow() -> None:
    async def run() -> None:
        client = await started()
        try:
            found = await tokens_of(client, request("a", 1, 2), request("b", 5, max_tokens=4))
            assert found == {"a": [1, 2, 1], "b": [5, 5, 5, 5]}
            assert (
                client.stats.counters.generation_tokens == 7
                and client.num_awaiting_first_token == client.num_waiting_tokens == 0
            )
        finally:
            await client.close()

    asyncio.run(run())


def test_a_request_that_breaks_add_request_fails_alone() -> None:
    async def run() -> None:
        client = await started("/none?explode=66&step=0.01")
        try:
            good = asyncio.create_task(tokens_of(client, request("good", 1, max_tokens=20)))
            with pytest.raises(RequestFailedError, match="a bug in add_request"):
                await tokens_of(client, request("bad", 66))
            with pytest.raises(InvalidRequestError, match="never fit"):
                await tokens_of(client, request("long", 1, max_tokens=MAX_MODEL_LEN))
            assert await good == {"good": [1] * 20}
        finally:
            await client.close()

    asyncio.run(run())


def test_a_poisoned_request_fails_alone_in_its_batch() -> None:
    async def run() -> None:
        client = await started("/none?poison=66&step=0.01")
        try:
            good = asyncio.create_task(tokens_of(client, request("good", 1, max_tokens=20)))
            stream = client.submit([request("bad", 66)])
            ((_, output),) = await stream.next_batch(PATIENCE)
            assert output.finish_reason is FinishReason.ERROR and output.error
            assert await good == {"good": [1] * 20}
        finally:
            await client.close()

    asyncio.run(run())


def test_an_abort_ends_the_work_and_leaves_the_others(gate: Gate) -> None:
    async def run() -> None:
        client = await started(gate.holds("/none", 5))
        try:
            client.submit([request("a", 1, max_tokens=500)])
            others = asyncio.create_task(tokens_of(client, request("ab", 2, max_tokens=30)))
            await until(lambda: client.stats.counters.generation_tokens == 2 * 5)
            client.abort_requests(["a", "unknown"])
            assert not await client.call("reset_prefix_cache")  # "ab" runs
            await until(lambda: client.stats.num_running == 1)
            gate.open()
            assert await others == {"ab": [2] * 30}
            assert await client.call("reset_prefix_cache")
            assert client.stats.counters.generation_tokens == 5 + 30
        finally:
            await client.close()

    asyncio.run(run())


def test_a_call_that_cannot_be_done_fails_alone() -> None:
    async def run() -> None:
        client = await started("/none")
        try:
            with pytest.raises(RequestFailedError, match="knows no call 'nothing'"):
                await client.call("nothing")
            assert await client.call("reset_prefix_cache")
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("knob", ["crash", "die"])
def test_a_broken_engine_fails_everything_at_once_and_nothing_hangs(
    knob: str, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        client = await started(gate.holds("/none", 5, f"{knob}=66"))
        try:
            good = asyncio.create_task(tokens_of(client, request("good", 1, max_tokens=400)))
            await until(lambda: client.stats.counters.generation_tokens == 5)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(tokens_of(client, request("bad", 66)), PATIENCE)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(good, PATIENCE)
            with pytest.raises(EngineDeadError):
                client.submit([request("late", 1)])
            with pytest.raises(EngineDeadError):
                await client.call("reset_prefix_cache")
        finally:
            await client.close()
        assert client.exit_code not in (0, None)

    asyncio.run(run())
    if knob == "crash":
        assert "the engine broke in a step (RuntimeError: a bug in step)" in capfd.readouterr().err


def test_a_model_that_cannot_be_loaded_is_a_config_error_in_one_line() -> None:
    async def run(query: str, kind: type[HeadstartError], message: str) -> None:
        client = EngineClient()
        with pytest.raises(kind, match=message):
            await client.start(build_fake, EngineOptions(model=f"/none?{query}"))
        await client.close()

    asyncio.run(run("config=1", ConfigError, "there is no such model"))
    asyncio.run(run("broken=1", EngineDeadError, "a bug while loading"))


def test_close_while_loading_does_not_wait_for_the_load() -> None:
    async def run() -> None:
        client = EngineClient()
        start = asyncio.create_task(client.start(build_fake, EngineOptions(model="/none?load=1000")))
        await until(lambda: client.pid is not None)
        await asyncio.wait_for(client.close(), PATIENCE)
        with pytest.raises(EngineDeadError):
            await start

    asyncio.run(run())


def test_ctrl_c_and_sigterm_at_the_engine_process_are_the_parents_business() -> None:
    async def run() -> None:
        client = await started()
        try:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGINT)
            os.kill(client.pid, signal.SIGTERM)
            assert await tokens_of(client, request("a", 9)) == {"a": [9, 9, 9]}
        finally:
            await client.close()

    asyncio.run(run())


_PARENT = """
import asyncio, sys
from array import array
from typing import Any
from headstart.core.request import Request
from headstart.config.options import EngineOptions
from headstart.engine.engine_client import EngineClient
from server.fake_engine import build_fake
async def main():
    client = EngineClient()
    await client.start(build_fake, EngineOptions(model="/none?step=1000"))
    if sys.argv[1] == "busy":
        client.submit([Request("a", array("i", [1]))])
        await asyncio.sleep(0.3)  # it is in its step by now
    print(client.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_engine_process_dies_with_its_parent(state: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, state], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}/fd") or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("model", "at_once", "is_closed"),
    [
        ("/none?close=0.2", False, True),
        ("/none?close=0.2", True, False),  # a fast exit writes no pending blocks
        ("/none?crash=66", False, False),  # nor is anything written that a broken engine may have spoilt
    ],
)
def test_an_engine_that_is_stopped_in_peace_is_closed(
    model: str, at_once: bool, is_closed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        client = await started(model)
        client.submit([request("a", 66, max_tokens=1)])
        if "crash" in model:
            await client.died.wait()
        if at_once:
            client.kill()
        await client.close()
        assert client.exit_code == (1 if "crash" in model else -signal.SIGKILL if at_once else 0)

    asyncio.run(run())
    assert ("the fake engine was closed" in capfd.readouterr().err) is is_closed
