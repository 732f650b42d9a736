"""Payloads of vLLM's own making, SGLang's arrays, and nonsense, as events of ours."""

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from headstart.core.cache.hashing import BlockHash
from headstart.engine.kv_event_encoding import KVEventEncoder
from headstart.gateway.kv_events.kv_event_decoding import MAX_BLOCKS, KVEventDecoder, domain_of_cache_salt
from headstart.openai.engine_requests import salted_domain
from headstart.router.index.kv_event_index import ReplicaKVEventIndex
from headstart.router.routing_request import RoutingPrompt, router_root

SAMPLES = json.loads((Path(__file__).parent / "kv_event_samples.json").read_text())
A, B, C = (BlockHash(bytes([number]) * 32) for number in range(3))


def made(name: str) -> bytes:
    """A batch that vLLM's own classes and encoder made."""
    return bytes.fromhex(SAMPLES["made"][name])


def handle(number: int) -> BlockHash:
    return BlockHash((number % 2**64).to_bytes(8, "big"))


def tokens(*ids: int) -> "array[int]":
    return array("i", ids)


def decode(payload: bytes, kind: str = "vllm") -> list[Event]:
    """Its events; nothing in it may be left out."""
    decoder = KVEventDecoder(kind)
    found = list(decoder.decode(payload))
    assert not any(value for key, value in decoder.counts.items() if key != "events")
    return found


def decode_events(*events: Any, kind: str = "vllm") -> list[Event]:
    return decode(msgspec.msgpack.encode([1.5, list(events), 0]), kind)


def left_out(payload: bytes, kind: str = "vllm") -> dict[str, int]:
    """Return the counts after a payload without events of use."""
    decoder = KVEventDecoder(kind)
    assert list(decoder.decode(payload)) == []
    return {key: value for key, value in decoder.counts.items() if value and key != "events"}


# --- what vLLM sends


def test_what_a_real_vllm_sent_makes_an_index_without_a_loose_end() -> None:
    told = ReplicaKVEventIndex(32, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain))
    decoder = KVEventDecoder("vllm")
    prompts: list[tuple[list[int], str | None]] = []
    hashes = {"BlockStored": 0, "BlockRemoved": 0}
    for line in SAMPLES["captured"]:
        payload = bytes.fromhex(line)
        told.apply(decoder.decode(payload))
        told.check()
        for event in msgspec.msgpack.decode(payload)[1]:
            hashes[event["type"]] += len(event["block_hashes"])
            if event["type"] == "BlockStored" and event["parent_block_hash"] is None:
                salts = event["extra_keys"] and event["extra_keys"][0]
                prompts.append((event["token_ids"], salts[0] if salts else None))
    assert (told.counts["stored"], told.counts["removed"]) == (hashes["BlockStored"], hashes["BlockRemoved"])
    assert hashes["BlockRemoved"] > 0
    assert not any(value for key, value in decoder.counts.items() if key != "events")
    assert not any(told.counts[key] for key in ("unknown_parents", "unknown_copies", "other_block_size"))
    assert {salt for _, salt in prompts} == {None, "amber", "birch"}
    ids, salt = prompts[-1]
    assert (
        told.num_cached_prefix_blocks(
            RoutingPrompt(ids, router_root("m", domain=domain_of_cache_salt(salt))).block_hashes(32), 0.0
        )
        == len(ids) // 32
    )
    assert (
        told.num_cached_prefix_blocks(
            RoutingPrompt(ids, router_root("m", domain=domain_of_cache_salt("other"))).block_hashes(32), 0.0
        )
        == 0
    )


def test_hashes_are_bytes_or_64_bits() -> None:
    assert decode(made("bytes")) == [
        BlockStored((A, B), None, tokens(*range(8)), 4, None, domain_of_cache_salt("amber")),
        BlockRemoved((A,)),
        AllBlocksCleared(),
    ]
    assert decode(made("ints")) == [
        BlockStored((handle(-1), handle(7)), None, tokens(*range(8)), 4),
        BlockStored((handle(9),), handle(7), tokens(8, 9, 10, 11), 4),
        BlockRemoved((handle(-1),)),
    ]


def test_an_adapter_is_not_taken_for_a_salt() -> None:
    assert decode(made("adapter")) == [
        BlockStored((A, B), None, tokens(*range(8)), 4, "poet", domain_of_cache_salt("amber")),
    ]


