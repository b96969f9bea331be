"""Tensors of a drawn call: values from a seed (on the CPU: the same for every device), placed by Memory."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tools.fuzzing.draws import Draw, Memory

# (first row, rows, first token, tokens) of each
Sequences = list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Case:
    """A call as the public function takes it, and what its judge must know. sequences lie in their batch entries, or on
    the packed axes; None: each fills its batch entry."""

    draw: Draw
    tensors: dict[str, Any]  # q, k, v, log_decay, scale, bias, sink
    options: dict[str, Any]  # the other arguments
    grad_out: Tensor
    grad_lse: Tensor | None  # None where lse is not returned
    sequences: Sequences | None
    tolerance: float  # skip_tolerance as a number

    @property
    def packed(self) -> bool:
        return self.draw.family.layout == "packed"


def build(draw: Draw, device: torch.device | str) -> Case:
    """The call on a device."""
    family, random = draw.family, _Random(draw.seed)
    dtype = getattr(torch, family.dtype)
    own = torch.float64 if dtype == torch.float64 else torch.float32
    packed, memory = family.layout == "packed", family.memory
    entries = () if packed else (draw.batch,)
    sequences, lengths = (_packing if packed else _padding)(draw)

    def put(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        axes = {"dlse": "bht", "scale": "bth", "bias": "bhij"}.get(name, "bthd")  # as draws.place names them
        axes = axes.replace("b", "") if packed else axes
        return place(values.to(dtype), axes[: values.ndim], memory[name], device)

    q = random.normal(*entries, draw.rows, family.heads, family.head_dim) * draw.query_size
    k = random.normal(*entries, draw.keys, family.kv_heads, family.head_dim) * draw.key_size
    v = random.normal(*entries, draw.keys, family.kv_heads, family.value_dim) * draw.value_size
    every, logit = draw.far
    if every:
        # keys that outweigh a row's nearest ones, some of them more than others
        q[..., 0] = 8.0
        some = k[..., random.integer(every) :: every, :, 0]
        some.copy_(random.uniform(*some.shape) * logit * math.sqrt(family.head_dim) / 8)
    log_decay, per_token = _log_decay(draw, random, entries), family.decay == "token"
    scale = _scale(draw, random, entries)
    bias = _bias(draw, random) if family.bias != "none" else None
    grad_out = random.normal(*entries, draw.rows, family.heads, family.value_dim) * draw.gradient_size
    heads_rows = (*entries, family.heads, draw.rows)
    grad_lse = random.normal(*heads_rows) * draw.gradient_size if family.return_lse else None
    if draw.poisoned:
        found = {"q": q, "k": k, "v": v, "log_decay": log_decay if per_token else None}
        found["scale"] = scale if draw.scale_shape == ("th" if packed else "bth") else None
        places = [(0, draw.rows, 0, draw.keys)] * draw.batch if sequences is None else sequences
        _poison(random, places, packed, {name: x for name, x in found.items() if not memory[name].expanded})
        if grad_lse is not None and not family.sink and not memory["dlse"].expanded:
            outside = _outside((*entries, draw.rows), places, packed, side=0).unsqueeze(-2)
            grad_lse.masked_fill_(outside, random.choice((math.nan, math.inf)))

    tensors: dict[str, Any] = {"q": put("q", q, dtype), "k": put("k", k, dtype), "v": put("v", v, dtype)}
    if isinstance(log_decay, Tensor):
        log_decay = put("log_decay", log_decay, own) if per_token else log_decay.to(device, own)
    if isinstance(scale, Tensor):
        scale_dtype = random.choice((own, dtype))
        full = scale.ndim == 3 - packed
        scale = put("scale", scale, scale_dtype) if full else scale.to(device, scale_dtype)
    if bias is not None:
        bias_dtype = torch.bool if bias.dtype == torch.bool else random.choice((own, dtype))
        bias = put("bias", bias, bias_dtype) if bias.ndim == 4 else bias.to(device, bias_dtype)
    sink = 2 * random.normal(family.heads) if family.sink else None
    if sink is not None and random.choice((True, False, False, False)):
        sink = torch.where(random.uniform(family.heads) < 0.5, -torch.inf, sink)  # none
    tensors |= {
        "log_decay": log_decay, "scale": scale, "bias": bias,
        "sink": None if sink is None else sink.to(device, random.choice((own, dtype))),
    }
    options = {
        "causal": family.causal, "window_size": draw.window, "skip_tolerance": draw.tolerance,
        "return_lse": family.return_lse,
    }
    options |= {name: x.to(device) if isinstance(x, Tensor) else x for name, x in lengths.items()}
    if packed and lengths["cu_seqlens_k"] is lengths["cu_seqlens_q"]:  # the same tensor, as in self-attention
        options["cu_seqlens_k"] = options["cu_seqlens_q"]
    tolerance = {"auto": torch.finfo(own).eps / 2, None: 0.0}.get(draw.tolerance, draw.tolerance)
    return Case(
        draw, tensors, options, put("do", grad_out, dtype),
        None if grad_lse is None else put("dlse", grad_lse, own), sequences, tolerance,
    )


def place(values: Tensor, axes: str, memory: Memory, device: torch.device | str) -> Tensor:
    """The values where memory says, with NaN everywhere around them. Along an expanded axis the first one counts."""
    strides, stride = dict.fromkeys(axes, 0), memory.step
    for depth, axis in enumerate(axis for axis in reversed(memory.order) if axis in axes):
        if axis not in memory.expanded:
            strides[axis] = stride
            stride *= max(1, values.shape[axes.index(axis)])
        stride += memory.gap if depth == 0 else 0
    filler = False if values.dtype == torch.bool else math.nan
    storage = torch.full((memory.offset + stride + 16,), filler, dtype=values.dtype, device=device)
    placed = storage.as_strided(values.shape, [strides[axis] for axis in axes], memory.offset)
    if values.numel():  # what several entries share is written once
        once = tuple(slice(0, 1) if axis in memory.expanded else slice(None) for axis in axes)
        placed[once].copy_(values[once])
    return placed


class _Random:
    """Numbers from a seed, on the CPU."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu")

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device="cpu")

    def integer(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self.generator, device="cpu"))

    def choice(self, values: tuple) -> Any:
        return values[self.integer(len(values))]

    def among(self, values: tuple[float, ...], shape: torch.Size) -> Tensor:
        index = torch.randint(len(values), shape, generator=self.generator, device="cpu")
        return torch.tensor(values, device="cpu")[index]


