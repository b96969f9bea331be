"""Comparison of decay_attention and decay_attention_varlen with their error budgets."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decayattn import normalize
from decayattn.problem import AttentionProblem, BackendName, accumulator_dtype, without_autocast
from decayattn.testing.call import Arguments, Call, Comparison, Row, bounds_of, format_table

# Factors of the eager evaluations: they multiply the output gradients (or the loss), the scores and P before its
# rounding, and are divided out at the end. Every factor also adds in another order (see explicit_attention). A normal
# error of one number exceeds twice another one in 3 of 10 cases, and twice the largest of 16 in 1 of 1000.
DRAWS = tuple(2.0 ** (draw / 16) for draw in range(16))  # 1 first; the others have long mantissas: all is rounded
# For a result that exceeds its budget from DRAWS by less than a factor of CHANCE; a larger excess is not due to chance
MORE_DRAWS = tuple(2.0 ** (draw / 64) for draw in range(64) if draw % 4)
CHANCE = 2.0
# seed of the default output gradients. Callers draw q after manual_seed(0): with that seed here, grad_out would equal q
GRADIENT_SEED = 0x0D0


class Budget:
    """Budget of one call's results, from as many eager evaluations as needed."""

    def __init__(self, call: Call, x64: dict[str, Tensor]) -> None:
        """x64: the oracle of all judged tensors."""
        self.call, self.x64, self.sizes = call, x64, call.sizes()
        self.eager_error = {name: call.distance(name, x, x) for name, x in x64.items()}

    def widen(self, factors: Sequence[float]) -> None:
        """Add the evaluations with these factors (`DRAWS`), except results that overflow with them."""
        for factor in factors:
            self.include(self.call.draw(factor), always=factor == 1)

    def include(self, drawn: dict[str, Tensor], always: bool = True) -> None:
        """Add the results of one more eager evaluation (`Call.draw`): always, or only those with finite errors.

        Eager attention may overflow, and counts unchanged. A factor alone may overflow float16 in one tensor or head,
        which says nothing about the others.
        """
        for name, x in self.x64.items():
            error = self.call.distance(name, drawn[name], x)
            if not always:
                error = torch.where(error.isfinite(), error, 0.0)
            self.eager_error[name] = torch.maximum(self.eager_error[name], error)

    def compare(self, tested: dict[str, Tensor]) -> list[Comparison]:
        return [
            self.call.compare(name, x, self.x64[name], self.eager_error[name], self.sizes[name])
            for name, x in tested.items()
        ]

    def judge(self, tested: dict[str, Tensor]) -> list[Comparison]:
        """Compare the tensors with a budget that grows as needed: the first draw, all DRAWS, then MORE_DRAWS."""
        self.widen(DRAWS[:1])
        found = self.compare(tested)
        if any(row.verdict == "wrong" for row in found):
            self.widen(DRAWS[1:])
            found = self.compare(tested)
        if may_be_chance(found):
            self.widen(MORE_DRAWS)
            found = self.compare(tested)
        return found


def may_be_chance(rows: Sequence[Row]) -> bool:
    """True if a result exceeds its budget, and none by so much that more roundings cannot grant it."""
    failed = [row for row in rows if row.verdict == "wrong"]
    return bool(failed) and all(row.error <= CHANCE * row.budget for row in failed)  # False for a NaN


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    attend: Callable | None = None,
    backend: BackendName = "auto",
    **options: Any,
) -> list[Comparison]:
    """Run decay_attention forward and backward on these inputs, and compare every result with the error budget.

    Autocast is off meanwhile, and gradients are on. `decayattn.testing` lists the smallest errors that each dtype
    shows.

    Args:
        q, k, v, log_decay, options: as in decay_attention; strided views stay strided. Rows and tokens outside of the
            sequences are judged separately: for any contents, their results must be exactly those promised.
        grad_out, grad_lse: gradients of out (B, T_q, H, D_v) and lse (B, H, T_q); expanded ones stay expanded. Default:
            normal random numbers, the same in every call.
        heads: (batch entry, query head) pairs to judge, for problems too big to judge whole. The output gradients of
            the other pairs are set to 0. Tensors that heads share (k, v, a constant decay) then have exactly the
            gradient of the judged heads, and any gradient in an unjudged head is an error.
        attend: called instead of decay_attention, with the same arguments.
        backend: the tested backend.

    Returns:
        One Comparison per tensor: out, lse, dq, dk, dv, and, for arguments that are floating tensors, dlog_decay,
        dscale, dbias and dsink.
    """
    problem, inputs = normalize.dense(q, k, v, log_decay, **options)
    scale, bias, sink = (options.pop(name, None) for name in ("scale", "bias", "sink"))
    arguments = Arguments(q, k, v, log_decay, scale, bias, sink)
    return _judge(problem, arguments, inputs.bounds, grad_out, grad_lse, heads, backend, options | {"attend": attend})


