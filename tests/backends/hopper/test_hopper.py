"""The Hopper kernels against the float64 oracle by the error budget, and against themselves over many runs.

They run on a GPU of compute capability 9.0, or, without any GPU, on the CPU (gluon_on_cpu). There every kind of kernel
for head dimensions meets every option, and not each of its values. On a GPU compiling takes longest: a case has few
kernels, and loops over lengths and values. The order of warps is in test_hopper_on_cpu.py.
"""

import contextlib
import itertools
import math

import pytest
import torch
from gluon_on_cpu import python_of
from hopper_problems import (
    BF16,
    DEVICE,
    F16,
    HEADS,
    MIXED,
    PACKINGS,
    emulated,
    int32,
    make,
    make_packed,
    make_padded,
    on,
    random_packing,
    row_scales,
    verify,
)
from judged_calls import SINK_CHECKS, sink_rounds_once
from pairwise import pairwise

from decayattn import decay_attention, decay_attention_varlen, visited_fraction
from decayattn.backends.hopper import config
from decayattn.backends.hopper.forward import producer
from decayattn.backends.hopper.forward.shared import NORMAL
from decayattn.backends.planning import skipping
from decayattn.nn import DecayCache
from decayattn.testing import assert_within_budget, verify_attention, verify_attention_varlen

ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not ON_HOPPER, reason="needs compute capability 9.0, or no GPU")
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
DIMS, DECAYS, SIDES = [64, 128, 192, 256], ["none", "constant", "scalar"], [True, False]
# (D, decay, causal): all; and each pair of them
KERNELS = on([*itertools.product(DIMS, DECAYS, SIDES)], [
    (64, "scalar", True), (64, "none", False), (128, "constant", True), (128, "constant", False),
    (192, "scalar", True), (192, "scalar", False), (256, "scalar", True), (256, "none", False),
])
PAIRS = pairwise(DIMS, DECAYS, SIDES, also_on_gpu=True)


def slow_but(cases: list[tuple], *quick: int) -> list:
    """On a CPU, all but these cases are among the longer ones."""
    return on(cases, [x if n in quick else pytest.param(*x, marks=pytest.mark.slow) for n, x in enumerate(cases)])


@pytest.fixture(autouse=True)
def on_cpu():
    if DEVICE == "cuda":
        yield
        return
    with emulated():
        yield


@pytest.fixture
def passes(monkeypatch) -> list[int] | None:
    """State of every pass over the tiles of an item: NORMAL, unless it is sent again. None on a GPU."""
    if DEVICE == "cuda":
        return None
    found: list[int] = []
    world = python_of(producer.produce).__globals__
    stream = world["_stream"]

    def noted(shared, schedule, decay, count, sent, state, *others):
        found.append(int(state))
        return stream(shared, schedule, decay, count, sent, state, *others)

    monkeypatch.setitem(world, "_stream", noted)
    return found


@pytest.fixture
def deterministic(torch_settings):
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize(
    ("decay", "causal", "dim", "scales"),
    pairwise(DECAYS, SIDES, DIMS, on([[None], ["row", "head"]], [[None], ["row"], ["head"]])),
)
def test_kernels_keep_the_budget(decay, causal, dim, scales):
    """Float16, because bfloat16 hides errors of 1 %. Scales are one, one per row or one per head."""
    for lengths, per in itertools.product(on([(333,), (300, 427)], [(333,)]), scales):
        inputs = make(*lengths, kv_heads=2, decay=decay, dtype=F16, dim=dim)
        verify(inputs, causal=causal, scale=row_scales(inputs, per) if per else None)


