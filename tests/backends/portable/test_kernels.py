"""The kernels against the float64 oracle by the error budget: every output and gradient, on shapes that fit nothing."""

from dataclasses import dataclass, replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from pairwise import pairwise

from decayattn import decay_attention
from decayattn.backends.portable import launch
from decayattn.backends.runtime import launching
from decayattn.problem import AttentionProblem
from decayattn.testing import assert_within_budget, verify_attention

ON_GPU = torch.cuda.is_available()
# in the interpreter bfloat16 products are wrong (the backend refuses them), and every tile costs milliseconds
DTYPES = [torch.float16, torch.float32, torch.float64] + ([torch.bfloat16] if ON_GPU else [])
LONG = 1025 if ON_GPU else 300


@dataclass(frozen=True)
class Case:
    batch: int = 1
    query_length: int = 70
    key_length: int = 70
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    decay: str = "scalar"
    causal: bool = True
    row_scale: bool = False
    dtype: torch.dtype = torch.float32

    def inputs(self, device, strength: float = 0.5) -> dict:
        decay_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        new = dict(device=device, dtype=self.dtype)
        log_decay = {
            "none": None,
            "constant": -strength * torch.rand(self.heads, device=device, dtype=decay_dtype),
            "scalar": -strength * torch.rand(self.batch, self.key_length, self.heads, device=device, dtype=decay_dtype),
        }[self.decay]
        rows = (self.batch, self.query_length, self.heads)
        return dict(
            q=torch.randn(*rows, self.head_dim, **new),
            k=torch.randn(self.batch, self.key_length, self.kv_heads, self.head_dim, **new),
            v=torch.randn(self.batch, self.key_length, self.kv_heads, self.value_dim, **new),
            log_decay=log_decay,
            scale=torch.randn(rows, device=device, dtype=decay_dtype) if self.row_scale else None,
            causal=self.causal,
        )


def verify(inputs: dict, **options) -> None:
    assert_within_budget(verify_attention(**inputs, backend="triton", **options))


def name(case: Case) -> str:
    changed = {k: v for k, v in vars(case).items() if v != getattr(Case(), k)}
    return "-".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()) or "default"


@pytest.mark.parametrize(
    ("decay", "causal", "dtype"), pairwise(["none", "constant", "scalar"], [True, False], DTYPES)
)
def test_every_decay_direction_and_dtype(decay, causal, dtype, device):
    verify(Case(decay=decay, causal=causal, dtype=dtype, kv_heads=1, value_dim=24).inputs(device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask(dtype, device):
    """A mask has one byte per pair; Triton chooses the layout of a product by its narrowest operand."""
    mask = torch.rand(2, 1, 50, device=device) < 0.7
    verify(Case(query_length=90, key_length=50, head_dim=26, value_dim=21, dtype=dtype).inputs(device), bias=mask)


@pytest.mark.parametrize("length", [1, 15, 17, 63, 65, 127, 129, 257])
@pytest.mark.parametrize("decay", ["none", "scalar"])
def test_lengths_that_divide_nothing(length, decay, device):
    case = Case(query_length=length, key_length=length, heads=1, kv_heads=1, decay=decay, dtype=torch.float16)
    verify(case.inputs(device))


@pytest.mark.parametrize(
    ("lengths", "decay", "causal"),
    pairwise(
        [(1, 200), (37, 150), (130, 140), (150, 37), (140, 130), (200, 1)], ["none", "constant", "scalar"],
        [True, False],
    ),
)
def test_queries_are_the_last_rows(lengths, decay, causal, device):
    query_length, key_length = lengths
    case = Case(query_length=query_length, key_length=key_length, heads=1, kv_heads=1, decay=decay, causal=causal)
    if decay == "scalar" and not causal and query_length > key_length:
        with pytest.raises(ValueError, match="causal"):  # the first rows lie before the first decay
            decay_attention(**case.inputs(device), backend="triton")
    else:
        verify(case.inputs(device))


@pytest.mark.parametrize("head_dim", [1, 8, 24, 80, 96, 100, 192, 256])
def test_any_head_dimension(head_dim, device):
    case = Case(query_length=67, key_length=67, heads=1, kv_heads=1, dtype=torch.float16)
    verify(replace(case, head_dim=head_dim, value_dim=head_dim).inputs(device))
    verify(replace(case, head_dim=head_dim, value_dim=40).inputs(device))
    verify(replace(case, head_dim=48, value_dim=head_dim).inputs(device))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (3, 1), (6, 3), (6, 2), (8, 1)])
