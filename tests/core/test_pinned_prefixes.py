"""Pinned prefixes: warmed by the scheduler itself, never evicted, capped, and ordinary cache once they are removed."""

from array import array
from collections.abc import Callable
from functools import partial

import pytest
from checking import executor_of, generate, make_engine, make_request, run

from headstart.core.batch import Chunk
from headstart.core.cache.pinned_prefix import PrefixInfo, PrefixState
from headstart.core.engine import Engine
from headstart.core.errors import InvalidRequestError, RequestTooLargeError
from headstart.core.request import CacheMode

FIXED = array("i", range(1, 9))  # two blocks
OTHER = array("i", range(21, 29))


def pinned_engine(**options: object) -> Engine:
    """8 usable blocks of 4 tokens, two of them with the prefix "fixed", warm."""
    engine = make_engine(**options)  # type: ignore[arg-type]
    engine.add_prefix("fixed", FIXED)
    assert run(engine) == {}  # nothing comes out of warming
    return engine


def info_of(engine: Engine, name: str = "fixed") -> PrefixInfo:
    return next(info for info in engine.list_prefixes() if info.name == name)


def flood(engine: Engine, count: int = 20) -> None:
    """One-off prompts, far more than the pool holds."""
    for number in range(count):
        generate(engine, make_request(f"flood{number}", range(1000 + 20 * number, 1012 + 20 * number)))


def cached(engine: Engine, prompt: list[int], **fields: object) -> int:
    engine.add_request(make_request("asks", prompt, **fields))
    (output,) = run(engine)["asks"]
    return output.num_cached_tokens


def test_the_first_request_takes_over_every_whole_block() -> None:
    engine = make_engine()
    assert engine.add_prefix("fixed", [*FIXED, 9, 10]).state is PrefixState.WARMING  # 9, 10: less than a block
    run(engine)
    assert info_of(engine) == PrefixInfo("fixed", "", PrefixState.READY, None, 8, 2, 0, 0, None)
    assert cached(engine, [*FIXED, 9, 10, 11]) == 8


def test_a_flood_never_evicts_it() -> None:
    engine = pinned_engine()
    flood(engine)
    assert engine.scheduler.pool.evictions["capacity"] > 0
    assert cached(engine, [*FIXED, 9]) == 8


def test_the_counters_of_pinned_blocks_follow_their_use() -> None:
    engine = pinned_engine()
    pool = engine.stats().pool
    assert (pool.num_pinned, pool.num_pinned_idle, pool.num_free) == (2, 2, 6)
    engine.add_request(make_request("uses", [*FIXED[:4], 9, 10], max_tokens=3))
    engine.step()
    pool = engine.stats().pool
    assert (pool.num_pinned, pool.num_pinned_idle) == (2, 1) and pool.num_free < 6
    assert run(engine)["uses"][-1].num_cached_tokens == 4
    pool = engine.stats().pool
    assert (pool.num_pinned, pool.num_pinned_idle, pool.num_free) == (2, 2, 6)
    assert info_of(engine)[-3:-1] == (1, 4)  # hits, tokens saved
    assert engine.stats().counters.pinned_tokens == 4


def test_what_is_pinned_is_not_free() -> None:
    engine = pinned_engine()
    assert engine.stats().pool.num_free == 6
    with pytest.raises(RequestTooLargeError, match="need 7 KV blocks but the pool has 6 beside 2 pinned ones"):
        engine.add_request(make_request("big", range(100, 128)))
    assert len(generate(engine, make_request("own", [*FIXED, *range(100, 120)], max_tokens=5))["own"]) == 5


def test_once_removed_it_is_ordinary_cache() -> None:
    engine = pinned_engine()
    assert engine.remove_prefix("fixed") and not engine.remove_prefix("fixed")
    assert engine.list_prefixes() == [] and engine.stats().pool.num_free == 8
    assert cached(engine, [*FIXED, 9]) == 8
    flood(engine)
    assert cached(engine, [*FIXED, 9]) == 0


def test_a_reset_keeps_it_unless_asked() -> None:
    engine = pinned_engine()
    generate(engine, make_request("other", [*OTHER, 9]))
    assert engine.reset_prefix_cache() and not engine.has_work
    assert cached(engine, [*FIXED, 9]) == 8 and cached(engine, [*OTHER, 9]) == 0
    assert engine.reset_prefix_cache(pinned=True)
    assert info_of(engine).state is PrefixState.WARMING and engine.has_work
    run(engine)
    assert info_of(engine).state is PrefixState.READY
    assert cached(engine, [*FIXED, 9]) == 8


