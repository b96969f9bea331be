"""Forward for sm_90: warp-specialised and persistent.

An item of work is 64 query rows per consumer warpgroup of one head. A producer warp (producer.py) draws items from a
counter, and streams their queries and their key and value tiles through rings of shared-memory buffers by TMA, so that
the next item's tiles arrive while this one's results leave. Every consumer warpgroup walks the keys that its rows see,
from the tile of their own down to the first, and, not causal, from there up to the last (items.Walk), with an online
softmax whose exponentials overlap the product P V of the tile before (FlashAttention 3's order, Shah et al., arXiv
2407.08608). What passes between them is in exchange.py.

A row's maximum is that of its edge tiles, among them the one that has its own key. In bfloat16, whose exponents are
float32's, whole tiles do not look for another: their exponentials begin as soon as the scores are there, and a fifth of
the instructions is not needed. What was summed tells at the end of an item whether that went well; if not (a far key
outweighs a row's edge tiles by 2^64), the producer sends the item again, and every tile is taken for an edge.

The decay costs no instruction per score: β, −α_j of a key relative to its block and divided by the scale, stands in
three bfloat16 rows beside the keys (high, middle and low bits), and one more matrix instruction adds ones × β to Q Kᵀ.
What a row and a tile share, α_i and the difference of two block bases, joins the row maximum and the log-sum-exp. To
the right of the diagonal all this has the other sign, and the α_i that is left out of the row maximum counts twice.

Tiles, per warpgroup: q, out (64, D) · k, v (KEYS, D) · beta (16, KEYS) · score, p (64, KEYS) ·
acc (64, D) · row_sum (64, 4), the partial sums of the four threads that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from decayattn.backends.dependent_launch import wait_for_launch_before
from decayattn.backends.hopper import copy_engine
from decayattn.backends.hopper.copy_engine import aggregate
from decayattn.backends.hopper.exchange import (
    CAREFUL,
    END,
    SLOTS,
    WARPGROUPS_PADDED,
    WARPS,
    WORDS,
    Buffers,
    draw,
    drawn_item,
    least,
    own,
)
from decayattn.backends.hopper.fragments import (
    DEPTH,
    SHARES,
    among_columns,
    by_threads,
    common_columns,
    from_threads,
    ones_of_parts,
    shares,
)
from decayattn.backends.hopper.items import KEYS, ROWS, Decay, Sizes, Walk
from decayattn.backends.hopper.producer import produce
from decayattn.backends.hopper.rings import allocate_words, make_ring, stage
from decayattn.backends.hopper.tile_table import allocate_tiles, coordinates, flat
from decayattn.backends.tile_math import LN2, finite_or_zero, probability, rescale
from decayattn.backends.tile_range import tiles_between

# powers of two by which scores may outgrow a row's maximum before it moves: p stays far from float16's 2^16
LAG: gl.constexpr = gl.constexpr(8.0)
# what a row sums up to at most where nothing moved its maximum: far from float32's 2^128, with room for large values
MOST: gl.constexpr = gl.constexpr(2.0**64)


# ----------------------------------------------------------------------------------------------------------------------
# The consumers


@aggregate
class Side:
    """What rows see on one side of the diagonal: each the keys from `first` to `last`, and which tiles all of them see
    whole; first_max, the largest first key."""

    first: gl.tensor
    first_max: gl.tensor
    last: gl.tensor
    whole_begin: gl.tensor
    whole_end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, first_max, last, whole_begin, whole_end):
        self.first = first
        self.first_max = first_max
        self.last = last
        self.whole_begin = whole_begin
        self.whole_end = whole_end

    @gluon.jit
    def or_right(self, right, is_right):
        return Side(
            gl.where(is_right, right.first, self.first), gl.where(is_right, right.first_max, self.first_max),
            gl.where(is_right, right.last, self.last), gl.where(is_right, right.whole_begin, self.whole_begin),
            gl.where(is_right, right.whole_end, self.whole_end),
        )  # fmt: skip


@gluon.jit
def _ones(buffers, is_right, SCORE: gl.constexpr, CAUSAL: gl.constexpr):
    """What adds up the decay of the keys: to the right of the diagonal, with the other sign."""
    if CAUSAL:
        ones = ones_of_parts(0, SCORE)
    else:
        # out of shared memory: for these, too, there are not enough registers
        ones = buffers.signs.index(is_right.to(gl.int32))
    return ones


@gluon.jit
def _start_scores(q, buffers, n, count, zero, is_right, KIND: gl.constexpr, CAUSAL: gl.constexpr):
    """Issue q·kᵀ of the n-th tile, with the decay's bias; divided by the scale, like everything before the softmax."""
    SCORE: gl.constexpr = zero.type.layout
    kT = flat(buffers.keys.tile(n)).permute((1, 0))
    score = warpgroup_mma(q, kT, zero, use_acc=False, is_async=True)
    # after the products: a strong decay is large, and every instruction that adds to it rounds it
    if KIND == "scalar":
        beta = flat(buffers.beta.index(stage(n, buffers.keys.STAGES)))
        score = warpgroup_mma(_ones(buffers, is_right, SCORE, CAUSAL), beta, score, is_async=True)
    elif KIND == "constant":
        beta = flat(buffers.beta.index(stage(count, SLOTS)))
        score = warpgroup_mma(_ones(buffers, is_right, SCORE, CAUSAL), beta, score, is_async=True)
    return score


