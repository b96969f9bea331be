"""dq of the backward: products of dS and k, added up in memory as fragments; and the row sums of dS.

dq needs all keys of a tile, so each of the two consumer warpgroups multiplies one half of it: rows (D = 64) or columns
(D = 128). "Fragments" are dq in the order in which registers hold a product. TMA adds them from shared memory; in
kernels beyond 128 columns the threads add them (add_from_registers).

Programs add to a row in no fixed order, and sums of float32 depend on it. Under deterministic algorithms dq and the row
sums are added up as int32 multiples of a unit per row (row_terms.py), in which no order matters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import (
    COPIES,
    FRAGMENT_COLUMNS,
    FRAGMENT_ROWS,
    KEY_TILE,
    PART,
    WARPGROUP_KEYS,
    index_along,
    operand_layout,
    product_layout,
    to_fragments,
)
from decayattn.backends.hopper.common.pipelines import flat
from decayattn.backends.hopper.config import WARPGROUP_ROWS

# layouts of a part of dq, and of copies of a sum of dS
DQ: gl.constexpr = gl.constexpr(product_layout(PART.value))
SUMS: gl.constexpr = gl.constexpr(product_layout(COPIES.value))


@gluon.jit
def opaque_zero(n):
    """Return 0 for the index of a tile, in a way that the compiler cannot see.

    With it in an address, the compiler makes matrix descriptors again for every tile. Otherwise it would keep them in
    20 registers, and the loop would spill.
    """
    return n >> 31


@gluon.constexpr_function
def is_loaded(D, MODES):
    """True if the products for dq take dS from registers.

    This is faster if row sums are another product with the same operand: if both read shared memory, the kernel is 6 %
    slower. Without row sums, registers are 4 % slower. D = 128 has no registers left for it, nor has D = 64 with a
    scale per row, where dS times the scales is an operand too.
    """
    return D == 64 and MODES.row_sums and not MODES.row_scales


@gluon.constexpr_function
def product_keys(LOADED):
    """Number of keys of a product for dq.

    Products of few keys alternate with those for the row sums. These are small, and each waits for the one before it (2
    to 3 %).
    """
    return 32 if LOADED else WARPGROUP_ROWS


@gluon.jit
def d_scores_for_dq(shared, slot, PART_OF: gl.constexpr, LOADED: gl.constexpr):
    """dS of the tile in a slot, some keys at a time, as left operands of this warpgroup's part of dq.

    The operands have all 64 rows (D = 128), or one half of the tile's rows (D = 64).
    """
    D: gl.constexpr = shared.TILE.widths.qk
    STEP: gl.constexpr = product_keys(LOADED)
    d_scores = ()
    for key in gl.static_range(0, KEY_TILE, STEP):
        left = shared.d_scores.index(slot * 2 + key // WARPGROUP_KEYS).slice(key % WARPGROUP_KEYS, STEP, 0)
        if D == 64:
            left = left.slice(PART * PART_OF, PART, 1)
        left = left.permute((1, 0))
        if LOADED:
            left = left.load(operand_layout(DQ))
        d_scores += (left,)
    return d_scores


@gluon.jit
def start_dq_part(shared, n, d_scores, PART_OF: gl.constexpr, ROW_SUMS: gl.constexpr, LOADED: gl.constexpr):
    """Issue dS k of a tile for one half of dq, its columns (D = 128) or rows (D = 64); and the row sums of dS.

    Row sums are (64, 8 copies), over the keys of this warpgroup (D = 128, where both have all rows) or of both.
    """
    D: gl.constexpr = shared.TILE.widths.qk
    STEP: gl.constexpr = product_keys(LOADED)
    dq = gl.zeros([PART, PART], gl.float32, DQ)
    row_sum = gl.zeros([PART, COPIES], gl.float32, SUMS)
    first = opaque_zero(n)
    for key in gl.static_range(0, KEY_TILE, STEP):
        left = d_scores[key // STEP]
        right = flat(shared.keys.index(first + key // WARPGROUP_KEYS)).slice(key % WARPGROUP_KEYS, STEP, 0)
        if D == 128:
            right = right.slice(PART * PART_OF, PART, 1)
        dq = warpgroup_mma(left, right, dq, use_acc=key > 0, is_async=True)
        if ROW_SUMS and D == 64:
            ones = shared.ones.index(first).permute((1, 0))
            if LOADED:
                left = gl.convert_layout(left, operand_layout(SUMS), assert_trivial=True)
            row_sum = warpgroup_mma(left, ones, row_sum, use_acc=key > 0, is_async=True)
    if ROW_SUMS and D == 128:
        ones = shared.ones.index(first).permute((1, 0))
        row_sum = warpgroup_mma(d_scores[PART_OF], ones, row_sum, use_acc=False, is_async=True)
    return dq, row_sum


@gluon.jit
def _as_multiples(x, inverted_unit):
    """Round x to int32 multiples of a unit, the bits of a float32; a NaN is 0 here, and its row's unit is NaN."""
    x *= inverted_unit.to(gl.float32, bitcast=True)
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _load_units(units, first_row, row, work):
    return gl.load(units + (first_row + row), mask=(row >= 0) & (row < work.bounds.query_length), other=0)


