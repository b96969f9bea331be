"""The plan of a halo, with its ranks simulated in one process.

A float64 oracle computes the probability of the keys that are not fetched: it is within the tolerance for any inputs,
and too large for wrong plans.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

from decayattn import reference
from decayattn.backends.planning import halo_bound, prefix, skipping
from decayattn.backends.runtime import launching
from decayattn.distributed import halo_plan
from decayattn.distributed.collectives import Slices
from decayattn.problem import DECAY_BLOCK, GRANULE, AttentionProblem, Inputs

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = math.inf
DIM, HEADS, KV_HEADS = 8, 2, 1
LENGTHS = {"equal": (130, 130, 130), "uneven": (70, 0, 200, 140), "short": (1, 2, 257, 150), "blocks": (256, 256, 128)}


def make(kind, length, dtype=torch.float64, seed=0, mean=-0.1):
    """Inputs of a sequence."""
    torch.manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (torch.randn(1, length, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS))
    log_decay = 2 * mean * torch.rand(1, length, HEADS, dtype=torch.float64)
    row_scale = None
    if kind == "against":  # the early keys point along all queries, and the own keys the other way: the bound is tight
        direction = normalize(torch.randn(DIM, dtype=torch.float64), dim=0)
        sign = torch.where(torch.arange(length) < length // 3, 1.0, -1.0)[None, :, None, None]
        q, k = 4 * direction.expand_as(q), 4 * direction * sign.expand_as(k)
    elif kind == "growth":
        log_decay += 0.3 * torch.randn_like(log_decay)
    elif kind == "up and down":  # the sum over the second slice, and the first λ of the third one, which cancel
        log_decay[:, 131:260], log_decay[:, 260] = 0.25, -129 * 0.25
    elif kind == "down and up":  # the second slice's first λ, and the sum of its others
        log_decay[:, 131:260], log_decay[:, 130] = -0.25, 129 * 0.25
    elif kind == "strong":
        log_decay *= 5
    elif kind == "resets":
        log_decay = log_decay.masked_fill(torch.rand_like(log_decay) < 0.004, -INF)
    elif kind == "constant":
        log_decay = mean * torch.tensor([1.0, 5.0], dtype=torch.float64)
    elif kind == "growing constant":
        log_decay = torch.tensor([0.02, -0.3], dtype=torch.float64)
    elif kind == "outlier":
        k[:, 37] *= 30
    elif kind == "scale":
        row_scale = torch.randn(1, length, HEADS, dtype=torch.float64).to(DEVICE, wide)
    elif kind == "strong then weak":
        log_decay = torch.where(torch.arange(length)[:, None] < 100, 0.0, log_decay)
    q, k, log_decay = q.to(DEVICE, dtype), k.to(DEVICE, dtype), log_decay.to(DEVICE, wide)
    return Inputs(q, k, k, log_decay, row_scale, scale=1.0 if kind == "scale" else DIM**-0.5)


def problem_of(inputs, window=-1, tolerance=0.0):
    return AttentionProblem.of(inputs, True, (window, -1), skip_tolerance=tolerance)


class Ranks:
    """`halo_plan.first_keys` of all ranks in one process, in two rounds: the second reads what the first gathered."""

    def __init__(self, monkeypatch, inputs, lengths, window=-1, cu_seqlens=None):
        self.inputs, self.lengths, self.limits = inputs, lengths, halo_plan.ViewLimits(window, None, cu_seqlens)
        self.gathered: dict[int, torch.Tensor] = {}
        self.rank = 0

        def gather(own, ranks, group):
            self.gathered[self.rank] = own
            return torch.stack([self.gathered.get(rank, own) for rank in range(ranks)])

        monkeypatch.setattr(halo_plan, "all_gather", gather)

    def plan(self, tolerance):
        """First keys (ranks, B, H_kv), and rows (ranks,)."""
        for _ in range(2):
            found = [self.plan_of(rank, tolerance) for rank in range(len(self.lengths))]
        return [torch.stack(x).cpu() for x in zip(*found, strict=True)]

    def plan_of(self, rank, tolerance):
        self.rank = rank
        mine = slice(sum(self.lengths[:rank]), sum(self.lengths[: rank + 1]))
        own = [x[:, mine] if isinstance(x, torch.Tensor) and x.ndim > 1 else x for x in self.inputs]
        inputs, check = Inputs(*own), SimpleNamespace(compare=lambda: None)
        problem, slices = problem_of(inputs, tolerance=tolerance), Slices(self.lengths, rank, lambda: self)
        found, _ = halo_plan.first_keys(slices, problem, inputs, self.limits, tolerance, check)
        assert check.width == len(found)
        return found[:-1].view(problem.batch, problem.num_kv_heads), found[-1]


def lost(inputs, lengths, first, rows=None):
    """The largest probability that a row has among keys that its rank does not fetch. Rows from `rows` of their slice
    on lose all keys before it."""
    inputs = Inputs(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs))
    problem, i = problem_of(inputs), torch.arange(inputs.q.shape[1])
    exact = inputs._replace(q=inputs.q.double(), k=inputs.k.double().repeat_interleave(HEADS // KV_HEADS, 2))
    weights, total, _ = reference.row_weights(problem._replace(dtype=torch.float64), exact, i[None, None], i)
    of_row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    first = first[of_row].repeat_interleave(HEADS // KV_HEADS, 2)  # (T, B, H)
    if rows is not None:
        begin = torch.tensor([0, *lengths]).cumsum(0)[of_row]
        first = torch.where((i - begin >= rows[of_row])[:, None, None], begin[:, None, None], first)
    return float(torch.where(i < first.permute(1, 2, 0)[..., None], weights / total, 0.0).sum(-1).max())


TOLERANCES = (2.0**-54, 2.0**-25, 1e-3, 0.3)
KINDS = (
    "plain", "against", "growth", "up and down", "down and up", "strong", "resets", "constant", "growing constant",
    "outlier", "scale", "strong then weak",
)


@pytest.mark.parametrize(
    ("how", "dtype"), [("equal", torch.float64), ("uneven", torch.float16), ("short", torch.float32)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_probability_of_unfetched_keys_is_below_tolerance(monkeypatch, kind, how, dtype):
    lengths = LENGTHS[how]
    inputs = make(kind, sum(lengths), dtype)
    ranks = Ranks(monkeypatch, inputs, lengths)
    for tolerance in TOLERANCES:
        first, rows = ranks.plan(tolerance)
        assert lost(inputs, lengths, first, rows) <= tolerance


def test_rounding_leaves_nothing_unfetched(monkeypatch):
    """The sum over a slice is 90,000: float32 has 17 bits before the point for it. The next slice subtracts it again.
    That slice's first row of a granule gives the first block a little more than the tolerance."""
    lengths = 256, 320
    for seed in range(16):
        q, k = (torch.zeros(1, sum(lengths), n, DIM).half().to(DEVICE) for n in (HEADS, KV_HEADS))
        rates = 645 + 100 * torch.rand(1, 128, HEADS, generator=torch.Generator().manual_seed(seed))
        log_decay = torch.zeros(1, sum(lengths), HEADS)
        log_decay[:, 128:256], log_decay[:, 256:384], log_decay[:, 384] = rates, -rates, -20.0
        inputs = Inputs(q, k, k, log_decay.to(DEVICE))
        tolerance = (1 - 1e-8) * lost(inputs, lengths, torch.zeros(2, 1, KV_HEADS), torch.tensor([0, 128]))
        assert 1e-12 < tolerance < 1e-6
        assert lost(inputs, lengths, *Ranks(monkeypatch, inputs, lengths).plan(tolerance)) <= tolerance, seed


