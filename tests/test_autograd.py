"""The two operators behind the kernels, in everything that PyTorch wraps around an operator."""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
from judged_calls import COMPILER, ON_GPU, make_inputs
from processes import run_python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from decayattn import autograd, decay_attention, decay_attention_varlen
from decayattn.backends import registry
from decayattn.nn import DecayCache
from decayattn.problem import GradientRequest, Gradients, Inputs, Saved

NAMES = ("q", "k", "v", "log_decay", "scale")


def make(device, decay="scalar", row_scale=True, length=20, requires_grad=True) -> dict:
    """Leaves (B 2, H 4 over H_kv 2, D 16, D_v 8) by argument name; other values in every call."""
    seed = int(torch.randint(2**31, ()))
    inputs = make_inputs(torch.float32, decay, row_scale, length, length, seed=seed, device=device)
    return {name: x.requires_grad_(requires_grad) for name, x in inputs.items() if x is not None}


def attend(**arguments) -> tuple[Tensor, Tensor]:
    return decay_attention(**arguments, return_lse=True, backend="triton")


def loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.float().square().sum() + lse.sin().sum()


def outputs_and_gradients(function, leaves: dict) -> list[Tensor]:
    outputs = function(**leaves)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss(*outputs), list(leaves.values()))]


def assert_equal(found, expected) -> None:
    """Bitwise: the kernels repeat, so whatever wraps them has no excuse for a difference."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# The operators' own contract


def operator_arguments(leaves: dict, causal: bool, bias: Tensor | None = None, with_lse: bool = True) -> tuple:
    scale = 1.0 if "scale" in leaves else 0.3
    bounds, sink, window, longest, skip_tolerance = None, None, (-1, -1), None, 2.0**-24
    return (
        *(leaves.get(name) for name in NAMES), bounds, bias, sink, scale, causal, window, longest, skip_tolerance,
        "triton", with_lse,
    )


def test_operator_schemas_equal_the_named_tuples():
    """Names, order and types agree, so that neither operator counts positions."""
    forward, backward = torch.ops.decayattn.forward.default._schema, torch.ops.decayattn.backward.default._schema
    call = [*Inputs._fields, *autograd.Modes._fields]
    assert [x.name for x in forward.arguments] == [*call, "with_lse"]
    assert [x.name for x in forward.returns] == ["out", "lse", *Saved._fields]
    between = ["out", *Saved._fields, "d_out", "d_lse"]
    assert [x.name for x in backward.arguments] == [*call, *between, *GradientRequest._fields]
    assert [x.name for x in backward.returns] == list(Gradients._fields)
    types = {x.name: str(x.type) for x in forward.arguments}
    optional = {name for name in Inputs._fields if name in Inputs._field_defaults and name != "scale"}
    assert {name: types[name] for name in Inputs._fields} == {
        name: "Optional[Tensor]" if name in optional else "float" if name == "scale" else "Tensor"
        for name in Inputs._fields
    }
    assert {str(x.type) for x in [*forward.returns, *backward.returns]} == {"Tensor"}


MODES = [("none", True, False), ("constant", False, True), ("scalar", True, True), ("scalar", False, False)]


@pytest.mark.parametrize(("decay", "causal", "row_scale", "case"), [
    *(pytest.param(*mode, "", marks=[] if ON_GPU or number == 1 else pytest.mark.slow)
      for number, mode in enumerate(MODES)),
    *(("scalar", True, True, case) for case in ("without lse", "bias of keys", "permuted")),
    *(pytest.param("scalar", case == "bias", True, case, marks=pytest.mark.slow) for case in ("bias", "mask")),
])
def test_opcheck_of_the_forward(decay, causal, row_scale, case, device):
    leaves, bias = make(device, decay, row_scale), None
    if "bias" in case or case == "mask":
        bias = torch.randn((4, 1, 20) if case == "bias of keys" else (2, 4, 20, 20), device=device)
        bias = bias > 0 if case == "mask" else bias.requires_grad_()
    elif case == "permuted":
        leaves = {name: x.detach().mT.contiguous().mT.requires_grad_() for name, x in leaves.items()}
        assert not any(x.is_contiguous() for x in leaves.values())
    arguments = operator_arguments(leaves, causal, bias, with_lse=case != "without lse")
    torch.library.opcheck(torch.ops.decayattn.forward.default, arguments)
    assert (torch.ops.decayattn.forward.default(*arguments)[1].shape == (0,)) == (case == "without lse")


@pytest.mark.parametrize(("decay", "causal", "row_scale", "lse_gradient"), [
    pytest.param(*mode, lse_gradient, marks=[] if ON_GPU or number == 1 + lse_gradient else pytest.mark.slow)
    for number, mode in enumerate(MODES)
    for lse_gradient in (True, False)
])
def test_opcheck_of_the_backward(decay, causal, row_scale, lse_gradient, device):
    forward, backward = torch.ops.decayattn.forward.default, torch.ops.decayattn.backward.default
    arguments = operator_arguments(make(device, decay, row_scale, requires_grad=False), causal)
    results = forward(*arguments)
    # the backward takes the forward's arguments and results by name
    values = dict(zip((x.name for x in forward._schema.arguments), arguments, strict=True))
    values |= dict(zip((x.name for x in forward._schema.returns), results, strict=True))
    values |= dict(d_out=torch.ones_like(values["out"]))
    values |= dict(d_lse=torch.randn_like(values["lse"]) if lse_gradient else None)
    for decay_gradient in {False, decay != "none"}:
        values |= dict(decay_gradient=decay_gradient, bias_gradient=False, sink_gradient=False)
        torch.library.opcheck(backward, tuple(values[x.name] for x in backward._schema.arguments))


# Which gradients are asked for, and which arrive


@pytest.mark.parametrize("decay", ["constant", "scalar"])
def test_calls_compute_requested_gradients_only(decay, device):
    leaves = make(device, decay)
    with torch.no_grad():
        assert not any(x.requires_grad for x in attend(**leaves))
    expected = dict(zip(NAMES, outputs_and_gradients(attend, leaves)[2:], strict=True))
    for count in (0, 1, 4) if ON_GPU else (0, 1):
        for asked in itertools.combinations(NAMES, count):
            some = {name: x.detach().requires_grad_(name in asked) for name, x in leaves.items()}
            out, lse = attend(**some)
            assert out.requires_grad == lse.requires_grad == bool(asked)
            if asked:
                loss(out, lse).backward()
                assert_equal([some[name].grad for name in asked], [expected[name] for name in asked])
            assert all(x.grad is None for name, x in some.items() if name not in asked)


def test_gradients_of_both_outputs_add_up(device):
    """A missing gradient of the lse or of the output counts as zero."""
    leaves = make(device)
    values = list(leaves.values())
    out, lse = attend(**leaves)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    both = torch.autograd.grad((out, lse), values, (d_out, d_lse), retain_graph=True)
    from_out = torch.autograd.grad(out, values, d_out, retain_graph=True)
    from_lse = torch.autograd.grad(lse, values, d_lse)
    for name, whole, a, b in zip(leaves, both, from_out, from_lse, strict=True):
        torch.testing.assert_close(a + b, whole, msg=lambda m, name=name: f"{name}: {m}")
    assert from_lse[2].count_nonzero() == 0  # the lse does not depend on v


def test_second_derivatives_are_refused(device):
    leaves = make(device)
    out, _ = attend(**leaves)
    (grad,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative; use backend='reference'"):
        torch.autograd.grad(grad.square().sum(), leaves["k"])


def test_gradients_at_padding_do_not_reach_the_sink(device):
    """Gradients of a loss in padding, such as 0 / 0, do not matter."""
    leaves = make(device) | {"sink": torch.randn(4, device=device).requires_grad_()}
    inside = torch.tensor([3, 0], device=device)
    out, lse = attend(**leaves, leftpad_q=inside, leftpad_k=inside)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad([out, lse], list(leaves.values()), [d_out, d_lse], retain_graph=True)
    d_out[0, :3] = torch.tensor([torch.nan, torch.inf, 1.0])[:, None, None]
    assert_equal(torch.autograd.grad([out, lse], list(leaves.values()), [d_out, d_lse]), expected)


def lazily(x: Tensor) -> Tensor:
    """x, but with the other sign in memory."""
    return torch.complex(x, -x).conj().imag


def test_kernels_take_lazy_negatives_and_saved_strides(device):
    leaves = make(device)
    values, gradients = list(leaves.values()), [torch.randn_like(x) for x in attend(**leaves)]
    expected = torch.autograd.grad(attend(**leaves), values, gradients)
    outputs = attend(**{name: lazily(x) for name, x in leaves.items()})
    assert_equal(torch.autograd.grad(outputs, values, list(map(lazily, gradients))), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT if x.ndim > 2 else x):
        outputs = attend(**leaves)
    assert_equal(torch.autograd.grad(outputs, values, gradients), expected)
    cache = DecayCache(2, 20, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=8)
    with torch.no_grad(), pytest.raises(ValueError, match="got a lazy negative"):
        cache.attend(leaves["q"], lazily(leaves["k"]), leaves["v"], backend="triton")


@pytest.mark.parametrize("decay", ["scalar", "constant"])
def test_decoding_takes_lazy_negatives(decay, device):
    leaves = make(device, decay, requires_grad=False) | {"sink": torch.randn(4, device=device)}
    found = []
    for change in (Tensor.clone, lazily):
        # one per token is appended, which refuses it
        names = ["q", "scale", "sink", *(["log_decay"] if decay == "constant" else [])]
        own = leaves | {name: change(leaves[name]) for name in names}
        cache = DecayCache(2, 20, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=8, device=device)
        for tokens in (slice(0, 16), slice(16, 20)):
            parts = {name: x[:, tokens] if x.ndim > 1 else x for name, x in own.items()}
            found.append(cache.attend(**parts, backend="triton"))
    assert_equal(found[2:], found[:2])


# torch.func: refused, or right


def test_torch_func_gradients_are_refused(device):
    leaves = make(device, length=3)
    with pytest.raises(RuntimeError, match=r"torch\.func cannot differentiate its kernels; use backend='reference'"):
        torch.func.grad(lambda q: attend(**leaves | dict(q=q))[0].sum())(leaves["q"].detach())


def test_batched_gradients_are_refused(device, monkeypatch):
    output, _ = attend(**(leaves := make(device, length=3)))

    def differentiated(gradients, is_batched):
        return torch.autograd.grad(output, leaves["q"], gradients, is_grads_batched=is_batched, retain_graph=True)

    refused = pytest.raises(RuntimeError, match=r"no batch of gradients \(is_grads_batched\); use backend='reference'")
    with refused:
        differentiated(torch.stack([output, output]), True)

    of_a_gpu = RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
    monkeypatch.setattr(autograd, "backward", mock.Mock(side_effect=of_a_gpu))
    with refused:
        differentiated(torch.stack([output, output]), True)
    for gradient in (output, output.detach().to_sparse()):
        with pytest.raises(RuntimeError, match=r"^Cannot access data pointer"):
            differentiated(gradient, False)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_refused(name, device):
    """PyTorch drops a tangent without a warning at an operator that has no rule for it."""
    leaves = make(device, length=3, requires_grad=False)
    x = leaves.pop(name)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: attend(**leaves | {name: x})[0], (x,), (torch.ones_like(x),))


def test_vmap_loops_over_calls(device):
    """PyTorch's fallback for an operator without a batching rule: slow, and right."""
    leaves = [make(device, length=5, requires_grad=False) for _ in range(3)]
    stacked = {name: torch.stack([x[name] for x in leaves]).requires_grad_() for name in NAMES}
    for tensor in itertools.chain(*(each.values() for each in leaves)):
        tensor.requires_grad_()
    expected = [outputs_and_gradients(attend, each) for each in leaves]
    over_all = torch.vmap(lambda x: attend(**x))
    found = outputs_and_gradients(lambda **x: over_all(x), stacked)
    assert_equal(found, [torch.stack(parts) for parts in zip(*expected, strict=True)])


