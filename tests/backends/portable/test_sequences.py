"""Windows, sinks, biases, padded and packed sequences: the kernels by the error budget, and in operators and graphs.

The oracle evaluates every sequence alone, so whatever crosses a boundary shows. Tiles of the interpreter are 32 × 32
and blocks of the decay prefix 128 tokens: the lengths here are multiples of neither, and some are longer than both.
"""

import functools
import itertools
import math

import judged_calls
import pytest
import torch
from judged_calls import DEVICE, ON_GPU, SINK_CHECKS, captured, first_entry, leading_sink_keeps_its_bits, make_inputs

from decayattn import decay_attention, decay_attention_varlen, validation
from decayattn.backends.planning import sequences
from decayattn.backends.registry import unavailable
from decayattn.testing import assert_within_budget, verify_attention

INF = math.inf
F16, F32, F64 = torch.float16, torch.float32, torch.float64
int32 = functools.partial(judged_calls.int32, device=DEVICE)
verify = functools.partial(judged_calls.verify, backend="triton")


def make(rows, keys, decay="scalar", *, batch=1, heads=2, kv_heads=1, dtype=F32, row_scale=False, sink=False) -> dict:
    """Arguments of verify_attention."""
    inputs = make_inputs(dtype, decay, row_scale, rows, keys, heads, kv_heads, batch=batch, device=DEVICE)
    return inputs | dict(sink=torch.randn(heads, device=DEVICE, dtype=F64 if dtype == F64 else F32) if sink else None)


def make_packed(*args, **options) -> dict:
    """The same for verify_attention_varlen."""
    return first_entry(make(*args, **options))


def offsets(rows, keys=None) -> dict:
    """cu_seqlens of sequences with these rows and keys."""
    ends = [[0, *itertools.accumulate(lengths)] for lengths in (rows, rows if keys is None else keys)]
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (int32(*end) for end in ends), strict=True))


# The error budget


WINDOWS = [
    (True, (0, 0), "scalar", 70, 70), (True, (5, -1), "none", 33, 140), (True, (31, 9), "constant", 70, 70),
    (True, (32, -1), "resets", 45, 150), (True, (64, -1), "growth", 150, 100), (False, (0, 0), "constant", 40, 70),
    (False, (-1, 3), "scalar", 70, 135), (False, (3, -1), "none", 100, 70), (False, (40, 33), "resets", 70, 140),
    (False, (7, 64), "growth", 66, 66), (False, (-1, 0), "constant", 70, 33), (False, (1, 200), "scalar", 1, 150),
]


@pytest.mark.parametrize(("causal", "window", "decay", "rows", "keys"), WINDOWS)
def test_windows(causal, window, decay, rows, keys):
    verify(make(rows, keys, decay), causal=causal, window_size=window)


@pytest.mark.parametrize(("decay", "causal", "dtype"), [
    ("none", False, F16), ("constant", True, F32), ("scalar", True, F16), ("scalar", True, F32),
])
def test_sinks(decay, causal, dtype):
    """From one that hardly counts to one that takes almost everything; some rows see nothing else."""
    inputs = make(50, 45, decay, heads=4, kv_heads=2, dtype=dtype)
    inputs["sink"] = torch.tensor([-20.0, 0.0, 3.0, 12.0], device=DEVICE)
    verify(inputs, causal=causal, window_size=(40, 2))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("decay", ["constant", "scalar"])
def test_a_sink_costs_no_accuracy(decay, seed):
    """The gradient of a strong decay is a small difference of row terms: they have to be of the output that is
    returned, rounded once."""
    torch.manual_seed(seed)
    new = dict(device=DEVICE, dtype=F16)
    q, k, v = torch.randn(1, 53, 4, 64, **new), torch.randn(1, 53, 1, 64, **new), torch.randn(1, 53, 1, 112, **new)
    log_decay = -3 - torch.rand((4,) if decay == "constant" else (1, 53, 4), device=DEVICE)
    comparisons = verify_attention(q, k, v, log_decay, sink=torch.randn(4, device=DEVICE), backend="triton")
    assert_within_budget(comparisons)
    gradient = next(c for c in comparisons if c.name == "dlog_decay")
    assert gradient.error < 0.5 * gradient.budget


