"""The eager reference: equalities with torch's own attention, and gradients by finite differences."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from judged_calls import int32
from pairwise import pairwise
from torch.autograd import gradcheck, gradgradcheck

from decayattn import decay_attention, decay_attention_varlen, reference
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


# Equalities


@pytest.mark.parametrize("value", [-0.2, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_number_constant_and_equal_tokens_agree(value, causal):
    qkv = make_qkv()
    forms = [value, *(torch.full(shape, value, dtype=torch.float64) for shape in ((), (4,), (2, 11, 4)))]
    first, *others = [with_gradients(lambda *x, form=form: attend(*x, form, causal=causal), *qkv) for form in forms]
    for other in others:
        assert_equal_up_to_rounding(other, first)


def test_resets_and_growth_take_extreme_values():
    q, k, v = make_qkv()
    log_decay = torch.full((2, 11, 4), -300.0, dtype=torch.float64)
    log_decay[:, 3], log_decay[:, 7] = 400.0, -INF
    results = with_gradients(lambda *x: attend(*x), q, k, v, log_decay)
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("shape", [(), (4,), (11, 1), (2, 1, 1), (1, 11, 4)])
def test_scales_broadcast(shape):
    qkv, scale = make_qkv(), draw(*shape, seed=7)
    found = with_gradients(lambda s: attend(*qkv, -0.1, scale=s), scale)
    expected = with_gradients(lambda s: attend(*qkv, -0.1, scale=s.expand(2, 11, 4).contiguous()), scale)
    assert_equal_up_to_rounding(found, expected)


# Windows, sinks, biases and sequences that do not fill their batch entries

WINDOWS = [None, (0, 0), (3, 0), (0, 2), (2, 4), (-1, 3), (4, -1)]
# first and number of rows, first and number of tokens: an empty sequence, one without rows, one without keys, more rows
# than keys, and rows and tokens that nothing takes
PLACES = [(1, 4, 0, 6), (5, 0, 6, 0), (5, 0, 6, 2), (5, 2, 9, 0), (7, 5, 9, 3)]
ROWS, KEYS = 14, 13


# cu_seqlens of PLACES; between them, tokens 8 to 9 are a sequence without queries
OFFSETS = {
    "cu_seqlens_q": int32(1, 5, 5, 5, 5, 7, 12), "cu_seqlens_k": int32(0, 6, 6, 8, 9, 9, 12), "max_seqlen_q": 9,
    "max_seqlen_k": 9,
}


def by_loops(q, k, v, log_decay, scale, causal, window, sink, places):
    """out and lse of one batch entry, one query row and one key at a time; places as in PLACES."""
    rows, heads = q.shape[:2]
    group = heads // k.shape[1]
    out = torch.zeros(rows, heads, v.shape[2], dtype=q.dtype)
    lse = torch.full((heads, rows), -INF, dtype=q.dtype) if sink is None else sink[:, None].repeat(1, rows)
    left, right = (INF if side < 0 else side for side in window or (-1, -1))
    for first_row, num_rows, first_key, num_keys in places:
        for row in range(num_rows):
            i = row + num_keys - num_rows
            for h in range(heads):
                scores, values = [], []
                for j in range(num_keys):
                    passed = range(min(i, j) + 1, max(i, j) + 1)  # the tokens that the two are apart
                    if (causal and j > i) or j < i - left or j > i + right:
                        continue
                    decay = torch.zeros((), dtype=q.dtype)
                    if log_decay is not None and log_decay.ndim == 1:
                        decay = log_decay[h] * len(passed)
                    elif log_decay is not None:
                        if i < 0:
                            continue
                        decay = sum((log_decay[first_key + t, h] for t in passed), decay)
                    if decay == -INF:
                        continue
                    at = first_key + j
                    scores.append(scale[first_row + row, h] * (q[first_row + row, h] @ k[at, h // group]) + decay)
                    values.append(v[at, h // group])
                if sink is not None:
                    scores, values = [*scores, sink[h]], [*values, torch.zeros_like(v[0, 0])]
                if scores:
                    scores = torch.stack(scores)
                    out[first_row + row, h] = scores.softmax(0) @ torch.stack(values)
                    lse[h, first_row + row] = scores.logsumexp(0)
    return out, lse


def make_options(decay, rows, keys, batch=2):
    """log_decay and scale of every row, with growth and resets."""
    log_decay = {"none": None, "constant": draw(4, seed=5)}.get(decay, draw(batch, keys, 4, seed=5))
    if decay == "resets":
        log_decay[draw(batch, keys, 4, seed=6) < -1.2] = -INF
    return log_decay, draw(batch, rows, 4, seed=7)


def attend_varlen(*args, **options):
    return decay_attention_varlen(*args, return_lse=True, backend="reference", **options)


def test_gradient_of_a_sink_has_its_own_memory():
    """gloo adds up views of other gradients wrongly, with no error."""
    q, k, v = (draw(1, 1, 2, 4, seed=seed) for seed in (1, 2, 3))
    sink = draw(2, seed=4).requires_grad_()
    (gradient,) = torch.autograd.grad(attend(q, k, v, None, sink=sink)[0].sum(), sink)
    assert gradient.stride() == (1,)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("decay", ["none", "constant", "scalar", "resets"])
def test_results_equal_loops_over_keys(decay, window, causal, with_sink):
    sink = draw(4, seed=8) if with_sink else None
    options = dict(causal=causal, window_size=window, sink=sink)

    q, k, v = make_qkv(6, 9, kv_heads=2)
    log_decay, scale = make_options(decay, 6, 9)
    padding = dict(seqused_q=int32(5, 30), seqused_k=int32(7, 30), leftpad_q=int32(1, -3), leftpad_k=int32(2, -5))
    for lengths, places in (
        ({}, [(0, 6, 0, 9)] * 2),
        (padding, [(1, 4, 2, 5), (0, 6, 0, 9)]),
        (dict(seqused_k=int32(3, 0)), [(0, 6, 0, 3), (0, 6, 0, 0)]),
    ):
        found = attend(q, k, v, log_decay, scale=scale, **options, **lengths)
        for b in range(2):
            own = log_decay if log_decay is None or log_decay.ndim == 1 else log_decay[b]
            expected = by_loops(q[b], k[b], v[b], own, scale[b], causal, window, sink, places[b : b + 1])
            assert_equal_up_to_rounding([x[b] for x in found], expected)

    q, k, v = (x[0] for x in make_qkv(ROWS, KEYS, kv_heads=2))
    log_decay, scale = make_options(decay, ROWS, KEYS)
    log_decay, scale = (log_decay[0] if decay in ("scalar", "resets") else log_decay), scale[0]
    found = attend_varlen(q, k, v, log_decay, scale=scale, **options, **OFFSETS)
    assert_equal_up_to_rounding(found, by_loops(q, k, v, log_decay, scale, causal, window, sink, PLACES))


def test_nan_stays_in_its_sequence():
    tensors = [*(x[0] for x in make_qkv(8, 8)), make_log_decay(keys=8)[0]]
    spoiled = [x.clone() for x in tensors]
    for x in spoiled:
        x[2] = math.nan

    def later(*tensors):
        cu = int32(0, 3, 8)
        out, lse = attend_varlen(*tensors, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5)
        return out[3:], lse[:, 3:]

    for found, expected in zip(with_gradients(later, *spoiled), with_gradients(later, *tensors), strict=True):
        assert torch.equal(found[-5:], expected[-5:])


def test_max_seqlen_cuts_longer_sequences():
    """Later tokens of a longer sequence count as outside."""
    q, k, v = (x[0] for x in make_qkv(8, 8))
    log_decay = make_log_decay(keys=8)[0]
    scale = draw(8, 4, seed=7)
    options = dict(cu_seqlens_q=int32(0, 5, 8), cu_seqlens_k=int32(0, 5, 8), max_seqlen_q=4, max_seqlen_k=3)
    found = attend_varlen(q, k, v, log_decay, scale=scale, **options)
    expected = by_loops(q, k, v, log_decay, scale, True, None, None, [(0, 4, 0, 3), (5, 3, 5, 3)])
    assert_equal_up_to_rounding(found, expected)


def test_windows_wider_than_the_sequence_hide_nothing():
    qkv, log_decay = make_qkv(), make_log_decay()
    for causal in (True, False):
        expected = attend(*qkv, log_decay, causal=causal)
        for window in ((-1, -1), (10, 10), (100, -1), [10, -1]):
            found = attend(*qkv, log_decay, causal=causal, window_size=window)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(2, 4, 6, 9), (4, 6, 9), (2, 1, 1, 9), (6, 1), ()])
def test_bias_is_added_to_scores(shape, causal):
    i, j = torch.arange(6)[:, None] + 3, torch.arange(9)
    hidden = (j > i) & causal

    def biased(q, k, v, bias):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        bias = bias.expand(2, 4, 6, 9).masked_fill(hidden, -INF)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)

    tensors = (*make_qkv(6, 9), draw(*shape, seed=5))
    ours = with_gradients(lambda q, k, v, bias: attend(q, k, v, causal=causal, bias=bias)[0], *tensors)
    assert_equal_up_to_rounding(ours, with_gradients(biased, *tensors))


# Edges


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
@pytest.mark.parametrize("incoming", [1.0, INF, -INF, math.nan])
def test_rows_without_keys_give_zeros(decay, incoming, with_sink):
    """T_q > T_k: the first rows lie before the first key. out 0, lse −inf or the sink, gradients 0 but the sink's."""
    log_decay, scale = make_options(decay, 11, 4)
    sink = draw(4, seed=8).requires_grad_() if with_sink else None
    leaves = [x.requires_grad_() for x in (*make_qkv(11, 4), scale, log_decay, sink) if x is not None]
    out, lse = attend(*leaves[:3], log_decay, scale=scale, sink=sink)
    assert (out[:, :7] == 0).all()
    assert (lse[..., :7] == (sink[:, None] if with_sink else -INF)).all()
    assert lse[..., 7:].isfinite().all()
    grad_lse = torch.zeros_like(lse)
    grad_lse[..., :7] = incoming
    gradients = torch.autograd.grad([out, lse], leaves, [torch.zeros_like(out), grad_lse])
    if with_sink and incoming == 1:
        assert_equal_up_to_rounding([gradients[-1]], [torch.full_like(sink, 2.0 * 7)])
    assert all((gradient == 0).all() for gradient in gradients[: len(leaves) - with_sink])


