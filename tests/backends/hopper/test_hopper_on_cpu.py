"""The Hopper kernels without a GPU (gluon_on_cpu): against the float64 oracle, in any order of their warps, and with
what keeps their warps apart taken away, which has to show.

The GPU's tests of the same kernels have more and larger problems, and know the compiler's part (test_hopper.py). Here
every way that kernels have for head dimensions meets every option, and not each of its values.
"""

import leave_out_waits
import pytest
import torch
from gluon_on_cpu import Deadlock, Kernel, Race, language, machine, python_of
from hopper_problems import (
    DEVICE,
    PACKINGS,
    assert_rows_beside_larger_ones_are_right,
    assert_sums_at_the_edge_of_float32_are_right,
    make_packed,
    make_padded,
    row_scales,
    verify,
)
from hopper_problems import make as make_batch
from judged_calls import (
    assert_a_leading_sink_keeps_its_bits,
    assert_a_sink_of_little_weight_is_within_the_budget,
    assert_a_sink_of_minus_infinity_is_none,
    assert_a_sink_rounds_once,
)
from pairwise import pairwise

from decayattn import decay_attention, decay_attention_varlen
from decayattn.backends.hopper import backend as hopper
from decayattn.backends.hopper import config
from decayattn.backends.hopper.backward import launch as launch_backward
from decayattn.backends.hopper.forward import launch, producer
from decayattn.backends.hopper.forward.shared import NORMAL
from decayattn.backends.portable import backend as portable
from decayattn.backends.runtime import launching
from decayattn.nn import DecayCache
from decayattn.problem import AttentionProblem, Inputs, Precomputed

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the kernels themselves run here")

FORWARD, GRADIENTS = launch.forward_kernel, launch_backward.gradients_kernel


