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
outweighs a row's edge tiles by 2^64, or P V overflows, which large values do before), the producer sends the item
again, and every tile is taken for an edge, with P so small that nothing overflows.

Every warpgroup runs a copy of this code, and short items wait for instructions to arrive. So whole tiles have a loop of
their own, half as long as that of edge tiles and without a branch, and what few rows need (their own α, for a
log-sum-exp that somebody asked for; their first key, where it is in the tile) stays out of the way.

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

from decayattn.backends.hopper.common import copy_engine
from decayattn.backends.hopper.common.copy_engine import aggregate
from decayattn.backends.hopper.common.fragments import (
    DEPTH,
    SHARES,
    among_columns,
    bits_before,
    by_threads,
    common_columns,
    from_threads,
    ones_of_parts,
    shares,
    where_bits,
)
from decayattn.backends.hopper.common.rings import allocate_words, make_ring, stage
from decayattn.backends.hopper.common.tile_table import Place, allocate_tiles, coordinates, flat
from decayattn.backends.hopper.forward.exchange import (
    CAREFUL,
    END,
    SLOTS,
    WARPGROUPS_PADDED,
    WARPS,
    WORDS,
    Buffers,
    allocate_beta,
    draw,
    drawn_item,
    least,
    own,
    state_of,
)
from decayattn.backends.hopper.forward.items import KEYS, ROWS, Decay, Sizes, Walk
from decayattn.backends.hopper.forward.producer import produce
from decayattn.backends.runtime.dependent_launch import wait_for_launch_before
from decayattn.backends.tiles.scores import LN2, finite_or_zero, probability, rescale
from decayattn.backends.tiles.visibility import tiles_between

# powers of two by which scores may outgrow a row's maximum before it moves: p stays far from float16's 2^16
LAG: gl.constexpr = gl.constexpr(8.0)
# what a row sums up to at most where nothing moved its maximum: far from float32's 2^128
MOST: gl.constexpr = gl.constexpr(2.0**64)
# powers of two by which p is made smaller where all tiles are edges: 2^24 keys, each of up to 2^LAG, sum up to 1 then,
# and P V to no more than the largest value
HEADROOM: gl.constexpr = gl.constexpr(32.0)


# ----------------------------------------------------------------------------------------------------------------------
# The consumers


@aggregate
class Side:
    """What rows see on one side of the diagonal: the largest first key, and which tiles all of them see whole."""

    first_max: gl.tensor
    whole_begin: gl.tensor
    whole_end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first_max, whole_begin, whole_end):
        self.first_max = first_max
        self.whole_begin = whole_begin
        self.whole_end = whole_end


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
        beta = buffers.beta.index(stage(n, buffers.keys.STAGES))
        score = warpgroup_mma(_ones(buffers, is_right, SCORE, CAUSAL), beta, score, is_async=True)
    elif KIND == "constant":
        beta = buffers.beta.index(stage(count, SLOTS))
        score = warpgroup_mma(_ones(buffers, is_right, SCORE, CAUSAL), beta, score, is_async=True)
    return score


@gluon.jit
def _base_difference(buffers, n, WARPGROUP: gl.constexpr, KIND: gl.constexpr):
    """α at the warpgroup's reference minus α at the start of the n-th tile: one number."""
    difference = 0.0
    if KIND != "none":
        difference = own(buffers.differences.index(stage(n, buffers.keys.STAGES)), WARPGROUP)
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
def _masked(score, rows, tile, is_right, BITS: gl.constexpr):
    """Scores of an edge tile, −inf where a row does not see the key.

    BITS: by tests of bits, which ptxas does for eight columns at once, and without a branch around code that no tile
    needs; but in the loop over tiles they cost it the registers with which P stays where it is.
    """
    SCORE: gl.constexpr = score.type.layout
    x = by_threads(score)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    end = rows.keys_end(is_right) - tile * KEYS
    if BITS:
        seen = bits_before(end, LAYOUT)
        if rows.HAS_FIRST:
            seldom = tile * KEYS < rows.first_max(is_right)
            if seldom:
                seen &= ~bits_before(rows.first_key(is_right) - tile * KEYS, LAYOUT)
        x = where_bits(seen, x)
    else:
        key = common_columns(x)
        x = gl.where(key < among_columns(end, x), x, float("-inf"))
        if rows.HAS_FIRST:
            seldom = tile * KEYS < rows.first_max(is_right)
            if seldom:
                x = gl.where(key >= among_columns(rows.first_key(is_right) - tile * KEYS, x), x, float("-inf"))
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
def _softmax(
    score, row_max, row_sum, difference, scale, buffers, count, EDGE: gl.constexpr, WIDE: gl.constexpr
):  # fmt: skip
    """Unnormalised p of a tile, the new (row_max, row_sum), and the factor for what was summed before, which nobody
    reads where no maximum is looked for.

    WIDE: p has the exponents of float32, so that only edge tiles look for a maximum. A row that has none yet gets
    p = inf, an overflow.
    """
    raised = difference
    if EDGE and WIDE:
        # an overflow stays one, whatever this tile moves the maximum by
        row_sum = gl.where(row_sum >= MOST, float("inf"), row_sum)
        # from memory: few tiles need it, and meanwhile no register has room for it
        raised += gl.where(state_of(buffers.drawn, count) == CAREFUL, HEADROOM, 0.0)
    new_max, anchor = row_max, row_max
    correction = row_max
    if EDGE or not WIDE:
        new_max, anchor = _anchored(score, row_max, raised, scale)
        correction = rescale(row_max, anchor)
        row_sum *= gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, SHARES), assert_trivial=True), 1)
    p = probability(score * scale, gl.expand_dims(anchor - difference, 1))
    row_sum += shares(by_threads(p))
    return p, new_max, row_sum, correction