def by_widths(*dims: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Head dimensions that have kernels in common, at most five together."""
    dims = sorted(dims, key=lambda pair: config.widths(*pair))
    groups = [[*group] for _, group in itertools.groupby(dims, lambda pair: config.widths(*pair))]
    return [group[n : n + 5] for group in groups for n in range(0, len(group), 5)]


@pytest.mark.parametrize("together", by_widths(*on(
    [*itertools.product([8, 40, 64, 96, 128, 192, 256], [8, 64, 104, 128, 200]), (136, 40), (136, 200), (248, 40),
     (64, 256)],
    [(8, 64), (40, 104), (96, 8), (152, 128), (136, 40), (192, 192), (248, 200), (64, 256)],
)), ids=str)
def test_other_head_dims(together):
    """Kernels fill up tiles with zeros to 64, 128, 192 or 256 columns, and write only those of the tensors."""
    for dim, value_dim in together:
        dims = dict(dim=dim, value_dim=value_dim)
        inputs = make(on(300, 150), heads=on(4, 1), dtype=F16, decay="none", **dims)
        # columns next to a slice hold values that must not be read
        verify({n: torch.cat([x, x * math.nan], -1)[..., : x.shape[-1]] for n, x in inputs.items() if x is not None})
        if DEVICE == "cuda":
            inputs = make(300, 427, kv_heads=2, **dims)
            verify(inputs)
            verify(inputs, scale=row_scales(inputs))
            verify(make_packed([300, 1, 77], **dims, decay="constant"))


LENGTHS = on(
    [*((n, n) for n in (1, 15, 63, 65, 127, 129, 257, 385, 1000)), (1, 1000), (37, 150), (65, 1000), (130, 140),
     (300, 427), (150, 37), (300, 130), (200, 1), (200, 1000)],
    [(1, 1), (1, 270), (150, 37)],
)


@pytest.mark.parametrize(("dim", "decay", "causal"), slow_but(KERNELS, 1, 2, 5, 6))
def test_lengths_that_divide_nothing(dim, decay, causal):
    """Queries are the last rows of the keys' axis."""
    for rows, keys in LENGTHS:
        if causal or rows <= keys:
            verify(make(rows, keys, decay=decay, dim=dim), causal=causal)


@gpu
@pytest.mark.parametrize("dim", DIMS)
def test_grouped_queries(dim):
    """Kernels are compiled for a size of groups: each size in one of three calls."""
    sizes = [dict(heads=2, kv_heads=1), dict(heads=6, kv_heads=2), dict(heads=8, kv_heads=1)] * 2
    one, two, three = sizes[DIMS.index(dim) % 3 :][:3]
    verify(make(500, dim=dim, **one))
    for causal in SIDES:
        verify(make(77, 500, dim=dim, decay="constant", **two), causal=causal)
    inputs = make(700, dim=dim, strength=1e-3, **three)
    inputs["k"][:, 5] *= 60
    verify(inputs, scale=row_scales(inputs))  # does tiles again


# on a CPU: one head of keys in either direction; three of five in the forward; and in the backward; three and two
@pytest.mark.parametrize(
    ("cache", "heads", "kv_heads"),
    on([(1, 6, 3), (2 << 20, 6, 3), (3 << 20, 6, 3)],
       [(1, 4, 4), pytest.param(1 << 17, 5, 5, marks=pytest.mark.slow), (1 << 18, 5, 5), (5 << 16, 6, 3)]),
)
def test_chunks_of_heads(cache, heads, kv_heads, monkeypatch):
    monkeypatch.setattr(config, "CACHE_BYTES", cache)
    monkeypatch.setattr(config, "MIN_CHUNK_TILES", 1)
    verify(make(on(1000, 150), heads=heads, kv_heads=kv_heads))
    if cache == 1 << 17:  # of packed heads, two of three in the backward
        monkeypatch.setattr(config, "CACHE_BYTES", 9 << 14)
        verify(make_packed([70, 0, 130], heads=3))
    if DEVICE == "cuda":
        for decay in ("scalar", "constant"):
            verify(make(300, batch=1, heads=7, decay=decay))
            verify(make(1000, heads=6, kv_heads=3, decay=decay, strength=2.0), skip_tolerance=1e-6)
        verify(make_packed([300, 1, 1000, 77], heads=6, kv_heads=3))


@pytest.mark.parametrize(("dim", "causal"), on(
    [*itertools.product(DIMS, SIDES)], slow_but([(64, True), (128, False), (192, False), (256, True)], 1, 3),
))
def test_resets_growth_and_groups(dim, causal):
    """Heads that decay, grow and decay strongly, and one of nothing but resets."""
    for share, strength in on([(0.003, 0.1), (0.03, 2.5), (0.003, 100.0), (0.5, 0.1), (1.0, 0.1)], [(0.02, None)]):
        inputs = make(on(600, 200), heads=4, kv_heads=2, dim=dim)
        log_decay = inputs["log_decay"]
        log_decay *= torch.tensor([1.0, -1.0, 30.0, 1.0], device=DEVICE)
        log_decay[torch.rand_like(log_decay) < share] = -torch.inf
        log_decay[..., 3] = -torch.inf
        verify(inputs, causal=causal)
        if DEVICE == "cuda":
            verify(inputs | dict(log_decay=torch.randn_like(log_decay)), causal=causal)
            inputs = make(1025, kv_heads=2, dim=dim, strength=strength)
            inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < share] = -torch.inf
            for tail in (inputs, inputs | dict(q=inputs["q"][:, -700:])):
                verify(tail, causal=causal)


