"""The plan of skipped tiles: causal attention with a decay need not visit keys whose total probability is negligible.

Query rows are taken in granules of GRANULE, keys in blocks of DECAY_BLOCK. With s_i the scale and i the position of a
row, whose own key it sees, in natural logarithm:

    log P_ij ≤ S_ij − S_ii ≤ u_i |k_j| + e_i − α_j            u_i = |s_i| |q_i|     e_i = α_i − s_i q_i·k_i

and so, with U and E the largest u_i and e_i of a granule, and K_J the longest key of a block J, the probability of all
blocks up to J in any row of the granule is

    Σ_{j ≤ end of J} P_ij ≤ Σ_{J' ≤ J} exp(U K_J' + E + W_J')              W_J = log Σ_{j in J} exp(−α_j)

The sum grows with J whatever the signs of λ and s: a granule visits the keys from the first block on at which it
exceeds the tolerance. Two launches make the plan; they read q and k only where α leaves anything to skip.

Rounding: a sum of D ≤ 256 products is within 256·2⁻²⁴ = 2⁻¹⁶ of that of their sizes (float32, in any order), so a norm
within 2⁻¹⁷, and |s||q||k| within 2⁻¹⁵: _MARGIN is twice that. Squares and products that underflow lose less than
_MIN_SQUARE adds. β of 16-bit inputs is a float32, within 2⁻²⁴: BETA_MARGIN is twice that. α is a sum of float64 in
two levels; for λ of one sign ALPHA_MARGIN is its error up to 8 million tokens. The rest is the rounding of powers
whose exponents are between −200 and 10, and of their sums, within 1e-4: _ALLOWED is short of 1 by more. A NaN or an
infinity compares as "visit".
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import sequences as packing
from decayattn.backends.planning.prefix import prefix_of_head
from decayattn.backends.planning.sequences import (
    Sequences,
    offsets_of_head,
    parts_before,
    row_pointers,
    start_of_head,
    tile_of_program,
)
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.arguments import strided
from decayattn.backends.runtime.integers import next_power_of_2
from decayattn.backends.runtime.launching import COMPILER_OPTIONS, Launch
from decayattn.backends.tiles.scores import LOG2E
from decayattn.backends.tiles.visibility import keys_seen
from decayattn.problem import DECAY_BLOCK, GRANULE, AttentionProblem, DecayPrefix

# fewer rows or keys than this attend in about the time that two launches take, and few rows read the keys hardly more
# often than the plan does (not measured)
SHORTEST = 512
# entries that one step of a sum over blocks, or of a search through granules, reads at once
CHUNK = 128
# Neighbouring blocks of keys (or granules) of a head share a program. It asks α about all of them at once, for little
# more than one of them costs, and reads the norms of those that need them one after the other. No more share one than
# leave this many programs, about as many as a GPU holds at once (8 on each of 132 multiprocessors): a short problem
# keeps its parallelism. Powers of two, so that there are few kernels to compile
MOST_TOGETHER = 4
_PROGRAMS = 1024
# columns of q and k whose squares are added up side by side: measured
_COLUMNS = 64
# bytes of a row of q or k up to which the next rows are on their way, to shared memory, while these are added up
_PREFETCHED_ROW = 256

ROWS: tl.constexpr = tl.constexpr(GRANULE)
BLOCK: tl.constexpr = tl.constexpr(DECAY_BLOCK)
_MARGIN: tl.constexpr = tl.constexpr(2.0**-14)
BETA_MARGIN: tl.constexpr = tl.constexpr(2.0**-23)
ALPHA_MARGIN: tl.constexpr = tl.constexpr(2.0**-44)
_MIN_SQUARE: tl.constexpr = tl.constexpr(1e-30)
_ALLOWED: tl.constexpr = tl.constexpr(0.999)
_LANES: tl.constexpr = tl.constexpr(32)


class _Sizes(NamedTuple):
    """Of sequences that fill their batch entries, the lengths; the heads; and the axes of a plan and of its mirror."""

    query_length: int
    key_length: int
    heads: int
    granules: int
    blocks: int


class _Traits(NamedTuple):
    """What _summarise is compiled for."""

    d: int  # columns of q and k; with those that fill up a tile; and those that are added up side by side
    width: int
    part: int
    group: int  # query heads that share a key head
    together: int  # blocks of a program
    aligned: bool  # granules begin where halves of blocks do
    stages: int
    prunes: bool  # norms are read only where α leaves anything to skip among the keys of the problem


def is_planned(problem: AttentionProblem) -> bool:
    """Whether keys may be skipped, and it pays to look for them."""
    return _can_skip(problem) and min(problem.longest_query, problem.longest_key) >= SHORTEST


def _can_skip(problem: AttentionProblem) -> bool:
    return problem.skip_tolerance > 0 and problem.causal and problem.decay != "none" and not problem.bias


def allocate(problem: AttentionProblem, like: Tensor) -> Tensor:
    """The buffer of a plan: (B, H, at least all granules) int32, or (B, H, 0) where no key may be skipped.

    It says for every granule of a sequence the first block of the sequence's keys to visit, unless the problem is not
    planned: then it is not read. Packed, the granules of a sequence begin where sequences.parts_before says.
    """
    # two are never one: torch.compile need not compile short lengths, and long ones, on their own
    more = problem.sequences + 1 if problem.layout == "packed" else 2
    granules = problem.query_length // GRANULE + more if _can_skip(problem) else 0
    return like.new_empty(problem.batch, problem.num_heads, granules, dtype=torch.int32)


def plan(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    prefix: DecayPrefix, sequences: Sequences | None, launch: Launch = launching.uncached,
    terms: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`allocate`'s buffer, filled by two launches if the problem is planned; by one where its `summaries` are known."""
    first_block = allocate(problem, q)
    if not is_planned(problem):
        return first_block
    granules = first_block.shape[-1]
    if terms is None:
        of_blocks, of_granules = summaries(problem, q, k, log_decay, scale, prefix, sequences, granules, True, launch)
    else:
        of_blocks, of_granules = terms
    # what lies in two blocks of a packed or padded problem need not belong to one sequence
    most = MOST_TOGETHER if sequences is None else DECAY_BLOCK // GRANULE
    together = programs_together(packing.row_programs(problem, sequences, GRANULE, problem.num_heads), most)
    launch(
        _find_first_blocks, packing.row_programs(problem, sequences, GRANULE * together, problem.num_heads),
        prefix.last_reset, prefix.next_reset, of_blocks, (of_granules, of_granules.stride(1) // 2), first_block,
        sequences, _left(problem), math.log2(problem.skip_tolerance), _sizes(problem, granules), CHUNK=CHUNK,
        TOGETHER=together, num_warps=1, **_constants(problem, sequences), **COMPILER_OPTIONS,
    )
    return first_block


def summaries(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float,
    prefix: DecayPrefix, sequences: Sequences | None, granules: int, prunes: bool, launch: Launch,
) -> tuple[Tensor, Tensor]:
    """K and W of the blocks of keys, (B, H, blocks, 2), and U and E of the granules, (B, H, granules, 2): one launch.

    float64, W and E in base 2. prunes: they are for this problem's own plan, and tell of what α alone keeps from being
    skipped in it that it cannot be.
    """
    heads = problem.batch, problem.num_heads
    of_blocks = q.new_empty(*heads, packing.decay_blocks(problem), 2, dtype=torch.float64)
    of_granules = q.new_empty(*heads, granules, 2, dtype=torch.float64)
    width = max(16, next_power_of_2(problem.head_dim))
    row_bytes = width * q.element_size()
    # packed and padded, what lies in one block belongs to one sequence
    most = MOST_TOGETHER if sequences is None else 1
    together = programs_together(packing.token_programs(problem, sequences, DECAY_BLOCK, problem.num_heads), most)
    traits = _Traits(
        d=problem.head_dim,
        width=width,
        part=min(width, _COLUMNS),
        group=problem.num_heads // problem.num_kv_heads,
        together=together,
        aligned=sequences is None and problem.first_position % GRANULE == 0,
        stages=2 if row_bytes <= _PREFETCHED_ROW else 1,
        prunes=prunes,
    )
    programs = packing.token_programs(problem, sequences, DECAY_BLOCK * together, problem.num_heads)
    if programs:
        launch(
            _summarise, programs,
            strided(q), strided(k), 1.0 if problem.row_scale else scale, strided(scale if problem.row_scale else None),
            strided(log_decay) if problem.decay == "constant" else None, prefix, of_blocks, of_granules, sequences,
            _left(problem), math.log2(problem.skip_tolerance), _sizes(problem, granules), TRAITS=traits,
            num_warps=2 if row_bytes < _PREFETCHED_ROW else 4 if row_bytes <= 2 * _PREFETCHED_ROW else 8,
            **_constants(problem, sequences), **COMPILER_OPTIONS,
        )
    return of_blocks, of_granules


def _constants(problem: AttentionProblem, sequences: Sequences | None) -> dict[str, bool | int | str]:
    return dict(DECAY=problem.decay, **packing.constants(problem, sequences))


def _left(problem: AttentionProblem) -> int | None:
    return problem.window[0] if problem.window[0] >= 0 else None


def _sizes(problem: AttentionProblem, granules: int) -> _Sizes:
    return _Sizes(
        problem.query_length, problem.key_length, problem.num_heads, granules, packing.decay_blocks(problem)
    )


def programs_together(programs: int, most: int) -> int:
    """How many share a program of a launch that would have this many programs of one."""
    together = 1
    while 2 * together <= most and programs >= 2 * together * _PROGRAMS:
        together *= 2
    return together


def last_granules(
    problem: AttentionProblem, first_block: Tensor, sequences: Sequences | None, launch: Launch = launching.uncached
) -> Tensor:
    """The mirror of a plan: (B, H, blocks) int32, the last granule that visits a block of keys, −1 without one.

    Granules between its own and the last one may not visit it: first_block need not increase.
    """
    blocks = packing.decay_blocks(problem)
    last = torch.empty(problem.batch, problem.num_heads, blocks, dtype=torch.int32, device=first_block.device)
    launch(
        _find_last_granules, packing.token_programs(problem, sequences, DECAY_BLOCK, problem.num_heads),
        first_block, last, sequences, _sizes(problem, first_block.shape[-1]), **packing.constants(problem, sequences),
        CHUNK=CHUNK, num_warps=1, **COMPILER_OPTIONS,
    )
    return last


def visited_fraction(
    problem: AttentionProblem, q: Tensor, k: Tensor, log_decay: Tensor | None, scale: Tensor | float
) -> Tensor:
    """(B, H): the tiles of GRANULE rows × DECAY_BLOCK keys that the plan of a dense problem visits, over those in which
    a row sees a key."""
    shape = (problem.batch, problem.num_heads)
    if 0 in (*shape, problem.query_length, problem.key_length):
        return torch.ones(shape, device=q.device)
    scalar = problem.decay == "scalar"
    prefix = decay_prefix.build(problem, log_decay) if scalar else decay_prefix.allocate(problem, q)
    first_block = plan(problem, q, k, log_decay, scale, prefix, None)
    row = torch.arange(0, problem.query_length, GRANULE, device=q.device)
    position = row + problem.first_position
    last_position = (row + GRANULE).clamp(max=problem.query_length) - 1 + problem.first_position
    # both ends of what a row sees never decrease: the first row has the granule's first key, the last row its last one
    first_key = prefix.last_reset[..., position.clamp(min=0)] if scalar else torch.zeros_like(position)
    if problem.window[0] >= 0:
        first_key = torch.maximum(first_key, position - problem.window[0])
    begin, end = first_key // DECAY_BLOCK, last_position // DECAY_BLOCK + 1
    seen = (end - begin).clamp(min=0)
    visited = seen
    if is_planned(problem):
        visited = (end - torch.maximum(begin, first_block[..., : len(row)])).clamp(min=0)
    return (visited.sum(-1) / seen.sum(-1).clamp(min=1)).expand(shape)


def as_argument(problem: AttentionProblem, plan: Tensor) -> tuple[Tensor, int] | None:
    """A plan or its mirror as kernels take it; None, which compiles to nothing, where nothing is planned."""
    return (plan, plan.shape[-1]) if is_planned(problem) else None


@triton.jit
def granules_of_head(axis, work, head, heads, PACKED: tl.constexpr):
    """Where the granules of a head of work's sequence begin in a (B, H, axis) buffer of a plan."""
    return _offset_of_head(axis, work.sequence, head, heads, work.first_row, PACKED, ROWS)


@triton.jit
def blocks_of_head(axis, work, head, heads, PACKED: tl.constexpr):
    """Where its blocks of keys begin in such a buffer."""
    return _offset_of_head(axis, work.sequence, head, heads, work.first_token, PACKED, BLOCK)


@triton.jit
def _offset_of_head(axis, sequence, head, heads, first, PACKED: tl.constexpr, SIZE: tl.constexpr):
    """The same for parts of SIZE rows or tokens, of a sequence that begins at `first`."""
    if PACKED:
        offset = start_of_head(head, axis, parts_before(first, sequence, SIZE))
    else:
        offset = start_of_head(sequence * heads + head, axis, 0)
    return offset


@triton.jit
def first_planned_key(plan, work, heads, TILE: tl.constexpr, PACKED: tl.constexpr):
    """The first key that any granule of a tile of TILE rows visits; plan is `as_argument` of first_block."""
    first_block = plan[0] + granules_of_head(plan[1], work, work.head, heads, PACKED)
    granule = work.start // ROWS
    block = tl.load(first_block + granule)
    for other in tl.static_range(1, TILE // ROWS):
        last = (work.query_length - 1) // ROWS
        block = tl.minimum(block, tl.load(first_block + tl.minimum(granule + other, last)))
    return block * BLOCK


@triton.jit
def end_of_planned_rows(plan, work, head, heads, PACKED: tl.constexpr):
    """The mirror: the end of a head's rows that visit a key tile; plan is `as_argument` of last_granules."""
    last_granule = plan[0] + blocks_of_head(plan[1], work, head, heads, PACKED)
    return (tl.load(last_granule + work.start // BLOCK) + 1) * ROWS


@triton.jit
def _load_alpha(position, block, rates, head, prefix, DECAY: tl.constexpr, inside=None):
    """α in base 2 and float64, and how far it may be off, at positions in these blocks; anything where not inside.

    prefix points at one head's.
    """
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
    """(rows, columns); zeros in rows that are not inside, and beyond D."""
    here = rows[:, None] + column.to(tl.int64)[None, :] * stride
    return tl.load(here, mask=inside[:, None] & (column < D)[None, :], other=0.0).to(ACCUMULATOR)


@triton.jit
def _nan_is_infinite(x):
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _longest(squares):
    """The largest norm of those with these squares, too small by no more than _MARGIN says."""
    return tl.sqrt(tl.max(_nan_is_infinite(squares), 0) + _MIN_SQUARE)


@triton.jit
def _summarise(
    q, k, scale: tl.float64, row_scales, rates, prefix, of_blocks, of_granules, sequences, left,
    log_tolerance: tl.float64, sizes, TRAITS: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    SEARCHES: tl.constexpr,
):
    """K_J and W_J of neighbouring blocks of keys, U and E of the granules whose first row has its own key in them.

    W and E are in base 2.

    K is +inf (never skip) where α keeps the last row from skipping the block, and U where it keeps a granule's first
    row from skipping the first block that it sees. They speak for all: of λ ≤ 0 no row before the last one could skip
    the block if that cannot, and no other row of a granule has an earlier first key or a higher α. Unless
    TRAITS.prunes, all of them are read: rows and keys elsewhere are to be skipped.
    """
    TOGETHER: tl.constexpr = TRAITS.together
    ALIGNED: tl.constexpr = TRAITS.aligned
    PRUNES: tl.constexpr = TRAITS.prunes
    ACCUMULATOR: tl.constexpr = tl.float64 if q.data.dtype.element_ty == tl.float64 else tl.float32
    heads = sizes.heads
    work = tile_of_program(
        sequences, heads, sizes.query_length, sizes.key_length, BLOCK * TOGETHER, True, False, PACKED, SEARCHES, True
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
    block = tl.minimum(start // BLOCK + own, last // BLOCK)
    # (keys, blocks): this way round the sums over keys cross few lanes
    key = block[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside = key < key_length
    alpha, slack = _load_alpha(key, block[None, :], rates, head, prefix, DECAY, inside)
    growth = tl.where(inside, slack - alpha, float("-inf"))
    largest = tl.max(growth, 0)
    weight = largest + tl.log2(tl.sum(tl.exp2((growth - largest[None, :]).to(tl.float32)), 0)).to(tl.float64)
    tl.store(of_blocks + 2 * block + 1, weight)
    lowest, _ = _load_alpha(last, last // BLOCK, rates, head, prefix, DECAY)
    can_skip = lowest + weight <= log_tolerance
    if not PRUNES:
        can_skip = block >= 0
    tl.store(of_blocks + 2 * block, float("inf"), mask=can_skip == 0)
    # one bit for each block whose norms are needed, and one for each granule
    blocks = tl.sum((can_skip & (start // BLOCK + own <= last // BLOCK)).to(tl.int32) << own, 0)

    # A lane asks for a granule, and lanes without one repeat the last one: a sum over all lanes of a warp is one
    # instruction, and the compiler knows that branches on it are taken together
    lane, first_position = tl.arange(0, _LANES), key_length - query_length
    if ALIGNED:
        first_granule = (start - first_position) // ROWS  # exact; before the first row it is negative
    else:
        first_granule = tl.cdiv(tl.maximum(start - first_position, 0), ROWS)
    granule = first_granule + tl.minimum(lane, 2 * TOGETHER - 1)
    position = granule * ROWS + first_position
    there = (granule >= 0) & (granule * ROWS < query_length) & (position < start + BLOCK * TOGETHER)
    position = tl.where(there, position, 0)
    first, _ = keys_seen(
        position, key_length, prefix.last_reset, prefix.next_reset, True, DECAY == "scalar", left, None
    )
    begin, end = first // BLOCK, position // BLOCK
    # of all keys of the block one: no other program's W is known here
    first_key = tl.minimum(begin * BLOCK + BLOCK - 1, last)
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
    # Half a block and a granule at a time, and what both read is on its way before anything waits for it. A granule's
    # own keys are those of the half (ALIGNED), or the first ones behind it, too: in the cache, or soon wanted there
    for n in tl.range(0, 2 * TOGETHER, num_stages=TRAITS.stages):
        of_block, of_granule = ((blocks >> (n // 2)) & 1) != 0, ((granules >> n) & 1) != 0
        token = start + n * ROWS + tl.arange(0, ROWS)
        row = (first_granule + n) * ROWS + tl.arange(0, ROWS)
        own_key = row + first_position
        # where it is no granule's turn, rows may lie before the first one
        is_row = tl.where(of_granule, row, query_length) < query_length
        is_key = token < tl.where(of_block | (of_granule & ALIGNED), key_length, 0)
        keys = row_pointers(k, entry, kv_head, work.first_token + token)
        queries = row_pointers(q, entry, head, work.first_row + row)
        own_keys = row_pointers(k, entry, kv_head, work.first_token + own_key)
        k_squares, q_squares, own_squares, products = _sums(
            keys, queries, own_keys, k.strides[3], q.strides[3], is_key, is_row, TRAITS.d, TRAITS.width, TRAITS.part,
            ALIGNED, ACCUMULATOR,
        )
        block_of_row = tl.minimum(own_key, last) // BLOCK
        alpha_of_row, slack_of_row = _load_alpha(
            own_key, block_of_row, rates, head, prefix, DECAY, is_row
        )
        if row_scales is None:
            s = tl.full([ROWS], scale, ACCUMULATOR) * LOG2E
        else:
            here = row_pointers(row_scales, entry, head, work.first_row + row)
            s = tl.load(here, mask=is_row, other=0.0).to(ACCUMULATOR) * LOG2E
        longest = tl.maximum(tl.where(n % 2 == 0, 0.0, longest), _longest(k_squares))
        both_halves = ((blocks >> (n // 2)) & (n % 2)) != 0
        tl.store(of_blocks + 2 * (start // BLOCK + n // 2), longest.to(tl.float64), mask=both_halves)
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
    """Of rows of D columns: |k|², |q|², |own k|² and q·(own k); 0 where it is no key or row. ALIGNED: each k is its
    row's own one."""
    nothing = tl.zeros([ROWS, PART], ACCUMULATOR)
    k_squares, q_squares, own_squares, products = nothing, nothing, nothing, nothing
    # columns PART apart are added up first, so that few lanes have to add theirs
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
    """The first blocks of keys that TOGETHER granules visit; of_granules has an axis of its own, perhaps a longer one.
    """
    heads = sizes.heads
    work = tile_of_program(
        sequences, heads, sizes.query_length, sizes.key_length, ROWS * TOGETHER, False, True, PACKED, SEARCHES
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
    granule = tl.minimum(start // ROWS + tl.arange(0, TOGETHER), (query_length - 1) // ROWS)
    position = tl.maximum(granule * ROWS + key_length - query_length, 0)
    first, _ = keys_seen(
        position, key_length, last_reset + head_tokens, next_reset + head_tokens, True, DECAY == "scalar", left, None
    )
    # the block of its first row's own key is always visited
    begin, end = first // BLOCK, position // BLOCK
    found = first_visited(of_granules, granule, log_tolerance, of_blocks, begin, end, CHUNK, TOGETHER)
    tl.store(first_block + granule, found)


@triton.jit
def first_visited(
    of_granules, granule, log_tolerance, of_blocks, begin, end, CHUNK: tl.constexpr, TOGETHER: tl.constexpr
):
    """The first block from `begin` on, before `end`, with which a granule's sum exceeds the tolerance; `end` without
    one. granule, begin and end are (TOGETHER,)."""
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
    """The last granule that visits one block of keys."""
    heads = sizes.heads
    work = tile_of_program(
        sequences, heads, sizes.query_length, sizes.key_length, BLOCK, True, False, PACKED, SEARCHES
    )
    start, query_length, key_length = work.start, work.query_length, work.key_length
    if start >= key_length:
        return
    first_block += granules_of_head(sizes.granules, work, work.head, heads, PACKED)
    # rows before the block see nothing of it
    own = tl.maximum(start + query_length - key_length, 0) // ROWS
    last = tl.zeros([CHUNK], tl.int32) - 1
    for chunk in range(own, tl.cdiv(query_length, ROWS), CHUNK):
        granule = chunk + tl.arange(0, CHUNK)
        first = tl.load(first_block + granule, mask=granule * ROWS < query_length, other=2147483647)
        last = tl.maximum(last, tl.where(first <= start // BLOCK, granule, -1))
    here = blocks_of_head(sizes.blocks, work, work.head, heads, PACKED) + start // BLOCK
    tl.store(last_granule + here, tl.max(last, 0))