def _rates(kind: str, random: _Random, shape: tuple[int, ...]) -> Tensor:
    """Log-decays of a kind."""
    uniform = random.uniform(*shape)
    return {
        "weak": lambda: -0.002 * uniform, "gate": lambda: torch.nn.functional.logsigmoid(2 + random.normal(*shape)),
        "strong": lambda: -30 * uniform, "growth": lambda: 0.05 * random.normal(*shape),
        "growing": lambda: 0.02 * uniform, "zero": lambda: torch.zeros(shape, device="cpu"),
        "bursts": lambda: torch.where(uniform < 0.02, -40.0, -0.01), "extreme": lambda: -700 * (uniform < 0.05).float(),
        "alibi": lambda: -0.5 * uniform,
    }[kind]()


def _log_decay(draw: Draw, random: _Random, entries: tuple[int, ...]) -> Tensor | float | None:
    family = draw.family
    if family.decay == "none":
        return None
    token = family.decay == "token"
    shape = (*entries, draw.keys, family.heads) if token else (family.heads if family.decay == "constant" else 1,)
    shape += (2,) * (family.directions == 2)
    kinds = ("weak", "gate", "strong", "growth", "zero") if token else ("alibi", "zero", "strong", "growing")
    if draw.rates == "each head":
        values = torch.zeros(shape, device="cpu")
        for head in range(shape[-1]):
            values[..., head] = _rates(random.choice(kinds), random, shape)[..., head]
    else:
        values = _rates(draw.rates, random, shape)
    if draw.resets:
        among = random.among(draw.reset_values, values.shape)
        values = torch.where(random.uniform(*shape) < draw.resets, among, values)
    if family.decay == "number":
        number = float(values[0])
        return number if math.isfinite(number) else -1e9
    return values[0] if family.decay == "scalar tensor" else values