@pytest.mark.parametrize(("dim", "causal"), slow_but([(64, True), (128, False), (192, True), (256, False)], 0, 3))
def test_huge_finite_decays_are_resets(dim, causal):
    inputs = make(140, 170, batch=1, heads=3, dim=dim)
    inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < 0.02] = -1e9
    verify(inputs, causal=causal)
    # at every token: each row has its own key only, whatever the logits
    inputs["q"][:, :, ::2] *= 30
    inputs["log_decay"] = torch.tensor([-1e30, -0.1, -747.0], device=DEVICE)
    verify(inputs, causal=causal, window_size=(100, 0) if causal else None)


@pytest.mark.parametrize(
    ("causal", "dim", "dtype"), [(True, 64, F16), (False, 64, BF16), (True, 128, BF16), (False, 128, F16)],
)
def test_own_pair_has_no_part_in_a_rates_gradient(causal, dim, dtype):
    """Its dS is about the gradient of lse here, and all others are a millionth of it."""
    rows, rates = on(700, 257), torch.tensor([-14.0, -17.0, -20.0], device=DEVICE)
    for more in on((0, 43), (43,) if dim == 64 else (0,)):
        inputs = make(rows, rows + more, heads=on(3, 1), decay="constant", dim=dim, dtype=dtype)
        verify(inputs | dict(log_decay=rates[: inputs["q"].shape[2]]), causal=causal)


# Scores and values of any size


@pytest.mark.parametrize(("dim", "decay", "causal", "fars"), on(
    [(*kernel, [slice(None, None, 97), *[slice(1), slice(640, 641)] * kernel[2]]) for kernel in PAIRS],
    [(64, "scalar", True, [slice(1)]), (128, "scalar", True, [slice(None, None, 97)]),
     (256, "scalar", True, [slice(None, None, 97)])],
), ids=str)
def test_far_keys_that_outweigh_the_own(dim, decay, causal, fars, passes):
    """By 0 to 120 in some heads, the first key most: sums overflow, and items are sent again, the last ones, too."""
    for far in fars:
        inputs = make(on(1500, 330), batch=on(3, 1), heads=on(8, 2), kv_heads=on(4, 2), dim=dim, decay=decay,
                      strength=1e-3)
        inputs["q"][..., 0] = 8.0
        there = inputs["k"][:, far, ::3, 0]
        there.copy_(120 * dim**0.5 / 8 * torch.linspace(1, 0, there.shape[1], device=DEVICE)[:, None])
        verify(inputs, causal=causal, skip_tolerance=None)
    assert passes is None or set(passes) > {NORMAL.value}


@pytest.mark.parametrize(("decay", "causal", "dim"), on(
    pairwise(DECAYS, SIDES, [64, 128, 256], also_on_gpu=True),
    [("none", False, 64), ("scalar", False, 128), ("constant", True, 256), ("scalar", False, 256)],
))
def test_far_key_and_then_a_larger_one(decay, causal, dim):
    """The sum of full tiles overflows. The maximum of a partial tile after them is so much larger that it scales all
    before to 0: 0 times infinity is an overflow, too."""
    inputs = make(64, 500, heads=1, dim=dim, decay=decay, strength=1e-3)
    inputs["q"][..., 0] = 8.0
    # all rows come to the first of these keys in a full tile and to the other one in a partial tile after it: to the
    # right of their own or, causal, where their windows begin
    for key, far in ((200, 60.0), (110 if causal else 499, 180.0)):
        inputs["k"][:, key, :, 0] = far * dim**0.5 / 8
    verify(inputs, causal=causal, skip_tolerance=None, window_size=(400, 0) if causal else None)


EDGES = [(82.0, 88.0), (83.0, 88.0), (83.0, 89.0), (84.0, 88.0)]


