"""The two-level decay prefix and its reverse against cumulative sums in plain float64; blocks of packed sequences."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl

from decayattn.backends.planning import prefix, sequences
from decayattn.problem import DECAY_BLOCK, AttentionProblem, Inputs

ON_GPU = torch.cuda.is_available()
EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
LOG2E = math.log2(math.e)
BLOCK = DECAY_BLOCK
# in the interpreter every token of a block's scan is a Python step
LONG = 2**20 + 5 if ON_GPU else 20 * BLOCK + 5


@pytest.fixture(params=[False, True], ids=["one launch", "two launches"])
def launches(request, monkeypatch) -> None:
    """One program has all tokens of a sequence, or blocks read what a launch before has summed per block."""
    monkeypatch.setattr(prefix, "_MOST_TOKENS", -1 if request.param else 2**31)


def problem_of(log_decay, query_length=None, dtype=torch.float32) -> AttentionProblem:
    batch, length, heads = log_decay.shape
    q = log_decay.new_empty(batch, length if query_length is None else query_length, heads, 1, dtype=dtype)
    k = log_decay.new_empty(batch, length, heads, 1, dtype=dtype)
    return AttentionProblem.of(Inputs(q, k, k, log_decay), True)


def plain_gradient(log_decay, row_sums, column_sums):
    """dλ (B, T_k, H): the sum of dα over the rest of the segment; 0 at the start of one."""
    batch, length, heads = log_decay.shape
    d_alpha = -column_sums.double()
    shared = min(length, row_sums.shape[-1])  # rows and keys end together
    d_alpha[..., length - shared :] += row_sums[..., row_sums.shape[-1] - shared :].double()
    grad = torch.zeros_like(d_alpha)
    for b in range(batch):
        for h in range(heads):
            resets = torch.isneginf(log_decay[b, 1:, h]).nonzero().flatten() + 1
            cuts = [0, *resets.tolist(), length]
            for start, end in itertools.pairwise(cuts):
                grad[b, h, start:end] = d_alpha[b, h, start:end].flip(0).cumsum(0).flip(0)
                grad[b, h, start] = 0
    return grad.transpose(1, 2)


def differences(built: prefix.DecayPrefix, i, j):
    """α_i − α_j as the kernels form it: the bases' difference in float64, rounded once, then the two β."""
    bases = (built.base[..., i // BLOCK] - built.base[..., j // BLOCK]).to(built.beta.dtype)
    return (built.beta[..., i] - built.beta[..., j]) + bases


def check(log_decay, query_length=None):
    """Build the prefix, and a gradient with random sums."""
    batch, length, heads = log_decay.shape
    problem = problem_of(log_decay, query_length)
    built = prefix.build(problem, log_decay)
    assert_prefix_of(log_decay, built)
    row_sums = torch.randn(batch, heads, problem.query_length, device=log_decay.device)
    column_sums = torch.randn(batch, heads, length, device=log_decay.device)
    grad = prefix.gradient(problem, built, row_sums, column_sums, log_decay)
    assert grad.dtype == log_decay.dtype
    assert_gradient_of(log_decay, row_sums, column_sums, grad)


def assert_prefix_of(log_decay, built: prefix.DecayPrefix):
    value = log_decay.double().transpose(1, 2).clone()
    value[..., 0] = 0  # never used
    reset = torch.isneginf(value)
    t, length = torch.arange(value.shape[-1], device=value.device), value.shape[-1]
    alpha = torch.where(reset, 0.0, value * LOG2E).cumsum(-1)
    assert torch.equal(built.last_reset.long(), torch.where(reset, t, 0).cummax(-1).values)
    coming = torch.where(reset, t, length).flip(-1).cummin(-1).values.flip(-1)
    assert torch.equal(built.next_reset.long(), torch.nn.functional.pad(coming[..., 1:], (0, 1), value=length))
    blocks = torch.arange(log_decay.shape[1], device=log_decay.device) // BLOCK
    error = (built.base[..., blocks] + built.beta - alpha).abs()
    assert (error <= log_decay.shape[1] * EPS64 * alpha.abs().amax()).all()  # the plain sum's own rounding


def assert_gradient_of(log_decay, row_sums, column_sums, grad):
    expected = plain_gradient(log_decay, row_sums, column_sums)
    assert grad.shape == log_decay.shape
    # added in float64 in another order, then rounded once
    summed = row_sums.abs().double().sum() + column_sums.abs().double().sum()
    assert ((grad - expected).abs() <= EPS32 * expected.abs() + log_decay.shape[1] * EPS64 * summed).all()
    assert (grad[expected == 0] == 0).all()  # literal zeros


# (tokens, rows, resets of a head): lengths that divide nothing; resets at the edges of blocks; rows are the last tokens
CASES = [
    *((n, n, []) for n in (1, 2, 127, 128, 129, 300)),
    *((300, 300, resets) for resets in (
        [0], [1], [127], [128], [129], [0, 127, 128, 129], [255, 256], [126, 127], [299], [5, 290], list(range(300)),
    )),
    *((170, rows, [129, 150]) for rows in (1, 40, 170, 200)),
]


@pytest.mark.parametrize(("length", "query_length", "resets"), CASES, ids=str)
def test_prefix_and_gradient(length, query_length, resets, launches, device):
    log_decay = torch.randn(1, length, 2, device=device)
    log_decay[0, resets, 1] = -torch.inf
    check(log_decay, query_length)


@pytest.mark.parametrize("length", [prefix._MOST_TOKENS, prefix._MOST_TOKENS + 1])
def test_long_sequences_take_two_launches(length, device):
    log_decay = torch.randn(1, length, 1, device=device)
    assert prefix._division(problem_of(log_decay))[0] == (length == prefix._MOST_TOKENS)
    log_decay[0, [700, 1300], 0] = -torch.inf
    check(log_decay)


def test_first_log_decay_is_never_used(launches, device):
    log_decay = torch.randn(1, 130, 1, device=device)
    built = prefix.build(problem_of(log_decay), log_decay)
    for value in (torch.nan, torch.inf, -torch.inf):
        log_decay[0, 0] = value
        assert all(map(torch.equal, prefix.build(problem_of(log_decay), log_decay), built))


def test_strides(launches, device):
    log_decay = torch.randn(2, 3, 150, device=device).permute(0, 2, 1)
    check(log_decay)
    check(log_decay[:1, :, :1].expand(2, 150, 3))


@pytest.mark.parametrize("heads", [1, 6, 8, 16])
def test_heads_that_share_a_program(heads, launches, device):
    log_decay = torch.randn(2, 150, heads, device=device)
    log_decay[torch.rand_like(log_decay) < 0.02] = -torch.inf
    built = prefix.build(problem_of(log_decay), log_decay)
    assert_prefix_of(log_decay, built)
    rounded = prefix.build(problem_of(log_decay, dtype=torch.bfloat16), log_decay)
    assert torch.equal(rounded.beta, built.beta.float())
    assert_prefix_of(log_decay, rounded._replace(beta=built.beta))


def test_more_than_one_step_reads(launches, monkeypatch, device):
    monkeypatch.setattr(prefix, "_SCAN_CHUNK", 2)
    length = 6 * BLOCK + 1
    log_decay = torch.randn(1, length, 2, device=device)
    log_decay[0, [130, 131, 700, length - 1], 1] = -torch.inf
    check(log_decay)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_sequences(packed, launches, device):
    """Each has the prefix and the gradient that it has alone, with NaN outside."""
    tokens, rows = [130, 0, 1, 300, 128, 200], [130, 5, 1, 260, 128, 215]
    if packed:
        first_tokens, first_rows = ([*itertools.accumulate(lengths, initial=3)][:-1] for lengths in (tokens, rows))
        shape, query_length, longest = (1, 3 + sum(tokens) + 9, 2), 3 + sum(rows) + 9, (260, 300)
    else:
        first_tokens, first_rows = [1, 7, 130, 20, 192, 0], [0, 3, 259, 0, 11, 45]
        shape, query_length, longest = (6, 320, 2), 260, None
    bounds = torch.tensor([*zip(first_rows, rows, first_tokens, tokens, strict=True)], dtype=torch.int32, device=device)
    log_decay = torch.full(shape, torch.nan, device=device)
    row_sums = torch.full((shape[0], 2, query_length), torch.nan, device=device)
    column_sums = torch.full((shape[0], 2, shape[1]), torch.nan, device=device)
    parts = []
    for i, (row, row_count, token, count) in enumerate(bounds.tolist()):
        entry, block = (0, token // BLOCK + i) if packed else (i, 0)  # where offsets_of_head has its blocks begin
        entry, own_rows, own_tokens = slice(entry, entry + 1), slice(row, row + row_count), slice(token, token + count)
        log_decay[entry, own_tokens] = torch.randn(1, count, 2, device=device)
        log_decay[entry, own_tokens][torch.rand(1, count, 2, device=device) < 0.01] = -torch.inf
        row_sums[entry, :, own_rows] = torch.randn(1, 2, row_count, device=device)
        column_sums[entry, :, own_tokens] = torch.randn(1, 2, count, device=device)
        parts.append((entry, own_rows, own_tokens, slice(block, block - (-count // BLOCK))))
    q, v = log_decay.new_empty(shape[0], query_length, 2, 1), log_decay.new_empty(*shape, 1)
    problem = AttentionProblem.of(Inputs(q, v, v, log_decay, bounds=bounds), True, longest=longest)
    found = sequences.find(problem, bounds)
    built = prefix.build(problem, log_decay, sequences=found)
    grad = prefix.gradient(problem, built, row_sums, column_sums, log_decay, found)
    outside = torch.ones(shape, dtype=torch.bool, device=device)
    for entry, own_rows, own_tokens, own_blocks in parts:
        outside[entry, own_tokens] = False
        own = log_decay[entry, own_tokens]
        if own.shape[1]:
            own_built = (x[entry, :, own_blocks if x is built.base else own_tokens] for x in built)
            assert_prefix_of(own, prefix.DecayPrefix(*own_built))
            own_sums = row_sums[entry, :, own_rows], column_sums[entry, :, own_tokens]
            assert_gradient_of(own, *own_sums, grad[entry, own_tokens])
    assert (grad[outside] == 0).all()


def test_counter_is_zeroed(launches, device):
    counter, log_decay = torch.ones(1, dtype=torch.int32, device=device), torch.randn(1, 300, 2, device=device)
    prefix.build(problem_of(log_decay), log_decay, counter=counter)
    assert counter.item() == 0


def test_differences_keep_their_low_bits_at_any_length(device):
    """λ ≈ −0.7: the last tokens see each other as exactly as the first ones do, though α itself is huge. With float32
    inputs the difference is right to its own float32 rounding. With 16-bit inputs β is float32: three rounded terms are
    added, with a rounding per sum, over at most 128 tokens of decay."""
    log_decay = -1.4 * torch.rand(1, LONG, 1, device=device)
    values = (log_decay.flatten().double() * LOG2E).tolist()
    i = torch.arange(LONG - 300, LONG, 15, device=device)
    # what one lane of the scan over blocks adds up, the tree over its lanes, and the tokens of a block
    float64_sums = LONG / BLOCK / prefix._SCAN_CHUNK + math.log2(prefix._SCAN_CHUNK) + BLOCK
    float64_error = 2 * float64_sums * EPS64 * math.fsum(map(abs, values))
    exactly = prefix.build(problem_of(log_decay), log_decay)
    built = prefix.build(problem_of(log_decay, dtype=torch.float16), log_decay)
    assert built.beta.dtype == torch.float32
    for j in (i - 1, i - 100, i - 200, i // 2):
        pairs = zip(i.tolist(), j.tolist(), strict=True)
        exact = [math.fsum(values[earlier + 1 : later + 1]) for later, earlier in pairs]
        exact = torch.tensor(exact, dtype=torch.float64, device=device)
        found = differences(exactly, i, j).float()
        assert ((found - exact).abs() <= EPS32 * exact.abs() + float64_error).all()
        bases = (built.base[..., i // BLOCK] - built.base[..., j // BLOCK]).abs()
        terms = built.beta[..., i].abs() + built.beta[..., j].abs() + bases
        assert ((differences(built, i, j) - exact).abs() <= 2 * EPS32 * terms + float64_error).all()


def test_split_prefix_adds_up(launches, device):
    """Bases to twice float32's bits, β to float32's."""
    log_decay, factor = -5 * torch.rand(2, 3 * BLOCK + 20, 3, device=device), -3.7
    problem = problem_of(log_decay)
    split = prefix.allocate_split(problem, log_decay)
    for x in split:
        x.fill_(torch.nan)
    built = prefix.build(problem, log_decay, split, factor)
    high, low = split.bases.double().unbind(-1)
    assert torch.equal(high.float(), built.base.float())
    torch.testing.assert_close(high + low, built.base, rtol=2**-47, atol=0.0)
    beta = split.beta.double().sum(-2).flatten(2)[:, :, : log_decay.shape[1]]
    assert torch.equal(beta.float(), (built.beta * factor).float())


def test_prefix_of_other_decays_is_empty(device):
    q = torch.empty(2, 5, 3, 8, device=device)
    for log_decay in (None, torch.zeros(3, device=device)):
        empty = prefix.allocate(AttentionProblem.of(Inputs(q, q, q, log_decay), True), q)
        assert [tensor.numel() for tensor in empty] == [0, 0, 0, 0]


# The sequence of a block of a launch


@triton.jit
def _count(ends, count, blocks, found, before, SEARCHES: tl.constexpr):
    sequence, start = sequences.count_ends(ends, count, tl.load(blocks + tl.program_id(0)), SEARCHES)
    tl.store(found + tl.program_id(0), sequence)
    tl.store(before + tl.program_id(0), start)


@pytest.mark.parametrize(("count", "searches"), [
    (1, 1), (127, 1), (128, 1), (129, 2), (255, 2), (256, 2), (1000, 2), (2**14, 2), (2**14 + 1, 3), (30_000, 3),
])
def test_a_block_finds_its_sequence(count, searches, device):
    """Sequences of 0 to 3 blocks: by bisection on the host."""
    ends = torch.randint(0, 4, (count,), device=device).cumsum(0).int()
    some = torch.randint(0, int(ends[-1]) + 3, (12,))
    blocks = torch.cat([some, torch.tensor([0, ends[-1] - 1, ends[-1]]).clamp(min=0)]).to(device, torch.int32)
    found, before = torch.empty(2, len(blocks), dtype=torch.int32, device=device)
    _count[(len(blocks),)](ends, count, blocks, found, before, SEARCHES=searches)
    q, bounds = torch.empty(1, 5, 1, 16, device=device), torch.zeros(count, 4, dtype=torch.int32, device=device)
    packed = AttentionProblem.of(Inputs(q, q, q, bounds=bounds), True, longest=(5, 5))  # sequences of no token
    assert searches == sequences.constants(packed)["SEARCHES"]
    expected = torch.searchsorted(ends, blocks, right=True)
    assert torch.equal(found, expected.int())
    assert torch.equal(before, torch.cat([ends.new_zeros(1), ends])[expected])


def test_a_launch_has_programs_for_the_blocks_that_can_exist(device):
    """Not for as many as the longest sequence would need in each, and no fewer than lengths within the bounds have."""
    rows, keys = [4000, *[1] * 63], [*[130] * 63, 4000]
    q, k = torch.empty(1, sum(rows), 2, 16, device=device), torch.empty(1, sum(keys), 2, 16, device=device)
    starts = [[0, *itertools.accumulate(lengths)][:-1] for lengths in (rows, keys)]
    bounds = torch.tensor([*zip(starts[0], rows, starts[1], keys, strict=True)], dtype=torch.int32, device=device)
    problem = AttentionProblem.of(Inputs(q, k, k, bounds=bounds), True, longest=(4000, 4000))
    found = sequences.find(problem, bounds)
    for lengths, ends, most in ((rows, found.ends[0], found.row_blocks), (keys, found.ends[1], found.token_blocks)):
        blocks = [math.ceil(length / 128) for length in lengths]
        assert ends.tolist() == [*itertools.accumulate(blocks)]
        assert sum(blocks) <= most <= sum(blocks) + 64 + 15
