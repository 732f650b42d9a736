"""KV events on the wire: configuration, frames, replay, gaps, the end. Decoded as plain msgpack, without our types."""

import gc
import json
import sys
import tempfile
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from server.harness import spawn, wait_for

from headstart.config.options import EngineOptions
from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.core.request import Request, SamplingParams
from headstart.engine import kv_event_publisher as kv_events
from headstart.engine.assembly import build_engine, check_engine_options
from headstart.engine.kv_event_encoding import KVEventEncoder
from headstart.engine.kv_event_publisher import (
    KVEventPublisher,
    KVEventsConfig,
    _is_bound,
    parse_kv_events_config,
)
from headstart.model.weights.init_model import write_random_model

A, B = BlockHash(bytes(range(32))), BlockHash(b"\xff" * 32)
STORED = BlockStored((A, B), None, array("i", range(8)), 4)
WAIT = 120_000  # milliseconds


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `close` wait until all published batches are sent."""
    monkeypatch.setattr(kv_events, "CLOSE_SECONDS", WAIT / 1000)
    monkeypatch.setattr(kv_events, "LINGER_MILLISECONDS", WAIT)


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoints() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: socket paths must be short
        yield {"endpoint": f"ipc://{folder}/pub", "replay_endpoint": f"ipc://{folder}/replay"}


def decode(encoder: KVEventEncoder, *events: Event) -> list[Any]:
    ts, decoded, rank = msgspec.msgpack.decode(encoder.encode(1.5, list(events)))
    assert (ts, rank) == (1.5, 0)
    return decoded


def subscribe(context: "zmq.Context[Any]", publisher: KVEventPublisher, topic: bytes = b"") -> "zmq.Socket[bytes]":
    """A subscriber that is known to listen: events are published until it hears one."""
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, topic)
    sub.connect(publisher.endpoint)
    for _ in range(10_000):
        publisher.publish([AllBlocksCleared()])
        if sub.poll(10):
            return sub
    raise AssertionError("the subscriber hears nothing")


def receive(sock: "zmq.Socket[bytes]") -> list[bytes]:
    assert sock.poll(WAIT), "nothing came"
    return sock.recv_multipart()


def receive_stored(sub: "zmq.Socket[bytes]") -> int:
    """The number of the next batch that stores something."""
    while True:
        _, seq, payload = receive(sub)
        if msgspec.msgpack.decode(payload)[1][0]["type"] == "BlockStored":
            return int.from_bytes(seq, "big")


def replay(context: "zmq.Context[Any]", endpoint: str, start: int) -> list[tuple[bytes, int, list[Any]]]:
    """Return the messages of the replay socket from `start` on: topic, number, events; read up to the end marker."""
    sock = context.socket(zmq.DEALER)
    sock.connect(endpoint)
    sock.send_multipart((b"", start.to_bytes(8, "big")))
    found: list[tuple[bytes, int, list[Any]]] = []
    while True:
        empty, topic, seq, payload = receive(sock)
        assert empty == b""
        if not payload:
            assert (topic, seq) == (b"", b"\xff" * 8)
            sock.close(linger=0)
            return found
        found.append((topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)[1]))


# --- configuration


def test_defaults_are_those_of_vllm_but_events_stay_on_this_machine() -> None:
    config = parse_kv_events_config('{"enable_kv_cache_events": true}')
    assert config == KVEventsConfig(
        enable_kv_cache_events=True,
        publisher=None,
        endpoint="tcp://127.0.0.1:5557",
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
        topic="",
    )


@pytest.mark.parametrize("text", [None, "{}", '{"enable_kv_cache_events": true, "publisher": "null"}'])
def test_no_events_unless_asked_for(text: str | None) -> None:
    assert parse_kv_events_config(text) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"enable_kv_cache_events": true, "end_point": "tcp://*:1"}', "unknown field `end_point`.*replay_endpoint"),
        ('{"enable_kv_cache_events": "yes"}', "Expected `bool`"),
        ('{"publisher": "nats"}', "nats"),
        ('{"buffer_steps": -1}', ">= 0"),
        ('{"max_queue_size": 0}', ">= 1"),
        ("[]", "Expected `object`"),
        ("tcp://*:5557", "malformed"),
        ('{"enable_kv_cache_events": true, "endpoint": "inproc://x"}', "write it like"),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "tcp://127.0.0.1:5557"}', "must differ"),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_events_config.*{message}"):
        parse_kv_events_config(text)


def test_the_default_endpoint_is_bound_and_other_concrete_ones_are_connected_to() -> None:
    assert _is_bound(KVEventsConfig().endpoint)
    assert not _is_bound("tcp://127.0.0.1:5559") and not _is_bound("tcp://10.0.0.1:5557")


# --- encoding


def test_stored_blocks_have_the_fields_of_vllm() -> None:
    assert decode(KVEventEncoder("CPU"), STORED) == [
        {
            "type": "BlockStored",
            "block_hashes": [A, B],
            "parent_block_hash": None,
            "token_ids": [0, 1, 2, 3, 4, 5, 6, 7],
            "block_size": 4,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_removed_and_cleared_have_the_fields_of_vllm() -> None:
    assert decode(KVEventEncoder("GPU"), BlockRemoved((A,)), AllBlocksCleared()) == [
        {"type": "BlockRemoved", "block_hashes": [A], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]


def test_hashes_can_be_the_last_64_bits_as_int() -> None:
    child = BlockStored((B,), A, array("i", range(4)), 4)
    (event,) = decode(KVEventEncoder("CPU", int_block_hashes=True), child)
    assert event["block_hashes"] == [2**64 - 1] and event["parent_block_hash"] == 0x18191A1B1C1D1E1F


def test_extra_keys_name_the_adapter_everywhere_and_the_domain_once_but_never_plainly() -> None:
    encoder = KVEventEncoder("CPU")
    ours, theirs = (BlockStored((A, B), None, array("i", range(8)), 4, "lora", domain) for domain in (b"us", b"them"))
    first, second = decode(encoder, ours, theirs)
    assert first["lora_name"] == "lora" and first["extra_keys"][1] == ["lora"]
    digests = {event["extra_keys"][0][1] for event in (first, second)}
    assert len(digests) == 2 and all(len(bytes.fromhex(digest)) == 32 for digest in digests)
    assert b"us".hex() not in digests


# --- sockets


def test_a_subscriber_sees_every_batch_in_order(context: "zmq.Context[Any]", endpoints: dict[str, Any]) -> None:
    publisher = KVEventPublisher(KVEventsConfig(topic="kv@me@tiny", **endpoints), medium="CPU")
    sub = subscribe(context, publisher, b"kv@")
    for number in range(20):
        publisher.publish([BlockStored((A,), None, array("i", [number] * 4), 4)])
    tokens: list[int] = []
    last = None
    while len(tokens) < 20:
        topic, seq, payload = receive(sub)
        assert topic == b"kv@me@tiny" and len(seq) == 8
        number = int.from_bytes(seq, "big")
        assert last is None or number == last + 1
        last = number
        tokens += [event["token_ids"][0] for event in msgspec.msgpack.decode(payload)[1] if "token_ids" in event]
    assert tokens == list(range(20)) and publisher.num_dropped_batches == 0
    publisher.close()


def test_who_comes_late_replays_what_was_missed(context: "zmq.Context[Any]", endpoints: dict[str, Any]) -> None:
    publisher = KVEventPublisher(KVEventsConfig(topic="t", **endpoints), medium="CPU")
    sub = subscribe(context, publisher)
    for _ in range(5):
        publisher.publish([STORED])
    for _ in range(5):
        receive_stored(sub)
    assert publisher.replay_endpoint is not None
    everything = replay(context, publisher.replay_endpoint, 0)
    assert [seq for _, seq, _ in everything] == list(range(len(everything)))
    assert all(topic == b"t" for topic, _, _ in everything)
    assert [events[0]["type"] for _, _, events in everything[-6:]] == ["AllBlocksCleared"] + ["BlockStored"] * 5
    end = len(everything)
    assert [seq for _, seq, _ in replay(context, publisher.replay_endpoint, end - 2)] == [end - 2, end - 1]
    assert replay(context, publisher.replay_endpoint, end) == []
    publisher.close()


def test_replay_keeps_the_newest_batches_and_no_more(context: "zmq.Context[Any]", endpoints: dict[str, Any]) -> None:
    publisher = KVEventPublisher(KVEventsConfig(buffer_steps=3, **endpoints), medium="CPU")
    sub = subscribe(context, publisher)
    for _ in range(5):
        publisher.publish([STORED])
    last = [receive_stored(sub) for _ in range(5)][-1]
    assert publisher.replay_endpoint is not None
    assert [seq for _, seq, _ in replay(context, publisher.replay_endpoint, 0)] == [last - 2, last - 1, last]
    publisher.close()


def test_a_long_replay_comes_whole(context: "zmq.Context[Any]", endpoints: dict[str, Any]) -> None:
    """ZMQ's own limit of 1,000 messages would cut it without a word."""
    publisher = KVEventPublisher(KVEventsConfig(**endpoints), medium="CPU")
    sub = subscribe(context, publisher)
    for _ in range(3000):
        publisher.publish([AllBlocksCleared()])
    publisher.publish([STORED])
    receive_stored(sub)
    assert publisher.replay_endpoint is not None
    found = [seq for _, seq, _ in replay(context, publisher.replay_endpoint, 0)]
    assert len(found) > 3000 and found == list(range(len(found)))
    publisher.close()


