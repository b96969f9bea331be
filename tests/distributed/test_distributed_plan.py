"""The plan of a halo, its ranks simulated in one process: what is not fetched weighs no more than the tolerance by a
float64 oracle, whatever the inputs are; and plans that are wrong do not pass."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import normalize

from decayattn import compatibility, reference
from decayattn.backends.planning import halo_bound as planning
from decayattn.backends.planning import prefix, skipping
from decayattn.backends.runtime import launching
from decayattn.distributed import fetching
from decayattn.distributed.exchange import Slices
from decayattn.problem import DECAY_BLOCK, AttentionProblem

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = math.inf
SUMMARISE = planning.summarise
DIM, HEADS, KV_HEADS = 8, 2, 1
LENGTHS = {"equal": (130, 130, 130), "uneven": (70, 0, 200, 140), "short": (1, 2, 257, 150), "blocks": (256, 256, 128)}


def make(kind, length, dtype=torch.float64, seed=0, mean=-0.1) -> dict:
    """q, k, log_decay and scale of a sequence."""
    torch.manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k = (torch.randn(1, length, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS))
    log_decay = 2 * mean * torch.rand(1, length, HEADS, dtype=torch.float64)
    scale = DIM**-0.5
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
        scale = torch.randn(1, length, HEADS, dtype=torch.float64).to(wide)
    elif kind == "strong then weak":
        log_decay = torch.where(torch.arange(length)[:, None] < 100, 0.0, log_decay)
    found = dict(q=q.to(dtype), k=k.to(dtype), log_decay=log_decay.to(wide), scale=scale)
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in found.items()}


class Keys(NamedTuple):
    """Views of what planning.SliceSummary.keys says it has."""

    longest: torch.Tensor
    weight: torch.Tensor
    total: torch.Tensor
    first: torch.Tensor
    last_reset: torch.Tensor

    @classmethod
    def of(cls, keys, problem, blocks):
        heads = problem.batch, problem.num_heads
        shapes = [(problem.batch, problem.num_kv_heads, blocks), (*heads, blocks), heads, heads, heads]
        return cls(*(x.view(shape) for x, shape in zip(keys.split([*map(math.prod, shapes)]), shapes, strict=True)))


class Ranks:
    """`fetching.first_keys` of all ranks of one process: what they gather is kept between two rounds.

    change: of their summaries, in place.
    """

    def __init__(self, monkeypatch, inputs, lengths, window=-1, cu_seqlens=None, change=None):
        self.inputs, self.lengths, self.sight = inputs, lengths, fetching.Sight(window, None, cu_seqlens)
        self.gathered: dict[int, torch.Tensor] = {}
        self.summaries: dict[int, tuple] = {}
        self.rank = 0

        def remembered(*args):
            if self.rank not in self.summaries:
                summary = SUMMARISE(*args)
                if change:
                    change(Keys.of(summary.keys, args[0], args[5]), summary.terms[1], *args[1:5])
                self.summaries[self.rank] = summary
            return self.summaries[self.rank]

        def gather(everyone, own, group):
            self.gathered[self.rank] = own[0]
            for rank in range(len(lengths)):
                everyone[rank] = self.gathered.get(rank, own[0])

        monkeypatch.setattr(planning, "summarise", remembered)
        monkeypatch.setattr(compatibility, "all_gather", gather)

    def first(self, tolerance):
        """(ranks, B, H_kv)"""
        return self.first_and_rows(tolerance)[0]

    def first_and_rows(self, tolerance):
        """The same, and (ranks,)."""
        for _ in range(2):
            found = [self.first_of(rank, tolerance) for rank in range(len(self.lengths))]
        return [torch.stack(x).cpu() for x in zip(*found, strict=True)]

    def first_of(self, rank, tolerance):
        self.rank = rank
        mine = slice(sum(self.lengths[:rank]), sum(self.lengths[: rank + 1]))
        part = {
            name: x[:, mine] if isinstance(x, torch.Tensor) and x.ndim > 1 else x for name, x in self.inputs.items()
        }
        row_scale = part["scale"] if isinstance(part["scale"], torch.Tensor) else None
        problem = AttentionProblem.of(
            part["q"], part["k"], part["log_decay"], row_scale, True, skip_tolerance=tolerance
        )
        slices, handshake = Slices(self.lengths, rank, lambda: self), SimpleNamespace(meet=lambda: None)
        found, _ = fetching.first_keys(
            slices, problem, part["q"], part["k"], part["log_decay"], part["scale"], self.sight, tolerance, handshake
        )
        assert handshake.width == len(found)
        return found[:-1].view(problem.batch, problem.num_kv_heads), found[-1]


def lost(inputs, lengths, first, window=-1, rows=None):
    """The largest probability that a row has among keys which its rank does not fetch; of rows from `rows` of their
    slice on, among all keys before it."""
    q, k, log_decay, scale = (inputs[name] for name in ("q", "k", "log_decay", "scale"))
    q, k, log_decay = q.cpu(), k.cpu(), log_decay.cpu()
    scale = scale.cpu() if isinstance(scale, torch.Tensor) else scale
    row_scale = scale if isinstance(scale, torch.Tensor) else None
    problem = AttentionProblem.of(q, k, log_decay, row_scale, True, (window, -1))
    i = torch.arange(q.shape[1])
    scores = reference.scaled_products(
        q.double(), k.double().repeat_interleave(HEADS // KV_HEADS, 2),
        scale.double() if isinstance(scale, torch.Tensor) else scale,
    )
    scores = scores + reference.decay_bias(problem, log_decay, i[None, None], i)
    visible = reference.visible_pairs(problem, log_decay, i[None, None], i, None)
    weights, total, _ = reference.masked_softmax(scores, visible)
    p = weights / total
    of_row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    first = first[of_row].repeat_interleave(HEADS // KV_HEADS, 2)  # (T, B, H)
    if rows is not None:
        begin = torch.tensor([0, *lengths]).cumsum(0)[of_row]
        first = torch.where((i - begin >= rows[of_row])[:, None, None], begin[:, None, None], first)
    return float(torch.where(i < first.permute(1, 2, 0)[..., None], p, 0.0).sum(-1).max())


TOLERANCES = (2.0**-54, 2.0**-25, 1e-3, 0.3)
KINDS = (
    "plain", "against", "growth", "up and down", "down and up", "strong", "resets", "constant", "growing constant",
    "outlier", "scale", "strong then weak",
)


@pytest.mark.parametrize(
    ("how", "dtype"), [("equal", torch.float64), ("uneven", torch.float16), ("short", torch.float32)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_fetched_weighs_less_than_the_tolerance(monkeypatch, kind, how, dtype):
    lengths = LENGTHS[how]
    inputs = make(kind, sum(lengths), dtype)
    ranks = Ranks(monkeypatch, inputs, lengths)
    for tolerance in TOLERANCES:
        first, rows = ranks.first_and_rows(tolerance)
        assert lost(inputs, lengths, first, rows=rows) <= tolerance


def test_rounding_leaves_nothing_unfetched(monkeypatch):
    """The sum over a slice is 90,000, of which float32 has 17 bits before the point, and the next slice takes it back.
    Its first row of a granule gives the first block a little more than the tolerance."""
    lengths = 256, 320
    for seed in range(16):
        heads = {"q": HEADS, "k": KV_HEADS}
        inputs = {name: torch.zeros(1, sum(lengths), n, DIM).half().to(DEVICE) for name, n in heads.items()}
        rates = 645 + 100 * torch.rand(1, 128, HEADS, generator=torch.Generator().manual_seed(seed))
        log_decay = torch.zeros(1, sum(lengths), HEADS)
        log_decay[:, 128:256], log_decay[:, 256:384], log_decay[:, 384] = rates, -rates, -20.0
        inputs |= {"log_decay": log_decay.to(DEVICE), "scale": 1.0}
        everything, near = torch.zeros(2, 1, KV_HEADS), torch.tensor([0, 128])
        tolerance = (1 - 1e-8) * lost(inputs, lengths, everything, rows=near)
        assert 1e-12 < tolerance < 1e-6
        first, rows = Ranks(monkeypatch, inputs, lengths).first_and_rows(tolerance)
        assert lost(inputs, lengths, first, rows=rows) <= tolerance, seed


def test_few_rows_see_the_halo_of_a_strong_decay(monkeypatch):
    lengths = LENGTHS["blocks"]
    _, rows = Ranks(monkeypatch, make("plain", sum(lengths), mean=-1.0), lengths).first_and_rows(2.0**-25)
    assert rows.tolist() == [0, 64, 64]
    _, rows = Ranks(monkeypatch, make("plain", sum(lengths), mean=-1e-3), lengths).first_and_rows(2.0**-25)
    assert rows.tolist() == [0, 256, 128]


@pytest.mark.parametrize("scale", ["plain", "scale"])
def test_as_much_is_fetched_as_one_process_would_visit(monkeypatch, scale):
    """The bound is that of skipping tiles: over whole blocks, it is the same one."""
    lengths, tolerance = LENGTHS["blocks"], 2.0**-25
    inputs = make(scale, sum(lengths), mean=-1.0)
    q, log_decay, scale = inputs["q"], inputs["log_decay"], inputs["scale"]
    row_scale = scale if isinstance(scale, torch.Tensor) else None
    whole = AttentionProblem.of(q, inputs["k"], log_decay, row_scale, True, skip_tolerance=tolerance)
    assert skipping.is_planned(whole)
    planned = skipping.plan(whole, q, inputs["k"], log_decay, scale, prefix.build(whole, log_decay), None)
    found = Ranks(monkeypatch, inputs, lengths).first(tolerance)
    at = 0
    for rank, length in enumerate(lengths):
        visited = planned[..., at // skipping.GRANULE : (at + length) // skipping.GRANULE].amin((1, 2)) * DECAY_BLOCK
        assert found[rank].tolist() == [[min(at, int(x))] for x in visited]
        at += length
    assert (found[1:] > 0).all()


@pytest.mark.parametrize("kind", ["plain", "constant", "scale", "resets", "growth", "outlier"])
@pytest.mark.parametrize("rows", [0, 128, 192])
def test_what_is_known_of_a_slice_plans_its_last_rows(kind, rows):
    length, tolerance = 791, 2.0**-25
    inputs = make(kind, length, mean=-1.0)
    q, k, log_decay, scale = (inputs[name] for name in ("q", "k", "log_decay", "scale"))
    far_q, far_scale = q[:, rows:], scale
    if kind == "scale":
        far_scale = scale[:, rows:]
    whole, far = (
        AttentionProblem.of(x, k, log_decay, s if kind == "scale" else None, True, skip_tolerance=tolerance)
        for x, s in ((q, scale), (far_q, far_scale))
    )
    of_blocks, of_granules = SUMMARISE(whole, q, k, log_decay, scale, 8).terms
    sums = prefix.build(whole, log_decay) if whole.decay == "scalar" else prefix.allocate(whole, q)
    call = far, far_q, k, log_decay, far_scale, sums, None
    granules = -(-far.query_length // skipping.GRANULE)
    expected = skipping.plan(*call)[..., :granules]
    known = of_blocks, of_granules[:, :, rows // skipping.GRANULE :]
    assert torch.equal(skipping.plan(*call, terms=known)[..., :granules], expected)
    assert expected.max() > 0


def test_a_remembered_launch_is_of_a_rank_and_of_slices_as_long(monkeypatch):
    """A launch also depends on its rows' other bounds: kernels are specialised for values of 1 and multiples of 16."""
    modes = []
    monkeypatch.setattr(launching, "of_call", lambda _, __, *of_call: modes.append(of_call) or launching.uncached)
    packed = torch.tensor([0, 130], device=DEVICE)
    for lengths, sight in (
        ((130, 130), {}), ((130, 300), {}), ((130, 130), dict(window=40)), ((130, 130), dict(cu_seqlens=packed)),
    ):
        ranks = Ranks(monkeypatch, make("plain", sum(lengths)), lengths, **sight)
        for rank in range(2):
            ranks.first_of(rank, 1e-3)
    first, second, of_longer, _, _, with_window, _, of_packed = modes
    assert first[0] == second[0] == of_longer[0] == with_window[0]
    assert len({first, second, of_longer, with_window, of_packed}) == 5