def test_a_block_with_an_image_is_known_and_equals_no_prompts() -> None:
    """The text before it can be promised, nothing behind it can; and another image is another block."""
    first, image = decode(made("image"))
    assert first == BlockStored((A,), None, tokens(0, 1, 2, 3), 4)
    assert isinstance(image, BlockStored) and image.block_hashes == (B, C) and image.parent_block_hash == A
    assert len(image.domain) == 32
    told = ReplicaKVEventIndex(4, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain))
    told.apply([first, image])
    assert len(told) == 3
    assert told.num_cached_prefix_blocks(RoutingPrompt(range(12), router_root("m")).block_hashes(4), 0.0) == 1


def test_embeddings_are_not_taken_for_a_salt() -> None:
    first, second = decode(made("embeds"))
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.block_hashes, second.block_hashes, second.parent_block_hash) == ((A,), (B,), A)
    assert first.domain not in (b"", domain_of_cache_salt("amber")) and second.domain not in (b"", first.domain)


def test_only_the_group_that_keeps_all_tokens_is_followed() -> None:
    decoder = KVEventDecoder("vllm")
    assert list(decoder.decode(made("window"))) == [BlockStored((A, B), None, tokens(*range(8)), 4)]
    assert decoder.counts["other_groups"] == 2
    again = {"type": "BlockStored", "block_hashes": [A], "token_ids": [1], "block_size": 1, "group_idx": 2}
    assert list(decoder.decode(msgspec.msgpack.encode([0.0, [again]]))) == []
    decoder.reset()
    assert list(decoder.decode(msgspec.msgpack.encode([0.0, [again]])))


def test_a_block_that_moves_to_another_tier_stays_until_it_is_gone_from_both() -> None:
    stored, copy, gone = decode(made("offload"))
    told = ReplicaKVEventIndex(4, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain))
    told.apply([stored, copy, gone])
    assert told.num_cached_prefix_blocks(RoutingPrompt(range(8), router_root("m")).block_hashes(4), 0.0) == 1
    told.check()


# --- shapes


STORED = [[11, 12], None, [0, 1, 2, 3, 4, 5, 6, 7], 4, None]
FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
EXPECTED = BlockStored((handle(11), handle(12)), None, tokens(*range(8)), 4)


@pytest.mark.parametrize("batch_is_map", [False, True])
@pytest.mark.parametrize("event_is_map", [False, True])
def test_arrays_and_maps_at_both_levels(batch_is_map: bool, event_is_map: bool) -> None:
    stored: Any = (
        {"type": "BlockStored", "new_key": 1, **dict(zip(FIELDS, STORED, strict=True))}
        if event_is_map
        else ["BlockStored", *STORED]
    )
    removed: Any = {"type": "BlockRemoved", "block_hashes": [11]} if event_is_map else ["BlockRemoved", [11]]
    cleared: Any = {"type": "AllBlocksCleared"} if event_is_map else ["AllBlocksCleared"]
    events = [stored, removed, cleared]
    batch: Any = {"ts": 1.5, "events": events, "more": None} if batch_is_map else [1.5, events]
    assert decode(msgspec.msgpack.encode(batch), "sglang") == [
        EXPECTED,
        BlockRemoved((handle(11),)),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8, 9, 10, 11, 12])
def test_arrays_may_end_early_and_go_on_longer(length: int) -> None:
    whole = ["BlockStored", *STORED[:4], None, "GPU", None, None, 0, "full_attention", None, "of a later version"]
    assert decode_events(whole[: length + 1]) == [EXPECTED]


def test_signed_and_unsigned_64_bits_are_the_same_hash() -> None:
    assert decode_events(["BlockRemoved", [-3]]) == decode_events(["BlockRemoved", [2**64 - 3]])


def test_an_adapter_that_has_only_a_number_is_still_another_one() -> None:
    (event,) = decode_events(["BlockStored", [1], None, [1, 2], 2, 7])
    assert isinstance(event, BlockStored) and event.adapter == "lora_id 7"


def test_long_chains_come_in_pieces_that_hang_together() -> None:
    count = 2 * MAX_BLOCKS + 3
    pieces = decode_events(["BlockStored", list(range(count)), 99_999, list(range(count * 2)), 2])
    assert [len(piece.block_hashes) for piece in pieces if isinstance(piece, BlockStored)] == [256, 256, 3]
    before = handle(99_999)
    for piece in pieces:
        assert isinstance(piece, BlockStored) and piece.parent_block_hash == before
        assert len(piece.token_ids) == 2 * len(piece.block_hashes)
        before = piece.block_hashes[-1]


