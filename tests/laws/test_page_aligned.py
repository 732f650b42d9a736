"""Page-aligned prefill through the whole scheduler: boundaries, budget, and that no request starves."""

from dataclasses import dataclass, field

import pytest
from checking import executor_of, expected_tokens, generate, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.batch import Chunk
from headstart.core.engine import Engine
from headstart.core.request import Request
from headstart.core.sched.limits import budget_cost

BLOCK = 4
CHARGES = [False, True]


def aligned_engine(*, ceil: bool, seqs: int, tokens: int | None = None, **options: int) -> Engine:
    """A roomy engine that aligns; without `tokens` on the smallest budget it takes."""
    return make_engine(
        200,
        BLOCK,
        align=BLOCK,
        charge_ceil=ceil,
        max_seqs=seqs,
        max_batched_tokens=tokens or seqs + BLOCK,
        max_model_len=128,
        **options,
    )


def steps_of(engine: Engine) -> list[list[tuple[str, int, int]]]:
    """Every step so far as (request, start, end) of its chunks."""
    return [
        [(c.request_id, c.start, c.start + len(c.token_ids)) for c in batch.chunks]
        for batch in executor_of(engine).batches
    ]


@dataclass(slots=True)
class Watch:
    """Checks every step that an engine takes."""

    engine: Engine
    tokens: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def step(self) -> None:
        running = list(self.engine.scheduler.running)
        decoding = {s.request_id for s in running if len(s.token_ids) - s.num_computed_tokens == 1}
        prefilling = {s.request_id for s in running} - decoding
        for output in self.engine.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        chunks = executor_of(self.engine).batches[-1].chunks
        planned = {chunk.request_id for chunk in chunks}
        assert decoding <= planned, "a prefill starved a decode"
        assert not prefilling or prefilling & planned, "decodes starved every running prompt"
        self.check_chunks(chunks)

    def check_chunks(self, chunks: tuple[Chunk, ...]) -> None:
        """Law 6 and the budget."""
        limits = self.engine.scheduler.limits
        cost = 0
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            assert chunk.num_logits or end % BLOCK == 0, f"{chunk.request_id} stops at {end}"
            decode = len(chunk.token_ids) == chunk.num_logits
            cost += budget_cost(chunk.start, len(chunk.token_ids), limits, decode=decode)
        assert cost <= limits.max_batched_tokens


requests = st.lists(
    st.tuples(
        st.sampled_from([0, 4, 9, 16]),  # shared tokens
        st.integers(1, 40),  # own tokens
        st.integers(1, 6),  # output tokens
        st.integers(0, 12),  # step of arrival
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@settings(max_examples=60, deadline=None)
@given(asked=requests, ceil=st.booleans(), seqs=st.integers(1, 5), extra=st.integers(0, 12), capped=st.booleans())
def test_any_mix_on_any_budget_keeps_the_laws_and_ends_with_the_right_tokens(
    policy: str, asked: list[tuple[int, int, int, int]], ceil: bool, seqs: int, extra: int, capped: bool
) -> None:
    watch = Watch(
        aligned_engine(
            ceil=ceil,
            seqs=seqs,
            tokens=seqs + BLOCK + extra,
            policy=policy,
            long_prefill_threshold=BLOCK + 1 if capped else 0,
        )  # type: ignore[arg-type]
    )
    due: list[tuple[int, Request]] = []
    for index, (shared, own, out, arrival) in enumerate(asked):
        prompt = [*range(shared), *(50 + (index * 7 + i) % 47 for i in range(own))]
        due.append((arrival, make_request(f"r{index}", prompt, out)))
    for now in range(1000):
        for arrival, request in due:
            if arrival == now:
                watch.engine.add_request(request)
        if watch.engine.has_work:
            watch.step()
        elif now > 12:
            break
    assert not watch.engine.has_work, "something waits for ever"
    for _, request in due:
        assert watch.tokens[request.request_id] == expected_tokens(request.prompt, request.sampling.max_tokens)


@pytest.mark.parametrize("ceil", CHARGES)
def test_decodes_on_the_smallest_budget_leave_a_prompt_one_block_a_step(ceil: bool) -> None:
    engine = aligned_engine(ceil=ceil, seqs=4)
    for index in range(3):
        engine.add_request(make_request(f"d{index}", [60 + index], 60))
    engine.step()
    engine.add_request(make_request("long", range(22), 1))
    for _ in range(6):
        engine.step()
    prompt = [(start, end) for step in steps_of(engine) for rid, start, end in step if rid == "long"]
    assert prompt == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 22)]
    assert all(len(step) == 4 for step in steps_of(engine)[1:]), "every decode went on in every step"


