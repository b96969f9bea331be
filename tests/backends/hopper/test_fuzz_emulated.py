"""Random calls of the Hopper kernels on a CPU."""

import fuzz_emulated
import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run there: fuzz_kernels.py")
@pytest.mark.parametrize("seed", range(2))
def test_random_calls(seed, capsys):
    assert fuzz_emulated.main(["--seed", str(seed), "--calls", "25", "--longest", "150"]) == 0, capsys.readouterr().out