@pytest.mark.parametrize("kind", ["plain", "scale"])
def test_ranks_fetch_the_blocks_that_one_process_visits(monkeypatch, kind):
    """The bound is that of skipping tiles: over whole blocks, it is the same one."""
    lengths, tolerance = LENGTHS["blocks"], 2.0**-25
    inputs = make(kind, sum(lengths), mean=-1.0)
    whole, log_decay = problem_of(inputs, tolerance=tolerance), inputs.log_decay
    assert skipping.is_planned(whole)
    planned = skipping.plan(
        whole, inputs.q, inputs.k, log_decay, inputs.any_scale, prefix.build(whole, log_decay), None
    )
    found = Ranks(monkeypatch, inputs, lengths).plan(tolerance)[0]
    at = 0
    for rank, length in enumerate(lengths):
        visited = planned[..., at // GRANULE : (at + length) // GRANULE].amin((1, 2)) * DECAY_BLOCK
        assert found[rank].tolist() == [[min(at, int(x))] for x in visited]
        at += length
    assert (found[1:] > 0).all()


@pytest.mark.parametrize("kind", ["plain", "constant", "scale", "resets", "growth", "outlier"])
@pytest.mark.parametrize("rows", [0, 128, 192])
def test_summaries_of_a_slice_plan_its_last_rows(kind, rows):
    inputs = make(kind, 791, mean=-1.0)
    scale = inputs.row_scale
    far_inputs = inputs._replace(q=inputs.q[:, rows:], row_scale=None if scale is None else scale[:, rows:])
    whole, far = (problem_of(x, tolerance=2.0**-25) for x in (inputs, far_inputs))
    log_decay = inputs.log_decay
    of_blocks, of_granules = halo_bound.summarise(whole, inputs.q, inputs.k, log_decay, inputs.any_scale, 8).terms
    sums = prefix.build(whole, log_decay) if whole.decay == "scalar" else prefix.allocate(whole, inputs.q)
    call = far, far_inputs.q, inputs.k, log_decay, far_inputs.any_scale, sums, None
    granules = -(-far.query_length // GRANULE)
    expected = skipping.plan(*call)[..., :granules]
    known = of_blocks, of_granules[:, :, rows // GRANULE :]
    assert torch.equal(skipping.plan(*call, terms=known)[..., :granules], expected)
    assert expected.max() > 0


def test_a_cached_launch_is_of_a_rank_and_of_slices_as_long(monkeypatch):
    """A launch also depends on its rows' other bounds: kernels are specialised for values of 1 and multiples of 16."""
    modes = []
    monkeypatch.setattr(launching, "of_call", lambda _, __, *of_call: modes.append(of_call) or launching.uncached)
    for lengths, limits in (((130, 130), {}), ((130, 300), {}), ((130, 130), dict(window=40))):
        ranks = Ranks(monkeypatch, make("plain", sum(lengths)), lengths, **limits)
        for rank in range(2):
            ranks.plan_of(rank, 1e-3)
    first, second, of_longer, _, _, with_window = modes
    assert first[0] == second[0] == of_longer[0] == with_window[0]
    assert len({first, second, of_longer, with_window}) == 4


# Keys that a row cannot see, and values that are not finite


@pytest.mark.parametrize("tolerance", [0.0, 2.0**-25])
def test_resets_windows_and_sequences_bound_the_halo(monkeypatch, tolerance):
    lengths = LENGTHS["equal"]
    inputs = make("plain", sum(lengths), mean=-1e-3)

    def firsts(log_decay=inputs.log_decay, **limits):
        own = inputs._replace(log_decay=log_decay)
        return Ranks(monkeypatch, own, lengths, **limits).plan(tolerance)[0].flatten().tolist()

    assert firsts() == [0, 0, 0]
    assert firsts(window=100) == [0, 30, 160]
    assert firsts(cu_seqlens=torch.tensor([0, 100, 100, 260, 300], device=DEVICE)) == [0, 100, 260]
    reset = inputs.log_decay.clone()
    reset[0, [50, 90], 0], reset[0, [70], 1] = -INF, -1e9
    assert firsts(reset) == [0, 70, 70]
    reset[0, 130] = -INF  # a slice's first token
    assert firsts(reset) == [0, 130, 130]
    assert firsts(torch.full_like(reset[0, 0], -1e4)) == [0, 130, 260]


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_that_skips_nothing_fetches_all_visible_keys(monkeypatch, seed):
    """The kernels' bounds of visible keys are those of PyTorch's operators."""
    random = torch.Generator().manual_seed(seed)

    def number(high, low=0):
        return int(torch.randint(low, high, (), generator=random))

    lengths = tuple(number(3) and number(200) for _ in range(4))
    inputs = make("constant" if seed % 3 == 2 else "plain", sum(lengths), mean=-1e-6, seed=seed)
    if seed % 3 == 2:
        inputs.log_decay[number(2)] = -1e4
    else:
        inputs.log_decay.masked_fill_(torch.rand_like(inputs.log_decay) < 0.004, -INF)
    limits = {}
    if seed % 2:
        limits["window"] = number(200)
    if seed % 4 > 1:
        # offsets may fall, end before the last token or after it, and be more than a kernel reads at once
        offsets = torch.randint(-5, sum(lengths) + 100, (number(300, 1),), generator=random).sort().values
        offsets[number(len(offsets))] = 0
        limits["cu_seqlens"] = torch.stack([offsets, offsets], 1).to(DEVICE)[:, seed % 2]
    seen, planned = (Ranks(monkeypatch, inputs, lengths, **limits).plan(tolerance) for tolerance in (0.0, 1e-20))
    assert all(map(torch.equal, seen, planned))


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("name", ["q", "k", "log_decay"])
def test_values_that_are_not_finite_fetch_everything(monkeypatch, name, bad):
    lengths = (128, 128, 128)
    inputs = make("plain", sum(lengths), mean=-3.0)
    right = Ranks(monkeypatch, inputs, lengths).plan(2.0**-25)[0]
    assert (right[1:].flatten() == torch.tensor([0, 128])).all()
    getattr(inputs, name)[0, 5 if name != "q" else 300, 0] = bad
    assert Ranks(monkeypatch, inputs, lengths).plan(2.0**-25)[0][2].max() == 0
