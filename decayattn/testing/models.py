"""Every parameter's gradient of a whole model against its error budget."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn

from decayattn import reference
from decayattn.problem import AttentionProblem, BackendName, Inputs
from decayattn.testing.attention import DRAWS, MORE_DRAWS, may_be_chance
from decayattn.testing.call import INPUTS, Arguments, Call, bounds_of
from decayattn.testing.table import ratio

if TYPE_CHECKING:
    from decayattn.nn.attention import DecayFlashAttention


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter of a model against its budget, in the norm that comes closest to it."""

    HEADINGS: ClassVar[tuple[str, ...]] = ("parameter", "decay")

    parameter: str
    is_decay: bool
    precision: str
    error: float
    budget: float
    reference_norm: float
    relative_error: float
    relative_budget: float
    norm: str  # "frobenius" or "maximum"
    passed: bool

    @property
    def labels(self) -> tuple[str, ...]:
        return self.parameter, "λ" if self.is_decay else ""


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
    """Hold the gradient of every parameter, computed through a kernel backend, against the error budget.

    The oracle is a float64 copy of the model with backend "reference"; eager is a copy in the model's own precision
    with an attention that rounds where a kernel has to (`explicit_attention`), drawn several times (`DRAWS`; where a
    gradient exceeds its budget by little, `MORE_DRAWS` too) because a parameter may be a single number and because all
    layers after an attention see its rounding.

    What it can see depends on the precision. In float32 an error of 1e-5 of a gradient shows. In bfloat16 rounding
    alone moves gradients by about 0.5 %, budgets are 1 to 3 %, and no comparison tells an error below that from
    rounding: run both, float32 for the formulas and the training precision for what is special to it. A
    enters through eager, too: above 16 bits, every gradient of its attention is off by eps·A with random signs, the
    share of A that the budget of one call grants it, because sums that cancel round differently in every schedule.

    Args:
        model: contains DecayFlashAttention layers; neither compiled nor wrapped. Its gradients and backends are left as
            they were. Its loss must be deterministic: no dropout.
        loss: called as loss(model, batch); a scalar.
        batch: tensors in any nesting of tuples, lists and dicts; floating ones follow the precision, others stay.
        backend: the tested backend of every DecayFlashAttention layer.
        autocast: the tested model (and eager) run under autocast to this dtype; None for the parameters' own dtypes.
        tested: gradients to hold against the budget instead of the backend's, by the parameters' names: those of the
            same loss on several devices, for example.

    Returns:
        One row per parameter that requires a gradient, in the model's order.
    """
    layers = _attention_layers(model)
    if not layers:
        raise ValueError("model: expected at least one DecayFlashAttention layer, found none")
    device = next(model.parameters()).device
    floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
    own = min(floating, key=lambda dtype: torch.finfo(dtype).bits)

    def gradients(
        model: nn.Module, backend: BackendName, dtype: torch.dtype, autocast: torch.dtype | None, factor: float = 1.0
    ) -> dict[str, Tensor]:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with _backend_of_layers(model, backend):
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                value = loss(model, _cast(batch, dtype))
            # the backward may run the layers once more: activation checkpointing
            with torch.autocast(device.type, enabled=False):
                values = torch.autograd.grad(value * factor, list(parameters.values()), materialize_grads=True)
        return {name: x.double() / factor for name, x in zip(parameters, values, strict=True)}

    if tested is None:
        tested = gradients(model, backend, own, autocast)
    else:
        tested = {name: tested[name].detach().double() for name, p in model.named_parameters() if p.requires_grad}
    oracle = gradients(copy.deepcopy(model).double(), "reference", torch.float64, None)
    decay = _decay_parameters(model)
    precision = str(own if autocast is None else autocast).removeprefix("torch.")
    eager: list[dict[str, Tensor]] = []
    rows: list[GradientRow] = []
    for factors in (DRAWS, MORE_DRAWS):
        for factor in factors:
            with mock.patch.object(reference, "attention", functools.partial(_RoundedAttention.call, factor=factor)):
                eager.append(gradients(model, "reference", own, autocast, factor))
        rows = [
            _gradient_row(name, name in decay, precision, p.dtype, tested[name], oracle[name], [x[name] for x in eager])
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        if not may_be_chance(rows):
            break
    return rows


def _gradient_row(
    name: str, is_decay: bool, precision: str, dtype: torch.dtype, x: Tensor, x64: Tensor, eager: Sequence[Tensor]
) -> GradientRow:
    rows = []
    for norm, order in (("frobenius", 2), ("maximum", math.inf)):

        def measure(t: Tensor, order: float = order) -> float:
            return float(torch.linalg.vector_norm(t, order)) if t.numel() else 0.0

        error, size = measure(x - x64), measure(x64)
        budget = 2 * max(measure(draw - x64) for draw in eager) + torch.finfo(dtype).eps * size
        relative = ratio(error, size), ratio(budget, size)
        rows.append(GradientRow(name, is_decay, precision, error, budget, size, *relative, norm, error <= budget))
    # a NaN compares as the worst
    return max(rows, key=lambda row: (not row.passed, ratio(row.error, row.budget)))


def _attention_layers(model: nn.Module) -> "list[DecayFlashAttention]":
    from decayattn.nn.attention import DecayFlashAttention  # the layer may use this module

    return [module for module in model.modules() if isinstance(module, DecayFlashAttention)]


def _decay_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of every layer's decay module, the user's own ones included."""
    decays = [layer.decay for layer in _attention_layers(model) if layer.decay is not None]
    owned = {parameter for decay in decays for parameter in decay.parameters()}
    return {name for name, p in model.named_parameters() if p in owned}


@contextlib.contextmanager
def _backend_of_layers(model: nn.Module, backend: BackendName) -> Iterator[None]:
    layers = _attention_layers(model)
    before = [layer.backend for layer in layers]
    try:
        for layer in layers:
            layer.backend = backend
        yield
    finally:
        for layer, name in zip(layers, before, strict=True):
            layer.backend = name


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors in dtype."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [_cast(value, dtype) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


class _RoundedAttention(torch.autograd.Function):
    """`explicit_attention` over a whole call: reference.attention, rounded as a kernel has to round."""

    @staticmethod
    def call(problem: AttentionProblem, inputs: Inputs, *, factor: float) -> tuple[Tensor, Tensor]:
        return _RoundedAttention.apply(
            problem, factor, inputs.bounds, inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.any_scale,
            inputs.bias, inputs.sink,
        )

    @staticmethod
    def forward(ctx, problem, factor, bounds, *inputs):
        ctx.problem, ctx.factor, ctx.bounds, ctx.inputs = problem, factor, bounds, inputs
        q, v = inputs[0], inputs[2]
        grad_out = q.new_zeros(*q.shape[:3], v.shape[3])
        grad_lse = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=problem.accumulator_dtype)
        results = _RoundedAttention.evaluate(problem, factor, bounds, inputs, grad_out, grad_lse)
        return results["out"], results["lse"]

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        with torch.no_grad():
            # the loss carries the factor, too
            results = _RoundedAttention.evaluate(
                ctx.problem, ctx.factor, ctx.bounds, ctx.inputs, grad_out, grad_lse
            )
            if ctx.problem.dtype.itemsize > 2:  # 16-bit rounding is far larger
                sizes = _RoundedAttention.call_of(ctx.problem, ctx.bounds, ctx.inputs, grad_out, grad_lse).sizes()
                generator = torch.Generator().manual_seed(round(16 * ctx.factor))
                for name, size in sizes.items():
                    if name.startswith("d") and name in results:
                        sign = torch.randint(0, 2, size.shape, generator=generator).to(size) * 2 - 1
                        error = torch.finfo(ctx.problem.accumulator_dtype).eps * sign * size
                        results[name] = results[name] + error.to(results[name].dtype)
        return None, None, None, *(results.get(f"d{name}") for name in INPUTS)

    @staticmethod
    def evaluate(problem, factor, bounds, inputs, grad_out, grad_lse) -> dict[str, Tensor]:
        with torch.autocast(problem.device.type, enabled=False):
            return _RoundedAttention.call_of(problem, bounds, inputs, grad_out, grad_lse).eager(factor=factor)

    @staticmethod
    def call_of(problem, bounds, inputs, grad_out, grad_lse) -> Call:
        all_bounds = bounds_of(problem, None if bounds is None else bounds.tolist())
        pairs = tuple((own, head) for own in all_bounds for head in range(problem.num_heads))
        return Call(Arguments(*inputs).detach(), grad_out, grad_lse, all_bounds, pairs, problem)
