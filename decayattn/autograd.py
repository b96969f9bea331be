"""The only autograd bridge of the kernels: two opaque operators, decayattn::forward and decayattn::backward.

Operators, because torch.compile, fake tensors and selective checkpointing then see one node with known shapes, and the
launches behind it stay ordinary Python. Where nobody looks at operators, what is behind them is called as it is:
passing through them takes a small call a sixth of the host's time.
"""

import contextlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from decayattn import compatibility
from decayattn.backends import registry
from decayattn.backends.runtime.outputs import with_sink
from decayattn.problem import AttentionProblem

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? row_scale, Tensor? places, Tensor? bias, "
    "Tensor? sink, float scale, bool causal, SymInt[] window, SymInt[]? longest, float skip_tolerance, str backend"
)
# what the forward leaves to the backward, besides its inputs and out. base is flat: a dimension of one block up to 128
# tokens, and more beyond, would make a traced graph be for one of both
_SAVED = (
    "Tensor row_references, Tensor local, Tensor base, Tensor last_reset, Tensor next_reset, Tensor first_block, "
    "Tensor sink_probability"
)
# so many inputs are tensors
_TENSORS = 8
_TAGS = (torch.Tag.pt2_compliant_tag,)
_PLAIN = {Tensor, torch.nn.Parameter}

torch.library.define(
    "decayattn::forward",
    f"({_INPUTS}, bool with_lse) -> (Tensor out, Tensor lse, {_SAVED})",
    tags=_TAGS,
)
torch.library.define(
    "decayattn::backward",
    f"(Tensor d_out, Tensor? d_lse, {_INPUTS}, Tensor out, {_SAVED}, bool decay_gradient, bool bias_gradient, "
    "bool sink_gradient) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor d_log_decay, Tensor d_row_scale, Tensor d_bias, Tensor d_sink)",
    tags=_TAGS,
)