@pytest.mark.parametrize("ceil", CHARGES)
def test_a_stream_of_short_requests_does_not_starve_an_aligned_prompt(ceil: bool) -> None:
    engine = aligned_engine(ceil=ceil, seqs=4, policy="lpm")  # type: ignore[arg-type]
    engine.add_request(make_request("long", range(40), 1))
    finished_at = 0
    for step in range(60):
        for part in range(2):
            engine.add_request(make_request(f"s{step}.{part}", [50 + (2 * step + part) % 47, step], 2))
        if any(output.request_id == "long" for output in engine.step()):
            finished_at = step + 1
            break
    assert 0 < finished_at <= 40 // BLOCK + 1


@pytest.mark.parametrize(("ceil", "end"), [(False, 8), (True, 4)])
def test_a_newcomer_takes_the_whole_blocks_that_are_left(ceil: bool, end: int) -> None:
    engine = aligned_engine(ceil=ceil, seqs=2, tokens=14)
    generate(engine, make_request("a", range(6)), make_request("b", range(50, 70)))
    assert steps_of(engine)[0] == [("a", 0, 6), ("b", 0, end)]


@pytest.mark.parametrize("ceil", CHARGES)
def test_with_less_than_a_block_left_a_newcomer_waits_for_the_next_step(ceil: bool) -> None:
    engine = aligned_engine(ceil=ceil, seqs=2, tokens=11)
    generate(engine, make_request("a", range(8)), make_request("b", range(50, 70)))
    steps = steps_of(engine)
    assert steps[0] == [("a", 0, 8)]
    assert steps[1] == [("b", 0, 8)]


def test_a_short_rest_that_fits_is_computed_exactly_but_not_with_ceil() -> None:
    for ceil, chunks in ((False, [("a", 0, 8), ("b", 0, 3)]), (True, [("a", 0, 8)])):
        engine = aligned_engine(ceil=ceil, seqs=2, tokens=11)
        generate(engine, make_request("a", range(8)), make_request("b", [50, 51, 52]))
        assert steps_of(engine)[0] == chunks


@pytest.mark.parametrize("ceil", CHARGES)
def test_the_tail_behind_a_hit_is_aligned_to_absolute_positions(ceil: bool) -> None:
    engine = aligned_engine(ceil=ceil, seqs=2, tokens=10)
    generate(engine, make_request("first", range(14)))
    executor_of(engine).batches.clear()
    generate(engine, make_request("again", [*range(12), *range(60, 85)]))
    ends = [end for step in steps_of(engine) for _, _, end in step]
    assert ends == ([20, 28, 36, 37] if ceil else [20, 28, 37])  # 28 to 37 are 9 tokens in 3 blocks


@pytest.mark.parametrize("ceil", CHARGES)
def test_a_preempted_prompt_resumes_on_boundaries(ceil: bool) -> None:
    engine = make_engine(
        14, BLOCK, align=BLOCK, charge_ceil=ceil, max_seqs=4, max_batched_tokens=12, max_model_len=40,
        expects_short_outputs=True,
    )  # fmt: skip
    for index in range(4):
        engine.add_request(make_request(f"r{index}", [50 + index, *range(9)], 20))
    watch = Watch(engine)
    for _ in range(400):
        if not engine.has_work:
            break
        for output in engine.step():
            watch.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        watch.check_chunks(executor_of(engine).batches[-1].chunks)
    assert run(engine) == {}
    assert engine.stats().counters.num_preemptions > 0
    for index in range(4):
        assert watch.tokens[f"r{index}"] == expected_tokens([50 + index, *range(9)], 20)