def test_a_reset_is_refused_while_something_runs() -> None:
    engine = pinned_engine()
    engine.add_request(make_request("runs", OTHER, max_tokens=3))
    engine.step()
    assert not engine.reset_prefix_cache() and not engine.reset_prefix_cache(pinned=True)
    run(engine)
    assert engine.reset_prefix_cache()


def test_no_more_than_the_share_is_pinned_in_distinct_blocks() -> None:
    engine = pinned_engine()  # at most 4 of 8
    engine.add_prefix("longer", [*FIXED, *range(9, 17)])  # shares two of its four blocks
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_prefix("other", OTHER)
    assert caught.value.code == "prefix_too_large"
    assert "makes 6 pinned blocks; of the pool's 8 at most 4 may be pinned (max_pinned_share 0.5)" in str(caught.value)
    assert [info.name for info in engine.list_prefixes()] == ["fixed", "longer"]
    run(engine)
    assert engine.stats().pool.num_pinned == 4 and engine.stats().pool.num_free == 4


def test_what_two_prefixes_share_stays_until_both_are_gone() -> None:
    engine = pinned_engine()
    engine.add_prefix("longer", [*FIXED, *range(9, 17)])
    run(engine)
    engine.remove_prefix("fixed")
    flood(engine)
    assert cached(engine, [*FIXED, 9]) == 8
    engine.remove_prefix("longer")
    assert engine.stats().pool.num_pinned == 0


@pytest.mark.parametrize(
    ("name", "tokens", "complaint"),
    [
        ("fixed", OTHER, "there is a prefix 'fixed' already"),
        ("a/b", OTHER, "'a/b' is not a valid prefix name"),
        ("", OTHER, "is not a valid prefix name"),
        ("short", [1, 2, 3], "has 3 tokens that later prompts can share: less than one block of 4"),
        ("long", range(64), "at most 4 may be pinned"),
    ],
)
def test_a_prefix_that_cannot_be_changes_nothing(name: str, tokens: list[int], complaint: str) -> None:
    engine = pinned_engine()
    before = engine.stats()
    with pytest.raises(InvalidRequestError, match=complaint):
        engine.add_prefix(name, tokens)
    assert engine.stats() == before and len(engine.list_prefixes()) == 1 and not engine.has_work


def test_one_that_leaves_no_room_for_an_answer_is_refused() -> None:
    engine = make_engine(max_model_len=8)
    with pytest.raises(InvalidRequestError, match="cannot be computed: prompt is too long: 8 tokens > 7 maximum"):
        engine.add_prefix("whole", FIXED)
    assert engine.list_prefixes() == [] and engine.stats().pool.num_free == 8 and not engine.has_work


def test_without_prefix_caching_nothing_can_be_pinned() -> None:
    with pytest.raises(InvalidRequestError, match="prefix caching is off"):
        make_engine(enable_prefix_caching=False).add_prefix("fixed", FIXED)


def test_it_is_refused_while_a_live_request_could_no_longer_be_finished() -> None:
    engine = make_engine()
    engine.add_request(make_request("big", range(100, 124), max_tokens=5))  # 7 of 8 blocks
    with pytest.raises(InvalidRequestError, match="request big, which is in flight, could no longer be finished"):
        engine.add_prefix("fixed", FIXED)
    engine.step()
    with pytest.raises(InvalidRequestError, match="in flight"):
        engine.add_prefix("fixed", FIXED)
    run(engine)
    engine.add_prefix("fixed", FIXED)


def test_a_live_request_that_begins_with_it_is_not_in_its_way() -> None:
    engine = make_engine()
    engine.add_request(make_request("big", [*FIXED, *range(100, 116)], max_tokens=5))
    engine.add_prefix("fixed", FIXED)
    assert len(run(engine)["big"]) == 5
    assert info_of(engine).state is PrefixState.READY


def test_statistics_count_first_admissions_and_add_up() -> None:
    engine = pinned_engine()
    engine.add_prefix("longer", [*FIXED, *range(9, 17)])
    run(engine)
    for number, prompt in enumerate(([*FIXED, 99], FIXED, [*FIXED, *range(9, 13), 99], [*range(1, 5), 99], OTHER)):
        engine.add_request(make_request(f"r{number}", prompt))
        while engine.has_work:
            engine.step(now=10.0 + number)
    fixed, longer = info_of(engine), info_of(engine, "longer")
    assert (fixed.hits, fixed.tokens_saved, fixed.last_used) == (3, 8 + 7 + 4, 13.0)
    assert (longer.hits, longer.tokens_saved, longer.last_used) == (1, 12, 12.0)


