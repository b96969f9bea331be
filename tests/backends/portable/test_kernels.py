"""The kernels against the float64 oracle by the error budget: every output and gradient, on shapes that fit nothing."""

import functools
from dataclasses import dataclass, replace

import judged_calls
import pytest
import torch
from judged_calls import DEVICE, ON_GPU
from pairwise import pairwise

from decayattn import decay_attention
from decayattn.backends.portable import launch
from decayattn.backends.runtime import launching
from decayattn.problem import AttentionProblem, Inputs
from decayattn.testing import assert_within_budget, verify_attention

F16, F32, F64 = torch.float16, torch.float32, torch.float64
# in the interpreter bfloat16 products are wrong (the backend refuses them), and every tile costs milliseconds
DTYPES = [F16, F32, F64] + ([torch.bfloat16] if ON_GPU else [])
DECAYS = ["none", "constant", "scalar"]
LONG = 1025 if ON_GPU else 300
verify = functools.partial(judged_calls.verify, backend="triton")


@dataclass(frozen=True)
class Case:
    query_length: int = 70
    key_length: int = 70
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    decay: str = "scalar"
    causal: bool = True
    row_scale: bool = False
    dtype: torch.dtype = F32
    batch: int = 1

    def inputs(self, strength: float = 0.5) -> dict:
        new = dict(device=DEVICE, dtype=self.dtype)
        wide = dict(device=DEVICE, dtype=F64 if self.dtype == F64 else F32)
        log_decay = {
            "none": None,
            "constant": -strength * torch.rand(self.heads, **wide),
            "scalar": -strength * torch.rand(self.batch, self.key_length, self.heads, **wide),
        }[self.decay]
        rows = (self.batch, self.query_length, self.heads)
        return dict(
            q=torch.randn(*rows, self.head_dim, **new),
            k=torch.randn(self.batch, self.key_length, self.kv_heads, self.head_dim, **new),
            v=torch.randn(self.batch, self.key_length, self.kv_heads, self.value_dim, **new),
            log_decay=log_decay,
            scale=torch.randn(rows, **wide) if self.row_scale else None,
            causal=self.causal,
        )


def name(case: Case) -> str:
    changed = {k: v for k, v in vars(case).items() if v != getattr(Case(), k)}
    return "-".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()) or "default"


# products of tiles that are narrower than a line of shared memory
NARROW = [(17, 8), (24, 8), (33, 7), (33, 20), (17, 1), (70, 9), (130, 16), (8, 33), (16, 72)]
SHAPES = [
    *(Case(n, n, 1, 1, decay=decay, dtype=F16) for n in (1, 15, 17, 63, 65, 127, 129, 257) for decay in DECAYS[::2]),
    *(Case(*lengths, 1, 1, decay=decay, causal=causal) for lengths, decay, causal in pairwise(
        [(1, 200), (37, 150), (130, 140), (150, 37), (140, 130), (200, 1)], DECAYS, [True, False],
    ) if causal or decay != "scalar" or lengths[0] <= lengths[1]),
    *(Case(67, 67, 1, 1, *dims, dtype=F16) for n in (1, 8, 24, 80, 96, 100, 192, 256)
      for dims in ((n, n), (n, 40), (48, n))[:: 1 if ON_GPU else 2]),
    *(Case(35, 35, *heads, dtype=F16, batch=2) for heads in ((2, 1), (3, 1), (6, 3), (6, 2), (8, 1))),
    *(Case(*lengths, heads, heads, *dims, "none", causal, False, dtype, 2) for dims in NARROW
      for *lengths, causal in ([(300, 300, True), (301, 3, False)] if ON_GPU else [(40, 40, True)])
      for heads in ((2, 32) if ON_GPU else (1,)) for dtype in ((F16, torch.bfloat16) if ON_GPU else (F16,))),
    *(Case(kv_heads=1, value_dim=24, decay=decay, causal=causal, dtype=dtype, row_scale=scaled)
      for decay, causal, dtype, scaled in pairwise(DECAYS, [True, False], DTYPES, [False, True])),
]


@pytest.mark.parametrize("case", SHAPES, ids=name)
def test_shapes(case):
    """Lengths that divide nothing; queries as the last rows; any head dimension; groups; every decay and dtype."""
    verify(case.inputs())


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype):
    """A mask has one byte per pair; Triton chooses the layout of a product by its narrowest operand."""
    mask = torch.rand(2, 1, 50, device=DEVICE) < 0.7
    verify(Case(90, 50, head_dim=26, value_dim=21, dtype=dtype).inputs(), bias=mask)


