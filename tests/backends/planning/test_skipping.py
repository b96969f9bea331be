"""Skipping tiles: skipped keys weigh at most the tolerance by a float64 oracle, for any inputs, and results stay within
the error budget."""

import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from judged_calls import COMPILER, ON_GPU, make_inputs, verify

from decayattn import attention_rows, decay_attention, visited_fraction
from decayattn.backends.planning import prefix, sequences, skipping
from decayattn.backends.portable import config
from decayattn.backends.registry import load
from decayattn.normalize import tolerance_of, window_of
from decayattn.problem import DECAY_BLOCK, GRANULE, AttentionProblem, Inputs

INF = math.inf
ROWS, BLOCK = GRANULE, DECAY_BLOCK
HARMLESS = 1e-3  # a tolerance that is not too small to be reached within short sequences

settings = hypothesis.settings(
    max_examples=60 if ON_GPU else 12, deadline=None, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)


def make(
    device, rows, keys, decay="gate", *, batch=1, heads=2, kv_heads=1, dim=16, dtype=torch.float32, row_scale=False
) -> dict:
    """q, k, v, log_decay and scale of decay_attention, by name."""
    inputs = make_inputs(
        dtype, "none", row_scale, rows, keys, heads, kv_heads, torch.initial_seed(), batch=batch, dim=dim, device=device
    )
    new = dict(device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    gate = torch.rand(batch, keys, heads, **new)
    log_decay = {
        "constant": -torch.rand(heads, **new),
        "growing constant": 0.1 * torch.randn(heads, **new),
        "gate": -gate,
        "weak": -1e-4 * gate,
        "growth": 0.6 - gate,
        "walk": 4 * gate - 2.5,
        "bursts": torch.where(gate < 0.01, -40.0, 0.0),
        "masks": torch.where(gate < 0.005, -1e9, -gate),  # what others write for a reset
        "resets": torch.where(gate < 0.01, -INF, -gate),
    }[decay]
    return inputs | dict(log_decay=log_decay)


def problem_of(inputs, tolerance, window=None, bounds=None, longest=None) -> AttentionProblem:
    q, k, v, log_decay, scale = (inputs[name] for name in ("q", "k", "v", "log_decay", "scale"))
    tensors = Inputs(q, k, v, log_decay, scale if isinstance(scale, torch.Tensor) else None, bounds)
    return AttentionProblem.of(tensors, True, window_of(window, True), longest, tolerance_of(tolerance, q.dtype))


def plan_of(inputs, tolerance, window=None, bounds=None, longest=None) -> torch.Tensor:
    """The first block to visit, (B, H, granules)."""
    problem = problem_of(inputs, tolerance, window, bounds, longest)
    found = sequences.find(problem, bounds)
    alpha = prefix.allocate(problem, inputs["q"])
    if problem.decay == "scalar":
        alpha = prefix.build(problem, inputs["log_decay"], sequences=found)
    scale = 0.25 if inputs["scale"] is None else inputs["scale"]
    planned = skipping.plan(problem, inputs["q"], inputs["k"], inputs["log_decay"], scale, alpha, found)
    assert skipping.is_planned(problem)
    return planned if bounds is not None else planned[..., : -(-problem.query_length // ROWS)]


def probabilities(inputs, window=None) -> torch.Tensor:
    """P (B, H, T_q, T_k) in float64."""
    q, k, log_decay = (inputs[name].double() for name in ("q", "k", "log_decay"))
    scale = 0.25 if inputs["scale"] is None else inputs["scale"].double()
    return attention_rows(q, k, log_decay, range(q.shape[1]), scale=scale, window_size=window)


def skipped_mass(p: torch.Tensor, first_block: torch.Tensor) -> torch.Tensor:
    """Σ_j P_ij (B, H, T_q) over the keys before the first visited block of row i's granule."""
    row, key = (torch.arange(length, device=p.device) for length in p.shape[2:])
    skipped = key < first_block.long()[..., row // ROWS, None] * BLOCK
    return torch.where(skipped, p, 0.0).sum(-1)


def visits(first_block, rows, keys, window=None, log_decay=None) -> torch.Tensor:
    """Mask (B, H, granules, blocks) of tiles that some row sees, and visits."""
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    seen = (j <= i) & ((j >= i - window[0]) if window is not None and window[0] >= 0 else True)
    seen = seen.expand(*first_block.shape[:2], rows, keys).clone()
    if log_decay is not None:
        segment = log_decay.cpu().isneginf().cumsum(1).transpose(1, 2)
        seen &= segment[..., i[:, 0].clamp(min=0), None] == segment[..., None, :]
    down, right = -rows % ROWS, -keys % BLOCK
    tiles = torch.nn.functional.pad(seen, (0, right, 0, down)).unflatten(3, (-1, BLOCK)).unflatten(2, (-1, ROWS))
    tiles = tiles.any(-1).any(3)
    return tiles & (torch.arange(tiles.shape[-1]) >= first_block.cpu()[..., None])


# The bound


@st.composite
def cases(draw):
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    return dict(
        rows=choose(512, 530, 700), keys=choose(512, 640, 700, 704, 1000), heads=choose((2, 2), (2, 1), (3, 1)),
        dim=choose(16, 3), dtype=choose(torch.float32, torch.float16, torch.float64),
        decay=choose("gate", "growth", "walk", "bursts", "masks", "resets", "constant", "growing constant"),
        window=choose(None, None, (300, 0), (40, -1)), tolerance=choose("auto", 1e-300, HARMLESS, 0.5, 0.99),
        queries=choose("plain", "huge", "tiny", "outlier"),
        all_keys=choose("plain", "huge", "tiny", "outlier", "shared"),
        scale=choose("one", "per row", "zeros"), seed=draw(st.integers(0, 10**6)),
    )


def distort(x: torch.Tensor, how: str) -> torch.Tensor:
    """q or k with norms far from those of random values."""
    if how == "outlier":
        x[:, torch.randint(len(x[0]), (3,))] *= 50
    elif how == "shared":
        x += 3  # most of all keys is the same: norms bound little
    return x * {"huge": 100.0, "tiny": 1e-4}.get(how, 1.0)


@settings
@hypothesis.given(case=cases())
def test_skipped_probability_is_below_tolerance(case, device):
    torch.manual_seed(case["seed"])
    heads, kv_heads = case["heads"]
    inputs = make(
        device, case["rows"], case["keys"], case["decay"], heads=heads, kv_heads=kv_heads, dim=case["dim"],
        dtype=case["dtype"], row_scale=case["scale"] != "one",
    )
    inputs["q"], inputs["k"] = distort(inputs["q"], case["queries"]), distort(inputs["k"], case["all_keys"])
    if case["scale"] == "zeros":
        inputs["scale"] = inputs["scale"] * (torch.rand_like(inputs["scale"]) < 0.5)
    first_block = plan_of(inputs, case["tolerance"], case["window"])
    mass = skipped_mass(probabilities(inputs, case["window"]), first_block)
    assert (mass <= tolerance_of(case["tolerance"], case["dtype"])).all()


@pytest.mark.parametrize("decay", ["gate", "resets", "walk"])
def test_far_keys_that_matter_are_visited(decay, device):
    """A key that all rows, or one row, see from far away is skipped by no row that sees much of it."""
    inputs = make(device, 1000, 1000, decay, kv_heads=2)
    inputs["q"] /= inputs["q"].norm(dim=-1, keepdim=True)
    inputs["k"][:, 5, 0] = 2000 * inputs["q"][:, 700, 0]
    inputs["q"][:, 900, 1] = 3000 * inputs["k"][:, 200, 1]
    p = probabilities(inputs)
    assert decay != "gate" or min(p[0, 0, 700, 5], p[0, 1, 900, 200]) > 0.99
    first_block = plan_of(inputs, HARMLESS)
    assert (skipped_mass(p, first_block) <= HARMLESS).all()
    assert first_block[0, 1, 1:].max() > 0  # the other rows skip as they did


@pytest.mark.parametrize("sign", [1.0, -1.0, None])
def test_keys_that_point_where_the_queries_do(sign, device):
    """D = 1: |q·k| is |q||k|, far keys have the greatest score there is and the row's own key the least one."""
    inputs = make(device, 1000, 1000, "gate", heads=1, dim=1)
    inputs["log_decay"].fill_(-0.5)
    inputs["q"].fill_(18.0 if sign else 72.0)
    inputs["k"].fill_(-9.0 * (sign or 1.0))[:, :400] *= -1
    if sign:
        inputs["scale"] = torch.full_like(inputs["log_decay"], sign)
    inputs["k"][:, 450:500] /= 100  # a block's longest key counts, not its shortest
    first_block = plan_of(inputs, HARMLESS)
    assert (skipped_mass(probabilities(inputs), first_block) <= HARMLESS).all()
    assert first_block.max() == 2


@pytest.mark.parametrize("chunk", [1, 2, skipping.CHUNK])
def test_many_blocks_add_up(chunk, device, monkeypatch):
    """A thousand keys that weigh e⁻¹⁸ each, which a block alone may be skipped for, and not three of them."""
    monkeypatch.setattr(skipping, "CHUNK", chunk)
    inputs = make(device, 1024, 1024, "gate", heads=1)
    inputs["q"].zero_()
    inputs["log_decay"].zero_()[:, 896] = -18.0
    first_block = plan_of(inputs, 300 * math.exp(-18))
    mass = skipped_mass(probabilities(inputs), first_block)
    assert first_block[0, 0].tolist() == [0] * 14 + [2, 2]
    assert 0 < mass.max() <= 300 * math.exp(-18)


@pytest.mark.parametrize("window", [None, (400, 0)])
@pytest.mark.parametrize("decay", ["gate", "constant", "walk", "bursts"])
def test_bound_without_norms_is_the_decay(decay, window, device):
    """q = 0: P_ij ≤ exp(α_i − α_j), and a granule skips as its least forgetful row can."""
    inputs = make(device, 700, 900, decay, dtype=torch.float64)
    inputs["q"].zero_()
    first_block = plan_of(inputs, HARMLESS, window)
    log_decay = inputs["log_decay"]
    alpha = (log_decay if log_decay.ndim == 3 else log_decay.expand(1, 900, 2)).cumsum(1).transpose(1, 2)
    for head, granule in itertools.product(range(2), range(11)):
        position = torch.arange(granule * ROWS, min(granule * ROWS + ROWS, 700), device=device) + 200
        begin = max(0, int(position[0]) - window[0]) // BLOCK if window else 0
        weights = (alpha[0, head, position].max() - alpha[0, head]).exp()
        mass = weights[begin * BLOCK :].cumsum(0)[BLOCK - 1 :: BLOCK]
        blocks = begin + int((mass[: int(position[0]) // BLOCK - begin] <= HARMLESS).sum())
        assert first_block[0, head, granule] == blocks, (head, granule)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_values_that_are_not_finite_are_visited(bad, device):
    token, granule = 200, torch.arange(11, device=device) * ROWS
    clean = make(device, 700, 700, kv_heads=2) | dict(scale=torch.full((1, 700, 2), 0.25, device=device))
    expected = plan_of(clean, HARMLESS)
    assert (expected[:, :, 6:] > 1).all()  # block 1, the token's own, would be skipped
    after = granule + ROWS - 1 >= token
    for name in ("q", "k", "scale", *["log_decay"] * (bad != -INF)):  # a decay of −inf is a reset
        inputs = {key: x.clone() for key, x in clean.items()}
        inputs[name][:, token, 0] = bad
        first_block = plan_of(inputs, HARMLESS)
        changed = first_block[:, 0]
        assert torch.equal(first_block[:, 1], expected[:, 1]), name
        if name == "k":
            assert (changed[:, after] * BLOCK <= token).all()
            continue
        touched = after if name == "log_decay" else granule == token // ROWS * ROWS
        assert (changed[:, touched] == 0).all()
        assert name == "log_decay" or torch.equal(changed[:, ~touched], expected[:, 0, ~touched])


def far_scores(generator):
    """The far keys are parallel to the first row; its own key is 0: |s q| |k| is their very score of 90,000."""
    inputs = make("cpu", 320, 320, "constant", heads=1, dim=256)
    q = torch.randn(256, generator=generator)
    inputs["log_decay"] = torch.zeros(1, 320, 1)
    inputs["log_decay"][:, 128:257] = -700.0
    inputs["q"], inputs["k"] = torch.zeros(2, 1, 320, 1, 256)
    inputs["q"][:, 256], inputs["k"][:, :128] = q, q
    inputs["scale"] = torch.full((1, 320, 1), (129 * 700 - 20) / float(q.double().square().sum()))
    return inputs, None


def own_scores(generator):
    """The far keys are 0. The row's own one has a score of −90,000, as all between them."""
    inputs, window = far_scores(generator)
    inputs["k"] = torch.zeros_like(inputs["k"])
    inputs["k"][:, 128:257] = -inputs["q"][:, 256]
    return inputs, window


def underflow(generator):
    """The squares of the first row are 0 in float32."""
    inputs, window = far_scores(generator)
    sizes = {"q": 1e-24, "k": 1e18}
    inputs |= {name: inputs[name] * size for name, size in sizes.items()}
    product = float((inputs["q"][:, 256].double() * inputs["k"][:, 0].double()).sum())
    return inputs | {"scale": torch.full((1, 320, 1), (129 * 700 - 20) / product)}, window


def beta(generator):
    """α of the last far key is −90,000: 17 bits before the point of a float32."""
    inputs = make("cpu", 192, 192, "constant", heads=1, dtype=torch.float16)
    inputs["q"].zero_()
    inputs["log_decay"] = -745 + 100 * torch.rand(1, 192, 1, generator=generator)
    inputs["log_decay"][:, 128], inputs["log_decay"][:, 129:] = -20.0, 0.0
    return inputs, None


def alpha(generator):
    """All keys of the window have an α of 1e15: its last bit in float64 is an eighth."""
    inputs = make("cpu", 320, 320, "constant", heads=1, dtype=torch.float64)
    inputs["q"].zero_()
    inputs["log_decay"] = -torch.rand(1, 320, 1, generator=generator, dtype=torch.float64)
    inputs["log_decay"][:, 1], inputs["log_decay"][:, 256:] = 1e15, 0.0
    inputs["log_decay"][:, 256] = -20 - torch.rand((), generator=generator)
    return inputs, (128, 0)


def sums(generator):
    """128 keys of about one weight: nothing but powers, their sum and its logarithm is rounded."""
    inputs = make("cpu", 320, 320, "constant", heads=1, dtype=torch.float64)
    inputs["log_decay"] = -1e-3 * torch.rand(1, 320, 1, generator=generator, dtype=torch.float64)
    inputs["log_decay"][:, 128], inputs["log_decay"][:, 129:] = -30.0, 0.0
    inputs["k"] = torch.zeros_like(inputs["k"])
    inputs["k"][:, 128:256] = -50 * inputs["q"][:, 256] / inputs["q"][:, 256].square().sum()
    return inputs | {"scale": torch.ones(1, 320, 1, dtype=torch.float64)}, None


@pytest.mark.parametrize("case", [far_scores, own_scores, underflow, beta, alpha, sums])
def test_rounding_skips_nothing(case, device, monkeypatch):
    """The first row of the granule that begins a block gives earlier blocks a little more than the tolerance."""
    monkeypatch.setattr(skipping, "SHORTEST", 64)
    for seed in range(16 if ON_GPU else 6):
        inputs, window = case(torch.Generator().manual_seed(seed))
        inputs = {name: None if x is None else x.to(device) for name, x in inputs.items()}
        row = inputs["q"].shape[1] // BLOCK * BLOCK
        exact = dict(inputs)
        if case is alpha:  # what no pair of the window has between it
            exact["log_decay"] = inputs["log_decay"].clone()
            exact["log_decay"][:, 1] = 0.0
        p = probabilities(exact, window)[..., row, :]
        mass = float(p[..., : row // BLOCK * BLOCK].sum())
        assert 1e-12 < mass < 1e-6
        first_block = plan_of(inputs, mass * (1 - 1e-8), window)
        skipped = int(first_block[..., row // ROWS]) * BLOCK
        assert float(p[..., :skipped].sum()) <= mass * (1 - 1e-8), seed


# Which programs plan


@pytest.mark.parametrize(("rows", "keys", "decay", "options", "window"), [
    (1300, 1300, "gate", dict(heads=1), None), (513, 1025, "resets", dict(row_scale=True), (600, 0)),
    (1000, 600, "walk", dict(heads=1, batch=2, dtype=torch.float16, dim=128), None), (700, 700, "constant", {}, None),
])
def test_granules_of_a_program_plan_as_they_do_alone(rows, keys, decay, options, window, device, monkeypatch):
    """Some of a program's granules may skip and some may not, and the last program has fewer than others."""
    inputs = make(device, rows, keys, decay, **options)
    alone = plan_of(inputs, HARMLESS, window)
    assert alone.any()
    monkeypatch.setattr(skipping, "_PROGRAMS", 1)
    for most in (2, 4, 8):
        monkeypatch.setattr(skipping, "MOST_TOGETHER", most)
        assert torch.equal(plan_of(inputs, HARMLESS, window), alone)


def test_blocks_before_a_window_do_not_count(device, monkeypatch):
    """Two granules share a program: one sees a block that weighs much, the other only the light block after it."""
    monkeypatch.setattr(skipping, "_PROGRAMS", 1)
    monkeypatch.setattr(skipping, "MOST_TOGETHER", 2)
    inputs = make(device, 640, 640, heads=1)
    inputs["q"].zero_(), inputs["log_decay"].zero_()
    inputs["log_decay"][:, 128], inputs["log_decay"][:, 256] = 30.0, -40.0
    assert plan_of(inputs, HARMLESS, (300, 0))[0, 0, 6:8].tolist() == [0, 2]


def test_programs_are_shared_where_many_are_left():
    assert [skipping.programs_together(programs, 4) for programs in (1, 2047, 2048, 4096, 10**6)] == [1, 1, 2, 4, 4]
    assert skipping.programs_together(10**6, 1) == 1


# The fraction


@pytest.mark.parametrize(("rows", "keys", "decay", "window"), [
    (700, 700, "gate", None), (512, 1000, "resets", None), (1000, 600, "gate", None), (700, 700, "gate", (300, 0)),
    (600, 900, "constant", (200, -1)), (700, 700, "resets", (150, -1)), (530, 630, "gate", None),
])
def test_fraction_counts_tiles(rows, keys, decay, window, device):
    inputs = make(device, rows, keys, decay, batch=2)
    first_block = plan_of(inputs, HARMLESS, window)
    log_decay = inputs["log_decay"] if inputs["log_decay"].ndim == 3 else None
    visited = visits(first_block, rows, keys, window, log_decay).sum((2, 3))
    seen = visits(torch.zeros_like(first_block), rows, keys, window, log_decay).sum((2, 3))
    options = dict(scale=0.25, window_size=window)
    arguments = inputs["q"], inputs["k"], inputs["log_decay"]
    found = visited_fraction(*arguments, **options, skip_tolerance=HARMLESS).cpu()
    torch.testing.assert_close(found, visited / seen)
    assert (visited_fraction(*arguments, **options, skip_tolerance=None) == 1).all()


def test_fraction_without_anything_to_skip_is_1(device):
    inputs = make(device, 600, 600, batch=3)
    assert torch.equal(visited_fraction(inputs["q"], inputs["k"], None).cpu(), torch.ones(3, 2))
    assert torch.equal(visited_fraction(inputs["q"][:, :0], inputs["k"], -1.0).cpu(), torch.ones(3, 2))


def test_calls_without_gain_are_not_planned(device, monkeypatch):
    monkeypatch.setattr(skipping, "SHORTEST", 200)
    inputs = make(device, 300, 300, "weak")
    q, k, v, log_decay, _ = inputs.values()
    one_head = [x[:, :, :1] for x in (q, k, v, log_decay)]
    short = (x[:, :190] for x in one_head)
    plans = []
    as_argument = skipping.as_argument
    monkeypatch.setattr(skipping, "as_argument", lambda *given: plans.append(as_argument(*given)) or plans[-1])
    options = dict(return_lse=True, backend="triton")
    with torch.no_grad():
        decay_attention(*one_head[:3], **options)
        decay_attention(*one_head, causal=False, **options)
        decay_attention(*one_head, bias=q.new_zeros(1), **options)
        decay_attention(*short, **options)
        decay_attention(one_head[0][:, :190], *one_head[1:], **options)
        everything = decay_attention(q, k, v, log_decay, skip_tolerance=None, **options)
        assert plans == [None] * 6
        # planned, and nothing found: the same instructions on the same tiles
        found = decay_attention(q, k, v, log_decay, **options)
    first_block, granules = plans[-1]
    assert granules >= 5
    assert not first_block[..., :5].any()
    for a, b in zip(found, everything, strict=True):
        assert torch.equal(a, b)


# Packed and padded sequences


def packed(device, rows, keys, **options) -> tuple[dict, dict]:
    ends = [[0, *itertools.accumulate(lengths)] for lengths in (rows, keys)]
    cu = [torch.tensor(end, dtype=torch.int32, device=device) for end in ends]
    lengths = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=max(rows), max_seqlen_k=max(keys))
    return make(device, ends[0][-1] + 3, ends[1][-1] + 5, **options), lengths


@pytest.mark.parametrize("decay", ["gate", "resets", "constant"])
def test_packed_sequences_are_planned_one_by_one(decay, device, monkeypatch):
    rows, keys = [100, 0, 640, 1, 530], [130, 40, 640, 700, 800]
    inputs, cu = packed(device, rows, keys, decay=decay, row_scale=True)
    first_rows, first_keys = cu["cu_seqlens_q"].tolist(), cu["cu_seqlens_k"].tolist()
    bounds = torch.tensor(list(zip(first_rows, rows, first_keys, keys, strict=False)), dtype=torch.int32, device=device)
    planned = plan_of(inputs, HARMLESS, None, bounds, (max(rows), max(keys)))
    problem = problem_of(inputs, HARMLESS, None, bounds, (max(rows), max(keys)))
    mirror = skipping.last_granules(problem, planned, sequences.find(problem, bounds))
    monkeypatch.setattr(skipping, "_PROGRAMS", 1)
    shared = plan_of(inputs, HARMLESS, None, bounds, (max(rows), max(keys)))
    for n, (num_rows, num_keys) in enumerate(zip(rows, keys, strict=True)):
        row, key = slice(first_rows[n], first_rows[n] + num_rows), slice(first_keys[n], first_keys[n] + num_keys)
        alone = {name: x[:, row] if name in ("q", "scale") else x[:, key] for name, x in inputs.items() if x.ndim > 2}
        alone["log_decay"] = alone.get("log_decay", inputs["log_decay"])
        own = slice(first_rows[n] // ROWS + n, first_rows[n] // ROWS + n - (-num_rows // ROWS))
        here = planned[..., own]
        assert torch.equal(shared[..., own], here)
        if num_rows:
            assert (skipped_mass(probabilities(alone), here) <= HARMLESS).all()
        if min(num_rows, num_keys) >= skipping.SHORTEST:
            assert torch.equal(here, plan_of(alone, HARMLESS))
            assert here.any()
        mirrored = mirror[..., first_keys[n] // BLOCK + n :][..., : -(-num_keys // BLOCK)]
        # per block of keys the last granule that visits it, among those with a row that may see it
        for first, last_of_blocks in zip(here[0].tolist(), mirrored[0].tolist(), strict=True):
            for block, last in enumerate(last_of_blocks):
                own_granules = range(max(block * BLOCK + num_rows - num_keys, 0) // ROWS, len(first))
                assert last == max((granule for granule in own_granules if first[granule] <= block), default=-1)


# Results


@pytest.fixture
def visited(monkeypatch):
    """Require that calls in this test skip something; else it would not test skipping."""
    monkeypatch.setattr(skipping, "SHORTEST", 200)
    skipped = []
    plan = skipping.plan

    def spy(problem, *tensors):
        first_block = plan(problem, *tensors)
        nothing_skipped = plan(problem._replace(skip_tolerance=1e-300), *tensors)
        skipped.append(not torch.equal(first_block, nothing_skipped))
        return first_block

    monkeypatch.setattr(skipping, "plan", spy)
    yield
    assert any(skipped)


@pytest.mark.parametrize(("rows", "keys", "options", "call"), [
    (330, 330, {}, {}),
    (300, 300, dict(dtype=torch.float16, decay="walk", row_scale=True), {}),
    (270, 340, dict(dtype=torch.float64, heads=1), {}),
    (270, 400, dict(decay="constant", kv_heads=2), {}),
    (600, 520, dict(decay="resets"), dict(window_size=(400, 0))),
    (300, 350, dict(batch=2, heads=1), dict(seqused_k=[350, 330], leftpad_q=[3, 60])),
])
def test_results_within_the_error_budget(rows, keys, options, call, device, visited):
    inputs = make(device, rows, keys, **options)
    if options.get("decay") == "walk":
        inputs["log_decay"] -= 1.0
    padding = {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in call.items() if type(x) is list}
    verify(inputs, "triton", **call | padding)


def test_packed_results_within_the_error_budget(device, visited):
    inputs, lengths = packed(device, [40, 300], [40, 380])
    verify({name: x[0] for name, x in inputs.items() if x is not None}, "triton", **lengths)


@pytest.mark.skipif(ON_GPU, reason="the GPU's configuration has the tiles")
def test_tiles_of_several_granules(device, visited, monkeypatch):
    monkeypatch.setattr(config, "_INTERPRETER", config.TileConfig(128, 64, 4, 1))
    inputs = make(device, 330, 330)
    inputs["q"][:, 250:255] *= 8  # of the two granules in their tile one visits more
    verify(inputs, "triton")


# PyTorch


@pytest.mark.slow
def test_one_graph_serves_calls_with_and_without_a_plan(device):
    def attend(q, k, v, log_decay):
        return decay_attention(q, k, v, log_decay, return_lse=True, backend="triton")

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=COMPILER, dynamic=True)
    for length, stance in ((140, "default"), (530, "fail_on_recompile"), (200, "fail_on_recompile")):
        values = [x for x in make(device, length, length, heads=1).values() if x is not None]
        with torch.compiler.set_stance(stance), torch.no_grad():
            found = compiled(*values)
            expected = attend(*values)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


# The tolerance


def test_auto_is_below_the_epsilon_of_accumulators():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert tolerance_of("auto", dtype) < torch.finfo(torch.float32).eps
    assert tolerance_of("auto", torch.float64) < torch.finfo(torch.float64).eps


def test_fraction_needs_the_kernels(monkeypatch):
    q = torch.zeros(1, 4, 1, 8)
    monkeypatch.setattr(load("triton"), "unavailable", lambda *arguments: "no GPU")
    with pytest.raises(ValueError, match=r"visited_fraction: its kernels need a CUDA GPU, .* q of cpu: no GPU"):
        visited_fraction(q, q, -1.0)
