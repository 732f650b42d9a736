"""Law 11: different domains share the blocks of public pinned prefixes and no others."""

from checking import expected_tokens, generate, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.engine import Engine

PUBLIC = list(range(10))  # two whole blocks of 4 and a rest that is never shared


def engine_with_public_prefix(num_blocks: int = 60) -> Engine:
    engine = make_engine(num_blocks=num_blocks)
    named = engine.scheduler.cache.new_sequence(make_request("names", PUBLIC), 0)
    engine.scheduler.cache.public_hashes = frozenset(named.block_hashes)
    assert len(named.block_hashes) == 2
    return engine


def cached(engine: Engine, request_id: str, prompt: list[int], domain: bytes) -> int:
    engine.add_request(make_request(request_id, prompt, domain=domain))
    (output,) = run(engine)[request_id]
    assert list(output.token_ids) == expected_tokens(prompt, 1)
    return output.num_cached_tokens


def test_tenants_share_the_public_prefix_and_nothing_behind_it() -> None:
    engine = engine_with_public_prefix()
    prompt = [*PUBLIC, *range(40, 60)]
    assert cached(engine, "a", prompt, b"A") == 0
    assert cached(engine, "a again", prompt, b"A") == 28
    assert cached(engine, "b", prompt, b"B") == 8
    assert cached(engine, "b again", prompt, b"B") == 28
    assert cached(engine, "anyone", prompt, b"") == 8


def test_without_a_public_prefix_they_share_nothing() -> None:
    engine = make_engine(num_blocks=60)
    prompt = [*PUBLIC, *range(40, 60)]
    assert [cached(engine, f"{domain}", prompt, domain) for domain in (b"A", b"B", b"", b"A")] == [0, 0, 0, 28]


def test_the_border_is_part_of_the_name_of_what_follows() -> None:
    """The same tokens of the same domain, named before and after a prefix became public, are different blocks."""
    engine = make_engine(num_blocks=60)
    prompt = [*PUBLIC, *range(40, 60)]
    generate(engine, make_request("before", prompt, domain=b"A"))
    public = engine.scheduler.cache.new_sequence(make_request("names", PUBLIC), 0).block_hashes
    engine.scheduler.cache.public_hashes = frozenset(public)
    assert cached(engine, "after", prompt, b"A") == 0
    assert cached(engine, "after again", prompt, b"A") == 28


def test_followers_of_another_domain_wait_for_public_blocks_only() -> None:
    engine = engine_with_public_prefix()
    prompt = [*PUBLIC, *range(40, 60)]
    for domain in (b"A", b"B"):
        engine.add_request(make_request(domain.decode(), prompt, domain=domain))
    run(engine)
    assert engine.scheduler.counters.prefill_tokens == 30 + 22


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([b"", b"A", b"B"]), st.integers(0, 12), st.lists(st.integers(0, 1), max_size=9)),
        min_size=1,
        max_size=12,
    ),
    at_once=st.booleans(),
)
def test_a_hit_beyond_the_public_prefix_was_computed_in_the_same_domain(
    requests: list[tuple[bytes, int, list[int]]], at_once: bool
) -> None:
    engine = engine_with_public_prefix(400)
    seen: dict[bytes, list[list[int]]] = {b"": [], b"A": [], b"B": []}
    due: dict[str, int] = {}
    got: dict[str, int] = {}
    for number, (domain, length, tail) in enumerate(requests):
        prompt = [*range(length), *tail] or [7]
        public = common(prompt, PUBLIC) // 4 * 4
        own = max((common(prompt, other) // 4 * 4 for other in seen[domain]), default=0)
        due[f"r{number}"] = min(max(public, own), len(prompt) - 1)
        seen[domain].append(prompt)
        engine.add_request(make_request(f"r{number}", prompt, domain=domain))
        if not at_once:
            got |= {rid: outs[0].num_cached_tokens for rid, outs in run(engine).items()}
    got |= {rid: outs[0].num_cached_tokens for rid, outs in run(engine).items()}
    assert all(got[rid] <= due[rid] for rid in due)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
