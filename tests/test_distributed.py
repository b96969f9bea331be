"""Context parallelism: every result and gradient of several ranks against one process."""


import pytest
from distributed_pool import Pool

RANKS = (2, 4)
# of numbers around 1 in float64, added up in another order
EXACT = 1e-12


@pytest.fixture(scope="module")
def pool():
    """Four processes with gloo on the CPU, whatever else is there."""
    with Pool(4, sizes=RANKS) as started:
        yield started


def compare(pool, ranks, *args, bound=EXACT, **kwargs):
    worst = {}
    for of_rank in pool.run("distributed_cases.compare", *args, ranks=ranks, **kwargs):
        for name, error in of_rank.items():
            worst[name] = max(worst.get(name, 0.0), error)
    assert {"out", "lse", "d_q", "d_k", "d_v"} <= worst.keys()
    assert all(error <= bound for error in worst.values()), worst


BOTH = {
    "a gate": {},
    "no decay": dict(decay="none"),
    "constant": dict(decay="constant"),
    "growth": dict(decay="growth", mean=0.1),
    "growing constant": dict(decay="constant", mean=0.01),
    "resets": dict(resets=0.02),
    "most tokens reset": dict(resets=0.6),
    "masks for resets": dict(mean=-2e3),
    "a constant that resets": dict(decay="constant", mean=-1e4),
    "window": dict(options=dict(window_size=(30, 0))),
    "window of the own key": dict(options=dict(window_size=(0, -1))),
    "window without a decay": dict(decay="none", options=dict(window_size=(50, -1))),
    "scales and sink": dict(row_scale=True, sink=True, options=dict(window_size=(40, 0))),
    "a number for the scale": dict(options=dict(scale=-0.3)),
    "uneven": dict(lengths="uneven", resets=0.01),
    "chunks": dict(lengths="chunk", length=109, sink=True),
    "empty slices": dict(lengths="chunk", length=5, resets=0.2),
    "no token": dict(length=0),
    "multi-query": dict(kv_heads=1),
    "multi-head": dict(kv_heads=4, dim=3),
    "packed": dict(batch=1, cu_seqlens=[0, 3, 3, 50, 51, 99]),
    "packed and a tail": dict(batch=1, cu_seqlens=[2, 80], resets=0.02, sink=True),
    "packed at the edges": dict(batch=1, cu_seqlens=[0, 25, 50, 100], row_scale=True),
    "packed, uneven, constant, window": dict(
        batch=1, cu_seqlens=[0, 17, 60, 99], decay="constant", lengths="uneven", options=dict(window_size=(20, 0))
    ),
    "packed without a decay": dict(batch=1, cu_seqlens=[0, 60, 100], decay="none"),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", ["halo", "heads"])
@pytest.mark.parametrize("case", BOTH)
def test_ranks_compute_what_one_process_does(pool, ranks, mode, case):
    compare(pool, ranks, mode, **dict(length=100) | BOTH[case])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "case",
    [
        dict(options=dict(causal=False)),
        dict(options=dict(causal=False), decay="constant", lengths="uneven"),
        dict(options=dict(causal=False, window_size=(9, 20)), kv_heads=1),
        dict(heads=12, kv_heads=3, sink=True, decay="constant", spread=100.0),
        dict(heads=8, kv_heads=2, row_scale=True, sink=True, spread=10.0),
    ],
)
def test_what_heads_mode_alone_takes(pool, ranks, case):
    compare(pool, ranks, "heads", length=60, **case)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "case",
    [
        dict(decay="none", options=dict(window_size=(30, 0), reach=30)),
        dict(options=dict(window_size=(30, 0), reach=70)),
        dict(mean=-30.0, options=dict(reach=5)),
        dict(mean=-30.0, options=dict(reach=5), batch=1, cu_seqlens=[0, 20, 55, 100]),
        dict(options=dict(reach=10**6), lengths="uneven"),
    ],
)
def test_a_fixed_reach(pool, ranks, case):
    compare(pool, ranks, "halo", length=100, **case)
