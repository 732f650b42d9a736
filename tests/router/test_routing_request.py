from array import array

from router.fleets import BLOCK, ROOT, names, prompt

from headstart.core.cache.hashing import root_hash
from headstart.router.routing_request import RoutingPrompt, router_root, text_as_pseudo_tokens


def test_only_full_blocks_have_names() -> None:
    assert [len(RoutingPrompt(range(length), ROOT).block_hashes(BLOCK)) for length in (0, 3, 4, 7, 8)] == [
        0,
        0,
        1,
        1,
        2,
    ]


def test_names_go_on_as_prompts_do() -> None:
    assert names(1, 2, 3)[:2] == names(1, 2)
    assert names(1, 2)[1] != names(3, 2)[1]


def test_names_are_worked_out_once_per_block_size() -> None:
    one = prompt(1, 2, 3, 4)
    assert one.block_hashes(4) is one.block_hashes(4)
    assert len(one.block_hashes(8)) == 2 and one.block_hashes(8)[0] not in one.block_hashes(4)


def test_tenants_models_and_adapters_never_share_a_name() -> None:
    roots = {
        router_root("m"),
        router_root("n"),
        router_root("m", adapter="a"),
        router_root("m", adapter=""),
        router_root("m", domain=b"t"),
        root_hash(b"m"),
    }
    assert len(roots) == 6


def test_an_answer_is_named_but_for_its_last_token_which_is_not_computed() -> None:
    one = RoutingPrompt(range(6), ROOT)
    assert one.block_hashes_with_output([6, 7, 8], BLOCK) == RoutingPrompt(range(8), ROOT).block_hashes(BLOCK)
    assert one.block_hashes_with_output([6, 7], BLOCK) == one.block_hashes(BLOCK)
    assert one.block_hashes(BLOCK) == RoutingPrompt(range(4), ROOT).block_hashes(BLOCK)


def test_text_is_packed_four_bytes_to_a_unit() -> None:
    assert text_as_pseudo_tokens(b"abcd" * 2 + b"e") == array("i", [0x64636261, 0x64636261, 0x65])
    assert text_as_pseudo_tokens(b"") == array("i")


def test_prompts_without_a_full_block_are_still_told_apart() -> None:
    assert RoutingPrompt([1], ROOT).short_prompt_key() != RoutingPrompt([2], ROOT).short_prompt_key()
