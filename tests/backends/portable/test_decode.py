"""The decode kernels against the float64 oracle, within the error budget; and new tokens in a cache."""

import copy
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from judged_calls import DEVICE, ON_GPU
from pairwise import pairwise

from decayattn import decay_attention, reference
from decayattn.backends.portable import decode as decode_module
from decayattn.backends.portable.append import append
from decayattn.backends.portable.decode import decode, number_of_splits
from decayattn.problem import Inputs
from decayattn.reference import CacheBuffers
from decayattn.testing import assert_within_budget, verify_attention

# in the interpreter bfloat16 products are wrong
DTYPES = [torch.float16, torch.float32, torch.float64] + ([torch.bfloat16] if ON_GPU else [])


@dataclass
class Case:
    """Random inputs for entries of different lengths. Beyond a length, the kernels find NaN."""

    lengths: tuple[int, ...] = (0, 1, 37, 150)
    max_length: int = 160
    rows: int = 1
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    decay: str = "scalar"
    dtype: torch.dtype = torch.float32
    scale: object = 0.25
    left: int | None = None
    strength: float = 0.3
    heads_first: bool = True  # alpha in memory, as a DecayCache has it

    def __post_init__(self):
        self.device = torch.device("cuda" if ON_GPU else "cpu")
        batch, self.wide = len(self.lengths), torch.float64 if self.dtype == torch.float64 else torch.float32
        options, wide = dict(device=self.device, dtype=self.dtype), dict(device=self.device, dtype=self.wide)
        self.q = torch.randn(batch, self.rows, self.heads, self.dim, **options)
        self.keys = torch.randn(batch, self.max_length, self.kv_heads, self.dim, **options)
        self.values = torch.randn(batch, self.max_length, self.kv_heads, self.value_dim, **options)
        self.rates = self.log_decay = None
        if self.decay == "scalar":
            self.log_decay = -self.strength * torch.rand(batch, self.max_length, self.heads, **wide)
        elif self.decay == "constant":
            self.rates = -self.strength * torch.rand(self.heads, **wide)

    def run(self, **options):
        """The kernels' (out, lse); a reset is where log_decay is −inf."""
        lengths, alpha, first = torch.tensor(self.lengths, dtype=torch.int32, device=self.device), None, None
        token = torch.arange(self.max_length, device=self.device)
        beyond = token >= lengths[:, None]
        keys, values = (x.masked_fill_(beyond[..., None, None], torch.nan) for x in (self.keys, self.values))
        if self.log_decay is not None:
            resets = self.log_decay.isneginf()
            alpha = self.log_decay.double().masked_fill(resets, 0).cumsum(1).masked_fill(beyond[..., None], torch.nan)
            if self.heads_first:
                alpha = alpha.mT.contiguous().mT
            last = torch.where(resets, token[:, None], 0).cummax(1).values
            position = (lengths[:, None] - self.rows + token[: self.rows]).clamp(min=0)
            first = last.gather(1, position[..., None].expand(-1, -1, self.heads)).int().transpose(1, 2)
        scale = dict(row_scale=self.scale) if isinstance(self.scale, torch.Tensor) else dict(scale=self.scale)
        inputs = Inputs(self.q, keys, values, self.rates, **scale)
        return decode(inputs, lengths, alpha=alpha, first=first, left=self.left, **options)

    def check(self, **options):
        """Judge every entry as the last rows of its tokens. Only results: decoding has no gradients."""
        found = self.run(**options)
        assert [x.dtype for x in found] == [self.dtype, self.wide]
        comparisons = verify_attention(
            self.q, self.keys, self.values, self.rates if self.log_decay is None else self.log_decay, scale=self.scale,
            window_size=None if self.left is None else (self.left, 0),
            seqused_k=torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            attend=lambda q, **_: [x + 0 * q.sum() for x in found],
        )
        assert_within_budget([c for c in comparisons if c.name in ("out", "lse")])
        return found


CASES = [
    *(partial(Case, decay=decay, dtype=dtype, heads=4, value_dim=24) for decay in ("none", "constant", "scalar")
      for dtype in DTYPES),
    *(partial(Case, heads=heads, kv_heads=kv_heads, rows=rows, lengths=(2, 40, 100), max_length=100)
      for (heads, kv_heads), rows in pairwise([(3, 3), (4, 2), (6, 2), (8, 1), (20, 1)], [1, 3])),
    *(partial(Case, dim=dim, value_dim=value_dim, lengths=(50,), max_length=64)
      for dim, value_dim in ((1, 3), (40, 24), (64, 256), (256, 100))),
    *(partial(Case, left=left, decay=decay, rows=2, lengths=(1, 60, 150))
      for left, decay in pairwise([0, 5, 70, 1000], ["none", "constant", "scalar"])),
    partial(Case, strength=-0.3, dtype=torch.float64),
]


@pytest.mark.parametrize("make", CASES)
def test_calls_keep_the_budget(make):
    """Decays, dtypes, groups, rows, head dimensions, windows and growth."""
    make().check()


