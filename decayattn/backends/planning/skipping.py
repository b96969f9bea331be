"""The plan of skipped tiles: causal attention with a decay skips far keys with a negligible total probability.

Query rows are taken in granules of GRANULE, keys in blocks of DECAY_BLOCK. A row at position i sees its own key i. Its
scale is s_i. In natural logarithm::

    log P_ij ≤ S_ij − S_ii ≤ u_i |k_j| + e_i − α_j            u_i = |s_i| |q_i|     e_i = α_i − s_i q_i·k_i

Let U and E be the largest u_i and e_i of a granule, and K_J the largest norm of a key of block J. Then the probability
of all blocks up to J in any row of the granule is::

    Σ_{j ≤ end of J} P_ij ≤ Σ_{J' ≤ J} exp(U K_J' + E + W_J')              W_J = log Σ_{j in J} exp(−α_j)

The sum grows with J for any signs of λ and s: a granule visits the keys from the first block on at which it exceeds the
tolerance. Two launches make the plan. They read q and k only where α alone allows skipping.

Rounding. A float32 sum of D ≤ 256 products, in any order, is within 256·2⁻²⁴ = 2⁻¹⁶ of the exact sum, relative to the
sum of their absolute values. So a norm is within 2⁻¹⁷ and |s||q||k| within 2⁻¹⁵: _MARGIN is twice that. Squares and
products that underflow lose less than _MIN_SQUARE adds. β of 16-bit inputs is a float32, within 2⁻²⁴: BETA_MARGIN is
twice that. α is a sum of float64 in two levels; for λ of one sign ALPHA_MARGIN is its error up to 8 million tokens.
The powers have exponents between −200 and 10; their rounding and that of their sums is within 1e-4, less than
1 − _ALLOWED. A NaN or an infinity compares as "visit".
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import sequences as packing
from decayattn.backends.planning.offsets import parts_before, row_pointers, start_of_head
from decayattn.backends.planning.prefix import prefix_of_head
from decayattn.backends.planning.sequences import Sequences, offsets_of_head, tile_of_program
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.dependent_launch import let_next_start, wait_for_launch_before
from decayattn.backends.runtime.integers import next_power_of_2
from decayattn.backends.runtime.launching import Launch
from decayattn.backends.runtime.strided import strided, uninitialised
from decayattn.backends.tiles.decay import DECAY_BLOCK
from decayattn.backends.tiles.scores import LOG2E
from decayattn.backends.tiles.visibility import GRANULE, keys_seen
from decayattn.problem import DECAY_BLOCK as _DECAY_BLOCK
from decayattn.problem import GRANULE as _GRANULE
from decayattn.problem import AttentionProblem, DecayPrefix, Inputs, first_position

# With fewer rows or keys attention takes about as long as two launches, and with few rows the plan reads the keys
# almost as often as attention does (not measured)
SHORTEST = 512
# entries that one step reads: of a sum over blocks, or of a search through granules
CHUNK = 128
# Upper bound on the neighbouring blocks of keys (or granules) of a head that share a program. The program tests α of
# all of them at once, at little more than the cost of one, and reads the norms of those that need them in turn. Sharing
# leaves at least _PROGRAMS programs, about as many as a GPU holds at once (8 on each of 132 multiprocessors), so that a
# short problem keeps its parallelism. Numbers that share are powers of two, for few kernels to compile
MOST_TOGETHER = 4
_PROGRAMS = 1024
# columns of q and k for which one step adds up squares: measured
_COLUMNS = 64
# bytes of a row of q or k up to which the next rows are copied to shared memory while the current ones are added up
_PREFETCHED_ROW = 256

_MARGIN: tl.constexpr = tl.constexpr(2.0**-14)
BETA_MARGIN: tl.constexpr = tl.constexpr(2.0**-23)
ALPHA_MARGIN: tl.constexpr = tl.constexpr(2.0**-44)
_MIN_SQUARE: tl.constexpr = tl.constexpr(1e-30)
_ALLOWED: tl.constexpr = tl.constexpr(0.999)
_LANES: tl.constexpr = tl.constexpr(32)


class _Sizes(NamedTuple):
    """Lengths (of sequences that fill their batch entries), heads, and the axes of a plan and of its mirror."""

    query_length: int
    key_length: int
    heads: int
    granules: int
    blocks: int


class _Traits(NamedTuple):
    """Constants that _summarise is compiled for."""

    d: int  # columns of q and k; of a tile, with padding; and of one step of a sum
    width: int
    part: int
    group: int  # query heads that share a key head
    together: int  # blocks of a program
    aligned: bool  # granules begin at halves of blocks
    stages: int
    prunes: bool  # read norms only where α alone allows skipping among the keys of the problem


def is_planned(problem: AttentionProblem) -> bool:
    """True if keys may be skipped and the problem is long enough for a plan to save time."""
    return min(problem.longest_query, problem.longest_key) >= SHORTEST and _can_skip(problem)


def _can_skip(problem: AttentionProblem) -> bool:
    return problem.skip_tolerance > 0 and problem.causal and problem.decay != "none" and not problem.bias


def allocate(problem: AttentionProblem, like: Tensor) -> Tensor:
    """Allocate a plan: (B, H, at least all granules) int32, or (B, H, 0) if no key may be skipped.

    It holds, for every granule of a sequence, the first block of the sequence's keys to visit. If the problem is not
    planned, nothing reads it. Packed, the granules of a sequence begin at offsets.parts_before.
    """
    # never a size of 1, which torch.compile would specialise: one graph for short and long lengths
    more = problem.sequences + 1 if problem.layout == "packed" else 2
    granules = problem.query_length // _GRANULE + more if _can_skip(problem) else 0
    return uninitialised(like, problem.batch, problem.num_heads, granules, dtype=torch.int32)


def plan(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    prefix: DecayPrefix, sequences: Sequences | None, launch: Launch = launching.uncached,
    terms: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Fill `allocate`'s buffer if the problem is planned: two launches, or one if its `summaries` are given."""
    first_block = allocate(problem, q)
    if not is_planned(problem):
        return first_block
    granules = first_block.shape[-1]
    if terms is None:
        of_blocks, of_granules = summaries(problem, q, k, log_decay, scale, prefix, sequences, granules, True, launch)
    else:
        of_blocks, of_granules = terms
    # two blocks of a packed or padded problem may belong to two sequences
    most = MOST_TOGETHER if sequences is None else _DECAY_BLOCK // _GRANULE
    together = programs_together(packing.programs(problem, _GRANULE, problem.num_heads, of_keys=False), most)
    launch(
        _find_first_blocks, packing.programs(problem, _GRANULE * together, problem.num_heads, of_keys=False),
        prefix.last_reset, prefix.next_reset, of_blocks, (of_granules, of_granules.stride(1) // 2), first_block,
        sequences, _left(problem), math.log2(problem.skip_tolerance), _sizes(problem, granules), CHUNK=CHUNK,
        TOGETHER=together, num_warps=1, DECAY=problem.decay, **packing.constants(problem),
    )
    return first_block


def summaries(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    prefix: DecayPrefix, sequences: Sequences | None, granules: int, prunes: bool, launch: Launch,
) -> tuple[Tensor, Tensor]:
    """K and W of the blocks of keys, (B, H, blocks, 2), and U and E of the granules, (B, H, granules, 2): one launch.

    float64, W and E in base 2. prunes: for this problem's own plan only; K and U are then infinite where α alone
    forbids skipping in it.
    """
    heads = problem.batch, problem.num_heads
    of_blocks = uninitialised(q, *heads, packing.decay_blocks(problem), 2, dtype=torch.float64)
    of_granules = uninitialised(q, *heads, granules, 2, dtype=torch.float64)
    width = max(16, next_power_of_2(problem.head_dim))
    row_bytes = width * q.element_size()
    # packed or padded, the keys of one block belong to one sequence
    most = MOST_TOGETHER if sequences is None else 1
    together = programs_together(packing.programs(problem, _DECAY_BLOCK, problem.num_heads, of_keys=True), most)
    traits = _Traits(
        d=problem.head_dim, width=width, part=min(width, _COLUMNS), group=problem.num_heads // problem.num_kv_heads,
        together=together, aligned=sequences is None and first_position(problem) % _GRANULE == 0,
        stages=2 if row_bytes <= _PREFETCHED_ROW else 1, prunes=prunes,
    )
    programs = packing.programs(problem, _DECAY_BLOCK * together, problem.num_heads, of_keys=True)
    if programs:
        launch(
            _summarise, programs,
            strided(q), strided(k), 1.0 if problem.row_scale else scale, strided(scale if problem.row_scale else None),
            strided(log_decay) if problem.decay == "constant" else None, prefix, of_blocks, of_granules, sequences,
            _left(problem), math.log2(problem.skip_tolerance), _sizes(problem, granules), TRAITS=traits,
            num_warps=2 if row_bytes < _PREFETCHED_ROW else 4 if row_bytes <= 2 * _PREFETCHED_ROW else 8,
            DECAY=problem.decay, **packing.constants(problem),
        )
    return of_blocks, of_granules


def _left(problem: AttentionProblem) -> int | None:
    return problem.window[0] if problem.window[0] >= 0 else None


def _sizes(problem: AttentionProblem, granules: int) -> _Sizes:
    return _Sizes(problem.query_length, problem.key_length, problem.num_heads, granules, packing.decay_blocks(problem))


def programs_together(programs: int, most: int) -> int:
    """Number of blocks or granules that share a program; programs: those of the launch with one each."""
    together = 1
    while 2 * together <= most and programs >= 2 * together * _PROGRAMS:
        together *= 2
    return together


def last_granules(
    problem: AttentionProblem, first_block: Tensor, sequences: Sequences | None, launch: Launch = launching.uncached
) -> Tensor:
    """The mirror of a plan, (B, H, blocks) int32: the last granule that visits a block, or −1; others may skip it."""
    blocks = packing.decay_blocks(problem)
    last = uninitialised(first_block, problem.batch, problem.num_heads, blocks)
    launch(
        _find_last_granules, packing.programs(problem, _DECAY_BLOCK, problem.num_heads, of_keys=True),
        first_block, last, sequences, _sizes(problem, first_block.shape[-1]), **packing.constants(problem),
        CHUNK=CHUNK, num_warps=1,
    )
    return last


def visited_fraction(problem: AttentionProblem, inputs: Inputs) -> Tensor:
    """Fraction (B, H) of the tiles (64 rows × 128 keys) with a visible key that the plan of a dense problem visits."""
    shape, (q, k, _, log_decay, *_) = (problem.batch, problem.num_heads), inputs
    if 0 in (*shape, problem.query_length, problem.key_length):
        return torch.ones(shape, device=q.device)
    scalar = problem.decay == "scalar"
    prefix = decay_prefix.build(problem, log_decay) if scalar else decay_prefix.allocate(problem, q)
    first_block = plan(problem, q, k, log_decay, inputs.any_scale, prefix, None)
    row = torch.arange(0, problem.query_length, _GRANULE, device=q.device)
    position = row + first_position(problem)
    last_position = (row + _GRANULE).clamp(max=problem.query_length) - 1 + first_position(problem)
    # both ends of a row's visible keys never decrease: the first row has the granule's first key, the last row its last
    first_key = prefix.last_reset[..., position.clamp(min=0)] if scalar else torch.zeros_like(position)
    if problem.window[0] >= 0:
        first_key = torch.maximum(first_key, position - problem.window[0])
    begin, end = first_key // _DECAY_BLOCK, last_position // _DECAY_BLOCK + 1
    seen = (end - begin).clamp(min=0)
    visited = seen
    if is_planned(problem):
        visited = (end - torch.maximum(begin, first_block[..., : len(row)])).clamp(min=0)
    return (visited.sum(-1) / seen.sum(-1).clamp(min=1)).expand(shape)


def as_argument(problem: AttentionProblem, plan: Tensor) -> tuple[Tensor, int] | None:
    """A plan or its mirror as a kernel argument; None, which compiles to nothing, if the problem is not planned."""
    return (plan, plan.shape[-1]) if is_planned(problem) else None


@triton.jit
def granules_of_head(axis, work, head, heads, PACKED: tl.constexpr):
    """Offset of the granules of a head of work's sequence in a (B, H, axis) buffer of a plan."""
    return _offset_of_head(axis, work.sequence, head, heads, work.first_row, PACKED, GRANULE)


@triton.jit
def blocks_of_head(axis, work, head, heads, PACKED: tl.constexpr):
    """Offset of the blocks of keys of a head of work's sequence in such a buffer."""
    return _offset_of_head(axis, work.sequence, head, heads, work.first_token, PACKED, DECAY_BLOCK)


@triton.jit
def _offset_of_head(axis, sequence, head, heads, first, PACKED: tl.constexpr, SIZE: tl.constexpr):
    """Offset of the parts of SIZE rows or tokens of a head of a sequence that begins at `first`."""
    if PACKED:
        offset = start_of_head(head, axis, parts_before(first, sequence, SIZE))
    else:
        offset = start_of_head(sequence * heads + head, axis, 0)
    return offset


@triton.jit
def first_planned_key(plan, work, heads, TILE: tl.constexpr, PACKED: tl.constexpr):
    """The first key that any granule of a tile of TILE rows visits; plan is `as_argument` of first_block."""
    first_block = plan[0] + granules_of_head(plan[1], work, work.head, heads, PACKED)
    granule = work.start // GRANULE
    block = tl.load(first_block + granule)
    for other in tl.static_range(1, TILE // GRANULE):
        last = (work.query_length - 1) // GRANULE
        block = tl.minimum(block, tl.load(first_block + tl.minimum(granule + other, last)))
    return block * DECAY_BLOCK


@triton.jit
def end_of_planned_rows(plan, work, head, heads, PACKED: tl.constexpr):
    """End of a head's rows that visit a key tile; plan is `as_argument` of last_granules."""
    last_granule = plan[0] + blocks_of_head(plan[1], work, head, heads, PACKED)
    return (tl.load(last_granule + work.start // DECAY_BLOCK) + 1) * GRANULE


@triton.jit
def _load_alpha(position, block, rates, head, prefix, DECAY: tl.constexpr, inside=None):
    """α (base 2, float64) at positions in blocks of prefix's head, and its error bound; undefined outside `inside`."""
    if DECAY == "scalar":
        beta = tl.load(prefix.beta + position, mask=inside).to(tl.float64)
        alpha = tl.load(prefix.base + block) + beta
        slack = tl.abs(beta) * BETA_MARGIN + tl.abs(alpha) * ALPHA_MARGIN
    else:
        alpha = position.to(tl.float64) * (tl.load(rates.data + head * rates.strides[0]).to(tl.float64) * LOG2E)
        slack = tl.abs(alpha) * ALPHA_MARGIN
    return alpha, slack


@triton.jit
def _load_columns(rows, stride, column, inside, D: tl.constexpr, ACCUMULATOR: tl.constexpr):
    """Load (rows, columns); zeros in rows outside `inside`, and beyond D."""
    here = rows[:, None] + column.to(tl.int64)[None, :] * stride
    return tl.load(here, mask=inside[:, None] & (column < D)[None, :], other=0.0).to(ACCUMULATOR)


@triton.jit
def _nan_is_infinite(x):
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _longest(squares):
    """Largest norm of rows with these squares; too small by at most _MARGIN."""
    return tl.sqrt(tl.max(_nan_is_infinite(squares), 0) + _MIN_SQUARE)


@triton.jit
def _summarise(
    q, k, scale: tl.float64, row_scales, rates, prefix, of_blocks, of_granules, sequences, left,
    log_tolerance: tl.float64, sizes, TRAITS: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    SEARCHES: tl.constexpr,
):
    """K_J and W_J of neighbouring blocks of keys, and U and E of granules.

    A program has the granules with the own key of their first row in its blocks. W and E are in base 2.

    K is +inf (never skip) if α keeps the last row from skipping the block; U is +inf if α keeps a granule's first row
    from skipping the first block that it sees. These rows decide for all. With λ ≤ 0, if the last row cannot skip a
    block, no earlier row can. No other row of a granule has an earlier first key or a higher α. Without TRAITS.prunes
    all norms are read, because the summaries serve rows and keys of other slices.
    """
    TOGETHER: tl.constexpr = TRAITS.together
    ALIGNED: tl.constexpr = TRAITS.aligned
    PRUNES: tl.constexpr = TRAITS.prunes
    ACCUMULATOR: tl.constexpr = tl.float64 if q.data.dtype.element_ty == tl.float64 else tl.float32
    heads = sizes.heads
    let_next_start(heads)
    wait_for_launch_before(heads)
    work = tile_of_program(
        sequences, heads, sizes.query_length, sizes.key_length, DECAY_BLOCK * TOGETHER, True, PACKED, SEARCHES, True
    )
    start, head, entry, query_length, key_length = work.start, work.head, work.entry, work.query_length, work.key_length
    if start >= key_length:
        return
    prefix = prefix_of_head(prefix, offsets_of_head(sequences, work, head, heads, PACKED))
    kv_head = head // TRAITS.group
    of_blocks += 2 * blocks_of_head(sizes.blocks, work, head, heads, PACKED)
    of_granules += 2 * granules_of_head(sizes.granules, work, head, heads, PACKED)

    # blocks past the end repeat the last one
    own, last = tl.arange(0, TOGETHER), key_length - 1
    block = tl.minimum(start // DECAY_BLOCK + own, last // DECAY_BLOCK)
    # (keys, blocks): in this order the sums over keys cross few lanes
    key = block[None, :] * DECAY_BLOCK + tl.arange(0, DECAY_BLOCK)[:, None]
    inside = key < key_length
    alpha, slack = _load_alpha(key, block[None, :], rates, head, prefix, DECAY, inside)
    growth = tl.where(inside, slack - alpha, float("-inf"))
    largest = tl.max(growth, 0)
    weight = largest + tl.log2(tl.sum(tl.exp2((growth - largest[None, :]).to(tl.float32)), 0)).to(tl.float64)
    tl.store(of_blocks + 2 * block + 1, weight)
    lowest, _ = _load_alpha(last, last // DECAY_BLOCK, rates, head, prefix, DECAY)
    can_skip = lowest + weight <= log_tolerance
    if not PRUNES:
        can_skip = block >= 0
    tl.store(of_blocks + 2 * block, float("inf"), mask=can_skip == 0)
    # one bit for each block with norms to read, and one for each granule
    blocks = tl.sum((can_skip & (start // DECAY_BLOCK + own <= last // DECAY_BLOCK)).to(tl.int32) << own, 0)

    # Each lane tests one granule; lanes without one repeat the last one. A sum over all lanes of a warp is one
    # instruction, and the compiler knows that the branches on it are uniform
    lane, first_position = tl.arange(0, _LANES), key_length - query_length
    if ALIGNED:
        first_granule = (start - first_position) // GRANULE  # exact; negative before the first row
    else:
        first_granule = tl.cdiv(tl.maximum(start - first_position, 0), GRANULE)
    granule = first_granule + tl.minimum(lane, 2 * TOGETHER - 1)
    position = granule * GRANULE + first_position
    there = (granule >= 0) & (granule * GRANULE < query_length) & (position < start + DECAY_BLOCK * TOGETHER)
    position = tl.where(there, position, 0)
    first, _ = keys_seen(
        position, key_length, prefix.last_reset, prefix.next_reset, True, DECAY == "scalar", left, None
    )
    begin, end = first // DECAY_BLOCK, position // DECAY_BLOCK
    # one key's α instead of W of its block, because no other program's W is known here
    first_key = tl.minimum(begin * DECAY_BLOCK + DECAY_BLOCK - 1, last)
    first_alpha, _ = _load_alpha(position, end, rates, head, prefix, DECAY)
    key_alpha, _ = _load_alpha(first_key, begin, rates, head, prefix, DECAY)
    can_skip = there & (begin < end) & (first_alpha - key_alpha <= log_tolerance)
    if not PRUNES:
        can_skip = there
    tl.store(of_granules + 2 * granule, float("inf"), mask=there & (can_skip == 0))
    granules = tl.sum((can_skip & (lane < 2 * TOGETHER)).to(tl.int32) << lane, 0)
    if (blocks | granules) == 0:
        return

    longest = tl.full([], 0.0, ACCUMULATOR)
    # Each step has half a block and one granule, and all its loads start before it uses any of them. The own keys of
    # the granule's rows are those of the half (ALIGNED), or reach into the next half: in the cache, or read soon anyway
    for n in tl.range(0, 2 * TOGETHER, num_stages=TRAITS.stages):
        of_block, of_granule = ((blocks >> (n // 2)) & 1) != 0, ((granules >> n) & 1) != 0
        token = start + n * GRANULE + tl.arange(0, GRANULE)
        row = (first_granule + n) * GRANULE + tl.arange(0, GRANULE)
        own_key = row + first_position
        # a step without a granule may have rows before the first one
        is_row = tl.where(of_granule, row, query_length) < query_length
        is_key = token < tl.where(of_block | (of_granule & ALIGNED), key_length, 0)
        keys = row_pointers(k, entry, kv_head, work.first_token + token)
        queries = row_pointers(q, entry, head, work.first_row + row)
        own_keys = row_pointers(k, entry, kv_head, work.first_token + own_key)
        k_squares, q_squares, own_squares, products = _sums(
            keys, queries, own_keys, k.strides[3], q.strides[3], is_key, is_row, TRAITS.d, TRAITS.width, TRAITS.part,
            ALIGNED, ACCUMULATOR,
        )
        block_of_row = tl.minimum(own_key, last) // DECAY_BLOCK
        alpha_of_row, slack_of_row = _load_alpha(own_key, block_of_row, rates, head, prefix, DECAY, is_row)
        if row_scales is None:
            s = tl.full([GRANULE], scale, ACCUMULATOR) * LOG2E
        else:
            here = row_pointers(row_scales, entry, head, work.first_row + row)
            s = tl.load(here, mask=is_row, other=0.0).to(ACCUMULATOR) * LOG2E
        longest = tl.maximum(tl.where(n % 2 == 0, 0.0, longest), _longest(k_squares))
        both_halves = ((blocks >> (n // 2)) & (n % 2)) != 0
        tl.store(of_blocks + 2 * (start // DECAY_BLOCK + n // 2), longest.to(tl.float64), mask=both_halves)
        u = tl.max(_nan_is_infinite(tl.abs(s) * tl.sqrt(q_squares + _MIN_SQUARE)), 0)
        own_score = (s * products).to(tl.float64)
        e = tl.where(is_row, _nan_is_infinite(alpha_of_row + slack_of_row - own_score), float("-inf"))
        margin = (u * _longest(own_squares)).to(tl.float64) * _MARGIN
        granule_terms = of_granules + 2 * (first_granule + n)
        tl.store(granule_terms, u.to(tl.float64), mask=of_granule)
        tl.store(granule_terms + 1, tl.max(e, 0) + margin, mask=of_granule)


@triton.jit
def _sums(
    keys, queries, own_keys, k_stride, q_stride, is_key, is_row,
    D: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr, ACCUMULATOR: tl.constexpr,
):
    """|k|², |q|², |own k|² and q·(own k) of rows of D columns; 0 for rows that are no key or query.

    ALIGNED: each k is its row's own key.
    """
    nothing = tl.zeros([GRANULE, PART], ACCUMULATOR)
    k_squares, q_squares, own_squares, products = nothing, nothing, nothing, nothing
    # columns PART apart are added up first, so that fewer lanes have to exchange sums
    for begin in tl.static_range(0, WIDTH, PART):
        column = begin + tl.arange(0, PART)
        k = _load_columns(keys, k_stride, column, is_key, D, ACCUMULATOR)
        q = _load_columns(queries, q_stride, column, is_row, D, ACCUMULATOR)
        own_k = k if ALIGNED else _load_columns(own_keys, k_stride, column, is_row, D, ACCUMULATOR)
        k_squares += k * k
        q_squares += q * q
        own_squares += own_k * own_k
        products += q * own_k
    return tl.sum(k_squares, 1), tl.sum(q_squares, 1), tl.sum(own_squares, 1), tl.sum(products, 1)


@triton.jit
def _find_first_blocks(
    last_reset, next_reset, of_blocks, of_granules, first_block, sequences, left, log_tolerance: tl.float64, sizes,
    DECAY: tl.constexpr, PACKED: tl.constexpr, SEARCHES: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr,
):
    """Find the first block of keys that each of TOGETHER granules visits; the axis of of_granules may be longer."""
    heads = sizes.heads
    let_next_start(heads)
    wait_for_launch_before(heads)
    work = tile_of_program(
        sequences, heads, sizes.query_length, sizes.key_length, GRANULE * TOGETHER, False, PACKED, SEARCHES
    )
    start, query_length, key_length = work.start, work.query_length, work.key_length
    if (start >= query_length) | (key_length == 0):
        return
    _, head_tokens, _ = offsets_of_head(sequences, work, work.head, heads, PACKED)
    of_blocks += 2 * blocks_of_head(sizes.blocks, work, work.head, heads, PACKED)
    here = granules_of_head(sizes.granules, work, work.head, heads, PACKED)
    first_block += here
    of_granules = of_granules[0] + 2 * granules_of_head(of_granules[1], work, work.head, heads, PACKED)

    # granules past the end repeat the last one
    granule = tl.minimum(start // GRANULE + tl.arange(0, TOGETHER), (query_length - 1) // GRANULE)
    position = tl.maximum(granule * GRANULE + key_length - query_length, 0)
    first, _ = keys_seen(
        position, key_length, last_reset + head_tokens, next_reset + head_tokens, True, DECAY == "scalar", left, None
    )
    # the block of the own key of the granule's first row is always visited
    begin, end = first // DECAY_BLOCK, position // DECAY_BLOCK
    found = first_visited(of_granules, granule, log_tolerance, of_blocks, begin, end, CHUNK, TOGETHER)
    tl.store(first_block + granule, found)


@triton.jit
def first_visited(
    of_granules, granule, log_tolerance, of_blocks, begin, end, CHUNK: tl.constexpr, TOGETHER: tl.constexpr
):
    """First block in [begin, end), each (TOGETHER,), where a granule's sum exceeds the tolerance; `end` without one."""
    slope = tl.load(of_granules + 2 * granule, mask=begin < end, other=float("inf")) * (1 + _MARGIN)
    may_skip = slope < float("inf")
    offset = tl.load(of_granules + 2 * granule + 1, mask=may_skip, other=0.0) - log_tolerance
    found = tl.where(may_skip, end, begin)
    end = tl.where(may_skip, end, 0)
    mass = tl.zeros([TOGETHER], tl.float32)
    for chunk in range(tl.min(begin, 0), tl.max(end, 0), CHUNK):
        block = chunk + tl.arange(0, CHUNK)
        within = block < tl.max(end, 0)
        longest = tl.load(of_blocks + 2 * block, mask=within, other=0.0)
        weight = tl.load(of_blocks + 2 * block + 1, mask=within, other=0.0)
        exponent = slope[:, None] * longest[None, :] + offset[:, None] + weight[None, :]
        counts = (block[None, :] >= begin[:, None]) & (block[None, :] < end[:, None])
        term = tl.where(counts, tl.exp2(exponent.to(tl.float32)), 0.0)
        visited = counts & ((mass[:, None] + tl.cumsum(term, 1) <= _ALLOWED) == 0)
        found = tl.minimum(found, tl.min(tl.where(visited, block[None, :], 2147483647), 1))
        mass += tl.sum(term, 1)
    return found


@triton.jit
def _find_last_granules(
    first_block, last_granule, sequences, sizes,
    PACKED: tl.constexpr, SEARCHES: tl.constexpr, CHUNK: tl.constexpr,
):
    """Find the last granule that visits one block of keys."""
    heads = sizes.heads
    work = tile_of_program(
        sequences, heads, sizes.query_length, sizes.key_length, DECAY_BLOCK, True, PACKED, SEARCHES
    )
    start, query_length, key_length = work.start, work.query_length, work.key_length
    if start >= key_length:
        return
    first_block += granules_of_head(sizes.granules, work, work.head, heads, PACKED)
    # the block is not visible to rows before it
    own = tl.maximum(start + query_length - key_length, 0) // GRANULE
    last = tl.zeros([CHUNK], tl.int32) - 1
    for chunk in range(own, tl.cdiv(query_length, GRANULE), CHUNK):
        granule = chunk + tl.arange(0, CHUNK)
        first = tl.load(first_block + granule, mask=granule * GRANULE < query_length, other=2147483647)
        last = tl.maximum(last, tl.where(first <= start // DECAY_BLOCK, granule, -1))
    here = blocks_of_head(sizes.blocks, work, work.head, heads, PACKED) + start // DECAY_BLOCK
    tl.store(last_granule + here, tl.max(last, 0))