# Operators are visible to dispatch modes and tensor subclasses; other calls skip them


class Names(TorchDispatchMode):
    """The library's operators that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "decayattn":
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))


class Wrapper(Tensor):
    """A tensor without memory of its own; only operators reach its values."""

    @staticmethod
    def __new__(cls, held):
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*tree_map_only(Wrapper, lambda x: x.held, args), **(kwargs or {}))


@pytest.mark.parametrize("name", ["q", "log_decay"])
def test_tensor_subclass_gets_the_operator(name, device):
    leaves = make(device, requires_grad=False)
    assert_equal(attend(**leaves | {name: Wrapper(leaves[name])}), attend(**leaves))


def test_dispatch_modes_see_both_operators(device):
    leaves = make(device)
    expected = outputs_and_gradients(attend, leaves)
    with Names() as whole:
        assert_equal(outputs_and_gradients(attend, leaves), expected)
    assert whole.seen == ["forward", "backward"]
    out, lse = attend(**leaves)
    with Names() as later:
        assert_equal(torch.autograd.grad(loss(out, lse), list(leaves.values())), expected[2:])
    assert later.seen == ["backward"]
    with Names() as earlier:
        out, lse = attend(**leaves)
    assert_equal(torch.autograd.grad(loss(out, lse), list(leaves.values())), expected[2:])
    assert earlier.seen == ["forward"]


@pytest.mark.parametrize(("decay", "causal", "way"), [
    ("none", True, "called"), ("constant", False, "called"), ("scalar", True, "called"), ("scalar", True, "watched"),
    *(pytest.param(*case, "compiled", marks=pytest.mark.slow)
      for case in (("none", True), ("constant", False), ("scalar", True))),
])
def test_calls_without_lse_give_equal_results(decay, causal, way, device):
    """Kernels that write no lse are compiled differently. In compiled code, too, which is one graph."""
    leaves = make(device, decay)
    attend = functools.partial(decay_attention, causal=causal, backend="triton")
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER, dynamic=False) if way == "compiled" else attend
    results = []
    with Names() if way == "watched" else contextlib.nullcontext():
        for function, return_lse in ((attend, True), (compiled, True), (compiled, False)):
            out = function(**leaves, return_lse=return_lse)
            out = out[0] if return_lse else out
            results.append([out, *torch.autograd.grad(out.float().square().sum(), list(leaves.values()))])
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


@pytest.mark.parametrize(("kept", "runs"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)])
def test_selective_checkpoints_save_or_recompute_the_operator(kept, runs, device, monkeypatch):
    leaves = make(device)
    expected = outputs_and_gradients(attend, leaves)
    kernels = registry.load("triton")
    launched = mock.Mock(wraps=kernels.forward)
    monkeypatch.setattr(kernels, "forward", launched)
    policies = {torch.ops.decayattn.forward.default: kept}

    def policy(context, function, *args, **kwargs):
        return policies.get(function, CheckpointPolicy.PREFER_RECOMPUTE)

    def checkpointed(**leaves):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(lambda **x: attend(**x), use_reentrant=False, context_fn=contexts, **leaves)

    assert_equal(outputs_and_gradients(checkpointed, leaves), expected)
    assert launched.call_count == runs


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and warns of every shape that Python looks at
@pytest.mark.parametrize("way", ["dense", "packed"])
def test_flop_counter_counts_both_operators(way, device):
    """Counts equal those of PyTorch's attention: 2 products of all pairs forward, 5 backward."""
    x = torch.randn(1, 20, 2, 8, device=device, requires_grad=True)
    offsets = torch.tensor([0, 5, 20], device=device)
    packed = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=15, max_seqlen_k=15)

    def total():
        if way == "packed":
            return decay_attention_varlen(x[0], x[0], x[0], -0.1, **packed, backend="triton").sum()
        return decay_attention(x, x, x, -0.1, backend="triton").sum()

    with FlopCounterMode(display=False) as counter:
        total().backward()
    pairs = 5**2 + 15**2 if way == "packed" else 20**2
    assert counter.get_total_flops() == 7 * 2 * 2 * pairs * 8