@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
def test_rows_before_the_first_key_see_nothing(decay):
    """More rows than a tile, and than a length: out 0, lse −inf."""
    case = Case(rows=45, lengths=(70, 30), max_length=70, decay=decay, kv_heads=1)
    out, lse = case.check()
    assert (out[1, :15] == 0).all()
    assert lse[1, :, :15].isneginf().all()
    assert lse[1, :, 15:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_per_row_and_head(dtype):
    case = Case(rows=2, dtype=dtype, lengths=(9, 90), max_length=100)
    per_head = torch.randn(case.heads, device=case.device, dtype=case.wide)
    for scale in (per_head.expand(2, 2, case.heads), torch.randn(2, 2, case.heads).to(per_head)):
        case.scale = scale
        case.check()


def test_resets_are_per_entry_head_and_row():
    case = Case(rows=4, lengths=(100, 60), max_length=100, dtype=torch.float64)
    for at in ((0, 0, 0), (0, 70, 0), (0, 98, 0), (0, 97, 1), (0, 99, 1), (1, 57, 0)):
        case.log_decay[at] = -torch.inf
    case.check()
    case.log_decay[:, 50] = -torch.inf
    case.check(longest=100)


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
@pytest.mark.parametrize("decay", ["constant", "scalar"])
def test_any_number_of_splits(splits, decay, monkeypatch):
    """Also more splits than tiles: those programs have nothing to add."""
    monkeypatch.setattr(decode_module, "number_of_splits", lambda *sizes: splits)
    Case(decay=decay, dtype=torch.float64, rows=2, kv_heads=1).check()


@pytest.mark.parametrize(("programs", "key_tiles", "least", "most"), [
    (1000, 1000, 1, 1), (1, 1, 1, 1), (1, 0, 1, 1), (16, 8, 2, 8), (16, 1000, 9, 64),
])
def test_splits_follow_from_the_work(programs, key_tiles, least, most):
    assert least <= number_of_splits(programs=programs, key_tiles=key_tiles, multiprocessors=100) <= most


def test_longest_only_sizes_the_launch():
    case = Case(dtype=torch.float64)
    case.check(longest=150)
    case.check(longest=1)  # even a wrong one


@pytest.mark.parametrize("layout", ["heads first", "reversed halves", "every second"])
def test_any_strides(layout):
    case = Case(decay="scalar", heads=4, rows=2)
    case.heads_first = False
    for name in ("q", "keys", "values"):
        x = getattr(case, name)
        if layout == "heads first":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "reversed halves":
            x = torch.cat([x, x], 3)[..., : x.shape[3]]
        else:
            x = torch.stack([x, x], 4).flatten(3)[..., ::2]
        setattr(case, name, x)
    case.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_strong_decay_stays_exact_at_any_position(dtype):
    """α near −7e5, with a float32 spacing of 0.06: the cache differs from a short one by its start alone."""
    case = Case(lengths=(100, 100), max_length=100, dtype=dtype, strength=0.02)
    case.q, case.keys, case.values = (x[:1].expand(2, -1, -1, -1).clone() for x in (case.q, case.keys, case.values))
    alpha = case.log_decay[:1].double().cumsum(1)
    out, lse = decode(
        Inputs(case.q, case.keys, case.values, scale=0.25),
        torch.tensor([100, 100], dtype=torch.int32).to(case.device), alpha=torch.cat([alpha, alpha - 7e5 - 1 / 3]),
    )
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=2 * torch.finfo(dtype).eps * case.values.abs().max().item())
    torch.testing.assert_close(lse[0], lse[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("run", [decode, reference.decode])
def test_sinks_change_out_and_lse(run):
    """Exact to the last bits in float64; with one rounding in float16, for scores of 0."""
    case = Case(lengths=(90,), max_length=90, rows=3, heads=4, dtype=torch.float64)
    sink = torch.tensor([-3.0, 0.0, 2.0, 100.0], device=case.device, dtype=torch.float64)
    want = decay_attention(
        case.q, case.keys, case.values, case.log_decay, scale=0.25, sink=sink, return_lse=True, backend="reference"
    )
    alpha = case.log_decay.double().cumsum(1)
    lengths = torch.tensor([90], dtype=torch.int32, device=case.device)
    found = run(Inputs(case.q, case.keys, case.values, sink=sink, scale=0.25), lengths, alpha=alpha)
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)

    values = case.values.half()
    found, _ = run(Inputs(torch.zeros_like(case.q).half(), case.keys.half(), values, sink=sink.float()), lengths)
    rows = torch.arange(88, 91, device=case.device)[:, None].double()
    exact = values.double().cumsum(1)[:, -3:].repeat_interleave(4 // values.shape[2], 2)
    exact /= (rows + sink.exp())[None, ..., None]
    assert (found == exact.half()).double().mean() > 0.95


@pytest.mark.parametrize("run", [decode, reference.decode])
def test_rows_without_a_key_are_0_for_any_sink(run):
    case = Case(lengths=(2,), max_length=90, rows=3, heads=4, dtype=torch.float64)
    sink = torch.tensor([-math.inf, 0.0, 2.0, -math.inf], device=case.device, dtype=torch.float64)
    lengths = torch.tensor([2], dtype=torch.int32, device=case.device)
    out, lse = run(Inputs(case.q, case.keys, case.values, sink=sink), lengths)
    assert (out[:, 0] == 0).all()
    assert lse[..., 0].isneginf().all()
    without, _ = run(Inputs(case.q, case.keys, case.values), lengths)
    none = sink.isneginf()
    torch.testing.assert_close(out[:, 1:, none], without[:, 1:, none])


@pytest.mark.parametrize(("batch", "rows"), [(0, 1), (2, 0)])
def test_nothing_to_compute(batch, rows):
    out, lse = Case(lengths=(5,) * batch, rows=rows).run()
    assert out.shape == (batch, rows, 2, 16)
    assert lse.shape == (batch, 2, rows)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_nan_in_a_query_stays_in_its_row():
    case = Case(rows=2, lengths=(100,))
    case.q[0, 1, 0, 3] = torch.nan
    out, lse = case.run()
    assert out[0, 1, 0].isnan().all()
    assert lse[0, 0, 1].isnan()
    assert out[0, 0].isfinite().all()
    assert out[0, 1, 1].isfinite().all()


# New tokens in a cache: the kernel against the eager code, and that against the definition

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
