"""The eager reference: equalities with torch's own attention, gradients by finite differences, and every refusal."""

import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from decayattn import decay_attention
from decayattn.testing import assert_within_budget, verify_attention

INF = math.inf


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def make_qkv(rows=11, keys=11, heads=4, kv_heads=4, batch=2, head_dim=8, value_dim=6):
    q = draw(batch, rows, heads, head_dim, seed=1)
    k = draw(batch, keys, kv_heads, head_dim, seed=2)
    v = draw(batch, keys, kv_heads, value_dim, seed=3)
    return q, k, v


def make_log_decay(keys=11, heads=4, batch=2, seed=4):
    return F.logsigmoid(draw(batch, keys, heads, seed=seed))


def attend(q, k, v, log_decay=None, **options):
    return decay_attention(q, k, v, log_decay, return_lse=True, backend="reference", **options)


def with_gradients(function, *tensors):
    """function's outputs and the gradients of a fixed random projection of them."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [draw(*output.shape, seed=9 + n) for n, output in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, leaves, weights)
    return [*(output.detach() for output in outputs), *gradients]


def assert_equal_up_to_rounding(found, expected):
    """Two float64 evaluations of the same numbers of size 1 in another order: a few hundred roundings at most."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0, atol=1000 * torch.finfo(torch.float64).eps)


