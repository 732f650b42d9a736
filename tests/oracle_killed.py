"""The oracle with kill -9: a child serves requests from a store and is killed in the midst of them, again and again.

Run as a program it is the child: oracle_killed.py MODEL ROOM SEED ATTEMPT, with the prompts and the numbers of those to
serve as JSON on stdin; a line of JSON for each request that has ended, and counts when all have.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random

from oracle import EngineUnderTest, Reference, Tally, any_request, check_tokens
from oracle_hybrids import DRAFTS, NUM_TOKENS, HybridFleet, tree_of, with_turns

from headstart.core.engine import Engine

KILLS = 3


class ReportingFleet(HybridFleet):
    """A fleet that prints each request that has ended, with its tokens and what its engines have read of states."""

    def step(self, engine: Engine) -> None:
        before = set(self.owners)
        super().step(engine)
        loaded = sum(one.stats().counters.store_tokens for one in self.engines)
        for name in before - self.owners.keys():
            print(json.dumps([name, self.tokens[name], loaded, self.tally.states_read]), flush=True)


def serve(model: Path, room: Path, seed: int, attempt: int) -> None:
    """Serve what stdin names, on engines that are the same in each attempt."""
    given = json.load(sys.stdin)
    rng, prompts = Random(seed), given["prompts"]
    fleet = ReportingFleet(EngineUnderTest(model, DRAFTS), room, rng, prompts, NUM_TOKENS, 1 << 30)
    requests = [any_request(f"r{index}", prompt, NUM_TOKENS, rng) for index, prompt in enumerate(prompts)]
    fleet.rng.seed(f"{seed}-{attempt}")
    fleet.run([requests[index] for index in given["todo"]], restarts=0)
    fleet.close()
    print(json.dumps(asdict(fleet.tally)), flush=True)


def compare_killed(model: Path, room: Path, seed: int, num_requests: int) -> Tally:
    """Run a random tree in a child that is killed KILLS times, against Transformers; the tally of it.

    What a child counts is lost with it, but for tokens from the store and states that were read.
    """
    rng, reference, tally = Random(f"killed {seed}"), Reference(model), Tally(requests=num_requests)
    prompts = with_turns(tree_of(rng, num_requests), reference, rng)
    todo, found = set(range(num_requests)), dict[int, list[int]]()
    for attempt in range(KILLS + 1):
        lines = rng.randint(1, max(1, len(todo) // 2)) if attempt < KILLS else None
        for line in _child(model, room, seed, attempt, {"prompts": prompts, "todo": sorted(todo)}, lines):
            if isinstance(line, dict):
                tally.add(Tally(**line))
                continue
            name, tokens, loaded, read = line
            found[int(name[1:])] = tokens
            todo.discard(int(name[1:]))
        if lines is not None:
            tally.restarts += 1
            tally.store_tokens, tally.states_read = tally.store_tokens + loaded, tally.states_read + read
    assert not todo, f"seed {seed}: without an end: {sorted(todo)}"
    under_test = EngineUnderTest(model)
    for index, prompt in enumerate(prompts):
        due, gaps = reference.generate(prompt, NUM_TOKENS)
        check_tokens(under_test, f"{model.name} killed, seed {seed} r{index}", prompt, found[index], due, gaps, tally)
    return tally


def _child(model: Path, room: Path, seed: int, attempt: int, given: dict, num_lines: int | None) -> list:
    """Return the lines of a child that is killed after `num_lines` of them, or that ends by itself."""
    command = [sys.executable, __file__, str(model), str(room), str(seed), str(attempt)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            json.dump(given, child.stdin)
            child.stdin.close()
            found = []
            for line in child.stdout:
                found.append(json.loads(line))
                if len(found) == num_lines:
                    break
        finally:
            child.kill() if num_lines is not None else child.wait()
    assert len(found) == num_lines or (num_lines is None and isinstance(found[-1], dict)), "the child ended early"
    return found


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
