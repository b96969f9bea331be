"""A random call as plain values: everything follows from (seed, number, longest length, whether there is bfloat16).

Compiling a kernel takes seconds and calling it milliseconds, so calls come in families: the calls of a family share
what kernels are compiled for (dtype, head dimensions, groups, which arguments are there, alignments), and differ in
lengths, values, windows, tolerances and the like.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

CALLS_PER_FAMILY = 25
# rows × keys × heads × batch entries of a call; its oracle holds a few float64 matrices of that size
MOST_SCORES = 8_000_000

# what people write for a reset, and numbers next to the limit of −746, below which they are one
RESETS = (float("-inf"), -1e3, -1e4, -1e9, -1e30, -3.4028234663852886e38, -746.5)


@dataclass(frozen=True)
class Memory:
    """Place of a tensor: its possible axes from the outermost on, first element, axes that have stride 0. gap: elements
    after every step of the axis next to the innermost one, as in a fused projection; step: the innermost stride."""

    order: str
    gap: int = 0
    offset: int = 0
    step: int = 1
    expanded: str = ""


@dataclass(frozen=True)
class Family:
    """Properties that kernels are compiled for. Axes are named b, t, h, d; of a bias b, h, i, j."""

    dtype: str
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    layout: str  # dense, padded, packed
    causal: bool
    decay: str  # none, number, scalar tensor, constant, token
    directions: int  # 2: a gate for each
    scale: str  # default, number, tensor
    bias: str  # none, float, bool
    window: tuple[bool, bool]  # which sides have a limit
    sink: bool
    length_step: int  # lengths are odd (2), multiples of 16, or any (1)
    memory: dict[str, Memory]
    return_lse: bool
    needs_grad: tuple[str, ...] | None  # None: every floating tensor


@dataclass(frozen=True)
class Draw:
    """One call."""

    number: int
    family: Family
    seed: int  # of the values
    batch: int
    rows: int
    keys: int
    sequences: tuple[tuple[int, int], ...]  # packed: rows and keys of each
    before: tuple[int, int]  # packed: tokens before the first sequence
    after: tuple[int, int]  # packed: tokens after the last one; negative: the last offset is past the axis
    longest: tuple[int, int]  # packed: max_seqlen over the longest sequence
    padding: dict[str, tuple[int, ...]]  # padded: seqused and leftpad
    rates: str  # values of the decay
    resets: float  # share of tokens, or of heads with a constant rate
    reset_values: tuple[float, ...]
    scale: float
    scale_shape: str
    bias_shape: str
    bias_size: float
    bias_hidden: float  # share of −inf, or of False
    window: tuple[int, int] | None
    tolerance: float | str | None
    query_size: float
    key_size: float
    value_size: float
    gradient_size: float
    poisoned: bool  # NaN and inf where "what they hold does not matter"
    far: tuple[int, float]  # distance between such keys, and the largest logit of one with any row; (0, 0): none


def draw(
    seed: int, number: int, longest: int = 1000, bfloat16: bool = True, calls_per_family: int = CALLS_PER_FAMILY,
    dims: Sequence[int] | None = None,
) -> Draw:
    """Call `number` of a run. Without bfloat16 (Triton's interpreter has none) its calls have float16; with dims, D and
    D_v are those."""
    number_of_family = number // calls_per_family
    family = _family(random.Random(f"{seed}/family/{number_of_family}"), longest)
    if not bfloat16 and family.dtype == "bfloat16":
        family = replace(family, dtype="float16")
    if dims is not None:
        family = replace(family, head_dim=dims[0], value_dim=dims[1])
    return _call(random.Random(f"{seed}/call/{number}"), number, family, longest)


def _chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def _weighted(rng: random.Random, **weights: float) -> str:
    return rng.choices(list(weights), list(weights.values()))[0].replace("_", " ")


def _family(rng: random.Random, longest: int) -> Family:
    # what "hopper" takes is a small part of all calls: a good half of the families are in it
    aligned = _chance(rng, 0.55)
    dtype = _weighted(rng, bfloat16=4, float16=3) if aligned else _weighted(rng, bfloat16=3, float16=3, float32=2.4)
    if not aligned and _chance(rng, 0.08):
        dtype = "float64"
    if aligned:
        dims = [rng.choice((64, 128, rng.randrange(8, 129, 8), rng.choice((192, 256, rng.randrange(136, 257, 8)))))
                for _ in range(2)]
    else:
        dims = [_head_dim(rng) for _ in range(2)]
    head_dim, value_dim = (dims[0], dims[0]) if _chance(rng, 0.4) else dims
    few = ((1, 1), (2, 1), (2, 2), (3, 1), (3, 3))
    heads, kv_heads = rng.choice(few if longest <= 128 else (*few, (4, 2), (4, 4), (5, 1), (6, 2), (8, 8), (8, 1)))
    if _chance(rng, 0.01):
        heads = 0
    layout = _weighted(rng, dense=5, padded=2, packed=3)
    causal = _chance(rng, 0.7)
    decay = _weighted(rng, none=1, number=0.7, scalar_tensor=0.4, constant=2, token=5)
    scale = _weighted(rng, default=3, number=2, tensor=1.5 if aligned else 2)
    bias = "none" if aligned or layout == "packed" else _weighted(rng, none=5, float=2, bool=1)
    limited = (False, False) if _chance(rng, 0.6) else (_chance(rng, 0.8), _chance(rng, 0.7))
    needs_grad = None
    if _chance(rng, 0.15):
        needs_grad = tuple(name for name in ("q", "k", "v", "log_decay", "scale", "bias", "sink") if _chance(rng, 0.5))
    directions = 1 + (decay == "token" and not causal and _chance(rng, 0.5))
    return Family(
        dtype, head_dim, value_dim, heads, kv_heads, layout, causal, decay, directions, scale, bias, limited,
        sink=_chance(rng, 0.25), length_step=rng.choice((1, 2, 2, 16)), memory=_memories(rng, aligned, layout, dtype),
        return_lse=_chance(rng, 0.75), needs_grad=needs_grad,
    )


def _head_dim(rng: random.Random) -> int:
    """1 to 256: small ones, powers of two, their neighbours, anything."""
    near = 2 ** rng.randrange(0, 9) + rng.choice((-1, 0, 0, 1))
    return min(max(rng.choice((rng.randrange(1, 257), rng.randrange(1, 33), near)), 1), 256)


def _memories(rng: random.Random, aligned: bool, layout: str, dtype: str) -> dict[str, Memory]:
    """Memory of every possible tensor; gradients are do and dlse. TMA can address q, k and v that are aligned."""
    step = 16 // {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]
    packed = layout == "packed"

    def place(axes: str, aligned: bool, expandable: str, may_step: bool = True) -> Memory:
        outer = list(axes[:-1])
        if _chance(rng, 0.4):
            rng.shuffle(outer)
        kept = _chance(rng, 0.5)
        gap = 0 if kept else rng.choice((1, 2, 3)) * (step if aligned else rng.choice((1, 5, 8)))
        offset = 0 if _chance(rng, 0.5) else (step * rng.randrange(1, 4) if aligned else rng.randrange(1, 16))
        expanded = ""
        if expandable and not aligned and _chance(rng, 0.2):
            expanded = "".join(axis for axis in expandable if _chance(rng, 0.6))
        stepped = may_step and not aligned and _chance(rng, 0.08)
        return Memory("".join(outer) + axes[-1], gap, offset, 2 if stepped else 1, expanded)

    heads = "thd" if packed else "bthd"
    lse = "ht" if packed else "bht"
    found = {name: place(heads, aligned, heads.replace("d", "")) for name in ("q", "k", "v")}
    rows = "th" if packed else "bth"
    found["log_decay"] = place(rows + "d", False, rows)
    found["scale"], found["bias"] = place(rows, False, rows), place("bhij", False, "bhij")
    # gradients come from anywhere: a sum expands a number, a slice or a cat shifts it
    found["do"] = place(heads, _chance(rng, 0.3), heads)
    found["dlse"] = place(lse, False, lse)
    return found


def _length(rng: random.Random, longest: int, step: int) -> int:
    kind = _weighted(rng, none=0.02, one=0.03, few=0.25, some=0.4, many=0.3)
    if kind == "none":
        return 0
    top = {"one": 1, "few": 40, "some": 300, "many": longest}[kind]
    length = rng.randrange(1, min(top, longest) + 1)
    if step == 2:
        length |= 1
    elif step == 16:
        length = max(16, length // 16 * 16)
    return min(length, longest)


def _lengths(rng: random.Random, longest: int, step: int) -> tuple[int, int]:
    keys = _length(rng, longest, step)
    return (keys if _chance(rng, 0.5) else _length(rng, longest, step)), keys


def _window_side(rng: random.Random, length: int) -> int:
    return rng.choice(
        (0, 1, rng.randrange(0, 40), rng.randrange(0, max(1, length)), length, 2**31 - 2, 2**31 - 1, 2**31, 2**32,
         2**63 - 1, rng.randrange(0, max(1, length)), rng.randrange(0, 200))
    )


def _call(rng: random.Random, number: int, family: Family, longest: int) -> Draw:
    layout = family.layout
    sequences: tuple[tuple[int, int], ...] = ()
    before = after = more = (0, 0)
    padding: dict[str, tuple[int, ...]] = {}
    if layout == "packed":
        batch, count = 1, rng.choice((0, 1, 2, 3, 5, 9))
        share = max(8, longest // max(1, count))
        pairs = [_lengths(rng, share, 1) for _ in range(count)]
        if _chance(rng, 0.4):
            pairs = [(keys, keys) for _, keys in pairs]
        if _chance(rng, 0.3):
            pairs = [(0, keys) if _chance(rng, 0.3) else (rows, 0) if _chance(rng, 0.2) else (rows, keys)
                     for rows, keys in pairs]
        before = rng.choice(((0, 0), (0, 0), (3, 3), (5, 130)))
        after = rng.choice(((0, 0), (0, 0), (4, 4), (70, 1), (-2, -2)))
        more = rng.choice(((0, 0), (0, 0), (7, 100), (-3, -3)))
        if family.directions == 2:  # rows and keys of the same sequences
            before, after, more, *pairs = [(keys, keys) for _, keys in (before, after, more, *pairs)]
        sequences = tuple(pairs)
        rows, keys = (max(0, sum(side)) for side in zip(before, *pairs, after, strict=True))
    else:
        batch = 0 if _chance(rng, 0.01) else rng.choice((1, 1, 2, 2 if longest <= 128 else 3))
        rows, keys = _lengths(rng, longest, family.length_step)
        if family.decay == "token" and not family.causal:
            rows, keys = min(rows, keys), max(rows, keys)
        rows = keys if family.directions == 2 else rows
        while batch > 1 and batch * family.heads * rows * keys > MOST_SCORES:
            batch -= 1
        if layout == "padded":
            for name in ("seqused_q", "seqused_k", "leftpad_q", "leftpad_k"):
                length = rows if name.endswith("q") else keys
                ends = {"seqused": (length // 2, length + 9), "leftpad": (-3, length // 2 + 4)}[name[:7]]
                if _chance(rng, 0.6):
                    padding[name] = tuple(rng.randrange(ends[0], ends[1] + 1) for _ in range(batch))
            if _chance(rng, 0.1):
                padding["seqused_k"] = (0,) * batch
            padding = padding or {"seqused_k": (keys,) * batch}
            if family.directions == 2:
                padding = {name[:-1] + side: x for name, x in padding.items() for side in "qk"}
    window = None
    if any(family.window):
        window = tuple(_window_side(rng, keys) if limited else -1 for limited in family.window)
    elif _chance(rng, 0.1):
        window = (-1, -1)
    rates, resets, reset_values = "", 0.0, ()
    if family.decay == "token":
        rates = _weighted(
            rng, weak=2, gate=3, strong=1.5, growth=1, growing=0.7, zero=0.3, bursts=0.7, extreme=0.5, each_head=1.5
        )
        resets = rng.choice((0.0, 0.0, 0.005, 0.02, 0.3, 1.0))
    elif family.decay != "none":
        rates = _weighted(rng, alibi=3, zero=0.5, strong=1, growing=0.7, each_head=1.5)
        resets = rng.choice((0.0, 0.0, 0.0, 0.4, 1.0))
    if resets:
        reset_values = RESETS[:1] if _chance(rng, 0.4) else tuple(rng.sample(RESETS, rng.randrange(1, 4)))
    scale, scale_shape = 0.0, ""
    if family.scale == "number":
        scale = rng.choice((1.0, 0.125, 0.3, -0.2, 1e-3, 1e-8, 0.0, rng.uniform(-1, 1), rng.uniform(0, 1)))
    elif family.scale == "tensor":
        shapes = ("th", "h", "t1", "", "1") if layout == "packed" else ("bth", "h", "b11", "t1", "", "1th")
        scale_shape = rng.choice(shapes)
    bias_shape, bias_size, hidden = "", 0.0, 0.0
    if family.bias != "none":
        bias_shape = rng.choice(("bhij", "bhij", "1hij", "ij", "b11j", "h11", "i1", "11ij", ""))
        bias_size, hidden = rng.choice((1.0, 1.0, 8.0)), rng.choice((0.0, 0.1, 0.6))
    large = _chance(rng, 0.25)
    value_size = rng.choice((1e-3, 100.0, 1e10, 1e25)) if _chance(rng, 0.12) else 1.0
    return Draw(
        number, family, rng.randrange(2**31), batch, rows, keys, sequences, before, after, more, padding,
        rates, resets, reset_values, scale, scale_shape, bias_shape, bias_size, hidden, window,
        tolerance=rng.choice(("auto", "auto", "auto", None, 1e-3)),
        query_size=rng.choice((1.0, 4.0, 16.0, 100.0, 1e-3)) if large else 1.0,
        key_size=rng.choice((1.0, 4.0, 16.0, 100.0)) if large else 1.0,
        value_size=min(value_size, 100.0) if family.dtype == "float16" else value_size,
        gradient_size=rng.choice((1e-3, 30.0)) if _chance(rng, 0.1) else 1.0,
        poisoned=_chance(rng, 0.6),
        far=(rng.choice((3, 61, 97, 200)), rng.choice((30.0, 60.0, 120.0, 200.0))) if _chance(rng, 0.15) else (0, 0.0),
    )