def test_broadcast_scales():
    inputs = Case(40, 40, batch=2).inputs()
    for shape in [(), (2,), (40, 1), (2, 1, 2)]:
        verify(inputs | dict(scale=torch.randn(shape, device=DEVICE)))
    for scale in (-0.3, 0.0):
        verify(inputs | dict(scale=scale))


# Resets


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_resets(causal, dtype):
    inputs = Case(LONG, LONG, causal=causal, dtype=dtype).inputs()
    log_decay = inputs["log_decay"]
    log_decay[torch.rand_like(log_decay) < 0.03] = -torch.inf
    log_decay[0, [0, 1, 127, 128, 129, 256, LONG - 1], 0] = -torch.inf
    verify(inputs)
    verify(inputs | dict(q=inputs["q"][:, -50:]))
    if dtype == F32:
        verify(inputs | dict(q=inputs["q"], log_decay=torch.full_like(log_decay, -torch.inf)))


# common substitutes for −inf, and the largest value that resets
NO_DECAY_AT_ALL = [-1e9, -1e30, torch.finfo(F32).min, -746.5]


@pytest.mark.parametrize(("causal", "dtype"), pairwise([True, False], [F16, F32, F64]))
def test_huge_finite_decays_are_resets(causal, dtype):
    inputs = Case(150, 150, causal=causal, dtype=dtype).inputs()
    at = torch.rand_like(inputs["log_decay"]) < 0.05
    finite = torch.tensor(NO_DECAY_AT_ALL, device=DEVICE).to(inputs["log_decay"].dtype)
    results = []
    for resets in (finite[torch.randint(len(finite), at.shape, device=DEVICE)], torch.full_like(finite[0], -torch.inf)):
        log_decay = torch.where(at, resets, inputs["log_decay"])
        leaves = [x.detach().requires_grad_() for x in (inputs["q"], inputs["k"], inputs["v"], log_decay)]
        out, lse = decay_attention(*leaves, causal=causal, return_lse=True, backend="triton")
        results.append((out, lse, *torch.autograd.grad((out.square().sum() + lse.sum()), leaves)))
        assert not results[-1][-1][at].any()
    verify(inputs | dict(log_decay=log_decay))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_strong_decays_are_no_resets():
    """With logits far enough apart, a key counts that decays by −745."""
    q = torch.full((1, 2, 1, 16), 16.0, device=DEVICE)
    k = torch.stack([q[0, 0], 0 * q[0, 0]])[None]
    v = torch.tensor([1.0, 0.0], device=DEVICE).reshape(1, 2, 1, 1)
    for strength, expected in ((-745.0, 1.0), (-747.0, 0.0)):
        for shape in ((1, 2, 1), (1,)):
            out = decay_attention(q, k, v, torch.full(shape, strength, device=DEVICE), backend="triton")
            assert out[0, 1, 0, 0] == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(70, 70), (20, 90), (90, 20)])
def test_constant_resets_leave_rows_their_own_key(causal, lengths):
    for dtype in (F16, F32):
        inputs = Case(*lengths, heads=4, decay="constant", causal=causal, dtype=dtype).inputs()
        rates = torch.tensor([-1e9, -0.1, torch.finfo(F32).min, -torch.inf], device=DEVICE)
        # logits far apart: their size does not matter
        inputs |= dict(q=inputs["q"] * 30, log_decay=rates)
        verify(inputs, window_size=(30, 5) if dtype == F16 else None)
    leaves = [x.clone().requires_grad_() for x in (inputs["v"], rates)]
    out = decay_attention(inputs["q"], inputs["k"], *leaves, causal=causal, backend="triton")
    own = inputs["v"][:, -lengths[0] :].repeat_interleave(2, 2)[:, :, 0]
    assert torch.equal(out[:, -lengths[1] :, 0], own)
    _, gradient = torch.autograd.grad(out.square().sum(), leaves)
    assert gradient[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert gradient[1] != 0


def test_windows_wider_than_any_pair_are_none():
    """Up to 64 bits: kernels have 32."""
    inputs = Case(70, 90, causal=False).inputs()
    tensors = Inputs(inputs["q"], inputs["k"], inputs["v"])
    for window, used in [((89, 69), (-1, -1)), ((88, 2**63 - 1), (88, -1)), ((2**63 - 1, 68), (-1, 68))]:
        assert AttentionProblem.of(tensors, False, window).window == used
        verify(inputs, window_size=window)


def test_keys_and_values_have_lines_of_one_length():
    """Equal lengths in 16 bits: ptxas takes wrong addresses otherwise."""
    for dims in [*NARROW, (64, 8), (256, 1), (64, 64), (1, 1)]:
        inputs = Case(head_dim=dims[0], value_dim=dims[1], dtype=F16).inputs()
        widths = launch._widths(AttentionProblem.of(Inputs(inputs["q"], inputs["k"], inputs["v"]), True))
        assert len({min(width, 64) for width in widths}) == 1
        assert widths[0] >= dims[0]
        assert widths[1] >= dims[1]


# Values of any size


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("lengths", "causal", "head_dim"), [((13, 220), True, 192), ((198, 14), False, 72)])
def test_rate_gradient_of_distant_rows_and_keys(lengths, causal, head_dim, seed):
    """The error of Δ, which a 16-bit output brings, is weighed with distances: it has to leave again."""
    torch.manual_seed(seed)
    case = Case(*lengths, 2, 2, head_dim, head_dim, "constant", causal, False, F16, 2)
    comparisons = verify_attention(**case.inputs(), backend="triton")
    assert_within_budget(comparisons)
    decay = next(c for c in comparisons if c.name == "dlog_decay")
    assert decay.error < 0.3 * decay.budget


