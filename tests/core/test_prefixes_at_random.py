"""Prefixes come and go while requests of three domains run, fail and are aborted: nothing is ever stuck."""

from random import Random

import pytest
from checking import executor_of, make_engine, make_request

from headstart.core.batch import Chunk
from headstart.core.cache.pinned_prefix import PrefixState
from headstart.core.engine import Engine
from headstart.core.errors import InvalidRequestError
from headstart.core.sched import admission

STEPS = 200
DOMAINS = (b"", b"a", b"b")


def random_engine(rng: Random) -> Engine:
    bad = {rng.randrange(1, 40)} if rng.random() < 0.4 else set[int]()

    def poison(chunk: Chunk) -> bool:
        return bool(bad.intersection(chunk.token_ids)) and rng.random() < 0.1

    return make_engine(
        num_blocks=rng.choice([9, 13, 17, 33]),
        policy=rng.choice(["fcfs", "lpm", "priority"]),
        eviction_policy=rng.choice(["lru", "2q"]),
        tenant_floor=rng.choice([0.0, 0.5]),
        expects_short_outputs=rng.random() < 0.5,
        poison=poison,
        max_batched_tokens=rng.choice([8, 16, 64]),
        max_seqs=rng.choice([2, 4, 8]),
    )


class Chaos:
    """One engine and everything that may be asked of it, at random."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.engine = random_engine(self.rng)
        self.bases = [[self.rng.randrange(1, 40) for _ in range(self.rng.choice([8, 12, 24]))] for _ in range(3)]
        self.live: set[str] = set()
        self.num_requests = 0

    def act(self) -> None:
        rng, dice = self.rng, self.rng.random()
        try:
            if dice < 0.35:
                self._request()
            elif dice < 0.45:
                domain, base = rng.choice(DOMAINS), rng.choice(self.bases)
                self.engine.add_prefix(f"p{rng.randrange(4)}", base, tenant=domain.decode(), domain=domain)
            elif dice < 0.52:
                self.engine.remove_prefix(f"p{rng.randrange(4)}")
            elif dice < 0.55:
                self.engine.reset_prefix_cache(pinned=rng.random() < 0.5)
            elif dice < 0.6 and self.live:
                aborted = rng.choice(sorted(self.live))
                assert self.engine.abort(aborted)
                self.live.discard(aborted)
            elif dice < 0.64:
                self._corrupt()
        except InvalidRequestError:
            pass

    def step(self, now: float) -> None:
        for output in self.engine.step(now):
            assert output.request_id in self.live, f"{output.request_id} is of no live request"
            if output.finish_reason is not None:
                self.live.discard(output.request_id)
        self.engine.scheduler.pool.check_invariants()

    def check(self) -> None:
        pool, prefixes = self.engine.scheduler.pool, self.engine.scheduler.prefixes
        assert pool.num_pinned_hashes <= prefixes.max_blocks
        held = sum(info.num_blocks for info in prefixes.list_prefixes())
        assert max((info.num_blocks for info in prefixes.list_prefixes()), default=0) <= pool.num_pinned_hashes <= held

    def _corrupt(self) -> None:
        """Spoils a published block, in use or not."""
        entries = sorted(self.engine.scheduler.pool._entries.values())
        if entries:
            executor_of(self.engine).corrupt(self.rng.choice(entries)[0])

    def _request(self) -> None:
        rng, base, domain = self.rng, self.rng.choice(self.bases), self.rng.choice(DOMAINS)
        prompt = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(1, 40) for _ in range(rng.randrange(8))]
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        fields = {"domain": domain, "tenant": domain.decode(), "priority": rng.randrange(3)}
        self.engine.add_request(make_request(request_id, prompt, max_tokens=rng.randrange(1, 12), **fields))
        self.live.add(request_id)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_everything_ends_and_every_prefix_is_warm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PREEMPTIONS", seed % 4)  # many may not be preempted again
    chaos = Chaos(seed)
    for now in range(STEPS):
        chaos.act()
        chaos.step(now)
        chaos.check()
    for now in range(STEPS, STEPS + 5000):
        if not chaos.engine.has_work:
            break
        chaos.step(now)
    assert not chaos.engine.has_work and not chaos.live
    recent = chaos.engine.recent
    assert not recent._queued and not recent._open
    assert {seen.request_id.split(":")[1] for seen in recent._prefixes.values()} <= {
        info.name for info in chaos.engine.list_prefixes()
    }
    prefixes = chaos.engine.list_prefixes()
    assert all(info.state is not PrefixState.WARMING for info in prefixes)
    ready = sum(info.num_blocks for info in prefixes if info.state is PrefixState.READY)
    assert chaos.engine.stats().pool.num_pinned_idle == chaos.engine.stats().pool.num_pinned <= ready