@pytest.mark.parametrize(("dim", "decay", "edges"), on(
    [*itertools.product([64, 128, 256], DECAYS, [EDGES])],
    [(64, "scalar", EDGES[:1]), (64, "none", EDGES[3:]), (128, "none", EDGES[1:3]), (256, "scalar", EDGES[2:3])],
))
def test_sums_at_the_edge_of_float32(dim, decay, edges):
    """A far key in a full tile, and one in a partial tile after it, exceed the row's maximum by e^82 to e^89.
    2^-126 is the least factor for a sum that there is: what the first one added may become nothing."""
    for scores in edges:
        inputs = make(64, 500, batch=1, heads=1, dim=dim, decay=decay, strength=1e-3)
        inputs["q"] *= 0.01
        inputs["q"][..., 0], inputs["k"][..., 0] = 8.0, 0.0
        for key, score in zip((200, 499), scores, strict=True):
            inputs["k"][:, key, :, 0] = score * dim**0.5 / 8
        compared = verify_attention(**inputs, causal=False, skip_tolerance=None, backend="hopper")
        # the gradient of a rate may be smaller than its budget, which cannot judge it then
        small = [c for c in compared if decay == "constant" and c.name == "dlog_decay" and c.verdict == "cannot tell"]
        assert_within_budget([c for c in compared if c not in small])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU does not count passes")
@pytest.mark.parametrize(("dim", "decay"), [(64, "none"), (64, "scalar"), (128, "constant"), (256, "scalar")])
def test_large_logits_need_no_second_pass(dim, decay, passes):
    """A row that sees few keys of its first tile takes the maximum of one that sees more: of up to 128 keys, or 64
    beyond 128 columns. These bound less: one call in four with a deviation of 24 needs a second pass."""
    inputs = make(500, dim=dim, decay=decay, strength=1e-3)
    for deviation in (16,) if dim > 128 else (16, 24):
        sized = {name: inputs[name] * deviation**0.5 for name in ("q", "k")}
        decay_attention(**inputs | sized, skip_tolerance=None, backend="hopper")
        assert set(passes) == {NORMAL.value}, deviation


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_with_smaller_scores_than_neighbours(dim):
    """Rows begin with the maximum of others, eight rows on, and give their own keys a weight of 2^-64 then: a power of
    two, so that a row that sees one key has its value bit by bit."""
    inputs = make(150, batch=1, heads=1, dim=dim, decay="none")
    inputs["q"][:, 8::16] *= 40
    out = decay_attention(**inputs, window_size=(0, 0), backend="hopper")
    assert torch.equal(out, inputs["v"])
    for size in (1.0, 1e-8):
        inputs = make(on(300, 200), batch=1, heads=1, dim=dim, decay="none")
        inputs["q"][:, 8::16] *= 40
        inputs["v"] *= size
        verify(inputs, skip_tolerance=None)


VALUES = [(1e25, 30.0), (1e34, 10.0), (3e36, 0.0)]


@pytest.mark.parametrize(("dim", "decay", "causal", "values"), on(
    [(*kernel, VALUES) for kernel in pairwise([64, 128, 256], DECAYS, SIDES, also_on_gpu=True)],
    [(64, "none", True, VALUES[:1]), (64, "scalar", True, VALUES[1:]), (64, "constant", False, VALUES[::2])],
))
def test_large_values(dim, decay, causal, values):
    """Results are no larger than the values, but a sum of p v would be: where a far key outweighs the own, and where
    all keys weigh the same."""
    for size, far in values:
        inputs = make(on(1100, 300), heads=on(2, 1), dim=dim, decay=decay, strength=1e-3)
        # where a key has all weight nothing is left of dq
        inputs["q"][:, ::2, :, 0], inputs["q"][:, 1::2, :, 0] = 8.0, 0.0
        inputs["k"][:, 7, :, 0] = far * (dim / 64) ** 0.5
        inputs["v"] = inputs["v"].sign() * size
        verify(inputs, causal=causal, skip_tolerance=None, grad_out=torch.randn_like(inputs["q"]) * 1e-3)
        if DEVICE == "cuda":
            options = dict(causal=causal, skip_tolerance=None, backend="hopper")
            assert torch.equal(decay_attention(**inputs, **options), decay_attention(**inputs, **options))


def test_lse_of_large_values():
    """The scaling that bounds their sums takes no bits from scores, which have more bits near 0 than near 32."""
    inputs = make(60, batch=1, heads=2, decay="none")
    inputs["q"], inputs["v"] = inputs["q"] * 0.1, inputs["v"] * 1e25
    verify(inputs, window_size=(0, 0), grad_out=torch.randn_like(inputs["q"]) * 1e-3)


