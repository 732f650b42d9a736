"""Count the prompt tokens that an engine reuses on a hybrid model: hits.py headstart|vllm MODEL_FOLDER.

Four kinds of traffic, each on new tokens: the same prompt again; prompts behind one shared prefix, one after the
other; the same with the engine told that it is a system message, as chat APIs tell it; a chat whose turns contain all
before. Counters are the engine's own. The last line of stdout is JSON.
"""

import argparse
import json
import os
import time
from array import array
from random import Random
from typing import Any, Protocol

VOCAB = range(3, 400)


class Serve(Protocol):
    """Serves one prompt of which `system` tokens are a system message; returns the tokens cached, and the answer's."""

    def __call__(self, prompt: list[int], num: int, system: int = 0) -> tuple[int, list[int]]: ...


def headstart(path: str) -> Serve:
    from headstart.core.request import Request, SamplingParams
    from headstart.engine.llm import LLM

    llm = LLM(path, max_model_len=4096)

    def serve(prompt: list[int], num: int, system: int = 0) -> tuple[int, list[int]]:
        told = system if system >= llm.info.checkpoint_tokens else 0  # as engine_requests.py decides
        llm.engine.add_request(Request("a", array("i", prompt), SamplingParams(num, temperature=0.0), boundary=told))
        cached, answer = 0, list[int]()
        while llm.engine.has_work:
            for output in llm.engine.step(time.monotonic()):
                answer += output.token_ids
                cached = cached if output.breakdown is None else output.breakdown.num_cached
        return cached, answer

    return serve


def vllm(path: str) -> Serve:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

    llm: Any = LLM(
        model=path, skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=True, enforce_eager=True
    )

    def serve(prompt: list[int], num: int, system: int = 0) -> tuple[int, list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return output.num_cached_tokens, list(output.outputs[0].token_ids)

    return serve


def measure(serve: Serve) -> dict[str, list[tuple[int, int]]]:
    """Return the tokens of each prompt, and those of them that were cached, by kind of traffic."""
    rng = Random(0)

    def text(num: int) -> list[int]:
        return [rng.choice(VOCAB) for _ in range(num)]

    found: dict[str, list[tuple[int, int]]] = {}
    for length in (500, 2000):
        prompt = text(length)
        found[f"again, {length}"] = [(length, serve(prompt, 4)[0]) for _ in range(4)]
        shared = text(length)
        prompts = [[*shared, *text(40)] for _ in range(5)]
        found[f"shared prefix of {length}"] = [(len(each), serve(each, 4)[0]) for each in prompts]
        system = text(length)
        chats = [[*system, *text(40)] for _ in range(5)]
        found[f"chats behind a system message of {length}"] = [(len(each), serve(each, 4, length)[0]) for each in chats]
    chat, turns = text(300), list[tuple[int, int]]()
    for _ in range(12):
        cached, answer = serve(chat, 24)
        turns.append((len(chat), cached))
        chat += answer + text(60)
    return {**found, "chat": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["headstart", "vllm"])
    parser.add_argument("model")
    options = parser.parse_args()
    serve = headstart(options.model) if options.engine == "headstart" else vllm(options.model)
    print(json.dumps({"engine": options.engine, "prompt_and_cached": measure(serve)}))


if __name__ == "__main__":
    main()