@pytest.mark.parametrize("kept", [1, 2, 5, 100, 2_000])
def test_replays_one_after_the_other_come_whole(
    kept: int, context: "zmq.Context[Any]", endpoints: dict[str, Any]
) -> None:
    """A ROUTER learns late that its client has read: what it sends before that does not fit, and is dropped."""
    publisher = KVEventPublisher(KVEventsConfig(**endpoints, buffer_steps=kept), medium="CPU")
    for _ in range(kept):
        publisher.publish([AllBlocksCleared()])
    sock = context.socket(zmq.DEALER)
    sock.connect(publisher.replay_endpoint or "")
    while len(replay(context, publisher.replay_endpoint or "", 0)) < kept:
        pass
    for _ in range(6):
        sock.send_multipart((b"", bytes(8)))
        frames = [receive(sock) for _ in range(kept + 1)]
        assert [len(one[3]) > 0 for one in frames] == [True] * kept + [False]
    sock.close(linger=0)
    publisher.close()


def test_invalid_messages_on_the_replay_socket_are_ignored(
    context: "zmq.Context[Any]", endpoints: dict[str, Any]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig(**endpoints), medium="CPU")
    subscribe(context, publisher)
    assert publisher.replay_endpoint is not None
    bad = context.socket(zmq.DEALER)
    bad.connect(publisher.replay_endpoint)
    for frames in [(b"x",), (b"", b"1"), (b"", b"1" * 8, b"more"), (b"", b"")]:
        bad.send_multipart(frames)
    assert replay(context, publisher.replay_endpoint, 0)
    assert not bad.poll(0)
    publisher.close()


