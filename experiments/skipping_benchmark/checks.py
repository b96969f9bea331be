"""Right before fast: what is skipped must not show."""

import torch
from shared.calls import Prepared
from shared.checks import oracle, oracle_rows, relative_errors
from torch import Tensor

from decayattn import decay_attention
from decayattn.testing import Comparison, format_table, verify_attention
from skipping_benchmark.workloads import Workload

# the float64 oracle judges whole heads up to this length, and the last rows of longer ones
WHOLE_HEADS = 32768


def objection(workload: Workload, inputs: dict[str, Tensor], backend: str) -> tuple[str | None, list[str]]:
    """Why the results with skip_tolerance="auto" are not to be trusted (None if they are), and what was compared."""
    case = workload.case
    if case.length <= WHOLE_HEADS:
        comparisons = verify_attention(
            inputs["q"], inputs["k"], inputs["v"], inputs["log_decay"], grad_out=inputs["grad_out"], backend=backend,
            heads=[(0, 0), (case.batch - 1, case.heads - 1)], skip_tolerance="auto",
        )
        return _worst(comparisons), format_table(comparisons).splitlines()
    return _last_rows(workload, inputs, backend)


def _worst(comparisons: list[Comparison]) -> str | None:
    outside = [c.name for c in comparisons if not c.passed]
    return f"{', '.join(outside)} outside the error budget" if outside else None


def _last_rows(workload: Workload, inputs: dict[str, Tensor], backend: str) -> tuple[str | None, list[str]]:
    """‖x − x64‖ ≤ 2 ‖whole − x64‖ + eps ‖x64‖: whole is the same kernel without skipping, on the last rows alone."""
    case, rows = workload.case, oracle_rows(workload.case)
    expected = oracle(case, inputs, decay=True)
    of_rows = expected | {"dq": expected["dq"].view(case.length, -1)[-rows:].flatten()}
    whole = relative_errors(case, _prepared(inputs, rows, None, backend), of_rows)
    skipping = relative_errors(case, _prepared(inputs, case.length, "auto", backend), expected)
    eps = torch.finfo(inputs["q"].dtype).eps
    lines = [f"{name}: {skipping[name]:.2e}, without skipping {error:.2e}" for name, error in whole.items()]
    wrong = [name for name, error in whole.items() if not skipping[name] <= 2 * error + eps]
    return (f"{', '.join(wrong)} more than twice as wrong as without skipping" if wrong else None), lines


def _prepared(inputs: dict[str, Tensor], rows: int, tolerance: str | None, backend: str) -> Prepared:
    wanted = {name: inputs[name].detach() for name in ("q", "k", "v", "log_decay")}
    wanted["q"] = wanted["q"][:, -rows:]
    for x in wanted.values():
        x.requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return decay_attention(q, k, v, log_decay, skip_tolerance=tolerance, backend=backend)

    return Prepared(attend, wanted, wanted, inputs["grad_out"][:, -rows:], "BTHD")
