"""Backward for sm_90: one pass over the scores with five matrix products, warp-specialised.

An item of work is a tile of 128 keys with the query tiles that see it, over the query heads of the group; programs
stay, and draw items from a counter. A producer warp streams q, dO and the row terms through shared memory by TMA. Two
consumer warpgroups own 64 keys of an item each: they recompute Pᵀ from the saved row references and add to dk and dv in
registers. dq needs all keys of a tile, so dSᵀ goes through shared memory, where each warpgroup multiplies one half of
dq, a tile later (then neither waits for the other), and the copy engine adds it in float32 to a buffer in the order in
which registers hold it ("fragments"). The second warpgroup begins a tile when the first has its scores: one multiplies
while the other computes, where in step both would do either.

Between items, what is done with makes room at once: dv leaves from where the values were while dq of the last tile is
multiplied, the next keys come when that has read these, and dk leaves from the place of dSᵀ.

What is one number per row, its reference and Δ, costs no instruction per score: three bfloat16 columns each (parts.py)
come with q, and one more matrix instruction of ones × columns adds them to Q Kᵀ and to V dOᵀ.

Row and column sums of dS are taken of the same rounded dSᵀ that the products read: where a decay's gradient cancels,
so do they. Both are products with few columns: of keys beside dk, by bits of the row's number for a constant decay's
Σ dS (i − j), into which the own pair must not come (_bit_weights), and of rows beside dq. One loop serves edge tiles
and whole ones, with branches around what whole ones do not need: two loops cost registers, and spills slow the shared
memory that this kernel lives on (3 % at D = 128).

Not causal, a decay's sign differs on either side of the diagonal, and the loop is run through once per side (items.py).
A row has a reference for each, with ∓α_i, and the producer sends that of the side, and the difference of two bases with
its sign. So the loop does not know of sides, but where it adds row sums: α_j and the sums of keys change their sign
between two runs.

What passes between the warps is in exchange.py, the producer in producer.py; zeroing.py makes 0 what dq is added to.
row_terms.py prepares what is one number per row before it, and brings dq to its layout after it.

Tiles, per warpgroup: k, v, dk, dv (64, D) · q, d_out (ROWS, D) · terms (ROWS, 16) · scoreT, pT, dpT, dsT (64, ROWS) ·
dq part (64, 64).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from decayattn.backends.hopper.backward.exchange import Buffers
from decayattn.backends.hopper.backward.items import KEYS, SHARE, Sizes, found_item, has_row_sums, load_rate
from decayattn.backends.hopper.backward.producer import produce
from decayattn.backends.hopper.backward.row_terms import DELTA
from decayattn.backends.hopper.backward.zeroing import allocate_zeros
from decayattn.backends.hopper.common import copy_engine
from decayattn.backends.hopper.common.fragments import (
    DEPTH,
    SHARES,
    among_columns,
    by_threads,
    common_columns,
    from_threads,
    ones_of_parts,
)
from decayattn.backends.hopper.common.rings import allocate_words, arrive, make_ring, signal
from decayattn.backends.hopper.common.tile_table import allocate_tiles, flat, stacked
from decayattn.backends.hopper.config import WARPGROUP_ROWS
from decayattn.backends.runtime.dependent_launch import let_next_start, wait_for_launch_before
from decayattn.backends.tiles.scores import LOG2E, decayed_score, probability, score_gradient, visible
from decayattn.backends.tiles.visibility import edge_tile

# one part of dq: what a warpgroup multiplies of a tile, 64 rows × 64 columns, and its shape as fragments
PART: gl.constexpr = gl.constexpr(64)
FRAGMENT_ROWS: gl.constexpr = gl.constexpr(16)
FRAGMENT_COLUMNS: gl.constexpr = gl.constexpr(256)
# columns that sum up dS: as few as a product can have, and the sums' layout
COPIES: gl.constexpr = gl.constexpr(8)
SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COPIES.value, 16]))
# bits of a row's number in a tile (_bit_weights)
BITS: gl.constexpr = gl.constexpr(7)
DQ: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART.value, 16]))


@gluon.jit
def _widened(x):
    """16-bit values as float32."""
    if x.dtype == gl.bfloat16:
        # two instructions for a pair, where the conversion takes more
        x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        x = x.to(gl.float32)
    return x


@gluon.jit
def _nothing(n):
    """0 for the number of a tile, but the compiler does not know: where it stands in an address, matrix descriptors are
    made anew for every tile, and do not stay in 20 registers, which makes the loop spill."""
    return n >> 31


@gluon.constexpr_function
def _is_loaded(D, ROW_SUMS):
    """Whether the products for dq take dS from registers. It pays where row sums are another product with the same
    operand: if both read shared memory, the kernel is 6 % slower. Without them registers are 4 % slower, and D = 128
    has none left."""
    return D == 64 and ROW_SUMS


@gluon.constexpr_function
def _step(D, ROW_SUMS):
    """How many keys a product for dq has. Those of a few take turns with the row sums, whose products are small and
    wait for each other one after the other (2 to 3 %)."""
    return 32 if _is_loaded(D, ROW_SUMS) else WARPGROUP_ROWS


@gluon.jit
def _d_scores_for_dq(buffers, slot, PART_OF: gl.constexpr, D: gl.constexpr, ROW_SUMS: gl.constexpr):
    """dS of the tile in a slot, some keys at a time, as left operands of this warpgroup's part of dq: all 64 rows
    (D = 128), or one half of them (D = 64)."""
    STEP: gl.constexpr = _step(D, ROW_SUMS)
    d_scores = ()
    for key in gl.static_range(0, KEYS, STEP):
        left = buffers.d_scores.index(slot * 2 + key // SHARE).slice(key % SHARE, STEP, 0)
        if D == 64:
            left = left.slice(PART * PART_OF, PART, 1)
        left = left.permute((1, 0))
        if _is_loaded(D, ROW_SUMS):
            left = left.load(gl.DotOperandLayout(0, DQ, 2))
        d_scores += (left,)
    return d_scores


@gluon.jit
def _start_dq_part(buffers, n, d_scores, PART_OF: gl.constexpr, D: gl.constexpr, ROW_SUMS: gl.constexpr):
    """Issue dS k of a tile: columns (D = 128) or rows (D = 64) of one half of dq; and the sums of rows of dS (64, 8
    copies), over the keys of this warpgroup (D = 128, where both have all rows) or of both."""
    STEP: gl.constexpr = _step(D, ROW_SUMS)
    dq = gl.zeros([PART, PART], gl.float32, DQ)
    row_sum = gl.zeros([PART, COPIES], gl.float32, SUMS)
    first = _nothing(n)
    for key in gl.static_range(0, KEYS, STEP):
        left = d_scores[key // STEP]
        right = flat(buffers.keys.index(first + key // SHARE)).slice(key % SHARE, STEP, 0)
        if D == 128:
            right = right.slice(PART * PART_OF, PART, 1)
        dq = warpgroup_mma(left, right, dq, use_acc=key > 0, is_async=True)
        if _is_loaded(D, ROW_SUMS):
            ones = buffers.ones.index(first).permute((1, 0))
            left = gl.convert_layout(left, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
            row_sum = warpgroup_mma(left, ones, row_sum, use_acc=key > 0, is_async=True)
    if ROW_SUMS and D == 128:
        ones = buffers.ones.index(first).permute((1, 0))
        row_sum = warpgroup_mma(d_scores[PART_OF], ones, row_sum, use_acc=False, is_async=True)
    return dq, row_sum


@gluon.jit
def _stage_dq_part(buffers, dq, WARPGROUP: gl.constexpr):
    """A part as fragments to shared memory, where the copy engine adds it from."""
    # (warp, row / 8, row % 8, column / 8, column % 8 / 2, column % 2) → every thread's registers side by side
    fragments = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    buffers.dq_parts.index(WARPGROUP).store(gl.reshape(fragments, [FRAGMENT_ROWS, FRAGMENT_COLUMNS]))


@gluon.jit
def _add_dq_part(dq_desc, part, buffers, WARPGROUP: gl.constexpr):
    """Add what _stage_dq_part stored, a fence and a barrier ago, to its place in the fragments."""
    copy_engine.reduce_add(dq_desc, [part * FRAGMENT_ROWS, 0], buffers.dq_parts.index(WARPGROUP))


@gluon.jit
def _axis(x, AXIS: gl.constexpr):
    """Of a tensor of three dimensions, the index along one."""
    ROWS: gl.constexpr = gl.SliceLayout(2 if AXIS < 2 else 1, x.type.layout)
    COLUMNS: gl.constexpr = gl.SliceLayout(1 if AXIS == 0 else 0, ROWS)
    index = gl.expand_dims(gl.arange(0, x.shape[AXIS], COLUMNS), 1 if AXIS == 0 else 0)
    return gl.expand_dims(index, 2 if AXIS < 2 else 1)


@gluon.jit
def _add_row_sums(row_sum, row_sums, first_row, visit, work, WARPGROUP: gl.constexpr, D: gl.constexpr):
    """Add what _start_dq_part summed of the rows of a visit's tile to the sums in memory."""
    # (warp, row / 8, row % 8, copy / 2, copy % 2): four threads have the same two rows, and the first two add one each
    row_sum, _ = gl.split(gl.reshape(row_sum, [4, 2, 8, COPIES // 2, 2]))
    first_rows, others = gl.split(gl.permute(row_sum, [0, 2, 3, 1]))
    copy = _axis(first_rows, 2)
    row_sum = gl.where(copy == 0, first_rows, others)
    SIDES: gl.constexpr = work.sizes.SIDES
    if SIDES == 2:
        row_sum = gl.where(visit % SIDES == 0, row_sum, -row_sum)
    row = visit // SIDES * work.sizes.ROWS + _axis(first_rows, 0) * 16 + copy * 8 + _axis(first_rows, 1)
    if D == 64:
        row += WARPGROUP * PART
    inside = (row < work.place.query_length) & (copy < 2)
    gl.atomic_add(row_sums + (first_row + row), row_sum, mask=inside, sem="relaxed")


@gluon.constexpr_function
def _key_columns(DECAY):
    """How many columns sum up dS of keys."""
    return 16 if DECAY == "constant" else 8


@gluon.jit
def _bit_weights(column, row):
    """What a row of a tile counts for in a column of the sums of keys: 2^b in column 2 b if its number has bit b, and
    in column 2 b + 1 if it does not; 1 in the two columns behind those.

    r − c is the sum of 2^b over the bits that r has and c lacks, less that over the bits that c has and r lacks. So the
    columns 2 b of the bits that c lacks, less the columns 2 b + 1 of those that it has, are Σ dS (r − c), and row c
    counts for 0 in each of them. With c the key's own row, dS of the own pair stays out of the gradient of a constant
    decay, to which it does not belong: where the decay is strong, all others are less than the rounding of that one.
    """
    bit = column // 2
    return gl.where(bit < BITS, (((row >> bit) + column) & 1) << bit, 1)


@gluon.jit
def _two_bits(x):
    """x (64 keys, bits 0 to 7) by threads, (64, 4) each: bits 0 to 3, and bits 4 to 7."""
    low, high = gl.split(gl.permute(gl.reshape(x, [SHARE, 2, 4]), [0, 2, 1]))
    return gl.convert_layout(low, SHARES, assert_trivial=True), gl.convert_layout(high, SHARES, assert_trivial=True)


@gluon.jit
def _distance_sum(of_keys, own_row, edge):
    """Σ dS (i − j) of the rows of a tile: (64 keys, 4 shares).

    of_keys is dSᵀ times _bit_weights, own_row what number the key's own row has in the tile or would have.
    """
    has, lacks = gl.split(gl.reshape(of_keys, [SHARE, 8, 2]))
    low, high = _two_bits(has)
    own_row = gl.expand_dims(gl.convert_layout(own_row, gl.SliceLayout(1, SHARES), assert_trivial=True), 1)
    bit = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, SHARES)), 0)
    # the last thread's second bit is none, but Σ dS
    is_sum = bit + 4 == BITS
    # of the own row, what is not in c: in whole tiles, where nothing is its own row unless that is row 0, c is 0
    rest = own_row
    if edge:
        low_lacks, high_lacks = _two_bits(lacks)
        low = gl.where((own_row >> bit) & 1 == 0, low, -low_lacks)
        high = gl.where(((own_row >> (bit + 4)) & 1 == 0) | is_sum, high, -high_lacks)
        rest = own_row & -(1 << BITS)
    return low + high * gl.where(is_sum, (-rest).to(gl.float32), 1.0)


