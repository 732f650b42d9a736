"""Hostile batches: nesting, absurd sizes and wrong shapes cost themselves, and nothing else."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from headstart.gateway.kv_events.kv_event_decoding import MAX_BLOCKS, KVEventDecoder
from headstart.router.index.kv_event_index import ReplicaKVEventIndex
from headstart.router.routing_request import router_root

SAMPLES = json.loads((Path(__file__).parent / "kv_event_samples.json").read_text())
REAL = [bytes.fromhex(line) for line in (*SAMPLES["captured"], *SAMPLES["made"].values())]
WELL_FORMED = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1, 2], 2], ["AllBlocksCleared"]]])
ARRAY, MAP = b"\x91", b"\x81\xa1a"


def encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def spliced(value: Any, raw: bytes) -> bytes:
    """`value` as msgpack, with `raw` in place of the text "HERE"."""
    return encode(value).replace(encode("HERE"), raw)


def is_well(decoder: KVEventDecoder) -> bool:
    """Whether a following batch is read."""
    kinds = [type(event) for event in decoder.decode(WELL_FORMED)]
    return kinds == [BlockStored, AllBlocksCleared]


@pytest.mark.parametrize("depth", [2_000, 100_000, 5_000_000])
@pytest.mark.parametrize("head", [ARRAY, MAP])
@pytest.mark.parametrize(
    "around",
    [
        "HERE",
        ["HERE", []],
        [1.0, "HERE"],
        [1.0, [], "HERE"],
        [1.0, [["HERE", 1]]],
        [1.0, [["BlockRemoved", "HERE"]]],
        [1.0, [["BlockStored", [1], "HERE", [1, 2], 2]]],
        [1.0, [["BlockStored", [1], None, "HERE", 2]]],
        [1.0, [["BlockStored", [1], None, [1, 2], 2, None, "HERE"]]],
        [1.0, [["BlockStored", [1], None, [1, 2], 2, None, None, None, ["HERE"]]]],
        {"events": "HERE"},
        {"other": "HERE", "events": []},
        {"events": [{"type": "BlockRemoved", "block_hashes": "HERE"}]},
    ],
)
def test_deep_nesting_costs_its_batch_or_event(around: Any, head: bytes, depth: int) -> None:
    decoder = KVEventDecoder("vllm")
    list(decoder.decode(spliced(around, head * depth + b"\xc0")))
    assert decoder.counts["undecodable"] + decoder.counts["malformed"] == 1
    assert is_well(decoder)


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\xa0", b"\x01", b"\xc0"])
@pytest.mark.parametrize("around", [[1.0, "HERE"], {"events": "HERE"}])
def test_a_batch_of_a_million_tiny_events_is_refused_by_its_head(around: Any, filler: bytes) -> None:
    """One byte of payload would become an object of 50 to 100 bytes."""
    decoder = KVEventDecoder("vllm")
    payload = spliced(around, b"\xdd" + (2**20).to_bytes(4, "big") + filler * 2**20)
    assert list(decoder.decode(payload)) == []
    assert decoder.counts["undecodable"] == 1 and decoder.counts["events"] == 0
    assert is_well(decoder)


@pytest.mark.parametrize(
    ("event", "removes"),
    [
        (["BlockRemoved", [b"x" * 65]], True),
        (["BlockRemoved", ["x" * 65]], True),
        (["BlockRemoved", [1, [2]]], True),
        (["BlockRemoved", [True]], True),
        (["BlockRemoved", [1.0]], True),
        ([7], True),
        (None, True),
        (["BlockStored", [b"x" * 65], None, [1, 2], 2], False),
        (["BlockStored", [1], b"x" * 65, [1, 2], 2], False),
        (["BlockStored", [1], b"x" * 5_000, [1, 2], 2], False),
        (["BlockStored", [1], None, [1, -2], 2], False),
        (["BlockStored", [1], None, [1, 2], True], False),
        (["BlockStored", [1], None, [1, 2], 2**62], False),
        (["BlockStored", [], None, [1, 2], 2**40], False),
        (["BlockStored", [1], None, [1] * 70_000, 70_000], False),
        (["BlockStored", [1], None, [1, 2], 2, None, None, "x" * 5_000], False),
        (["BlockStored", [1], None, [1, 2], 2, "x" * 5_000], False),
        (["BlockStored", [1], None, [1, 2], 2, None, None, None, [["x" * 3_000_000]]], False),
    ],
)
def test_a_wrong_shape_costs_its_event_and_an_unknown_removal_is_told(event: Any, removes: bool) -> None:
    """A block that is not stored is only missing; one that is not removed would be believed to be there."""
    decoder = KVEventDecoder("vllm")
    assert list(decoder.decode(encode([1.0, [event]]))) == []
    assert decoder.counts["malformed"] == 1
    assert decoder.num_unknown_removals == removes
    assert is_well(decoder)


def test_an_undecodable_batch_may_have_removed_anything() -> None:
    decoder = KVEventDecoder("vllm")
    assert list(decoder.decode(b"\xc1")) == []
    assert decoder.num_unknown_removals == 1


def test_fields_that_are_not_read_may_be_anything() -> None:
    decoder = KVEventDecoder("vllm")
    event = ["BlockStored", [1], None, [1, 2], 2, None, ["GPU"] * 5_000, None, None, None, None, {"later": [1]}]
    assert len(list(decoder.decode(encode([1.0, [event], 0, {"more": 1}])))) == 1
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": {"a": [1]}, "later": ["x" * 5_000]}
    assert len(list(decoder.decode(encode({"events": [event], "later": 1})))) == 1


def test_hashes_may_be_texts() -> None:
    (found,) = KVEventDecoder("vllm").decode(encode([1.0, [["BlockRemoved", ["ab", "cd"]]]]))
    assert found == BlockRemoved((b"ab", b"cd"))


def test_long_removals_come_in_pieces() -> None:
    pieces = list(KVEventDecoder("vllm").decode(encode([1.0, [["BlockRemoved", list(range(2 * MAX_BLOCKS + 1))]]])))
    assert [len(piece.block_hashes) for piece in pieces if isinstance(piece, BlockRemoved)] == [256, 256, 1]


@given(st.sampled_from(REAL), st.integers(0, 2**32), st.integers(1, 8))
def test_real_batches_with_changed_bytes_never_raise_nor_outgrow_the_index(
    real: bytes, seed: int, num_changes: int
) -> None:
    rng, payload = random.Random(seed), bytearray(real)
    for _ in range(num_changes):
        at = rng.randrange(len(payload))
        match rng.randrange(3):
            case 0:
                payload[at] = rng.randrange(256)
            case 1:
                payload[at:at] = rng.randbytes(rng.randrange(1, 8))
            case _:
                del payload[at : at + rng.randrange(1, 8)]
    told = ReplicaKVEventIndex(
        32, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain), max_blocks=40
    )
    decoder = KVEventDecoder("vllm")
    for _ in range(3):
        told.apply(decoder.decode(bytes(payload)))
        told.check()
        assert len(told) <= 40
    assert is_well(decoder)
