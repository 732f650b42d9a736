"""vLLM #3402's script through headstart.LLM, and a server over HTTP, on a GPU with random weights from a folder."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from headstart import LLM, SamplingParams
from headstart.model.weights.init_model import write_random_model

PORT = 8123


def rotations_script(folder: Path, record: Callable[..., None]) -> None:
    """Run vLLM #3402's script; only its import and its model differ."""
    began = time.time()
    llm = LLM(model=str(folder), enable_prefix_caching=True, block_size=16, max_model_len=2048)
    started = time.time() - began
    prompt1_token_ids = list(range(1025))
    batched = [prompt1_token_ids[i:] + prompt1_token_ids[:i] for i in range(48)]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds: list[float] = []
    for _ in range(4):
        start_time = time.time()
        llm.generate(sampling_params=sampling_params, prompt_token_ids=batched, use_tqdm=False)
        seconds.append(time.time() - start_time)
    record(
        script="vLLM #3402 through headstart.LLM", model=folder.name, start_s=started, cold_ms=seconds[0] * 1e3,
        warm_ms=[s * 1e3 for s in seconds[1:]], kv_tokens=llm.info.num_blocks * 16, backend=llm.info.attention_backend,
    )  # fmt: skip
    llm.close()


def serve(folder: Path, record: Callable[..., None]) -> None:
    """Start the server and send it the same 32 prompts twice."""
    command = [sys.executable, "-m", "headstart", "serve", str(folder), "--port", str(PORT), "--max-model-len", "2048"]
    began = time.time()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        entry = asyncio.run(_requests(began))
        record(server="completions over HTTP", model=folder.name, **entry)
    finally:
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=30)
        print(text[-1500:], flush=True)


async def _requests(began: float) -> dict[str, Any]:
    url = f"http://127.0.0.1:{PORT}"
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            assert time.time() - began < 100, "the server does not start"
            await asyncio.sleep(0.2)
        started = time.time() - began
        shared = [(7 * i) % 30_000 + 5 for i in range(1024)]
        rounds: list[dict[str, Any]] = []
        for _ in range(3):
            sent = time.time()
            bodies = [
                {
                    "prompt": [*shared, *range(100 + at, 116 + at)],
                    "max_tokens": 32,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                for at in range(32)
            ]
            answers = await asyncio.gather(*(_post(session, f"{url}/v1/completions", body) for body in bodies))
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
            rounds.append({"seconds": time.time() - sent, "tokens": tokens, "cached": sum(cached)})
        return {"start_s": started, "rounds": rounds}


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return json.loads(await answer.text())


def end_to_end(record: Callable[..., None], shape: str = "tinyllama-1.1b") -> None:
    """Run both."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / shape
        write_random_model(shape, folder)
        # A process of its own: the memory of a GPU is given back when it ends.
        script = subprocess.run(
            [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True, check=True, env=os.environ
        )
        record(**json.loads(script.stdout.splitlines()[-1]))
        serve(folder, record)


if __name__ == "__main__":
    rotations_script(Path(sys.argv[1]), lambda **entry: print(json.dumps(entry)))
