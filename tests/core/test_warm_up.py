"""Steps of dummy requests that are run before the first real one."""

from hypothesis import given
from hypothesis import strategies as st

from headstart.core.warm_up import memory_profile_batches


@given(st.integers(1, 5_000), st.integers(1, 300), st.integers(1, 3_000), st.sampled_from([16, 32]))
def test_profile_fills_the_budget_with_long_prompts_and_with_all_sequences(
    max_batched_tokens: int, max_seqs: int, max_tokens: int, block_size: int
) -> None:
    batches, num_blocks = memory_profile_batches(max_batched_tokens, max_seqs, max_tokens, block_size)
    long, many = batches
    for batch in batches:
        lengths = [len(chunk.token_ids) for chunk in batch.chunks]
        assert sum(lengths) <= max_batched_tokens and max(lengths) <= max_tokens and len(lengths) <= max_seqs
        blocks = [block for chunk in batch.chunks for block in chunk.block_ids]
        assert len(set(blocks)) == len(blocks) and all(0 < block < num_blocks for block in blocks)
        for chunk in batch.chunks:
            assert len(chunk.block_ids) == -(-len(chunk.token_ids) // block_size) and chunk.num_logits == 1
        assert len({chunk.request_id for chunk in batch.chunks}) == len(lengths)
    assert len(long.chunks[0].token_ids) == min(max_batched_tokens, max_tokens)
    assert len(many.chunks) == min(max_batched_tokens, max_seqs)