def test_warming_counts_as_no_clients_prompt() -> None:
    engine = pinned_engine()
    stats = engine.stats()
    assert (stats.counters.prompt_tokens, stats.counters.prefix_queries, stats.counters.computed_tokens) == (0, 0, 8)
    engine.add_prefix("again", FIXED)  # every block is there
    run(engine)
    assert info_of(engine).hits == info_of(engine, "again").hits == 0
    assert engine.stats().counters.prefix_hits == 0
    engine.add_request(make_request("asks", [*FIXED, 9]))
    (output,) = run(engine)["asks"]
    assert output.breakdown is not None and output.breakdown.pinned == 8 and output.breakdown.computed == 1


def test_removed_while_it_is_computed_it_leaves_nothing_behind() -> None:
    engine = make_engine(max_batched_tokens=8)
    engine.add_prefix("fixed", range(1, 17))
    engine.step()
    assert engine.has_work and engine.remove_prefix("fixed")
    assert not engine.has_work and engine.stats().pool.num_free == 8
    engine.scheduler.pool.check_invariants()


def books(engine: Engine) -> dict[str, object]:
    """Everything that is kept for each request under way, and the prefixes whose requests the explainer knows."""
    scheduler, recent, prefixes = engine.scheduler, engine.recent, engine.scheduler.prefixes
    return {
        "sequences": set(scheduler._sequences),
        "queues": (len(scheduler.waiting), len(scheduler.running)),
        "recent": (set(recent._queued), set(recent._open), {seen.request_id for seen in recent}),
        "warming": (set(prefixes._warming), list(prefixes._requests), list(prefixes._aborted)),
        "blocks": (engine.stats().pool.num_pinned, scheduler.pool.num_pinned_idle, scheduler.pool.num_free),
    }


def ends_after(engine: Engine, steps: int) -> None:
    """Removes the prefix that is computed in two steps, after so many of them."""
    engine.add_prefix("fixed", range(1, 17))
    for _ in range(steps):
        engine.step()
    assert engine.remove_prefix("fixed")


def ends_renamed(engine: Engine) -> None:
    """Ends the request of a tenant's prefix, since another name is due to it, and then that of the new name too."""
    fields = {"tenant": "a", "domain": b"a"}
    engine.add_prefix("tenants", range(1, 17), **fields)  # type: ignore[arg-type]
    engine.step()
    engine.add_prefix("fixed", FIXED)
    engine.step()
    assert engine.remove_prefix("tenants") and engine.remove_prefix("fixed")


def ends_failed(engine: Engine) -> None:
    """Has a prefix whose only row fails."""
    executor_of(engine).poison = lambda _: True
    engine.add_prefix("fixed", FIXED)
    run(engine)
    executor_of(engine).poison = lambda _: False
    assert info_of(engine).state is PrefixState.FAILED and engine.remove_prefix("fixed")


def ends_refused(engine: Engine) -> None:
    """Asks for a prefix that is longer than the model's context."""
    with pytest.raises(InvalidRequestError, match="cannot be computed"):
        engine.add_prefix("fixed", range(1, 65))


@pytest.mark.parametrize(
    "end",
    [
        *(partial(ends_after, steps=steps) for steps in (0, 1, 2)),
        *(ends_renamed, ends_failed, ends_refused),
    ],
)
def test_however_warming_ends_all_books_are_as_before(end: Callable[[Engine], None]) -> None:
    engine = make_engine(num_blocks=41, max_batched_tokens=8)
    generate(engine, make_request("first", range(50, 60)))
    before = books(engine)
    end(engine)
    run(engine)
    assert books(engine) == before


def test_the_explainer_keeps_one_request_for_each_prefix_there_is() -> None:
    engine = make_engine(num_blocks=41)
    for name, tokens in (("fixed", FIXED), ("other", OTHER)):
        engine.add_prefix(name, tokens)
    for _ in range(3):  # each time they are computed anew
        run(engine)
        assert engine.reset_prefix_cache(pinned=True)
    run(engine)
    known = {seen.request_id.split(":")[1] for seen in engine.recent}
    assert known == {"fixed", "other"} and len(engine.recent) == 2
    assert engine.remove_prefix("other")
    assert [seen.request_id.split(":")[1] for seen in engine.recent] == ["fixed"]


