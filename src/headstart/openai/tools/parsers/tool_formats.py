"""The formats of tool calls in the output of model families: one generator each, which reads a whole answer."""

from headstart.openai.tools.parsers.call_writer import ChatDeltaWriter
from headstart.openai.tools.parsers.json_calls import read_balanced_brackets, read_json_call
from headstart.openai.tools.parsers.python_calls import python_arguments_as_json
from headstart.openai.tools.parsers.text_reader import Read, TextReader

HERMES_MARKERS = ("<tool_call>", "</tool_call>")
LLAMA3_MARKERS = ("<|python_tag|>",)
MISTRAL_MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
PYTHONIC_MARKERS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
_LLAMA3_BEGINNINGS = ('{"name":"%s"', '{"function":"%s"', '{"type":"function","name":"%s"')


def read_hermes_calls(reader: TextReader, writer: ChatDeltaWriter) -> Read[None]:
    """Read text with any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    opening, closing = HERMES_MARKERS
    while (yield from writer.write_content_until_opener(reader, (opening,))):
        yield from reader.skip_space()
        if not (yield from read_json_call(reader, writer)):
            writer.write_or_drop_kept(reader)
            continue
        yield from reader.skip_space()
        if (yield from reader.consume_literal(closing)):
            reader.take_kept()
        else:
            reader.rewind_kept_text()


def read_llama3_json_calls(reader: TextReader, writer: ChatDeltaWriter) -> Read[None]:
    """Read {"name": ..., "parameters": {...}} at the beginning, or after <|python_tag|>; more follow after ";"."""
    yield from _llama3_calls(reader, writer, is_tagged=False)
    while (yield from writer.write_content_until_opener(reader, LLAMA3_MARKERS)):
        yield from _llama3_calls(reader, writer, is_tagged=True)


def read_mistral_calls(reader: TextReader, writer: ChatDeltaWriter) -> Read[None]:
    """Read text with [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}."""
    while (yield from writer.write_content_until_opener(reader, MISTRAL_MARKERS[:1])):
        yield from reader.skip_space()
        char = yield from reader.peek_char()
        if char == "[":
            yield from _mistral_array(reader, writer)
        elif not (yield from (read_json_call(reader, writer) if char == "{" else _mistral_named(reader, writer))):
            writer.write_or_drop_kept(reader)


def read_pythonic_calls(reader: TextReader, writer: ChatDeltaWriter) -> Read[None]:
    """Read [f(a=1, b="x"), g()] at the beginning, or after <|python_start|> or <|python_tag|>."""
    openers = (PYTHONIC_MARKERS[0], PYTHONIC_MARKERS[2])
    yield from _python_list(reader, writer, openers, any_name=False)
    while (yield from writer.write_content_until_opener(reader, openers)):
        yield from _python_list(reader, writer, (), any_name=True)


def _llama3_calls(reader: TextReader, writer: ChatDeltaWriter, *, is_tagged: bool) -> Read[None]:
    """Read calls in a row; without the tag, an object is a call only with the name of a tool."""
    beginnings = () if is_tagged else _LLAMA3_BEGINNINGS
    while True:
        yield from reader.skip_space()
        if (yield from reader.consume_literal(LLAMA3_MARKERS[0])):
            is_tagged, beginnings = True, ()
            yield from reader.skip_space()
        if not (yield from read_json_call(reader, writer, any_name=is_tagged)):
            writer.write_or_drop_kept(reader, beginnings)
            return
        beginnings = ()
        yield from reader.skip_space()
        if not (yield from reader.consume_literal(";")) and (yield from reader.peek_char()) != "{":
            reader.rewind_kept_text()
            return


def _mistral_array(reader: TextReader, writer: ChatDeltaWriter) -> Read[None]:
    reader.at += 1
    while True:
        yield from reader.skip_space()
        if not (yield from read_json_call(reader, writer)):
            writer.write_or_drop_kept(reader)
            return
        yield from reader.skip_space()
        if (yield from reader.consume_literal("]")):
            reader.take_kept()
            return
        if not (yield from reader.consume_literal(",")):
            reader.rewind_kept_text()
            return


def _mistral_named(reader: TextReader, writer: ChatDeltaWriter) -> Read[bool]:
    name = yield from reader.read_name()
    yield from reader.skip_space()
    if (yield from reader.consume_literal(MISTRAL_MARKERS[1])):
        yield from reader.read_name()
    if (yield from reader.consume_literal(MISTRAL_MARKERS[2])):
        yield from reader.skip_space()
    if not writer.accepts_call_name(name, any_name=True) or (yield from reader.peek_char()) != "{":
        return False
    writer.begin(name)
    reader.take_kept()
    yield from read_balanced_brackets(reader, writer.write_arguments)
    return True


def _python_list(
    reader: TextReader, writer: ChatDeltaWriter, openers: tuple[str, ...], *, any_name: bool
) -> Read[None]:
    """Read a list of calls. Each is written when it is complete, so an invalid one is content as a whole."""
    yield from reader.skip_space()
    for opener in openers:
        if (yield from reader.consume_literal(opener)):
            any_name = True
            yield from reader.skip_space()
            break
    beginnings = () if any_name else ("[%s(",)
    if not (yield from reader.consume_literal("[")):
        writer.write_or_drop_kept(reader, beginnings)
        return
    while True:
        yield from reader.skip_space()
        start = reader.at
        name = yield from reader.read_name()
        is_call = writer.accepts_call_name(name, any_name=any_name) and (yield from reader.peek_char()) == "("
        is_call = is_call and (yield from read_balanced_brackets(reader, quotes="\"'"))
        arguments = python_arguments_as_json(reader.text[start : reader.at]) if is_call else None
        if arguments is None:
            writer.write_or_drop_kept(reader, beginnings)
            return
        writer.begin(name)
        writer.write_arguments(arguments)
        reader.take_kept()
        beginnings = ()
        yield from reader.skip_space()
        if (yield from reader.consume_literal(",")):
            continue
        if (yield from reader.consume_literal("]")):
            yield from reader.skip_space()
            is_closed = yield from reader.consume_literal(PYTHONIC_MARKERS[1])
            reader.take_kept()
            if not is_closed:
                reader.rewind_kept_text()
        else:
            reader.rewind_kept_text()
        return
