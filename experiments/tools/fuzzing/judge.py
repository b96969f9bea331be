"""One call on every backend that takes it, held to the error budget of decayattn.testing around this package's oracle.

Eager and A are explicit_attention's (decayattn.testing), which has a float64 prefix of its own. Every reset counts as 0
there, so nothing large is in that prefix, and it can hide no error of a kernel.
"""

import itertools
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from shared.poison import poisoned_allocations
from torch import Tensor

from decayattn import decay_attention, decay_attention_varlen
from decayattn.problem import AttentionProblem, Inputs, accumulator_dtype
from decayattn.testing.attention import DRAWS, MORE_DRAWS, Budget
from decayattn.testing.call import Arguments, Call, Comparison, bounds_of, ratio
from tools.fuzzing import oracle
from tools.fuzzing.tensors import Case

BACKENDS = ("triton", "hopper", "auto", "reference")
# More roundings are evaluated only for a call that comes as close to its budget with one of them.
ENOUGH = 0.5


@dataclass
class Verdict:
    """Outcome of a call: by backend and tensor its error over its budget; failures as (what failed, how)."""

    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    cannot_tell: list[str] = field(default_factory=list)  # tensors that eager cannot hold, or below their budget


def judge(case: Case, backends: list[str]) -> Verdict:
    """Run the call and compare."""
    verdict, results = Verdict(), {}
    for backend in backends:
        try:
            results[backend] = run(case, backend)
        except Exception as error:
            if backend == "hopper" and str(error).startswith("backend: 'hopper' cannot take this problem"):
                verdict.refused[backend] = str(error).partition("problem: ")[2]
                continue
            verdict.failures.append((f"{backend} {type(error).__name__}", described(error)))
            if case.tensors["q"].is_cuda:
                torch.cuda.synchronize()  # raises where the context is lost: the process must be another one then
    if results:
        compare(case, results, verdict)
    return verdict


