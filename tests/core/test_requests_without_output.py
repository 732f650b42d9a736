"""Requests with max_tokens 0: the prompt is computed and published, nothing is sampled. Blocks of 4 tokens."""

import pytest
from checking import executor_of, expected_tokens, generate, make_engine, make_request, run

from headstart.core.batch import PromptTokenBreakdown
from headstart.core.request import CacheMode, FinishReason

PROMPT = list(range(3, 25))  # 22 tokens


@pytest.mark.parametrize("length", [1, 4, 15, 16, 22])
@pytest.mark.parametrize("budget", [64, 8, 5])
def test_nothing_is_sampled_and_the_prompt_is_cached(length: int, budget: int) -> None:
    engine = make_engine(12, max_batched_tokens=budget, max_seqs=2)
    prompt = PROMPT[:length]
    engine.add_request(make_request("warm", prompt, 0))
    (output,) = run(engine)["warm"]
    assert output.token_ids == () and output.finish_reason is FinishReason.LENGTH
    assert output.breakdown == PromptTokenBreakdown(computed=length) and output.num_prompt_tokens == length
    assert all(chunk.num_logits == 0 for batch in executor_of(engine).batches for chunk in batch.chunks)
    counters = engine.stats().counters
    assert (counters.generation_tokens, counters.prompt_tokens, counters.prefill_tokens) == (0, length, length)
    engine.add_request(make_request("next", [*prompt, 1], 3))
    first = run(engine)["next"][0]
    assert first.breakdown is not None and first.breakdown.shared == length // 4 * 4


def test_a_cached_prompt_computes_one_token() -> None:
    engine = make_engine(12)
    generate(engine, make_request("a", PROMPT[:16]))
    engine.add_request(make_request("warm", PROMPT[:16], 0))
    (output,) = run(engine)["warm"]
    assert output.breakdown == PromptTokenBreakdown(shared=15, computed=1)


def test_it_needs_no_more_blocks_than_the_prompt_has() -> None:
    engine = make_engine(5)  # 16 tokens
    engine.add_request(make_request("warm", range(16), 0))
    assert run(engine)["warm"][-1].finish_reason is FinishReason.LENGTH


def test_it_does_not_change_the_expected_length_of_outputs() -> None:
    engine = make_engine(12)
    for index in range(20):
        engine.add_request(make_request(f"warm-{index}", [index, *PROMPT[:5]], 0))
    run(engine)
    seq = engine.scheduler.cache.new_sequence(make_request("long", [1, 2], 20), 0)
    assert engine.scheduler.admission.blocks_reserved_for_sequence(seq) == 6  # 2 + 20 tokens: nothing was learned


def test_it_runs_beside_others_and_is_preempted_as_they_are() -> None:
    engine = make_engine(16, max_batched_tokens=6, max_seqs=4, expects_short_outputs=True)
    prompts = {f"r{index}": [50 + index, *range(9)] for index in range(3)}
    for request_id, prompt in prompts.items():
        engine.add_request(make_request(request_id, prompt, 16))
    engine.add_request(make_request("warm", [90, *PROMPT], 0))
    outputs = run(engine)
    for request_id, prompt in prompts.items():
        assert [t for out in outputs[request_id] for t in out.token_ids] == expected_tokens(prompt, 16)
    (warm,) = outputs["warm"]
    assert warm.token_ids == () and warm.breakdown is not None and sum(warm.breakdown) == 23


def test_followers_of_a_prompt_without_output_wait_for_it() -> None:
    engine = make_engine(20, max_batched_tokens=8, max_seqs=3)
    engine.add_request(make_request("warm", PROMPT, 0))
    engine.step()
    engine.add_request(make_request("next", [*PROMPT, 1]))
    run(engine)
    assert engine.stats().counters.prefill_tokens <= 23 + 3


def test_a_request_that_publishes_nothing_still_ends() -> None:
    engine = make_engine(12)
    engine.add_request(make_request("warm", PROMPT, 0, cache=CacheMode.BYPASS))
    assert run(engine)["warm"][-1].finish_reason is FinishReason.LENGTH
    assert engine.scheduler.pool.num_published == 0
