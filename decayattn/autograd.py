"""The autograd bridge of the kernels: two opaque operators, decayattn::forward and decayattn::backward.

With operators, torch.compile, fake tensors and selective checkpointing see one node with known shapes, and the launches
behind it stay ordinary Python. In eager mode without observers, the functions behind the operators are called directly:
an operator takes a sixth of the host time of a small call.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decayattn import compatibility
from decayattn.backends import registry
from decayattn.backends.runtime import outputs
from decayattn.problem import AttentionProblem, BackendName, GradientRequest, Gradients, Inputs, Precomputed, Saved


class Modes(NamedTuple):
    """Arguments of the operators besides tensors; they and the tensors make an AttentionProblem."""

    causal: bool
    window: Sequence[int]
    longest: Sequence[int] | None  # (longest_query, longest_key) of packed sequences
    skip_tolerance: float
    backend: BackendName


# numbers of arguments in an operator's schema; the last input is the only one that is not a tensor
_INPUTS, _TENSORS, _SAVED = len(Inputs._fields), len(Inputs._fields) - 1, len(Saved._fields)
_CALL = _INPUTS + len(Modes._fields)
_PLAIN = {Tensor, torch.nn.Parameter}

_CALL_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? row_scale, Tensor? bounds, Tensor? bias, Tensor? sink, "
    "float scale, bool causal, SymInt[] window, SymInt[]? longest, float skip_tolerance, str backend"
)
_SCHEMAS = {
    "decayattn::forward": f"({_CALL_SCHEMA}, bool with_lse) -> (Tensor out, Tensor lse, "
        f"{', '.join(f'Tensor {name}' for name in Saved._fields)})",
    "decayattn::backward": f"({_CALL_SCHEMA}, Tensor out, {', '.join(f'Tensor {name}' for name in Saved._fields)}, "
        "Tensor d_out, Tensor? d_lse, bool decay_gradient, bool bias_gradient, bool sink_gradient) -> "
        f"({', '.join(f'Tensor {name}' for name in Gradients._fields)})",
}


def attention(
    problem: AttentionProblem, inputs: Inputs, backend: BackendName, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out and, if with_lse, lse from a kernel backend, differentiable once."""
    modes = modes_of(problem, backend)
    if needs_operator(inputs):
        out, lse, *_ = torch.ops.decayattn.forward.default(*inputs, *modes, with_lse)
    else:
        out, lse, *_ = _with_gradient(problem, inputs, modes, with_lse)
    return out, lse if with_lse else None


def modes_of(problem: AttentionProblem, backend: BackendName) -> Modes:
    """The operators' arguments besides tensors."""
    longest = (problem.longest_query, problem.longest_key) if problem.layout == "packed" else None
    return Modes(problem.causal, problem.window, longest, problem.skip_tolerance, backend)