@pytest.mark.parametrize("check", [
    *SINK_CHECKS, lambda backend, dtype, device: leading_sink_keeps_its_bits(backend, F32, device),
], ids=range(len(SINK_CHECKS) + 1))
def test_sinks_are_exact(check):
    check("triton", F16, DEVICE)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_infinite_sink_has_no_gradient_outside_sequences(backend):
    q, k, v = torch.randn(3, 5, 2, 16, device=DEVICE)
    sink = torch.tensor([-torch.inf, 1.0], device=DEVICE, requires_grad=True)
    ends = torch.tensor([0, 3], device=DEVICE)
    _, lse = decay_attention_varlen(
        q, k, v, sink=sink, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=3, max_seqlen_k=3, return_lse=True,
        backend=backend,
    )
    (found,) = torch.autograd.grad(lse[:, 3:].sum(), sink)
    assert found.tolist() == [0, 2]


@pytest.mark.parametrize(("decay", "causal"), [
    ("none", False), ("constant", True), ("scalar", True), ("scalar", False), ("resets", True),
])
def test_padding(decay, causal):
    """On the right, on the left, on both sides, and nothing but padding."""
    inputs = make(40, 140, decay, batch=4, row_scale=True, sink=True)
    inputs |= dict(
        seqused_q=int32(33, 40, 38, 12), seqused_k=int32(131, 140, 70, 5),
        leftpad_q=int32(0, 25, 3, 0), leftpad_k=int32(0, 70, 3, 5),
    )
    verify(inputs, causal=causal, window_size=(70, 20) if causal else None)


@pytest.mark.parametrize(("given", "causal"), [
    ({"seqused_k": (7, 0, 200)}, True),  # a key cache, in use up to here; values outside of the axis are its ends
    ({"leftpad_k": (3, 40, -2)}, True),
    ({"leftpad_q": (3, 40, -2)}, False),
    ({"leftpad_q": (3, 33, 0), "leftpad_k": (3, 33, 0)}, True),
    ({"seqused_q": (0, 11, 40), "seqused_k": (0, 11, 40)}, True),
    ({"seqused_q": (30, 9, 1), "seqused_k": (5, 40, 1)}, False),  # rows before the first key see nothing
])
def test_each_length_alone(given, causal):
    inputs = make(40, 40, batch=3, dtype=F16)
    verify(inputs | {name: int32(*numbers) for name, numbers in given.items()}, causal=causal)


PACKINGS = [
    ([3, 0, 33, 1], None),
    ([0, 130, 5], None),
    ([20, 0, 7, 30, 1, 0], [5, 4, 0, 33, 129, 0]),
    ([1] * 6, [1, 0, 2, 40, 5, 6]),
    ([40], [140]),
]


@pytest.mark.parametrize(("rows", "keys", "decay", "causal"), [
    *((*lengths, *mode) for lengths in PACKINGS for mode in (("resets", True), ("scalar", False))),
    (*PACKINGS[0], "none", True), (*PACKINGS[4], "constant", False),
], ids=str)
def test_packings(rows, keys, decay, causal):
    """Sequences without rows or keys, of different numbers of both, and five tokens past the last one."""
    inputs = make_packed(sum(rows) + 5, sum(keys or rows) + 5, decay)
    verify(inputs | offsets(rows, keys), causal=causal)


def test_more_sequences_than_a_search_compares(monkeypatch):
    """Empty ones, ones of a few tokens, and three that have several blocks."""
    many = 67 if ON_GPU else 5
    if not ON_GPU:  # 8 instead of 128, because the interpreter is slow
        monkeypatch.setattr(sequences, "_CHUNK", 8)
        monkeypatch.setattr(sequences, "_SEARCHED", 8)
    rows = [40, *(n % 3 for n in range(many)), 0, 0, 130, *(n % 2 for n in range(many)), 5]
    keys = [133, *(n % 4 for n in range(many)), 3, 0, 130, *(1 - n % 2 for n in range(many)), 140]
    verify(make_packed(sum(rows) + 5, sum(keys) + 5, "resets") | offsets(rows, keys))


@pytest.mark.parametrize(("dtype", "causal"), [(F16, True), (F64, False)])
def test_packings_with_everything(dtype, causal):
    inputs = make_packed(70, 120, "resets", heads=4, kv_heads=2, dtype=dtype, row_scale=True, sink=True)
    inputs |= dict(cu_seqlens_q=int32(2, 22, 22, 67, 68), cu_seqlens_k=int32(3, 36, 40, 80, 114))
    verify(inputs, causal=causal, window_size=(25, 6))