def described(error: Exception) -> str:
    """Place and message of an exception, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {text}"


def run(case: Case, backend: str, attend: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """The results and gradients of one backend, or of `attend`; what it allocates holds NaN at first."""
    inputs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in case.tensors.items()}
    needs_grad = case.draw.family.needs_grad
    leaves = {
        name: x.requires_grad_() for name, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point() and (needs_grad is None or name in needs_grad)
    }
    attend = attend or (decay_attention_varlen if case.packed else decay_attention)
    if case.packed:
        del inputs["bias"]
    with poisoned_allocations():
        returned = attend(**inputs, **case.options, backend=backend)
        results = dict(zip(("out", "lse"), returned if case.options["return_lse"] else (returned,), strict=False))
        # of v alone lse has no gradient
        given = [(x, gradient) for x, gradient in zip(results.values(), (case.grad_out, case.grad_lse), strict=False)
                 if x.requires_grad]
        if given:
            outputs, gradients = zip(*given, strict=True)
            grads = torch.autograd.grad(outputs, list(leaves.values()), gradients, materialize_grads=True)
            results |= {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
        if case.grad_out.is_cuda:
            torch.cuda.synchronize()  # a fault belongs to the call that made it
    return {name: x.detach() for name, x in results.items()}


def call_of(case: Case) -> Call:
    """The case as decayattn.testing evaluates it: packed sequences in one batch entry, windows within the lengths."""

    def batched(x: Tensor | None, packed: bool = case.packed) -> Tensor | None:
        return x[None] if packed and isinstance(x, Tensor) else x

    tensors = case.tensors
    q, k, v = (batched(tensors[name]) for name in "qkv")
    log_decay = tensors["log_decay"]
    log_decay = batched(log_decay) if case.draw.family.decay == "token" else log_decay
    inputs = Arguments(q, k, v, log_decay, tensors["scale"], tensors["bias"], tensors["sink"])
    no_lse = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator_dtype(q.dtype))
    grad_lse = no_lse if case.grad_lse is None else batched(case.grad_lse)
    furthest = q.shape[1] + k.shape[1]
    left, right = case.draw.window or (-1, -1)
    window = min(left, furthest), -1 if case.options["causal"] else min(right, furthest)
    shaped = log_decay
    if shaped is not None and not (isinstance(shaped, Tensor) and shaped.ndim):
        shaped = q.new_zeros(q.shape[2])  # its shape counts
    bounds = None if case.sequences is None else torch.tensor(case.sequences, dtype=torch.int32).reshape(-1, 4)
    longest = (case.options["max_seqlen_q"], case.options["max_seqlen_k"]) if case.packed else None
    row_scale = inputs.scale if isinstance(inputs.scale, Tensor) else None
    shapes = Inputs(q, k, v, shaped, row_scale, bounds, inputs.bias)
    problem = AttentionProblem.of(shapes, case.options["causal"], window, longest)
    found = bounds_of(problem, case.sequences)
    pairs = tuple(itertools.product(found, range(problem.num_heads)))
    return Call(inputs, batched(case.grad_out), grad_lse, found, pairs, problem)


def compare(case: Case, results: dict[str, dict[str, Tensor]], verdict: Verdict) -> None:
    """Add every backend's errors over their budgets, and those that exceed them."""
    call = call_of(case)
    for tensors in results.values():
        if case.packed:
            batched = [name for name in ("out", "lse", "dq", "dk", "dv") if name in tensors]
            batched += ["dlog_decay"] * ("dlog_decay" in tensors and case.draw.family.decay == "token")
            tensors |= {name: tensors[name][None] for name in batched}
    x64 = call.gather(oracle.attention, torch.float64)
    names = [name for name in x64 if any(name in tensors for tensors in results.values())]
    first = call.draw(DRAWS[0])
    for name in list(names):
        held, exact = first[name], x64[name]
        if not torch.equal(held.isneginf() & (name == "lse"), exact.isneginf()):
            # an infinite eager error would let anything pass
            verdict.failures.append((f"eager {name}", "−inf stands elsewhere than in the oracle"))
            names.remove(name)
        elif not bool((held.isfinite() | exact.isneginf()).all()):
            verdict.cannot_tell.append(name)
            names.remove(name)
    budget = Budget(call, {name: x64[name] for name in names})
    budget.include(first)

    def ratios() -> dict[str, dict[str, tuple[float, Comparison]]]:
        found: dict[str, dict[str, tuple[float, Comparison]]] = {backend: {} for backend in results}
        for backend, tensors in results.items():
            for c in budget.compare({name: tensors[name] for name in names if name in tensors}):
                own = ratio(c.error, c.budget)
                found[backend][c.name] = own if c.verdict != "wrong" or own > 1 else math.inf, c
        return found

    def worst(found: dict[str, dict[str, tuple[float, Comparison]]]) -> float:
        return max((own for tensors in found.values() for own, _ in tensors.values()), default=0.0)

    found = ratios()
    for factors, least in ((DRAWS[1:], ENOUGH), (MORE_DRAWS, 1.0)):
        if worst(found) > least:
            budget.widen(factors)
            found = ratios()
    if worst(found) > 1 and case.tolerance:
        allowed = call.gather(lambda **heads: oracle.lost(**heads, tolerance=case.tolerance), torch.float64)
        for name, error in budget.eager_error.items():
            # the budget has twice the eager error in it
            budget.eager_error[name] = error + call.distance(name, torch.zeros_like(allowed[name]), allowed[name]) / 2
        found = ratios()
    for backend, tensors in found.items():
        verdict.ratios[backend] = {name: own for name, (own, _) in tensors.items()}
        for name, (own, c) in tensors.items():
            if c.verdict == "cannot tell" and name not in verdict.cannot_tell:
                verdict.cannot_tell.append(name)
            if not own <= 1:
                text = f"{own:.3g} × its budget {c.budget:.3g} (head {c.head}, {c.norm})"
                verdict.failures.append((f"{backend} {name}", text))
