"""Order of waiting, of running, and of preemption."""

from checking import executor_of, generate, make_engine, make_request, run

from headstart.core.sched.waiting_queue import OrderedSequences, fcfs_key, priority_key
from headstart.core.sequence import Sequence


def sequence(order: int, urgent: int = 0) -> Sequence:
    request = make_request(f"r{order}", [1], priority=urgent)
    return Sequence(request, request.prompt, root=b"", region=b"", order=order)  # type: ignore[arg-type]


def test_sequences_stay_in_the_order_of_their_key_whatever_the_order_of_adding() -> None:
    sequences = OrderedSequences(fcfs_key)
    items = [sequence(order) for order in (3, 1, 4, 0, 2)]
    for item in items:
        sequences.add(item)
    assert [seq.order for seq in sequences] == [0, 1, 2, 3, 4]
    sequences.remove(items[0])
    assert [seq.order for seq in sequences] == [0, 1, 2, 4] and len(sequences) == 4


def test_priority_puts_the_smaller_value_first_then_the_earlier_arrival() -> None:
    sequences = OrderedSequences(priority_key)
    for order, urgent in ((0, 1), (1, 0), (2, 1), (3, 0)):
        sequences.add(sequence(order, urgent))
    assert [seq.order for seq in sequences] == [1, 3, 0, 2]


def first_chunks(policy: str) -> list[str]:
    engine = make_engine(num_blocks=40, policy=policy, max_seqs=1)
    generate(engine, *(make_request(f"r{i}", [i] * 3, priority=-i) for i in range(4)))
    return [chunk.request_id for batch in executor_of(engine).batches for chunk in batch.chunks]


def test_fcfs_admits_in_order_of_arrival_and_priority_by_urgency() -> None:
    assert first_chunks("fcfs") == ["r0", "r1", "r2", "r3"]
    assert first_chunks("priority") == ["r3", "r2", "r1", "r0"]


def test_the_least_urgent_is_preempted_and_resumes_before_newcomers() -> None:
    engine = make_engine(num_blocks=7, policy="priority", max_model_len=24, expects_short_outputs=True)
    engine.add_request(make_request("late", [1] * 5, 11, priority=1))
    engine.add_request(make_request("early", [2] * 5, 11, priority=0))
    while not engine.stats().counters.num_preemptions:
        engine.step()
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["late"]
    engine.add_request(make_request("newcomer", [3] * 5, 1, priority=1))
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["late", "newcomer"]
    run(engine)
