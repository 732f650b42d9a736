"""Conversations at random, with a marker of its own as each text, and the published chat templates to render them."""

import os
import random
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from real.smollm2 import pip

from headstart.openai.bounds import RequestBounds
from headstart.openai.chat.chat_template import ChatTemplate
from headstart.openai.chat.placed_messages import TemplateMessages, fit_messages_to_template
from headstart.openai.engine_requests import renders_tool_role, tool_family_of
from headstart.openai.request_bodies import parse_chat
from headstart.openai.tools.chat_format import find_chat_format

FOLDER = Path(__file__).parent / "data" / "chat_templates"
PACKAGE, VERSION = "llama_cpp_python", "0.3.36"
BOUNDS = RequestBounds(10**6, 4096)
NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
Message = dict[str, Any]


def all_templates() -> Path:
    """Return the folder of the 70 templates in llama.cpp's source; pip downloads it once. Raises UnreachableError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / f"chat-templates-{VERSION}"
    if cache.is_dir():
        return cache
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent, prefix=".making-") as scratch:
        pip("download", "--no-deps", "--no-binary", ":all:", "--dest", scratch, f"{PACKAGE}=={VERSION}")
        made = Path(scratch) / "templates"
        made.mkdir()
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as source:
            for member in source:
                if "/llama.cpp/models/templates/" in member.name and member.name.endswith(".jinja"):
                    stream = source.extractfile(member)
                    assert stream is not None
                    (made / Path(member.name).name).write_bytes(stream.read())
        with suppress(OSError):  # another process was faster
            made.rename(cache)
    return cache


class Shown:
    """A template, and what it shows of conversations."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.source = path.read_text(encoding="utf-8")
        self.template = ChatTemplate(self.source, NAMED_TOKENS, max_seconds=60)  # other processes may use all cores
        self.forms = self.template.content_forms()

    def place(self, messages: Sequence[Message]) -> TemplateMessages:
        """Return the messages in forms that the template shows."""
        return fit_messages_to_template(
            messages,
            self.forms,
            tool_family_of(find_chat_format(self.source, "auto", "auto")),
            shows_results=renders_tool_role(self.source),
        )

    def read(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of a body as a server with this template reads them."""
        return parse_chat({"messages": messages}, replace(BOUNDS, content_forms=lambda: self.forms)).messages

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the prompt of placed messages."""
        tools = None if self.forms.shows_probe("no tools") else []
        return self.template.render(self.place(messages).messages, **{"tools": tools, **options})


def conversation(rng: random.Random) -> list[Message]:
    """Return a conversation that ends with a message which a model answers; texts are markers."""
    return _Conversation(rng).messages


class _Conversation:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_calls = self._num_texts = 0
        self.messages: list[Message] = []
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            self._add(rng.choice(("system", "developer")))
        for _ in range(rng.randint(1, 4)):
            self._turn()
        if self.messages[-1]["role"] == "assistant":
            self._add("user")

    def _turn(self) -> None:
        rng = self._rng
        self._add("user")
        self._systems()
        if rng.random() < 0.1:
            self._add("user")
        while rng.random() < 0.5:
            self._calls(rng.choice((1, 1, 2, 3)))
            self._systems()
        if rng.random() < 0.85:
            self._answer(self._text() if rng.random() < 0.9 else "")
            self._systems()

    def _calls(self, count: int) -> None:
        rng = self._rng
        ids = [f"call_{self._num_calls + index:020d}" for index in range(count)]
        self._num_calls += count
        calls = [
            {"id": one, "type": "function", "function": {"name": "weather", "arguments": {"city": self._text()}}}
            for one in ids
        ]
        self._answer(self._text() if rng.random() < 0.4 else "", tool_calls=calls)
        num_results = rng.choice((count, count, count, 1, 0))
        for one in ids[:num_results]:
            self._add("tool", tool_call_id=one)

    def _answer(self, content: str, **fields: Any) -> None:
        if self._rng.random() < 0.3:
            fields["reasoning_content"] = self._text()
        is_null = not content and "tool_calls" in fields and self._rng.random() < 0.5
        self.messages.append({"role": "assistant", "content": None if is_null else content, **fields})

    def _systems(self) -> None:
        while self._rng.random() < 0.25:
            self._add(self._rng.choice(("system", "developer")))

    def _add(self, role: str, **fields: Any) -> None:
        parts = [{"type": "text", "text": self._text()} for _ in range(self._rng.choice((1, 2)))]
        content = parts if self._rng.random() < 0.2 else parts[0]["text"]
        self.messages.append({"role": role, **fields, "content": content})

    def _text(self) -> str:
        self._num_texts += 1
        return f"Zz{self._num_texts}x{self._rng.randrange(10**6)}q"


def lost(messages: Sequence[Mapping[str, Any]], prompt: str) -> list[str]:
    """Return the roles whose texts are not in the prompt once and in order.

    A result stands behind its call; the calls of one message and their results may be in any other order.
    """
    found: list[str] = []
    end = 0
    for group in _groups(messages):
        places: dict[str, int] = {}
        for message in group:
            for text in _texts(message):
                places[text] = prompt.find(text)
                if prompt.count(text) != 1 or places[text] < end:
                    found.append(message["role"])
        if len(group) > 1:
            calls = {call["id"]: call["function"]["arguments"]["city"] for call in group[0]["tool_calls"]}
            found += ["tool" for one in group[1:] if places[calls[one["tool_call_id"]]] > places[_texts(one)[0]]]
        end = max(places.values(), default=end)
    return found


def misplaced_reasoning(messages: Sequence[Mapping[str, Any]], prompt: str) -> list[str]:
    """Return the reasonings that are in the prompt twice, or not between the turn before and their own call or text.

    Templates leave out the reasoning of earlier turns, and of calls or answers, each in its own way. Text beside a call
    may stand before the reasoning, where a template shows both in messages of their own only.
    """
    found: list[str] = []
    before = ""
    for message in messages:
        texts = _texts(message)
        reasoning = message.get("reasoning_content")
        if reasoning and (at := prompt.find(reasoning)) >= 0:
            behind = prompt.find(texts[-1]) if texts else len(prompt)
            if prompt.count(reasoning) != 1 or not prompt.find(before) <= at < behind:
                found.append(reasoning)
        if message["role"] != "assistant":
            before = texts[-1]
    return found


def _groups(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    group: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            if group:
                yield group
            group = []
        group.append(message)
    yield group


def _texts(message: Mapping[str, Any]) -> list[str]:
    calls = [call["function"]["arguments"]["city"] for call in message.get("tool_calls", ())]
    content = message["content"]
    parts = [part["text"] for part in content] if isinstance(content, list) else [content] if content else []
    return [*parts, *calls]
