"""Streams of every tool and reasoning parser: however the bytes of an answer are split, the joined deltas are the same.

The bytes are tokens of a byte-level vocabulary and go through the detokenizer, as in the server, so a piece may end
inside a character.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations, pairwise, product
from typing import NamedTuple

import pytest
import tokenizer_folders

from headstart.openai.chat.chat_delta import ChatDelta, join_deltas
from headstart.openai.text.detokenizer import Detokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.openai.tools.parsers import text_reader
from headstart.openai.tools.parsers.call_writer import ToolCallRules
from headstart.openai.tools.parsers.chat_parser import ChatParser, ReadCalls
from headstart.openai.tools.parsers.tool_formats import (
    read_hermes_calls,
    read_llama3_json_calls,
    read_mistral_calls,
    read_pythonic_calls,
)
from headstart.openai.tools.parsers.xml_calls import read_glm45_calls, read_qwen3_coder_calls

READERS: dict[str, ReadCalls | None] = {
    "hermes": read_hermes_calls,
    "llama3_json": read_llama3_json_calls,
    "mistral": read_mistral_calls,
    "pythonic": read_pythonic_calls,
    "qwen3_coder": read_qwen3_coder_calls,
    "glm45": read_glm45_calls,
    "none": None,
}
SPECIAL = {"llama3_json": ("<|python_tag|>",), "pythonic": ("<|python_start|>", "<|python_end|>")}
ANSWERS = {
    "hermes": [
        'Süß.\n<tool_call>\n{"name": "f", "arguments": {"a": "日本 \\"}{"}}\n</tool_call>\n',
        '<tool_call>{"name":"g"}</tool_call><tool_call>{"name":"f","arguments":{}}</tool_call> é',
        '<tool_call>{"name": "f", "argum',
        "<tool_call>{oops}</tool_call> ü <tool",
    ],
    "llama3_json": [
        '{"name": "f", "parameters": {"a": "日"}}; {"name": "g"}',
        'Hm é <|python_tag|>{"name": "h", "parameters": {}}',
        '{"answer": {"name": "f"}} ü',
    ],
    "mistral": [
        'Süß [TOOL_CALLS] [{"name": "f", "arguments": {"a": "é"}}, {"name": "g"}]',
        '[TOOL_CALLS]f[ARGS]{"a": "日"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        "[TOOL_CALLS]f[ARGS] 5 é",
    ],
    "pythonic": [
        "[f(a='日', b=[-1.5, None]), g()]",
        "Hm é <|python_start|>[other()]<|python_end|> ü",
        "[f(a=1, a=2)] é",
    ],
    "qwen3_coder": [
        "Süß.\n<tool_call>\n<function=f>\n<parameter=a>\n日\n</parameter>\n<b\n</parameter>\n</function>\n</tool_call>\n",
        "<function=g>\n<parameter=n>null</parameter><parameter=o>[1, 'é']</parameter> </function></tool_call> ü",
        "<tool_call>\n<function=f>\n<parameter=a>\né\n</para",
    ],
    "glm45": [
        "Süß.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>日</arg_value> é</arg_value>\n</tool_call>\n",
        '<tool_call>g<arg_key>n</arg_key><arg_value>["</arg_value></tool_call>"]</arg_value></tool_call> ü',
        "<tool_call>f\n<arg_key>é</arg_key>\n<arg_value",
    ],
    "none": ["Text é <tool_call> 日"],
}
SHORT = [  # all of their splits are tried: 2 ** (bytes - 1)
    *(("hermes", "<tool_call>é"), ("hermes", "<tool_call>{")),
    *(("llama3_json", '{"name":"g"}'), ("llama3_json", '{"name":"é"')),
    *(
        ("mistral", "[TOOL_CALLS]g"),
        ("mistral", "a[TOOL_CALLS"),
        ("pythonic", "[f(a='é')]"),
        ("pythonic", "[f(),g()]é"),
    ),
    *(("none", "<think>é"), ("none", "é日\U0001f389</thi")),
]


class Reasoning(NamedTuple):
    """A reasoning parser, and an answer's beginning for it."""

    is_reasoning: bool
    is_open: bool  # the prompt ends inside the reasoning
    before: str