@pytest.mark.parametrize("lengths", [[], [0], [0] * 5, [0, 0, 37, 0, 0], [37]], ids=str)
@pytest.mark.parametrize("decay", ["constant", "resets"])
def test_few_sequences(lengths, decay):
    """None, one, and empty ones on all sides; with tokens before and after them, which belong to none."""
    inputs = make_packed(sum(lengths) + 9, sum(lengths) + 9, decay) | offsets(lengths)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        inputs[name] += 4
    verify(inputs, max_seqlen_q=40, max_seqlen_k=40)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(("backend", "dtype"), [
    ("triton", torch.int32), ("triton", torch.int64), ("hopper", torch.int32),
])
def test_graph_replays_with_other_offsets(backend, dtype):
    """More blocks, fewer of them, and tokens that belong to no sequence: the device finds all of it again."""
    error = 1e-3 if backend == "hopper" else 0.0  # its gradients are added up in no fixed order
    inputs = make_packed(400, 400, "resets", dtype=F16)
    names = ("q", "k", "v", "log_decay")
    leaves = [inputs[name].requires_grad_() for name in names]
    cu = int32(0, 400, 400, 400).to(dtype)
    if reason := unavailable(backend, inputs["q"].dtype, inputs["q"].device):
        pytest.skip(reason)
    options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=400, max_seqlen_k=400, backend=backend)
    d_out = torch.randn(400, 2, 8, device=DEVICE, dtype=F16)

    def results():
        out = decay_attention_varlen(**inputs, **options)
        return [out, *torch.autograd.grad(out, leaves, d_out)]

    graph, kept = captured(results)
    for numbers in ((0, 129, 258, 400), (3, 3, 200, 301), (0, 0, 0, 0), (0, 128, 256, 400)):
        cu.copy_(int32(*numbers))
        graph.replay()
        for found, expected in zip(kept, results(), strict=True):
            torch.testing.assert_close(found, expected, rtol=10 * error, atol=error)


@pytest.mark.parametrize(("longest_q", "longest_k"), [(200, 200), (40, 31)])
def test_bounds_of_the_lengths(longest_q, longest_k):
    """One that nothing reaches changes nothing; of longer sequences no token beyond it is computed."""
    inputs = make_packed(70, 70) | offsets([20, 45, 5], [30, 33, 7])
    verify(inputs, max_seqlen_q=longest_q, max_seqlen_k=longest_k)


@pytest.mark.parametrize(("shape", "causal"), [
    ((2, 2, 40, 70), True), ((2, 40, 70), False), ((2, 1, 1, 70), True), ((1, 40, 1), False), ((), True),
])
def test_biases(shape, causal):
    inputs = make(40, 70, batch=2) | dict(bias=torch.randn(shape, device=DEVICE))
    if shape:
        inputs["bias"].flatten()[:3] = -INF  # hides
    verify(inputs, causal=causal)
    if not causal:
        verify(inputs | dict(bias=inputs["bias"] < 0.3), causal=causal)


@pytest.mark.parametrize("dtype", [F16, F64])
def test_biases_of_other_dtypes(dtype):
    inputs = make(40, 70, "constant", dtype=dtype, sink=True)
    verify(inputs | dict(bias=torch.randn(40, 70, device=DEVICE, dtype=dtype)), window_size=(30, -1))


def test_biases_in_padded_sequences():
    inputs = make(40, 70, batch=2) | dict(bias=torch.randn(2, 1, 40, 70, device=DEVICE))
    inputs |= dict(seqused_q=int32(20, 40), seqused_k=int32(50, 66))
    inputs |= dict(leftpad_q=int32(3, 0), leftpad_k=int32(9, 0))
    verify(inputs)
    bias = inputs["bias"].requires_grad_()
    out = decay_attention(**inputs, backend="triton")
    (gradient,) = torch.autograd.grad(out, bias, torch.randn_like(out))
    inside = torch.zeros(2, 1, 40, 70, dtype=torch.bool, device=DEVICE)
    inside[0, :, 3:20, 9:50], inside[1, :, :, :66] = True, True
    assert (gradient[~inside] == 0).all()
    assert (gradient[inside] != 0).any()


# Unused memory and neighbours


@pytest.mark.parametrize(("causal", "dtype"), [(True, F16), (False, F32)])
def test_unused_tokens_reach_nothing(causal, dtype):
    """NaN in them, and in the log-decay of every sequence's first token, reaches nothing. Tiles may be read beyond the
    end of a sequence."""
    packed = make_packed(70, 75, dtype=dtype, row_scale=True, sink=True)
    packed |= dict(cu_seqlens_q=int32(3, 40, 60), cu_seqlens_k=int32(2, 36, 72))
    padded = make(40, 75, dtype=dtype, row_scale=True)
    padded |= dict(seqused_q=int32(33), seqused_k=int32(70), leftpad_q=int32(2), leftpad_k=int32(5))
    for inputs, axis, rows, keys, first in ((packed, 0, (3, 60), (2, 72), [2, 36]), (padded, 1, (2, 33), (5, 70), [5])):
        for name in ("q", "scale", "k", "v", "log_decay"):
            begin, end = rows if name in ("q", "scale") else keys
            tokens = inputs[name].transpose(0, axis)
            tokens[:begin] = tokens[end:] = math.nan
        inputs["log_decay"].transpose(0, axis)[first] = math.nan
        verify(inputs, causal=causal)