@gluon.jit
def _are_finite(out):
    """(rows, 4): whether the numbers that a thread has of a row are finite, and not beyond 2^64: two of them share an
    instruction, which adds up their products."""
    even, odd = gl.split(by_threads(out))
    return gl.abs(gl.sum(even * odd, 1)) < float("inf")


@aggregate
class Rows:
    """A warpgroup's rows of an item: where their queries are, and in which order they see which tiles; n_end is the end
    of their tiles among those of all items, of which the item's first is `sent`."""

    q: gl.shared_memory_descriptor
    count: gl.tensor
    sent: gl.tensor
    n_end: gl.tensor
    walk: Walk
    left: Side
    right: Side
    position: gl.tensor
    place: Place
    decay: Decay
    HAS_FIRST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, count, sent, n_end, walk, left, right, position, place, decay):
        self.q = q
        self.count = count
        self.sent = sent
        self.n_end = n_end
        self.walk = walk
        self.left = left
        self.right = right
        self.position = position
        self.place = place
        self.decay = decay
        # whether a row can have a first key other than 0
        self.HAS_FIRST = gl.constexpr(decay.KIND == "scalar" or decay.HAS_LEFT or not decay.CAUSAL)

    @gluon.jit
    def first_max(self, is_right):
        """The largest first key that a row sees on one side of the diagonal."""
        first_max = self.left.first_max
        if not self.decay.CAUSAL:
            first_max = gl.where(is_right, self.right.first_max, first_max)
        return first_max

    @gluon.jit
    def first_key(self, is_right):
        """The first key that each row sees on one side of the diagonal."""
        first = self.decay.first_key(self.position)
        if not self.decay.CAUSAL:
            first = gl.where(is_right, self.position + 1, first)
        return first

    @gluon.jit
    def keys_end(self, is_right):
        """Where the keys end that each row sees on one side of the diagonal."""
        end = self.position + 1
        if not self.decay.CAUSAL:
            end = gl.where(is_right, self.decay.keys_end(self.position, self.place.key_length), end)
        return end


