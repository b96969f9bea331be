"""Random calls of the Hopper kernels on a CPU (gluon_on_cpu), in bfloat16, too: calls and oracle of fuzz_kernels.py."""

import itertools

import pytest
import torch
from hopper_problems import emulated
from tools.fuzzing.draws import draw
from tools.fuzzing.judge import judge
from tools.fuzzing.tensors import build


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run there: fuzz_kernels.py")
@pytest.mark.parametrize("seed", range(2))
def test_random_calls(seed):
    """25 calls that the kernels take. Races and deadlocks are failures, too."""
    judged = 0
    for number in itertools.count():
        call = draw(seed, number, longest=150, calls_per_family=20)
        if call.family.dtype in ("float16", "bfloat16"):
            with emulated(number):
                verdict = judge(build(call, torch.device("cpu")), ["hopper"])
            assert not verdict.failures, (number, str(call), verdict.failures)
            judged += not verdict.refused
        if judged == 25:
            return
