"""Logs of agents' chats, clean or with mistakes that end prefix reuse. Shares no code or pattern with the doctor."""

import base64
import calendar
import copy
import json
import time
import uuid
from collections.abc import Callable
from random import Random
from typing import Any

Body = dict[str, Any]

NOUNS = ("river", "engine", "ledger", "window", "harbour", "ticket", "garden", "printer", "valley", "signal", "kettle")
VERBS = ("opens", "closes", "checks", "repairs", "records", "forwards", "compares", "removes", "lists", "prints")
PLACES = ["north", "south", "cellar", "attic", "depot", "office", "station", "quay", "market", "mill"]


def sentence(rng: Random) -> str:
    words = (rng.choice(NOUNS), rng.choice(VERBS), rng.choice(NOUNS), rng.choice(PLACES), rng.choice(NOUNS))
    return "The {} {} the {} near the {} and keeps a note for the {}.".format(*words)


def tool(name: str, rng: Random) -> Body:
    names = rng.sample(NOUNS, 4)
    properties = {one: {"type": "string", "description": sentence(rng)} for one in names}
    schema = {"type": "object", "properties": properties, "required": names[:2]}
    return {"type": "function", "function": {"name": name, "description": sentence(rng), "parameters": schema}}


def result(rng: Random) -> Body:
    rows = [{"title": sentence(rng), "place": rng.choice(PLACES), "price": rng.randrange(900)} for _ in range(6)]
    return {"rows": rows, "more": False, "source": rng.choice(NOUNS)}


def moment(rng: Random) -> time.struct_time:
    return time.gmtime(1_700_000_000 + rng.randrange(90_000_000))


def question(rng: Random) -> str:
    """A user's message; in half of them there is a date, an id or a number, as people write them."""
    date, name = time.strftime("%Y-%m-%d", moment(rng)), uuid.UUID(int=rng.getrandbits(128))
    extras = ("", "", "", f" It is about {date}.", f" See {name}.", f" Item {rng.randrange(999)} is missing.")
    return f"{sentence(rng)}{rng.choice(extras)} {sentence(rng)} What is in the {rng.choice(PLACES)}?"


def session(rng: Random, system: str, tools: list[Body]) -> list[Body]:
    """The requests of five turns: each sends back everything before it."""
    messages: list[Body] = [{"role": "system", "content": system}]
    bodies: list[Body] = []
    for turn in range(5):
        messages.append({"role": "user", "content": question(rng)})
        bodies.append({"model": "m", "tools": tools, "messages": copy.deepcopy(messages)})
        call = {"name": tools[0]["function"]["name"], "arguments": json.dumps({"place": rng.choice(PLACES)})}
        thought = " ".join(sentence(rng) for _ in range(3))
        asked = {"id": f"c{turn}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [asked]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": json.dumps(result(rng))})
        messages.append({"role": "assistant", "content": " ".join(sentence(rng) for _ in range(3))})
    return bodies


def agent(rng: Random) -> tuple[str, list[Body]]:
    """The system prompt, with rules and documents, and the tools of one agent."""
    documents = [" ".join(sentence(rng) for _ in range(4)) for _ in range(6)]
    rules = "\n".join(sentence(rng) for _ in range(12))
    system = f"You are the assistant of a {rng.choice(NOUNS)} shop.\n{rules}\n\n" + "\n\n".join(documents)
    return system, [tool(f"{rng.choice(VERBS)}_{index}", rng) for index in range(rng.randrange(3, 7))]


def clean_log(rng: Random) -> list[Body]:
    """Two sessions of one agent, in some logs with one of another agent between them."""
    own = agent(rng)
    other = session(rng, *agent(rng)) if rng.random() < 0.3 else []
    return [*session(rng, *own), *other, *session(rng, *own)]


Mistake = Callable[[list[Body], Random], None]


def first_line(make: Callable[[Random, int], str]) -> Mistake:
    """Return a mistake: a line that changes with each request, in front of the system prompt or early in it."""

    def inject(bodies: list[Body], rng: Random) -> None:
        at = rng.choice([0, 0, 1])
        for index, body in enumerate(bodies):
            lines = body["messages"][0]["content"].split("\n")
            lines.insert(at, make(rng, index))
            body["messages"][0]["content"] = "\n".join(lines)

    return inject


