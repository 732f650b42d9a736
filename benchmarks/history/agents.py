"""Hits of recorded agents with and without token-exact history: python benchmarks/history/agents.py MODEL TRACE > json.

The inputs are the recorded ones, each with the model's own answers as assistant turns, sampled as long as the recorded
ones. An infinite cache is counted in full blocks on the same answers twice: `text`, where the next prompt is the
tokenizer's tokens of the text, and `exact`, where a turn that comes back as the same text has the generated tokens.
`bound`: what `text` would lose if no token of any answer were found again. Counts, which depend on no clock.
"""

import argparse
import json
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.core.request import Request, SamplingParams
from headstart.engine.llm import LLM

sys.path.insert(0, str(Path(__file__).parents[1] / "prompts"))

from agent_chats import Call, recorded_chats

BLOCK = 16
TOOL_CALL_TOKENS = 32  # of an answer whose text was not recorded


@dataclass(slots=True)
class Cache:
    """An infinite prefix cache, and what it found."""

    blocks: set[bytes] = field(default_factory=set[bytes])
    num_prompt_tokens: int = 0
    num_cached: int = 0
    num_incomplete: int = 0  # turns that did not reuse all full blocks before them

    def prompt(self, token_ids: "array[int]", computed: "array[int]") -> None:
        """Look a prompt up; `computed`: the tokens of this chat whose KV was computed before."""
        found = 0
        while found + BLOCK < len(token_ids) and token_ids[: found + BLOCK].tobytes() in self.blocks:
            found += BLOCK
        self.num_prompt_tokens += len(token_ids)
        self.num_cached += found
        self.num_incomplete += found < len(computed) // BLOCK * BLOCK

    def computed(self, token_ids: "array[int]") -> None:
        for end in range(BLOCK, len(token_ids) + 1, BLOCK):
            self.blocks.add(token_ids[:end].tobytes())


@dataclass(slots=True)
class Chat:
    """A conversation: its text so far, and its tokens in both forms."""

    calls: list[Call]
    text: str
    turn: int = 0
    exact: "array[int]" = field(default_factory=lambda: array("i"))
    before: "dict[str, array[int]]" = field(default_factory=lambda: {"text": array("i"), "exact": array("i")})
    at: int = 0  # characters of `text` that `exact` covers


def measure(llm: LLM, path: Path, temperature: float, max_chats: int, max_turns: int) -> dict[str, Any]:
    tokenizer, limit = llm.tokenizer, llm.info.max_model_len
    system = "<|im_start|>system\nYou are a helpful agent.<|im_end|>\n"
    chats = [Chat(calls[:max_turns], system) for calls in recorded_chats(path)][:max_chats]
    caches = {"text": Cache(), "exact": Cache()}
    num_turns = num_answer_tokens = num_other = 0
    for turn in range(max_turns):
        asked: dict[str, tuple[Chat, array[int]]] = {}
        requests: list[Request] = []
        for number, chat in enumerate(chats):
            if chat.turn != turn or turn >= len(chat.calls):
                continue
            said = chat.calls[turn].text[len(chat.calls[turn - 1].text) if turn else 0 :]
            chat.text += f"<|im_start|>user\n{said.strip()}<|im_end|>\n<|im_start|>assistant\n"
            chat.exact += tokenizer.encode(chat.text[chat.at :], add_special_tokens=False)
            chat.at = len(chat.text)
            recorded = len(tokenizer.encode(chat.calls[turn].output, add_special_tokens=False))
            length = recorded or TOOL_CALL_TOKENS
            canonical = tokenizer.encode(chat.text, add_special_tokens=False)
            if max(len(chat.exact), len(canonical)) + length + 1 > limit:
                continue
            for name, token_ids in (("text", canonical), ("exact", chat.exact)):
                caches[name].prompt(token_ids, chat.before[name])
            num_turns += 1
            sampling = SamplingParams(
                max_tokens=length, temperature=temperature, seed=1000 * number + turn, stop_token_ids=(2,)
            )
            name = f"{temperature}-{number}-{turn}"
            asked[name] = chat, canonical
            requests.append(Request(name, chat.exact[:], sampling))
        for name, answer in run(llm, requests).items():
            chat, canonical = asked[name]
            kept = answer[:-1] if answer and answer[-1] == 2 else answer
            num_answer_tokens += len(answer)
            for form, prompt in (("text", canonical), ("exact", chat.exact)):
                chat.before[form] = prompt + answer[:-1]  # the KV of the last token is not computed
                caches[form].computed(chat.before[form])
            shown = tokenizer.decode(kept, skip_special_tokens=False)
            chat.text += f"{shown}<|im_end|>\n"
            num_other += tokenizer.encode(shown, add_special_tokens=False) != kept
            if "\ufffd" not in shown:  # else the text that comes back is another one
                chat.exact += kept
                chat.at += len(shown)
            chat.turn += 1
        print(f"{path.stem} {temperature} turn {turn}: {len(requests)} requests", file=sys.stderr, flush=True)
        if not requests:
            break
    total = caches["text"].num_prompt_tokens
    return {
        "trace": path.stem,
        "temperature": temperature,
        "chats": len(chats),
        "turns": num_turns,
        "answer_tokens": num_answer_tokens,
        "answers_with_other_tokens": num_other,
        **{
            name: {
                "prompt_tokens": cache.num_prompt_tokens,
                "cached": cache.num_cached,
                "hit_rate": round(cache.num_cached / cache.num_prompt_tokens, 5),
                "incomplete_turns": cache.num_incomplete,
            }
            for name, cache in caches.items()
        },
        "gain_of_exact": round(
            caches["exact"].num_cached / caches["exact"].num_prompt_tokens - caches["text"].num_cached / total, 5
        ),
        "bound": round(num_answer_tokens / total, 5),
    }


def run(llm: LLM, requests: list[Request]) -> "dict[str, array[int]]":
    answers: dict[str, array[int]] = {request.request_id: array("i") for request in requests}
    for request in requests:
        llm.engine.add_request(request)
    now = 0.0
    while llm.engine.has_work:
        now += 1.0
        for output in llm.engine.step(now):
            assert output.error is None, output.error
            answers[output.request_id].extend(output.token_ids)
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.0])
    parser.add_argument("--chats", type=int, default=10**9)
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with LLM(arguments.model, max_model_len=8192) as llm:
        for trace in arguments.traces:
            for temperature in arguments.temperatures:
                rows.append(measure(llm, trace, temperature, arguments.chats, arguments.turns))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"model": Path(arguments.model).name, "block_size": BLOCK, "rows": rows}, indent=1))