def _scale(draw: Draw, random: _Random, entries: tuple[int, ...]) -> Tensor | float | None:
    if draw.family.scale != "tensor":
        return None if draw.family.scale == "default" else draw.scale
    sizes = {"b": entries[0] if entries else 1, "t": draw.rows, "h": draw.family.heads, "1": 1}
    return random.normal(*(sizes[axis] for axis in draw.scale_shape)) / math.sqrt(draw.family.head_dim)


def _bias(draw: Draw, random: _Random) -> Tensor:
    sizes = {"b": draw.batch, "h": draw.family.heads, "i": draw.rows, "j": draw.keys, "1": 1}
    shape = [sizes[axis] for axis in draw.bias_shape]
    hidden = random.uniform(*shape) < draw.bias_hidden
    if draw.family.bias == "bool":
        return ~hidden
    return (random.normal(*shape) * draw.bias_size).masked_fill(hidden, -math.inf)


def _packing(draw: Draw) -> tuple[Sequences, dict[str, Any]]:
    """Places of the sequences, cut to the axes and to the longest, and the arguments that say so."""
    ends = [list(accumulate((pair[side] for pair in draw.sequences), initial=draw.before[side])) for side in range(2)]
    longest = [max(0, draw.longest[side] + max([0, *(pair[side] for pair in draw.sequences)])) for side in range(2)]
    found = []
    for n in range(len(draw.sequences)):
        place = []
        for side, axis in enumerate((draw.rows, draw.keys)):
            first, end = min(ends[side][n], axis), min(ends[side][n + 1], axis)
            place += [first, min(end - first, longest[side])]
        found.append(tuple(place))
    cu_q, cu_k = (torch.tensor(end, dtype=torch.int32, device="cpu") for end in ends)
    cu_k = cu_q if ends[0] == ends[1] else cu_k
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    return found, lengths


def _padding(draw: Draw) -> tuple[Sequences | None, dict[str, Any]]:
    if draw.family.layout == "dense":
        return None, {}
    found = []
    for n in range(draw.batch):
        place = []
        for side, axis in (("q", draw.rows), ("k", draw.keys)):
            first = min(max(draw.padding.get("leftpad_" + side, (0,) * draw.batch)[n], 0), axis)
            end = min(max(draw.padding.get("seqused_" + side, (axis,) * draw.batch)[n], 0), axis)
            place += [first, max(0, end - first)]
        found.append(tuple(place))
    return found, {name: torch.tensor(x, dtype=torch.int32, device="cpu") for name, x in draw.padding.items()}


def _poison(random: _Random, places: Sequences, packed: bool, tensors: dict[str, Tensor | None]) -> None:
    """Write NaN or inf outside of the sequences, and to every sequence's first λ, which is never used."""
    for name, x in tensors.items():
        bad, side = random.choice((math.nan, math.inf)), 0 if name in ("q", "scale") else 2
        if x is not None:
            outside = _outside(x.shape[: 2 - packed], places, packed, side)
            for n, (_, _, first, count) in enumerate(places if name == "log_decay" else ()):
                (outside if packed else outside[n])[first : first + min(count, 1)] = True
            x[outside] = bad


def _outside(shape: tuple[int, ...], places: Sequences, packed: bool, side: int) -> Tensor:
    """True at rows (side 0) or tokens (side 2) that belong to no sequence."""
    outside = torch.ones(shape, dtype=torch.bool, device="cpu")
    for n, place in enumerate(places):
        (outside if packed else outside[n])[place[side] : place[side] + place[side + 1]] = False
    return outside
