"""One call of decay_attention, or of decay_attention_varlen, against its error budget."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from decayattn.functional import decay_attention, decay_attention_varlen
from decayattn.problem import AttentionProblem, BackendName, check_arguments, check_packed_arguments, window_of
from decayattn.testing import formulas
from decayattn.testing.formulas import explicit_attention
from decayattn.testing.table import Row, format_table, ratio

# For 16-bit inputs the prefix of the decay inside a block of tokens is in float32: LSE has its rounding, and so have
# scores, to which it is added, and the probability of a sink, which LSE gives. For float64 it is in float64
PREFIX_BLOCK = 128

# Factors of the eager evaluations. The output gradients (or the loss), the scores and P before its rounding are
# multiplied by a factor, which is divided out at the end: the same values, rounded elsewhere. Every factor adds up in
# another order, too (see explicit_attention). A normal error of one number exceeds twice another one in 3 of 10 cases,
# and twice the largest of 16 in 1 of 1000.
DRAWS = tuple(2.0 ** (draw / 16) for draw in range(16))  # 1 first; the others have no short mantissa, so all is rounded

# A call has several such numbers, and a test suite thousands. What exceeds its budget with DRAWS is held to four times
# as many roundings, but for what exceeds it LUCK times: that is no luck
MORE_DRAWS = tuple(2.0 ** (draw / 64) for draw in range(64) if draw % 4)
LUCK = 2.0

# the results that have the keys' axis, where they have one; the others have the queries'
OVER_TOKENS = ("dk", "dv", "dlog_decay")


class Arguments(NamedTuple):
    """The arguments of decay_attention that may have a gradient, in its layouts."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | float | None
    scale: Tensor | float | None
    bias: Tensor | None
    sink: Tensor | None


INPUTS = Arguments._fields


