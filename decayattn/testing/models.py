"""Comparison of every parameter's gradient in a whole model with its error budget."""

import contextlib
import copy
import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from decayattn import reference
from decayattn.nn.attention import DecayFlashAttention
from decayattn.problem import AttentionProblem, BackendName, Inputs, accumulator_dtype, without_autocast
from decayattn.testing.attention import DRAWS, MORE_DRAWS, may_be_chance
from decayattn.testing.call import NORMS, Arguments, Call, Row, Verdict, bounds_of, ratio

# Two float64 evaluations of one loss may differ by this fraction of a parameter's gradient; if that cancels, by this
# fraction of all gradients together
SAME, ROUNDING = 1e-6, 1e-9
# A gradient is 0 if two such evaluations differ by this fraction of it
ZERO = 1e-3
# float32 may differ from float64 by this fraction of all gradients; other random numbers differ by more
SAME_RANDOM_NUMBERS = 1e-2


@dataclass(frozen=True)
class GradientRow(Row):
    """Error and budget of one parameter's gradient, in the norm with the largest ratio."""

    parameter: str
    is_decay: bool
    precision: str
    reference_norm: float
    relative_budget: float

    @property
    def labels(self) -> dict[str, str]:
        return {"parameter": self.parameter, "decay": "λ" if self.is_decay else ""}


