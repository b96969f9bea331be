"""Sizes of launches: integers that are rounded up."""

import pytest

from decayattn.backends.runtime import integers


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 127, 128, 129, 2**20 - 1, 2**20])
def test_sizes_round_up(number):
    assert integers.next_power_of_2(number) == min(2**n for n in range(25) if 2**n >= number)
    for divisor in (1, 2, 7, 128):
        assert (integers.cdiv(number, divisor) - 1) * divisor < number <= integers.cdiv(number, divisor) * divisor
    assert integers.cdiv(0, 7) == 0