@pytest.mark.parametrize("seed", range(3))
def test_rate_gradient_of_large_float32_scores(seed):
    """P of scores of 1e5 adds up to 1 within 1e-3: the rounding of LSE, not the probability of a sink."""
    torch.manual_seed(seed)
    q, k, v = torch.ones(1, 80, 2, 2, device=DEVICE), torch.ones(1, 80, 2, 2, device=DEVICE), torch.randn(1, 80, 2, 16)
    q[..., 0] = 1e5
    k[..., 1] = torch.randn(1, 80, 2)
    k[:, 0, :, 1] = 12.0
    inputs = dict(q=q, k=k, v=v.to(DEVICE), log_decay=torch.zeros(2, device=DEVICE), scale=1.0)
    verify(inputs, grad_lse=torch.zeros(1, 2, 80, device=DEVICE))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rate_gradient_of_large_float16_scores(seed, sink):
    """A row sum shows the error of Δ: if it were wrong by the rounding of LSE times dP, it would bring a larger one."""
    torch.manual_seed(seed)
    case = Case(12, 691, 2, 1, 8, 13, "constant", dtype=F16)
    inputs = {name: 100 * x if name in "qkv" else x for name, x in case.inputs().items()}
    inputs["log_decay"] = torch.full((2,), -23.4, device=DEVICE)
    if sink:
        inputs["sink"] = torch.tensor([2e4, -3e4], device=DEVICE)
    decay = next(c for c in verify_attention(**inputs, backend="triton") if c.name == "dlog_decay")
    assert decay.error < 0.1 * decay.budget


@pytest.mark.parametrize(("causal", "dtype"), pairwise([True, False], DTYPES))
def test_growth(causal, dtype):
    """Values rise with their place: parts of a rate's gradient that cancel leave less than its budget."""
    inputs = Case(200, 200, 1, 1, causal=causal, dtype=dtype).inputs()
    inputs["grad_out"] = torch.ones_like(inputs["v"])
    inputs["v"] += torch.linspace(0, 8, 200, device=DEVICE)[:, None, None]
    for log_decay in (-inputs["log_decay"], torch.randn_like(inputs["log_decay"]), torch.tensor([0.3], device=DEVICE)):
        verify(inputs | dict(log_decay=log_decay))