def run_on_cpu(monkeypatch, seed: int = 0, programs: int = 3) -> None:
    """Run the Hopper kernels on the CPU, with few programs: each has several items, if there are more than a few."""
    monkeypatch.setattr(launch, "forward_kernel", Kernel(FORWARD, seed))
    monkeypatch.setattr(launch_backward, "gradients_kernel", Kernel(GRADIENTS, seed))
    monkeypatch.setattr(launching, "multiprocessors", lambda device: programs)
    monkeypatch.setattr(hopper, "unavailable", lambda dtype, device: None)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    run_on_cpu(monkeypatch)


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The state of every pass over the tiles of an item: NORMAL, unless it is sent again."""
    found: list[int] = []
    world = python_of(producer.produce).__globals__
    stream = world["_stream"]

    def noted(shared, schedule, decay, count, sent, state, *others):
        found.append(int(state))
        return stream(shared, schedule, decay, count, sent, state, *others)

    monkeypatch.setitem(world, "_stream", noted)
    return found


def make(*lengths: int, **options) -> dict:
    return make_batch(*lengths, **dict(batch=1, heads=2) | options)


# errors of 1 % are lost in bfloat16: every output of every kernel is judged in float16
KINDS = pairwise(["none", "constant", "scalar"], [True, False], [64, 128, 192, 256])
WIDE = [("scalar", True, 64), ("constant", False, 128), ("scalar", False, 192), ("none", True, 256)]


@pytest.mark.parametrize(
    ("decay", "causal", "dim", "dtype"),
    [*((*kind, torch.float16) for kind in KINDS), *((*kind, torch.bfloat16) for kind in WIDE)],
)
def test_every_kind(decay, causal, dim, dtype):
    verify(make(333, decay=decay, dtype=dtype, dim=dim), causal=causal)


@pytest.mark.parametrize(
    ("decay", "causal", "dim", "per"),
    pairwise(["none", "constant", "scalar"], [True, False], [64, 128, 192, 256], ["row", "head"]),
)
def test_scales_of_rows(decay, causal, dim, per):
    inputs = make(333, decay=decay, dtype=torch.float16, dim=dim)
    verify(inputs, causal=causal, scale=row_scales(inputs, per))


@pytest.mark.parametrize(
    ("decay", "dim", "causal"), [("scalar", 64, False), ("constant", 128, True), ("constant", 256, False)]
)
def test_scales_of_rows_in_sequences(decay, dim, causal):
    inputs = make_packed(*PACKINGS[2], heads=2, kv_heads=1, decay=decay, dim=dim, resets=0.01)
    verify(inputs, causal=causal, scale=row_scales(inputs))


@pytest.mark.parametrize(
    ("lengths", "dim"),
    [
        (lengths, dim)
        for n, lengths in enumerate([(1, 1), (63, 63), (129, 129), (37, 150), (150, 37), (1, 400), (257, 300)])
        for dim in ((64, 256), (128, 192))[n % 2]
    ],
)
def test_lengths_that_divide_nothing(lengths, dim):
    verify(make(*lengths, dim=dim))


@pytest.mark.parametrize(
    "dims",
    [(8, 64), (40, 8), (64, 104), (96, 128), (152, 128), (136, 40), (192, 192), (248, 200), (64, 256), (104, 136)],
)
def test_other_head_dims(dims):
    verify(make(200, heads=1, dim=dims[0], value_dim=dims[1]))


@pytest.mark.parametrize(("dim", "causal"), [(64, False), (128, True), (192, False), (256, True)])
def test_resets_growth_and_groups(dim, causal):
    inputs = make(400, heads=4, kv_heads=2, dim=dim)
    log_decay = inputs["log_decay"]
    log_decay *= torch.tensor([1.0, -1.0, 30.0, 1.0])
    log_decay[torch.rand_like(log_decay) < 0.02] = -torch.inf
    log_decay[..., 3] = -torch.inf
    verify(inputs, causal=causal)


@pytest.mark.parametrize(("dim", "causal"), [(64, True), (128, False), (192, True), (256, False)])
def test_huge_finite_decays_are_resets(dim, causal):
    inputs = make(200, 230, heads=3, dim=dim)
    inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < 0.02] = -1e9
    verify(inputs, causal=causal)
    # at every token: each row has its own key only, whatever the logits
    inputs |= dict(q=inputs["q"] * 30, log_decay=torch.tensor([-1e30, -0.1, -747.0]))
    verify(inputs, causal=causal)
    if causal:
        verify(inputs, window_size=(140, 0))


@pytest.mark.parametrize(
    ("lengths", "dtype", "dim"),
    pairwise(
        [(257, True), (257, False), (300, True), (323, False), (200, True)], [torch.float16, torch.bfloat16], [64, 128]
    ),
)
def test_the_own_pair_has_no_part_in_the_gradient_of_a_rate(lengths, dtype, dim):
    """Its dS is about the gradient of lse here, and all others are a millionth of it."""
    keys, causal = lengths
    inputs = make(257, keys, heads=1, decay="constant", dim=dim, dtype=dtype)
    verify(inputs | dict(log_decay=torch.tensor([-14.0])), causal=causal)


@pytest.mark.parametrize(("decay", "dim"), [("constant", 64), ("scalar", 128), ("scalar", 192), ("none", 256)])
def test_a_sink(decay, dim):
    verify(make(200, decay=decay, dim=dim, strength=2.0, dtype=torch.float16), sink=torch.randn(2))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 64), (torch.float16, 128)])
def test_a_sink_leaves_one_rounding(dtype, dim):
    assert_a_sink_rounds_once("hopper", dtype, "cpu", dim)


@pytest.mark.parametrize("causal", [True, False])
def test_a_leading_sink_keeps_its_bits(causal):
    assert_a_leading_sink_keeps_its_bits("hopper", torch.bfloat16, "cpu", causal)


def test_a_sink_of_little_weight():
    assert_a_sink_of_little_weight_is_within_the_budget("hopper", torch.bfloat16, "cpu")


def test_a_sink_of_minus_infinity_is_none():
    assert_a_sink_of_minus_infinity_is_none("hopper", torch.bfloat16, "cpu")


@pytest.mark.parametrize("causal", [True, False])
def test_sinks_that_outweigh_all_keys_and_rows_without_a_key(causal):
    """From one of no weight to one that is all of it; before the first key, rows see nothing else."""
    inputs = make(150, 90 if causal else 150, heads=4, dim=64, decay="scalar" if causal else "constant")
    sink = torch.tensor([-90.0, 0.0, 30.0, 200.0])
    verify(inputs | dict(sink=sink.bfloat16() if causal else sink), causal=causal)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("decay", "left"), [("none", 64), ("constant", 0), ("scalar", 130)])
def test_windows(decay, left, dim):
    verify(make(400, 450, decay=decay, dim=dim), window_size=(left, 0))


@pytest.mark.parametrize(
    ("decay", "window", "dim"),
    [
        ("none", (64, -1), 64), ("none", (-1, 0), 256), ("constant", (0, 200), 128), ("constant", (300, 1), 192),
        *(("scalar", (130, 7), dim) for dim in (64, 128, 192, 256)),
    ],
)
def test_windows_to_both_sides(decay, window, dim):
    """Rows before all keys see none, or the first ones; a head whose rate resets sees its own key only."""
    inputs = make(400, 450, decay=decay, dim=dim)
    if decay == "constant":
        inputs["log_decay"][0] = -torch.inf
    verify(inputs, causal=False, window_size=window)
    if decay != "scalar":
        verify(make(450, 140, decay=decay, dim=dim), causal=False, window_size=window)


@pytest.mark.parametrize(
    ("decay", "dim", "causal"),
    [
        ("scalar", 64, True), ("none", 64, False), ("constant", 128, True), ("scalar", 128, False),
        ("none", 192, True), ("scalar", 192, False), ("scalar", 256, True), ("constant", 256, False),
    ],
)
def test_sequences(decay, dim, causal):
    verify(make_packed(*PACKINGS[2], heads=2, kv_heads=1, decay=decay, dim=dim, resets=0.01), causal=causal)
    if (decay, dim) == ("scalar", 64):
        verify(make_padded(heads=2, decay=decay, dim=dim), causal=causal)


@pytest.mark.parametrize(("far", "dim"), [(slice(1), 64), (slice(None, None, 97), 128), (slice(None, None, 97), 256)])
def test_far_keys_that_outweigh_the_own(far, dim, passes):
    """By 0 to 120 in one head, the first key most: sums overflow, and items are sent again, the last ones, too."""
    inputs = make(450, dim=dim, strength=1e-3)
    inputs["q"][..., 0] = 8.0
    there = inputs["k"][:, far, 1, 0]
    there.copy_(120 * dim**0.5 / 8 * torch.linspace(1, 0, there.shape[1]))
    verify(inputs, skip_tolerance=None)
    assert set(passes) > {NORMAL.value}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("decay", "causal"), [("none", False), ("scalar", False), ("constant", True)])
def test_a_far_key_and_then_one_that_outweighs_it(decay, causal, dim):
    """The sum of full tiles overflows. The maximum of a partial tile after them is so much larger that it scales all
    before to 0: 0 times infinity is an overflow, too."""
    inputs = make(64, 500, heads=1, dim=dim, decay=decay, strength=1e-3)
    inputs["q"][..., 0] = 8.0
    # all rows come to the first of these keys in a whole tile and to the other one in an edge tile after it: to the
    # right of their own or, causal, where their windows begin
    for key, far in ((200, 60.0), (110 if causal else 499, 180.0)):
        inputs["k"][:, key, :, 0] = far * dim**0.5 / 8
    verify(inputs, causal=causal, skip_tolerance=None, window_size=(400, 0) if causal else None)


@pytest.mark.parametrize(("decay", "dim"), [("scalar", 64), ("none", 128), ("scalar", 256)])
def test_sums_at_the_edge_of_float32(decay, dim):
    assert_sums_at_the_edge_of_float32_are_right(decay, dim)


@pytest.mark.parametrize(("dim", "decay"), [(64, "none"), (64, "scalar"), (128, "constant"), (256, "scalar")])
def test_large_logits_need_no_second_pass(dim, decay, passes):
    """A row that sees few keys of its first tile takes the maximum of one that sees more: of up to 128 keys, or 64
    beyond 128 columns. These bound less: one call in four with a deviation of 24 needs a second pass."""
    inputs = make(500, dim=dim, decay=decay, strength=1e-3)
    for deviation in (16,) if dim > 128 else (16, 24):
        sized = {name: inputs[name] * deviation**0.5 for name in ("q", "k")}
        passes.clear()
        verify(inputs | sized, skip_tolerance=None)
        assert set(passes) == {NORMAL.value}, deviation


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_beside_ones_with_far_larger_scores(dim):
    assert_rows_beside_larger_ones_are_right(dim)


@pytest.mark.parametrize(("decay", "causal"), [("none", True), ("scalar", True), ("constant", False)])
@pytest.mark.parametrize(("size", "far"), [(1e25, 30.0), (1e34, 10.0), (3e36, 0.0)])
def test_large_values(size, far, decay, causal):
    """Results are no larger than the values, but a sum of p v would be: where a far key outweighs the own, and where
    all keys weigh the same."""
    inputs = make(300, heads=1, decay=decay, strength=1e-3)
    inputs["q"][:, ::2, :, 0], inputs["q"][:, 1::2, :, 0] = 8.0, 0.0  # where a key has all weight nothing is left of dq
    inputs["k"][:, 7, :, 0] = far
    inputs["v"] = inputs["v"].sign() * size
    verify(inputs, causal=causal, skip_tolerance=None, grad_out=torch.randn_like(inputs["q"]) * 1e-3)


def test_lse_beside_large_values():
    """The scaling that bounds their sums takes no bits from scores, which have more bits near 0 than near 32."""
    inputs = make(60, heads=2, decay="none")
    inputs["q"], inputs["v"] = inputs["q"] * 0.1, inputs["v"] * 1e25
    verify(inputs, window_size=(0, 0), grad_out=torch.randn_like(inputs["q"]) * 1e-3)


@pytest.mark.parametrize(("decay", "dim"), [("constant", 64), ("scalar", 128), ("scalar", 256)])
def test_far_tiles_are_skipped(decay, dim):
    inputs = make(700, decay=decay, dim=dim, dtype=torch.float16)
    inputs["log_decay"] = inputs["log_decay"] * 5 - 0.5
    verify(inputs)
    inputs["v"][:, :256] = torch.nan
    assert decay_attention(**inputs, backend="hopper")[:, 512:].isfinite().all()
    assert decay_attention(**inputs, backend="hopper", skip_tolerance=None)[:, 512:].isnan().all()


@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
@pytest.mark.parametrize("by", [hopper, portable])
def test_what_was_made_of_the_decay_is_taken(decay, by):
    """For the last rows of a call, and of another backend what there is."""
    given = make(333, decay=decay, dtype=torch.float16)
    q, k, v, log_decay = (given.get(name) for name in ("q", "k", "v", "log_decay"))
    whole, far = (AttentionProblem.of(x, v, log_decay, None, True) for x in (q, q[:, 128:]))
    inputs = Inputs(q[:, 128:], k, v, log_decay, scale=0.125)
    expected, _, _ = hopper.forward(far, inputs)
    precomputed = Precomputed(torch.empty_like(expected), key_decay=by.decay_of_keys(whole, inputs._replace(q=q)))
    with pytest.MonkeyPatch.context() as patch:
        if by is hopper:
            patch.setattr(launch, "_decay", None)
        found, _, _ = hopper.forward(far, inputs, False, precomputed)
    assert torch.equal(found, expected)


# for one head of keys in either direction; for three of five in the forward, and in the backward; for all three and two
@pytest.mark.parametrize(
    ("cache", "heads", "kv_heads"), [(1, 4, 4), (1 << 17, 5, 5), (1 << 18, 5, 5), (5 << 16, 6, 3)]
)
def test_heads_that_are_worked_at_together(cache, heads, kv_heads, monkeypatch):
    monkeypatch.setattr(config, "CACHE_BYTES", cache)
    monkeypatch.setattr(config, "MIN_CHUNK_TILES", 1)
    verify(make(150, heads=heads, kv_heads=kv_heads))


def test_packed_heads_that_are_worked_at_together(monkeypatch):
    monkeypatch.setattr(config, "CACHE_BYTES", 9 << 14)  # in the backward, two of three
    monkeypatch.setattr(config, "MIN_CHUNK_TILES", 1)
    verify(make_packed([70, 0, 130], heads=3))


@pytest.mark.parametrize("shift", [1, 3, 8])  # elements of 2 bytes; 16 bytes are an address that can be read from
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_that_lie_anywhere(packed, shift):
    """The gradient of a concatenation is a slice of another's: contiguous, at any address."""
    inputs = make_packed([100, 60], heads=2, decay="none", outside=0) if packed else make(150, decay="none")
    memory = torch.randn(inputs["q"].numel() + shift, dtype=inputs["q"].dtype)
    verify(inputs, grad_out=memory[shift:].view_as(inputs["q"]))


