"""Context parallelism on two GPUs, with NCCL."""

import pytest
import torch
from distributed_pool import Pool

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    pytest.mark.xdist_group("ranks"),  # with the other tests of ranks on GPUs
]


@pytest.fixture(scope="module")
def gpus():
    # both compile the same kernels, each of which the other one may have to wait for
    with Pool(2, "cuda", seconds=250) as started:
        yield started


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [701, pytest.param(3000, marks=pytest.mark.slow)])
def test_gpus_stay_within_the_budget_of_one_process(gpus, length, dtype):
    assert gpus.run("distributed_cases.equality", length, dtype, seconds=280) == [[], []]


def test_gpus_fetch_few_keys_of_a_strong_decay(gpus):
    weak, strong = (gpus.run("distributed_cases.fetched_on_gpus", mean) for mean in (-1e-4, -1.0))
    assert weak == [[[[0, 0]], [[2048, 2048]]]] * 2
    assert strong == [[[[0, 0]], [[128, 128]]]] * 2


@pytest.mark.parametrize("mode", ["halo", "heads"])
def test_options_that_differ_are_named_by_gpus(gpus, mode):
    options = dict(mode=mode, scale=0.125, device="cuda")
    for error, _ in gpus.outcomes("distributed_cases.call", options, dict(scale=0.25), seconds=60):
        assert "ValueError: scale: expected the same on every rank" in error


@pytest.mark.parametrize(("mode", "options"), [("heads", {}), ("halo", dict(reach=100))])
def test_a_cuda_graph_replays_calls_without_a_plan(gpus, mode, options):
    assert gpus.run("distributed_cases.captured", mode, options) == [0.0, 0.0]


def test_a_cuda_graph_expects_a_call_before_it():
    with Pool(2, "cuda") as own:
        for error, _ in own.outcomes("distributed_cases.captured", "heads", {}, before=0, seconds=60):
            assert "RuntimeError: context_parallel_attention: expected a call with the same" in error


def test_a_planned_halo_in_a_cuda_graph_is_refused():
    """The processes are new: a failed capture leaves their streams in any state."""
    with Pool(2, "cuda") as own:
        for error, _ in own.outcomes("distributed_cases.captured", "halo", {}, seconds=60):
            assert "RuntimeError: reach: expected a number in a CUDA graph" in error
