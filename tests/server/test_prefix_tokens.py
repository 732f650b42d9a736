"""The tokens of a prefix that later prompts are sure to share: never a token more, and hardly one less."""

from pathlib import Path

import pytest
from tokenizer_folders import BYTE_LEVEL, KINDS, METASPACE, write

from headstart.core.errors import InvalidRequestError
from headstart.openai.bounds import RequestBounds
from headstart.openai.prefix_tokens import chat_prefix_tokens, tokens_shared_by_continuations
from headstart.openai.tokenizer.tokenizer import Tokenizer

BOUNDS = RequestBounds(vocab_size=600, max_model_len=512, eos_token_ids=())
TEXT = "the quick brown fox jumps over the lazy dog and "
REAL = (
    "runs away",
    " runs",
    "the bear",
    "\n\nthe",
    "7:30",
    "... and",
    "東京",
    "👋🏽",
    "s",
    "def main():",
    "é",
    "  done",
)
# Llama 2's way: the system message is part of the first user's turn.
FOLDING = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}[INST] {% if loop.first and system %}"
    "<<SYS>>{{ system }}<</SYS>> {% endif %}{{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }} {% else %}"
    "{{ raise_exception('system must come first') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [TEXT, TEXT + "ru", TEXT.strip(), TEXT + "\n", TEXT + "7", "é", "the living room:  "])
def test_every_prompt_that_begins_with_the_text_begins_with_its_tokens(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model", kind))
    shared = tokens_shared_by_continuations(text, tokenizer, BOUNDS)
    for more in REAL:
        assert tokenizer.encode(text + more)[: len(shared)] == shared, more
    assert len(shared) >= len(tokenizer.encode(text)) - 4


def test_a_blank_at_the_end_belongs_to_the_next_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model", BYTE_LEVEL))
    naive, shared = tokenizer.encode(TEXT), tokens_shared_by_continuations(TEXT, tokenizer, BOUNDS)
    assert tokenizer.encode(TEXT + "runs")[: len(naive)] != naive  # what pinning the plain encoding would lose
    assert shared == naive[:-1]


def test_the_token_before_every_text_is_part_of_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model", METASPACE))
    assert tokens_shared_by_continuations(TEXT, tokenizer, BOUNDS)[0] == tokenizer.backend.token_to_id("<s>")


@pytest.mark.parametrize("template", [None, FOLDING])
@pytest.mark.parametrize("roles", [("system",), ("system", "user", "assistant"), ("system", "user"), ("user",)])
def test_conversations_that_go_on_begin_with_the_tokens_of_the_messages(
    tmp_path: Path, template: str | None, roles: tuple[str, ...]
) -> None:
    config = {} if template is None else {"chat_template": template}
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model", BYTE_LEVEL, **config))
    messages = [{"role": role, "content": f"{TEXT}{role}"} for role in roles]
    shared = chat_prefix_tokens(messages, tokenizer, BOUNDS)
    user, answer = {"role": "user", "content": "set an alarm"}, {"role": "assistant", "content": "play music"}
    tails = ([user], [user, answer, user]) if roles[-1] != "user" else ([], [answer, user])
    for tail in tails:
        assert (
            tokenizer.encode(tokenizer.render_chat_text([*messages, *tail]), add_special_tokens=False)[: len(shared)]
            == shared
        )
    assert f"{TEXT}{roles[-1]}"[:-2] in tokenizer.decode(shared)  # all of it but what may merge


def test_without_a_chat_template_messages_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", BYTE_LEVEL, chat_template=None)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        chat_prefix_tokens([{"role": "system", "content": "x"}], Tokenizer.from_folder(folder), BOUNDS)


def test_messages_that_the_template_takes_in_no_continuation_are_refused(tmp_path: Path) -> None:
    template = "{{ raise_exception('no conversations') }}"
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model", BYTE_LEVEL, chat_template=template))
    with pytest.raises(InvalidRequestError, match="no conversations"):
        chat_prefix_tokens([{"role": "user", "content": "x"}], tokenizer, BOUNDS)


def test_a_system_message_that_the_template_refuses_there_is_pinned_as_it_is_rendered(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model", BYTE_LEVEL, chat_template=FOLDING))
    sent = [{"role": "user", "content": TEXT}, {"role": "system", "content": TEXT}]
    assert tokenizer.decode(chat_prefix_tokens(sent, tokenizer, BOUNDS)).startswith(
        f"[INST] {TEXT} [/INST][INST] {TEXT}"
    )


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path / "model", BYTE_LEVEL))
    with pytest.raises(InvalidRequestError, match="characters"):
        tokens_shared_by_continuations("a" * 1_000_000, tokenizer, BOUNDS)
