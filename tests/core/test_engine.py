"""The engine's own face: steps, outputs, statistics, what it tells the executor."""

from array import array

from checking import executor_of, expected_tokens, generate, make_engine, make_request, run

from headstart.core.request import FinishReason, Request, SamplingParams


def test_a_step_without_work_does_nothing() -> None:
    engine = make_engine()
    assert not engine.has_work and engine.step() == [] and executor_of(engine).batches == []


def test_outputs_report_every_token_once_and_the_reason_last() -> None:
    engine = make_engine()
    engine.add_request(make_request("a", range(5), 4))
    outputs = run(engine)["a"]
    assert [t for output in outputs for t in output.token_ids] == expected_tokens(range(5), 4)
    assert [output.finish_reason for output in outputs] == [None, None, None, FinishReason.LENGTH]
    assert {output.num_prompt_tokens for output in outputs} == {5}


def test_a_stop_token_ends_a_sequence_and_is_part_of_it() -> None:
    stop = expected_tokens(range(5), 3)[-1]
    engine = make_engine()
    engine.add_request(make_request("a", range(5), 9, stop=(stop,)))
    outputs = run(engine)["a"]
    assert [t for output in outputs for t in output.token_ids] == expected_tokens(range(5), 9, (stop,))
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_output_ends_where_the_context_ends() -> None:
    engine = make_engine(max_model_len=8)
    assert len(generate(engine, make_request("a", range(5), 9))["a"]) == 3


def test_the_executor_hears_of_every_finished_request() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("a", range(3)), make_request("b", range(3), 3))
    engine.add_request(make_request("c", range(3)))
    engine.abort("c")
    generate(engine, make_request("d", range(3)))
    assert executor_of(engine).finished == ["a", "b", "c"]


def test_reset_forgets_the_cache_only_when_nothing_runs() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("a", range(9)))
    engine.add_request(make_request("b", range(9), 2))
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert engine.reset_prefix_cache()
    engine.add_request(make_request("c", range(9)))
    assert run(engine)["c"][0].num_cached_tokens == 0


def test_statistics_add_up() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("cold", range(9), 2))
    generate(engine, make_request("warm", range(9), 2))
    stats = engine.stats()
    assert (stats.counters.prompt_tokens, stats.counters.cached_tokens, stats.counters.computed_tokens) == (
        18,
        8,
        9 + 1 + 1 + 1,
    )
    assert (stats.counters.prefix_queries, stats.counters.prefix_hits, stats.counters.generation_tokens) == (18, 8, 4)
    assert stats.pool.num_free == stats.pool.num_blocks == 39 and stats.pool.num_published == 2
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (0, 0, 4) and stats.step_seconds == 4.0


def test_refused_admissions_count_one_query_and_cached_tokens_never_change() -> None:
    engine = make_engine(num_blocks=7, max_model_len=24, expects_short_outputs=True)
    first = make_request("a", [1] * 9, 12)
    generate(engine, make_request("seed", [1] * 9))
    engine.add_request(first)
    engine.add_request(make_request("b", [2] * 9, 12))
    outputs = run(engine)
    assert engine.stats().counters.num_preemptions > 0 and engine.stats().counters.prefix_queries == 27
    assert {output.num_cached_tokens for output in outputs["a"]} == {8}


def test_prompt_logprobs_come_once_and_in_order_whatever_is_recomputed() -> None:
    engine = make_engine(num_blocks=7, max_model_len=24, max_batched_tokens=8, max_seqs=4, expects_short_outputs=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0)
    for rid, first in (("a", 1), ("b", 20)):
        engine.add_request(Request(rid, array("i", range(first, first + 9)), sampling))
    outputs = run(engine)
    assert engine.stats().counters.num_preemptions > 0
    for rid, first in (("a", 1), ("b", 20)):
        reported = [entry.token_id for output in outputs[rid] for entry in output.prompt_logprobs]
        assert reported == list(range(first + 1, first + 9))