def test_grouped_queries(heads, kv_heads, device):
    verify(
        Case(batch=2, query_length=35, key_length=35, heads=heads, kv_heads=kv_heads, dtype=torch.float16).inputs(
            device
        )
    )


@pytest.mark.parametrize(
    ("decay", "causal", "dtype"),
    pairwise(["none", "constant", "scalar"], [True, False], [torch.float16, torch.float64]),
)
def test_a_scale_of_its_own_for_every_row(decay, causal, dtype, device):
    verify(Case(decay=decay, causal=causal, row_scale=True, kv_heads=1, dtype=dtype).inputs(device))


def test_a_scale_that_is_broadcast(device):
    inputs = Case(batch=2, query_length=40, key_length=40).inputs(device)
    for shape in [(), (2,), (40, 1), (2, 1, 2)]:
        verify(inputs | dict(scale=torch.randn(shape, device=device)))
    verify(inputs | dict(scale=-0.3))
    verify(inputs | dict(scale=0.0))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_resets(causal, dtype, device):
    inputs = Case(query_length=LONG, key_length=LONG, heads=2, causal=causal, dtype=dtype).inputs(device)
    log_decay = inputs["log_decay"]
    log_decay[torch.rand_like(log_decay) < 0.03] = -torch.inf
    log_decay[0, [0, 1, 127, 128, 129, 256, LONG - 1], 0] = -torch.inf
    verify(inputs)
    q_tail = inputs | dict(q=inputs["q"][:, -50:])
    verify(q_tail)


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_but_resets(causal, device):
    inputs = Case(query_length=40, key_length=40, heads=1, kv_heads=1, causal=causal).inputs(device)
    verify(inputs | dict(log_decay=torch.full_like(inputs["log_decay"], -torch.inf)))


# what people write for −inf, and where the rule begins
NO_DECAY_AT_ALL = [-1e9, -1e30, torch.finfo(torch.float32).min, -746.5]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_huge_finite_decays_are_resets(causal, dtype, device):
    inputs = Case(query_length=150, key_length=150, causal=causal, dtype=dtype).inputs(device)
    at = torch.rand_like(inputs["log_decay"]) < 0.05
    finite = torch.tensor(NO_DECAY_AT_ALL, device=device).to(inputs["log_decay"].dtype)
    results = []
    for resets in (finite[torch.randint(len(finite), at.shape, device=device)], torch.full_like(finite[0], -torch.inf)):
        log_decay = torch.where(at, resets, inputs["log_decay"])
        leaves = [x.detach().requires_grad_() for x in (inputs["q"], inputs["k"], inputs["v"], log_decay)]
        out, lse = decay_attention(*leaves, causal=causal, return_lse=True, backend="triton")
        results.append((out, lse, *torch.autograd.grad((out.square().sum() + lse.sum()), leaves)))
        assert not results[-1][-1][at].any()
        verify(inputs | dict(log_decay=log_decay))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_strong_decays_are_no_resets(device):
    """With logits far enough apart, a key counts whose decay is −745."""
    q = torch.full((1, 2, 1, 16), 16.0, device=device)
    k = torch.stack([q[0, 0], 0 * q[0, 0]])[None]
    v = torch.tensor([1.0, 0.0], device=device).reshape(1, 2, 1, 1)
    for strength, expected in ((-745.0, 1.0), (-747.0, 0.0)):
        out = decay_attention(q, k, v, torch.full((1, 2, 1), strength, device=device), backend="triton")
        assert out[0, 1, 0, 0] == expected
        out = decay_attention(q, k, v, torch.full((1,), strength, device=device), backend="triton")
        assert out[0, 1, 0, 0] == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("query_length", "key_length"), [(70, 70), (20, 90), (90, 20)])
