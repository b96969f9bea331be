"""DERIVATION.md, formula by formula: test_n_… checks section n, and the functions that the text names must exist."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch

import decayattn

PACKAGE = Path(decayattn.__file__).parent
TEXT = (PACKAGE / "DERIVATION.md").read_text(encoding="utf-8")
T, D = 7, 3
TILES = [slice(0, 2), slice(2, 5), slice(5, 7)]  # of unequal sizes on purpose


class Case:
    """One small causal problem in float64, its exact results, and its gradients by autograd."""

    def __init__(self, causal=True, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.q, self.k, self.v, self.log_decay, self.s = draw(T, D), draw(T, D), draw(T, D), draw(T), draw(T)
        self.do, self.dlse = draw(T, D), draw(T)
        leaves = [x.requires_grad_() for x in (self.q, self.k, self.v, self.log_decay, self.s)]
        i = torch.arange(T)
        self.distance = i[:, None] - i
        self.sigma = self.distance.sign()
        alpha = self.log_decay.cumsum(0)
        scores = self.s[:, None] * (self.q @ self.k.T) + self.sigma * (alpha[:, None] - alpha)
        self.visible = self.distance >= 0 if causal else torch.ones(T, T, dtype=torch.bool)
        scores = scores.masked_fill(~self.visible, -math.inf)
        self.p, self.lse = scores.softmax(-1), scores.logsumexp(-1)
        self.o = self.p @ self.v
        gradients = torch.autograd.grad([self.o, self.lse], [scores, alpha, *leaves], [self.do, self.dlse])
        self.d_scores, self.d_alpha, self.dq, self.dk, self.dv, self.d_log_decay, self.ds = gradients
        for name, x in vars(self).items():
            if isinstance(x, torch.Tensor):
                setattr(self, name, x.detach())
        self.scores, self.alpha = scores.detach(), alpha.detach()


@pytest.fixture(params=[True, False], ids=["causal", "both ways"])
def case(request):
    return Case(causal=request.param)


def close(a, b):
    # float64 sums of a few terms of size 1
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_1_safe_softmax(case):
    for m in (case.scores.amax(1, keepdim=True), torch.full((T, 1), 0.7, dtype=torch.float64)):
        weights = (case.scores - m).exp()
        close(weights / weights.sum(1, keepdim=True), case.p)
    assert (case.scores + 1e6).exp().sum(1).isinf().all()


def online_softmax(scores, v, tiles):
    m, l, a = torch.full((len(scores),), -math.inf, dtype=scores.dtype), 0.0, torch.zeros(len(scores), D).double()
    for tile in tiles:
        m_new = torch.maximum(m, scores[:, tile].amax(1))
        anchor = torch.where(m_new.isneginf(), 0.0, m_new)  # a row that has seen nothing yet
        c, p = (m - anchor).exp(), (scores[:, tile] - anchor[:, None]).exp()
        l, a, m = c * l + p.sum(1), c[:, None] * a + p @ v[tile], m_new
    return m, l, a


def test_2_online_softmax(case):
    for tiles in (TILES, TILES[::-1], [slice(0, T)]):
        for seen in range(1, len(tiles) + 1):  # the claim, after any number of tiles
            m, l, a = online_softmax(case.scores, case.v, tiles[:seen])
            scores = torch.cat([case.scores[:, tile] for tile in tiles[:seen]], 1)
            anchor = torch.where(m.isneginf(), 0.0, m)
            assert torch.equal(m, scores.amax(1))
            close(l, (scores - anchor[:, None]).exp().sum(1))
            close(a, (scores - anchor[:, None]).exp() @ torch.cat([case.v[tile] for tile in tiles[:seen]]))
        close(a / l[:, None], case.o)
        close(m + l.log(), case.lse)


def test_3_both_loop_orders(case):
    # FlashAttention 1: keys outside, every row's state goes through memory. FlashAttention 2: as in test_2
    m, l, a = torch.full((T,), -math.inf).double(), torch.zeros(T).double(), torch.zeros(T, D).double()
    for keys in TILES:
        for rows in TILES:
            s = case.scores[rows, keys]
            new = torch.maximum(m[rows], s.amax(1))
            anchor = torch.where(new.isneginf(), 0.0, new)
            c, p = (m[rows] - anchor).exp(), (s - anchor[:, None]).exp()
            m[rows], l[rows] = new, c * l[rows] + p.sum(1)
            a[rows] = c[:, None] * a[rows] + p @ case.v[keys]
    close(a / l[:, None], case.o)
    close(m + l.log(), case.lse)


def test_4_p_from_the_log_sum_exp(case):
    close((case.scores - case.lse[:, None]).exp(), case.p)
    scores = case.scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scores.logsumexp(1).sum(), scores)
    close(gradient, case.p)


def explicit_d_scores(case):
    delta = (case.do * case.o).sum(1) - case.dlse
    return torch.where(case.visible, case.p * (case.do @ case.v.T - delta[:, None]), 0.0)


def test_5_softmax_jacobian_and_delta(case):
    dp = case.do @ case.v.T
    for row in range(T):
        jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(0), case.scores[row, : row + 1])
        p = case.scores[row, : row + 1].softmax(0)
        close(jacobian, p.diag() - p[:, None] * p)
    close((case.p * dp).sum(1), (case.do * case.o).sum(1))
    close(explicit_d_scores(case), case.d_scores)


def test_6_queries_keys_values_scales(case):
    ds = explicit_d_scores(case)
    close(case.p.T @ case.do, case.dv)
    close(case.s[:, None] * (ds @ case.k), case.dq)
    close((case.s[:, None] * ds).T @ case.q, case.dk)
    close((case.q * (ds @ case.k)).sum(1), case.ds)
    close((ds * (case.q @ case.k.T)).sum(1), case.ds)


def test_7_decay(case):
    path_sum = torch.zeros(T, T).double()
    for i in range(T):
        for j in range(T):
            path_sum[i, j] = case.log_decay[min(i, j) + 1 : max(i, j) + 1].sum()
    close(path_sum, case.sigma * (case.alpha[:, None] - case.alpha))

    ds = explicit_d_scores(case)
    d_alpha = (case.sigma * ds).sum(1) - (case.sigma * ds).sum(0)
    close(d_alpha, case.d_alpha)
    d_log_decay = d_alpha.flip(0).cumsum(0).flip(0)
    close(d_log_decay, case.d_log_decay)
    close(d_log_decay[0], torch.zeros(()).double())
    i = torch.arange(T)
    for t in range(T):
        separated = (torch.minimum(i[:, None], i) < t) & (t <= torch.maximum(i[:, None], i))
        close(ds[separated].sum(), case.d_log_decay[t])


def test_7_constant_decay(case):
    gamma = torch.tensor(-0.3, dtype=torch.float64, requires_grad=True)
    scores = (case.q @ case.k.T + gamma * case.distance.abs()).masked_fill(~case.visible, -math.inf)
    p = scores.softmax(1)
    (d_scores, d_gamma) = torch.autograd.grad(p @ case.v, [scores, gamma], case.do)
    close((d_scores * case.distance.abs()).sum(), d_gamma)
    t_d_alpha = torch.arange(T) * ((case.sigma * d_scores).sum(1) - (case.sigma * d_scores).sum(0))
    close(t_d_alpha.sum(), d_gamma)


def test_8_two_level_prefix():
    length, block = 200_000, 128
    log_decay = -1.4 * torch.rand(length, generator=torch.Generator().manual_seed(0))
    exact = log_decay.double().cumsum(0)
    blocks = torch.nn.functional.pad(log_decay.double(), (0, -length % block)).reshape(-1, block)
    base = torch.cat([torch.zeros(1).double(), blocks.sum(1).cumsum(0)])[:-1]
    beta = blocks.cumsum(1).float().flatten()[:length]
    i = torch.arange(length - 64, length)
    j = i[:, None] - torch.arange(1, 300)
    wanted = exact[i][:, None] - exact[j]
    base_difference = (base[i // block][:, None] - base[j // block]).float()
    two_level = base_difference + beta[i][:, None] - beta[j]
    # every operand is below three blocks' decay, and three operations round
    bound = 3 * torch.finfo(torch.float32).eps * 3 * block * 1.4
    assert (two_level - wanted).abs().max() <= bound
    one_level = exact.float()[i][:, None] - exact.float()[j]
    assert (one_level - wanted).abs().max() > 10 * bound


def test_9_row_sums():
    """Inputs as in the kernels: O rounded to bfloat16, strong decay; without row sums the error is far larger."""
    length = 512
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(length, 16, generator=generator, dtype=torch.float64) for _ in range(4))
    i = torch.arange(length)
    scores = q @ k.T / 4 - 0.3 * (i[:, None] - i)
    p = scores.masked_fill(i[:, None] < i, -math.inf).softmax(1)
    errors = {}
    for rounded in (False, True):
        o = (p @ v).bfloat16().double() if rounded else p @ v
        ds = p * (do @ v.T - (do * o).sum(1, keepdim=True))
        for rows in (True, False):
            d_alpha = (ds.sum(1) if rows else 0) - ds.sum(0)
            errors[rounded, rows] = d_alpha.flip(0).cumsum(0).flip(0)
    close(errors[False, True], errors[False, False])
    exact = errors[False, True]
    with_rows, without = ((errors[True, rows] - exact).norm() for rows in (True, False))
    assert without > 10 * with_rows


def test_6_bias(case):
    """Broadcast over rows: gradients of rows that share an entry add up."""
    bias = torch.zeros(T, requires_grad=True, dtype=torch.float64)
    scores = case.scores + bias
    d_scores, d_bias = torch.autograd.grad(
        [scores.softmax(-1) @ case.v, scores.logsumexp(-1)], [scores, bias], [case.do, case.dlse]
    )
    close(d_bias, d_scores.sum(0))


@pytest.mark.parametrize("causal", [True, False])
def test_10_intervals_and_resets(causal):
    resets = torch.tensor([False, False, True, False, True, True, False])
    segment = resets.cumsum(0)
    i = torch.arange(T)
    visible = (segment[:, None] == segment) & ((i[:, None] >= i) | (not causal))
    first = [max([r for r in range(T) if resets[r] and r <= t], default=0) for t in range(T)]
    after = [min([r for r in range(T) if resets[r] and r > t], default=T) for t in range(T)]
    for t in range(T):
        end = t + 1 if causal else after[t]
        assert visible[t].nonzero().flatten().tolist() == list(range(first[t], end))
        mirror = t if causal else first[t]
        assert visible[:, t].nonzero().flatten().tolist() == list(range(mirror, after[t]))
    assert first == sorted(first)
    assert after == sorted(after)


def test_7_errors_of_row_terms_cancel_in_a_rate(case):
    """With a sink of score 0.3, too, which has a part of P and of dS."""
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs().double()
    lse = torch.logaddexp(case.lse, torch.tensor(0.3, dtype=torch.float64))
    p = (case.scores - lse[:, None]).exp()
    dp = case.do @ case.v.T
    exact = p * (dp - ((p * dp).sum(1) - case.dlse)[:, None])
    delta = (p * dp).sum(1) - case.dlse + torch.randn(T, dtype=torch.float64)
    ds = p * (dp - delta[:, None])
    error = case.dlse + (1 - p.sum(1)) * delta - ds.sum(1)
    close((ds * distance).sum() + (error * (p * distance).sum(1)).sum(), (exact * distance).sum())


def test_11_base_2(case):
    in_base_2 = case.scores / math.log(2)
    m = in_base_2.amax(1)
    l = (in_base_2 - m[:, None]).exp2().sum(1)
    close((m + l.log2()) * math.log(2), case.lse)
    close((in_base_2 - case.lse[:, None] / math.log(2)).exp2(), case.p)


def test_12_the_sink(case):
    z = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    scores = torch.cat([case.scores, z.expand(T, 1)], 1)
    p, lse = scores.softmax(1), scores.logsumexp(1)
    o = p[:, :T] @ case.v
    w = (case.lse - lse).exp()
    close(case.lse.exp() + z.exp(), lse.exp())
    close(w[:, None] * case.o, o)
    close(1 - w, p[:, T])
    delta = (case.do * o).sum(1) - case.dlse
    (dz,) = torch.autograd.grad([o, lse], z, [case.do, case.dlse])
    close(dz, -(p[:, T] * delta).sum())


def test_13_tiles_that_cannot_matter():
    case = Case()
    u, lengths = case.s.abs() * case.q.norm(dim=1), case.k.norm(dim=1)
    e = case.alpha - case.s * (case.q * case.k).sum(1)
    bound = (u[:, None] * lengths + e[:, None] - case.alpha).exp()
    assert (case.p <= bound * (1 + 1e-12)).all()
    rows, masses = TILES[2], 0.0
    for tile in TILES[:2]:  # before the rows, so visible to all of them
        weight = (-case.alpha[tile]).exp().sum().log()
        masses += (u[rows].max() * lengths[tile].max() + e[rows].max() + weight).exp()
        assert (case.p[rows, : tile.stop].sum(1) <= masses).all()

        kept = case.scores[rows].clone()
        kept[:, : tile.stop] = -math.inf
        m = case.p[rows, : tile.stop].sum(1)
        close(kept.logsumexp(1), case.scores[rows].logsumexp(1) + torch.log1p(-m))
        difference = (kept.softmax(1) @ case.v - case.o[rows]).abs().amax(1)
        assert (difference <= 2 * m * case.v.abs().max()).all()


# The text itself


def test_every_section_has_a_test_and_names_its_functions():
    sections = re.findall(r"^## (\d+)\. ", TEXT, re.MULTILINE)
    assert sections == [str(n + 1) for n in range(len(sections))]
    assert len(sections) >= 10
    for section in sections:
        assert any(name.startswith(f"test_{section}_") for name in globals()), f"section {section} has no test"
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        assert re.search(r"^Implemented by `", section, re.MULTILINE), section.splitlines()[0]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_]+\.[A-Za-z_]+)`", TEXT))))
def test_every_named_function_exists(name):
    """Found by reading the modules of this name: importing the kernels needs Triton."""
    module, function = name.split(".")
    files = list(PACKAGE.rglob(f"{module}.py"))
    assert files, f"DERIVATION.md names a module {module} that decayattn does not have"
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    assert function in {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
