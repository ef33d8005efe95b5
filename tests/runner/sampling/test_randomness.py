"""The random number of a token is uniform, repeatable and independent of other tokens."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ostinato.runner.sampling.randomness import uniform


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**40))
def test_numbers_lie_in_the_half_open_unit_interval(seed: int, position: int):
    number = uniform(seed, position)

    assert 0.0 <= number < 1.0
    assert number == uniform(seed, position)


def test_a_seed_gives_the_same_numbers_in_every_release():
    """Someone's saved seed should still tell the same story after an upgrade."""
    assert [uniform(42, position) for position in range(3)] == [
        0.8817756551627708,
        0.7602257843557686,
        0.6232614753284944,
    ]
    assert uniform(-1, 0) != uniform(2**64 - 1, 0)


def test_numbers_fill_the_interval_evenly():
    """Ten drawers of 2,000 numbers each; chi-square stays below its 99.9 % point."""
    drawers = Counter(int(10 * uniform(seed, place)) for seed in range(200) for place in range(100))

    statistic = sum((drawers[drawer] - 2000) ** 2 / 2000 for drawer in range(10))
    assert statistic < 27.88  # 9 degrees of freedom


def test_neighbouring_seeds_and_positions_tell_nothing_about_each_other():
    """Thirds of one number against thirds of the next: all nine combinations alike."""
    for step in ((1, 0), (0, 1), (1, -1)):
        pairs = Counter(
            (int(3 * uniform(seed, 50)), int(3 * uniform(seed + step[0], 50 + step[1])))
            for seed in range(9000)
        )
        statistic = sum((pairs[a, b] - 1000) ** 2 / 1000 for a in range(3) for b in range(3))
        assert statistic < 26.12, step  # 8 degrees of freedom, 99.9 %