def test_alpha_keeps_low_bits_with_length():
    """The decay of the last pair, after a long sequence of strong decay, to float32's own precision."""
    keys = 100_000
    log_decay = -torch.rand(1, keys, 1, generator=torch.Generator().manual_seed(0)) * 1.4
    q = torch.zeros(1, 1, 1, 1)
    k, v = torch.zeros(1, keys, 1, 1), torch.zeros(1, keys, 1, 1)
    v[0, -2] = 1.0
    near = attend(q, k[:, -50:], v[:, -50:], log_decay[:, -50:])[0]
    assert_within_budget(verify_attention(q, k, v, log_decay, backend="reference"))
    torch.testing.assert_close(attend(q, k, v, log_decay)[0], near, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


# Gradients by finite differences


@pytest.fixture
def scores_at_once(monkeypatch):
    """scores_at_once(n) sets the size of a block; returns the list to which every block's number of scores is added."""
    sizes, softmax = [], reference.masked_softmax

    def install(most):
        monkeypatch.setattr(reference, "SCORES_AT_ONCE", most)
        monkeypatch.setattr(reference, "masked_softmax", lambda x, seen: sizes.append(x.numel()) or softmax(x, seen))
        return sizes

    return install


@pytest.mark.parametrize(("lengths", "causal", "window", "decay"), pairwise(
    [(11, 11), (6, 9), (9, 6)], [True, False], WINDOWS, ["none", "constant", "scalar", "resets"]
))
def test_blocks_of_rows_give_equal_results(decay, window, causal, lengths, scores_at_once):
    """Dense with a bias, padded with one that broadcasts, and packed."""
    rows, keys = lengths
    if rows > keys and not causal and decay in ("scalar", "resets"):
        return  # refused: rows before the first log-decay
    q, k, v = make_qkv(rows, keys, kv_heads=2)
    log_decay, scale = make_options(decay, rows, keys)
    tensors = [q, k, v, scale, draw(4, seed=8), draw(1, 4, rows, keys, seed=9), draw(1, keys, seed=10)]
    tensors += [] if log_decay is None else [log_decay]
    padding = dict(seqused_q=int32(rows - 1, rows), leftpad_k=int32(2, 0))
    packing = {f"cu_seqlens_{x}": int32(0, 2, 2, n - 1) for x, n in (("q", rows), ("k", keys))}
    packing |= dict(max_seqlen_q=rows, max_seqlen_k=keys)

    def everything(q, k, v, scale, sink, bias, row_bias, log_decay=None):
        options = dict(causal=causal, window_size=window, sink=sink)
        dense = attend(q, k, v, log_decay, scale=scale, bias=bias, **options)
        padded = attend(q, k, v, log_decay, scale=scale, bias=row_bias, **options, **padding)
        own = log_decay[0] if log_decay is not None and log_decay.ndim == 3 else log_decay
        packed = attend_varlen(q[0], k[0], v[0], own, scale=scale[0], **options, **packing)
        return tuple(x.masked_fill(x.isneginf(), 0) for x in (*dense, *padded, *packed))

    expected = with_gradients(everything, *tensors)
    for most in (1, 2 * 4 * 9 * 3):
        scores_at_once(most)
        assert_equal_up_to_rounding(with_gradients(everything, *tensors), expected)


@pytest.mark.parametrize("ends_q", [(0,), (0, 0), (0, 0, 3)])
def test_sequences_without_keys_have_gradients_of_zero(ends_q):
    """Zeros, and not None: another rank may wait in the backward that a graph without them leaves out."""
    leaves = [x.requires_grad_() for x in (draw(3, 2, 4), draw(3, 2, 4), draw(3, 2, 4), draw(3, 2), draw(3, 2))]
    q, k, v, log_decay, scale = leaves
    ends_k = int32(*[0] * len(ends_q))
    packing = dict(cu_seqlens_q=int32(*ends_q), cu_seqlens_k=ends_k, max_seqlen_q=3, max_seqlen_k=3)
    out, lse = attend_varlen(q, k, v, log_decay, scale=scale, **packing)
    grads = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert not out.any()
    assert lse.isneginf().all()
    assert not any(x.any() for x in grads)


@pytest.mark.parametrize("window", [None, (7, 0)])
def test_scores_of_a_block_are_bounded(window, scores_at_once):
    """Every block by SCORES_AT_ONCE; all of them by the pairs that causal rows, or windows, can see."""
    q, k, v = (draw(1, 64, 2, 4).requires_grad_() for _ in range(3))
    sizes = scores_at_once(2 * 64 * 4)
    attend(q, k, v, make_log_decay(64, 2, 1), window_size=window)[0].sum().backward()
    pairs = 64 * (4 + 7) if window else 64 * (64 + 4) // 2
    assert max(sizes) <= 2 * 64 * 4
    assert sum(sizes) <= 2 * 2 * pairs  # 2 heads, forward and backward


def test_packed_sequences_compute_their_own_scores(scores_at_once):
    """One long sequence and many short ones cost the sum of their squares, whatever max_seqlen allows."""
    lengths = [50, *[3] * 40]
    ends = int32(0, *itertools.accumulate(lengths))
    q, k, v = (draw(200, 2, 4) for _ in range(3))
    sizes = scores_at_once(2**30)
    attend_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=200, max_seqlen_k=200)
    assert sum(sizes) == 2 * sum(n**2 for n in lengths)