@pytest.mark.parametrize("dim", on(DIMS, [64]))
def test_nan_stays_in_its_row(dim):
    inputs = make(on(1500, 200), dim=dim, decay="none")
    expected = decay_attention(**inputs, backend="hopper")
    inputs["q"][-1, -70, 1, 5] = math.nan
    out = decay_attention(**inputs, backend="hopper")
    assert out[-1, -70, 1].isnan().all()
    out[-1, -70, 1] = expected[-1, -70, 1]
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


# Sinks


@pytest.mark.parametrize("check", SINK_CHECKS, ids=range(len(SINK_CHECKS)))
def test_sinks_are_exact(check):
    check("hopper", BF16, DEVICE)


def test_sink_rounds_once_in_128_columns():
    sink_rounds_once("hopper", F16, DEVICE, 128)


@pytest.mark.parametrize(("decay", "dim", "causal"), [
    ("constant", 64, False), ("scalar", 128, True), ("scalar", 192, True), ("none", 256, True),
])
def test_sinks(decay, dim, causal):
    """From one of no weight to one that is all of it; before the first key, rows see nothing else."""
    inputs = make(150, 90 if causal else 150, batch=1, heads=4, decay=decay, dim=dim)
    sink = torch.tensor([-90.0, 0.0, 30.0, 200.0], device=DEVICE)
    verify(inputs | dict(sink=sink.bfloat16() if causal else sink), causal=causal)


# Tensors


@gpu
@pytest.mark.parametrize("dim", DIMS)
def test_strides(dim):
    q, k, v = torch.randn(2, 300, 3, 4, dim, device="cuda", dtype=BF16).unbind(2)
    verify(dict(q=q, k=k, v=v, log_decay=torch.tensor(-0.1, device="cuda")))
    expanded = torch.randn((), device="cuda", dtype=BF16).expand(2, 300, 4, dim)
    verify(dict(q=q, k=k, v=v, log_decay=None), grad_out=expanded)
    inputs = make_packed([150, 0, 300, 77], dim=dim, value_dim=dim)
    qkv = torch.stack([inputs[name] for name in "qkv"], 1)
    verify(inputs | dict(zip("qkv", qkv.unbind(1), strict=True)))
    verify(inputs, max_seqlen_q=200, max_seqlen_k=130)
    verify(inputs, grad_out=torch.randn((), device="cuda", dtype=BF16).expand(inputs["q"].shape))


@pytest.mark.parametrize("packed", SIDES)
def test_gradients_at_any_address(packed):
    """The gradient of a concatenation is a slice of another's: contiguous, at any address. The first one is aligned:
    kernels that are remembered are for such tensors."""
    inputs = make_packed([100, 60], decay="none", outside=0) if packed else make(on(300, 150), decay="none")
    # elements of 2 bytes; the copy engine reads from addresses of 16 bytes
    for shift in on([8, 1, 3], [3] if packed else [8, 1]):
        memory = torch.randn(inputs["q"].numel() + shift, device=DEVICE, dtype=BF16)
        verify(inputs, grad_out=memory[shift:].view_as(inputs["q"]))


@pytest.mark.parametrize("empty", [dict(heads=0, kv_heads=2), dict(batch=0), dict(rows=0, keys=5), dict(rows=0)])
def test_empty_tensors_are_taken(empty):
    inputs = make(**empty)
    assert decay_attention(**inputs, backend="hopper").shape == inputs["q"].shape


# Windows


# (left, rows, keys)
LEFTS = [
    *((left, 700, 700) for left in (0, 1, 63, 64, 200, 5000)), (0, 150, 37), (1, 130, 140), (64, 37, 700),
    (64, 200, 1), (129, 1, 1000), (129, 500, 130),
]


@pytest.mark.parametrize(("decay", "dim", "calls"), on(
    [*itertools.product(DECAYS, DIMS, [LEFTS])],
    [("none", 128, [(64, 330, 380)]), ("constant", 64, [(0, 200, 250)]), ("constant", 256, [(0, 200, 250)]),
     ("scalar", 64, [(130, 330, 380)]), ("scalar", 128, [(130, 330, 380)]), ("none", 256, [(64, 200, 250)])],
))
def test_windows(decay, dim, calls):
    for left, rows, keys in calls:
        inputs = make(rows, keys, kv_heads=2, decay=decay, dim=dim)
        verify(inputs, window_size=(left, 0))
        if DEVICE == "cuda" and decay == "scalar":
            inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < 0.01] = -torch.inf
            verify(inputs, window_size=(left, -1))