@gluon.jit
def _key_sum(of_keys, own_row, edge, DECAY: gl.constexpr):
    """Of the rows of a tile Σ dS, in 4 copies, or for a constant decay Σ dS (i − j), in 4 shares: (64 keys, 4)."""
    if DECAY == "constant":
        total = _distance_sum(of_keys, own_row, edge)
    else:
        total, _ = gl.split(gl.reshape(of_keys, [SHARE, COPIES // 2, 2]))
        total = gl.convert_layout(total, SHARES, assert_trivial=True)
    return total


@gluon.jit
def _add_rows(
    n, tile, edge, previous, dk, dv, key_sum, key_position, key_alpha, first, end, work, buffers, dq_desc,
    first_part, row_sums, first_row, score_scale, WARPGROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """The n-th query tile into dk, dv and the sums; and dq of the visit before it (−1: there is none in this head)."""
    ROWS: gl.constexpr = work.sizes.ROWS
    DECAY: gl.constexpr = work.sizes.DECAY
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    DTYPE: gl.constexpr = buffers.queries.dtype
    zero = gl.zeros([SHARE, ROWS], gl.float32, SCORE)
    stage = buffers.stage(n)
    phase = buffers.phase(n)
    query = flat(buffers.queries.index(stage))
    d_out = flat(buffers.d_outs.index(stage))

    own = WARPGROUP + _nothing(n)
    ROW_SUMS: gl.constexpr = work.sizes.ROW_SUMS
    LOADED: gl.constexpr = _is_loaded(D, ROW_SUMS)
    KEY_SUMS: gl.constexpr = 1 if work.sizes.DECAY_GRADIENT else 0

    if WARPGROUP == 1:
        # in step with the first it is 1 to 3 % slower
        mbarrier.wait(buffers.first_scores.index(stage), phase)
    mbarrier.wait(buffers.queries_ready.index(stage), phase)
    key = flat(buffers.keys.index(own))
    scoreT = warpgroup_mma(key, query.permute((1, 0)), zero, use_acc=False, is_async=True)
    terms = buffers.terms.index(stage).permute((1, 0))
    scoreT = warpgroup_mma(ones_of_parts(0, SCORE), terms, scoreT, is_async=True)
    mbarrier.wait(buffers.d_outs_ready.index(stage), phase)
    value = flat(buffers.values.index(own))
    dpT = warpgroup_mma(value, d_out.permute((1, 0)), zero, use_acc=False, is_async=True)
    dpT = warpgroup_mma(ones_of_parts(DELTA, SCORE), terms, dpT, is_async=True)
    scoreT = warpgroup_mma_wait(2, (scoreT,))
    if WARPGROUP == 0:
        signal(buffers.first_scores.index(stage))
    if DECAY != "none":
        # what the tile's rows share joins what a key has
        key_alpha = key_alpha - buffers.differences.index(stage).load(key_alpha.type.layout)
    scoreT = decayed_score(
        scoreT * score_scale, 0, gl.expand_dims(key_alpha, 1), 0, 0, 0, 0, DECAY, True, DECAY != "none"
    )
    if edge:
        # the tile's first row comes from memory, so that nothing is compared, and kept, before the scores are there
        here = buffers.starts.index(stage).load(key_alpha.type.layout)
        x = by_threads(scoreT)
        sees = visible(common_columns(x), among_columns(first - here, x), among_columns(end - here, x))
        scoreT = from_threads(gl.where(sees, x, float("-inf")), SCORE)
    p = probability(scoreT, 0)
    pT = p.to(DTYPE)
    dv = warpgroup_mma(gl.convert_layout(pT, OPERAND), d_out, dv, is_async=True)
    dpT = warpgroup_mma_wait(1, (dpT,))
    # float16 is coarse below 6e-5, and under strong rates a rate's gradient is made of such P alone
    FINE: gl.constexpr = work.sizes.DECAY_GRADIENT and DECAY == "constant" and DTYPE == gl.float16  # noqa: SIM300
    if D == 64 and not FINE:
        # from its 16-bit form: its float32 form would stay in registers beside dP, where both have 64 (100 bytes spill)
        p = _widened(pT)
    dsT = score_gradient(p, dpT, 0).to(DTYPE)

    # for dq below; there, after an arrival at a neighbouring barrier, Triton would have the warps wait for each other
    buffers.wait_d_scores(n - 1, pred=n > 0)
    before = _d_scores_for_dq(buffers, buffers.slot(n - 1), WARPGROUP, D, ROW_SUMS)
    if buffers.SLOTS == 2:
        # both have read the slot, for dq of tile n − 2; of three slots, they had before q of this tile could come
        mbarrier.wait(buffers.d_scores_read, (n - 1) & 1, pred=n > 0)
        if LOADED:
            arrive(buffers.d_scores_read)
    buffers.d_scores.index(buffers.slot(n) * 2 + WARPGROUP).store(dsT)
    if not LOADED:
        fence_async_shared()
    tma.store_wait(0)  # the copy engine has read what _stage_dq_part stored a tile ago
    arrive(buffers.d_scores_ready.index(buffers.slot(n)))
    # done by now: were its operand still in registers, later ptxas would have too few for the products at D = 128, and
    # make every one wait for the one before
    dv = warpgroup_mma_wait(0, (dv,))
    dq, row_sum = _start_dq_part(buffers, n, before, WARPGROUP, D, ROW_SUMS)
    dsT = gl.convert_layout(dsT, OPERAND)
    dk = warpgroup_mma(dsT, query, dk, is_async=True)
    COLUMNS: gl.constexpr = _key_columns(DECAY)
    of_keys = gl.zeros([SHARE, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    if work.sizes.DECAY_GRADIENT:
        weights = buffers.weights.index(_nothing(n)).permute((1, 0))
        of_keys = warpgroup_mma(dsT, weights, of_keys, use_acc=False, is_async=True)
    dq, row_sum = warpgroup_mma_wait(1 + KEY_SUMS, (dq, row_sum))  # dk and its sums go on
    if buffers.SLOTS == 2 and not LOADED:
        arrive(buffers.d_scores_read)
    _stage_dq_part(buffers, dq, WARPGROUP)
    dk, of_keys = warpgroup_mma_wait(0, (dk, of_keys))
    fence_async_shared()  # not before: with products on their way ptxas crashes
    arrive(buffers.empty.index(stage))
    if previous >= 0:
        _add_dq_part(dq_desc, first_part + previous // work.sizes.SIDES * 2, buffers, WARPGROUP)
        if ROW_SUMS:
            _add_row_sums(row_sum, row_sums, first_row, previous, work, WARPGROUP, D)
    if work.sizes.DECAY_GRADIENT:
        key_sum += _key_sum(of_keys, key_position - work.first_position() - tile * ROWS, edge, DECAY)
    return dk, dv, key_sum


@gluon.jit
def _place_of_dk(dk_desc, buffers, n, HALF: gl.constexpr, WARPGROUP: gl.constexpr):
    """This warpgroup's place in a slot of dSᵀ, for 64 columns of dk of an item whose tiles end with the n-th: not the
    last one's slot, which the other warpgroup reads once more at its next item's first tile."""
    place = buffers.d_scores.index(buffers.slot(n + HALF) * 2 + WARPGROUP)
    # the whole place as tiles of dk, of which the first is used: at D = 64 it is twice as large as a tile, and Triton
    # 3.8 reinterprets a buffer only as one of the same size
    COUNT: gl.constexpr = place.shape[0] * place.shape[1] // (SHARE * PART)
    tiles = copy_engine.reinterpret(place, dk_desc.dtype, stacked(COUNT, dk_desc.block_shape), dk_desc.layout)
    return tiles.index(0)


@gluon.jit
def _store_dk(dk_desc, dk, n, item, buffers, WARPGROUP: gl.constexpr, D: gl.constexpr):
    """Begin to store dk, 64 columns at a time."""
    halves = (dk, dk)
    if D == 128:
        halves = gl.split(gl.permute(gl.reshape(dk, [SHARE, 2, PART]), [0, 2, 1]))
    HALVES: gl.constexpr = D // PART
    for half in gl.static_range(HALVES):
        flat(_place_of_dk(dk_desc, buffers, n, half, WARPGROUP)).store(halves[half])
    fence_async_shared()
    copy_engine.thread_barrier()
    for half in gl.static_range(HALVES):
        place = _place_of_dk(dk_desc, buffers, n, half, WARPGROUP)
        copy_engine.store(dk_desc, item.key_at(WARPGROUP, half * PART), place)


@gluon.jit
def _consume(
    sizes, buffers, dq_desc, dk_desc, rates, rate_stride, local, last_reset, next_reset, row_sums, column_sums,
    rate_sums, scale, WARPGROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: its 64 keys of every item through the query tiles that see the item's keys."""
    ROWS: gl.constexpr = sizes.ROWS
    DECAY: gl.constexpr = sizes.DECAY
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    KEY: gl.constexpr = gl.SliceLayout(1, SCORE)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    item = buffers.draw(0)
    count = item * 0
    n = item * 0
    while item < sizes.number:
        work = found_item(sizes, item)
        own_start = work.place.start + WARPGROUP * SHARE
        key = own_start + gl.arange(0, SHARE, KEY)
        inside = gl.minimum(key, work.place.key_length - 1)
        dk = gl.zeros([SHARE, D], gl.float32, ACC)
        dv = gl.zeros([SHARE, D], gl.float32, ACC)
        for member in range(sizes.GROUP):
            tokens = work.first_token(member)
            first_part = work.first_tile(member) * 2 + WARPGROUP
            first_row = work.first_row(member)
            key_alpha = inside.to(gl.float32)
            if DECAY == "scalar":
                key_alpha = gl.load(local + tokens + inside)
            elif DECAY == "constant":
                rate = load_rate(rates, rate_stride, work.head(member))
                key_alpha = (key - work.place.start).to(gl.float32) * rate
            left = work.left_of(member, rates, rate_stride)
            rows = work.rows_of(key, last_reset + tokens, next_reset + tokens, left)
            ends = work.rows_of_ends(member, last_reset + tokens, next_reset + tokens, left)
            key_sum = gl.zeros([SHARE, 4], gl.float32, SHARES)
            # the last visit: tile and side as one number
            previous = -1
            for side in range(sizes.SIDES):
                first, end = work.rows_of_side(rows, side)
                begin, whole_begin, whole_end, tile_end = work.visited(ends, side)

                # what is read of memory before is on its way while the keys are
                mbarrier.wait(buffers.keys_ready, count & 1)
                # dk of the item before has left the places of dSᵀ, which one thread knows, and all write to
                tma.store_wait(0)
                copy_engine.thread_barrier()
                edges = tile_end - begin - (whole_end - whole_begin)
                for m in range(tile_end - begin):
                    tile = gl.where(m < edges, edge_tile(m, begin, whole_begin, whole_end), whole_begin + m - edges)
                    dk, dv, key_sum = _add_rows(
                        n, tile, m < edges, previous, dk, dv, key_sum, key, key_alpha, first, end, work, buffers,
                        dq_desc, first_part, row_sums, first_row, scale * LOG2E, WARPGROUP, D,
                    )  # fmt: skip
                    previous = tile * sizes.SIDES + side
                    n += 1
                if sizes.SIDES == 2:
                    # the right side has the other sign; turned behind either, sums end as those of left minus right
                    key_alpha, key_sum = -key_alpha, -key_sum
            if member == sizes.GROUP - 1:
                # this warpgroup's values make room for dv
                flat(buffers.values.index(WARPGROUP)).store(dv.to(buffers.values.dtype))
                fence_async_shared()
                arrive(buffers.dv_ready)
            # dq of the head's last tile
            buffers.wait_d_scores(n - 1, pred=previous >= 0)
            last = _d_scores_for_dq(buffers, buffers.slot(n - 1), WARPGROUP, D, sizes.ROW_SUMS)
            dq, row_sum = _start_dq_part(buffers, n, last, WARPGROUP, D, sizes.ROW_SUMS)
            dq, row_sum = warpgroup_mma_wait(0, (dq, row_sum))
            arrive(buffers.keys_read, member == sizes.GROUP - 1)
            if previous >= 0:
                tma.store_wait(0)
                copy_engine.thread_barrier()
                _stage_dq_part(buffers, dq, WARPGROUP)
                fence_async_shared()
                copy_engine.thread_barrier()
                _add_dq_part(dq_desc, first_part + previous // sizes.SIDES * 2, buffers, WARPGROUP)
                if sizes.ROW_SUMS:
                    _add_row_sums(row_sum, row_sums, first_row, previous, work, WARPGROUP, D)
            if sizes.DECAY_GRADIENT:
                # found again, which keeps a line of the table out of the registers of the loop
                done = found_item(sizes, item)
                tokens, own_start = done.first_token(member), done.place.start + WARPGROUP * SHARE
                sums = gl.sum(key_sum, 1)
                if DECAY == "scalar":
                    sums *= 0.25  # of 4 copies
                    share = gl.arange(0, SHARE, sums.type.layout)
                    here = column_sums + tokens + own_start + share
                    gl.store(here, sums, mask=own_start + share < done.place.key_length)
                else:
                    tile = done.first_block(member) + done.place.start // KEYS
                    gl.store(rate_sums + tile * 2 + WARPGROUP, gl.sum(sums, 0))

        # both warpgroups have read dSᵀ, too
        mbarrier.wait(buffers.keys_read, count & 1)
        _store_dk(dk_desc, (dk * scale).to(buffers.d_scores.dtype), n, found_item(sizes, item), buffers, WARPGROUP, D)
        count += 1
        item = buffers.draw(count)
    tma.store_wait(0)


_INTEGERS = [
    "rate_stride", "left", "query_length", "key_length", "blocks", "row_tiles", "key_tiles", "entries", "heads",
    "together",
]  # fmt: skip


@gluon.jit(do_not_specialize=_INTEGERS)
def gradients_kernel(
    q_desc, k_desc, v_desc, d_out_desc, terms_desc, dk_desc, dv_desc, dq_desc, zeros_desc, rates, local, base,
    last_reset, next_reset, mirror, row_sums, column_sums, rate_sums, key_table, counters, rate_stride, scale, left,
    query_length, key_length, blocks, row_tiles, key_tiles, entries, heads, together, D: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, DECAY: gl.constexpr,
    DECAY_GRADIENT: gl.constexpr, RAGGED: gl.constexpr, WINDOW: gl.constexpr, PLANNED: gl.constexpr,
    CAUSAL: gl.constexpr, SIDES: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dk, dv of all key tiles over their groups of query heads; added up, dq, row sums and a rate's gradient. May be
    launched before the launch before it has ended.

    counters (zeroing.py) are 0; key_table is not read unless RAGGED, left not unless WINDOW, and mirror
    (skipping.last_granules) not unless PLANNED. query_length, key_length and blocks, those of the decay prefix, are of
    the axes on which the sequences lie; key_tiles are those of an entry.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    STEP: gl.constexpr = _step(D, has_row_sums(DECAY, DECAY_GRADIENT))
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COPIES, STEP], DTYPE)
    COLUMNS: gl.constexpr = _key_columns(DECAY)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, ROWS], DTYPE)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(DTYPE, [1, COPIES, STEP], ONES)
    ones.index(0).store(gl.full([COPIES, STEP], 1.0, DTYPE, LAYOUT))
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT)), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    weights = gl.allocate_shared_memory(DTYPE, [1, COLUMNS, ROWS], WEIGHTS)
    if DECAY == "constant":
        weights.index(0).store(_bit_weights(column, row).to(DTYPE))
    else:
        weights.index(0).store(gl.full([COLUMNS, ROWS], 1.0, DTYPE, LAYOUT))
    zeros = allocate_zeros(zeros_desc)
    fence_async_shared()
    buffers = Buffers(
        allocate_tiles(k_desc, 2),
        allocate_tiles(v_desc, 2),
        allocate_tiles(q_desc, STAGES),
        allocate_tiles(d_out_desc, STAGES),
        gl.allocate_shared_memory(terms_desc.dtype, [STAGES, ROWS, DEPTH], terms_desc.layout),
        allocate_words(STAGES, gl.float32),
        allocate_words(STAGES),
        gl.allocate_shared_memory(
            DTYPE, [SLOTS * 2, SHARE, ROWS], gl.NVMMASharedLayout.get_default_for([SHARE, ROWS], DTYPE)
        ),
        gl.allocate_shared_memory(gl.float32, [2, FRAGMENT_ROWS, FRAGMENT_COLUMNS], dq_desc.layout),
        zeros,
        ones,
        weights,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        make_ring(allocate_words(1), 1, 2),
        STAGES,
        SLOTS,
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(buffers.queries_ready.index(stage), count=1)
        mbarrier.init(buffers.d_outs_ready.index(stage), count=1)
        mbarrier.init(buffers.empty.index(stage), count=2)
        mbarrier.init(buffers.first_scores.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(buffers.d_scores_ready.index(slot), count=2)
    mbarrier.init(buffers.d_scores_read, count=2)
    mbarrier.init(buffers.keys_ready, count=1)
    mbarrier.init(buffers.keys_read, count=2)
    mbarrier.init(buffers.dv_ready, count=2)

    let_next_start(heads)
    wait_for_launch_before(heads)
    if RAGGED:
        # the host only knows a bound
        key_tiles = gl.load(key_table)
    kv_heads = entries * (heads // GROUP)
    sizes = Sizes(
        key_tiles * kv_heads, kv_heads, together, key_table, key_tiles, heads, query_length, key_length, blocks,
        row_tiles, left, mirror, ROWS, GROUP, DECAY, DECAY_GRADIENT, RAGGED, WINDOW, PLANNED, CAUSAL, SIDES,
    )  # fmt: skip

    gl.warp_specialize(
        [
            (
                _consume,
                (
                    sizes, buffers, dq_desc, dk_desc, rates, rate_stride, local, last_reset, next_reset, row_sums,
                    column_sums, rate_sums, scale, 0, D,
                ),
            ),
            (
                _consume,
                (
                    sizes, buffers, dq_desc, dk_desc, rates, rate_stride, local, last_reset, next_reset, row_sums,
                    column_sums, rate_sums, scale, 1, D,
                ),
            ),
            (
                produce,
                (
                    sizes, buffers, counters, q_desc, k_desc, v_desc, d_out_desc, terms_desc, dv_desc, zeros_desc,
                    rates, rate_stride, base, last_reset, next_reset, D,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
    # to its end, or Triton gives its memory to something else where nobody waits for it (rings.make_ring)
    mbarrier.invalidate(buffers.d_scores_read)