@pytest.mark.slow
def test_reload_keeps_the_operators():
    reload = "importlib.reload(sys.modules[name]) for name in list(sys.modules) if name.startswith('decayattn')"
    leaves = f"torch.randn(3, 1, 4, 1, 8, requires_grad=True, device={'cuda' if ON_GPU else 'cpu'!r})"
    call = f"decay_attention(*{leaves}, -0.1, backend='triton').sum().backward()"
    script = f"import importlib, sys, torch\nfrom decayattn import decay_attention\n{call}\n[{reload}]\n{call}"
    run_python("-c", script)


# What PyTorch wraps around a call


def test_compile_takes_dynamic_lengths(device):
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER, dynamic=True)
    for length, stance in ((20, "default"), (33, "fail_on_recompile"), (7, "fail_on_recompile")):
        leaves = make(device, length=length)
        with torch.compiler.set_stance(stance):
            found = outputs_and_gradients(compiled, leaves)
        assert_equal(found, outputs_and_gradients(attend, leaves))


def test_checkpoints_and_deterministic_mode_change_nothing(device, torch_settings):
    def checkpointed(**leaves):  # this kind takes positional tensors only
        in_order = lambda *values: attend(**dict(zip(NAMES, values, strict=True)))  # noqa: E731
        return checkpoint(in_order, *leaves.values(), use_reentrant=True)

    def gradients(function):
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        loss(*function(**leaves)).backward()
        return [x.grad for x in leaves.values()]

    tensors = make(device)
    expected = gradients(attend)
    assert_equal(gradients(checkpointed), expected)
    torch.use_deterministic_algorithms(True)
    torch.compiler.reset()
    for function in (attend, torch.compile(attend, fullgraph=True, backend=COMPILER)):
        assert_equal(gradients(function), expected)


def test_anomaly_detection_accepts_resets(device):
    leaves = make(device)
    leaves["log_decay"].data[0, 3] = -torch.inf
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly(check_nan=True):
        outputs_and_gradients(attend, leaves)


def test_autocast_casts_q_k_v_only(device):
    """q, k, v are cast, the decay and the scale are not; gradients come in the dtypes of the leaves."""
    dtype = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter's bfloat16 is wrong
    leaves = make(device)
    with torch.autocast(device.type, dtype=dtype):
        out, lse = attend(**leaves)
        wide = {name: x.double() for name, x in leaves.items()}
        assert decay_attention(**wide, backend="reference").dtype == torch.float64
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    gradients = torch.autograd.grad(loss(out, lse), list(leaves.values()))
    assert [x.dtype for x in gradients] == [torch.float32] * 5

    cast = {name: x.detach().to(dtype) if name in "qkv" else x.detach() for name, x in leaves.items()}
    expected = outputs_and_gradients(attend, {name: x.requires_grad_() for name, x in cast.items()})
    assert_equal([out, lse, *gradients], [*expected[:2], *(x.float() for x in expected[2:])])
