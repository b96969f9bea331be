"""One call of decay_attention against its error budget."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from decayattn.functional import decay_attention
from decayattn.problem import AttentionProblem
from decayattn.testing import formulas
from decayattn.testing.formulas import explicit_attention
from decayattn.testing.table import format_table, ratio

# For 16-bit inputs the prefix of the decay inside a block of tokens is stored in float32, which shows in the LSE only
PREFIX_BLOCK = 128

# Factors of the eager evaluations. The output gradients (or the loss), the scores and P before its rounding are
# multiplied by a factor, which is divided out at the end: the same values, rounded elsewhere. A normal error of one
# number exceeds twice another one in 3 of 10 cases, and twice the largest of 16 in 1 of 1000.
DRAWS = tuple(2.0 ** (draw / 16) for draw in range(16))  # 1 first; the others have no short mantissa, so all is rounded

# the arguments of decay_attention that may have a gradient
INPUTS = ("q", "k", "v", "log_decay", "scale")


@dataclass(frozen=True)
class Call:
    """Inputs of one call with its output gradients, and the (batch entry, head) pairs that carry gradient."""

    inputs: dict[str, Tensor | float | None]  # in the order of INPUTS
    causal: bool
    grad_out: Tensor
    grad_lse: Tensor
    pairs: tuple[tuple[int, int], ...]
    problem: AttentionProblem

    def heads(self, pairs: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """explicit_attention's positional arguments for some of the pairs (N, 2)."""
        q, k, v, log_decay, scale = self.inputs.values()
        b, h = pairs.unbind(1)
        g = h // (self.problem.num_heads // self.problem.num_kv_heads)
        if isinstance(log_decay, Tensor):
            log_decay = log_decay[b, :, h] if log_decay.ndim == 3 else log_decay.expand(self.problem.num_heads)[h]
        elif log_decay is not None:
            log_decay = torch.full(h.shape, log_decay, dtype=torch.float64, device=q.device)
        if isinstance(scale, Tensor):
            scale = scale.expand(q.shape[:3])[b, :, h].to(dtype)
        else:
            number = q.shape[-1] ** -0.5 if scale is None else scale
            scale = torch.full(h.shape, number, dtype=dtype, device=q.device)
        return (
            q[b, :, h].to(dtype), k[b, :, g].to(dtype), v[b, :, g].to(dtype), log_decay, scale, self.causal,
            self.grad_out[b, :, h].to(dtype), self.grad_lse[b, h].to(dtype),
        )  # fmt: skip

    def gather(self, evaluate: Callable[..., dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        """evaluate(*heads) of all pairs, in the layouts that decay_attention returns; what heads share is added up."""
        problem, (q, _, _, log_decay, scale) = self.problem, self.inputs.values()
        batch, rows, keys, heads = problem.batch, problem.query_length, problem.key_length, problem.num_heads
        group = heads // problem.num_kv_heads
        shapes = {
            "out": (batch, heads, rows, problem.value_dim),
            "lse": (batch, heads, rows),
            "dq": (batch, heads, rows, problem.head_dim),
            "dk": (batch, problem.num_kv_heads, keys, problem.head_dim),
            "dv": (batch, problem.num_kv_heads, keys, problem.value_dim),
        }
        if isinstance(log_decay, Tensor):
            shapes["dlog_decay"] = (batch, heads, keys) if log_decay.ndim == 3 else (batch, heads)
        if isinstance(scale, Tensor):
            shapes["dscale"] = (batch, heads, rows)
        total = {name: q.new_zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        pairs = torch.tensor(self.pairs, dtype=torch.long, device=q.device).reshape(-1, 2)
        for some in pairs.split(max(1, formulas.SCORES_AT_ONCE // max(1, rows * keys))):
            part = evaluate(*self.heads(some, dtype))
            b, h = some.unbind(1)
            for name, result in total.items():
                at = (b, h // group if name in ("dk", "dv") else h)
                result.index_put_(at, part[name].to(dtype), accumulate=True)
        for name, leaf in (("dlog_decay", log_decay), ("dscale", scale)):
            if name in total:
                x = total[name][:, None] if total[name].ndim == 2 else total[name].transpose(1, 2)
                total[name] = x.sum_to_size((1,) * (3 - leaf.ndim) + leaf.shape).reshape(leaf.shape)
        return {name: x.transpose(1, 2) if x.ndim == 4 else x for name, x in total.items()}

    def oracle(self) -> dict[str, Tensor]:
        """x64 by autograd; causal, in chunks of rows, each the last rows of the keys that it sees."""

        def evaluate(q, k, v, log_decay, scale, causal, grad_out, grad_lse):
            decay = None if log_decay is None else log_decay.double()
            leaves = {"dq": q, "dk": k, "dv": v, "dscale": scale, "dlog_decay": decay}
            leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items() if x is not None}
            q, k, v, scale, decay = (leaves.get(name) for name in ("dq", "dk", "dv", "dscale", "dlog_decay"))
            rows, keys = q.shape[1], k.shape[1]
            outs, lses, total = [], [], {name: torch.zeros_like(x) for name, x in leaves.items()}
            for chunk in formulas.row_chunks(len(q) * keys, rows) if causal else [slice(0, rows)]:
                seen = max(0, keys - (rows - chunk.stop)) if causal else keys
                out, lse = decay_attention(  # the pairs stand on the head axis
                    *(x.transpose(0, 1)[None] for x in (q[:, chunk], k[:, :seen], v[:, :seen])),
                    decay if decay is None or decay.ndim == 1 else decay[:, :seen].T[None],
                    scale=scale if scale.ndim == 1 else scale[:, chunk].T[None],
                    causal=causal, return_lse=True, backend="reference",
                )  # fmt: skip
                outs.append(out[0].transpose(0, 1).detach())
                lses.append(lse[0].detach())
                given = [grad_out[:, chunk].transpose(0, 1)[None], grad_lse[None, :, chunk]]
                gradients = torch.autograd.grad([out, lse], [*leaves.values()], given, materialize_grads=True)
                for name, gradient in zip(leaves, gradients, strict=True):
                    total[name] += gradient
            return {"out": torch.cat(outs, 1), "lse": torch.cat(lses, 1), **total}

        return self.gather(evaluate, torch.float64)

    def eager(self, gradient_factor: float = 1.0, factor: float = 1.0) -> dict[str, Tensor]:
        """The rounded evaluation, in the dtypes that decay_attention returns. The factors: see `DRAWS`."""

        def evaluate(*heads):
            *inputs, grad_out, grad_lse = heads
            grads = grad_out * gradient_factor, grad_lse * gradient_factor
            return explicit_attention(*inputs, *grads, rounding=self.problem.dtype, factor=factor)

        total = self.gather(evaluate, self.problem.accumulator_dtype)
        return {name: x.to(self.dtype_of(name)) for name, x in total.items()}

    def draw(self, factor: float) -> dict[str, Tensor]:
        """The rounded evaluation at another place of the same binade, in float64."""
        eager = self.eager(factor, factor)
        return {name: x.double() / (factor if name.startswith("d") else 1.0) for name, x in eager.items()}

    def sizes(self) -> dict[str, Tensor]:
        """A, in float64."""
        exact_oracle = self.problem.accumulator_dtype != torch.float64
        block = PREFIX_BLOCK if self.problem.dtype.itemsize == 2 else 0

        def evaluate(*heads):
            part = explicit_attention(*heads, absolute=True, prefix_block=block)
            condition = 1.0 + part.pop("score_size")
            if exact_oracle:
                return part
            return {name: x * condition.reshape(-1, *(1,) * (x.ndim - 1)) for name, x in part.items()}

        return self.gather(evaluate, torch.float64)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which decay_attention returns a tensor."""
        if name == "lse":
            return self.problem.accumulator_dtype
        leaf = self.inputs.get(name.removeprefix("d"))
        return self.problem.dtype if leaf is None else leaf.dtype

    def run(self, backend: str, options: dict[str, Any]) -> dict[str, Tensor]:
        """What is tested: one forward and one backward, on leaves with the strides of the given tensors."""
        inputs = {name: x.detach().requires_grad_() if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        leaves = {f"d{name}": x for name, x in inputs.items() if isinstance(x, Tensor)}
        scale = inputs.pop("scale")
        out, lse = decay_attention(
            *inputs.values(), scale=scale, causal=self.causal, return_lse=True, backend=backend, **options
        )
        gradients = torch.autograd.grad(
            [out, lse], list(leaves.values()), [self.grad_out, self.grad_lse], materialize_grads=True
        )
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


# ----------------------------------------------------------------------------------------------------------------------
# The comparison


@dataclass(frozen=True)
class Comparison:
    """One tensor against its budget, at the head and in the norm that come closest to it or exceed it most.

    head is the index of that head: (batch entry, head), where an axis that the tensor lacks or broadcasts over is 0.
    """

    PLACE: ClassVar[tuple[str, ...]] = ("tensor", "head")

    name: str
    head: tuple[int, int]
    error: float
    budget: float
    relative_error: float
    norm: str  # "frobenius" or "maximum"
    passed: bool

    @property
    def place(self) -> tuple[str, ...]:
        return self.name, f"{self.head[0]}, {self.head[1]}"


NORMS = {"frobenius": 2, "maximum": math.inf}


def compare(
    name: str, x: Tensor, x64: Tensor, eager_error: Tensor, size: Tensor, accumulator: torch.dtype
) -> Comparison:
    """The worst head and norm of one tensor under the budget.

    Args:
        name: "lse", "out", or "d" and the name of an input; the layout follows from it.
        x, x64, size: the tested tensor in its own dtype, the oracle, and A.
        eager_error: `distance` of the rounded evaluation from the oracle.
        accumulator: float32, or float64 for float64 inputs.

    A NaN never passes; −inf must stand exactly where the oracle has it.
    """
    own_eps, accumulator_eps = torch.finfo(x.dtype).eps, torch.finfo(accumulator).eps
    zero = torch.zeros_like(x64)
    error, reference_norm = distance(name, x, x64), distance(name, zero, x64.masked_fill(x64.isneginf(), 0.0))
    budget = 2 * eager_error + own_eps * reference_norm + 4 * accumulator_eps * distance(name, zero, size)
    excess = torch.where(error == 0, 0.0, error / budget).nan_to_num(nan=math.inf)
    if not excess.numel():
        return Comparison(name, (0, 0), 0.0, 0.0, 0.0, "frobenius", True)
    worst = tuple(int(at) for at in torch.unravel_index(excess.argmax(), excess.shape))
    found, norm = float(error[worst]), float(reference_norm[worst])
    passed = bool((error <= budget).all())
    return Comparison(name, worst[1:], found, float(budget[worst]), ratio(found, norm), list(NORMS)[worst[0]], passed)


def distance(name: str, x: Tensor, x64: Tensor) -> Tensor:
    """The norms of x − x64 per head: (2, B, H) in the order of NORMS, inf where −inf stands in one of them only."""
    x, x64 = _by_head(name, x), _by_head(name, x64)
    hidden = x64.isneginf()
    difference = (x.double() - x64).masked_fill(hidden, 0.0)
    misplaced = (hidden != x.isneginf()).any(-1)
    if not difference.shape[-1]:
        return difference.new_zeros(len(NORMS), *difference.shape[:-1])
    norms = [torch.linalg.vector_norm(difference, order, dim=-1) for order in NORMS.values()]
    return torch.stack(norms).masked_fill(misplaced, math.inf)


def _by_head(name: str, x: Tensor) -> Tensor:
    """(B, H, everything else) of a tensor in one of decay_attention's layouts; a missing axis has length 1."""
    if name == "lse":
        return x
    if x.ndim < 3:  # a decay (H,), or a scale that broadcasts
        x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    return x.movedim(2, 1).flatten(2)


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    scale: Tensor | float | None = None,
    causal: bool = True,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    backend: str = "auto",
    heads: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Comparison]:
    """Run decay_attention forward and backward on these inputs, and hold every result against the error budget.

    Args:
        q, k, v, log_decay, scale, causal: as decay_attention takes them; strided views stay strided.
        grad_out, grad_lse: gradients of out (B, T_q, H, D_v) and lse (B, H, T_q); expanded ones stay expanded. Default:
            normal random numbers from `seed`.
        backend: the tested backend.
        heads: (batch entry, query head) pairs to judge, for problems too big to judge whole. The output gradients of
            the other pairs are set to 0, so that what heads share (k, v, a constant decay) has exactly the gradient of
            the judged ones, and any gradient that reaches an unjudged head is an error.
        options: further arguments of the tested call.

    Returns:
        One Comparison per tensor: out, lse, dq, dk, dv, and dlog_decay and dscale where they are tensors.
    """
    problem = AttentionProblem.check(q, k, v, log_decay, scale, causal)
    generator = torch.Generator(q.device).manual_seed(seed)
    out_shape = (*q.shape[:3], v.shape[3])
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    if grad_out is None:
        grad_out = torch.randn(out_shape, generator=generator, device=q.device, dtype=q.dtype)
    if grad_lse is None:
        grad_lse = torch.randn(lse_shape, generator=generator, device=q.device, dtype=problem.accumulator_dtype)
    pairs = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[2])]
    if heads is not None:
        unknown = set(heads) - set(pairs)
        if unknown:
            expected = f"(batch entry, query head) pairs of q {tuple(q.shape)}"
            raise ValueError(f"heads: expected {expected}, got {sorted(unknown)}")
        pairs = list(dict.fromkeys(heads))
        judged = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        for pair in pairs:
            judged[pair] = True
        grad_out = torch.where(judged[:, None, :, None], grad_out, 0.0)
        grad_lse = torch.where(judged[:, :, None], grad_lse, 0.0)
    inputs = dict(zip(INPUTS, (q, k, v, log_decay, scale), strict=True))
    call = Call(inputs, causal, grad_out, grad_lse, tuple(pairs), problem)
    tested, x64, sizes = call.run(backend, options), call.oracle(), call.sizes()
    eager_error = {name: distance(name, x, x) for name, x in x64.items()}
    for factor in DRAWS:
        for name, x in call.draw(factor).items():
            eager_error[name] = torch.maximum(eager_error[name], distance(name, x, x64[name]))
    if heads is not None:  # the other pairs have outputs, too, but nobody evaluated them
        tested["out"] = torch.where(judged[:, None, :, None], tested["out"], 0.0)
        tested["lse"] = torch.where(judged[:, :, None], tested["lse"], 0.0)
    return [
        compare(name, x, x64[name], eager_error[name], sizes[name], problem.accumulator_dtype)
        for name, x in tested.items()
    ]


def assert_within_budget(comparisons: Sequence[Comparison]) -> None:
    """Raise an AssertionError that shows the whole table if one comparison failed."""
    if not all(c.passed for c in comparisons):
        raise AssertionError("results outside the error budget\n" + format_table(comparisons))