def attention(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: Tensor | float,
    places: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    backend: str,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out and, with_lse, lse from a kernel backend, differentiable once."""
    tensors = [x for x in (q, k, v, log_decay, scale, bias, sink) if isinstance(x, Tensor)]
    if compatibility.has_tangent(tensors):
        # PyTorch would drop the tangent at the operator without a word
        raise RuntimeError("decay_attention: its kernels have no forward-mode derivative; use backend='reference'")
    row_scale, scale = (scale, 1.0) if problem.row_scale else (None, scale)
    longest = (problem.longest_query, problem.longest_key) if problem.layout == "packed" else None
    inputs = (
        q, k, v, log_decay, row_scale, places, bias, sink, scale, problem.causal, problem.window, longest,
        problem.skip_tolerance, backend, with_lse,
    )  # fmt: skip
    watched = _watched(x for x in (*tensors, places) if x is not None)
    out, lse, *_ = torch.ops.decayattn.forward.default(*inputs) if watched else _with_gradient(problem, inputs)
    return out, lse if with_lse else None


def _watched(tensors: Iterable[Tensor]) -> bool:
    """Whether somebody looks at the operators: a tracer, a dispatch mode, a transform of torch.func, or a subclass of
    Tensor."""
    return (
        torch.compiler.is_compiling()
        or compatibility.has_observers()
        or torch.jit.is_tracing()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _forward(
    q, k, v, log_decay, row_scale, places, bias, sink, scale, causal, window, longest, skip_tolerance, backend,
    with_lse, problem=None,
):  # fmt: skip
    operator = problem is None
    if operator:
        problem = AttentionProblem.of(q, v, log_decay, row_scale, causal, window, places, longest, bias, skip_tolerance)
    scale = scale if row_scale is None else row_scale
    launcher = registry.load(registry.resolve(problem, backend, q, k, v, scale))
    out, lse, row_references, prefix, first_block = launcher.forward(
        problem, q, k, v, log_decay, scale, places, bias, with_lse or sink is not None
    )
    sink_probability = None
    if sink is not None:
        out, lse, added = with_sink(out, lse, sink)
        # P of the keys is relative to it, and the kernels' backward has no other one
        row_references = row_references + added / math.log(2)
        sink_probability = torch.exp(sink.to(lse.dtype)[:, None] - lse)
    if operator:
        lse = lse if with_lse else _not_asked_for(row_references)
        prefix = prefix._replace(base=prefix.base.flatten())
        sink_probability = _not_asked_for(row_references) if sink is None else sink_probability
    return out, lse, row_references, *prefix, first_block, sink_probability


def _backward(
    d_out, d_lse, q, k, v, log_decay, row_scale, places, bias, sink, scale, causal, window, longest, skip_tolerance,
    backend, out, row_references, local, base, last_reset, next_reset, first_block, sink_probability, decay_gradient,
    bias_gradient, sink_gradient, problem=None,
):  # fmt: skip
    from decayattn.backends.planning.prefix import DecayPrefix  # imports Triton, so not before a kernel backend has run

    operator = problem is None
    if operator:
        problem = AttentionProblem.of(q, v, log_decay, row_scale, causal, window, places, longest, bias, skip_tolerance)
        heads = problem.batch, problem.num_heads
        base = base.view(*heads, base.numel() // max(1, math.prod(heads)))
    scale = scale if row_scale is None else row_scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    launcher = registry.load(registry.resolve(problem, backend, q, k, v, scale, deterministic))
    gradients = launcher.backward(
        problem, d_out, d_lse, q, k, v, log_decay, scale, places, bias, out, row_references,
        DecayPrefix(local, base, last_reset, next_reset), first_block, decay_gradient, bias_gradient,
    )  # fmt: skip
    d_sink = _sink_gradient(d_out, d_lse, out, sink, sink_probability) if sink_gradient else None
    gradients = *gradients, d_sink
    return tuple(_not_asked_for(row_references) if x is None else x for x in gradients) if operator else gradients


def _sink_gradient(d_out, d_lse, out, sink, sink_probability):
    """dsink_h = −Σ_i P_i,sink Δ_i: its value is 0, and so is its dP."""
    accumulator = sink_probability.dtype
    delta = torch.einsum("bihe,bihe->bhi", d_out.to(accumulator), out.to(accumulator))
    if d_lse is not None:
        delta = delta - d_lse
    return -(sink_probability * delta).sum((0, 2), dtype=torch.float64).to(sink.dtype)


def _not_asked_for(like):
    """An operator returns tensors only: one of size 0 stands for what was not asked for."""
    return like.new_empty(0)


torch.library.impl("decayattn::forward", "CompositeExplicitAutograd", _forward)
torch.library.impl("decayattn::backward", "CompositeExplicitAutograd", _backward)


@torch.library.register_fake("decayattn::forward")
def _forward_fake(
    q, k, v, log_decay, row_scale, places, bias, sink, scale, causal, window, longest, skip_tolerance, backend, with_lse
):  # fmt: skip
    from decayattn.backends.planning import prefix, skipping  # they import Triton

    problem = AttentionProblem.of(q, v, log_decay, row_scale, causal, window, places, longest, bias, skip_tolerance)
    rows = (problem.batch, problem.num_heads, problem.query_length)
    return (
        q.new_empty(problem.batch, problem.query_length, problem.num_heads, problem.value_dim),
        q.new_empty(rows if with_lse else 0, dtype=problem.accumulator_dtype),
        q.new_empty(rows, dtype=problem.accumulator_dtype),
        *prefix.allocate(problem, q, flat_base=True),
        skipping.allocate(problem, q),
        q.new_empty(0 if sink is None else rows, dtype=problem.accumulator_dtype),
    )


@torch.library.register_fake("decayattn::backward")
def _backward_fake(
    d_out, d_lse, q, k, v, log_decay, row_scale, places, bias, sink, scale, causal, window, longest, skip_tolerance,
    backend, out, row_references, local, base, last_reset, next_reset, first_block, sink_probability, decay_gradient,
    bias_gradient, sink_gradient,
):  # fmt: skip
    def contiguous(x):
        return x.new_empty(x.shape)

    return (
        contiguous(q), contiguous(k), contiguous(v),
        contiguous(log_decay) if decay_gradient else _not_asked_for(row_references),
        torch.empty_like(row_references).transpose(1, 2) if row_scale is not None else _not_asked_for(row_references),
        contiguous(bias) if bias_gradient else _not_asked_for(row_references),
        contiguous(sink) if sink_gradient else _not_asked_for(row_references),
    )  # fmt: skip


def _keep(ctx, tensors, modes, output, problem=None):
    """What a backward needs of a forward."""
    ctx.problem, (*ctx.modes, ctx.with_lse) = problem, modes
    ctx.set_materialize_grads(False)
    out, lse, *saved = output
    ctx.save_for_backward(*tensors, out, *saved)
    if problem is None:
        ctx.mark_non_differentiable(*saved, *(() if ctx.with_lse else (lse,)))


def _differentiate(ctx, d_out, d_lse, *_):
    q, k, v, log_decay, row_scale, places, bias, sink, out, *saved = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    # behind those of the tensors come those of the modes
    _, _, _, decay_gradient, _, _, bias_gradient, sink_gradient, *others = ctx.needs_input_grad
    inputs = (
        d_out, d_lse if ctx.with_lse else None, q, k, v, log_decay, row_scale, places, bias, sink, *ctx.modes, out,
        *saved, decay_gradient, bias_gradient, sink_gradient,
    )  # fmt: skip
    if torch.is_grad_enabled():
        # to be differentiated, which this operator refuses
        gradients = torch.ops.decayattn.backward.default(*inputs)
    elif ctx.problem is not None and not _watched((d_out,)):
        gradients = _backward(*inputs, ctx.problem)
    else:
        with (compatibility.below_autograd or contextlib.nullcontext)():
            gradients = torch.ops.decayattn.backward.default(*inputs)
    dq, dk, dv, d_log_decay, d_row_scale, d_bias, d_sink = gradients
    return (
        dq, dk, dv, d_log_decay if decay_gradient else None, d_row_scale if row_scale is not None else None, None,
        d_bias if bias_gradient else None, d_sink if sink_gradient else None, *(None for _ in others),
    )  # fmt: skip


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError(
        "decay_attention: its kernels have no second derivative; use backend='reference', which has them all"
    )


class _Differentiable(torch.autograd.Function):
    """decayattn::forward with its gradient; with a problem, what is behind the operator.

    What torch.library.register_autograd makes, but for a pass over the schema in every call, which took a sixth of the
    host's time.
    """

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, problem, modes = inputs
        output = _without_gradient(problem, (*tensors, *modes))
        _keep(ctx, tensors, modes, output, problem)
        # nobody asks for the others of a problem's, and an output takes the host's time, here and in the backward
        return output if problem is None else output[:2]

    backward = staticmethod(_differentiate)


def _with_gradient(problem, inputs):
    tensors, modes = inputs[:_TENSORS], inputs[_TENSORS:]  # the first mode is the scale
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _Differentiable.apply(*tensors, problem, modes) if wanted else _without_gradient(problem, inputs)


def _without_gradient(problem, inputs):
    if problem is not None:
        return _forward(*inputs, problem)
    with compatibility.below_autograd():
        return torch.ops.decayattn.forward.default(*inputs)


if compatibility.below_autograd is not None:

    @torch.library.impl("decayattn::forward", "Autograd")
    def _operator_with_gradient(*inputs):
        return _with_gradient(None, inputs)

else:
    torch.library.register_autograd(
        "decayattn::forward", _differentiate,
        setup_context=lambda ctx, inputs, output: _keep(ctx, inputs[:_TENSORS], inputs[_TENSORS:], output),
    )  # fmt: skip


torch.library.register_autograd("decayattn::backward", _refuse_second_derivative)
