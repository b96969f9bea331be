"""Right before fast: ours against the error budget, everybody against the float64 oracle."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decayattn import decay_attention
from decayattn.testing import Comparison, verify_attention
from shared.calls import Prepared, in_layout
from shared.cases import Case

# The oracle holds a matrix of this many float64 scores (0.5 GB): of longer sequences it takes the last rows only
ORACLE_SCORES = 2**26


def verify_ours(
    case: Case, inputs: dict[str, Tensor], backend: str, heads: Sequence[tuple[int, int]] | None = None
) -> list[Comparison]:
    """decay_attention on the very inputs that are timed: these (batch entry, head) pairs against the budget, the first
    and the last one by default."""
    if heads is None:
        heads = [(0, 0), (case.batch - 1, case.heads - 1)]
    return verify_attention(
        inputs["q"], inputs["k"], inputs["v"], inputs.get("log_decay"), scale=inputs.get("scale"),
        grad_out=inputs["grad_out"], backend=backend, causal=case.causal, heads=heads, skip_tolerance=None,
    )


def oracle_rows(case: Case) -> int:
    """How many last rows of a sequence the oracle evaluates."""
    return min(case.length, max(1, ORACLE_SCORES // case.length))


def oracle(case: Case, inputs: dict[str, Tensor], decay: bool, row_scales: bool = True) -> dict[str, Tensor]:
    """out and every gradient in float64 for the last rows of the last head of the last batch entry.

    The other rows have output gradient 0, which makes the gradients of k, v and log_decay exact for all keys.
    """
    rows = oracle_rows(case)
    q, k, v = (inputs[name][-1:, :, -1:].double().requires_grad_() for name in ("q", "k", "v"))
    log_decay = inputs["log_decay"].double() if decay and "log_decay" in inputs else None
    if log_decay is not None:
        log_decay = (log_decay[-1:, :, -1:] if log_decay.ndim == 3 else log_decay[-1:]).requires_grad_()
    scale = None
    if row_scales and "scale" in inputs:
        scale = inputs["scale"][-1:, :, -1:].double().requires_grad_()
    out = decay_attention(
        q[:, -rows:], k, v, log_decay, scale=None if scale is None else scale[:, -rows:], causal=case.causal,
        backend="reference",
    )
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "scale": scale}
    leaves = {name: x for name, x in given.items() if x is not None}
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs["grad_out"][-1:, -rows:, -1:].double())
    result = {f"d{name}": gradient.flatten() for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach().flatten()} | result


def relative_errors(case: Case, prepared: Prepared, expected: dict[str, Tensor]) -> dict[str, float]:
    """‖x − x64‖ / ‖x64‖ of out and of every gradient that the peer has, where the oracle has looked."""
    rows = oracle_rows(case)
    out = prepared.forward()
    grad_out = torch.zeros_like(prepared.grad_out)
    checked = in_layout(grad_out, prepared.layout)[-1:, -rows:]
    checked.copy_(in_layout(prepared.grad_out, prepared.layout)[-1:, -rows:])
    gradients = prepared.backward(out, grad_out)
    results = {"out": in_layout(out.detach(), prepared.layout)[-1, -rows:, -1]}
    for name, gradient in zip(prepared.wanted, gradients, strict=True):
        gradient = in_layout(gradient, prepared.layout)
        results[f"d{name}"] = gradient[-1:] if gradient.ndim == 1 else gradient[-1, :, -1]
    return {name: _relative(x, expected[name]) for name, x in results.items()}


def _relative(x: Tensor, expected: Tensor) -> float:
    return float((x.double().flatten() - expected).norm() / expected.norm())


def oracles(case: Case, inputs: dict[str, Tensor]) -> Callable[..., dict[str, Tensor]]:
    """The oracle with and without decay, and scales of rows, each computed when it is first asked for."""
    return functools.cache(lambda decay, row_scales=True: oracle(case, inputs, decay, row_scales))
