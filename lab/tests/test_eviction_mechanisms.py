"""benchmarks/eviction: what queued references and retention hints save and cost, in made cases of a few prompts."""

from dataclasses import replace
from random import Random

from headstart.workload.jobs import Job
from headstart.workload.synthetic import random_tokens
from headstart_lab.eviction.queued_refs import best_case, worst_case
from headstart_lab.eviction.retention_hints import TTL, with_hints
from headstart_lab.eviction.virtual_serving import VOCAB_SIZE, Counts, Server, Session, Turn, serve

SERVER = Server(num_blocks=160, eviction="lru", policy="fcfs", max_seqs=2)


def both(sessions: list[Session], server: Server) -> tuple[Counts, Counts]:
    """Return the counts without queued references, and with them."""
    return serve(replace(server, queued_refs=False), sessions), serve(server, sessions)


def returning(rng: Random) -> list[Session]:
    """Return sessions of two turns with a pause between them."""
    jobs = [Job(random_tokens(160, VOCAB_SIZE, rng), 1) for _ in range(4)]
    return [Session((Turn(0.0, job), Turn(9_000.0, job))) for job in jobs]


def one_off(rng: Random) -> list[Session]:
    """Return prompts that together fill the pool twice during that pause."""
    return [Session((Turn(1_000.0, Job(random_tokens(320, VOCAB_SIZE, rng), 1)),)) for _ in range(16)]


def test_queued_references_keep_cached_prompts_behind_a_queue_that_fills_the_pool() -> None:
    without, with_them = both(best_case(0), SERVER)
    assert with_them.computed == with_them.ideal < without.computed
    assert without.hit_rate == 0


def test_longest_match_finds_the_same_prompts_without_references() -> None:
    without, with_them = both(best_case(0), replace(SERVER, policy="lpm"))
    assert without.computed == with_them.computed == without.ideal


def test_references_of_requests_that_stay_in_the_queue_cost_those_that_run() -> None:
    without, with_them = both(worst_case(0), replace(SERVER, policy="priority"))
    assert with_them.computed > 2 * without.computed


def test_a_ttl_keeps_prompts_that_return_after_one_off_traffic() -> None:
    rng = Random(0)
    mine, others = returning(rng), one_off(rng)
    assert serve(SERVER, mine + others).hit_rate == 0
    hinted = serve(SERVER, with_hints(mine, TTL._replace(ttl=20_000.0)) + others)
    assert hinted.computed == hinted.ideal


def test_a_ttl_that_ends_before_the_return_saves_nothing() -> None:
    rng = Random(0)
    mine, others = returning(rng), one_off(rng)
    hinted = serve(SERVER, with_hints(mine, TTL._replace(ttl=100.0)) + others)
    assert hinted.computed == serve(SERVER, mine + others).computed


def test_the_same_hint_from_everybody_changes_nothing() -> None:
    rng = Random(0)
    sessions = returning(rng) + one_off(rng)
    assert serve(SERVER, with_hints(sessions, TTL._replace(ttl=20_000.0))) == serve(SERVER, sessions)