@gluon.jit
def _base_difference(buffers, n, tile, reference, rate, WARPGROUP: gl.constexpr, KIND: gl.constexpr):
    """α at the warpgroup's reference minus α at the start of the n-th tile: one number."""
    if KIND == "scalar":
        difference = own(buffers.differences.index(stage(n, buffers.keys.STAGES)), WARPGROUP)
    elif KIND == "constant":
        difference = (reference - tile * KEYS).to(gl.float32) * rate
    else:
        difference = 0.0
    return difference


def _rescale_assembly(width):
    """acc · correction for the `width` accumulators of a thread, left out where no thread of the warp has a correction.

    Operands: the results; the accumulators, in the results' registers; the correction of each. A thread has two rows,
    which alternate every two accumulators.
    """
    first_row, second_row = f"${2 * width}", f"${2 * width + 2}"
    lines = [
        "{",
        ".reg .pred changed, any;",
        f"setp.neu.f32 changed, {first_row}, 0f3F800000;",
        f"setp.neu.or.f32 changed, {second_row}, 0f3F800000, changed;",
        "vote.sync.any.pred any, changed, 0xffffffff;",
        "@!any bra DONE;",
        *(f"mul.f32 ${n}, ${n}, {second_row if n // 2 % 2 else first_row};" for n in range(width)),
        "DONE:",
        "}",
    ]
    constraints = ["=r"] * width + [str(n) for n in range(width)] + ["r"] * width
    return "\n".join(lines), ",".join(constraints)


RESCALE_32: gl.constexpr = gl.constexpr(_rescale_assembly(32))
RESCALE_64: gl.constexpr = gl.constexpr(_rescale_assembly(64))


@gluon.jit
def _rescale(acc, correction, D: gl.constexpr):
    """acc · correction, for nothing where the correction is 1."""
    correction = gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout)), 1)
    _, factors = gl.broadcast(acc, correction)
    RESCALE: gl.constexpr = RESCALE_32 if D == 64 else RESCALE_64
    return gl.inline_asm_elementwise(
        RESCALE[0], RESCALE[1], [acc, factors], dtype=gl.float32, is_pure=True, pack=D // 2
    )


@gluon.jit
def _masked(score, tile, side, HAS_FIRST: gl.constexpr):
    """Scores of an edge tile, −inf where a row does not see the key."""
    SCORE: gl.constexpr = score.type.layout
    x = by_threads(score)
    key = common_columns(x)
    x = gl.where(key <= among_columns(side.last - tile * KEYS, x), x, float("-inf"))
    if HAS_FIRST:
        seldom = tile * KEYS < side.first_max
        if seldom:
            # a copy that the compiler must leave in its branch, and with it what it is for
            first = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [side.first], gl.int32, is_pure=False, pack=1)
            x = gl.where(key >= among_columns(first - tile * KEYS, x), x, float("-inf"))
    return from_threads(x, SCORE)


@gluon.jit
def _anchored(score, row_max, difference, scale):
    """The new row_max, and what exponents are taken relative to.

    row_max is a maximum that lags behind: it moves when a row's scores grow by more than LAG, so that most tiles
    correct nothing. p is at most 2^LAG then.
    """
    tile_max = gl.max(score, 1) * scale + difference
    new_max = gl.where(tile_max > row_max + LAG, tile_max, row_max)
    return new_max, finite_or_zero(new_max)


