"""LLM.add_prefix: a text, a conversation or token ids, warm when it returns."""

import os
import signal
from array import array

import pytest
from checking import executor_of
from engine.test_llm import GREEDY, make_llm

from headstart.core.cache.pinned_prefix import PrefixState
from headstart.core.errors import InvalidRequestError

FIXED = list(range(20, 44))
TEXT = "play some music in the living room, please"


def test_the_first_prompt_behind_an_added_prefix_hits() -> None:
    llm = make_llm()
    info = llm.add_prefix(FIXED, "fixed")
    assert (info.state, info.num_tokens, info.num_blocks) == (PrefixState.READY, 24, 6)
    assert not llm.engine.has_work
    assert llm.generate([[*FIXED, 1, 2]], GREEDY)[0].num_cached_tokens == 24
    (listed,) = llm.list_prefixes()
    assert (listed.name, listed.hits, listed.tokens_saved) == ("fixed", 1, 24)
    assert listed.last_used is not None and listed.last_used > 0


def test_a_text_and_a_conversation_may_be_added() -> None:
    llm = make_llm()
    text = llm.add_prefix(TEXT, "text")
    assert llm.generate([TEXT + " now"], GREEDY)[0].num_cached_tokens == text.num_tokens >= 8
    system = {"role": "system", "content": TEXT}
    chat = llm.add_prefix([system], "chat")
    [completion] = llm.chat([system, {"role": "user", "content": "!"}], {"max_tokens": 1, "ignore_eos": True})
    assert completion.num_cached_tokens == chat.num_tokens >= 12
    assert [info.name for info in llm.list_prefixes()] == ["text", "chat"]


def test_it_survives_a_reset_and_may_be_removed() -> None:
    llm = make_llm()
    llm.add_prefix(FIXED, "fixed")
    assert llm.reset_prefix_cache()
    assert llm.generate([[*FIXED, 1]], GREEDY)[0].num_cached_tokens == 24
    assert llm.remove_prefix("fixed") and not llm.remove_prefix("fixed")
    assert llm.list_prefixes() == [] and llm.reset_prefix_cache()
    assert llm.generate([[*FIXED, 1]], GREEDY)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prefix", "name", "complaint"),
    [
        ([1, 2, 3], "short", "less than one block"),
        ([], "empty", "has 0 tokens"),
        (FIXED, "a b", "is not a valid prefix name"),
        (FIXED, "", "name is missing"),
        ([10_000] * 8, "strange", "token_ids is 10000"),
        ([{"role": "owner", "content": "x"}], "chat", "role is 'owner'"),
        (3, "number", "token_ids is 3"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(prefix: object, name: str, complaint: str) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match=complaint):
        llm.add_prefix(prefix, name)  # type: ignore[arg-type]
    assert llm.list_prefixes() == [] and not llm.engine.has_work


def test_one_that_cannot_be_computed_is_not_kept() -> None:
    llm = make_llm(poison=lambda chunk: chunk.history[0] == FIXED[0])
    with pytest.raises(InvalidRequestError, match="prefix 'fixed' could not be computed: not finite"):
        llm.add_prefix(FIXED, "fixed")
    assert llm.list_prefixes() == []


def test_ctrl_c_forgets_the_prefix_and_leaves_the_engine_usable() -> None:
    llm = make_llm(max_batched_tokens=8)
    executor, execute = executor_of(llm.engine), executor_of(llm.engine).execute

    def interrupted(batch):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGINT)
        return execute(batch)

    executor.execute = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.add_prefix(FIXED, "fixed")
    executor.execute = execute  # type: ignore[method-assign]
    assert llm.list_prefixes() == [] and not llm.engine.has_work
    assert len(llm.generate([[*FIXED, 1]], GREEDY)[0].token_ids) == 6


def test_token_ids_may_be_packed() -> None:
    assert make_llm().add_prefix(array("i", FIXED), "packed").num_tokens == 24