def dates(rng: Random) -> Mistake:
    shape = rng.choice(
        [
            "%Y-%m-%d %H:%M:%S",
            "%Y-%m-%dT%H:%M:%SZ",
            "%A, %B %d, %Y at %H:%M",
            "%d/%m/%Y %H:%M",
            "%b %d, %Y %I:%M %p",
            "%s",
        ]
    )
    head = rng.choice(["Current time: {}", "Today is {}.", "[{}]", "Now: {} UTC"])

    def make(own: Random, index: int) -> str:
        at = moment(own)
        return head.format(calendar.timegm(at) if shape == "%s" else time.strftime(shape, at))

    return first_line(make)


def uuids(rng: Random) -> Mistake:
    head = rng.choice(["Session {}", "request-id: {}", "<trace>{}</trace>"])
    return first_line(lambda own, index: head.format(uuid.UUID(int=own.getrandbits(128), version=4)))


def counters(rng: Random) -> Mistake:
    head, start = rng.choice(["This is request number {}.", "Turn {} of the day", "Attempt: {}"]), rng.randrange(5000)
    return first_line(lambda own, index: head.format(start + index))


def identifiers(rng: Random) -> Mistake:
    head = rng.choice(["req_{:012x}", "cch={:010x}0;", "trace id {:016x}"])
    return first_line(lambda own, index: head.format(own.getrandbits(40)))


def shuffled_tools(rng: Random) -> Mistake:
    def inject(bodies: list[Body], own: Random) -> None:
        for body in bodies:
            order = body["tools"]
            body["tools"] = own.sample(order, len(order))
            while body["tools"] == order:
                body["tools"] = own.sample(order, len(order))

    return inject


def reordered(value: Any, rng: Random) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {key: reordered(one, rng) for key, one in items}
    return [reordered(one, rng) for one in value] if isinstance(value, list) else value


def rewritten_json(rng: Random) -> Mistake:
    """The schemas of the tools, or the results of tools in the history, are serialized anew for each request."""
    in_tools = rng.random() < 0.5

    def inject(bodies: list[Body], own: Random) -> None:
        for body in bodies:
            if in_tools:
                body["tools"] = [reordered(one, own) for one in body["tools"]]
                continue
            for message in body["messages"]:
                if message["role"] == "tool":
                    value = reordered(json.loads(message["content"]), own)
                    message["content"] = json.dumps(value, indent=own.choice([None, 1, 2]))

    return inject


def shuffled_documents(rng: Random) -> Mistake:
    def inject(bodies: list[Body], own: Random) -> None:
        for body in bodies:
            head, *documents = body["messages"][0]["content"].split("\n\n")
            own.shuffle(documents)
            body["messages"][0]["content"] = "\n\n".join([head, *documents])

    return inject


def stripped_reasoning(rng: Random) -> Mistake:
    """Only the latest thought is sent back."""

    def inject(bodies: list[Body], own: Random) -> None:
        for body in bodies:
            thoughts = [message for message in body["messages"] if message.get("reasoning_content")]
            for message in thoughts[:-1]:
                del message["reasoning_content"]

    return inject


def edited_system(rng: Random) -> Mistake:
    def inject(bodies: list[Body], own: Random) -> None:
        for body in bodies:
            lines = body["messages"][0]["content"].split("\n")
            lines[3] = f"Remember this above all: {sentence(own)} {sentence(own)}"
            body["messages"][0]["content"] = "\n".join(lines)

    return inject


def dropped_history(rng: Random) -> Mistake:
    keep = rng.randrange(5, 9)

    def inject(bodies: list[Body], own: Random) -> None:
        for body in bodies:
            head, *rest = body["messages"]
            while len(rest) > keep:
                rest = rest[next((at for at, one in enumerate(rest[1:], 1) if one["role"] == "user"), len(rest)) :]
            body["messages"] = [head, *rest]

    return inject