def sdpa(q, k, v, bias=None, is_causal=False, scale=None):
    q, k, v = (rearrange(t, "b t h d -> b h t d") for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return rearrange(out, "b h t d -> b t h d")


# Equalities


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("log_decay", [None, 0.0, torch.zeros(4).double(), torch.zeros(2, 11, 4).double()])
def test_no_decay_is_torch_attention(causal, kv_heads, log_decay):
    qkv = make_qkv(kv_heads=kv_heads)
    ours = with_gradients(lambda *x: attend(*x, log_decay, causal=causal, scale=0.3)[0], *qkv)
    assert_equal_up_to_rounding(ours, with_gradients(lambda *x: sdpa(*x, is_causal=causal, scale=0.3), *qkv))


@pytest.mark.parametrize(("rows", "keys", "causal"), [
    (11, 11, True), (4, 11, True), (11, 11, False), (4, 11, False), (11, 4, False),
])  # fmt: skip
def test_constant_decay_is_an_alibi_bias(rows, keys, causal):
    slopes = torch.tensor([-0.5, -0.25, -0.125, 0.1], dtype=torch.float64)
    i = torch.arange(rows)[:, None] + keys - rows
    j = torch.arange(keys)

    def biased(q, k, v, slopes):
        bias = slopes[:, None, None] * (i - j).abs()
        return sdpa(q, k, v, bias.masked_fill(j > i, -INF) if causal else bias)

    tensors = (*make_qkv(rows, keys), slopes)
    ours = with_gradients(lambda *x: attend(*x, causal=causal)[0], *tensors)
    assert_equal_up_to_rounding(ours, with_gradients(biased, *tensors))


@pytest.mark.parametrize("causal", [True, False])
def test_scalar_decay_is_a_bias_of_path_sums(causal):
    """The decay of a pair written as the plain sum of λ over (min(i, j), max(i, j)]."""
    i, j, t = torch.arange(11)[:, None, None], torch.arange(11)[:, None], torch.arange(11)
    path = ((t > torch.minimum(i, j)) & (t <= torch.maximum(i, j))).double()

    def biased(q, k, v, log_decay):
        bias = torch.einsum("ijt,bth->bhij", path, log_decay)
        return sdpa(q, k, v, bias.masked_fill(i[..., 0] < t, -INF) if causal else bias)

    tensors = (*make_qkv(), draw(2, 11, 4, seed=5))  # decays and growth
    ours = with_gradients(lambda *x: attend(*x, causal=causal)[0], *tensors)
    assert_equal_up_to_rounding(ours, with_gradients(biased, *tensors))


@pytest.mark.parametrize("value", [-0.2, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_number_constant_and_equal_tokens_agree(value, causal):
    qkv = make_qkv()
    forms = [value, *(torch.full(shape, value, dtype=torch.float64) for shape in ((), (4,), (2, 11, 4)))]
    first, *others = [with_gradients(lambda *x, form=form: attend(*x, form, causal=causal), *qkv) for form in forms]
    for other in others:
        assert_equal_up_to_rounding(other, first)


@given(seed=st.integers(0, 99), cut=st.integers(1, 10), causal=st.booleans())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_reset_makes_two_sequences(seed, cut, causal):
    tensors = (*make_qkv(), make_log_decay(seed=seed))
    tensors[3][:, cut] = -INF

    def split(q, k, v, log_decay):
        pieces = (slice(None, cut), slice(cut, None))
        results = [attend(*(t[:, at] for t in (q, k, v, log_decay)), causal=causal) for at in pieces]
        return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)

    whole = with_gradients(lambda *x: attend(*x, causal=causal), *tensors)
    assert_equal_up_to_rounding(whole, with_gradients(split, *tensors))
    assert (whole[-1][:, cut] == 0).all()
    assert (whole[-1][:, 0] == 0).all()


def test_resets_are_per_head():
    qkv, log_decay = make_qkv(), make_log_decay()
    plain, _ = attend(*qkv, log_decay)
    log_decay[0, 5, 2] = -INF
    out, _ = attend(*qkv, log_decay)
    changed = (out != plain).any(-1)
    assert changed[0, 5:, 2].all()
    changed[0, 5:, 2] = False
    assert not changed.any()


def test_a_reset_and_growth_survive_extreme_values():
    q, k, v = make_qkv()
    log_decay = torch.full((2, 11, 4), -300.0, dtype=torch.float64)
    log_decay[:, 3], log_decay[:, 7] = 400.0, -INF
    results = with_gradients(lambda *x: attend(*x), q, k, v, log_decay)
    assert all(result.isfinite().all() for result in results)


def test_grouped_heads_are_repeated_heads():
    q, k, v = make_qkv(kv_heads=2)
    log_decay = make_log_decay()

    def repeated(q, k, v, log_decay):
        return attend(q, *(repeat(t, "b t h d -> b t (h g) d", g=2) for t in (k, v)), log_decay)

    grouped = with_gradients(attend, q, k, v, log_decay)
    assert_equal_up_to_rounding(grouped, with_gradients(repeated, q, k, v, log_decay))


@pytest.mark.parametrize("log_decay", [None, -0.2, "scalar"])
def test_a_shorter_query_axis_is_the_last_rows(log_decay):
    q, k, v = make_qkv()
    log_decay = make_log_decay() if log_decay == "scalar" else log_decay
    for causal in (True, False):
        out, lse = attend(q, k, v, log_decay, causal=causal)
        last = attend(q[:, 7:], k, v, log_decay, causal=causal)
        assert_equal_up_to_rounding(last, (out[:, 7:], lse[..., 7:]))


def test_row_scales_multiply_queries():
    q, k, v = make_qkv()
    scale = draw(2, 11, 4, seed=7)
    ours = with_gradients(lambda q, s: attend(q, k, v, -0.1, scale=s), q, scale)
    scaled = with_gradients(lambda q, s: attend(q * s[..., None], k, v, -0.1, scale=1.0), q, scale)
    assert_equal_up_to_rounding(ours, scaled)


@pytest.mark.parametrize("shape", [(), (4,), (11, 1), (2, 1, 1), (1, 11, 4)])
def test_scales_broadcast(shape):
    qkv, scale = make_qkv(), draw(*shape, seed=7)
    found = with_gradients(lambda s: attend(*qkv, -0.1, scale=s), scale)
    expected = with_gradients(lambda s: attend(*qkv, -0.1, scale=s.expand(2, 11, 4).contiguous()), scale)
    assert_equal_up_to_rounding(found, expected)


# Edges


@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
@pytest.mark.parametrize("incoming", [1.0, INF, -INF, math.nan])
def test_rows_that_see_nothing(decay, incoming):
    """T_q > T_k: the first rows lie before the first key. out 0, lse −inf, gradients 0 whatever that of lse is."""
    q, k, v = (t.requires_grad_() for t in make_qkv(rows=11, keys=4))
    scale = torch.ones(2, 11, 4, dtype=torch.float64, requires_grad=True)
    log_decay = {"none": None, "constant": draw(4), "scalar": make_log_decay(keys=4)}[decay]
    leaves = [q, k, v, scale] + ([log_decay.requires_grad_()] if log_decay is not None else [])
    out, lse = attend(q, k, v, log_decay, scale=scale)
    assert (out[:, :7] == 0).all()
    assert (lse[..., :7] == -INF).all()
    assert lse[..., 7:].isfinite().all()
    grad_lse = torch.zeros_like(lse)
    grad_lse[..., :7] = incoming
    gradients = torch.autograd.grad([out, lse], leaves, [torch.zeros_like(out), grad_lse])
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_lengths_zero_and_one(decay, lengths):
    rows, keys = lengths
    q, k, v = make_qkv(rows, keys)
    log_decay = {"none": None, "constant": draw(4), "scalar": make_log_decay(keys=keys)}[decay]
    tensors = (q, k, v) if log_decay is None else (q, k, v, log_decay)
    out, lse, *gradients = with_gradients(attend, *tensors)
    assert out.shape == (2, rows, 4, 6)
    assert lse.shape == (2, 4, rows)
    if keys == 0:
        assert (out == 0).all()
        assert (lse == -INF).all()
    if lengths == (1, 1):
        assert_equal_up_to_rounding([out], [v])
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_the_first_log_decay_is_never_used(causal):
    tensors = (*make_qkv(), make_log_decay())
    *_, gradient = with_gradients(lambda *x: attend(*x, causal=causal), *tensors)
    assert (gradient[:, 0] == 0).all()
    assert (gradient[:, 1:] != 0).all()
    changed = tensors[3].clone()
    changed[:, 0] = -7.0
    assert_equal_up_to_rounding(attend(*tensors[:3], changed, causal=causal), attend(*tensors, causal=causal))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_results(dtype):
    q, k, v = (t.to(dtype) for t in make_qkv())
    out, lse = attend(q, k, v, make_log_decay().float())
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert decay_attention(q, k, v).dtype == dtype  # backend "auto", without the log-sum-exp


def test_alpha_does_not_lose_low_bits_with_length():
    """The decay of the last pair, after a long sequence of strong decay, to float32's own precision."""
    keys = 100_000
    log_decay = -torch.rand(1, keys, 1, generator=torch.Generator().manual_seed(0)) * 1.4
    q = torch.zeros(1, 1, 1, 1)
    k, v = torch.zeros(1, keys, 1, 1), torch.zeros(1, keys, 1, 1)
    v[0, -2] = 1.0
    near = attend(q, k[:, -50:], v[:, -50:], log_decay[:, -50:])[0]
    assert_within_budget(verify_attention(q, k, v, log_decay, backend="reference"))
    torch.testing.assert_close(attend(q, k, v, log_decay)[0], near, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_autocast_casts_the_products_and_not_the_decay():
    q, k, v = (t.float() for t in make_qkv())
    log_decay = make_log_decay().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attend(q, k, v, log_decay)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected = attend(*(t.bfloat16() for t in (q, k, v)), log_decay)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    (gradient,) = torch.autograd.grad(lse.sum(), log_decay)
    assert gradient.dtype == torch.float32
    # a decay below bfloat16's resolution still acts
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nudged = attend(q, k, v, log_decay * (1 + 1e-4))[1]
    assert not torch.equal(nudged, lse)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(*make_qkv())[0].dtype == torch.float64


# Gradients by finite differences


def check_inputs(decay, row_scale, rows=3, keys=4):
    q, k, v = make_qkv(rows, keys, heads=2, kv_heads=1, batch=1, head_dim=2, value_dim=3)
    log_decay = {"none": None, "constant": draw(2), "scalar": draw(1, keys, 2), "resets": draw(1, keys, 2)}[decay]
    if decay == "resets":
        # finite differences cannot step off −inf: the reset is put in behind the leaf
        log_decay[:, 2] = 0.0
    scale = draw(1, rows, 2, seed=8) if row_scale else None
    return [t.requires_grad_() for t in (q, k, v, log_decay, scale) if t is not None]


def check_function(decay, row_scale, causal):
    def function(q, k, v, *rest):
        rest = list(rest)
        scale = rest.pop() if row_scale else None
        log_decay = rest.pop() if rest else None
        if decay == "resets":
            log_decay = torch.where(torch.arange(log_decay.shape[1])[:, None] == 2, -INF, log_decay)
        return attend(q, k, v, log_decay, scale=scale, causal=causal)

    return function


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("row_scale", [False, True])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar", "resets"])
def test_gradcheck(decay, row_scale, causal):
    inputs = check_inputs(decay, row_scale)
    assert gradcheck(check_function(decay, row_scale, causal), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", ["constant", "scalar", "resets"])
def test_gradgradcheck(decay, causal):
    assert gradgradcheck(check_function(decay, True, causal), check_inputs(decay, True, rows=2, keys=3))


# Every refusal: what was wrong with which argument, what came, what was expected


def arguments(**changes):
    return {"q": torch.zeros(2, 5, 4, 8), "k": torch.zeros(2, 6, 2, 8), "v": torch.zeros(2, 6, 2, 7), **changes}


meta = {"device": "meta"}
REFUSALS = [
    ({"q": [1.0]}, TypeError, r"^q: expected a torch.Tensor, got \[1.0\] of type list"),
    ({"v": None}, TypeError, r"^v: expected a torch.Tensor, got None of type NoneType"),
    ({"k": torch.zeros(6, 2, 8)}, ValueError, r"^k: expected 4 dimensions \(batch, sequence.*got shape \(6, 2, 8\)"),
    ({"q": torch.zeros(2, 5, 4, 8).int()}, TypeError, r"^q: expected float16, bfloat16, float32 or .*got torch.int32"),
    ({"k": torch.zeros(2, 6, 2, 8).half()}, TypeError, r"^k: expected the dtype of q, torch.float32, got .*float16"),
    ({"v": torch.zeros(2, 6, 2, 7, **meta)}, ValueError, r"^v: expected the device of q, cpu, got meta"),
    ({"k": torch.zeros(3, 6, 2, 8)}, ValueError, r"^k: expected the batch size of q, 2, got 3"),
    ({"v": torch.zeros(2, 9, 2, 7)}, ValueError, r"^v: expected the sequence length of k, 6, got 9"),
    ({"v": torch.zeros(2, 6, 4, 7)}, ValueError, r"^v: expected the number of heads of k, 2, got 4"),
    ({"k": torch.zeros(2, 6, 2, 9)}, ValueError, r"^k: expected the head dimension of q, 8, got 9"),
    (
        {"k": torch.zeros(2, 6, 3, 8), "v": torch.zeros(2, 6, 3, 7)},
        ValueError,
        r"^k: its 3 heads must divide the 4 heads of q",
    ),
    (
        {"k": torch.zeros(2, 6, 0, 8), "v": torch.zeros(2, 6, 0, 7)},
        ValueError,
        r"^k: its 0 heads must divide the 4 heads of q",
    ),
    (
        {"q": torch.zeros(2, 5, 4, 257), "k": torch.zeros(2, 6, 2, 257)},
        ValueError,
        r"^q: expected a head dimension from 1 to 256, got 257",
    ),
    ({"v": torch.zeros(2, 6, 2, 0)}, ValueError, r"^v: expected a head dimension from 1 to 256, got 0"),
    ({"causal": 1}, TypeError, r"^causal: expected a bool, got 1 of type int"),
    (
        {"causal": False, "q": torch.zeros(2, 8, 4, 8), "log_decay": torch.zeros(2, 6, 4)},
        ValueError,
        r"^causal: False with a per-token log_decay needs T_q <= T_k.*first 2 query rows.*T_q = 8, T_k = 6",
    ),
    ({"log_decay": -INF}, ValueError, r"^log_decay: expected a finite number, got -inf"),
    ({"log_decay": math.nan}, ValueError, r"^log_decay: expected a finite number, got nan"),
    ({"log_decay": True}, TypeError, r"^log_decay: expected None, a number or a tensor, got True of type bool"),
    ({"log_decay": "alibi"}, TypeError, r"^log_decay: expected None, a number or a tensor, got 'alibi' of type str"),
    ({"log_decay": torch.zeros(4).bfloat16()}, TypeError, r"^log_decay: expected float32, got .*bfloat16.*\.float\(\)"),
    ({"log_decay": torch.zeros(4).half()}, TypeError, r"^log_decay: expected float32, got torch.float16.*\.float\(\)"),
    (
        {"log_decay": torch.zeros(4).double()},
        TypeError,
        r"^log_decay: expected float32 \(or float64 with float64 q, k, v\), got torch.float64",
    ),
    ({"log_decay": torch.zeros(4).int()}, TypeError, r"^log_decay: expected float32 .*got torch.int32"),
    ({"log_decay": torch.zeros(4, **meta)}, ValueError, r"^log_decay: expected the device of q, cpu, got meta"),
    (
        {"log_decay": torch.zeros(2, 5, 4)},
        ValueError,
        r"^log_decay: expected shape \(\) or \(H,\) = \(4,\) .*\(B, T_k, H\) = \(2, 6, 4\).*; got \(2, 5, 4\)",
    ),
    ({"log_decay": torch.zeros(2)}, ValueError, r"^log_decay: expected shape .*; got \(2,\)"),
    ({"scale": INF}, ValueError, r"^scale: expected a finite number, got inf"),
    ({"scale": False}, TypeError, r"^scale: expected None, a number or a tensor, got False of type bool"),
    ({"scale": torch.ones(4).double()}, TypeError, r"^scale: expected float32, bfloat16 or .*got torch.float64"),
    ({"scale": torch.ones(4).long()}, TypeError, r"^scale: expected float32, .*got torch.int64"),
    ({"scale": torch.ones(4, **meta)}, ValueError, r"^scale: expected the device of q, cpu, got meta"),
    (
        {"scale": torch.ones(6, 4)},
        ValueError,
        r"^scale: expected a tensor broadcastable to \(B, T_q, H\) = \(2, 5, 4\), got shape \(6, 4\)",
    ),
    ({"scale": torch.ones(1, 2, 5, 4)}, ValueError, r"^scale: expected a tensor .*got shape \(1, 2, 5, 4\)"),
    ({"backend": "flash"}, ValueError, r"^backend: expected one of 'auto', 'reference'.*, got 'flash'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS, ids=[message[1:40] for _, _, message in REFUSALS])
def test_bad_arguments_are_refused_by_name(changes, error, message):
    decay_attention(**arguments())  # good without the change
    with pytest.raises(error, match=message):
        decay_attention(**arguments(**changes))