def test_a_constant_reset_leaves_a_row_its_own_key(causal, query_length, key_length, device):
    for dtype in (torch.float16, torch.float32):
        case = Case(query_length=query_length, key_length=key_length, heads=4, decay="constant", causal=causal)
        inputs = replace(case, dtype=dtype).inputs(device)
        rates = torch.tensor([-1e9, -0.1, torch.finfo(torch.float32).min, -torch.inf], device=device)
        # logits far apart: it is no matter of size
        inputs |= dict(q=inputs["q"] * 30, log_decay=rates)
        verify(inputs, window_size=(30, 5))
        verify(inputs)
    leaves = [x.clone().requires_grad_() for x in (inputs["v"], rates)]
    out = decay_attention(inputs["q"], inputs["k"], *leaves, causal=causal, backend="triton")
    own = inputs["v"][:, -query_length:].repeat_interleave(2, 2)[:, :, 0]
    assert torch.equal(out[:, -key_length:, 0], own)
    _, gradient = torch.autograd.grad(out.square().sum(), leaves)
    assert gradient[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert gradient[1] != 0


@pytest.mark.parametrize("causal", [True, False])
def test_windows_wider_than_any_pair_are_none(causal, device):
    """Up to 64 bits: kernels have 32."""
    case = Case(batch=2, query_length=70, key_length=90, causal=causal)
    inputs = case.inputs(device)
    leaves = [inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "log_decay")]

    def results(window):
        out, lse = decay_attention(*leaves, causal=causal, window_size=window, return_lse=True, backend="triton")
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)

    expected = results(None)
    for window in [(2**31 - 1, 0 if causal else 2**31 - 1), (2**63 - 1, 2**63 - 1), (2**31, -1), (89, 69)]:
        for x, y in zip(results(window), expected, strict=True):
            assert torch.equal(x, y), window
    # as wide as binds
    for window in [(88, 2**63 - 1), (2**63 - 1, 68)]:
        verify(inputs, window_size=window)


# products of tiles that are narrower than a line of shared memory
NARROW = [(17, 8), (24, 8), (33, 7), (33, 20), (17, 1), (70, 9), (130, 16), (8, 33), (16, 72)]


@pytest.mark.parametrize(("head_dim", "value_dim"), NARROW)
def test_values_narrower_than_keys(head_dim, value_dim, device):
    lengths = [(300, 300, True), (301, 3, False)] if ON_GPU else [(40, 40, True)]
    for query_length, key_length, causal in lengths:
        for heads in (2, 32) if ON_GPU else (1,):
            case = Case(2, query_length, key_length, heads, heads, head_dim, value_dim, "none", causal)
            for dtype in (torch.float16, torch.bfloat16) if ON_GPU else (torch.float16,):
                verify(replace(case, dtype=dtype).inputs(device))


def test_keys_and_values_have_lines_of_one_length():
    """Equal lengths in 16 bits: ptxas takes wrong addresses otherwise."""
    for head_dim, value_dim in [*NARROW, (64, 8), (256, 1), (64, 64), (1, 1)]:
        problem = Case(head_dim=head_dim, value_dim=value_dim, dtype=torch.float16).inputs("cpu")
        problem = AttentionProblem.of(problem["q"], problem["v"], None, None, True)
        widths = launch._widths(problem)
        assert len({min(width, 64) for width in widths}) == 1
        assert widths[0] >= head_dim
        assert widths[1] >= value_dim


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("lengths", "causal", "head_dim"), [((13, 220), True, 192), ((198, 14), False, 72)])
def test_gradient_of_a_constant_rate_of_distant_rows_and_keys(lengths, causal, head_dim, seed, device):
    """The error of Δ, which a 16-bit output brings, is weighed with distances: it has to leave again."""
    torch.manual_seed(seed)
    case = Case(2, *lengths, 2, 2, head_dim, head_dim, "constant", causal, dtype=torch.float16)
    comparisons = verify_attention(**case.inputs(device), backend="triton")
    assert_within_budget(comparisons)
    decay = next(c for c in comparisons if c.name == "dlog_decay")
    assert decay.error < 0.3 * decay.budget