def test_one_that_cannot_be_computed_is_failed_and_holds_nothing() -> None:
    broken = True

    def poison(chunk: Chunk) -> bool:
        return broken and chunk.history[0] == 1

    engine = make_engine(poison=poison)
    engine.add_prefix("fixed", FIXED)
    assert run(engine) == {}
    assert info_of(engine) == PrefixInfo("fixed", "", PrefixState.FAILED, "not finite", 8, 0, 0, 0, None)
    assert engine.stats().pool.num_free == 8 and engine.stats().pool.num_pinned == 0
    broken = False
    engine.add_prefix("fixed", FIXED)  # again
    run(engine)
    assert info_of(engine).state is PrefixState.READY and len(engine.list_prefixes()) == 1


def test_blocks_lost_to_a_row_that_failed_are_computed_again() -> None:
    engine = pinned_engine(poison=lambda chunk: 99 in chunk.history)
    generate(engine, make_request("poisoned", [*FIXED, 99]))
    assert info_of(engine).state is PrefixState.READY and info_of(engine).hits == 1
    assert cached(engine, [*FIXED, 9]) == 8


def test_a_request_that_bypasses_the_cache_uses_no_pinned_block() -> None:
    engine = pinned_engine()
    assert cached(engine, [*FIXED, 9], cache=CacheMode.BYPASS) == 0
    assert info_of(engine).hits == 0


# ------------------------------------------------------------------------------------------------------------ tenants


def test_a_public_prefix_is_shared_by_all_and_what_follows_is_private() -> None:
    engine = pinned_engine(num_blocks=33)
    prompt = [*FIXED, *OTHER, 9]
    assert cached(engine, prompt, domain=b"a", tenant="a") == 8
    assert cached(engine, prompt, domain=b"a", tenant="a") == 16
    assert cached(engine, prompt, domain=b"b", tenant="b") == 8
    assert cached(engine, prompt) == 8


def test_a_tenants_prefix_is_invisible_to_others() -> None:
    engine = make_engine(num_blocks=33)
    engine.add_prefix("own", FIXED, tenant="a", domain=b"a")
    run(engine)
    assert info_of(engine, "own").tenant == "a"
    for domain in (b"", b"b"):
        assert cached(engine, [*FIXED, 9], domain=domain) == 0
    assert cached(engine, [*FIXED, 9], domain=b"a", tenant="a") == 8
    assert info_of(engine, "own").hits == 1


def test_a_tenants_prefix_follows_when_the_public_ones_change() -> None:
    engine = make_engine(num_blocks=33)
    engine.add_prefix("own", [*FIXED, *OTHER], tenant="a", domain=b"a")
    run(engine)
    engine.add_prefix("public", FIXED)
    assert info_of(engine, "own").state is PrefixState.WARMING
    run(engine)
    assert info_of(engine, "own").state is PrefixState.READY
    assert engine.stats().pool.num_pinned == 4  # the public part is shared
    assert cached(engine, [*FIXED, *OTHER, 9], domain=b"a", tenant="a") == 16
    assert cached(engine, [*FIXED, *OTHER, 9], domain=b"b", tenant="b") == 8
    engine.remove_prefix("public")
    run(engine)
    assert info_of(engine, "own").state is PrefixState.READY and engine.stats().pool.num_pinned == 4
    flood(engine, 40)
    assert cached(engine, [*FIXED, *OTHER, 9], domain=b"a", tenant="a") == 16
    assert cached(engine, [*FIXED, 9], domain=b"b", tenant="b") == 0


def test_a_public_prefix_whose_loss_would_multiply_its_copies_beyond_the_cap_stays() -> None:
    engine = make_engine(num_blocks=13)  # at most 6 of 12
    engine.add_prefix("public", [*FIXED, *OTHER])
    for tenant in ("a", "b"):
        engine.add_prefix(f"of-{tenant}", [*FIXED, *OTHER, 1, 2, 3, 4], tenant=tenant, domain=tenant.encode())
    run(engine)
    with pytest.raises(InvalidRequestError, match="removing prefix 'public' makes 10 pinned blocks"):
        engine.remove_prefix("public")
    assert cached(engine, [*FIXED, *OTHER, 9], domain=b"c", tenant="c") == 16
    engine.remove_prefix("of-b")
    assert engine.remove_prefix("public")
    run(engine)
    assert engine.stats().pool.num_pinned == 5


def test_a_prompt_that_is_renamed_in_mid_life_still_ends_well() -> None:
    engine = make_engine(num_blocks=33, max_batched_tokens=8)
    engine.add_request(make_request("long", [*FIXED, *OTHER, *range(50, 62)], max_tokens=4, domain=b"a", tenant="a"))
    engine.step()
    engine.add_prefix("public", [*FIXED, *OTHER])
    engine.step()
    engine.remove_prefix("public")
    assert sum(len(output.token_ids) for output in run(engine)["long"]) == 4