def localized_dates(rng: Random) -> Mistake:
    months = ("janvier", "mars", "avril", "juin", "septembre", "novembre")
    shapes = (
        lambda own: f"Nous sommes le {own.randrange(1, 29)} {own.choice(months)} {own.randrange(2024, 2028)}.",
        lambda own: f"今日は{own.randrange(2024, 2028)}年{own.randrange(1, 13)}月{own.randrange(1, 29)}日です。",
        lambda own: f"Heute ist der {own.randrange(1, 29)}. Dezember {own.randrange(2024, 2028)}.",
    )
    shape = rng.choice(shapes)
    return first_line(lambda own, index: shape(own))


def ulids(rng: Random) -> Mistake:
    alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    return first_line(lambda own, index: "run 01" + "".join(own.choices(alphabet, k=24)))


def base64_ids(rng: Random) -> Mistake:
    return first_line(lambda own, index: f"nonce {base64.b64encode(own.randbytes(18)).decode()}")


def renumbered_documents(rng: Random) -> Mistake:
    def inject(bodies: list[Body], own: Random) -> None:
        for body in bodies:
            head, *documents = body["messages"][0]["content"].split("\n\n")
            own.shuffle(documents)
            numbered = [f"[{index}] {text}" for index, text in enumerate(documents, 1)]
            body["messages"][0]["content"] = "\n\n".join([head, *numbered])

    return inject


UNKNOWN_FORMS: dict[str, tuple[str, Callable[[Random], Mistake]]] = {  # the doctor was not written for these
    "localized dates": ("timestamp", localized_dates),
    "ULIDs": ("identifier", ulids),
    "base64 ids": ("identifier", base64_ids),
    "re-numbered documents": ("document_order", renumbered_documents),
}


def counted_tokens(rng: Random) -> Mistake:
    """A statement of the tokens that are left, in front of the system prompt or behind it."""
    form = rng.choice(
        [
            "<total_tokens>{left} tokens left</total_tokens>",
            "<total_tokens>{left} tokens left",
            "<system_warning>Token usage: {used}/200000; {left} remaining</system_warning>",
        ]
    )
    is_first = rng.random() < 0.5

    def inject(bodies: list[Body], own: Random) -> None:
        left = 200_000
        for body in bodies:
            left -= own.randrange(200, 5000)
            note, system = form.format(left=left, used=200_000 - left), body["messages"][0]
            system["content"] = f"{note}\n{system['content']}" if is_first else f"{system['content']}\n\n{note}"

    return inject


def hoisted_systems(rng: Random) -> Mistake:
    """System messages of the conversation moved behind the system prompt, as some engines do."""

    def inject(bodies: list[Body], own: Random) -> None:
        notes = [sentence(own) for _ in range(5)]
        for body in bodies:
            turns = sum(message["role"] == "user" for message in body["messages"])
            body["messages"][0]["content"] += "".join(f"\n\n{note}" for note in notes[: turns - 1])

    return inject


def in_place_log(rng: Random) -> list[Body]:
    """A clean log with system messages in mid-conversation, and counts of tokens that stay where they were sent."""
    bodies = clean_log(rng)
    notes = [f"{sentence(rng)} <total_tokens>{90_000 - 700 * turn} tokens left</total_tokens>" for turn in range(5)]
    for body in bodies:
        turns = [index for index, message in enumerate(body["messages"]) if message["role"] == "user"]
        for turn, index in reversed(list(enumerate(turns))):
            body["messages"].insert(index + 1, {"role": "system", "content": notes[turn]})
    return bodies


MISTAKES: dict[str, Callable[[Random], Mistake]] = {
    "timestamp": dates,
    "uuid": uuids,
    "number": counters,
    "identifier": identifiers,
    "tool_order": shuffled_tools,
    "json_order": rewritten_json,
    "document_order": shuffled_documents,
    "reasoning_stripped": stripped_reasoning,
    "system_changed": edited_system,
    "history_truncated": dropped_history,
}
ENGINE_MISTAKES: dict[str, Callable[[Random], Mistake]] = {  # of agents and engines of 2026
    "token_count": counted_tokens,
    "system_grown": hoisted_systems,
}


def log_with(causes: list[str], seed: object) -> list[Body]:
    """Return a log with these mistakes, injected in this order."""
    rng = Random(f"{causes} {seed}")
    bodies = copy.deepcopy(clean_log(rng))
    for cause in causes:
        (MISTAKES | ENGINE_MISTAKES)[cause](rng)(bodies, rng)
    return bodies