class _Stuck(list[Event]):
    """Events that the sender cannot encode before `gate` is open."""

    def __init__(self, events: list[Event], gate: threading.Event, reached: threading.Event) -> None:
        super().__init__(events)
        self.gate, self.reached = gate, reached

    def __iter__(self) -> Iterator[Event]:
        self.reached.set()
        assert self.gate.wait(WAIT / 1000)
        return super().__iter__()


def test_what_does_not_fit_is_counted_said_and_leaves_a_gap(
    context: "zmq.Context[Any]", endpoints: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig(max_queue_size=1, **endpoints), medium="CPU")
    sub = subscribe(context, publisher)
    gate, reached = threading.Event(), threading.Event()
    wait_for(publisher._queue.empty)
    publisher.publish(_Stuck([STORED], gate, reached))
    assert reached.wait(WAIT / 1000)
    before = publisher.num_dropped_batches
    for _ in range(4):
        publisher.publish([STORED])  # one waits, three have no room
    assert publisher.num_dropped_batches == before + 3
    gate.set()
    first, second = receive_stored(sub), receive_stored(sub)
    publisher.publish([STORED])
    assert (second, receive_stored(sub)) == (first + 1, first + 5)
    assert "dropped batch" in capsys.readouterr().err
    publisher.close()


def test_an_event_that_cannot_be_encoded_costs_its_own_batch_only(
    context: "zmq.Context[Any]", endpoints: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig(**endpoints), medium="CPU")
    sub = subscribe(context, publisher)
    publisher.publish([BlockStored((A,), None, None, 4)])  # type: ignore[arg-type]
    publisher.publish([STORED])
    receive_stored(sub)
    assert "could not be sent (" in capsys.readouterr().err
    assert publisher.num_dropped_batches == 1
    publisher.close()