@gluon.jit
def units_of_dq(dq_target, visit, work, HALF: gl.constexpr = 0):
    """Return (words of inverted units of a visit's rows,); () if sums are float32. HALF: of a query tile's rows."""
    _, _, _, first_row, units = dq_target
    loaded = ()
    if units is not None:
        row = visit // work.schedule.MODES.sides * work.schedule.TILE.rows + HALF * PART
        row += gl.arange(0, PART, gl.SliceLayout(1, DQ))
        loaded += (_load_units(units, first_row, row, work),)
    return loaded


@gluon.jit
def in_units(x, loaded, OF_SUMS: gl.constexpr = False):
    """Return dq or row sums as memory adds them up, with their rows' units_of_dq."""
    if len(loaded) > 0:
        inverted = gl.convert_layout(loaded[0], gl.SliceLayout(1, x.type.layout), assert_trivial=True)
        x = _as_multiples(x, gl.expand_dims(inverted << 16 if OF_SUMS else inverted & -65536, 1))
    return x


@gluon.jit
def start_dq_block(shared, slot, zero, COLUMN: gl.constexpr):
    """Issue dS k of the tile in a slot, for the 64 columns of dq from COLUMN on; zero: opaque_zero.

    This and start_row_sums are for kernels beyond 128 columns, in which a product has all keys of a buffer.
    """
    PARTS: gl.constexpr = shared.TILE.keys // WARPGROUP_KEYS
    COLUMNS: gl.constexpr = shared.TILE.columns
    dq = gl.zeros([PART, PART], gl.float32, DQ)
    for part in gl.static_range(PARTS):
        left = shared.d_scores.index(slot * PARTS + part).permute((1, 0))
        key = flat(shared.keys.index(zero + (part * shared.TILE.blocks + COLUMN // COLUMNS)))
        dq = warpgroup_mma(left, key.slice(COLUMN % COLUMNS, PART, 1), dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def start_row_sums(shared, slot, zero):
    """Issue the row sums of dS of the tile in a slot, (64, 8 copies)."""
    PARTS: gl.constexpr = shared.TILE.keys // WARPGROUP_KEYS
    row_sum = gl.zeros([PART, COPIES], gl.float32, SUMS)
    ones = shared.ones.index(zero).permute((1, 0))
    for part in gl.static_range(PARTS):
        left = shared.d_scores.index(slot * PARTS + part).permute((1, 0))
        row_sum = warpgroup_mma(left, ones, row_sum, use_acc=part > 0, is_async=True)
    return row_sum


@gluon.jit
def add_from_registers(dq_target, part, dq, visit, work):
    """Add a part of a visit's tile to the fragments in memory, from registers.

    One instruction adds four of a thread's, 16 bytes.
    """
    dq_fragments, _, _, _, _ = dq_target
    x = to_fragments(in_units(dq, units_of_dq(dq_target, visit, work)))
    row = gl.expand_dims(gl.arange(0, FRAGMENT_ROWS, gl.SliceLayout(1, x.type.layout)), 1)
    column = gl.expand_dims(gl.arange(0, FRAGMENT_COLUMNS, gl.SliceLayout(0, x.type.layout)), 0)
    here = dq_fragments + part.to(gl.int64) * (FRAGMENT_ROWS * FRAGMENT_COLUMNS)
    gl.atomic_add(here + (row * FRAGMENT_COLUMNS + column), x, sem="relaxed")


@gluon.jit
def add_row_sums(row_sum, dq_target, visit, work, WARPGROUP: gl.constexpr, D: gl.constexpr):
    """Add the row sums of start_dq_part for a visit's tile, or their in_units, to those in memory."""
    _, _, row_sums, first_row, units = dq_target
    # (warp, row / 8, row % 8, copy / 2, copy % 2): four threads have the same two rows, and the first two add one each
    row_sum, _ = gl.split(gl.reshape(row_sum, [4, 2, 8, COPIES // 2, 2]))
    first_rows, others = gl.split(gl.permute(row_sum, [0, 2, 3, 1]))
    copy = index_along(first_rows, 2)
    row_sum = gl.where(copy == 0, first_rows, others)
    SIDES: gl.constexpr = work.schedule.MODES.sides
    if SIDES == 2:
        row_sum = gl.where(visit % SIDES == 0, row_sum, -row_sum)
    row = visit // SIDES * work.schedule.TILE.rows + index_along(first_rows, 0) * 16 + copy * 8
    row += index_along(first_rows, 1)
    if D == 64:
        row += WARPGROUP * PART
    inside = (row < work.bounds.query_length) & (copy < 2)
    if units is not None and row_sum.dtype == gl.float32:
        # of the same words as dq's, which the L1 cache has
        row_sum = _as_multiples(row_sum, _load_units(units, first_row, row, work) << 16)
    gl.atomic_add(row_sums + (first_row + row), row_sum, mask=inside, sem="relaxed")


@gluon.jit
def add_dq_part(row_sum, dq_target, visit, work, shared, WARPGROUP: gl.constexpr):
    """Add a part of a visit's tile from dq_parts to the fragments in memory, and the row sums of start_dq_part.

    A fence and a barrier must come before.
    """
    dq_desc, first_part, _, _, _ = dq_target
    part = first_part + visit // work.schedule.MODES.sides * 2
    gluon_compat.reduce_add(dq_desc, [part * FRAGMENT_ROWS, 0], shared.dq_parts.index(WARPGROUP))
    if work.schedule.MODES.row_sums:
        add_row_sums(row_sum, dq_target, visit, work, WARPGROUP, shared.TILE.widths.qk)