@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_a_constant_rate_of_large_float32_scores(seed, device):
    """P of scores of 1e5 adds up to 1 within 1e-3: the rounding of LSE, not the probability of a sink."""
    torch.manual_seed(seed)
    q, k, v = torch.ones(1, 80, 2, 2, device=device), torch.ones(1, 80, 2, 2, device=device), torch.randn(1, 80, 2, 16)
    q[..., 0] = 1e5
    k[..., 1] = torch.randn(1, 80, 2)
    k[:, 0, :, 1] = 12.0
    options = {"scale": 1.0, "grad_lse": torch.zeros(1, 2, 80, device=device), "backend": "triton"}
    assert_within_budget(verify_attention(q, k, v.to(device), torch.zeros(2, device=device), **options))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_a_constant_rate_of_large_float16_scores(seed, sink, device):
    """A row sum tells the error of Δ: if it were wrong by the rounding of LSE times dP, it would bring a larger one."""
    torch.manual_seed(seed)
    case = Case(1, 12, 691, 2, 1, 8, 13, "constant", dtype=torch.float16)
    inputs = {name: 100 * x if name in "qkv" else x for name, x in case.inputs(device).items()}
    inputs["log_decay"] = torch.full((2,), -23.4, device=device)
    if sink:
        inputs["sink"] = torch.tensor([2e4, -3e4], device=device)
    decay = next(c for c in verify_attention(**inputs, backend="triton") if c.name == "dlog_decay")
    assert decay.error < 0.1 * decay.budget


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_growth(causal, dtype, device):
    inputs = Case(query_length=200, key_length=200, heads=1, kv_heads=1, causal=causal, dtype=dtype).inputs(device)
    verify(inputs | dict(log_decay=-inputs["log_decay"]))
    verify(inputs | dict(log_decay=torch.randn_like(inputs["log_decay"])))
    verify(inputs | dict(log_decay=torch.tensor([0.3], device=device)))


