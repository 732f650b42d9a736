"""Recorded agent traces as the request bodies of chats.

The traces have no assistant turns in their inputs, no tools and no reasoning: recorded outputs are put back as
assistant turns, the rest is generated, seeded.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

Body = dict[str, Any]

_SUBJECTS = (
    "flight",
    "ticket",
    "refund",
    "module",
    "patch",
    "branch",
    "query",
    "parser",
    "invoice",
    "session",
    "index",
)
_ACTS = ("confirm", "inspect", "reject", "record", "rewrite", "cancel", "compare", "restore", "measure", "forward")
_PLACES = ("in the archive", "at the gate", "in the test folder", "on the desk", "behind the cache", "in the manual")


class Call(NamedTuple):
    """One recorded call: the whole input, and the output."""

    text: str
    output: str


def recorded_chats(path: Path, min_calls: int = 4) -> Iterator[list[Call]]:
    """Yield the calls of each conversation: each input begins with the one before it."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        sessions.setdefault(row["session_id"], []).append(row)
    for rows in sessions.values():
        rows.sort(key=lambda row: row["timestamp"])
        chats: list[list[Call]] = []
        for row in rows:
            text, output = row["input"], row["output"]
            fits = [chat for chat in chats if text.startswith(chat[-1].text) and len(text) > len(chat[-1].text)]
            if fits:
                max(fits, key=lambda chat: len(chat[-1].text)).append(Call(text, output))
            elif not any(chat[-1].text == text for chat in chats):
                chats.append([Call(text, output)])
        yield from (chat for chat in chats if len(chat) >= min_calls)


def sentence(rng: Random) -> str:
    first, second = rng.sample(_SUBJECTS, 2)
    act, place, other = rng.choice(_ACTS), rng.choice(_PLACES), rng.choice(_ACTS)
    return f"Before you {act} the {first} {place}, {other} the {second} and say so."


def agent(rng: Random, size: int = 5) -> tuple[str, list[Body]]:
    """Return the system prompt, with rules and `size` documents, and the tools of one agent."""
    rules = "\n".join(f"- {sentence(rng)}" for _ in range(2 * size))
    documents = [" ".join(sentence(rng) for _ in range(5)) for _ in range(size)]
    system = f"You are an agent that works step by step.\n{rules}\n\n" + "\n\n".join(documents)
    names = [f"{act}_{subject}" for act in _ACTS for subject in _SUBJECTS]
    names = rng.sample(names, rng.randrange(size - 1, 2 * size - 1))
    return system, [_tool(name, rng) for name in names]


def bodies_of(chat: list[Call], rng: Random, own: tuple[str, list[Body]]) -> list[Body]:
    """Return the request bodies of one conversation; observations are tool results in half of the conversations."""
    system, tools = own
    with_tools = rng.random() < 0.5
    messages: list[Body] = [{"role": "system", "content": system}, {"role": "user", "content": chat[0].text}]
    bodies: list[Body] = []
    for number, (call, following) in enumerate(zip(chat, [*chat[1:], None], strict=True)):
        bodies.append({"model": "agent", "tools": tools, "messages": copy.deepcopy(messages)})
        if following is None:
            break
        thought = " ".join(sentence(rng) for _ in range(rng.randrange(2, 6)))
        turn: Body = {"role": "assistant", "content": call.output, "reasoning_content": thought}
        seen = following.text[len(call.text) :].strip("\n")
        if with_tools:
            name, call_id = rng.choice(tools)["function"]["name"], f"call_{number}"
            arguments = json.dumps({"subject": rng.choice(_SUBJECTS), "count": rng.randrange(90)})
            function = {"name": name, "arguments": arguments}
            messages.append(turn | {"tool_calls": [{"id": call_id, "type": "function", "function": function}]})
            result = {"status": rng.choice(["done", "partly"]), "output": seen, "code": rng.randrange(3)}
            messages.append({"role": "tool", "tool_call_id": call_id, "content": json.dumps(result)})
        else:
            messages += [turn, {"role": "user", "content": seen}]
    return bodies


def _tool(name: str, rng: Random) -> Body:
    fields = rng.sample(_SUBJECTS, 4)
    properties = {one: {"type": "string", "description": sentence(rng)} for one in fields}
    schema = {"type": "object", "properties": properties, "required": fields[:2]}
    return {"type": "function", "function": {"name": name, "description": sentence(rng), "parameters": schema}}
