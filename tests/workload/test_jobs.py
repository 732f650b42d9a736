"""Jobs, and what a perfect cache would compute for them, against a trie that is slow and plain."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.workload.jobs import jobs_from_prompts, perfect_cache_prefill_tokens


def by_trie(prompts: list[list[int]]) -> int:
    root: dict = {}
    total = 0
    for prompt in prompts:
        node, new = root, 0
        for token in prompt:
            new += token not in node
            node = node.setdefault(token, {})
        total += max(new, 1)
    return total


def ideal(*prompts: list[int]) -> int:
    return perfect_cache_prefill_tokens([array("i", prompt) for prompt in prompts])


def test_every_distinct_prefix_counts_once_and_a_repeat_one_token() -> None:
    assert ideal([1, 2, 3]) == 3
    assert ideal([1, 2, 3], [1, 2, 3]) == 3 + 1
    assert ideal([1, 2, 3], [1, 2, 4, 5]) == 3 + 2
    assert ideal([1, 2, 3], [1, 2]) == 3 + 1
    assert ideal([1, 2], [1, 2, 3]) == 2 + 1
    assert ideal([256], [1]) == 2


@given(st.lists(st.lists(st.integers(0, 2) | st.sampled_from([255, 256, 65536]), min_size=1, max_size=5), max_size=9))
def test_it_agrees_with_a_trie(prompts: list[list[int]]) -> None:
    assert ideal(*prompts) == by_trie(prompts)


def test_jobs_are_due_as_told() -> None:
    jobs = jobs_from_prompts([array("i", [1]), array("i", [2])], 3, [0.0, 1.5])
    assert [(job.prompt[0], job.output, job.at) for job in jobs] == [(1, 3, 0.0), (2, 3, 1.5)]
    assert [job.at for job in jobs_from_prompts([array("i", [1])], 1)] == [0.0]
    with pytest.raises(ValueError):
        jobs_from_prompts([array("i", [1])], 1, [])