@gluon.jit
def _next_tile(
    buffers, rows, n, acc, p, row_max, row_sum, scale, zero, WARPGROUP: gl.constexpr, EDGE: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """(acc, p, row_max, row_sum) with P V of the tile before added, and P of the n-th."""
    SCORE: gl.constexpr = zero.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    P: gl.constexpr = p.type.layout
    KIND: gl.constexpr = rows.decay.KIND
    CAUSAL: gl.constexpr = rows.decay.CAUSAL
    keys, values = buffers.keys, buffers.values
    tile, is_right = rows.walk.tile(n - rows.sent), rows.walk.is_right(n - rows.sent)
    # the scores of this tile while P V of the tile before it runs
    score = _start_scores(rows.q, buffers, n, rows.count, zero, is_right, KIND, CAUSAL)
    difference = _base_difference(buffers, n, WARPGROUP, KIND)
    if not CAUSAL and KIND != "none":
        # the other sign, and of a row's α, too, which is left out as if it had that of the left side
        row_alpha = buffers.row_alphas.index(WARPGROUP).load(ROW)
        difference = gl.where(is_right, -(difference + 2 * row_alpha), difference)
    values.wait_ready(n - 1)
    acc = warpgroup_mma(p, flat(values.tile(n - 1)), acc, is_async=True)
    score = warpgroup_mma_wait(1, (score,))
    keys.release(n)
    if EDGE:
        score = _masked(score, rows, tile, is_right, False)
    next_p, row_max, row_sum, correction = _softmax(
        score, row_max, row_sum, difference, scale, buffers, rows.count, EDGE, WIDE
    )
    # ptxas would hoist the wait for P V above the exponentials; a store that needs their sum keeps it below
    buffers.fences.index(WARPGROUP).store(row_sum)
    keys.wait_ready(n + 1, n + 1 < rows.n_end)
    acc = warpgroup_mma_wait(0, (acc,))
    values.release(n - 1)
    if EDGE or not WIDE:
        acc = _rescale(acc, correction, acc.shape[1])
    return acc, gl.convert_layout(next_p.to(p.dtype), P), row_max, row_sum


@gluon.jit
def _consume(
    buffers, sizes, decay, out_desc, lse, row_references, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, WITH_LSE: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: 64 query rows of every item through the keys that they see."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    KIND: gl.constexpr = decay.KIND
    CAUSAL: gl.constexpr = decay.CAUSAL
    queries, keys, values = buffers.queries, buffers.keys, buffers.values
    WIDE: gl.constexpr = queries.tiles.dtype == gl.bfloat16
    # whether the rows' own α is needed
    ROW_ALPHA: gl.constexpr = KIND != "none" and (WITH_LSE or not CAUSAL)
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    row_alphas = buffers.row_alphas.index(WARPGROUP)
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
            first_min = own(buffers.firsts.index(stage(count, SLOTS) * 2), WARPGROUP)
            first_max = own(buffers.firsts.index(stage(count, SLOTS) * 2 + 1), WARPGROUP)
            tile_end = found.tile_end(start, ROWS)
            # a tile that ends with the first row's own key is an edge tile too: no row is without a maximum after them
            own_min = gl.maximum(start + first_position, 0)
            begin, whole_begin, whole_end, _ = tiles_between(first_min, first_max, own_min, tile_end * KEYS, KEYS)
            whole_end = gl.where(state == CAREFUL, whole_begin, whole_end)
            if ROW_ALPHA:
                # on its way while the first tile is waited for
                row_alpha = head_decay.row_alpha(position, found.reference(start), head_decay.rate(head))
            walk = Walk(item_end, tiles, item_end, True)
            left = Side(first_max, whole_begin, whole_end)
            right = left
            visits = item_end - begin
            if not CAUSAL:
                item_begin = least(buffers.firsts.index(stage(count, SLOTS) * 2)) // KEYS
                walk = Walk(item_end, item_end - item_begin, found.first_right_key() // KEYS, False)
                end_min = own(buffers.ends.index(stage(count, SLOTS) * 2), WARPGROUP)
                end_max = own(buffers.ends.index(stage(count, SLOTS) * 2 + 1), WARPGROUP)
                # the first tile is an edge tile, too: rows before all keys have no other
                after_own = gl.maximum(final_row + first_position, 0) + 1
                _, right_begin, right_end, _ = tiles_between(0, after_own, end_min, end_max, KEYS)
                right_end = gl.where(state == CAREFUL, right_begin, right_end)
                right = Side(after_own, right_begin, right_end)
                # what only other warpgroups see is visited, and masked, but not after this one's last tile
                visits = walk.left_visits + gl.maximum(gl.cdiv(end_max, KEYS) - walk.right_begin, 0)
            n_end = sent + visits
            # n counts the tiles of all items; an item is walked from item_end down (and then up)
            n_begin = item_end - tile_end
            for n in range(sent, sent + n_begin):
                keys.skip(n)
                values.skip(n)
            n = sent + n_begin
            queries.wait_ready(count)
            keys.wait_ready(n)
            q = flat(queries.tiles.index(stage(count, SLOTS) * WARPGROUPS + WARPGROUP))
            rows = Rows(q, count, sent, n_end, walk, left, right, position, place, head_decay)
            score = _start_scores(q, buffers, n, count, zero, walk.is_right(n_begin), KIND, CAUSAL)
            difference = _base_difference(buffers, n, WARPGROUP, KIND)
            # out of the item before stood in its q
            tma.store_wait(0)
            queries.release(count - 1, count > 0)
            score = warpgroup_mma_wait(0, (score,))
            keys.release(n)
            row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            row_sum = gl.zeros([ROWS, 4], gl.float32, SHARES)
            score = _masked(score, rows, tile_end - 1, False, True)
            p, row_max, row_sum, _ = _softmax(
                score, row_max, row_sum, difference, scale, buffers, count, True, WIDE
            )
            if ROW_ALPHA:
                # for the end, and out of the registers
                row_alphas.store(row_alpha.sum())
            p = gl.convert_layout(p.to(q.dtype), P)
            acc = gl.zeros([ROWS, D], gl.float32, ACC)
            keys.wait_ready(n + 1, n + 1 < n_end)
            n += 1
            # edge tiles and whole ones after them, left of the diagonal; the same right of it; then edge tiles
            whole = gl.maximum(sent + item_end - whole_end, n)
            edge = gl.maximum(sent + item_end - whole_begin, whole)
            comes_right = not CAUSAL
            while n < n_end:
                for m in range(n, whole):
                    acc, p, row_max, row_sum = _next_tile(
                        buffers, rows, m, acc, p, row_max, row_sum, scale, zero, WARPGROUP, True, WIDE
                    )
                for m in range(whole, edge):
                    acc, p, row_max, row_sum = _next_tile(
                        buffers, rows, m, acc, p, row_max, row_sum, scale, zero, WARPGROUP, False, WIDE
                    )
                n = edge
                whole, edge = n_end, n_end
                if not CAUSAL:
                    if comes_right:
                        right_n = sent + walk.left_visits
                        whole = gl.maximum(right_n + right.whole_begin - walk.right_begin, n)
                        edge = gl.maximum(right_n + right.whole_end - walk.right_begin, whole)
                    comes_right = False
            values.wait_ready(n_end - 1)
            acc = warpgroup_mma(p, flat(values.tile(n_end - 1)), acc, is_async=True)

            total = gl.convert_layout(gl.sum(row_sum, 1), ROW, assert_trivial=True)
            # a row that saw no key: total 0 gives out 0 and lse −inf
            seen = total > 0
            # beyond MOST a sum may be wrong; a NaN is an overflow that a later tile brought to 0 times infinity
            fits = total < MOST
            total = gl.where(seen, total, 1.0)
            factor = 1.0 / total
            if WIDE:
                # with its sum, out is wrong, too: it becomes NaN
                factor = gl.where(fits, factor, float("nan"))
            row_reference = row_max + gl.log2(total)
            if ROW_ALPHA and not CAUSAL:
                # a row's α, whose sign differs between its keys, does not cancel in a backward's scores either
                row_reference += row_alphas.load(ROW)
            row = start + gl.arange(0, ROWS, ROW)
            here = sizes.rows(found) + row
            inside = row < query_length
            gl.store(row_references + here, gl.where(seen, row_reference, float("inf")), mask=inside)
            if WITH_LSE:
                row_lse = row_reference
                if ROW_ALPHA and CAUSAL:
                    row_lse += row_alphas.load(ROW)
                gl.store(lse + here, gl.where(seen, row_lse * LN2, float("-inf")), mask=inside)

            acc = warpgroup_mma_wait(0, (acc,))
            values.release(n_end - 1)
            acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, ACC)), 1)
            if WIDE:
                # of each warp, whether out is wrong in a row
                wrong = gl.max(gl.where(_are_finite(acc), 0, 1).reshape([WARPS, ROWS // WARPS * 4]), 1)
                overflows.store(gl.where(state_of(buffers.drawn, count) == CAREFUL, 0, wrong))
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
    WINDOW: gl.constexpr, PLANNED: gl.constexpr, WITH_LSE: gl.constexpr, D: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
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
    row_alphas = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, ROWS], WORD)
    differences = gl.allocate_shared_memory(gl.float32, [STAGES, WARPGROUPS_PADDED], WORD)
    firsts = gl.allocate_shared_memory(gl.int32, [SLOTS * 2, WARPGROUPS_PADDED], WORD)
    ends, beta, signs = firsts, q_tiles, q_tiles
    if not CAUSAL:
        ends = gl.allocate_shared_memory(gl.int32, [SLOTS * 2, WARPGROUPS_PADDED], WORD)
    if KIND != "none":
        beta = allocate_beta(beta_desc, STAGES if KIND == "scalar" else SLOTS)
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
        make_ring(v_tiles, STAGES, WARPGROUPS), make_ring(drawn, SLOTS, 0), beta, differences, firsts,
        ends, signs, overflows, fences, row_alphas,
    )  # fmt: skip

    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 0, 2, WITH_LSE, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 1, 2, WITH_LSE, D)),
                (produce, (buffers, sizes, decay, counter, q_desc, k_desc, v_desc, beta_desc, 2)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 0, 3, WITH_LSE, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 1, 3, WITH_LSE, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 2, 3, WITH_LSE, D)),
                (produce, (buffers, sizes, decay, counter, q_desc, k_desc, v_desc, beta_desc, 3)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