@torch.inference_mode(False)
@torch.enable_grad()
def compare_model_gradients(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    backend: BackendName = "triton",
    autocast: torch.dtype | None = None,
    tested: Mapping[str, Tensor] | None = None,
) -> list[GradientRow]:
    """Compare the gradient of every parameter, computed through a kernel backend, with the error budget.

    The oracle is a float64 copy of the model with backend "reference". Eager is a copy in the model's own precision,
    with an attention that rounds as a kernel must. It is evaluated with all `DRAWS`, and with `MORE_DRAWS` for a small
    excess. Above 16 bits, every gradient of its attention is off by eps·A with random signs, because sums that cancel
    round differently in every schedule.

    In float32 an error of 1e-5 of a gradient shows. In bfloat16 rounding alone moves gradients by about 0.5 %, and
    budgets are 1 to 3 %. Run both: float32 for the formulas, and the training precision for its own kernels. Above 16
    bits, entries that are 0 in the oracle and in eager must be 0: for example embeddings of padding.

    Model, batch and the random number generators of torch, numpy and Python stay unchanged. Hooks on parameters are not
    copied. Compiled parts run eagerly.

    Args:
        model: contains DecayFlashAttention layers; not wrapped.
        loss: called as loss(model, batch); returns a scalar. It must be deterministic: two float64 evaluations with
            backend "reference" are compared first.
        batch: tensors in any nesting of tuples, lists and dicts. Floating ones are cast to the precision, others stay.
        backend: the tested backend of every DecayFlashAttention layer.
        autocast: dtype of autocast for the tested model (and eager); None for the parameters' own dtypes.
        tested: gradients to compare with the budget instead of the backend's, by the parameters' names; for example
            those of the same loss on several devices.

    Returns:
        One row per parameter that requires a gradient, in the model's order.

    Raises:
        ValueError: if the loss is not deterministic, or its gradient is 0 for every parameter.
    """
    if not _attention_layers(model):
        raise ValueError("model: expected at least one DecayFlashAttention layer, found none")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(model.parameters()).device
    floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
    own = min(floating, key=lambda dtype: torch.finfo(dtype).bits)

    def gradients(
        fresh: nn.Module, backend: BackendName, dtype: torch.dtype, autocast: torch.dtype | None, factor: float = 1.0
    ) -> dict[str, Tensor]:
        for layer in _attention_layers(fresh):
            layer.backend = backend
        leaves = [p for p in fresh.parameters() if p.requires_grad]
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            value = loss(fresh, _mapped(batch, lambda x: x.to(dtype if x.is_floating_point() else x.dtype, copy=True)))
        if not isinstance(value, Tensor) or value.numel() != 1:
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"loss: expected a scalar tensor, got {given}; reduce it")
        if not value.requires_grad:
            return {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        # activation checkpointing runs the layers again in the backward
        with torch.autocast(device.type, enabled=False):
            values = torch.autograd.grad(value * factor, leaves, materialize_grads=True)
        return {name: x.double() / factor for name, x in zip(parameters, values, strict=True)}

    if tested is not None:
        for name, p in parameters.items():
            given = tuple(tested[name].shape) if name in tested else None
            if given != tuple(p.shape):
                raise ValueError(f"tested: expected the gradient of {name}, {tuple(p.shape)}, got {given}")
    with _random_numbers(device) as states, torch.compiler.set_stance("force_eager"):
        oracle, noise = _deterministic(model, gradients, states)
        if tested is None:
            tested = gradients(copy.deepcopy(model), backend, own, autocast)
        decays = [layer.decay for layer in _attention_layers(model) if layer.decay is not None]
        of_decays = {parameter for decay in decays for parameter in decay.parameters()}
        dtype = own if autocast is None else autocast
        eager: list[dict[str, Tensor]] = []
        rows: list[GradientRow] = []
        for factors in (DRAWS, MORE_DRAWS):
            for factor in factors:
                rounded = functools.partial(_RoundedAttention.call, factor=factor)
                with mock.patch.object(reference, "attention", rounded):
                    eager.append(gradients(copy.deepcopy(model), "reference", own, autocast, factor))
            rows = [
                _gradient_row(
                    name, p in of_decays, dtype, p.dtype, tested[name].detach().double(), oracle[name],
                    [x[name] for x in eager], noise[name],
                )
                for name, p in parameters.items()
            ]
            if not may_be_chance(rows):
                break
    return rows


def _deterministic(
    model: nn.Module, gradients: Callable[..., dict[str, Tensor]], states: Callable[[], tuple]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients in float64, and the norms of the differences between two evaluations; raise if they are random or 0."""

    def evaluate(dtype: torch.dtype = torch.float64, factor: float = 1.0) -> dict[str, Tensor]:
        return gradients(copy.deepcopy(model).to(dtype), "reference", dtype, None, factor)

    first = states()
    oracle = evaluate()
    second = states()
    again = evaluate(factor=DRAWS[5])  # other roundings
    total = math.hypot(*(float(x.norm()) for x in oracle.values()))
    if total == 0:
        raise ValueError("loss: expected one that depends on the model passed to it, got only gradients of 0")
    if states() != second:
        raise ValueError(
            "loss: expected a deterministic one, got one that draws random numbers; call model.eval(), set dropout to "
            "0, or seed the random numbers inside the loss"
        )
    noise = {name: float((x - again[name]).norm()) for name, x in oracle.items()}
    if any(noise[name] > max(SAME * float(x.norm()), ROUNDING * total) for name, x in oracle.items()):
        raise ValueError(
            "loss: expected a deterministic one, got other gradients in a second evaluation; it must not depend on a "
            "state that it changes, nor on random numbers"
        )
    if second != first:  # seeded inside the loss
        off = math.hypot(*(float((x - oracle[name]).norm()) for name, x in evaluate(torch.float32).items()))
        if off > SAME_RANDOM_NUMBERS * total:
            raise ValueError(
                "loss: expected the same random numbers in float32 and float64, got gradients that differ by "
                f"{off / total:.1%}; draw them in one dtype, or before the loss"
            )
    return oracle, noise


def _gradient_row(
    name: str, is_decay: bool, precision: torch.dtype, dtype: torch.dtype, x: Tensor, x64: Tensor,
    eager: Sequence[Tensor], noise: float,
) -> GradientRow:
    def measure(t: Tensor, order: float = math.inf) -> float:
        return float(torch.linalg.vector_norm(t, order)) if t.numel() else 0.0

    found, blind = [], True  # (norm, error, budget, size)
    for norm, order in NORMS.items():
        size = measure(x64, order)
        budget = 2 * max(measure(draw - x64, order) for draw in eager) + torch.finfo(dtype).eps * size
        found.append((norm, measure(x - x64, order), budget, size))
        # zeros would pass; they are right where the oracle is 0 up to its rounding
        blind &= budget >= size > noise / ZERO
    if precision.itemsize > 2:  # in 16 bits, a unit may be inactive in all evaluations by chance
        nothing = functools.reduce(torch.logical_and, (draw == 0 for draw in eager), x64 == 0)
        found.append(("zeros", measure(x.where(nothing, 0.0)), 0.0, 0.0))
    wrong = any(not error <= budget for _, error, budget, _ in found)  # True for a NaN
    norm, error, budget, size = max(found, key=lambda row: (not row[1] <= row[2], ratio(row[1], row[2])))
    verdict: Verdict = "wrong" if wrong else "cannot tell" if blind else "ok"
    return GradientRow(
        name, is_decay, str(precision).removeprefix("torch."), size, ratio(budget, size), error=error, budget=budget,
        relative_error=ratio(error, size), norm=norm, verdict=verdict,
    )


@contextlib.contextmanager
def _random_numbers(device: torch.device) -> Iterator[Callable[[], tuple]]:
    """Restore the shared random number generators at the end; yield a function that returns their states."""
    numpy = sys.modules.get("numpy")

    def states() -> tuple:
        on_gpu = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
        return random.getstate(), numpy and str(numpy.random.get_state()), torch.get_rng_state().tolist(), on_gpu

    with contextlib.ExitStack() as restored:
        restored.callback(random.setstate, random.getstate())
        if numpy is not None:
            restored.callback(numpy.random.set_state, numpy.random.get_state())
        restored.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        yield states


def _attention_layers(model: nn.Module) -> list[DecayFlashAttention]:
    return [module for module in model.modules() if isinstance(module, DecayFlashAttention)]


def _mapped(nested: Any, function: Callable[[Tensor], Any]) -> Any:
    """The nested tuples, lists and dicts with function(tensor) for every tensor."""
    if isinstance(nested, Tensor):
        return function(nested)
    if isinstance(nested, dict):
        return {key: _mapped(value, function) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        values = [_mapped(value, function) for value in nested]
        return type(nested)(*values) if hasattr(nested, "_fields") else type(nested)(values)
    return nested


class _RoundedAttention(torch.autograd.Function):
    """`explicit_attention` over a whole call: reference.attention, rounded as a kernel must round."""

    @staticmethod
    def call(problem: AttentionProblem, inputs: Inputs, *, factor: float) -> tuple[Tensor, Tensor]:
        all_bounds = bounds_of(problem, None if inputs.bounds is None else inputs.bounds.tolist())
        pairs = tuple((own, head) for own in all_bounds for head in range(problem.num_heads))
        q, v = inputs.q, inputs.v
        leaves = Arguments(q, inputs.k, v, inputs.log_decay, inputs.any_scale, inputs.bias, inputs.sink)
        grad_out = q.new_zeros(*q.shape[:3], v.shape[3])
        grad_lse = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator_dtype(problem.dtype))
        call = Call(leaves.detach(), grad_out, grad_lse, all_bounds, pairs, problem)
        return _RoundedAttention.apply(call, factor, *leaves)

    @staticmethod
    def forward(ctx, call, factor, *inputs):
        ctx.call, ctx.factor = call, factor
        with without_autocast(call.problem.device):
            results = call.eager(factor=factor)
        return results["out"], results["lse"]

    @staticmethod
    @torch.no_grad()
    def backward(ctx, grad_out, grad_lse):
        call = dataclasses.replace(ctx.call, grad_out=grad_out, grad_lse=grad_lse)
        with without_autocast(call.problem.device):
            results = call.eager(factor=ctx.factor)  # the loss contains the factor, too
            if call.problem.dtype.itemsize > 2:  # 16-bit rounding is far larger
                generator = torch.Generator().manual_seed(round(16 * ctx.factor))
                for name, size in call.sizes().items():
                    if name.startswith("d") and name in results:
                        sign = torch.randint(0, 2, size.shape, generator=generator).to(size) * 2 - 1
                        error = torch.finfo(accumulator_dtype(call.problem.dtype)).eps * sign * size
                        results[name] = results[name] + error.to(results[name].dtype)
        return None, None, *(results.get(f"d{name}") for name in Arguments._fields)