@dataclass(frozen=True)
class Comparison:
    """One tensor against its budget, at the head and in the norm that come closest to it or exceed it most.

    head is the index of that head: (batch entry, head), where an axis that the tensor lacks or broadcasts over is 0; of
    packed sequences (sequence, head), and −1 stands for what lies outside of them.
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


@dataclass(frozen=True)
class Place:
    """Query rows and tokens of one batch entry that see each other, and nothing else.

    number is that of the batch entry, or of the sequence where sequences are packed; −1 outside of them.
    """

    number: int
    entry: int
    rows: slice
    tokens: slice


def places_of(problem: AttentionProblem, sequences: Sequence[Sequence[int]] | None) -> tuple[Place, ...]:
    """A partition of all rows and tokens: what lies outside of the sequences sees nothing, and nobody sees it.

    sequences: (first row, rows, first token, tokens) of each; None where each fills its batch entry.
    """
    if sequences is None:
        sequences = [(0, problem.query_length, 0, problem.key_length)] * problem.batch
    packed = problem.layout == "packed"
    places = []
    for n, (row, rows, token, tokens) in enumerate(sequences):
        entry = 0 if packed else n
        if problem.decay == "scalar" and not problem.causal and rows > tokens:
            # there is no λ before a sequence's first key
            places.append(Place(n, entry, slice(row, row + rows - tokens), slice(0, 0)))
            row, rows = row + rows - tokens, tokens
        places.append(Place(n, entry, slice(row, row + rows), slice(token, token + tokens)))
    taken_of: list[list[Place]] = [[] for _ in range(problem.batch)]
    for place in places:
        taken_of[place.entry].append(place)
    for entry, taken in enumerate(taken_of):
        number = -1 if packed else entry
        for gap in _gaps([place.rows for place in taken], problem.query_length):
            places.append(Place(number, entry, gap, slice(0, 0)))
        for gap in _gaps([place.tokens for place in taken], problem.key_length):
            places.append(Place(number, entry, slice(0, 0), gap))
    return tuple(places)


def _gaps(taken: list[slice], length: int) -> Iterator[slice]:
    end = 0
    for start, stop in sorted((part.start, part.stop) for part in taken if part.start < part.stop):
        if start > end:
            yield slice(end, start)
        end = stop
    if end < length:
        yield slice(end, length)


@dataclass(frozen=True)
class Call:
    """Inputs of one call with its output gradients, and the (place, head) pairs that carry gradient.

    All in decay_attention's layouts: packed sequences lie in a single batch entry. Every pair is an independent head.
    """

    inputs: Arguments
    grad_out: Tensor
    grad_lse: Tensor
    places: tuple[Place, ...]  # of all rows and tokens
    pairs: tuple[tuple[Place, int], ...]
    problem: AttentionProblem

    def heads(self, place: Place, pairs: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """explicit_attention's arguments for (batch entry, head) pairs (N, 2) with the rows and tokens of place."""
        q, k, v, log_decay, scale, bias, sink = self.inputs
        rows, tokens = place.rows, place.tokens
        b, h = pairs.unbind(1)
        g = h // (self.problem.num_heads // self.problem.num_kv_heads)
        if isinstance(log_decay, Tensor):
            heads = self.problem.num_heads
            per_token = log_decay.ndim == 3
            log_decay = log_decay.expand(len(q), -1, heads)[b, tokens, h] if per_token else log_decay.expand(heads)[h]
        elif log_decay is not None:
            log_decay = torch.full(h.shape, log_decay, dtype=torch.float64, device=q.device)
        if isinstance(scale, Tensor):
            scale = scale.expand(q.shape[:3])[b, rows, h].to(dtype)
        else:
            number = q.shape[-1] ** -0.5 if scale is None else scale
            scale = torch.full(h.shape, number, dtype=dtype, device=q.device)
        if bias is not None:
            bias = bias.expand(len(q), self.problem.num_heads, q.shape[1], k.shape[1])[b, h, rows, tokens]
            bias = bias if bias.dtype == torch.bool else bias.to(dtype)
        q = q[b, rows, h].to(dtype)
        causal = self.problem.causal
        if tokens.start == tokens.stop:
            # outside of the sequences q and scale may be NaN, and without keys decay_attention takes causal calls only
            q, scale, causal = torch.zeros_like(q), torch.zeros_like(scale), True
        return {
            "q": q, "k": k[b, tokens, g].to(dtype), "v": v[b, tokens, g].to(dtype), "log_decay": log_decay,
            "scale": scale, "causal": causal, "window": self.problem.window,
            "bias": bias, "sink": None if sink is None else sink[h].to(dtype),
            "grad_out": self.grad_out[b, rows, h].to(dtype), "grad_lse": self.grad_lse[b, h, rows].to(dtype),
        }

    def groups(self) -> Iterator[tuple[Place, Tensor]]:
        """The pairs as (batch entry, head), those with the same rows and tokens together."""
        together: dict[tuple[int, ...], list[tuple[Place, int]]] = {}
        for place, head in self.pairs:
            key = place.rows.start, place.rows.stop, place.tokens.start, place.tokens.stop
            together.setdefault(key, []).append((place, head))
        for group in together.values():
            place = group[0][0]
            pairs = torch.tensor([(place.entry, head) for place, head in group], device=self.problem.device)
            size = (place.rows.stop - place.rows.start) * (place.tokens.stop - place.tokens.start)
            for some in pairs.split(max(1, formulas.SCORES_AT_ONCE // max(1, size))):
                yield place, some

    def gather(self, evaluate: Callable[..., dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        """evaluate(**heads) of all pairs, in the layouts that decay_attention returns; what heads share is added up."""
        problem, (q, _, _, log_decay, scale, bias, sink) = self.problem, self.inputs
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
        if bias is not None and bias.is_floating_point():
            shapes["dbias"] = (batch, heads, rows, keys)
        if sink is not None:
            shapes["dsink"] = (batch, heads)
        total = {name: q.new_zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        for place, some in self.groups():
            part = evaluate(**self.heads(place, some, dtype))
            b, h = some.unbind(1)
            for name, result in total.items():
                at = (b, h // group if name in ("dk", "dv") else h)
                if name == "dbias":
                    result = result[:, :, place.rows, place.tokens]
                elif result.ndim > 2:
                    result = result[:, :, place.tokens if name in OVER_TOKENS else place.rows]
                result.index_put_(at, part[name].to(dtype), accumulate=True)
        given = {"dlog_decay": log_decay, "dscale": scale, "dbias": bias, "dsink": sink}
        broadcast = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        for name, x in total.items():
            if name not in ("lse", "dbias"):
                x = x[:, None] if x.ndim == 2 else x.transpose(1, 2)
            if name in broadcast:
                leaf = broadcast[name]
                x = x.sum_to_size((1,) * (x.ndim - leaf.ndim) + leaf.shape).reshape(leaf.shape)
            total[name] = x
        return total

    def oracle(self) -> dict[str, Tensor]:
        """x64 by autograd; causal, in chunks of rows, each the last rows of the keys that it sees."""

        def evaluate(*, causal, window, grad_out, grad_lse, **heads):
            floating = {name: x for name, x in heads.items() if x is not None and x.is_floating_point()}
            leaves = {f"d{name}": x.to(torch.float64, copy=True).requires_grad_() for name, x in floating.items()}
            q, k, v, decay, scale, bias, sink = (leaves.get(f"d{name}", heads[name]) for name in INPUTS)
            rows, keys = q.shape[1], k.shape[1]
            outs, lses, total = [], [], {name: torch.zeros_like(x) for name, x in leaves.items()}
            for chunk in formulas.row_chunks(len(q) * keys, rows) if causal else [slice(0, rows)]:
                seen = max(0, keys - (rows - chunk.stop)) if causal else keys
                out, lse = decay_attention(  # the pairs stand on the head axis
                    *(x.transpose(0, 1)[None] for x in (q[:, chunk], k[:, :seen], v[:, :seen])),
                    decay if decay is None or decay.ndim == 1 else decay[:, :seen].T[None],
                    scale=scale if scale.ndim == 1 else scale[:, chunk].T[None],
                    bias=None if bias is None else bias[None, :, chunk, :seen],
                    causal=causal, window_size=window, sink=sink, return_lse=True, backend="reference",
                )
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

        def evaluate(*, grad_out, grad_lse, **heads):
            grads = {"grad_out": grad_out * gradient_factor, "grad_lse": grad_lse * gradient_factor}
            return explicit_attention(
                **heads, **grads, rounding=self.problem.dtype, factor=factor,
                prefix_block=self.prefix_block if factor != 1.0 else 0,
            )

        total = self.gather(evaluate, self.problem.accumulator_dtype)
        return {name: x.to(self.dtype_of(name)) for name, x in total.items()}

    def draw(self, factor: float) -> dict[str, Tensor]:
        """The rounded evaluation at another place of the same binade, in float64."""
        eager = self.eager(factor, factor)
        return {name: x.double() / (factor if name.startswith("d") else 1.0) for name, x in eager.items()}

    def sizes(self) -> dict[str, Tensor]:
        """A, in float64."""
        exact_oracle = self.problem.accumulator_dtype != torch.float64

        def evaluate(**heads):
            part = explicit_attention(**heads, absolute=True, prefix_block=self.prefix_block if exact_oracle else 0)
            condition = 1.0 + part.pop("score_size")
            if exact_oracle:
                return part
            return {name: x * condition.reshape(-1, *(1,) * (x.ndim - 1)) for name, x in part.items()}

        return self.gather(evaluate, torch.float64)

    @property
    def prefix_block(self) -> int:
        """Tokens of a block inside of which the prefix of the decay is one number of the accumulator's dtype; 0 for
        float32, which has two."""
        return 0 if self.problem.dtype == torch.float32 else PREFIX_BLOCK

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which decay_attention returns a tensor."""
        if name == "lse":
            return self.problem.accumulator_dtype
        leaf = self.inputs._asdict().get(name.removeprefix("d"))
        return leaf.dtype if isinstance(leaf, Tensor) else self.problem.dtype

    def run(self, backend: BackendName, options: dict[str, Any]) -> dict[str, Tensor]:
        """What is tested: one forward and one backward, on leaves with the strides of the given tensors."""
        given = self.inputs._asdict()
        inputs: dict[str, Any] = {name: x.detach() if isinstance(x, Tensor) else x for name, x in given.items()}
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
        gradients = torch.autograd.grad(
            [out, lse], list(leaves.values()), [self.grad_out, self.grad_lse], materialize_grads=True
        )
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}

    # the comparison

    def parts(self, name: str, x: Tensor) -> list[tuple[list[int], Tensor]]:
        """What is judged on its own of a tensor in one of decay_attention's layouts: (numbers, (N, H, everything else))
        of the places, those on the same rows or tokens together; or of every batch entry where the tensor lacks the
        places' axis. A missing axis has length 1."""
        if name == "dbias":
            x = x.reshape((1,) * (4 - x.ndim) + x.shape)
            return [(list(range(len(x))), x.flatten(2))] if x.numel() else []
        if name != "lse":
            x = x.reshape((1,) * (3 - x.ndim) + x.shape).movedim(2, 1)  # a decay (H,), or a scale that broadcasts
        over_tokens = name in OVER_TOKENS
        axis = self.problem.key_length if over_tokens else self.problem.query_length
        if (x.shape[0], x.shape[2]) != (self.problem.batch, axis):
            return [(list(range(len(x))), x.flatten(2))] if x.numel() else []
        together: dict[tuple[int, int], list[Place]] = {}
        for place in self.places:
            at = place.tokens if over_tokens else place.rows
            if at.start < at.stop:
                together.setdefault((at.start, at.stop), []).append(place)
        found = []
        for (start, stop), places in together.items():
            entries = [place.entry for place in places]
            here = x if entries == list(range(len(x))) else x[entries]
            found.append(([place.number for place in places], here[:, :, start:stop].flatten(2)))
        return found

    def distance(self, name: str, x: Tensor, x64: Tensor) -> Tensor:
        """The norms of x − x64, (2, parts, H) in the order of NORMS, inf where −inf stands in one of them only."""
        found = []
        for (_, part), (_, part64) in zip(self.parts(name, x), self.parts(name, x64), strict=True):
            hidden = part64.isneginf()
            difference = (part.double() - part64).masked_fill(hidden, 0.0)
            misplaced = (hidden != part.isneginf()).any(-1)
            norms = [torch.linalg.vector_norm(difference, order, dim=-1) for order in NORMS.values()]
            found.append(torch.stack(norms).masked_fill(misplaced, math.inf))
        return torch.cat(found, 1) if found else x64.new_zeros(len(NORMS), 0, 1)

    def compare(self, name: str, x: Tensor, x64: Tensor, eager_error: Tensor, size: Tensor) -> Comparison:
        """The worst head and norm of one tensor under the budget.

        Args:
            name: "lse", "out", or "d" and the name of an input; the layout follows from it.
            x, x64, size: the tested tensor in its own dtype, the oracle, and A.
            eager_error: `distance` of the rounded evaluation from the oracle.

        A NaN never passes; −inf must stand exactly where the oracle has it.
        """
        own_eps, accumulator_eps = torch.finfo(x.dtype).eps, torch.finfo(self.problem.accumulator_dtype).eps
        zero = torch.zeros_like(x64)
        error, norm = self.distance(name, x, x64), self.distance(name, zero, x64.masked_fill(x64.isneginf(), 0.0))
        budget = 2 * eager_error + own_eps * norm + 4 * accumulator_eps * self.distance(name, zero, size)
        excess = torch.where(error == 0, 0.0, error / budget).nan_to_num(nan=math.inf)
        if not excess.numel():
            return Comparison(name, (0, 0), 0.0, 0.0, 0.0, "frobenius", True)
        worst = tuple(int(at) for at in torch.unravel_index(excess.argmax(), excess.shape))
        numbers = [number for group, _ in self.parts(name, x) for number in group]
        head = numbers[worst[1]], worst[2]
        found, allowed = float(error[worst]), float(budget[worst])
        passed = bool((error <= budget).all())
        return Comparison(
            name, head, found, allowed, ratio(found, float(norm[worst])), list(NORMS)[worst[0]], passed
        )


class Budget:
    """The budget of one call's results, from as many eager evaluations as it takes.

    Args:
        call: the call.
        x64: its oracle by tensor: all that are judged.
    """

    def __init__(self, call: Call, x64: dict[str, Tensor]) -> None:
        self.call, self.x64, self.sizes = call, x64, call.sizes()
        self.eager_error = {name: call.distance(name, x, x) for name, x in x64.items()}

    def widen(self, factors: Sequence[float]) -> None:
        """Evaluate with these factors (`DRAWS`), too, but for those with which something overflows."""
        for factor in factors:
            self.include(self.call.draw(factor), always=factor == 1)

    def include(self, drawn: dict[str, Tensor], always: bool = True) -> None:
        """The results of one more eager evaluation (`Call.draw`): always, or only if all their errors are finite.

        Eager attention may overflow, and counts as it is. A factor may take float16 out of its range by itself.
        """
        errors = {name: self.call.distance(name, drawn[name], x) for name, x in self.x64.items()}
        if always or all(bool(error.isfinite().all()) for error in errors.values()):
            for name, error in errors.items():
                self.eager_error[name] = torch.maximum(self.eager_error[name], error)

    def compare(self, tested: dict[str, Tensor]) -> list[Comparison]:
        """The tensors against the budget as it is."""
        return [
            self.call.compare(name, x, self.x64[name], self.eager_error[name], self.sizes[name])
            for name, x in tested.items()
        ]

    def judge(self, tested: dict[str, Tensor]) -> list[Comparison]:
        """The tensors against the budget of DRAWS, and of MORE_DRAWS too where that is exceeded by little.

        More evaluations only make it larger: what the first one grants needs no other.
        """
        self.widen(DRAWS[:1])
        found = self.compare(tested)
        if not all(row.passed for row in found):
            self.widen(DRAWS[1:])
            found = self.compare(tested)
        if may_be_luck(found):
            self.widen(MORE_DRAWS)
            found = self.compare(tested)
        return found


def may_be_luck(rows: Sequence[Row]) -> bool:
    """Whether something exceeds its budget, and nothing by so much that more roundings cannot grant it."""
    failed = [row for row in rows if not row.passed]
    return bool(failed) and all(row.error <= LUCK * row.budget for row in failed)  # a NaN is not


def verify_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    scale: Tensor | float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    backend: BackendName = "auto",
    heads: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Comparison]:
    """Run decay_attention forward and backward on these inputs, and hold every result against the error budget.

    Args:
        q, k, v, log_decay, scale, causal, window_size, bias, sink, seqused_q, seqused_k, leftpad_q, leftpad_k: as
            decay_attention takes them; strided views stay strided. Rows and tokens outside of the sequences are judged
            on their own: their results have to be exactly what decay_attention promises, whatever they hold.
        grad_out, grad_lse: gradients of out (B, T_q, H, D_v) and lse (B, H, T_q); expanded ones stay expanded. Default:
            normal random numbers from `seed`.
        backend: the tested backend.
        heads: (batch entry, query head) pairs to judge, for problems too big to judge whole. The output gradients of
            the other pairs are set to 0, so that what heads share (k, v, a constant decay) has exactly the gradient of
            the judged ones, and any gradient that reaches an unjudged head is an error.
        options: further arguments of the tested call; `attend`, if given, is called in place of decay_attention, with
            the same arguments.

    Returns:
        One Comparison per tensor: out, lse, dq, dk, dv, and dlog_decay, dscale, dbias and dsink where they are
        floating tensors.
    """
    check_arguments(
        q, k, v, log_decay, scale, causal, window_size, sink, seqused_q, seqused_k, leftpad_q, leftpad_k, bias
    )
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k, "leftpad_q": leftpad_q, "leftpad_k": leftpad_k}
    sequences = None
    if any(x is not None for x in lengths.values()):

        def extents(first: Tensor | None, end: Tensor | None, axis: int) -> list[tuple[int, int]]:
            firsts = [0] * len(q) if first is None else first.tolist()
            ends = [axis] * len(q) if end is None else end.tolist()
            return [_extent(start, stop, axis) for start, stop in zip(firsts, ends, strict=True)]

        rows, tokens = extents(leftpad_q, seqused_q, q.shape[1]), extents(leftpad_k, seqused_k, k.shape[1])
        sequences = [(*own_rows, *own_tokens) for own_rows, own_tokens in zip(rows, tokens, strict=True)]
    inputs = Arguments(q, k, v, log_decay, scale, bias, sink)
    problem = _problem(inputs, causal, window_size, sequences, None)
    options |= {"window_size": window_size, **lengths}
    return _judge(problem, inputs, sequences, grad_out, grad_lse, heads, seed, backend, options)


def verify_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: Tensor | float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    backend: BackendName = "auto",
    heads: Sequence[tuple[int, int]] | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Comparison]:
    """Run decay_attention_varlen forward and backward on these inputs, and hold every sequence against the budget.

    Args:
        q, k, v, log_decay, cu_seqlens_q, cu_seqlens_k, scale, causal, window_size, sink: as decay_attention_varlen
            takes them. Tokens outside of the sequences are judged on their own, as sequence −1: their results have to
            be exactly what decay_attention_varlen promises, whatever they hold.
        max_seqlen_q, max_seqlen_k: default: the longest of the sequences.
        grad_out, grad_lse: gradients of out (total_q, H, D_v) and lse (H, total_q).
        heads: (sequence, query head) pairs to judge, as in verify_attention.
        backend, seed, options: as in verify_attention.

    Returns:
        One Comparison per tensor, as verify_attention; its head is (sequence, head).
    """
    if max_seqlen_q is None:
        max_seqlen_q = _longest(cu_seqlens_q)
    if max_seqlen_k is None:
        max_seqlen_k = _longest(cu_seqlens_k)
    check_packed_arguments(
        q, k, v, log_decay, scale, causal, window_size, sink, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    ends = zip(*(itertools.pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k)), strict=True)
    sequences = [
        (*_extent(row, row_end, len(q), max_seqlen_q), *_extent(token, token_end, len(k), max_seqlen_k))
        for (row, row_end), (token, token_end) in ends
    ]
    if isinstance(log_decay, Tensor) and log_decay.ndim == 2:
        log_decay = log_decay[None]
    inputs = Arguments(q[None], k[None], v[None], log_decay, scale, None, sink)
    problem = _problem(inputs, causal, window_size, sequences, (max_seqlen_q, max_seqlen_k))
    grad_out, grad_lse = (x if x is None else x[None] for x in (grad_out, grad_lse))
    options |= {
        "window_size": window_size, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }
    return _judge(problem, inputs, sequences, grad_out, grad_lse, heads, seed, backend, options)


def _longest(offsets: Tensor) -> int:
    return max([0, *offsets.diff().tolist()])


def _extent(start: int, end: int, axis: int, longest: int | None = None) -> tuple[int, int]:
    """Begin and length of what lies in [start, end) and on the axis."""
    start, end = min(max(start, 0), axis), min(max(end, 0), axis)
    length = max(0, end - start)
    return start, length if longest is None else min(length, longest)


def _problem(
    inputs: Arguments,
    causal: bool,
    window_size: tuple[int, int] | None,
    sequences: Sequence[tuple[int, int, int, int]] | None,
    longest: tuple[int, int] | None,
) -> AttentionProblem:
    q, log_decay = inputs.q, inputs.log_decay
    if log_decay is not None and not (isinstance(log_decay, Tensor) and log_decay.ndim):
        log_decay = q.new_zeros(q.shape[2])  # its shape counts here
    bounds = None if sequences is None else torch.tensor(sequences, dtype=torch.int32).reshape(-1, 4)
    row_scale = inputs.scale if isinstance(inputs.scale, Tensor) else None
    window = window_of(window_size, causal)
    return AttentionProblem.of(q, inputs.v, log_decay, row_scale, causal, window, bounds, longest, inputs.bias)


def _judge(
    problem: AttentionProblem, inputs: Arguments, sequences: Sequence[tuple[int, int, int, int]] | None,
    grad_out: Tensor | None, grad_lse: Tensor | None, heads: Sequence[tuple[int, int]] | None, seed: int,
    backend: BackendName, options: dict[str, Any],
) -> list[Comparison]:
    batch, rows, num_heads, device = problem.batch, problem.query_length, problem.num_heads, problem.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    if grad_out is None:
        grad_out = normal(batch, rows, num_heads, problem.value_dim, dtype=problem.dtype)
    if grad_lse is None:
        grad_lse = normal(batch, num_heads, rows, dtype=problem.accumulator_dtype)
    places = places_of(problem, sequences)
    pairs = [(place, head) for place in places for head in range(num_heads)]
    if heads is not None:
        unknown = set(heads) - {(place.number, head) for place, head in pairs}
        if unknown:
            expected = f"(batch entry or sequence, query head) pairs of q {tuple(inputs.q.shape)}"
            raise ValueError(f"heads: expected {expected}, got {sorted(unknown)}")
        pairs = [(place, head) for place, head in pairs if (place.number, head) in set(heads)]
        judged = torch.zeros(batch, num_heads, rows, dtype=torch.bool, device=device)
        for place, head in pairs:
            judged[place.entry, head, place.rows] = True
        judged_out = judged.transpose(1, 2)[..., None]
        grad_out, grad_lse = torch.where(judged_out, grad_out, 0.0), torch.where(judged, grad_lse, 0.0)
    call = Call(inputs, grad_out, grad_lse, places, tuple(pairs), problem)
    tested = call.run(backend, options)
    if heads is not None:  # the other pairs have outputs, too, but nobody evaluated them
        tested["out"] = torch.where(judged_out, tested["out"], 0.0)
        tested["lse"] = torch.where(judged, tested["lse"], 0.0)
    return Budget(call, call.oracle()).judge(tested)


def assert_within_budget(comparisons: Sequence[Comparison]) -> None:
    """Raise an AssertionError that shows the whole table if one comparison failed."""
    if not all(c.passed for c in comparisons):
        raise AssertionError("results outside the error budget\n" + format_table(comparisons))