def test_the_gradient_of_a_concatenation():
    leaves = [x.requires_grad_() for x in make(150).values()]
    weights = torch.randn(3 + leaves[2].numel(), dtype=leaves[2].dtype)

    def gradients(backend: str) -> tuple[torch.Tensor, ...]:
        out = decay_attention(*leaves, backend=backend)
        together = torch.cat([torch.zeros(3, dtype=out.dtype), out.flatten()])
        return torch.autograd.grad((together * weights).sum(), leaves)

    for found, expected in zip(gradients("hopper"), gradients("reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("decay", ["none", "constant", "scalar"])
@pytest.mark.parametrize("empty", [dict(heads=0, kv_heads=2), dict(batch=0), dict(rows=0, keys=5), dict(rows=0)])
def test_nothing_to_do(empty, decay):
    inputs = make_batch(**dict(batch=1, heads=2) | empty | dict(decay=decay))
    if empty.get("rows") == 0 and "keys" not in empty:
        inputs = {name: None if x is None else x[:, :0] if x.ndim > 1 else x for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
    out, lse = decay_attention(**leaves, return_lse=True, backend="hopper")
    assert (out.shape, lse.shape) == (leaves["q"].shape, tuple(leaves["q"].shape[n] for n in (0, 2, 1)))
    gradients = torch.autograd.grad(out.sum() + lse.sum(), list(leaves.values()))
    for gradient, leaf in zip(gradients, leaves.values(), strict=True):
        assert gradient.shape == leaf.shape
        assert (gradient == 0).all()


def test_no_heads_in_sequences():
    q, k = torch.zeros(20, 0, 64, dtype=torch.bfloat16), torch.zeros(20, 2, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 5, 20], dtype=torch.int32)
    places = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=15, max_seqlen_k=15)
    assert decay_attention_varlen(q, k, k, **places, backend="hopper").shape == q.shape


def test_deterministic_algorithms():
    """By name they are refused, or only warned of, as PyTorch is told."""
    leaves = [x.requires_grad_() for x in make(150).values()]

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(decay_attention(*leaves, backend="hopper").sum(), leaves)

    expected = gradients()
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(ValueError, match="'hopper' cannot take this problem: it has no deterministic backward"):
            gradients()
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="'hopper': it has no deterministic backward"):
            found = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)


