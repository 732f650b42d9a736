"""One request's failure touches no other: poisoned rows, bugs in admission, bugs in the front end itself."""

import asyncio
import json

import pytest
from server.fake_engine import Gate
from server.harness import inside, until

from headstart.openai.text.generation import GeneratedOutput


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 5])
def test_a_poisoned_row_fails_alone(folder: str, stream: bool, after: int) -> None:
    async def run() -> None:
        async with inside(f"{folder}?step=0.005&poison=7&after={after}") as server:
            good = [server.complete([i, 1], max_tokens=30, return_token_ids=True) for i in range(20, 36)]
            bad = [server.complete([7, 1], max_tokens=30, stream=stream) for _ in range(4)]
            answers = await asyncio.gather(*good, *bad)
            for i, answer in enumerate(answers[:16]):
                assert answer.json()["choices"][0]["token_ids"] == [20 + i, 1] * 15
            for answer in answers[16:]:
                assert answer.status_code == 500 or (stream and "event: error" in answer.text)
            assert (await server.client.get("/health")).status_code == 200
            await until(lambda: server.engine.stats.num_running == 0)
            assert server.engine.stats.pool.num_free == server.engine.stats.pool.num_blocks
            assert server.state.num_jobs == 0

    asyncio.run(run())


def test_one_poisoned_prompt_of_several_fails_them_and_stops_the_work(folder: str, gate: Gate) -> None:
    async def run() -> None:
        async with inside(gate.holds(folder, 20, "poison=7")) as server:
            answer = await server.complete([[1, 2], [7, 2], [3, 4]], max_tokens=400)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_failed")
            await until(lambda: server.engine.stats.num_running == 0)  # held as they are, none would have ended
            assert server.engine.stats.counters.generation_tokens <= 2 * 20

    asyncio.run(run())


def test_a_bug_in_admission_or_in_the_front_end_stays_with_its_request(
    folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    original = GeneratedOutput.update

    def update(self: GeneratedOutput, output: object) -> object:
        if self.num_prompt_tokens == 3:
            raise RuntimeError("a bug at 0x7f00dead in /secret/path")
        return original(self, output)  # type: ignore[arg-type]

    monkeypatch.setattr(GeneratedOutput, "update", update)

    async def run() -> None:
        async with inside(f"{folder}?step=0.005&explode=7") as server:
            bodies = [[7], [1, 2, 3], [1, 2, 3], [1, 2]]
            answers = await asyncio.gather(*(server.complete(body, max_tokens=9) for body in bodies))
            streamed = await server.complete([1, 2, 3], max_tokens=9, stream=True)
            assert [answer.status_code for answer in (*answers, streamed)] == [500, 500, 500, 200, 500]
            for answer in (*answers[:3], streamed):
                assert answer.json()["error"]["type"] == "server_error"
                assert "0x" not in answer.text and "secret" not in answer.text and "bug" not in answer.text
            await until(lambda: server.engine.stats.num_running == 0)
            assert server.state.num_jobs == 0 and server.engine.num_awaiting_first_token == 0

    asyncio.run(run())
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert any("a bug at 0x7f00dead" in record.get("error", "") for record in logged)  # the operator does read it
