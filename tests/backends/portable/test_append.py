"""New tokens in a cache: the kernel against the eager code, and that against the definition."""

import copy
import math

import pytest
import torch
from pairwise import pairwise

from decayattn import reference
from decayattn.backends.portable.append import append
from decayattn.reference import CacheBuffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, KV_HEADS, ROOM = 3, 4, 2, 400


def held(dim=16, value_dim=8, alpha=True, dtype=torch.float16, lengths=(0, 5, 130)):
    """A cache that holds some tokens; beyond a length, NaN."""
    keys = torch.randn(BATCH, ROOM, KV_HEADS, dim, device=DEVICE).to(dtype)
    values = torch.randn(BATCH, ROOM, KV_HEADS, value_dim, device=DEVICE).to(dtype)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    first = torch.tensor([[0] * HEADS, [0, 3, 4, 0], [0, 129, 7, 0]], dtype=torch.int32, device=DEVICE)
    evicted = torch.randn(BATCH, HEADS, dtype=torch.float64, device=DEVICE)
    sums = None
    if alpha:
        sums = -torch.rand(BATCH, HEADS, ROOM, dtype=torch.float64, device=DEVICE).cumsum(2).transpose(1, 2)
    for x in (keys, values, *([] if sums is None else [sums])):
        beyond = torch.arange(ROOM, device=DEVICE) >= lengths[:, None]
        x.masked_fill_(beyond.reshape(*beyond.shape, *(1,) * (x.ndim - 2)), torch.nan)
    return CacheBuffers(keys, values, lengths, first, evicted, sums)


def tokens(number, dim=16, value_dim=8, dtype=torch.float16, resets=0.1):
    """k, v and λ in other orders of axes than the cache's; λ also just below −746, which resets, and growing."""
    k = torch.randn(KV_HEADS, BATCH, number, dim, device=DEVICE).permute(1, 2, 0, 3).to(dtype)
    v = torch.randn(BATCH, KV_HEADS, number, value_dim, device=DEVICE).transpose(1, 2).to(dtype)
    log_decay = 0.5 - 2 * torch.rand(BATCH, HEADS, number, device=DEVICE).transpose(1, 2)
    chance = torch.rand_like(log_decay)
    log_decay = log_decay.masked_fill(chance < resets, -math.inf).masked_fill(chance < resets / 2, -746.1)
    return k, v, log_decay


@pytest.mark.parametrize(
    ("number", "counted", "alpha"), pairwise([1, 2, 17, 129, 260], [None, (0, 1, 7), (260, 0, 3)], [True, False])
)
def test_kernel_equals_eager_code(number, counted, alpha):
    torch.manual_seed(number)
    k, v, log_decay = tokens(number)
    if not alpha:
        log_decay = None
    if counted is not None:
        k[1, 1:], v[1, 1:] = torch.nan, torch.nan  # padding, which is not read
        counted = torch.tensor(counted, dtype=torch.int32, device=DEVICE).clamp(max=number)
    eager = held(alpha=alpha)
    kernel = copy.deepcopy(eager)
    expected = reference.append(eager, k, v, log_decay, counted)
    found = append(kernel, k, v, log_decay, counted)
    assert torch.equal(found, expected)
    for name, got, want in zip(CacheBuffers._fields, kernel, eager, strict=True):
        if name == "alpha" and alpha:
            torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14, equal_nan=True)
        elif want is not None:
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), name
    if not alpha:
        assert kernel.alpha is None


@pytest.mark.parametrize("run", [reference.append, append])
def test_alpha_continues_one_sum_and_resets_hide_the_past(run):
    torch.manual_seed(0)
    k, v, log_decay = tokens(40, dim=24, value_dim=5, dtype=torch.float32)
    state = held(24, 5, dtype=torch.float32)
    after = copy.deepcopy(state)
    first = run(after, k, v, log_decay, None)
    for b, length in enumerate((0, 5, 130)):
        assert torch.equal(after.keys[b, length : length + 40], k[b])
        assert torch.equal(after.values[b, length : length + 40], v[b])
        for h in range(HEADS):
            alpha = float(state.alpha[b, length - 1, h]) if length else 0.0
            seen, reset = int(state.first[b, h]), False
            for t in range(40):
                rate = float(log_decay[b, t, h])
                if rate < -746:
                    seen, reset = max(seen, length + t), reset or length + t > 0
                elif length + t > 0:
                    alpha += rate
                assert float(after.alpha[b, length + t, h]) == pytest.approx(alpha, rel=1e-13, abs=1e-13)
                assert int(first[b, h, t]) == seen
            assert int(after.first[b, h]) == seen
            assert float(after.log_evicted[b, h]) == (-math.inf if reset else float(state.log_evicted[b, h]))