@gluon.jit
def _softmax(score, row_max, row_sum, difference, scale, tile, side, edge, HAS_FIRST: gl.constexpr, WIDE: gl.constexpr):
    """Unnormalised p of a tile, the new (row_max, row_sum), and the factor for what was summed before.

    WIDE: p has the exponents of float32, so that only edge tiles look for a maximum. A row that has none yet gets
    p = inf, an overflow.
    """
    new_max = row_max
    anchor = row_max
    if WIDE:
        if edge:
            score = _masked(score, tile, side, HAS_FIRST)
            new_max, anchor = _anchored(score, row_max, difference, scale)
            # an overflow stays one, whatever this tile moves the maximum by
            row_sum = gl.where(row_sum >= MOST, float("inf"), row_sum)
    else:
        if edge:
            score = _masked(score, tile, side, HAS_FIRST)
        new_max, anchor = _anchored(score, row_max, difference, scale)
    p = probability(score * scale, gl.expand_dims(anchor - difference, 1))
    correction = rescale(row_max, anchor)
    row_sum = row_sum * gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, SHARES), assert_trivial=True), 1)
    row_sum += shares(by_threads(p))
    return p, new_max, row_sum, correction


@gluon.jit
def _consume(
    buffers, sizes, decay, out_desc, lse, row_references, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: 64 query rows of every item through the keys that they see."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    KIND: gl.constexpr = decay.KIND
    CAUSAL: gl.constexpr = decay.CAUSAL
    # whether a row can have a first key other than 0
    HAS_FIRST: gl.constexpr = KIND == "scalar" or decay.WINDOW or not CAUSAL
    queries, keys, values = buffers.queries, buffers.keys, buffers.values
    WIDE: gl.constexpr = queries.tiles.dtype == gl.bfloat16
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    fence = buffers.fences.index(WARPGROUP)
    state = draw(buffers.drawn, 0)
    count = state * 0
    sent = state * 0
    while state != END:
        found, tiles, item_end = drawn_item(buffers.drawn, count, sizes)
        place, head = found.place, found.head
        query_length, first_position = place.query_length, found.first_position()
        start = place.start + WARPGROUP * ROWS
        overflows = buffers.overflows.index(stage(count, SLOTS) * WARPGROUPS_PADDED + WARPGROUP)
        if start < query_length:
            head_decay = decay.of(sizes, found)
            # rows past the end repeat the last one, and are never stored
            final_row = gl.minimum(start + ROWS, query_length) - 1
            position = gl.minimum(start + gl.arange(0, ROWS, ROW), final_row) + first_position
            first = head_decay.first_key(position)
            first_min = own(buffers.firsts.index(stage(count, SLOTS) * 2), WARPGROUP)
            first_max = own(buffers.firsts.index(stage(count, SLOTS) * 2 + 1), WARPGROUP)
            tile_end = found.tile_end(start, ROWS)
            # a tile that ends with the first row's own key is an edge tile too: no row is without a maximum after them
            own_min = gl.maximum(start + first_position, 0)
            begin, whole_begin, whole_end, _ = tiles_between(first_min, first_max, own_min, tile_end * KEYS, KEYS)
            whole_end = gl.where(state == CAREFUL, whole_begin, whole_end)
            reference = found.reference(start)
            rate = head_decay.rate(head)
            left = Side(first, first_max, position, whole_begin, whole_end)
            walk = Walk(item_end, tiles, item_end, True)
            if not CAUSAL:
                item_begin = least(buffers.firsts.index(stage(count, SLOTS) * 2)) // KEYS
                walk = Walk(item_end, item_end - item_begin, found.first_right_key() // KEYS, False)
                end = head_decay.keys_end(position, place.key_length)
                end_min = own(buffers.ends.index(stage(count, SLOTS) * 2), WARPGROUP)
                end_max = own(buffers.ends.index(stage(count, SLOTS) * 2 + 1), WARPGROUP)
                # the first tile is an edge tile, too: rows before all keys have no other
                after_own = gl.maximum(final_row + first_position, 0) + 1
                _, right_begin, right_end, _ = tiles_between(0, after_own, end_min, end_max, KEYS)
                right_end = gl.where(state == CAREFUL, right_begin, right_end)
                right = Side(position + 1, after_own, end - 1, right_begin, right_end)
                # what only other warpgroups see is visited, and masked, but not after this one's last tile
                right_visits = gl.maximum(gl.cdiv(end_max, KEYS) - walk.right_begin, 0)
                row_alpha = head_decay.row_alpha(position, reference, rate)

            # n counts the tiles of all items; an item is walked from item_end down (and then up)
            n_begin = item_end - tile_end
            for n in range(sent, sent + n_begin):
                keys.skip(n)
                values.skip(n)
            n = sent + n_begin
            queries.wait_ready(count)
            keys.wait_ready(n)
            q = flat(queries.tiles.index(stage(count, SLOTS) * WARPGROUPS + WARPGROUP))
            score = _start_scores(q, buffers, n, count, zero, walk.is_right(n_begin), KIND, CAUSAL)
            difference = _base_difference(buffers, n, tile_end - 1, reference, rate, WARPGROUP, KIND)
            # out of the item before stood in its q
            tma.store_wait(0)
            queries.release(count - 1, count > 0)
            score = warpgroup_mma_wait(0, (score,))
            keys.release(n)
            row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            row_sum = gl.zeros([ROWS, 4], gl.float32, SHARES)
            p, row_max, row_sum, _ = _softmax(
                score, row_max, row_sum, difference, scale, tile_end - 1, left, True, HAS_FIRST, WIDE
            )
            p = gl.convert_layout(p.to(q.dtype), P)
            acc = gl.zeros([ROWS, D], gl.float32, ACC)
            if CAUSAL:
                n_end = sent + item_end - begin
            else:
                n_end = sent + walk.left_visits + right_visits
            keys.wait_ready(n + 1, n + 1 < n_end)
            for n in range(sent + n_begin + 1, n_end):
                # the scores of this tile while P V of the tile before it runs
                tile = walk.tile(n - sent)
                is_right = walk.is_right(n - sent)
                score = _start_scores(q, buffers, n, count, zero, is_right, KIND, CAUSAL)
                shared = _base_difference(buffers, n, tile, reference, rate, WARPGROUP, KIND)
                side = left
                if not CAUSAL:
                    side = left.or_right(right, is_right)
                    if KIND != "none":
                        # the other sign, and of a row's α, too, which is left out as if it had that of the left side
                        shared = gl.where(is_right, -(shared + 2 * row_alpha), shared)
                values.wait_ready(n - 1)
                acc = warpgroup_mma(p, flat(values.tile(n - 1)), acc, is_async=True)
                score = warpgroup_mma_wait(1, (score,))
                keys.release(n)
                edge = (tile >= side.whole_end) | (tile < side.whole_begin)
                next_p, row_max, row_sum, correction = _softmax(
                    score, row_max, row_sum, shared, scale, tile, side, edge, HAS_FIRST, WIDE
                )
                # ptxas would hoist the wait for P V above the exponentials; a store that needs their sum keeps it below
                fence.store(row_sum)
                keys.wait_ready(n + 1, n + 1 < n_end)
                acc = warpgroup_mma_wait(0, (acc,))
                values.release(n - 1)
                acc = _rescale(acc, correction, D)
                p = gl.convert_layout(next_p.to(q.dtype), P)
            values.wait_ready(n_end - 1)
            acc = warpgroup_mma(p, flat(values.tile(n_end - 1)), acc, is_async=True)

            total = gl.convert_layout(gl.sum(row_sum, 1), ROW, assert_trivial=True)
            if WIDE:
                # of each warp, whether it has a sum that is not below MOST: large, infinite, or a NaN
                high = gl.max(gl.where(total < MOST, 0, 1).reshape([WARPS, ROWS // WARPS]), 1)
                overflows.store(gl.where(state == CAREFUL, 0, high))
            # a row that saw no key: total 0 gives out 0 and lse −inf
            seen = total > 0
            total = gl.where(seen, total, 1.0)
            row_reference = row_max + gl.log2(total)
            if CAUSAL:
                row_lse = (row_reference + head_decay.row_alpha(position, reference, rate)) * LN2
            else:
                # a row's α, whose sign differs between its keys, does not cancel in a backward's scores either
                row_reference += row_alpha
                row_lse = row_reference * LN2
            row = start + gl.arange(0, ROWS, ROW)
            here = sizes.rows(found) + row
            inside = row < query_length
            gl.store(row_references + here, gl.where(seen, row_reference, float("inf")), mask=inside)
            gl.store(lse + here, gl.where(seen, row_lse, float("-inf")), mask=inside)

            acc = warpgroup_mma_wait(0, (acc,))
            values.release(n_end - 1)
            acc = acc * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, ACC)), 1)
            # this warpgroup's q is read, and out has its shape
            q.store(acc.to(q.dtype))
            fence_async_shared()
            if gl.max(overflows.load(gl.BlockedLayout([WARPS], [32], [WARPS], [0])), 0) == 0:
                out = queries.tiles.index(stage(count, SLOTS) * WARPGROUPS + WARPGROUP)
                at = coordinates(
                    place.entry, head, start, place.first_row, query_length, sizes.query_axis, sizes.RAGGED
                )
                copy_engine.store(out_desc, at, out)
            for n in range(n_end, sent + tiles):
                keys.skip(n)
                values.skip(n)
        else:
            # no rows here: let the other warpgroups have their tiles
            overflows.store(gl.full([WARPS], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
            tma.store_wait(0)
            queries.release(count - 1, count > 0)
            for n in range(sent, sent + tiles):
                keys.skip(n)
                values.skip(n)
        sent += tiles
        count += 1
        state = draw(buffers.drawn, count)
    tma.store_wait(0)


# ----------------------------------------------------------------------------------------------------------------------
# The kernel


_INTEGERS = [
    "rate_stride", "left", "items", "row_tiles", "heads", "group", "together", "query_length", "key_length", "blocks",
    "granules",
]  # fmt: skip


@gluon.jit(do_not_specialize=_INTEGERS)
def forward_kernel(
    q_desc, k_desc, v_desc, beta_desc, out_desc, lse, row_references, rates, local, bases, last_reset, next_reset,
    plan, counter, table, scale, rate_stride, left, items, row_tiles, heads, group, together, query_length, key_length,
    blocks, granules, KIND: gl.constexpr, RAGGED: gl.constexpr, PACKED: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, PLANNED: gl.constexpr, D: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out = softmax(s q·kᵀ + decay) v and its log-sum-exp. May be launched before the launch before it has ended.

    scale is s·log2(e), positive; counter is 0, and not read where every program has one item; beta_desc is not
    read without a decay; table, of tiles of rows, is not read unless RAGGED, next_reset not if CAUSAL, left not unless
    WINDOW, and plan, the first block of every granule, not unless PLANNED; the last two need CAUSAL. query_length,
    key_length, blocks, those of the decay prefix, and granules are of the axes on which the sequences lie.
    """
    decay = Decay(rates, rate_stride, local, bases, last_reset, next_reset, left, plan, KIND, CAUSAL, WINDOW, PLANNED)

    q_tiles = allocate_tiles(q_desc, SLOTS * WARPGROUPS)
    k_tiles = allocate_tiles(k_desc, STAGES)
    v_tiles = allocate_tiles(v_desc, STAGES)
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    drawn = allocate_words(SLOTS * WORDS)
    overflows = gl.allocate_shared_memory(gl.int32, [SLOTS * WARPGROUPS_PADDED, WARPS], WORD)
    for n in gl.static_range(SLOTS * WARPGROUPS_PADDED):
        overflows.index(n).store(gl.full([WARPS], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    FENCE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    fences = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, ROWS, 4], FENCE)
    differences = gl.allocate_shared_memory(gl.float32, [STAGES, WARPGROUPS_PADDED], WORD)
    firsts = gl.allocate_shared_memory(gl.int32, [SLOTS * 2, WARPGROUPS_PADDED], WORD)
    ends, beta, signs = firsts, q_tiles, q_tiles
    if not CAUSAL:
        ends = gl.allocate_shared_memory(gl.int32, [SLOTS * 2, WARPGROUPS_PADDED], WORD)
    if KIND != "none":
        beta = allocate_tiles(beta_desc, STAGES if KIND == "scalar" else SLOTS)
        if not CAUSAL:
            SIGNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], gl.bfloat16)
            signs = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, DEPTH], SIGNS)
            ONES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
            signs.index(0).store(gl.full([ROWS, DEPTH], 1.0, gl.bfloat16, ONES))
            signs.index(1).store(gl.full([ROWS, DEPTH], -1.0, gl.bfloat16, ONES))
            fence_async_shared()
    wait_for_launch_before(items)
    if RAGGED:
        # the host only knows bounds
        row_tiles = gl.load(table)
        items = row_tiles * heads
    sizes = Sizes(
        items, row_tiles, heads, group, together, query_length, key_length, blocks, granules, table, RAGGED, PACKED
    )
    buffers = Buffers(
        make_ring(q_tiles, SLOTS, WARPGROUPS), make_ring(k_tiles, STAGES, WARPGROUPS),
        make_ring(v_tiles, STAGES, WARPGROUPS), make_ring(drawn, SLOTS, WARPGROUPS), beta, differences, firsts,
        ends, signs, overflows, fences,
    )  # fmt: skip

    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 0, 2, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 1, 2, D)),
                (produce, (buffers, sizes, decay, counter, q_desc, k_desc, v_desc, beta_desc, 2)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 0, 3, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 1, 3, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 2, 3, D)),
                (produce, (buffers, sizes, decay, counter, q_desc, k_desc, v_desc, beta_desc, 3)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
