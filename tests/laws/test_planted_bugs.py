"""Every planted bug is caught by a test that is named here; a law that no bug can break would prove nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plant import BUGS

HERE = Path(__file__).parent
CORE = HERE.parent / "core"
SUITE = [*sorted(HERE.glob("test_*.py")), *sorted(CORE.glob("test_*.py"))]
SUITE.remove(Path(__file__))
Runs = dict[str, tuple[int, str]]

BY_HAND, PROMISES, ORDER, ISOLATION, APART, LAG = (
    f"tests/laws/test_{name}.py::test_"
    for name in ("laws_by_hand", "promises", "order", "isolation", "tenants_apart", "lag")
)
TRANSFERS, MEETING, TRUST, KEPT, ADMISSION, CHECKPOINTS, DRAFTED = (
    f"tests/core/test_{name}.py::test_"
    for name in ("transfers", "meeting", "trust", "blocks_kept", "admission", "checkpoints", "drafted_checkpoints")
)
CAUGHT_BY = {
    "double_free": BY_HAND + "law_2_blocks_of_a_row_that_failed_are_never_found",
    "early_publish": BY_HAND + "law_1_kv_of_computed_tokens_is_in_the_table",
    "off_by_one_hit": BY_HAND + "law_2_a_poisoned_row_harms_no_other_row_of_its_batch",
    "whole_prompt_hit": BY_HAND + "law_3_a_repeated_prompt_computes_its_tail_and_at_least_one_token",
    "unchained_hash": BY_HAND + "source_001_unaware_accounting_admits_few_and_aware_accounting_all",
    "idle_hits_counted_as_free": BY_HAND + "law_5_idle_hits_are_not_counted_as_free_too",
    "budget_double_count": BY_HAND + "law_5_the_budget_counts_only_what_is_not_cached",
    "no_alignment": BY_HAND + "law_6_aligned_chunks_end_on_block_boundaries_but_the_last",
    "shared_block_is_written": BY_HAND + "law_3_last_token_of_a_fully_cached_prompt_is_computed_but_not_written",
    "failed_blocks_stay_published": TRANSFERS + "a_suspect_block_is_cleared_before_it_is_filled_and_not_after",
    "lost_on_abort": BY_HAND + "law_3_a_hit_stops_at_the_first_missing_block",
    "missing_unpin": KEPT + "pinned_blocks_are_neither_free_nor_evicted_until_unpinned",
    "pinned_blocks_are_evicted": ADMISSION + "only_what_is_not_pinned_for_others_can_be_used",
    "promises_are_not_kept_in_mind": PROMISES + "twins_wait_one_step_and_take_over_what_the_first_computed",
    "promises_of_what_is_not_published": PROMISES + "one_off_and_bypassing_requests_promise_nothing",
    "adoption_keeps_the_partial_block": PROMISES
    + "a_running_sequence_adopts_what_another_published_and_drops_its_partly_filled_block",
    "the_oldest_has_no_turn": ORDER + "lpm_takes_the_longest_match_but_every_kth_time_the_oldest",
    "the_queue_misses_what_is_published": ORDER
    + "the_queue_knows_at_least_what_there_is_and_names_the_first_missing_block",
    "domains_do_not_count_behind_a_public_prefix": ISOLATION + "tenants_share_the_public_prefix_and_nothing_behind_it",
    "no_room_to_grow": ORDER + "admission_leaves_running_sequences_room_for_outputs_as_long_as_those_before",
    "preemptions_without_a_bound": ORDER + "a_sequence_preempted_three_times_comes_back_with_room_to_its_end_and_stays",
    "floors_are_not_kept": KEPT + "a_tenant_cannot_take_the_share_of_another_except_as_a_last_resort",
    "followed_tokens_are_counted_twice": PROMISES
    + "a_running_sequence_adopts_what_another_published_and_drops_its_partly_filled_block",
    "the_store_writes_what_is_there_now": TRANSFERS + "a_block_that_was_given_to_another_is_not_written",
    "loaded_blocks_are_cleared": TRANSFERS + "a_suspect_block_is_cleared_before_it_is_filled_and_not_after",
    "promises_of_a_failed_load_stay": TRANSFERS + "a_load_that_fails_is_computed",
    "a_met_load_outlives_its_sequence": MEETING + "an_aborted_sequence_leaves_nothing_behind",
    "blocks_are_published_before_those_in_front_of_them": MEETING + "chains_are_published_from_the_front",
    "what_has_arrived_is_computed_too": MEETING + "front_and_back_meet",
    "what_a_failed_row_used_is_loaded_again": TRANSFERS + "what_a_failed_row_wrote_is_not_loaded_again",
    "shared_blocks_of_a_failed_row_are_given_up": TRUST + "requests_that_overflow_cost_a_pinned_prefix_no_block",
    "corrupt_shared_blocks_stay": TRUST + "a_corrupt_shared_block_is_gone_after_the_first_request_that_reads_it",
    "the_second_run_reads_the_cache": APART + "a_request_for_prompt_logprobs_reuses_nothing_and_publishes_its_blocks",
    "loads_arrive_one_block_late": TRANSFERS + "what_was_published_is_in_the_store_after_a_restart",
    "tables_in_flight_are_released_at_once": LAG + "a_block_freed_while_a_step_names_it_is_reused_after_the_step",
    "blocks_ahead_of_a_failed_row_stay": LAG + "what_read_the_blocks_of_a_failed_row_is_computed_again",
    "readers_of_a_failed_row_go_on": LAG + "what_read_the_blocks_of_a_failed_row_is_computed_again",
    "discarded_rows_are_applied": LAG + "what_read_the_blocks_of_a_failed_row_is_computed_again",
    "blocks_ahead_are_told_at_once": LAG
    + "blocks_of_a_step_are_read_by_the_next_and_seen_by_events_and_store_when_it_ends",
    "penalties_are_planned_ahead": LAG + "a_request_whose_next_step_needs_the_host_is_not_planned_ahead",
    "a_state_one_block_late": CHECKPOINTS + "the_next_turn_begins_where_the_last_one_ended",
    "a_state_released_before_it_is_read": CHECKPOINTS + "random_requests_never_get_a_wrong_state",
    "a_slot_reused_too_early": CHECKPOINTS + "random_requests_never_get_a_wrong_state",
    "a_state_of_rejected_drafts_is_kept": DRAFTED + "a_place_within_rejected_drafts_has_none",
}


def run_planted(asked: dict[str, list[str]]) -> Runs:
    """Run tests with bugs; "" is none."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(p) for p in (HERE, *sys.path) if p)}
    command = [sys.executable, str(HERE / "planted_runs.py")]
    done = subprocess.run(command, input=json.dumps(asked), env=env, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.returncode
    return {bug: (code, output) for bug, (code, output) in json.loads(done.stdout).items()}


def assert_caught(bug: str, runs: Runs) -> None:
    code, output = runs[bug]
    assert code == 1, f"{bug} was not caught:\n{output}"
    assert "FAILED" in output, output


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Each bug with its test, and all those tests without a bug."""
    return run_planted({bug: [CAUGHT_BY[bug]] for bug in BUGS} | {"": sorted(set(CAUGHT_BY.values()))})


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught_by_its_test(bug: str, runs: Runs) -> None:
    assert_caught(bug, runs)


def test_those_tests_pass_without_a_bug(runs: Runs) -> None:
    code, output = runs[""]
    assert code == 0 and " passed" in output, output


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught_by_the_suite(bug: str) -> None:
    assert_caught(bug, run_planted({bug: list(map(str, SUITE))}))