# --- domains


def test_headstarts_events_name_a_salt_as_prompts_do() -> None:
    """For the router a salt is a salt, whichever engine it goes to."""
    event = BlockStored((A, B), None, tokens(*range(8)), 4, "lora", salted_domain(b"", "amber"))
    (ours,) = decode(KVEventEncoder("CPU").encode(1.5, [event]), "headstart")
    (vllms,) = decode(made("bytes"))[:1]
    assert isinstance(ours, BlockStored) and isinstance(vllms, BlockStored)
    assert ours.domain == vllms.domain == domain_of_cache_salt("amber") and ours.adapter == "lora"


def test_no_salt_is_no_domain() -> None:
    assert domain_of_cache_salt(None) == domain_of_cache_salt("") == b""
    assert domain_of_cache_salt("a") != domain_of_cache_salt("b")


def test_what_is_private_behind_a_public_prefix_begins_a_domain_there() -> None:
    event = BlockStored((B,), A, tokens(1, 2), 2, None, b"tenant")
    (found,) = decode(KVEventEncoder("CPU").encode(1.5, [event]), "headstart")
    assert isinstance(found, BlockStored) and found.parent_block_hash == A and len(found.domain) == 64


# --- nonsense


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", b"\xc0", b"\x01", b"\xa1x"])
def test_what_is_no_batch_is_counted(payload: bytes) -> None:
    assert left_out(payload) == {"undecodable": 1}


@pytest.mark.parametrize("batch", [[], [1.0], [1.0, None], {"ts": 1.0}, {"events": {}}, [[], 5]])
def test_a_batch_without_events_is_counted(batch: Any) -> None:
    assert left_out(msgspec.msgpack.encode(batch)) == {"undecodable": 1}


@pytest.mark.parametrize(
    "event",
    [
        None,
        [],
        {},
        7,
        ["BlockStored"],
        ["BlockStored", [1]],
        ["BlockStored", [1], None, [1, 2, 3], 2],
        ["BlockStored", [1], None, [1, 2], 0],
        ["BlockStored", [1], None, [1, 2], "2"],
        ["BlockStored", [1], None, [1, 2**31], 2],
        ["BlockStored", [1], None, ["x", "y"], 2],
        ["BlockStored", [1], 1.5, [1, 2], 2],
        ["BlockStored", [None], None, [1, 2], 2],
        ["BlockStored", 1, None, [1, 2], 2],
        ["BlockStored", [1], None, [1, 2], 2, None, None, None, [7]],
        ["BlockRemoved"],
        ["BlockRemoved", None],
        {"type": "BlockRemoved"},
        {"type": ["BlockRemoved"]},
    ],
)
def test_an_event_that_cannot_be_read_costs_itself_only(event: Any) -> None:
    decoder = KVEventDecoder("vllm")
    payload = msgspec.msgpack.encode([1.0, [event, ["AllBlocksCleared"]]])
    assert list(decoder.decode(payload)) == [AllBlocksCleared()]
    assert decoder.counts["malformed"] == 1


def test_events_of_a_later_version_are_left_out() -> None:
    assert left_out(msgspec.msgpack.encode([1.0, [["BlockMoved", [1]], {"type": "Tier"}]])) == {"unknown_events": 2}


@given(st.binary(max_size=200))
def test_no_payload_raises(payload: bytes) -> None:
    list(KVEventDecoder("vllm").decode(payload))


_ANYTHING = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*FIELDS, "type"]), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.lists(
        st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(["BlockStored", "BlockRemoved"]), st.lists(_ANYTHING))
        | st.dictionaries(st.sampled_from([*FIELDS, "extra_keys", "group_idx"]), _ANYTHING).map(
            lambda values: {"type": "BlockStored", **values}
        ),
        max_size=4,
    )
)
def test_no_event_raises(events: list[Any]) -> None:
    decoder = KVEventDecoder("headstart")
    told = ReplicaKVEventIndex(2, lambda adapter, domain: router_root("m", adapter=adapter, domain=domain))
    told.apply(decoder.decode(msgspec.msgpack.encode([1.0, events])))
    told.check()
    assert decoder.counts["events"] == len(events)
