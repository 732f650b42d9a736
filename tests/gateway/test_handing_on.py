"""A router hands its token ids on to replicas with its own tokenizer, and to no others."""

import json
from typing import Any

import pytest
from gateway.harness import Replica, front, run

from headstart.bundled import bundled_intent_model_folder
from headstart.gateway.proxy.request_reader import RequestParser
from headstart.openai.tokenizer.handed_tokens import split_tokens_from_body
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer

TOKENIZER = SegmentedTokenizer(Tokenizer.from_folder(bundled_intent_model_folder()))
TEXT = "the quick brown fox " * 100
OURS = {"owned_by": "headstart", "tokenizer": TOKENIZER.digest}


def sent(card: dict[str, Any], prompt: Any = TEXT) -> bytes:
    """The body that a replica with such a model card gets."""

    async def ask() -> bytes:
        replica = Replica()
        replica.models = [{"id": "m", **card}]
        async with front(replica, reader=RequestParser(TOKENIZER)) as router:
            await router.up(1)
            assert (await router.complete(prompt)).status_code == 200
        return replica.raw[0]

    return run(ask())


def test_a_replica_with_the_same_tokenizer_gets_the_tokens() -> None:
    body, ids = split_tokens_from_body(sent(OURS))
    assert ids == TOKENIZER.encode(TEXT) and json.loads(body) == {"prompt": TEXT}


@pytest.mark.parametrize(
    ("card", "prompt"),
    [
        ({"owned_by": "vllm", "tokenizer": TOKENIZER.digest}, TEXT),
        ({"owned_by": "headstart", "tokenizer": "another"}, TEXT),
        ({"owned_by": "headstart", "tokenizer": ""}, TEXT),
        ({"owned_by": "headstart"}, TEXT),
        (OURS, "short"),
        (OURS, list(range(500))),
        ({**OURS, "max_model_len": 100}, TEXT),
    ],
)
def test_others_get_the_body_as_it_came(card: dict[str, Any], prompt: Any) -> None:
    raw = sent(card, prompt)
    assert split_tokens_from_body(raw) == (raw, None) and json.loads(raw) == {"prompt": prompt}