def test_new_tokens_over_a_cache_are_refused():
    """Not decoded by other kernels, in silence; the first tokens of all are an ordinary call."""
    cache = DecayCache(1, 100, num_heads=2, head_dim=64, dtype=torch.bfloat16)
    inputs = make(40, decay="constant")
    first, one = ({n: x if n == "log_decay" else x[:, part] for n, x in inputs.items()} for part in (slice(30), [30]))
    expected = decay_attention(**first, backend="hopper")
    assert torch.equal(cache.attend(**first, backend="hopper"), expected)
    with pytest.raises(ValueError, match="'hopper' cannot take this problem: it has no kernels for new tokens"):
        cache.attend(**one, backend="hopper")
    assert cache.longest == 30
    cache.attend(**one, backend="auto")
    assert cache.longest == 31


# The order of things


def results(causal: bool, **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    leaves = {name: x.requires_grad_() for name, x in make(330, heads=3, **options).items()}
    out, lse = decay_attention(**leaves, causal=causal, return_lse=True, backend="hopper")
    grads = torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))
    return dict(zip(("out", "lse", *leaves), (out, lse, *grads), strict=True))


@pytest.mark.parametrize(("dim", "causal"), [(64, True), (128, True), (64, False), (192, True), (256, True)])
def test_any_order(dim, causal, monkeypatch):
    """Only what is added up by atomics may move."""
    expected = results(causal, dim=dim)
    for seed, programs in ((1, 1), (2, 8)):
        run_on_cpu(monkeypatch, seed, programs)
        for name, x in results(causal, dim=dim).items():
            if name in ("q", "log_decay"):
                torch.testing.assert_close(x, expected[name], rtol=0.02, atol=1e-3)
            else:
                assert torch.equal(x, expected[name]), name