@pytest.mark.parametrize(("decay", "windows", "dim"), on(
    [*itertools.product(DECAYS, [[(0, 0), (64, -1), (-1, 1), (300, 127), (5, 5000)]], DIMS)],
    slow_but([("none", [(64, -1)], 64), ("none", [(-1, 0)], 256), ("constant", [(0, 200)], 128),
              ("constant", [(70, 1)], 192), *(("scalar", [(60, 7)], dim) for dim in DIMS)], 0, 3, 5, 7),
))
def test_windows_to_both_sides(decay, windows, dim):
    """Rows before all keys see none, or the first ones; a head with rate −∞ sees its own key only."""
    for window in windows:
        inputs = make(on(500, 200), on(700, 300), heads=on(6, 2), kv_heads=2, decay=decay, dim=dim)
        if decay == "constant":
            inputs["log_decay"][0] = -torch.inf
        elif decay == "scalar":
            inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < 0.01] = -torch.inf
        verify(inputs, causal=False, window_size=window)
        if decay != "scalar":
            inputs = make(on(700, 200), on(140, 70), heads=on(6, 2), kv_heads=2, decay=decay, dim=dim)
            verify(inputs, causal=False, window_size=window)


# Sequences. The oracle evaluates every one alone, so whatever crosses a boundary shows


@pytest.mark.parametrize(("dim", "decay", "causal"), slow_but(KERNELS, 0, 3, 4, 7))
def test_packed_sequences(dim, decay, causal):
    # each of D, decay and side with scales per row, and without
    scaled = sum(map(list.index, (DIMS, DECAYS, SIDES), (dim, decay, causal))) % 2 == 1
    for packing in PACKINGS:
        inputs = make_packed(*packing, kv_heads=HEADS // 2, decay=decay, dim=dim, resets=0.01)
        window = (140, 0) if DEVICE == "cuda" and scaled and causal else None
        verify(inputs, causal=causal, scale=row_scales(inputs) if scaled else None, window_size=window)


@pytest.mark.parametrize(("dim", "decay", "causal"), on(PAIRS, [(64, "scalar", True)]))
def test_padded_sequences(dim, decay, causal):
    inputs = make_padded(decay=decay, dim=dim)
    verify(inputs, causal=causal)
    if DEVICE == "cuda":
        verify(inputs, causal=causal, scale=row_scales(inputs))
        verify(inputs, causal=causal, window_size=(64, 0 if causal else -1))


@gpu
@pytest.mark.parametrize(("decay", "left"), [("none", 0), ("constant", 200), ("scalar", 63), ("scalar", -1)])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 6, 2), (128, 8, 1), (192, 8, 1), (256, 6, 2)])
def test_packed_groups_windows_and_sinks(dim, heads, kv_heads, decay, left):
    inputs = make_packed(*MIXED, heads=heads, kv_heads=kv_heads, dim=dim, decay=decay, dtype=F16)
    verify(inputs, window_size=(left, 0))
    verify(inputs | dict(sink=torch.randn(heads, device="cuda")), window_size=(left, 0))
    if left < 0:
        verify(make_packed(*random_packing(1, 200, 40), heads=1, dim=dim))
        verify(make_packed([700, 1, 300, 77], dim=dim) | dict(scale=3.0))


# Skipping