@pytest.mark.parametrize(("decay", "causal", "check"), [
    *itertools.product(["none", "constant", "scalar", "resets"], [True, False], [gradcheck]),
    pytest.param("constant", False, gradgradcheck, marks=pytest.mark.slow), ("scalar", True, gradgradcheck),
])
def test_gradcheck_with_everything(decay, causal, check, scores_at_once):
    """A window, a sink and a bias in padded sequences; a window and a sink in packed ones. A block for every row."""
    scores_at_once(1)
    rows, keys = 3, 4
    q, k, v = make_qkv(rows, keys, heads=2, kv_heads=1, batch=1, head_dim=2, value_dim=3)
    log_decay = {"none": None, "constant": draw(2), "scalar": draw(1, keys, 2), "resets": draw(1, keys, 2)}[decay]
    if decay == "resets":
        # finite differences cannot step off −inf: the reset is put in behind the leaf
        log_decay[:, 2] = 0.0
    leaves = [t.requires_grad_() for t in (q, k, v, log_decay, draw(1, rows, 2, seed=8)) if t is not None]
    sink, bias = draw(2, seed=5).requires_grad_(), draw(2, rows, keys, seed=6).requires_grad_()

    def attended(q, k, v, *rest, packed):
        *log_decay, scale, sink, bias = rest if not packed else (*rest, None)
        log_decay = log_decay[0] if log_decay else None
        if decay == "resets":
            log_decay = torch.where(torch.arange(keys)[:, None] == 2, -INF, log_decay)
        options = dict(causal=causal, window_size=(2, 1), sink=sink)
        if packed:
            per_token = log_decay is not None and log_decay.ndim == 3
            cu_q, cu_k = int32(0, rows - 2, rows - 2, rows), int32(0, 1, 1, keys - 1)
            out, lse = attend_varlen(
                q[0], k[0], v[0], log_decay[0] if per_token else log_decay, scale=scale[0], **options,
                cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=rows, max_seqlen_k=keys,
            )
        else:
            lengths = dict(seqused_q=int32(rows - 1), seqused_k=int32(keys), leftpad_k=int32(1))
            out, lse = attend(q, k, v, log_decay, scale=scale, bias=bias, **options, **lengths)
        return out, lse

    for packed in (False, True):
        assert check(lambda *x, packed=packed: attended(*x, packed=packed), [*leaves, sink, *[bias] * (not packed)])