@pytest.mark.parametrize("strength", [0.1, 5.0, 200.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strong_decay(strength, dtype):
    verify(Case(LONG, LONG, 1, 1, dtype=dtype).inputs(2 * strength))


def test_small_terms_after_a_large_one():
    """A head in which only its own row sees a key, then two in which all rows do: dv is not rounded once per row. In
    Triton's interpreter this cannot fail: there a product is one sum of NumPy's."""
    q, k, v = (torch.randn(1, 400 if ON_GPU else 100, heads, 64, device=DEVICE) for heads in (3, 1, 1))
    log_decay = torch.tensor([-1e4, 0.0, 0.018], device=DEVICE)
    verify(dict(q=q, k=k, v=v, log_decay=log_decay, scale=0.0, causal=False))


@pytest.mark.parametrize("size", [1e2, 1e3, 1e5])
def test_huge_logits(size):
    """Huge logits neither overflow nor meet a mask sentinel."""
    inputs = Case(150, 150, 1, 1).inputs()
    verify(inputs | dict(q=inputs["q"] * size**0.5, k=inputs["k"] * size**0.5))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_with_nan_have_lse_nan(backend):
    inputs = Case(60, 60).inputs()
    inputs["q"][0, 20, 1, 3] = torch.nan
    out, lse = decay_attention(**inputs, return_lse=True, backend=backend)
    assert torch.equal(lse.mT.isnan(), out.isnan().all(-1))
    assert lse.isnan().sum() == 1


@pytest.mark.parametrize("dtype", [F16, F32])
def test_lse_of_many_rows_and_one_key(dtype):
    """Its score is tiny, and the rows count their positions from far before it."""
    verify(Case(100, 1, decay="constant", dtype=dtype).inputs() | dict(scale=1e-3))


# Exact zeros


@pytest.mark.parametrize("sizes", [
    dict(batch=0), dict(query_length=0), dict(key_length=0), dict(query_length=0, key_length=0),
], ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_empty_tensors(decay, sizes):
    inputs = replace(Case(row_scale=True, decay=decay), **sizes).inputs()
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    out, lse = decay_attention(**leaves, return_lse=True, backend="triton")
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (torch.ones_like(out), torch.ones_like(lse)))
    for key, grad in zip(leaves, grads, strict=True):
        assert torch.equal(grad, torch.zeros_like(leaves[key])), key


# Strides


@pytest.mark.parametrize("dtype", [F16, F32])
def test_strides(dtype):
    """Slices of a fused projection, transposed layouts, broadcast tensors, expanded and transposed output gradients."""
    B, T, H, D = 2, 45, 2, 16
    new = dict(device=DEVICE, dtype=dtype)
    q, k, v = torch.randn(B, T, 3, H, D, **new).unbind(2)
    log_decay = -torch.rand(H, B, T, device=DEVICE).permute(1, 2, 0)
    verify(dict(q=q, k=k, v=v, log_decay=log_decay))
    q, k, v = torch.randn(3, B, H, T, D, **new).transpose(2, 3)
    verify(dict(q=q, k=k[:, :, :1].expand_as(k), v=v[:1].expand_as(v), log_decay=log_decay[:, :, :1].expand(B, T, H)))
    verify(dict(q=q.flip(1), k=k[:, ::1], v=v), grad_out=torch.ones((), **new).expand(B, T, H, D))
    grad_out = torch.randn(D, H, B, T, **new).permute(2, 3, 1, 0)
    grad_lse = torch.randn(T, H, B, device=DEVICE).permute(2, 1, 0)
    misaligned = torch.randn(B * T * H * D + 1, **new)[1:].view(B, T, H, D)
    verify(dict(q=misaligned, k=k, v=v, log_decay=log_decay), grad_out=grad_out, grad_lse=grad_lse)


@pytest.mark.parametrize(
    ("apart", "dims", "causal"),
    pairwise(
        ["numbers of k", "numbers of v and dO", "tokens of k", "tokens of q and v"], [(19, 19), (24, 8), (1, 16)],
        [False, True],
    ),
)
def test_elements_of_a_head_that_are_apart(apart, dims, causal):
    """Tiles of such a tensor have lines along tokens, others along D: at one address, ptxas reads wrong ones."""
    T, (D, D_v) = 301 if ON_GPU else 77, dims

    def of_dim(dim, name):
        if name not in apart.split():
            return torch.randn(1, T, 1, dim, device=DEVICE, dtype=F16)
        if "numbers" in apart:
            return torch.randn(1, T, 1, 2 * dim, device=DEVICE, dtype=F16)[..., ::2]
        return torch.randn(1, dim, 1, T, device=DEVICE, dtype=F16).transpose(1, 3)

    inputs = dict(q=of_dim(D, "q"), k=of_dim(D, "k"), v=of_dim(D_v, "v"))
    log_decay = -0.1 * torch.rand(1, T, 1, device=DEVICE)
    verify(inputs | dict(log_decay=log_decay, causal=causal), grad_out=of_dim(D_v, "dO"))


# Launches


@pytest.mark.parametrize("small", [True, False], ids=["as small", "as large"])
@pytest.mark.parametrize("case", [
    Case(130, 200, 3, 1, row_scale=True, dtype=F16), Case(90, 60, decay="constant", dtype=F16, batch=2),
    Case(key_length=300, decay="none", causal=False, dtype=F16), Case(650, 650, 1, 1, dtype=F16),
], ids=name)
def test_launches_of_small_and_large_problems(case, small, monkeypatch):
    """Gradients of keys and queries in one launch or in two, and a forward with its own tiles or without, for any
    number of programs. The longest case skips keys."""
    launched, of_call = [], launching.of_call

    def recorded(*arguments, **options):
        call = of_call(*arguments, **options)
        return lambda kernel, *args, **constants: (launched.append(kernel), call(kernel, *args, **constants))[1]

    monkeypatch.setattr(launching, "of_call", recorded)
    monkeypatch.setattr(launch, "_MOST_PROGRAMS_OF_BOTH", 10**6 if small else 0)
    monkeypatch.setattr(launch, "_MOST_PROGRAMS_OF_FEW", 10**6 if small else 0)
    verify(case.inputs())
    assert (launch.gradients.gradients_kernel in launched) == small
    assert (launch.gradients.key_gradients_kernel in launched) != small
