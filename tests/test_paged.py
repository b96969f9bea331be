"""A cache in pages: what a contiguous one gives, bit by bit, whatever pages its tokens are in."""

import copy
import math
import mmap
from unittest import mock

import pytest
import torch
from judged_calls import make_inputs
from pairwise import pairwise

from decayattn import decay_attention, decay_attention_paged
from decayattn.backends.runtime import launching
from decayattn.nn import DecayCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["reference", "triton"]
DECAYS = ["none", "constant", "scalar"]
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 16, 8
# new tokens of each of three entries, call by call
CALLS = (5, 1, 24, 1, 3)
BATCH, TOKENS = 3, sum(CALLS)


pytestmark = pytest.mark.usefixtures("no_gradients")


def make(decay="scalar", dtype=torch.float32) -> dict:
    """q, k, v and log_decay of all tokens."""
    kind = "resets" if decay == "scalar" else decay
    inputs = make_inputs(dtype, kind, False, TOKENS, TOKENS, HEADS, KV_HEADS, batch=BATCH, dim=DIM, device=DEVICE)
    return {name: inputs[name] for name in ("q", "k", "v", "log_decay")}


class Engine:
    """Pages in no order, of which those in use hold tokens and the others NaN, and tables with nonsense behind them."""

    def __init__(self, page: int, dtype: torch.dtype, per_token: bool, blocks: int | None = None):
        needed = -(-TOKENS // page)
        self.blocks = needed + 2 if blocks is None else blocks
        pages = BATCH * needed + 3
        shape = (pages, page, KV_HEADS)
        self.k_pages = torch.full((*shape, DIM), math.nan, device=DEVICE, dtype=dtype)
        # heads before tokens in memory, as some engines have them
        of_heads = torch.full((pages, KV_HEADS, page, VALUE_DIM), math.nan, device=DEVICE, dtype=dtype)
        self.v_pages = of_heads.transpose(1, 2)
        self.alpha_pages = self.first = None
        if per_token:
            self.alpha_pages = torch.full((pages, page, HEADS), math.nan, device=DEVICE, dtype=torch.float64)
            self.first = torch.zeros(BATCH, HEADS, device=DEVICE, dtype=torch.int32)
        generator = torch.Generator().manual_seed(page)
        order = torch.randperm(pages, generator=generator)[: BATCH * needed].reshape(BATCH, needed)
        table = torch.full((BATCH, max(needed, self.blocks)), 10**6, dtype=torch.int32)
        table[:, :needed] = order
        self.block_table = table[:, : self.blocks].to(DEVICE)
        self.lengths = torch.zeros(BATCH, device=DEVICE, dtype=torch.int32)

    def attend(self, q, k=None, v=None, log_decay=None, **options):
        out = decay_attention_paged(
            q, self.k_pages, self.v_pages, log_decay, block_table=self.block_table, cache_seqlens=self.lengths, k=k,
            v=v, alpha_pages=self.alpha_pages, first=self.first, **options,
        )
        if k is not None:
            self.lengths += k.shape[1]
        return out

    def tokens(self, pages: torch.Tensor) -> torch.Tensor:
        """Consecutive tokens of every entry."""
        needed = -(-TOKENS // pages.shape[1])
        return pages[self.block_table[:, :needed].long()].flatten(1, 2)[:, : int(self.lengths[0])]


def parts(inputs):
    """The tokens of every call."""
    begin = 0
    for tokens in CALLS:
        mine = slice(begin, begin + tokens)
        yield {n: x[:, mine] if x is not None and x.ndim > 1 else x for n, x in inputs.items()}
        begin += tokens


@pytest.mark.parametrize(
    ("backend", "page", "decay", "windowed"), pairwise(BACKENDS, [1, 7, 16, 64], DECAYS, [False, True])
)
def test_pages_equal_a_contiguous_cache_bit_by_bit(backend, page, decay, windowed):
    inputs = make(decay)
    options = {"window_size": (9, 0), "scale": 0.3} if windowed else {}
    engine = Engine(page, torch.float32, decay == "scalar")
    cache = DecayCache(
        BATCH, engine.blocks * page, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, value_dim=VALUE_DIM,
        device=DEVICE, dtype=torch.float32,
    )
    sink = torch.randn(HEADS, device=DEVICE) if page == 7 else None
    for n, part in enumerate(parts(inputs)):
        longest = cache.longest + part["q"].shape[1]  # into as many parts are the keys divided
        found = engine.attend(**part, sink=sink, backend=backend, max_seqlen=longest, **options)
        expected = cache.attend(**part, sink=sink, backend=backend, **options)
        if n > 0:  # a cache gives its first tokens to decay_attention
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(engine.tokens(engine.k_pages), cache.keys[:, : cache.longest])
        assert torch.equal(engine.tokens(engine.v_pages), cache.values[:, : cache.longest])
        if decay == "scalar":
            assert torch.equal(engine.tokens(engine.alpha_pages), cache.alpha[:, : cache.longest])
            assert torch.equal(engine.first, cache.first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
def test_rows_equal_the_whole_sequence(backend, decay):
    inputs = make(decay, torch.float64)
    engine = Engine(16, torch.float64, decay == "scalar")
    found = [engine.attend(**part, backend=backend, return_lse=True) for part in parts(inputs)]
    out, lse = decay_attention(**inputs, return_lse=True, backend="reference")
    torch.testing.assert_close(torch.cat([x for x, _ in found], 1), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([x for _, x in found], 2), lse, rtol=1e-12, atol=1e-12)
    # read once more, without new tokens
    rates = None if decay == "scalar" else inputs["log_decay"]
    again = engine.attend(inputs["q"][:, -1:], log_decay=rates, backend=backend)
    torch.testing.assert_close(again, out[:, -1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_without_a_page_are_not_written_or_seen(backend):
    inputs = make("scalar", torch.float64)
    engine = Engine(16, torch.float64, True, blocks=2)
    untouched = [n for n in range(len(engine.k_pages)) if n not in engine.block_table.flatten().tolist()]
    engine.attend(**{n: x[:, :40] for n, x in inputs.items()}, backend=backend)
    for pages in (engine.k_pages, engine.v_pages, engine.alpha_pages):
        assert pages[untouched].isnan().all()
    written = engine.k_pages[engine.block_table.long()].flatten(1, 2)
    assert torch.equal(written, inputs["k"][:, :32])
    engine.attend(**{n: x[:, 40:43] for n, x in inputs.items()}, backend=backend)  # the newest token has none, either
    assert torch.equal(engine.k_pages[engine.block_table.long()].flatten(1, 2), written)
    for pages in (engine.k_pages, engine.v_pages, engine.alpha_pages):
        assert pages[untouched].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", DECAYS)
def test_rows_keep_positions_with_tokens_without_a_page(decay, backend):
    """Six new tokens, of which some entries have pages for all and others for some; then the same rows once more."""
    inputs = make(decay, torch.float64) | {"scale": torch.randn(BATCH, TOKENS, HEADS).double().to(DEVICE)}
    expected = decay_attention(**inputs, window_size=(9, 0), return_lse=True, backend="reference")
    engine, counts = Engine(8, torch.float64, decay == "scalar", blocks=3), [20, 0, 23]

    def of(entry, tokens):
        return {n: x[entry, tokens] if x is not None and x.ndim > 1 else x for n, x in inputs.items()}

    for b, count in enumerate(counts):
        if count == 0:
            continue
        own, one = slice(b, b + 1), copy.copy(engine)
        one.block_table, one.lengths = engine.block_table[own], engine.lengths[own].clone()
        one.first = None if engine.first is None else engine.first[own]
        one.attend(**of(own, slice(count)))
    engine.lengths = torch.tensor(counts, device=DEVICE)
    entry = torch.arange(BATCH, device=DEVICE)[:, None]
    new = of(entry, engine.lengths[:, None] + torch.arange(6, device=DEVICE))
    options = dict(window_size=(9, 0), return_lse=True, backend=backend)
    found = [engine.attend(**new, **options)]
    if decay != "scalar":  # there, `first` is that of all rows
        found.append(engine.attend(new["q"], log_decay=new["log_decay"], scale=new["scale"], max_seqlen=99, **options))
    for out, lse in found:
        for b, count in enumerate(counts):
            rows, placed = slice(count, min(count + 6, 24)), slice(min(6, 24 - count))
            torch.testing.assert_close(out[b, placed], expected[0][b, rows], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse[b, :, placed], expected[1][b, :, rows], rtol=1e-12, atol=1e-12)


def test_pages_may_have_columns_far_apart():
    """More than 2³¹ numbers lie between the first and the last one of a key, as where columns come before pages."""
    apart = 2**31 // (DIM - 1) + 4096
    numbers = torch.frombuffer(mmap.mmap(-1, 2 * DIM * apart), dtype=torch.float16)  # untouched pages take no memory
    if DEVICE.type == "cuda":
        numbers = torch.zeros(DIM * apart, dtype=torch.float16, device=DEVICE)
    k_pages = numbers.as_strided((2, 16, 1, DIM), (16, 1, 1, apart))
    v_pages = torch.zeros(2, 16, 1, DIM, dtype=torch.float16, device=DEVICE)
    q, k, v = torch.randn(3, 1, 4, 1, DIM, device=DEVICE).half()
    table, lengths = torch.tensor([[1, 0]]).int().to(DEVICE), torch.zeros(1, device=DEVICE).int()
    written = decay_attention_paged(
        q, k_pages, v_pages, -0.1, block_table=table, cache_seqlens=lengths, k=k, v=v, backend="triton"
    )
    assert torch.equal(k_pages[1, :4], k[0])
    torch.testing.assert_close(written, decay_attention(q, k, v, -0.1), atol=2e-3, rtol=0)


def test_tables_of_other_widths_compile_again(monkeypatch):
    """Kernels are compiled for numbers that are 1 or multiples of 16, as the tokens of a table are or are not."""
    monkeypatch.setattr(launching, "of_call", spy := mock.Mock(wraps=launching.of_call))
    inputs = {n: x[:, :1] for n, x in make().items()}
    for blocks in (4, 5):
        engine = Engine(1, torch.float32, True)
        engine.block_table = engine.block_table[:, :blocks]  # of the same strides
        engine.attend(**inputs, max_seqlen=4, backend="triton")
    calls = [call.args[1:] for call in spy.call_args_list]
    asked = [(*(None if x is None else x.stride() for x in tensors), *modes) for tensors, *modes in calls]
    assert len(asked) == 4  # append and decode
    assert asked[0] != asked[2]
    assert asked[1] != asked[3]


def arguments(decay="scalar"):
    engine, inputs = Engine(16, torch.float32, decay == "scalar"), make(decay)
    given = dict(
        k_pages=engine.k_pages, v_pages=engine.v_pages, block_table=engine.block_table, cache_seqlens=engine.lengths,
        alpha_pages=engine.alpha_pages, first=engine.first,
    )
    return given | {n: x[:, :2] if x is not None and x.ndim > 1 else x for n, x in inputs.items()}


@pytest.mark.parametrize(("decay", "changed", "error", "message"), [
    ("none", dict(v=None), ValueError, "v: expected a tensor with k, got None"),
    ("none", dict(k=None), ValueError, "v: expected None without k"),
    ("none", dict(k_pages=torch.zeros(3, 4)), ValueError, "k_pages: expected shape"),
    ("none", dict(v_pages=torch.zeros(3, 4, 2, 8)), ValueError, "v_pages: expected the pages"),
    ("none", dict(k_pages=torch.zeros(3, 0, 2, 16)), ValueError, "k_pages: expected at least one"),
    ("none", dict(block_table=torch.zeros(3, 2)), TypeError, "block_table: expected torch.int32"),
    ("none", dict(block_table=torch.zeros(2, 2).int()), ValueError, "block_table: expected"),
    ("none", dict(q=torch.zeros(3, 1, 4, 16)), ValueError, "k: expected the tokens of q"),
    ("none", dict(backend="hopper"), ValueError, "hopper"),
    ("none", dict(q=torch.zeros(3, 2, 4, 16).double()), TypeError, "k_pages: expected torch.float64"),
    ("none", dict(alpha_pages=torch.zeros(1)), ValueError, "log_decay: expected one per new token"),
    ("constant", dict(alpha_pages=torch.zeros(1)), ValueError, "alpha_pages: expected None"),
    ("scalar", dict(alpha_pages=None), ValueError, "alpha_pages: expected a tensor with a log_decay"),
    ("scalar", dict(alpha_pages=torch.zeros(2, 2, 4).double()), ValueError, "alpha_pages: expected"),
    ("scalar", dict(first=None), ValueError, "first: expected .* with alpha_pages"),
    ("scalar", dict(first=None, k=None, v=None, log_decay=None), ValueError, "first: expected .* with alpha_pages"),
    ("scalar", dict(first=torch.zeros(3, 3).int()), ValueError, "first: expected contiguous"),
])
def test_errors_name_bad_arguments_of_paged_attention(decay, changed, error, message):
    given = arguments(decay)
    before = [given[name].clone() for name in ("k_pages", "v_pages")]
    changed = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changed.items()}
    with pytest.raises(error, match=message):
        decay_attention_paged(**given | changed)
    for name, x in zip(("k_pages", "v_pages"), before, strict=True):
        torch.testing.assert_close(given[name], x, rtol=0, atol=0, equal_nan=True)


def test_paged_attention_refuses_gradients_and_other_names():
    given = arguments("none")
    with pytest.raises(TypeError, match=r"softmax_scale: unexpected .* of decay_attention_paged; use scale"):
        decay_attention_paged(**given, softmax_scale=0.1)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="k: expected no gradient"):
        decay_attention_paged(**given | {"k": given["k"].requires_grad_()})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["none", "scalar"])
def test_empty_pages_give_zeros(decay, backend):
    """Lengths and their bound are 0: rows before the first token."""
    engine, inputs = Engine(4, torch.float32, decay == "scalar"), make(decay)
    out, lse = engine.attend(inputs["q"][:, :2], max_seqlen=0, return_lse=True, backend=backend)
    assert (out == 0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("decay", DECAYS)
def test_meta_tensors_give_shapes(decay):
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments(decay).items()}
    out, lse = decay_attention_paged(**given, return_lse=True)
    assert (out.device.type, lse.device.type) == ("meta", "meta")
    assert out.shape == (*given["q"].shape[:3], VALUE_DIM)
    assert lse.shape == (BATCH, HEADS, given["q"].shape[1])