REASONINGS = {
    "none": Reasoning(False, False, ""),
    "closed": Reasoning(True, False, "<think>\nÜb.\n</think>\n\n"),
    "absent": Reasoning(True, False, " "),
    "open": Reasoning(True, True, "Üb <thi </think>"),
    "unended": Reasoning(True, True, "Üb "),
}
Parse = Callable[[Iterable[str]], ChatDelta]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_folders.build(tokenizer_folders.BYTE_LEVEL))


class Answer:
    """The tokens of one answer, one for each byte, and the parser for it."""

    def __init__(self, tokenizer: Tokenizer, family: str, reasoning: Reasoning, text: str) -> None:
        known = {tokenizer.vocabulary.token_bytes(token): token for token in range(450)}
        self.tokens = [known[bytes((byte,))] for byte in (reasoning.before + text).encode()]
        self._tokenizer = tokenizer
        rules = ToolCallRules(frozenset("fg"), lambda: "id", special=SPECIAL.get(family, ()))
        self._parser = partial(
            ChatParser, READERS[family], rules, is_reasoning=reasoning.is_reasoning, is_open=reasoning.is_open
        )

    def parsed(self, cuts: Iterable[int]) -> ChatDelta:
        """The joined deltas if the tokens arrive in pieces that end at `cuts`."""
        detokenizer, parser = Detokenizer(self._tokenizer), self._parser()
        deltas: list[ChatDelta] = []
        for start, end in pairwise((0, *cuts, len(self.tokens))):
            deltas.append(parser.feed("".join(map(detokenizer.push, self.tokens[start:end]))))
        return join_deltas(*deltas, parser.feed(detokenizer.finish()), parser.finish())

    @property
    def places(self) -> range:
        return range(1, len(self.tokens))


CASES = [
    pytest.param(family, reasoning, text, id=f"{family} {number}, reasoning {reasoning}")
    for family, texts in ANSWERS.items()
    for number, text in enumerate(texts)
    for reasoning in REASONINGS
]


@pytest.mark.parametrize(("family", "reasoning", "text"), CASES)
def test_no_one_or_two_cuts_and_no_cut_everywhere_change_the_result(
    tokenizer: Tokenizer, family: str, reasoning: str, text: str
) -> None:
    answer = Answer(tokenizer, family, REASONINGS[reasoning], text)
    whole = answer.parsed(())
    assert answer.parsed(answer.places) == whole
    assert all(answer.parsed((place,)) == whole for place in answer.places)
    pairs = [*combinations(answer.places, 2)]
    assert all(answer.parsed(pair) == whole for pair in pairs[:: 1 + len(pairs) // 400])


@pytest.mark.parametrize(("family", "text"), SHORT)
def test_none_of_all_splits_of_a_short_text_changes_the_result(tokenizer: Tokenizer, family: str, text: str) -> None:
    for reasoning in (REASONINGS["none"], Reasoning(True, False, ""), Reasoning(True, True, "")):
        answer = Answer(tokenizer, family, reasoning, text)
        whole = answer.parsed(())
        for chosen in product((False, True), repeat=len(answer.places)):
            cuts = [place for place, is_cut in zip(answer.places, chosen, strict=True) if is_cut]
            assert answer.parsed(cuts) == whole, cuts


BLANKS = {
    "hermes": 'a   <tool_call>    {"name":"f"   ,"arguments":{}}    </tool_call>    ',
    "llama3_json": '    {"name":"f"}    ;    x',
    "mistral": 'a    [TOOL_CALLS]    [{"name"    :"f","arguments":{}}    ,    x',
    "pythonic": "    [f(a=1)    ,    g()    ]    ",
    "qwen3_coder": "a    <tool_call>    <function=f>   <parameter=a>  b  </parameter>    </function>   </tool_call>   ",
    "glm45": "a    <tool_call>    f    <arg_key>a</arg_key>    <arg_value>    5    </arg_value>    </tool_call>    ",
    "none": "a    b    ",
}


@pytest.mark.parametrize(
    "reasoning", [Reasoning(False, False, ""), Reasoning(True, False, "   <think>    a    </think>  ")]
)
@pytest.mark.parametrize("family", BLANKS)
def test_splits_change_nothing_where_more_is_blank_than_is_kept(
    tokenizer: Tokenizer, family: str, reasoning: Reasoning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_reader, "MAX_BLANKS", 2)
    monkeypatch.setattr(text_reader, "MAX_PIECE", 7)
    answer = Answer(tokenizer, family, reasoning, BLANKS[family])
    whole = answer.parsed(())
    assert answer.parsed(answer.places) == whole
    assert all(answer.parsed(pair) == whole for pair in combinations(answer.places, 2))


@pytest.mark.parametrize("before", ["a", "<think>", "<think>a", "{open}", '{open}{{"name"', "{open}f", "{call}"])
@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "glm45"])
def test_of_blanks_little_is_kept_so_that_a_piece_costs_no_more_than_itself(family: str, before: str) -> None:
    opener = {"mistral": "[TOOL_CALLS]"}.get(family) or (SPECIAL.get(family) or ("<tool_call>",))[0]
    call = {
        "pythonic": "[f(a=1)",
        "qwen3_coder": "<function=f><parameter=l></parameter>",
        "glm45": "f<arg_key>l</arg_key><arg_value></arg_value>",
    }.get(family) or '{"name":"f","arguments":{}}'
    rules = ToolCallRules(frozenset("fg"), lambda: "id", special=SPECIAL.get(family, ()))
    parser = ChatParser(READERS[family], rules, is_reasoning=True)
    parser.feed(before.format(open=opener, call=opener + call))
    kept = 0
    for _ in range(8000):
        parser.feed(" ")
        readers = (parser._reasoning._reader, parser._reader)  # type: ignore[union-attr]
        kept = max(kept, sum(len(reader.text) for reader in readers))
    assert kept < 4 * text_reader.MAX_BLANKS


