"""LoadRowCache: an array of the loads that were asked for, as if every row had been read again."""

from random import Random

import numpy as np

from headstart.router.load_rows import MAX_CHANGED, LoadRowCache


class Counted:
    """A load that counts how often its row is read."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.num_reads = 0

    @property
    def pricing_row(self) -> tuple[float, ...]:
        self.num_reads += 1
        return (self.value, -self.value)


def test_rows_are_those_of_all_loads_after_any_changes_and_for_any_subset() -> None:
    rng, rows = Random(0), LoadRowCache()
    loads = [Counted(float(number)) for number in range(6)]
    for _ in range(300):
        for load in rng.sample(loads, rng.randrange(4)):
            load.value = rng.random()
            rows.mark_changed(load)
        asked = rng.choice([loads, loads, loads[1:], loads[:1], loads[::-1]])
        assert rows.rows_for_loads(asked).tolist() == [[load.value, -load.value] for load in asked]


def test_only_changed_rows_are_read_again() -> None:
    rows, loads = LoadRowCache(), [Counted(1.0) for _ in range(5)]
    rows.rows_for_loads(loads)
    loads[3].value = 2.0
    rows.mark_changed(loads[3])
    assert rows.rows_for_loads(loads)[3, 0] == 2.0
    assert [load.num_reads for load in loads] == [1, 1, 1, 2, 1]


def test_loads_of_removed_replicas_do_not_accumulate() -> None:
    rows, loads = LoadRowCache(), [Counted(1.0) for _ in range(2)]
    rows.rows_for_loads(loads)
    loads[0].value = 3.0
    rows.mark_changed(loads[0])
    for _ in range(MAX_CHANGED):
        rows.mark_changed(Counted(0.0))
    assert np.array_equal(rows.rows_for_loads(loads), [[3.0, -3.0], [1.0, -1.0]])
