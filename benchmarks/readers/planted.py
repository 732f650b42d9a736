"""A server with traffic of three clients and one planted loss: planted.py A|B [--seed N] [--minutes M] [--folder DIR].

The loss A: one client writes the time at the front of its system prompt. B: one client sends many long documents, each
twice, which evict the handbooks of another. Who does it is drawn by the seed. Prints what a reader may know: the
address, the administrator's key, and a file with a line for each answer; the solution goes to DIR/solution.json. Runs
until stopped, or for M minutes.
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx

from headstart.bundled import bundled_intent_model_folder
from headstart_lab.prompts.prompt_mistakes import sentence
from headstart_lab.runners.served_replica import Launch, replica

CLIENTS = ("amber", "birch", "cedar")
ADMIN = "administrator"
BLOCKS = 1024  # of 16 tokens: without the documents of B, what the clients ask for again fits
FEW, MANY = 3, 9  # handbooks, of about 86 blocks each
HANDBOOK_SENTENCES, DOCUMENT_SENTENCES, PROMPT_SENTENCES = 36, 48, 24
PAUSE_SECONDS = (0.4, 1.0)  # between the requests of a client
Messages = list[dict[str, str]]


def text(rng: Random, sentences: int) -> str:
    return " ".join(sentence(rng) for _ in range(sentences))


def chat(system: str, question: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def assistant(rng: Random) -> Iterator[Messages]:
    """Questions behind one system prompt."""
    system = f"You are the assistant of a shop. {text(rng, PROMPT_SENTENCES)}"
    while True:
        yield chat(system, text(rng, 2))


def clock(rng: Random) -> Iterator[Messages]:
    """The same with the time at the front: the loss A."""
    system = f"You are the assistant of a library. {text(rng, PROMPT_SENTENCES)}"
    while True:
        yield chat(f"Current time: {datetime.now(UTC).isoformat(timespec='milliseconds')}\n{system}", text(rng, 2))


def few_handbooks(rng: Random) -> Iterator[Messages]:
    """Questions about some handbooks."""
    return handbooks(rng, FEW)


def many_handbooks(rng: Random) -> Iterator[Messages]:
    """Questions about as many as the loss B evicts: more than half of the pool."""
    return handbooks(rng, MANY)


def handbooks(rng: Random, num: int) -> Iterator[Messages]:
    books = [f"Handbook {number}. {text(rng, HANDBOOK_SENTENCES)}" for number in range(num)]
    while True:
        yield chat(rng.choice(books), text(rng, 1))


def documents(rng: Random) -> Iterator[Messages]:
    """Documents that are asked about twice and never again: the loss B."""
    for number in count():
        system = f"Summarise document {number}. {text(rng, DOCUMENT_SENTENCES)}"
        yield chat(system, text(rng, 1))
        yield chat(system, text(rng, 1))


ROLES: dict[str, tuple[Callable[[Random], Iterator[Messages]], ...]] = {
    "A": (clock, few_handbooks, assistant),
    "B": (documents, many_handbooks, assistant),
}


def send(
    url: str, client: str, prompts: Iterator[Messages], rng: Random, log: Callable[[Any], None], pace: float
) -> None:
    with httpx.Client(base_url=url, timeout=300, headers={"authorization": f"Bearer key-of-{client}"}) as session:
        for messages in prompts:
            body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = session.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:  # such as 503 on a busy machine
                print(f"{client}: {answer.text}", file=sys.stderr, flush=True)
                time.sleep(1)
                continue
            told = answer.json()
            cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
            row = {"client": client, "id": told["id"], "prompt_tokens": told["usage"]["prompt_tokens"]}
            log({"time": datetime.now(UTC).isoformat(timespec="seconds"), **row, "cached_tokens": cached})
            time.sleep(rng.uniform(*PAUSE_SECONDS) * pace)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("loss", choices=sorted(ROLES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the server's log, answers.jsonl and solution.json")
    given = parser.parse_args()
    rng = Random(f"{given.loss}/{given.seed}")
    roles = dict(zip(rng.sample(CLIENTS, len(CLIENTS)), ROLES[given.loss], strict=True))
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "headstart.toml").write_text(
            "".join(f'[[tenant]]\nname = "{name}"\napi_keys = ["key-of-{name}"]\n' for name in CLIENTS)
        )
        (folder / "solution.json").write_text(json.dumps({name: role.__name__ for name, role in roles.items()}))
        flags = ("--num-blocks", str(BLOCKS), "--port", str(given.port), "--admin-api-key", ADMIN)
        server = stack.enter_context(replica(Launch(str(bundled_intent_model_folder()), folder, flags), None))
        answers = stack.enter_context((folder / "answers.jsonl").open("w"))
        lock = threading.Lock()

        def log(row: Any) -> None:
            with lock:
                print(json.dumps(row), file=answers, flush=True)

        for name, role in roles.items():
            own = Random(f"{given.loss}/{given.seed}/{name}")
            pace = 0.5 if role is documents else 1.0
            arguments = (server.url, name, role(own), own, log, pace)
            threading.Thread(target=send, args=arguments, daemon=True, name=name).start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        print(json.dumps({"url": server.url, "admin_key": ADMIN, "answers": str(folder / "answers.jsonl")}), flush=True)
        try:
            time.sleep(60 * given.minutes)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
