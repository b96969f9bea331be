"""What the plan itself takes: too little to see in the difference of whole calls, whose noise is larger."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decayattn.problem import AttentionProblem, tolerance_of
from skipping_benchmark.workloads import Workload

# plans in one graph: launching it takes longer than one of them
COPIES = 20


def times(
    workload: Workload, inputs: dict[str, Tensor], rounds: int, timer: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Microseconds of one plan (forward) and of one mirror (backward); a GPU's, where the workload is planned."""
    found = {}
    for direction, call in launches(workload, inputs).items():
        graph = _captured(call)
        found[direction] = statistics.median(timer(graph.replay) for _ in range(rounds)) * 1e3 / COPIES
    return found


def launches(workload: Workload, inputs: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """By direction, what the plan adds to a call's launches; nothing where the workload is not planned."""
    from decayattn.backends.planning import prefix as decay_prefix  # imports Triton
    from decayattn.backends.planning import skipping

    q, k, log_decay = (inputs[name] for name in ("q", "k", "log_decay"))
    tolerance = tolerance_of("auto", q.dtype)
    problem = AttentionProblem.of(q, k, log_decay, None, True, (-1, -1), skip_tolerance=tolerance)
    if not skipping.is_planned(problem):
        return {}
    prefix = decay_prefix.build(problem, log_decay) if problem.decay == "scalar" else decay_prefix.allocate(problem, q)

    def plan() -> Tensor:
        return skipping.plan(problem, q, k, log_decay, workload.case.head_dim**-0.5, prefix, None)

    first_block = plan()
    return {"forward": plan, "backward": lambda: skipping.last_granules(problem, first_block, None)}


def _captured(call: Callable[[], Tensor]) -> Any:
    """A graph of COPIES calls, so that it is the GPU that is timed and not Python."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            call()
    return graph