def test_a_long_text_is_read_in_pieces_so_that_what_is_unread_is_not_copied_for_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = 0
    take = text_reader.TextReader.take_kept

    def counted(reader: text_reader.TextReader) -> str:
        nonlocal copied
        taken = take(reader)
        copied += len(reader.text)
        return taken

    monkeypatch.setattr(text_reader.TextReader, "take_kept", counted)
    num_chars = 0
    argument = "<tool_call>f<arg_key>a</arg_key><arg_value>"
    for family, text in (
        ("mistral", "[TOOL_CALLS]" * 4000),
        ("pythonic", "<|python_start|>" * 4000),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>" + "\n</parameter>" * 4000),
        ("qwen3_coder", "<tool_call><function=f>" * 2000),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>[" + '"</parameter>' * 4000),
        ("glm45", argument + "</arg_value>\n" * 4000),
        ("glm45", (argument + "</arg_value>") * 1000),
    ):
        rules = ToolCallRules(frozenset("fg"), lambda: "id", special=SPECIAL.get(family, ()))
        parser = ChatParser(READERS[family], rules)
        join_deltas(parser.feed(text), parser.finish())
        num_chars += len(text)
    assert copied < 200 * num_chars


@pytest.mark.long
@pytest.mark.parametrize(("family", "reasoning", "text"), CASES)
def test_no_pair_of_cuts_and_no_cuts_within_a_window_change_the_result(
    tokenizer: Tokenizer, family: str, reasoning: str, text: str, width: int = 6
) -> None:
    answer = Answer(tokenizer, family, REASONINGS[reasoning], text)
    whole = answer.parsed(())
    assert all(answer.parsed(pair) == whole for pair in combinations(answer.places, 2))
    for first in range(1, len(answer.places) - width):
        for chosen in product((False, True), repeat=width):  # between pieces as they are, and between single bytes
            inside = [first + at for at, is_cut in enumerate(chosen) if is_cut]
            assert answer.parsed(inside) == whole, inside
            around = [*range(1, first), *inside, *range(first + width, len(answer.tokens))]
            assert answer.parsed(around) == whole, inside
