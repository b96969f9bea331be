"""One call of decay_attention or decay_attention_varlen, split into heads that are evaluated independently.

The evaluations are an oracle in float64, eager formulas that round as a kernel must, and the tested backend. A
Comparison compares one result with its budget.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from decayattn.functional import decay_attention, decay_attention_varlen
from decayattn.problem import DECAY_BLOCK, AttentionProblem, BackendName, accumulator_dtype
from decayattn.testing import formulas
from decayattn.testing.formulas import explicit_attention

Verdict = Literal["ok", "wrong", "cannot tell"]

# the oracle's own rounding relative to A, for scores up to thousands
ORACLE_EPS = 2.0**-40
# Rows or tokens of a head: all values of a smaller head are below a tenth of their size in more than 1 of 10,000 cases
FEW = 4
# results with the keys' axis, if they have a token axis; the others have the queries'
OVER_TOKENS = ("dk", "dv", "dlog_decay")
NORMS = {"frobenius": 2, "maximum": math.inf}


class Arguments(NamedTuple):
    """Arguments of decay_attention that may have a gradient, in its layouts."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | float | None
    scale: Tensor | float | None
    bias: Tensor | None
    sink: Tensor | None

    def detach(self) -> "Arguments":
        return Arguments._make(x.detach() if isinstance(x, Tensor) else x for x in self)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Line of the table: labels, figures and verdict. "cannot tell": the budget is no smaller than the result."""

    error: float
    budget: float
    relative_error: float
    norm: str  # "frobenius", "maximum", or "zeros": the entries that must be 0
    verdict: Verdict

    @property
    def labels(self) -> dict[str, str]:
        """Cells before the figures, by heading."""
        raise NotImplementedError

    @property
    def passed(self) -> bool:
        return self.verdict == "ok"


@dataclass(frozen=True)
class Comparison(Row):
    """One tensor against its budget, at the head and in the norm with the largest ratio.

    The verdict is "cannot tell" if the budget of a head is no smaller than its result, in both norms: zeros would pass.
    For this test, heads of fewer than `FEW` rows or tokens are taken together.

    head is (batch entry, head); an axis that the tensor lacks or broadcasts over is 0. For packed sequences it is
    (sequence, head); sequence −1 is the tokens outside of them.
    """

    name: str
    head: tuple[int, int]

    @property
    def labels(self) -> dict[str, str]:
        return {"tensor": self.name, "head": f"{self.head[0]}, {self.head[1]}"}


@dataclass(frozen=True)
class SequenceBounds:
    """Query rows and tokens of an entry that see only each other; number: of entry or packed sequence, −1 outside."""

    number: int
    entry: int
    rows: slice
    tokens: slice


def bounds_of(problem: AttentionProblem, sequences: Sequence[Sequence[int]] | None) -> tuple[SequenceBounds, ...]:
    """Partition of all rows and tokens. Those outside of the sequences neither see nor are seen.

    sequences: (first row, rows, first token, tokens) of each; None if each fills its batch entry.
    """
    if sequences is None:
        sequences = [(0, problem.query_length, 0, problem.key_length)] * problem.batch
    packed = problem.layout == "packed"
    all_bounds = []
    for n, (row, rows, token, tokens) in enumerate(sequences):
        entry = 0 if packed else n
        if problem.decay == "scalar" and not problem.causal and rows > tokens:
            # rows before a sequence's first key have no λ
            all_bounds.append(SequenceBounds(n, entry, slice(row, row + rows - tokens), slice(0, 0)))
            row, rows = row + rows - tokens, tokens
        all_bounds.append(SequenceBounds(n, entry, slice(row, row + rows), slice(token, token + tokens)))
    outside, none = [], slice(0, 0)
    for entry in range(problem.batch):
        number, own = -1 if packed else entry, [bounds for bounds in all_bounds if bounds.entry == entry]
        for gap in _gaps((bounds.rows for bounds in own), problem.query_length):
            outside.append(SequenceBounds(number, entry, gap, none))
        for gap in _gaps((bounds.tokens for bounds in own), problem.key_length):
            outside.append(SequenceBounds(number, entry, none, gap))
    return (*all_bounds, *outside)


def _gaps(taken: Iterable[slice], length: int) -> Iterator[slice]:
    end, parts = 0, sorted((part.start, part.stop) for part in taken if part.start < part.stop)
    for start, stop in (*parts, (length, length)):
        if start > end:
            yield slice(end, start)
        end = stop


@dataclass(frozen=True)
class Call:
    """A call in decay_attention's layouts, its output gradients, and independent (bounds, head) pairs with gradient."""

    inputs: Arguments
    grad_out: Tensor
    grad_lse: Tensor
    bounds: tuple[SequenceBounds, ...]  # of all rows and tokens
    pairs: tuple[tuple[SequenceBounds, int], ...]
    problem: AttentionProblem

    def heads(self, bounds: SequenceBounds, pairs: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """explicit_attention's arguments for (batch entry, head) pairs (N, 2) with the rows and tokens of bounds."""
        q, k, v, log_decay, scale, bias, sink = self.inputs
        rows, tokens = bounds.rows, bounds.tokens
        b, h = pairs.unbind(1)
        heads = self.problem.num_heads
        g = h // (heads // self.problem.num_kv_heads)
        if isinstance(log_decay, Tensor) and log_decay.ndim > 2:
            log_decay = log_decay.expand(len(q), -1, heads, *log_decay.shape[3:])[b, tokens, h]
        elif log_decay is not None:
            log_decay = torch.as_tensor(log_decay, dtype=torch.float64, device=q.device).expand(heads)[h]
        if isinstance(scale, Tensor):
            scale = scale.expand(q.shape[:3])[b, rows, h].to(dtype)
        else:
            number = q.shape[-1] ** -0.5 if scale is None else scale
            scale = torch.full(h.shape, number, dtype=dtype, device=q.device)
        if bias is not None:
            bias = bias.expand(len(q), heads, q.shape[1], k.shape[1])[b, h, rows, tokens]
            bias = bias if bias.dtype == torch.bool else bias.to(dtype)
        q = q[b, rows, h].to(dtype)
        if rows.start == rows.stop or tokens.start == tokens.stop:
            # outside of the sequences q and scale may be NaN; not causal, a λ per token requires rows with keys
            q, scale, log_decay = torch.zeros_like(q), torch.zeros_like(scale), None
        return {
            "q": q, "k": k[b, tokens, g].to(dtype), "v": v[b, tokens, g].to(dtype), "log_decay": log_decay,
            "scale": scale, "causal": self.problem.causal, "window": self.problem.window,
            "bias": bias, "sink": None if sink is None else sink[h].to(dtype),
            "grad_out": self.grad_out[b, rows, h].to(dtype), "grad_lse": self.grad_lse[b, h, rows].to(dtype),
        }

    def groups(self) -> Iterator[tuple[SequenceBounds, Tensor]]:
        """Pairs as (batch entry, head), grouped by their rows and tokens."""
        together: dict[tuple[int, ...], list[tuple[SequenceBounds, int]]] = {}
        for bounds, head in self.pairs:
            key = bounds.rows.start, bounds.rows.stop, bounds.tokens.start, bounds.tokens.stop
            together.setdefault(key, []).append((bounds, head))
        for group in together.values():
            bounds = group[0][0]
            pairs = torch.tensor([(bounds.entry, head) for bounds, head in group], device=self.problem.device)
            size = (bounds.rows.stop - bounds.rows.start) * (bounds.tokens.stop - bounds.tokens.start)
            for some in pairs.split(max(1, formulas.SCORES_AT_ONCE // max(1, size))):
                yield bounds, some

    def gather(self, evaluate: Callable[..., dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        """evaluate(**heads) of all pairs, in the layouts of decay_attention; gradients of shared tensors are summed."""
        problem, given = self.problem, self.inputs._asdict()
        rows, keys, group = problem.query_length, problem.key_length, problem.num_heads // problem.num_kv_heads
        shapes: dict[str, tuple[int, ...]] = {  # of one head
            "out": (rows, problem.value_dim), "lse": (rows,), "dq": (rows, problem.head_dim),
            "dk": (keys, problem.head_dim), "dv": (keys, problem.value_dim),
        }
        others = {f"d{name}": x for name, x in [*given.items()][3:] if isinstance(x, Tensor) and x.is_floating_point()}
        optional = {"dscale": (rows,), "dbias": (rows, keys), "dsink": ()}
        for name, x in others.items():
            shapes[name] = optional[name] if name in optional else (keys, *x.shape[3:]) if x.ndim > 2 else ()
        total = {
            name: given["q"].new_zeros(
                problem.batch, problem.num_kv_heads if name in ("dk", "dv") else problem.num_heads, *shape, dtype=dtype
            ) for name, shape in shapes.items()
        }
        for bounds, some in self.groups():
            part = evaluate(**self.heads(bounds, some, dtype))
            b, h = some.unbind(1)
            for name in total.keys() & part:  # no dlog_decay without rows or without tokens
                result, at = total[name], (b, h // group if name in ("dk", "dv") else h)
                if name == "dbias":
                    result = result[:, :, bounds.rows, bounds.tokens]
                elif result.ndim > 2:
                    result = result[:, :, bounds.tokens if name in OVER_TOKENS else bounds.rows]
                result.index_put_(at, part[name].to(dtype), accumulate=True)
        for name, x in total.items():
            if name not in ("lse", "dbias"):
                x = x[:, None] if x.ndim == 2 else x.transpose(1, 2)
            if name in others:
                leaf = others[name]
                x = x.sum_to_size((1,) * (x.ndim - leaf.ndim) + leaf.shape).reshape(leaf.shape)
            total[name] = x
        return total

    def oracle(self) -> dict[str, Tensor]:
        """x64 by autograd."""

        def evaluate(*, causal, window, grad_out, grad_lse, **heads):
            floating = {name: x for name, x in heads.items() if x is not None and x.is_floating_point()}
            leaves = {f"d{name}": x.to(torch.float64, copy=True).requires_grad_() for name, x in floating.items()}
            q, k, v, decay, scale, bias, sink = (leaves.get(f"d{name}", heads[name]) for name in Arguments._fields)
            out, lse = decay_attention(  # pairs on the head axis
                *(x.transpose(0, 1)[None] for x in (q, k, v)),
                decay if decay is None or decay.ndim == 1 else decay.transpose(0, 1)[None],
                scale=scale if scale.ndim == 1 else scale.T[None], bias=None if bias is None else bias[None],
                causal=causal, window_size=window, sink=sink, return_lse=True, backend="reference",
            )
            results, given = [out[0].transpose(0, 1), lse[0]], [grad_out, grad_lse]
            gradients = torch.autograd.grad(results, [*leaves.values()], given, materialize_grads=True)
            out, lse = (x.detach() for x in results)
            return {"out": out, "lse": lse, **dict(zip(leaves, gradients, strict=True))}

        return self.gather(evaluate, torch.float64)

    def eager(self, gradient_factor: float = 1.0, factor: float = 1.0) -> dict[str, Tensor]:
        """Rounded evaluation, in the dtypes that decay_attention returns. For the factors see `DRAWS`."""

        def evaluate(*, grad_out, grad_lse, **heads):
            grads = {"grad_out": grad_out * gradient_factor, "grad_lse": grad_lse * gradient_factor}
            return explicit_attention(
                **heads, **grads, rounding=self.problem.dtype, factor=factor,
                prefix_block=self.prefix_block if factor != 1.0 else 0,
            )

        total = self.gather(evaluate, accumulator_dtype(self.problem.dtype))
        return {name: x.to(self.dtype_of(name)) for name, x in total.items()}

    def draw(self, factor: float) -> dict[str, Tensor]:
        """Evaluation with other roundings in the same binade, in float64."""
        eager = self.eager(factor, factor)
        return {name: x.double() / (factor if name.startswith("d") else 1.0) for name, x in eager.items()}

    def sizes(self) -> dict[str, Tensor]:
        """A, in float64."""
        exact_oracle = accumulator_dtype(self.problem.dtype) != torch.float64

        def evaluate(**heads):
            part = explicit_attention(**heads, absolute=True, prefix_block=self.prefix_block if exact_oracle else 0)
            condition = 1.0 + part.pop("score_size")
            if exact_oracle:
                return part
            return {name: x * condition.reshape(-1, *(1,) * (x.ndim - 1)) for name, x in part.items()}

        return self.gather(evaluate, torch.float64)

    @property
    def prefix_block(self) -> int:
        """Tokens of a block in which one number in the accumulator's dtype holds the prefix; float32 uses two: 0.

        Its rounding enters the scores, the LSE, and the probability of a sink, which comes from the LSE.
        """
        return 0 if self.problem.dtype == torch.float32 else DECAY_BLOCK

    def dtype_of(self, name: str) -> torch.dtype:
        if name == "lse":
            return accumulator_dtype(self.problem.dtype)
        leaf = self.inputs._asdict().get(name.removeprefix("d"))
        return leaf.dtype if isinstance(leaf, Tensor) else self.problem.dtype

    def run(self, backend: BackendName, options: dict[str, Any]) -> dict[str, Tensor]:
        """Tested results: one forward and one backward, on leaves with the strides of the given tensors."""
        inputs: dict[str, Any] = self.inputs.detach()._asdict()
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        leaves = {f"d{name}": x.requires_grad_() for name, x in tensors.items()}
        options = {"causal": self.problem.causal, "return_lse": True, "backend": backend, **options}
        attend = options.pop("attend", None)
        if self.problem.layout == "packed":
            del inputs["bias"]
            per_token = self.problem.decay == "scalar"
            without_batch = {name: inputs[name][0] for name in ("q", "k", "v", *["log_decay"] * per_token)}
            out, lse = (attend or decay_attention_varlen)(**inputs | without_batch, **options)
            out, lse = out[None], lse[None]
        else:
            out, lse = (attend or decay_attention)(**inputs, **options)
        grads = self.grad_out, self.grad_lse
        gradients = torch.autograd.grad([out, lse], [*leaves.values()], grads, materialize_grads=True)
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}

    # the comparison

    def parts(self, name: str, x: Tensor) -> list[tuple[list[int], Tensor]]:
        """Parts of a tensor in one of decay_attention's layouts that are judged separately: (numbers, (N, H, everything
        else)). A part has the bounds with the same rows or tokens, or, if the tensor lacks their axis, every batch
        entry. A missing axis has length 1."""
        if name == "dbias":
            x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        elif name != "lse":
            x = x.reshape((1,) * (3 - x.ndim) + x.shape).movedim(2, 1)  # a decay (H,), or a scale that broadcasts
        over_tokens = name in OVER_TOKENS
        axis = self.problem.key_length if over_tokens else self.problem.query_length
        if name == "dbias" or (x.shape[0], x.shape[2]) != (self.problem.batch, axis):
            return [(list(range(len(x))), x.flatten(2))] if x.numel() else []
        together: dict[tuple[int, int], list[SequenceBounds]] = {}
        for bounds in self.bounds:
            at = bounds.tokens if over_tokens else bounds.rows
            if at.start < at.stop:
                together.setdefault((at.start, at.stop), []).append(bounds)
        found = []
        for (start, stop), all_bounds in together.items():
            own = x[[bounds.entry for bounds in all_bounds], :, start:stop]
            found.append(([bounds.number for bounds in all_bounds], own.flatten(2)))
        return found

    def distance(self, name: str, x: Tensor, x64: Tensor) -> Tensor:
        """Norms of x − x64, (2, parts, H) in the order of NORMS; inf where only one of them is −inf."""
        found = []
        for (_, part), (_, part64) in zip(self.parts(name, x), self.parts(name, x64), strict=True):
            hidden = part64.isneginf()
            difference = (part.double() - part64).masked_fill(hidden, 0.0)
            misplaced = (hidden != part.isneginf()).any(-1)
            norms = [torch.linalg.vector_norm(difference, order, dim=-1) for order in NORMS.values()]
            found.append(torch.stack(norms).masked_fill(misplaced, math.inf))
        return torch.cat(found, 1) if found else x64.new_zeros(len(NORMS), 0, 1)

    def blind(self, name: str, norm: Tensor, budget: Tensor, total: Tensor, size: Tensor, least: float) -> Tensor:
        """(parts, H), True where zeros would be within the budget without being right.

        Zeros are right where the oracle is 0 up to its rounding, or too small for the dtype. Results of few rows or
        tokens may be small by chance: heads that have no more are taken together.
        """
        width = size.shape[-1] if name in ("out", "dq", "dk", "dv") else 1
        few = self.distance(name, torch.zeros_like(size), (size != 0).double())[0] ** 2 < FEW * width
        norm, budget, total = (
            torch.where(few, y.masked_fill(~few, 0.0).flatten(1).norm(dim=1)[:, None, None], y)
            for y in (norm, budget, total)
        )
        return ((budget >= norm) & (norm > ORACLE_EPS * total) & (norm > least)).all(0)

    def compare(self, name: str, x: Tensor, x64: Tensor, eager_error: Tensor, size: Tensor) -> Comparison:
        """Compare one tensor with its budget.

        Args:
            name: "lse", "out", or "d" and the name of an input; the layout follows from it.
            x, x64, size: the tested tensor in its own dtype, the oracle, and A.
            eager_error: `distance` of the rounded evaluation from the oracle.

        A NaN never passes; −inf must be exactly where the oracle has −inf.
        """
        own_eps, accumulator_eps = torch.finfo(x.dtype).eps, torch.finfo(accumulator_dtype(self.problem.dtype)).eps
        zero = torch.zeros_like(x64)
        error, norm = self.distance(name, x, x64), self.distance(name, zero, x64.masked_fill(x64.isneginf(), 0.0))
        total = self.distance(name, zero, size)
        budget = 2 * eager_error + own_eps * norm + 4 * accumulator_eps * total
        blind = self.blind(name, norm, budget, total, size, torch.finfo(x.dtype).smallest_normal * own_eps)
        # lse is not a sum of the terms in A: it may have a rounding error where all of them are 0
        nothing = torch.zeros_like(size, dtype=torch.bool) if name == "lse" else size == 0
        stray = self.distance(name, x.where(nothing, 0.0), zero)[1:]
        error = torch.cat([error, stray])
        norm, budget = (torch.cat([y, torch.zeros_like(stray)]) for y in (norm, budget))
        excess = torch.where(error == 0, 0.0, error / budget).nan_to_num(nan=math.inf)
        if not excess.numel():
            return Comparison(name, (0, 0), error=0.0, budget=0.0, relative_error=0.0, norm="frobenius", verdict="ok")
        verdict: Verdict = "ok"
        if not bool((error <= budget).all()):
            verdict = "wrong"
        elif bool(blind.any()):
            verdict = "cannot tell"
            excess = torch.where(blind, budget[:2] / norm[:2], 0.0)
        worst = tuple(int(at) for at in torch.unravel_index(excess.argmax(), excess.shape))
        numbers = [number for group, _ in self.parts(name, x) for number in group]
        head = numbers[worst[1]], worst[2]
        found, allowed = float(error[worst]), float(budget[worst])
        return Comparison(
            name, head, error=found, budget=allowed, relative_error=ratio(found, float(norm[worst])),
            norm=[*NORMS, "zeros"][worst[0]], verdict=verdict,
        )


def format_table(rows: Sequence[Row]) -> str:
    """Comparisons or gradient rows as an aligned monospace table; decay parameters are marked with λ."""
    if not rows:
        return "(nothing to compare)"
    cells: list[tuple[Any, ...]] = [(*rows[0].labels, "relative error", "error", "budget", "norm", "verdict")]
    for row in rows:
        numbers = (f"{x:.2e}" for x in (row.relative_error, row.error, row.budget))
        cells.append((*row.labels.values(), *numbers, row.norm, "VIOLATED" if row.verdict == "wrong" else row.verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def ratio(a: float, b: float) -> float:
    """a / b, with 0 / 0 = 0."""
    return a / b if b else (math.inf if a else 0.0)