@pytest.mark.parametrize("strength", [0.1, 5.0, 200.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strong_decay(strength, dtype, device):
    inputs = Case(query_length=LONG, key_length=LONG, heads=1, kv_heads=1, dtype=dtype).inputs(device, 2 * strength)
    verify(inputs)


def test_small_terms_after_a_large_one(device):
    """A head in which only its own row sees a key, then two in which all rows do: dv is not rounded once per row.

    In Triton's interpreter this cannot fail: there a product is one sum of NumPy's.
    """
    q, k, v = (torch.randn(1, 400, heads, 64, device=device) for heads in (3, 1, 1))
    log_decay = torch.tensor([-1e4, 0.0, 0.018], device=device)
    verify(dict(q=q, k=k, v=v, log_decay=log_decay, scale=0.0, causal=False))


@pytest.mark.parametrize("size", [1e2, 1e3, 1e5])
def test_huge_logits(size, device):
    """Huge logits neither overflow nor meet a mask sentinel."""
    inputs = Case(query_length=150, key_length=150, heads=1, kv_heads=1).inputs(device)
    inputs |= dict(q=inputs["q"] * size**0.5, k=inputs["k"] * size**0.5)
    verify(inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_that_see_nothing_contribute_exactly_zero(dtype, device):
    inputs = Case(query_length=90, key_length=40, heads=1, kv_heads=1, dtype=dtype, row_scale=True).inputs(device)
    leaves = {key: inputs[key].requires_grad_() for key in ("q", "k", "v", "log_decay", "scale")}
    out, lse = decay_attention(**inputs, return_lse=True, backend="triton")
    assert torch.equal(out[:, :50], torch.zeros_like(out[:, :50]))
    assert torch.isneginf(lse[..., :50]).all()
    assert torch.isfinite(lse[..., 50:]).all()
    grad_lse = torch.zeros_like(lse)
    grad_lse[..., :50] = torch.tensor([torch.inf, torch.nan], device=device).repeat(25)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (torch.zeros_like(out), grad_lse))
    for key, grad in zip(leaves, grads, strict=True):
        assert torch.equal(grad, torch.zeros_like(grad)), key


def test_first_decay_and_resets_have_gradients_of_exact_zero(device):
    inputs = Case(query_length=150, key_length=150).inputs(device)
    log_decay = inputs["log_decay"]
    log_decay[0, 0] = torch.nan  # never used
    log_decay[0, 30, 0] = -torch.inf
    log_decay.requires_grad_()
    out = decay_attention(**inputs, backend="triton")
    (grad,) = torch.autograd.grad(out, log_decay, torch.randn_like(out))
    assert torch.isfinite(out).all()
    assert torch.equal(grad[0, 0], torch.zeros_like(grad[0, 0]))
    assert grad[0, 30, 0] == 0
    assert grad[0, 30, 1] != 0
    assert grad[0, 31, 0] != 0


@pytest.mark.parametrize("shape", ["batch", "queries", "keys", "both"])
def test_empty(shape, device):
    sizes = dict(batch=0) if shape == "batch" else {}
    sizes |= dict(query_length=0) if shape in ("queries", "both") else {}
    sizes |= dict(key_length=0) if shape in ("keys", "both") else {}
    for decay in ("none", "constant", "scalar"):
        inputs = replace(Case(row_scale=True, decay=decay), **sizes).inputs(device)
        leaves = {key: x.requires_grad_() for key, x in inputs.items() if isinstance(x, torch.Tensor)}
        out, lse = decay_attention(**inputs, return_lse=True, backend="triton")
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.isneginf(lse).all()
        grads = torch.autograd.grad((out, lse), list(leaves.values()), (torch.ones_like(out), torch.ones_like(lse)))
        for key, grad in zip(leaves, grads, strict=True):
            assert torch.equal(grad, torch.zeros_like(leaves[key])), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_strides(dtype, device):
    """Slices of a fused projection, transposed layouts, broadcast tensors, expanded and transposed output gradients."""
    B, T, H, D = 2, 45, 2, 16
    fused = torch.randn(B, T, 3, H, D, device=device, dtype=dtype)
    q, k, v = fused.unbind(2)
    log_decay = -torch.rand(H, B, T, device=device).permute(1, 2, 0)
    verify(dict(q=q, k=k, v=v, log_decay=log_decay))
    heads_first = torch.randn(3, B, H, T, D, device=device, dtype=dtype).transpose(2, 3)
    q, k, v = heads_first
    verify(dict(q=q, k=k, v=v, log_decay=torch.tensor(-0.2, device=device)))
    verify(dict(q=q, k=k[:, :, :1].expand_as(k), v=v[:1].expand_as(v), log_decay=log_decay[:, :, :1].expand(B, T, H)))
    verify(dict(q=q.flip(1), k=k[:, ::1], v=v), grad_out=torch.ones((), device=device, dtype=dtype).expand(B, T, H, D))
    grad_out = torch.randn(D, H, B, T, device=device, dtype=dtype).permute(2, 3, 1, 0)
    grad_lse = torch.randn(T, H, B, device=device).permute(2, 1, 0)
    verify(dict(q=q, k=k, v=v, log_decay=log_decay), grad_out=grad_out, grad_lse=grad_lse)
    misaligned = torch.randn(B * T * H * D + 1, device=device, dtype=dtype)[1:].view(B, T, H, D)
    verify(dict(q=misaligned, k=k, v=v, log_decay=log_decay))


@pytest.mark.parametrize(
    ("apart", "dims", "causal"),
    pairwise(
        ["numbers of k", "numbers of v and dO", "tokens of k", "tokens of q and v"], [(19, 19), (24, 8), (1, 16)],
        [False, True],
    ),
)
def test_numbers_of_a_head_that_lie_apart(apart, dims, causal, device):
    """Tiles of such a tensor have lines along tokens beside others along D: at one address, ptxas reads wrong ones."""
    T, (D, D_v) = 301, dims

    def of_dim(dim, name):
        if name not in apart.split():
            return torch.randn(1, T, 1, dim, device=device, dtype=torch.float16)
        if "numbers" in apart:
            return torch.randn(1, T, 1, 2 * dim, device=device, dtype=torch.float16)[..., ::2]
        return torch.randn(1, dim, 1, T, device=device, dtype=torch.float16).transpose(1, 3)

    inputs = dict(q=of_dim(D, "q"), k=of_dim(D, "k"), v=of_dim(D_v, "v"))
    log_decay = -0.1 * torch.rand(1, T, 1, device=device)
    verify(inputs | dict(log_decay=log_decay, causal=causal), grad_out=of_dim(D_v, "dO"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_lse_of_many_rows_and_one_key(dtype, device):
    """Its score is tiny, and the rows count their positions from far before it."""
    inputs = Case(query_length=100, key_length=1, decay="constant", dtype=dtype).inputs(device)
    verify(inputs | dict(scale=1e-3))


def test_gradient_of_the_lse_alone(device):
    inputs = Case(query_length=45, key_length=45).inputs(device)
    leaves = [inputs[key].requires_grad_() for key in ("q", "k", "log_decay")]
    results = []
    for backend in ("triton", "reference"):
        lse = decay_attention(**inputs, return_lse=True, backend=backend)[1]
        results.append(torch.autograd.grad(lse.square().sum(), leaves))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("small", [True, False], ids=["as small", "as large"])
@pytest.mark.parametrize("case", [
    Case(query_length=130, key_length=200, heads=3, kv_heads=1, row_scale=True, dtype=torch.float16),
    Case(batch=2, query_length=90, key_length=60, decay="constant", dtype=torch.float16),
    Case(causal=False, key_length=300, decay="none", dtype=torch.float16),
    Case(query_length=650, key_length=650, heads=1, kv_heads=1, dtype=torch.float16),
], ids=name)
def test_ways_of_small_and_of_large_problems(case, small, device, monkeypatch):
    """Gradients of keys and queries in one launch or in two, and a forward with its own tiles or without, for any
    number of programs. The longest case skips keys."""
    launched, of_call = [], launching.of_call

    def recorded(*arguments, **options):
        call = of_call(*arguments, **options)
        return lambda kernel, *args, **constants: (launched.append(kernel), call(kernel, *args, **constants))[1]

    monkeypatch.setattr(launching, "of_call", recorded)
    monkeypatch.setattr(launch, "_MOST_PROGRAMS_OF_BOTH", 10**6 if small else 0)
    monkeypatch.setattr(launch, "_MOST_PROGRAMS_OF_FEW", 10**6 if small else 0)
    verify(case.inputs(device))
    assert (launch.gradients_kernel in launched) == small
    assert (launch.key_gradients_kernel in launched) != small


def test_gradients_repeat_bitwise(device):
    inputs = Case(batch=2, query_length=150, key_length=150, heads=4, dtype=torch.float16).inputs(device)
    leaves = [inputs[key].requires_grad_() for key in ("q", "k", "v", "log_decay")]
    grad_out = torch.randn(2, 150, 4, 16, device=device, dtype=torch.float16)
    runs = []
    for _ in range(20 if ON_GPU else 2):
        out = decay_attention(**inputs, backend="triton")
        runs.append((out, *torch.autograd.grad(out, leaves, grad_out)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@st.composite
def cases(draw) -> Case:
    kv_heads = draw(st.integers(1, 2))
    causal = draw(st.booleans())
    decay = draw(st.sampled_from(["none", "constant", "scalar"]))
    key_length = draw(st.integers(0, 140))
    shortest = 0 if causal or decay != "scalar" else None
    query_length = draw(st.integers(0, 140 if shortest == 0 else key_length))
    return Case(
        batch=draw(st.integers(1, 2)),
        query_length=query_length,
        key_length=key_length,
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 24, 40])),
        value_dim=draw(st.sampled_from([1, 8, 24, 40])),
        decay=decay,
        causal=causal,
        row_scale=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
    )


@hypothesis.settings(
    max_examples=15, deadline=None, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(case=cases())
def test_any_shape(case, device):
    verify(case.inputs(device))