def needs_operator(inputs: Inputs) -> bool:
    """True if a call must be an operator, not the function behind it. Refuses tangents."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if compatibility.has_tangent(tensors):
        # PyTorch would silently drop the tangent at the operator
        raise RuntimeError("decay_attention: its kernels have no forward-mode derivative; use backend='reference'")
    is_observed = _is_observed(tensors)
    if is_observed and not torch.compiler.is_compiling():
        operators = torch.ops.decayattn
        compatibility.count_flops({
            operators.forward: functools.partial(_flops, 1, 1), operators.backward: functools.partial(_flops, 3, 2)
        })
    return is_observed


def _is_observed(tensors: Sequence[Tensor]) -> bool:
    """True if operators must be visible: to a tracer, a dispatch mode, a torch.func transform, or a Tensor subclass."""
    # PyTorch resolves a lazy negative (the .imag of a conjugate) for operators; kernels would read the other sign
    return compatibility.has_observers() or not {*map(type, tensors)} <= _PLAIN or any(map(Tensor.is_neg, tensors))


# ----------------------------------------------------------------------------------------------------------------------
# The functions behind the operators


def forward(
    problem: AttentionProblem, inputs: Inputs, backend: BackendName, with_lse: bool,
    precomputed: Precomputed | None = None,
) -> tuple[Tensor, Tensor | None, Saved]:
    """`attention` without autograd, and the state for `backward`; no tracer sees either."""
    launcher, sink = registry.resolve(problem, backend, inputs), inputs.sink
    if problem.is_empty:
        results, saved = _allocate(problem, inputs.q, True, precomputed)
        for x, value in zip(results, outputs.OF_NO_KEY, strict=True):
            if x is not None:
                x.fill_(value)
        out, _, lse = results
    else:
        out, lse, saved = launcher.forward(problem, inputs, with_lse or sink is not None, precomputed)
    if sink is not None:
        assert lse is not None  # requested above
        row_sink = sink.to(lse.dtype)[:, None]
        # a row without a key sees the sink alone
        lse = torch.where(lse.isneginf(), row_sink, lse)
        # a sink of −inf is none, for such a row too
        probability = torch.where(lse.isneginf(), 0.0, torch.exp(row_sink - lse))
        saved = saved._replace(sink_probability=probability)
    return out, lse, saved


def backward(
    problem: AttentionProblem, inputs: Inputs, backend: BackendName, out: Tensor, kept: Sequence[Tensor | None],
    d_out: Tensor, d_lse: Tensor | None, requested: GradientRequest, dq: Tensor | None = None,
) -> Gradients:
    """Gradients of a `forward`. kept: its Saved. dq: output buffer for that of q; its last dimension is contiguous."""
    launcher = registry.resolve(problem, backend, inputs)
    # hooks of saved tensors may return any strides
    saved = Saved._make([x if x is None else x.contiguous() for x in kept])
    out = out if out.stride(-1) == 1 else out.contiguous()
    if problem.is_empty:
        gradients = _allocate_gradients(inputs, saved, requested)
        gradients = gradients._replace(dq=gradients.dq if dq is None else dq)
        for x in gradients:
            if x is not None:
                x.zero_()
    else:
        gradients = launcher.backward(problem, inputs, out, saved, d_out, d_lse, requested, dq)
    if not requested.sink_gradient:
        return gradients
    return gradients._replace(d_sink=_sink_gradient(inputs, out, saved, d_out, d_lse))


def _allocate(
    problem: AttentionProblem, q: Tensor, with_lse: bool, precomputed: Precomputed | None = None,
    flat_base: bool = False,
) -> tuple[outputs.Outputs, Saved]:
    """Uninitialised results of a forward, and its state without that of a sink."""
    from decayattn.backends.planning import prefix, skipping  # they import Triton

    results = outputs.allocate(problem, q, with_lse, precomputed)
    return results, Saved(results.row_lse2, *prefix.allocate(problem, q, flat_base), skipping.allocate(problem, q))


def _allocate_gradients(inputs: Inputs, saved: Saved, requested: GradientRequest) -> Gradients:
    """Uninitialised gradients."""

    def contiguous(x: Tensor | None, is_requested: bool = True) -> Any:
        return x.new_empty(x.shape) if x is not None and is_requested else None

    return Gradients(
        contiguous(inputs.q), contiguous(inputs.k), contiguous(inputs.v),
        contiguous(inputs.log_decay, requested.decay_gradient),
        torch.empty_like(saved.row_lse2).transpose(1, 2) if inputs.row_scale is not None else None,
        contiguous(inputs.bias, requested.bias_gradient), contiguous(inputs.sink, requested.sink_gradient),
    )


def _sink_gradient(inputs: Inputs, out: Tensor, saved: Saved, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """dsink_h = −Σ_i P_i,sink Δ_i: the sink's value is 0, and so is its dP."""
    sink, sink_probability = inputs.sink, saved.sink_probability
    assert sink is not None
    assert sink_probability is not None
    accumulator = sink_probability.dtype
    delta = torch.einsum("bihe,bihe->bhi", d_out.to(accumulator), out.to(accumulator))
    if inputs.bounds is not None:
        # rows outside of their sequence: d_out may hold anything there, and 0 · NaN is NaN
        delta = delta.masked_fill(saved.row_lse2.isposinf(), 0)
    if d_lse is not None:
        delta = delta - d_lse
    # no sink, and no visible key either: the gradient of lse, −inf, may be anything
    shares = torch.where(sink_probability == 0, 0.0, sink_probability * delta)
    return -shares.sum((0, 2), dtype=torch.float64).to(sink.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The operators. They return tensors only; one of size 0 means None. base is flat: its dimension of blocks would be
# 1 up to 128 tokens, and a traced graph would specialise on that


def _split(arguments: Sequence) -> tuple[Inputs, Modes, Sequence]:
    """Inputs and modes of an operator by name, and the remaining arguments."""
    return Inputs(*arguments[:_INPUTS]), Modes(*arguments[_INPUTS:_CALL]), arguments[_CALL:]


def _split_backward(arguments: Sequence) -> tuple[Inputs, Modes, Tensor, Saved, Tensor, Tensor | None, GradientRequest]:
    inputs, modes, (out, *rest) = _split(arguments)
    d_out, d_lse, *requested = rest[_SAVED:]
    return inputs, modes, out, Saved(*rest[:_SAVED]), d_out, d_lse, GradientRequest(*requested)


def _problem_of(inputs: Inputs, modes: Modes) -> AttentionProblem:
    return AttentionProblem.of(inputs, modes.causal, modes.window, modes.longest, modes.skip_tolerance)


def _tensor(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _forward_operator(*arguments):
    inputs, modes, (with_lse,) = _split(arguments)
    out, lse, saved = forward(_problem_of(inputs, modes), inputs, modes.backend, with_lse)
    like = saved.row_lse2
    saved = saved._replace(base=saved.base.flatten(), sink_probability=_tensor(saved.sink_probability, like))
    return out, _tensor(lse if with_lse else None, like), *saved


def _backward_operator(*arguments):
    inputs, modes, out, saved, d_out, d_lse, requested = _split_backward(arguments)
    problem = _problem_of(inputs, modes)
    heads = problem.batch, problem.num_heads
    saved = saved._replace(base=saved.base.view(*heads, saved.base.numel() // max(1, math.prod(heads))))
    gradients = backward(problem, inputs, modes.backend, out, saved, d_out, d_lse, requested)
    return tuple(_tensor(x, saved.row_lse2) for x in gradients)


def _forward_fake(*arguments):
    inputs, modes, (with_lse,) = _split(arguments)
    results, saved = _allocate(_problem_of(inputs, modes), inputs.q, with_lse, flat_base=True)
    probability = None if inputs.sink is None else torch.empty_like(saved.row_lse2)
    saved = saved._replace(sink_probability=_tensor(probability, saved.row_lse2))
    return results.out, _tensor(results.lse, saved.row_lse2), *saved


def _backward_fake(*arguments):
    inputs, _, _, saved, _, _, requested = _split_backward(arguments)
    return tuple(_tensor(x, saved.row_lse2) for x in _allocate_gradients(inputs, saved, requested))


def _flops(of_q: int, of_v: int, *arguments, **_) -> int:
    """FLOPs of an operator with of_q products of width D and of_v of width D_v for each pair of a row and a key.

    As PyTorch counts its own attention: all pairs of a sequence, causal or not, and S again in a backward.
    """
    inputs = _split(arguments)[0]
    q, k, v, bounds = inputs.q, inputs.k, inputs.v, inputs.bounds
    if bounds is None or bounds.is_meta or type(bounds) is not Tensor:  # a fake tensor has no values
        pairs = q.shape[0] * q.shape[1] * k.shape[1]
    else:
        pairs = int((bounds[:, 1].long() * bounds[:, 3]).sum())
    return 2 * q.shape[2] * pairs * (of_q * q.shape[3] + of_v * v.shape[3])


# ----------------------------------------------------------------------------------------------------------------------
# Autograd


def _save(ctx, problem, inputs, modes, with_lse, output):
    """Save the state of a forward for its backward."""
    ctx.problem, ctx.scale, ctx.modes = problem, inputs.scale, modes
    ctx.set_materialize_grads(False)
    out, lse, *saved = output
    ctx.save_for_backward(*inputs[:-1], out, *saved)
    if problem is None:
        ctx.mark_non_differentiable(*saved, *(() if with_lse else (lse,)))


def _differentiate(ctx, d_out, d_lse, *_):
    """Gradients of the tensors, in the order of Inputs."""
    kept = ctx.saved_tensors
    inputs, out, saved = Inputs(*kept[:_TENSORS], ctx.scale), kept[_TENSORS], Saved(*kept[_TENSORS + 1 :])
    needs = Inputs(*ctx.needs_input_grad[:_TENSORS])
    requested = GradientRequest(needs.log_decay, needs.bias, needs.sink)
    if d_out is None:
        d_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    *of_scores, d_bias, d_sink = gradients_of(ctx.problem, inputs, ctx.modes, out, saved, d_out, d_lse, requested)
    found = *of_scores, None, d_bias, d_sink  # bounds have none
    return tuple(x if needed else None for x, needed in zip(found, needs[:_TENSORS], strict=True))


def gradients_of(
    problem: AttentionProblem | None, inputs: Inputs, modes: Modes, out: Tensor, saved: Saved, d_out: Tensor,
    d_lse: Tensor | None, requested: GradientRequest,
) -> Gradients:
    """`backward` in a backward of autograd; without a problem, the operator."""
    given = (d_out,) if d_lse is None else (d_out, d_lse)
    if problem is not None and not torch.is_grad_enabled() and not _is_observed(given):
        try:
            return backward(problem, inputs, modes.backend, out, saved, d_out, d_lse, requested)
        except RuntimeError as error:
            if not (_is_batch(d_out) or _is_batch(d_lse)):
                raise
            raise RuntimeError(
                "decay_attention: its kernels take no batch of gradients (is_grads_batched); use backend='reference'"
            ) from error
    # recorded gradients are meant to be differentiated again, which this operator refuses
    return Gradients(*torch.ops.decayattn.backward.default(*inputs, *modes, out, *saved, d_out, d_lse, *requested))


def _is_batch(x: Tensor | None) -> bool:
    """True for a batch of tensors under vmap: a dense tensor without storage."""
    if x is None or x.layout is not torch.strided:
        return False
    try:
        x.untyped_storage()
    except NotImplementedError:
        return True
    return False


def _refuse_second_derivative(ctx, *_):
    raise RuntimeError(
        "decay_attention: its kernels have no second derivative; use backend='reference', which has them all"
    )


class _Differentiable(torch.autograd.Function):
    """decayattn::forward with its gradient; with a problem, the function behind the operator.

    Equivalent to torch.library.register_autograd, which also parses the schema in every call: a sixth of the host time.
    """

    @staticmethod
    def forward(ctx, *arguments):
        call = arguments[-1]
        output = without_gradient(*call)
        _save(ctx, *call, output)
        # with a problem the others are not used, and each output takes host time here and in the backward
        return output if call[0] is None else output[:2]

    @staticmethod
    def backward(ctx, *gradients):
        return *_differentiate(ctx, *gradients), None


def _with_gradient(problem, inputs, modes, with_lse):
    """out, lse and, at the operator, the saved tensors."""
    if needs_gradient(inputs, problem is None):
        # autograd finds tensors among the arguments, not inside of them, and takes host time for each argument
        return _Differentiable.apply(*inputs[:-1], (problem, inputs, modes, with_lse))
    return without_gradient(problem, inputs, modes, with_lse)


def needs_gradient(inputs: Inputs, is_operator: bool) -> bool:
    """True if autograd records a call. Refuses an operator that torch.func would differentiate."""
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return False
    if is_operator and compatibility.is_transformed():
        raise RuntimeError("decay_attention: torch.func cannot differentiate its kernels; use backend='reference'")
    return True


def without_gradient(problem, inputs, modes, with_lse):
    """out, lse and the saved tensors; without a problem, from the operator."""
    if problem is not None:
        out, lse, saved = forward(problem, inputs, modes.backend, with_lse)
        return out, lse, *saved
    # Dynamo cannot trace this context, and does not need it
    is_visible = torch.compiler.is_dynamo_compiling() or compatibility.below_autograd is None
    with contextlib.nullcontext() if is_visible else compatibility.below_autograd():
        return torch.ops.decayattn.forward.default(*inputs, *modes, with_lse)


def _operator_with_gradient(*arguments):
    inputs, modes, (with_lse,) = _split(arguments)
    return _with_gradient(None, inputs, modes, with_lse)


def _save_operator(ctx, inputs, output):
    call, modes, (with_lse,) = _split(inputs)
    _save(ctx, None, call, modes, with_lse, output)


def _differentiate_operator(ctx, *gradients):
    return *_differentiate(ctx, *gradients), None, *(None for _ in Modes._fields), None


def _register() -> None:
    library = torch.library
    for name, schema in _SCHEMAS.items():
        library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, implementation, fake in (
        ("decayattn::forward", _forward_operator, _forward_fake),
        ("decayattn::backward", _backward_operator, _backward_fake),
    ):
        library.impl(name, "CompositeExplicitAutograd", implementation)
        library.register_fake(name, fake)
    if compatibility.below_autograd is not None:
        library.impl("decayattn::forward", "Autograd", _operator_with_gradient)
    else:
        library.register_autograd("decayattn::forward", _differentiate_operator, setup_context=_save_operator)
    library.register_autograd("decayattn::backward", _refuse_second_derivative)


# after importlib.reload the operators are still registered; they call this module's functions by name
if not hasattr(torch.ops.decayattn, "forward"):
    _register()
