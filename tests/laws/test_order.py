"""Law 12: k-LPM admits everybody within k(r + 1) admissions, the queue's index agrees with the pool, and no request
is preempted more than MAX_PREEMPTIONS times."""

from checking import executor_of, generate, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.engine import Engine
from headstart.core.sched.admission import MAX_PREEMPTIONS

HOT = list(range(8))


def admissions(engine: Engine, known: set[str]) -> list[str]:
    """Requests that the last step admitted, in order."""
    fresh = [chunk.request_id for chunk in executor_of(engine).batches[-1].chunks if chunk.request_id not in known]
    known.update(fresh)
    return fresh


def first_ones(engine: Engine, *prompts: list[int]) -> str:
    """In which order these are admitted, one at a time, as letters."""
    for name, prompt in zip("abcdefghijkl", prompts, strict=False):
        engine.add_request(make_request(name, prompt))
    known: set[str] = set()
    order = ""
    while engine.has_work:
        engine.step()
        order += "".join(admissions(engine, known))
    return order


def test_lpm_takes_the_longest_match_but_every_kth_time_the_oldest() -> None:
    def engine(policy: str, k: int) -> Engine:
        made = make_engine(num_blocks=60, policy=policy, lpm_k=k, max_seqs=1)
        generate(made, make_request("seed", [*HOT, 99]))
        return made

    cold = [[60 + i] * 5 for i in range(3)]
    hot = [[*HOT, 50 + i] for i in range(5)]
    prompts = [cold[0], cold[1], *hot, cold[2]]  # a b | c d e f g | h
    assert first_ones(engine("fcfs", 4), *prompts) == "abcdefgh"
    assert first_ones(engine("lpm", 1), *prompts) == "abcdefgh"
    # the seed was admission 0; turns 4, 8, ... are the oldest's
    assert first_ones(engine("lpm", 4), *prompts) == "cdeafgbh"
    assert first_ones(engine("lpm", 100), *prompts) == "cdefgabh"


def test_a_preempted_sequence_resumes_before_longer_matches() -> None:
    engine = make_engine(num_blocks=7, policy="lpm", lpm_k=100, max_model_len=24, expects_short_outputs=True)
    generate(engine, make_request("seed", [1] * 5))
    engine.add_request(make_request("early", [2] * 5, 11))
    engine.add_request(make_request("late", [3] * 5, 11))
    while not engine.stats().counters.num_preemptions:
        engine.step()
    engine.add_request(make_request("hot", [1] * 5, 11))
    known = {"early", "late"}
    while "hot" not in known:
        engine.step()
        admissions(engine, known)
    assert "late" not in {seq.request_id for seq in engine.scheduler.waiting}
    run(engine)


def expect_short_outputs(engine: Engine) -> None:
    for _ in range(300):
        engine.scheduler.admission.record_output_length(1)


def test_admission_leaves_running_sequences_room_for_outputs_as_long_as_those_before() -> None:
    preemptions = []
    for short in (True, False):
        engine = make_engine(num_blocks=13, max_model_len=24, expects_short_outputs=short)
        if not short:
            for number in range(8):
                generate(engine, make_request(f"before{number}", [number] * 4, 12))
        generate(engine, *(make_request(f"r{i}", [50 + i] * 4, 12) for i in range(6)))
        preemptions.append(engine.stats().counters.num_preemptions)
    assert preemptions[0] > 0 and preemptions[1] == 0


def test_a_sequence_preempted_three_times_comes_back_with_room_to_its_end_and_stays() -> None:
    engine = make_engine(num_blocks=21, policy="priority", max_model_len=80, max_batched_tokens=90)
    engine.add_request(make_request("patient", [1] * 5, 75, priority=1))
    (patient,) = engine.scheduler.waiting
    for number in range(8):
        expect_short_outputs(engine)  # so that admission is careless
        engine.step()
        engine.add_request(make_request(f"urgent{number}", [10 + number] * 5, 60, priority=0))
        for _ in range(200):
            engine.step()
            if not any(seq.request.priority == 0 for seq in (*engine.scheduler.running, *engine.scheduler.waiting)):
                break
            expect_short_outputs(engine)
        else:
            raise AssertionError("an urgent request never finished")
        if not engine.has_work:
            break
    assert patient.num_preemptions == MAX_PREEMPTIONS
    run(engine)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=40),
    k=st.integers(1, 5),
    max_seqs=st.integers(1, 3),
)
def test_a_request_with_r_older_ones_ahead_is_admitted_within_k_times_r_plus_1_admissions(
    arrivals: list[tuple[bool, int]], k: int, max_seqs: int
) -> None:
    engine = make_engine(num_blocks=60, policy="lpm", lpm_k=k, max_seqs=max_seqs, max_batched_tokens=12)
    generate(engine, make_request("seed", [*HOT, 99]))
    known, bound, num_admitted = {"seed"}, {}, 0
    todo = list(enumerate(arrivals))
    while todo or engine.has_work:
        while todo:
            number, (is_hot, pause) = todo[0]
            if pause and engine.has_work:
                todo[0] = (number, (is_hot, pause - 1))
                break
            todo.pop(0)
            prompt = [*HOT, 100 + number] if is_hot else [1_000 + number] * 5
            bound[f"r{number}"] = num_admitted + k * (len(engine.scheduler.waiting) + 1)
            engine.add_request(make_request(f"r{number}", prompt, 1 + number % 3))
        engine.step()
        for request_id in admissions(engine, known):
            num_admitted += 1
            assert num_admitted <= bound[request_id], f"{request_id} was overtaken too often"
    assert num_admitted == len(arrivals)


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=14),
    aborts=st.lists(st.integers(0, 13), max_size=5),
    num_blocks=st.integers(9, 20),
    policy=st.sampled_from(["fcfs", "priority", "lpm"]),
)
def test_the_queue_knows_at_least_what_there_is_and_names_the_first_missing_block(
    prompts: list[list[int]], aborts: list[int], num_blocks: int, policy: str
) -> None:
    engine = make_engine(num_blocks, policy=policy, max_seqs=2, max_batched_tokens=8)
    for number, prompt in enumerate(prompts):
        engine.add_request(make_request(f"r{number}", prompt, 2))
    for number in range(200):
        queue, cache = engine.scheduler.waiting, engine.scheduler.cache
        queue.regroup_after_publish()
        assert len(list(queue)) == len(queue)
        for seq in queue:
            hit = cache.match_prefix(seq)
            assert queue.published_blocks_upper_bound(seq) >= len(hit.block_ids)
        if number < len(aborts):
            engine.abort(f"r{aborts[number]}")
        if not engine.step() and not engine.has_work:
            break
    assert not engine.has_work


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 16)), min_size=2, max_size=12),
    num_blocks=st.integers(8, 14),
    policy=st.sampled_from(["fcfs", "priority", "lpm"]),
)
def test_no_sequence_is_preempted_more_often_than_the_bound_and_all_finish(
    shapes: list[tuple[int, int]], num_blocks: int, policy: str
) -> None:
    engine = make_engine(
        num_blocks, policy=policy, max_model_len=28, max_seqs=6, max_batched_tokens=16, expects_short_outputs=True
    )
    for number, (length, max_tokens) in enumerate(shapes):
        engine.add_request(make_request(f"r{number}", [number] * length, max_tokens, priority=number % 2))
    sequences = list(engine.scheduler.waiting)
    for _ in range(3_000):
        engine.step()
        assert all(seq.num_preemptions <= MAX_PREEMPTIONS for seq in sequences)
        if not engine.has_work:
            break
    assert not engine.has_work