@pytest.mark.parametrize(("decay", "dim"), on(
    [*itertools.product(["scalar", "constant"], DIMS)],
    [("constant", 64), ("scalar", 128), pytest.param("scalar", 256, marks=pytest.mark.slow)],
))
def test_far_tiles_are_skipped(decay, dim, monkeypatch):
    """With far values, and the output gradients of far rows, NaN: tiles that are visited turn NaN."""
    length, far = on((1500, 1024), (450, 384))
    monkeypatch.setattr(skipping, "SHORTEST", on(skipping.SHORTEST, 256))
    inputs = make(length, kv_heads=HEADS // 2, dim=dim, decay=decay, dtype=on(BF16, F16))
    inputs["log_decay"] = inputs["log_decay"] * 5 - 0.5
    verify(inputs)
    poisoned = inputs | dict(v=inputs["v"].clone())
    poisoned["v"][:, :256] = torch.nan
    assert decay_attention(**poisoned, backend="hopper")[:, far:].isfinite().all()
    assert decay_attention(**poisoned, backend="hopper", skip_tolerance=None)[:, far:].isnan().all()
    if DEVICE == "cpu":
        return
    assert visited_fraction(inputs["q"], inputs["k"], inputs["log_decay"]).max() < 0.4
    verify(inputs | dict(q=inputs["q"][:, -700:]))
    verify(inputs, scale=row_scales(inputs))
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    grad_out = torch.randn_like(inputs["q"][..., : inputs["v"].shape[-1]])
    grad_out[:, 1024:] = torch.nan
    for tolerance, finite in (("auto", True), (None, False)):
        out = decay_attention(**leaves, backend="hopper", skip_tolerance=tolerance)
        _, d_k, d_v = torch.autograd.grad(out, [leaves[name] for name in "qkv"], grad_out)
        assert bool(d_k[:, :256].isfinite().all() and d_v[:, :256].isfinite().all()) == finite


@gpu
@pytest.mark.parametrize("dim", DIMS)
def test_skipping_in_packed_sequences_and_windows(dim):
    lengths = (700, 0, 65, 1300, 1)
    inputs = make(sum(lengths), batch=1, dim=dim)
    packed = {name: x[0] for name, x in inputs.items()}
    packed["log_decay"] = packed["log_decay"] * 5 - 0.3
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    places = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1300, max_seqlen_k=1300)
    for window in (None, (300, 0)):
        assert_within_budget(verify_attention_varlen(**packed, **places, window_size=window, backend="hopper"))
    packed["v"][765 : 765 + 256] = torch.nan  # of the fourth sequence
    out = decay_attention_varlen(**packed, **places, backend="hopper")
    assert out[765 + 1024 :].isfinite().all()
    assert out[:765].isfinite().all()


# Runs