def verify_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    attend: Callable | None = None,
    backend: BackendName = "auto",
    **options: Any,
) -> list[Comparison]:
    """verify_attention of decay_attention_varlen; pairs of `heads` and a Comparison's head are (sequence, query head).

    Tokens outside of the sequences are judged as sequence −1. max_seqlen_q and max_seqlen_k are by default the longest
    of the sequences. grad_out and grad_lse are those of out (total_q, H, D_v) and lse (H, total_q).
    """
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    for axis in ("q", "k"):
        if options.get(f"max_seqlen_{axis}") is None:
            options[f"max_seqlen_{axis}"] = max([0, *options[f"cu_seqlens_{axis}"].diff().tolist()])
    problem, inputs = normalize.packed(q, k, v, log_decay, **options)
    if isinstance(log_decay, Tensor) and log_decay.ndim > 1:
        log_decay = log_decay[None]
    arguments = Arguments(*inputs[:3], log_decay, options.pop("scale", None), None, options.pop("sink", None))
    grad_out, grad_lse = (x if x is None else x[None] for x in (grad_out, grad_lse))
    return _judge(problem, arguments, inputs.bounds, grad_out, grad_lse, heads, backend, options | {"attend": attend})


@torch.inference_mode(False)
@torch.enable_grad()
def _judge(
    problem: AttentionProblem, inputs: Arguments, sequences: Tensor | None, grad_out: Tensor | None,
    grad_lse: Tensor | None, heads: Sequence[tuple[int, int]] | None, backend: BackendName, options: dict[str, Any],
) -> list[Comparison]:
    batch, rows, num_heads, device = problem.batch, problem.query_length, problem.num_heads, problem.device
    like: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(GRADIENT_SEED), "device": device}
    if grad_out is None:
        grad_out = torch.randn(batch, rows, num_heads, problem.value_dim, dtype=problem.dtype, **like)
    if grad_lse is None:
        grad_lse = torch.randn(batch, num_heads, rows, dtype=accumulator_dtype(problem.dtype), **like)
    inputs, grad_out, grad_lse = inputs.detach(), grad_out.detach(), grad_lse.detach()
    all_bounds = bounds_of(problem, None if sequences is None else sequences.tolist())
    pairs = [(bounds, head) for bounds in all_bounds for head in range(num_heads)]
    if heads is not None:
        if unknown := set(heads) - {(bounds.number, head) for bounds, head in pairs}:
            expected = f"(batch entry or sequence, query head) pairs of q {tuple(inputs.q.shape)}"
            raise ValueError(f"heads: expected {expected}, got {sorted(unknown)}")
        pairs = [(bounds, head) for bounds, head in pairs if (bounds.number, head) in set(heads)]
        judged = torch.zeros(batch, num_heads, rows, dtype=torch.bool, device=device)
        for bounds, head in pairs:
            judged[bounds.entry, head, bounds.rows] = True
        judged_out = judged.transpose(1, 2)[..., None]
        grad_out, grad_lse = grad_out.where(judged_out, 0.0), grad_lse.where(judged, 0.0)
    call = Call(inputs, grad_out, grad_lse, all_bounds, tuple(pairs), problem)
    with without_autocast(device):
        tested = call.run(backend, options)
        if heads is not None:  # the oracle has no outputs of the other pairs
            tested |= {"out": tested["out"].where(judged_out, 0.0), "lse": tested["lse"].where(judged, 0.0)}
        return Budget(call, call.oracle()).judge(tested)


def assert_within_budget(comparisons: Sequence[Comparison]) -> None:
    """Raise an AssertionError with the complete table unless every verdict is "ok"."""
    if not all(c.passed for c in comparisons):
        raise AssertionError("results outside the error budget, or below it\n" + format_table(comparisons))
