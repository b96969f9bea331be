"""Attention probabilities of chosen rows against decay_attention of one-hot values."""

import math

import pytest
import torch
from judged_calls import int32
from torch.autograd import gradcheck

from decayattn import attention_rows, decay_attention, decay_matrix

ROWS = [3, 0, -1, 3]


def make(decay, rows=7, keys=9, dtype=torch.float64):
    torch.manual_seed(0)
    q, k = torch.randn(2, rows, 4, 8, dtype=dtype), torch.randn(2, keys, 2, 8, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if decay in ("none", "number"):
        return q, k, {"none": None, "number": -0.3}[decay]
    log_decay = -torch.rand(4 if decay == "constant" else (2, keys, 4), dtype=wide)
    if decay == "resets":
        log_decay[0, 4, 1] = log_decay[1, 6] = -math.inf
    return q, k, log_decay


OPTIONS = {
    "plain": {},
    "window": {"window_size": (3, 1)},
    "sink": {"sink": torch.tensor([0.5, -1.0, -math.inf, 2.0], dtype=torch.float64)},
    "scale": {"scale": torch.linspace(-1, 1, 56, dtype=torch.float64).reshape(2, 7, 4)},
    "bias": {"bias": torch.linspace(-2, 2, 63, dtype=torch.float64).reshape(7, 9)},
    "mask": {"bias": torch.arange(9) % 3 != 1},
    "padded": {"seqused_q": int32(6, 7), "seqused_k": int32(8, 9), "leftpad_q": int32(1, 0), "leftpad_k": int32(2, 0)},
    "padded with a bias": {"seqused_k": int32(5, 0), "bias": torch.ones(7, 1, dtype=torch.float64)},
}


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", ["none", "number", "constant", "scalar", "resets"])
def test_rows_are_those_of_decay_attention(decay, causal, options):
    q, k, log_decay = make(decay)
    one_hot = torch.eye(9, dtype=q.dtype)[None, :, None].expand(2, 9, 2, 9)
    options = {"causal": causal, **OPTIONS[options]}
    expected = decay_attention(q, k, one_hot, log_decay, **options)[:, ROWS].transpose(1, 2)
    found = attention_rows(q, k, log_decay, ROWS, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_rows_ignore_padding():
    q, k, log_decay = make("scalar")
    padding = OPTIONS["padded"]
    clean = attention_rows(q, k, log_decay, ROWS, **padding)
    q[0, 0], k[0, :2], log_decay[0, :3] = math.nan, math.inf, math.nan
    assert torch.equal(attention_rows(q, k, log_decay, ROWS, **padding), clean)


def test_rows_have_gradients():
    leaves = [x.requires_grad_() for x in make("scalar", rows=3, keys=4)]
    assert gradcheck(lambda *x: attention_rows(*x, torch.tensor([1, 2]), seqused_k=int32(3, 4)), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_float32(dtype, device):
    q, k, log_decay = (x.to(device) for x in make("scalar", dtype=dtype))
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        found = attention_rows(q, k, log_decay, ROWS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, attention_rows(q.double(), k.double(), log_decay.double(), ROWS).float())


@pytest.mark.parametrize("causal", [True, False])
def test_decay_matrix_is_the_decay_alone(causal):
    log_decay = torch.tensor([[0.3, -0.5, -0.25, -math.inf, -0.125]], dtype=torch.float64)[..., None]
    kept = math.exp(-0.25), math.exp(-0.75), math.exp(-0.125)
    expected = torch.tensor([[kept[1], kept[0], 1, 0, 0], [0, 0, 0, kept[2], 1]], dtype=torch.float64)
    if not causal:
        expected[0, :3] = torch.tensor([kept[1], kept[0], 1])
    torch.testing.assert_close(decay_matrix(log_decay, [2, -1], causal=causal)[0, 0], expected)

    rates = torch.tensor([-0.5, 0.0, -1e9])
    distance = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    found = decay_matrix(rates, length=4, causal=causal)
    expected = torch.stack([(-0.5 * distance).exp(), torch.ones(4, 4), torch.eye(4)])
    torch.testing.assert_close(found, expected.tril() if causal else expected)


@pytest.mark.parametrize(("rows", "error", "message"), [
    ([7], ValueError, "rows: expected numbers from -7 to 6"),
    ([1.5], TypeError, "rows: expected a sequence of ints"),
    (torch.zeros(2), TypeError, "rows: expected int32 or int64"),
    (torch.zeros(2, 1, dtype=torch.int64), ValueError, "rows: expected shape"),
])
def test_bad_rows_are_named(rows, error, message):
    q, k, log_decay = make("scalar")
    with pytest.raises(error, match=message):
        attention_rows(q, k, log_decay, rows)


def test_bad_arguments_of_decay_matrix_are_named():
    with pytest.raises(ValueError, match="length: expected the number of keys"):
        decay_matrix(torch.zeros(3))
    with pytest.raises(ValueError, match="log_decay: expected"):
        decay_matrix(torch.zeros(3, 4))
    with pytest.raises(TypeError, match="log_decay: expected"):
        decay_matrix(torch.zeros(1, 4, 2, dtype=torch.bfloat16))
    assert decay_matrix(torch.zeros(1, 4, 2), []).shape == (1, 2, 0, 4)