# what keeps warps apart, and what is found where it does nothing
MISTAKES = {
    "no fence": (machine.Warps, "fence"),
    "no wait for stores": (machine.Warps, "wait_for_stores"),
    "no wait for products": (machine.Warps, "wait_for_products"),
    "no wait of warps for each other": (machine.Warps, "wait_for_each_other"),
    "no wait for barriers": (language.mbarrier, "wait"),
    "no arrivals": (machine.Barrier, "arrive"),
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake, direction, monkeypatch):
    """Mistakes end in a race or in a deadlock, or a product is read too early, which is NaN."""
    leaves = [x.requires_grad_() for x in make(450, heads=3).values()]

    def run() -> torch.Tensor:
        return decay_attention(*leaves, backend="hopper")

    out = run()
    assert out.isfinite().all()
    monkeypatch.setattr(*MISTAKES[mistake], lambda *args, **kwargs: None)
    try:
        wrong = [run()] if direction == "forward" else torch.autograd.grad(out.sum(), leaves)
    except (Race, Deadlock, IndexError):
        return
    assert any(x.isnan().any() for x in wrong)


def test_a_fence_that_is_left_out_is_noticed():
    """One run of leave_out_waits.py."""
    inputs, options = leave_out_waits.problems(64)["none"]

    def run() -> list[torch.Tensor]:
        return leave_out_waits.results("forward", inputs, options, seed=0)

    (fence,) = [site for site in leave_out_waits.calls(run, "forward") if "fence" in leave_out_waits.text(site)]
    run()
    with leave_out_waits.without(fence), pytest.raises(Race, match="without a fence"):
        run()