def test_close_sends_what_is_waiting_and_frees_the_address(
    context: "zmq.Context[Any]", endpoints: dict[str, Any]
) -> None:
    publisher = KVEventPublisher(KVEventsConfig(**endpoints), medium="CPU")
    sub = subscribe(context, publisher)
    for _ in range(50):
        publisher.publish([STORED])
    publisher.close()
    publisher.close()
    for _ in range(50):
        receive_stored(sub)
    KVEventPublisher(KVEventsConfig(**endpoints), medium="CPU").close()


def test_a_publisher_without_references_ends(endpoints: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    publisher = KVEventPublisher(KVEventsConfig(**endpoints), medium="CPU")
    (thread,) = set(threading.enumerate()) - before
    del publisher
    gc.collect()
    assert not thread.is_alive()


def test_a_port_in_use_is_refused_with_its_name() -> None:
    first = KVEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*"), medium="CPU")
    port = first.endpoint.rpartition(":")[2]
    with pytest.raises(ConfigError, match=f"cannot use tcp://\\*:{port} .*name another one"):
        KVEventPublisher(KVEventsConfig(endpoint=f"tcp://*:{port}"), medium="CPU")
    first.close()


# --- the engine and the server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_random_model("tiny", tmp_path_factory.mktemp("models") / "tiny", dtype="float32", progress=False))


def test_an_engine_built_from_options_publishes_its_index(
    context: "zmq.Context[Any]", endpoints: dict[str, Any], tiny: str
) -> None:
    config = json.dumps({"enable_kv_cache_events": True, **endpoints})
    engine, _ = build_engine(EngineOptions(model=tiny, num_gpu_blocks_override=40, kv_events_config=config))
    engine.add_request(Request("a", array("i", range(40)), SamplingParams(temperature=0.0, max_tokens=1)))
    while engine.has_work:
        engine.step()
    pool = engine.scheduler.pool
    assert pool.num_published == 2
    ((_, first, (event,)),) = wait_for(lambda: replay(context, endpoints["replay_endpoint"], 0))
    assert first == 0 and event["token_ids"] == list(range(32)) and event["medium"] == "CPU"
    assert len(event["block_hashes"]) == 2 and all(pool.contains(name) for name in event["block_hashes"])
    assert engine.reset_prefix_cache()
    ((_, _, events),) = wait_for(lambda: replay(context, endpoints["replay_endpoint"], 1))
    assert events == [{"type": "AllBlocksCleared"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kv_events_config": "{"}, "kv_events_config"), ({"enable_prefix_caching": False}, "without the prefix cache")],
)
def test_options_that_cannot_publish_are_refused_before_loading(change: dict[str, Any], message: str) -> None:
    options = EngineOptions(kv_events_config='{"enable_kv_cache_events": true}')
    with pytest.raises(ConfigError, match=message):
        check_engine_options(replace(options, **change))


def test_a_server_publishes_what_it_caches_and_ends_cleanly(
    context: "zmq.Context[Any]", endpoints: dict[str, Any], tiny: str, tmp_path: Path
) -> None:
    config = json.dumps({"enable_kv_cache_events": True, "topic": "kv@here@tiny", **endpoints})
    options = ["--port", "0", "--num-blocks", "64", "--max-model-len", "256", "--kv-events-config", config]
    with spawn([sys.executable, "-m", "headstart", "serve", tiny, *options], tmp_path / "log") as server:
        with server.wait_ready().client() as client:
            for prompt in (list(range(40)), list(range(40)), list(range(100, 140))):
                assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).is_success
        wait_for(lambda: len(replay(context, endpoints["replay_endpoint"], 0)) == 2)
        batches = replay(context, endpoints["replay_endpoint"], 0)
        assert [(topic, seq) for topic, seq, _ in batches] == [(b"kv@here@tiny", 0), (b"kv@here@tiny", 1)]
        assert [events[0]["token_ids"][0] for _, _, events in batches] == [0, 100]
        assert "KV events: at ipc://" in server.log
        assert server.stop() == 0
