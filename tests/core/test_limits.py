"""chunk_len and charge against their definition by brute force, and what a step's limits can never do."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headstart.core.errors import ConfigError
from headstart.core.sched.limits import Limits, budget_cost, chunk_len


@st.composite
def all_limits(draw: st.DrawFn) -> Limits:
    align = draw(st.sampled_from([1, 2, 4, 16]))
    max_seqs = draw(st.integers(1, 8))
    return Limits(
        max_batched_tokens=max_seqs + align + draw(st.integers(0, 40)),
        max_seqs=max_seqs,
        long_prefill_threshold=draw(st.sampled_from([0, align, align + 1, 3 * align + 1])),
        align=align,
        charge_ceil=draw(st.booleans()),
    )


wants, starts, budgets = st.integers(1, 80), st.integers(0, 40), st.integers(0, 60)


def allowed(n: int, want: int, start: int, budget: int, limits: Limits, alone: bool, cap: int | None) -> bool:
    """The definition: within the caps, paid for, and on a boundary unless it is the last. Time never cuts decodes."""
    capped = limits.long_prefill_threshold > 0 and not alone
    has_time = cap is None or want == 1 or n <= (max(cap, limits.align) if cap else 0)
    return (
        (not capped or n <= limits.long_prefill_threshold)
        and has_time
        and budget_cost(start, n, limits, decode=want == 1) <= budget
        and (n == want or (start + n) % limits.align == 0)
    )


@settings(max_examples=400, deadline=None)
@given(
    want=wants,
    start=starts,
    budget=budgets,
    limits=all_limits(),
    alone=st.booleans(),
    cap=st.none() | st.integers(0, 60),
)
def test_a_chunk_is_the_longest_one_that_is_allowed(
    want: int, start: int, budget: int, limits: Limits, alone: bool, cap: int | None
) -> None:
    n = chunk_len(want, start, budget, limits, alone=alone, cap=cap)
    longest = max((m for m in range(1, want + 1) if allowed(m, want, start, budget, limits, alone, cap)), default=0)
    assert n == longest


@settings(max_examples=200, deadline=None)
@given(
    want=wants, start=starts, limits=all_limits(), alone=st.booleans(), decodes=st.integers(0, 7),
    cap=st.none() | st.integers(1, 60),
)  # fmt: skip
def test_what_decodes_leave_is_enough_for_any_prompt_to_go_on(
    want: int, start: int, limits: Limits, alone: bool, decodes: int, cap: int | None
) -> None:
    assume(decodes < limits.max_seqs)
    budget = limits.max_batched_tokens - decodes
    assert chunk_len(want, start, budget, limits, alone=alone, cap=cap) >= 1


@settings(max_examples=200, deadline=None)
@given(data=st.data(), want=st.integers(2, 80), limits=all_limits().filter(lambda limits: limits.align > 1))
def test_less_than_a_block_of_budget_waits_unless_the_rest_of_the_prompt_fits(
    data: st.DataObject, want: int, limits: Limits
) -> None:
    offset = data.draw(st.integers(0, limits.align - 2))
    start = data.draw(st.integers(0, 3)) * limits.align + offset
    budget = data.draw(st.integers(1, limits.align - offset - 1))
    n = chunk_len(want, start, budget, limits, alone=True)
    fits = budget_cost(start, want, limits, decode=False) <= budget
    assert n == (want if fits else 0)


@settings(max_examples=200, deadline=None)
@given(want=st.integers(2, 200), limits=all_limits())
def test_a_prompt_that_is_alone_ends_after_the_fewest_steps(want: int, limits: Limits) -> None:
    start, steps = 0, 0
    while start < want:
        n = chunk_len(want - start, start, limits.max_batched_tokens, limits, alone=True)
        start, steps = start + n, steps + 1
        assert steps <= want, "no progress"
    whole = limits.max_batched_tokens // limits.align * limits.align  # what a step computes of a longer prompt
    assert steps <= -(-want // whole)


@settings(max_examples=200, deadline=None)
@given(start=starts, n=st.integers(1, 80), limits=all_limits())
def test_ceil_charges_each_block_once_and_less_than_two_blocks_more_than_exact(
    start: int, n: int, limits: Limits
) -> None:
    cost = budget_cost(start, n, limits, decode=False)
    if not limits.charge_ceil:
        assert cost == n
        return
    touched = {position // limits.align for position in range(start, start + n)}
    assert cost == len(touched) * limits.align
    assert n <= cost <= n + 2 * (limits.align - 1)
    assert budget_cost(start, 1, limits, decode=True) == 1


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"max_seqs": 0}, "at least 1"),
        ({"max_batched_tokens": 4, "max_seqs": 5}, "raise it or lower --max-num-seqs"),
        (
            {"long_prefill_threshold": 3, "align": 4},
            "--long-prefill-token-threshold 3 .* --block-size 4.* raise it to 4",
        ),
        ({"long_prefill_threshold": -1}, "use 0 to switch it off"),
        ({"max_batched_tokens": 11, "max_seqs": 8, "align": 4}, "--max-num-batched-tokens 11 .* raise it to 12"),
    ],
)
def test_what_could_wait_for_ever_is_refused_with_flags_and_remedy(values: dict[str, int], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        Limits(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values", [{"max_batched_tokens": 12, "max_seqs": 8, "align": 4}, {"long_prefill_threshold": 4, "align": 4}]
)
def test_the_smallest_limits_that_cannot_wait_for_ever_are_taken(values: dict[str, int]) -> None:
    assert Limits(**values).align == 4  # type: ignore[arg-type]