@gpu
@pytest.mark.parametrize(("dim", "decay", "layout"), pairwise(
    DIMS, ["none", "scalar"], ["dense", "packed", "both sides"], also_on_gpu=True,
))
def test_runs_repeat(dim, decay, layout):
    """200 runs: a race moves results by more than rounding. Only sums by atomics may move at all. Every other run asks
    for lse: a kernel of its own, and the same results."""
    function, options = decay_attention, dict(causal=layout != "both sides")
    inputs = make(2048, heads=8, kv_heads=4, dim=dim, decay=decay)
    if layout == "packed":
        function = decay_attention_varlen
        inputs = make_packed(*random_packing(2, 20, 500), heads=8, kv_heads=4, dim=dim, decay=decay, outside=0)
        options = {name: inputs.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        options |= dict(max_seqlen_q=500, max_seqlen_k=500, window_size=(200, 0))
        inputs = {name: None if x is None else x.nan_to_num() for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
    grad_out = torch.randn_like(inputs["q"][..., : inputs["v"].shape[-1]])

    def run(return_lse: bool) -> dict[str, torch.Tensor]:
        out = function(**inputs, **options, return_lse=return_lse, backend="hopper")
        results = dict(zip(("out", "lse"), out if return_lse else (out,), strict=False))
        grads = torch.autograd.grad(results["out"], list(leaves.values()), grad_out)
        return results | dict(zip(leaves, grads, strict=True))

    first = run(True)
    for n in range(1, 200):
        for name, x in run(n % 2 == 0).items():
            if name in ("out", "lse", "k", "v"):
                assert torch.equal(x, first[name]), name
            else:
                # dλ is float32, and a small difference of sums: its rounding is many times that of a value
                error = (x.double() - first[name].double()).norm() / first[name].double().norm()
                assert error < (2**-14 if name == "log_decay" else torch.finfo(x.dtype).eps), name


# Refusals


REFUSALS = {
    "scale of at least": lambda zeros: dict(scale=0.0),
    "multiples of 8 as D_v, not 36": lambda zeros: dict(v=zeros(2, 333, 4, 36)),
    "TMA cannot address q": lambda zeros: dict(q=zeros(2, 333, 4, 65)[..., 1:]),
    "TMA cannot address sequences in q": lambda zeros: dict(
        q=zeros(2, 4, 333, 64).transpose(1, 2), seqused_k=int32(5, 333)
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_unsupported_calls_are_refused(reason):
    change = REFUSALS[reason](lambda *shape: torch.zeros(shape, dtype=BF16, device=DEVICE))
    with pytest.raises(ValueError, match=reason):
        decay_attention(**make(batch=2, heads=4) | change, backend="hopper")


@pytest.mark.parametrize(
    ("decay", "dim", "causal"),
    on(pairwise(DECAYS, DIMS, [True, False]),
       slow_but([("scalar", 64, True), ("scalar", 128, False), ("constant", 64, True), ("scalar", 192, True),
                 ("scalar", 256, True)], 0)),
)
def test_deterministic_gradients_keep_the_budget(decay, dim, causal, deterministic):
    """Sums of integers: with groups, scales per row, packed sequences, and rows and keys of any size."""
    inputs = make(on(700, 150), heads=4, kv_heads=2, batch=1, dim=dim, decay=decay)
    inputs["q"][:, 40:60] *= 100
    inputs["v"][:, 9:30] *= 1e-3
    verify(inputs, causal=causal)
    verify(inputs, causal=causal, scale=row_scales(inputs))
    packed = make_packed([150, 0, 30, 65], dim=dim, decay=decay, resets=0.02)
    for name in ("k", "v"):
        packed[name][:5] = torch.tensor([3e38, -torch.inf, torch.nan, 1e30, 0.0], device=DEVICE)[:, None, None]
    verify(packed, causal=causal)


@pytest.mark.parametrize("dim", on(DIMS, [64, pytest.param(256, marks=pytest.mark.slow)]))
def test_deterministic_gradients_repeat(dim, deterministic):
    """The emulator's programs and warps take turns in another order for another seed."""
    leaves = {name: x.requires_grad_() for name, x in make(on(3000, 260), kv_heads=1, dim=dim).items()}
    grad_out = torch.randn_like(leaves["q"][..., : leaves["v"].shape[-1]])
    first = None
    for seed in range(on(50, 2)):
        with contextlib.nullcontext() if DEVICE == "cuda" else emulated(seed, programs=2 + seed):
            found = torch.autograd.grad(decay_attention(**leaves, backend="hopper"), list(leaves.values()), grad_out)
        first = first or found
        assert all(map(torch.equal, first, found)), seed


def test_deterministic_gradients_of_rows_with_nan_are_nan(deterministic):
    leaves = make(150, batch=1, heads=2)
    leaves["q"][0, 20, 1] = leaves["q"][0, 100, 0] = math.nan
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    out, lse = decay_attention(**leaves, backend="hopper", return_lse=True)
    dq = torch.autograd.grad(out, leaves["q"], torch.ones_like(out))[0]
    bad = torch.zeros(1, 150, 2, dtype=torch.bool, device=DEVICE)
    bad[0, 20, 1] = bad[0, 100, 0] = True
    assert torch.equal(lse.mT.isnan(), bad)
    assert torch.equal(dq.isnan().all(-1), bad)
    assert torch.equal(dq.isnan().any(-1), bad)


def test_new_tokens_over_a_cache_are_refused():
    """Other kernels do not decode them silently. The first tokens of all are an ordinary call."""
    cache = DecayCache(1, 100, num_heads=2, head_dim=64, dtype=BF16, device=DEVICE)
    inputs = make(40, batch=1, heads=2, decay="constant")
    first, one = ({n: x if n == "log_decay" else x[:, part] for n, x in inputs.items()} for part in (slice(30), [30]))
    expected = decay_attention(**first, backend="hopper")
    assert torch.equal(cache.attend(**first, backend="hopper"), expected)
    with pytest.raises(ValueError, match="'hopper' cannot take this problem: it has no kernels for new tokens"):
        cache.attend(**one, backend="hopper")
    assert cache.longest == 30
    cache.attend(**one, backend="auto")
    assert cache.longest == 31


@pytest.mark.parametrize("packed", [False, True])
def test_gates_per_direction_are_within_the_budget(packed):
    torch.manual_seed(0)
    options = dict(kv_heads=1, heads=2)
    inputs = make_packed([65, 0, 1, 200, 128], resets=0.02, **options) if packed else make(333, batch=1, **options)
    gates = inputs["log_decay"]
    inputs["log_decay"] = torch.stack([gates, torch.where(gates.isfinite(), gates / 3, gates)], -1)
    sink = torch.randn(2, device=DEVICE)
    verify(inputs, causal=False, sink=sink, **({"scale": row_scales(inputs)} if packed else {"window_size": (-1, 70)}))