# What is wrong is noticed


def worst(ranks, tolerances=TOLERANCES):
    """Largest ratio of the lost probability to its tolerance."""
    return max(lost(ranks.inputs, ranks.lengths, ranks.first(x)) / x for x in tolerances)


def without_total(keys, *_):
    keys.total.zero_()


def without_first(keys, *_):
    keys.first.zero_()


def without_own_score(keys, of_granules, q, k, log_decay, scale):
    """E is as if q_i·k_i were 0."""
    own = scale * (q * k.repeat_interleave(HEADS // KV_HEADS, 2)).sum(-1) / math.log(2)
    least = [part.amin(1) for part in own.split(skipping.GRANULE, 1)]
    more = torch.stack([own.new_zeros(1, HEADS, len(least)), torch.stack(least, -1)], -1)
    of_granules += more


def without_norms(keys, *_):
    keys.longest.zero_()


def without_weights(keys, *_):
    keys.weight[:] = keys.weight.amin(-1, keepdim=True)


@pytest.mark.parametrize(
    ("change", "kind", "how"),
    [
        (without_total, "up and down", "equal"),
        (without_first, "down and up", "equal"),
        (without_own_score, "against", "equal"),
        (without_norms, "outlier", "uneven"),
        (without_weights, "strong", "blocks"),
    ],
)
def test_a_plan_without_one_of_its_terms_loses_too_much(monkeypatch, change, kind, how):
    inputs = make(kind, sum(LENGTHS[how]))
    assert worst(Ranks(monkeypatch, inputs, LENGTHS[how])) <= 1
    assert worst(Ranks(monkeypatch, inputs, LENGTHS[how], change=change)) > 1


@pytest.mark.parametrize("kind", ["against", "plain"])
def test_a_granule_too_few_of_rows_loses_too_much(monkeypatch, kind):
    lengths, tolerance = LENGTHS["blocks"], 2.0**-54
    inputs = make(kind, sum(lengths), mean=-0.4)
    first, rows = Ranks(monkeypatch, inputs, lengths).first_and_rows(tolerance)
    assert 0 < rows[1] < 256
    assert lost(inputs, lengths, first, rows=rows) <= tolerance
    assert lost(inputs, lengths, first, rows=rows - skipping.GRANULE) > 100 * tolerance


def test_a_plan_without_totals_fetches_too_much(monkeypatch):
    lengths = LENGTHS["equal"]
    inputs = make("plain", sum(lengths), mean=-0.4)
    right = Ranks(monkeypatch, inputs, lengths).first(2.0**-25)
    wrong = Ranks(monkeypatch, inputs, lengths, change=without_total).first(2.0**-25)
    assert (wrong <= right).all()
    assert wrong[2].max() < right[2].min()


# What a row cannot see is not fetched, and what nothing is known of is


def test_resets_windows_and_sequences_bound_the_halo(monkeypatch):
    lengths = LENGTHS["equal"]
    inputs = make("plain", sum(lengths), mean=-1e-3)
    for tolerance in (0.0, 2.0**-25):
        assert Ranks(monkeypatch, inputs, lengths).first(tolerance).flatten().tolist() == [0, 0, 0]
        assert Ranks(monkeypatch, inputs, lengths, window=100).first(tolerance).flatten().tolist() == [0, 30, 160]
        packed = Ranks(monkeypatch, inputs, lengths, cu_seqlens=torch.tensor([0, 100, 100, 260, 300], device=DEVICE))
        assert packed.first(tolerance).flatten().tolist() == [0, 100, 260]
        reset = dict(inputs, log_decay=inputs["log_decay"].clone())
        reset["log_decay"][0, [50, 90], 0] = -INF
        reset["log_decay"][0, [70], 1] = -1e9
        assert Ranks(monkeypatch, reset, lengths).first(tolerance).flatten().tolist() == [0, 70, 70]
        reset["log_decay"][0, 130] = -INF  # a slice's first token
        assert Ranks(monkeypatch, reset, lengths).first(tolerance).flatten().tolist() == [0, 130, 130]
        alone = dict(inputs, log_decay=torch.full_like(inputs["log_decay"][0, 0], -1e4))
        assert Ranks(monkeypatch, alone, lengths).first(tolerance).flatten().tolist() == [0, 130, 260]


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_that_can_leave_nothing_is_what_rows_see(monkeypatch, seed):
    """The kernels' bounds of what rows see are those of PyTorch's operators."""
    random = torch.Generator().manual_seed(seed)

    def number(high, low=0):
        return int(torch.randint(low, high, (), generator=random))

    lengths = tuple(number(3) and number(200) for _ in range(4))
    inputs = make("constant" if seed % 3 == 2 else "plain", sum(lengths), mean=-1e-6, seed=seed)
    if seed % 3 == 2:
        inputs["log_decay"][number(2)] = -1e4
    else:
        inputs["log_decay"] = inputs["log_decay"].masked_fill(torch.rand_like(inputs["log_decay"]) < 0.004, -INF)
    sight = {}
    if seed % 2:
        sight["window"] = number(200)
    if seed % 4 > 1:
        # offsets may fall, end before the last token or behind it, and be more than a kernel reads at once
        offsets = torch.randint(-5, sum(lengths) + 100, (number(300, 1),), generator=random).sort().values
        offsets[number(len(offsets))] = 0
        sight["cu_seqlens"] = torch.stack([offsets, offsets], 1).to(DEVICE)[:, seed % 2]
    seen, planned = (
        Ranks(monkeypatch, inputs, lengths, **sight).first_and_rows(tolerance) for tolerance in (0.0, 1e-20)
    )
    assert torch.equal(seen[0], planned[0])
    assert torch.equal(seen[1], planned[1])


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("name", ["q", "k", "log_decay"])
def test_what_is_no_number_is_fetched(monkeypatch, name, bad):
    lengths = (128, 128, 128)
    inputs = make("plain", sum(lengths), mean=-3.0)
    tolerance = 2.0**-25
    right = Ranks(monkeypatch, inputs, lengths).first(tolerance)
    assert (right[1:].flatten() == torch.tensor([0, 128])).all()
    inputs[name][0, 5 if name != "q" else 300, 0] = bad
    found = Ranks(monkeypatch, inputs, lengths).first(tolerance)
    assert found[2].max() == 0
