"""The perfect cache that redundancy is measured against."""

from headstart.core.hashing import BlockHash
from headstart.core.ideal import MIN_NAMES, POOLS, IdealCache


def names(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(8, "little")) for number in numbers]


def test_it_knows_the_leading_names_that_were_there_before() -> None:
    ideal = IdealCache(num_blocks=10)
    assert ideal.num_known(names(1, 2, 3)) == 0
    ideal.learn(names(1, 2, 3), 0)
    assert ideal.num_known(names(1, 2, 3, 4)) == 3 and ideal.num_known(names(1, 2)) == 2
    assert ideal.num_known(names(5, 6)) == 0 and ideal.num_known([]) == 0


def test_it_forgets_the_oldest_beyond_several_pools() -> None:
    ideal = IdealCache(num_blocks=10)
    ideal.learn(names(*range(MIN_NAMES)), 0)
    assert ideal.num_known(names(0)) == 1
    ideal.learn(names(MIN_NAMES), 0)
    assert ideal.num_known(names(0)) == 0 and ideal.num_known(names(1)) == 1
    larger = IdealCache(num_blocks=MIN_NAMES)
    larger.learn(names(*range(POOLS * MIN_NAMES // 4)), 0)
    assert larger.num_known(names(0)) == 1