@pytest.mark.parametrize("incoming", [INF, math.nan])
def test_rows_that_see_nothing(incoming):
    """A window that ends before the first key; the gradient of their lse is anything."""
    inputs = make_packed(60, 40, row_scale=True) | offsets([20, 40], [20, 10])
    inputs["sink"] = torch.full(inputs["q"].shape[1:2], -INF, device=DEVICE)
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "log_decay", "scale", "sink")]
    out, lse = decay_attention_varlen(**inputs, max_seqlen_q=40, max_seqlen_k=20, return_lse=True, backend="triton")
    assert (out[20:50] == 0).all()
    assert (lse[:, 20:50] == -INF).all()
    assert lse[:, :20].isfinite().all()
    grad_lse = torch.zeros_like(lse)
    grad_lse[:, 20:50] = incoming
    for gradient in torch.autograd.grad([out, lse], leaves, [torch.zeros_like(out), grad_lse]):
        assert (gradient == 0).all()


def test_offsets_that_decrease_or_leave_the_axis(monkeypatch):
    """Against the contract. The results are in the tensors, and equal those of the clamped offsets."""
    monkeypatch.setattr(validation, "refuse_unless", lambda *_: None)  # a GPU has no such check
    inputs = make_packed(300, 300, "resets")
    given, kept = [-5, 290, 0, 280, 20, 299, 7, 400], [0, 290, 290, 290, 290, 299, 299, 300]
    found = []
    for numbers in (given, kept):
        cu = int32(*numbers)
        leaves = {name: inputs[name].detach().requires_grad_() for name in ("q", "k", "v", "log_decay")}
        out = decay_attention_varlen(
            **leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=300, max_seqlen_k=300, backend="triton"
        )
        found.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
    assert all(map(torch.equal, *found))


def test_offsets_changed_in_place():
    """The call reads the offsets; its backward uses the values of that time."""
    inputs = make_packed(50, 50)
    cu = int32(0, 20, 50)
    options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=50, max_seqlen_k=50, backend="triton")
    found = []
    for middle, changed in ((20, None), (33, None), (20, 1)):
        cu[1] = middle
        q = inputs["q"].detach().requires_grad_()
        out = decay_attention_varlen(**inputs | {"q": q}, **options)
        if changed is not None:
            cu[1] = changed
        found.append([out, *torch.autograd.grad(out.square().sum(), q)])
    assert all(map(torch.equal, found[0], found[2]))
    assert not any(map(torch.equal, found[0], found[1]))


# PyTorch


# every token is in a sequence, because opcheck compares the saved tensors, and for other tokens nothing is saved
PLACES = {"padded": [[0, 12, 0, 20], [0, 20, 0, 20]], "packed": [[0, 9, 0, 8], [9, 0, 8, 3], [9, 10, 11, 9]]}


@pytest.mark.parametrize(("layout", "decay"), [
    ("packed", "scalar"),
    *(pytest.param(layout, "constant", marks=[] if ON_GPU else pytest.mark.slow) for layout in ("padded", "packed")),
])
def test_opcheck(layout, decay):
    inputs = make(20, 20, decay, batch=2 if layout == "padded" else 1, row_scale=True)
    bias = torch.randn(20, 20, device=DEVICE) if layout == "padded" else None
    values = dict(
        **{name: inputs[name].requires_grad_() for name in ("q", "k", "v", "log_decay")}, row_scale=inputs["scale"],
        bounds=int32(*PLACES[layout]), bias=bias, sink=torch.randn(2, device=DEVICE, requires_grad=True),
        scale=1.0, causal=True, window=[6, -1],
        longest=[10, 9] if layout == "packed" else None, skip_tolerance=0.5, backend="triton", with_lse=True,
    )
    forward, backward = torch.ops.decayattn.forward.default, torch.ops.decayattn.backward.default
    torch.library.opcheck(forward, tuple(values[x.name] for x in forward._schema.arguments))

    values = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in values.items()}
    results = forward(*(values[x.name] for x in forward._schema.arguments))
    values |= dict(zip((x.name for x in forward._schema.returns), results, strict=True))
    values |= dict(d_out=torch.ones_like(values["out"]), d_lse=torch.randn_like(values["lse"]))
    values |= dict(decay_gradient=True, bias_gradient=bias is not None, sink_gradient=True)
    torch.library.opcheck(backward, tuple(values[x.name] for x in backward._schema.arguments))
