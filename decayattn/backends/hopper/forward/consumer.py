"""The forward's consumers: warpgroups of 64 query rows that walk the keys of their rows with an online softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import (
    SHARES,
    WARPGROUP_ROWS,
    ones_of_splits,
    operand_layout,
    product_layout,
)
from decayattn.backends.hopper.common.pipelines import flat, stage
from decayattn.backends.hopper.forward.rows import Rows, masked
from decayattn.backends.hopper.forward.shared import (
    CAREFUL,
    END,
    FULL_BEGIN,
    FULL_END,
    VISITED_BEGIN,
    VISITED_END,
    WARPS,
    first_seen,
    published_work,
    seen_tile,
    select,
    wait_for_work,
)
from decayattn.backends.hopper.forward.softmax import (
    AHEAD,
    HEADROOM,
    SUM_LIMIT,
    are_finite,
    as_operand,
    log2_of_sum,
    reciprocal,
    rescale_accumulator,
    rounded,
    softmax,
)
from decayattn.backends.hopper.forward.work import Walk
from decayattn.backends.planning.offsets import row_pointers
from decayattn.backends.tiles.decay import row_anchor
from decayattn.backends.tiles.scores import LN2, LOG2E, with_sink

# columns of q and k per product, for tiles with more than 128: skips columns without values, and the matrix descriptors
# of all columns would spill 100 bytes
READ_STEP: gl.constexpr = gl.constexpr(64)


@gluon.jit
def _start_scores(q, shared, n, count, zero, is_right, row_scale, KIND: gl.constexpr, CAUSAL: gl.constexpr):
    """Issue q·kᵀ + β of the n-th tile: the scores divided by the scale.

    A scale per row may be 0, so β is not divided by it. Instead the warpgroup waits for q·kᵀ and scales it before it
    adds β.
    """
    SCORE: gl.constexpr = zero.type.layout
    k = flat(shared.keys.tile(n))
    if k.shape[1] <= 128:
        score = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        score = zero
        READ: gl.constexpr = shared.TILE.widths.read
        for begin in gl.static_range(0, READ, READ_STEP):
            kT = k.slice(begin, READ_STEP, 1).permute((1, 0))
            score = warpgroup_mma(q.slice(begin, READ_STEP, 1), kT, score, use_acc=begin > 0, is_async=True)
    if row_scale is not None:
        score = warpgroup_mma_wait(0, (score,)) * gl.expand_dims(row_scale, 1)
    # β comes last: a large β would round every product that is added after it to its own precision
    if KIND != "none":
        nth = stage(n, shared.keys.STAGES) if KIND == "scalar" else stage(count, shared.queries.STAGES)
        beta = shared.beta.index(nth)
        if CAUSAL:
            ones = ones_of_splits(0, SCORE)
        else:
            # minus ones right of the diagonal; from shared memory, because two operands do not fit in registers
            ones = shared.signs.index(is_right.to(gl.int32))
        score = warpgroup_mma(ones, beta, score, is_async=True)
    return score


@gluon.jit
def _base_difference(shared, n, WARPGROUP: gl.constexpr, KIND: gl.constexpr):
    """α at the warpgroup's anchor minus α at the start of the n-th tile: one value."""
    difference = 0.0
    if KIND != "none":
        difference = select(shared.differences.index(stage(n, shared.keys.STAGES)), WARPGROUP)
    return difference


@gluon.jit
def _full_begin(shared, rows, is_right, WARPGROUP: gl.constexpr):
    """Index of the first full tile on that side of the diagonal: no row of the warpgroup has its first key in it."""
    full_begin = seen_tile(shared.left, rows.count, FULL_BEGIN, WARPGROUP)
    if not rows.decay.MODES.causal:
        full_begin = gl.where(is_right, seen_tile(shared.right, rows.count, FULL_BEGIN, WARPGROUP), full_begin)
    return full_begin


@gluon.jit
def _next_tile(
    shared, rows, n, acc, p, row_max, row_sum, scale, row_scale, zero, WARPGROUP: gl.constexpr, PARTIAL: gl.constexpr,
    BFLOAT16: gl.constexpr,
):
    """Issue and use the scores of the n-th tile while P V of the previous tile is added to acc.

    Returns (acc, p, row_max, row_sum).
    """
    SCORE: gl.constexpr = zero.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    P: gl.constexpr = operand_layout(acc.type.layout)
    KIND: gl.constexpr = rows.decay.MODES.decay
    CAUSAL: gl.constexpr = rows.decay.MODES.causal
    keys, values = shared.keys, shared.values
    # With more than two stages, V of the previous tile is there already. A wait between the two products makes ptxas
    # 13.4 (Triton 3.9) move 12 registers of P in every iteration
    EARLY: gl.constexpr = values.STAGES > 2
    tile, is_right = rows.walk.tile(n - rows.sent), rows.walk.is_right(n - rows.sent)
    if EARLY:
        values.consumer_wait(n - 1)
    score = _start_scores(rows.q, shared, n, rows.count, zero, is_right, row_scale, KIND, CAUSAL)
    difference = _base_difference(shared, n, WARPGROUP, KIND)
    if not CAUSAL and KIND != "none":
        # Right of the diagonal the sign is reversed. The row maximum leaves out α of the row as if all its keys were on
        # the left, so α counts twice on the right
        row_alpha = shared.row_alphas.index(WARPGROUP).load(ROW)
        difference = gl.where(is_right, -(difference + 2 * row_alpha), difference)
    if not EARLY:
        values.consumer_wait(n - 1)
    acc = warpgroup_mma(as_operand(p, shared, P), flat(values.tile(n - 1)), acc, is_async=True)
    score = warpgroup_mma_wait(1, (score,))
    keys.consumer_release(n)
    if PARTIAL:
        full_begin = _full_begin(shared, rows, is_right, WARPGROUP)
        score = masked(score, rows, tile, is_right, full_begin, False)
    next_p, row_max, row_sum, correction = softmax(score, row_max, row_sum, difference, scale, None, PARTIAL, BFLOAT16)
    # ptxas would move the wait for P V above the exponentials; a store that needs their sum keeps it below them
    shared.fences.index(WARPGROUP).store(row_sum)
    keys.consumer_wait(n + 1, n + 1 < rows.n_end)
    acc = warpgroup_mma_wait(0, (acc,))
    values.consumer_release(n - 1)
    if PARTIAL or not BFLOAT16:
        acc = rescale_accumulator(acc, correction, acc.shape[1])
    return acc, rounded(next_p, shared, rows.count, PARTIAL), row_max, row_sum


@gluon.jit
def consume(consuming, WARPGROUP: gl.constexpr):
    """Run one consumer warpgroup: 64 query rows of every work tile, through the keys that they see.

    consuming: shared memory, schedule, decay; the descriptor of out, and pointers to lse and row_lse2; the sink (with
    it, lse must be given); scale and row_scales (forward_kernel).
    """
    shared, schedule, decay, outputs, sink, scales = consuming
    KEYS: gl.constexpr = schedule.TILE.keys
    SCORE: gl.constexpr = product_layout(KEYS)
    D: gl.constexpr = schedule.TILE.widths.v
    ACC: gl.constexpr = product_layout(D)
    P: gl.constexpr = operand_layout(ACC)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    KIND: gl.constexpr = decay.MODES.decay
    CAUSAL: gl.constexpr = decay.MODES.causal
    out_desc, row_outputs = outputs
    lse, row_lse2 = row_outputs
    scale, row_scales = scales
    queries, keys, values = shared.queries, shared.keys, shared.values
    BFLOAT16: gl.constexpr = queries.tiles.dtype == gl.bfloat16
    # two slots: one in use while TMA fills the other; with one slot, TMA waits until out has left
    TWO_SLOTS: gl.constexpr = queries.STAGES == 2
    # α of the rows is needed
    ROW_ALPHA: gl.constexpr = KIND != "none" and (lse is not None or not CAUSAL)
    zero = gl.zeros([WARPGROUP_ROWS, KEYS], gl.float32, SCORE)
    row_alphas = shared.row_alphas.index(WARPGROUP)
    state = wait_for_work(shared, 0)
    count = state * 0
    sent = state * 0
    while state != END:
        work, tiles, key_tile_end = published_work(shared, count, schedule)
        bounds, head = work.bounds, work.head
        query_length, first_position = bounds.query_length, bounds.first_position()
        start = bounds.start + WARPGROUP * WARPGROUP_ROWS
        overflow = shared.overflow(count, WARPGROUP)
        if start < query_length:
            head_decay = decay.of(work)
            # rows past the end repeat the last one, and are never stored
            final_row = gl.minimum(start + WARPGROUP_ROWS, query_length) - 1
            # assembly: LLVM would compute an expression again for the loops; Triton 3.8 then spills up to 44 bytes more
            row = gl.inline_asm_elementwise(
                "min.s32 $0, $1, $2;", "=r,r,r", [start + gl.arange(0, WARPGROUP_ROWS, ROW), final_row], gl.int32,
                is_pure=True, pack=1,
            )
            position = row + first_position
            tile_end = seen_tile(shared.left, count, VISITED_END, WARPGROUP)
            row_scale = None
            if row_scales is not None:
                # s·log2(e)
                row_scale = gl.load(row_pointers(row_scales, bounds.entry, head, bounds.first_row + row)) * LOG2E
            if ROW_ALPHA:
                # loaded while the warpgroup waits for the first tile
                row_alpha = head_decay.row_alpha(position, row_anchor(start, first_position), head_decay.rate(head))
            walk = Walk(schedule, key_tile_end, tiles, key_tile_end)
            visits = key_tile_end - seen_tile(shared.left, count, VISITED_BEGIN, WARPGROUP)
            if not CAUSAL:
                left_visits = key_tile_end - first_seen(shared.left, count)
                walk = Walk(schedule, key_tile_end, left_visits, work.first_right_key() // KEYS)
                # also visit tiles that only other warpgroups see, fully masked, up to this warpgroup's last tile
                right_end = seen_tile(shared.right, count, VISITED_END, WARPGROUP)
                visits = left_visits + gl.maximum(right_end - walk.right_begin, 0)
            n_end = sent + visits
            # n counts the visits of all work tiles; this warpgroup skips those before its own first tile
            n_begin = key_tile_end - tile_end
            shared.skip(sent, sent + n_begin)
            n = sent + n_begin
            queries.consumer_wait(count)
            keys.consumer_wait(n)
            q = flat(shared.query_tile(count, WARPGROUP))
            rows = Rows(q, count, sent, n_end, walk, position, bounds, head_decay)
            score = _start_scores(q, shared, n, count, zero, walk.is_right(n_begin), row_scale, KIND, CAUSAL)
            difference = _base_difference(shared, n, WARPGROUP, KIND)
            if TWO_SLOTS:
                # out of the last work tile has left the slot of its q
                tma.store_wait(0)
                queries.consumer_release(count - 1, count > 0)
            score = warpgroup_mma_wait(0, (score,))
            keys.consumer_release(n)
            row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, ROW)
            row_sum = gl.zeros([WARPGROUP_ROWS, 4], gl.float32, SHARES)
            full_begin = _full_begin(shared, rows, False, WARPGROUP)
            score = masked(score, rows, tile_end - 1, False, full_begin, True)
            ahead = None
            if BFLOAT16:
                ahead = gl.where(state == CAREFUL, 0.0, AHEAD)
            p, row_max, row_sum, _ = softmax(score, row_max, row_sum, difference, scale, ahead, True, BFLOAT16)
            if ROW_ALPHA:
                # stored until the end, so that it takes no registers in the loop
                row_alphas.store(row_alpha.sum())
            p = rounded(p, shared, count, True)
            acc = gl.zeros([WARPGROUP_ROWS, D], gl.float32, ACC)
            keys.consumer_wait(n + 1, n + 1 < n_end)
            n += 1
            # partial tiles, then full ones, left of the diagonal; not causal, the same on its right; then partial tiles
            full = gl.maximum(sent + key_tile_end - seen_tile(shared.left, count, FULL_END, WARPGROUP), n)
            partial = gl.maximum(sent + key_tile_end - seen_tile(shared.left, count, FULL_BEGIN, WARPGROUP), full)
            right_follows = not CAUSAL
            while n < n_end:
                for are_full in gl.static_range(2):
                    for m in range(full if are_full else n, partial if are_full else full):
                        acc, p, row_max, row_sum = _next_tile(
                            shared, rows, m, acc, p, row_max, row_sum, scale, row_scale, zero, WARPGROUP,
                            not are_full, BFLOAT16,
                        )
                n = partial
                full, partial = n_end, n_end
                if not CAUSAL:
                    if right_follows:
                        # index that a visit of tile 0 on that side would have
                        right_n = sent + walk.left_visits - walk.right_begin
                        full = gl.maximum(right_n + seen_tile(shared.right, count, FULL_BEGIN, WARPGROUP), n)
                        partial = gl.maximum(right_n + seen_tile(shared.right, count, FULL_END, WARPGROUP), full)
                    right_follows = False
            values.consumer_wait(n_end - 1)
            acc = warpgroup_mma(as_operand(p, shared, P), flat(values.tile(n_end - 1)), acc, is_async=True)

            total = gl.convert_layout(gl.sum(row_sum, 1), ROW, assert_trivial=True)
            # a row without a visible key has total 0; it gets out 0 and lse −inf (a NaN stays)
            seen = total != 0
            # a sum above SUM_LIMIT may be wrong; NaN: a tile overflowed, and a later tile multiplied that by 0
            fits = total < SUM_LIMIT
            total = gl.where(seen, total, 1.0)
            factor = reciprocal(total)
            if sink is not None:
                row_sink = gl.load(sink + head).to(gl.float32) * LOG2E
                lacking = gl.zeros([WARPGROUP_ROWS], gl.float32, ROW)
                if ROW_ALPHA:
                    lacking = row_alphas.load(ROW)
                # combine the sink with the log-sum of all keys instead of row_max, which may exceed every score
                # (softmax.AHEAD) and the sink
                row_max += log2_of_sum(total)
                one = gl.full([WARPGROUP_ROWS], 1.0, gl.float32, ROW)
                sink_factor, row_max, total, whole_max = with_sink(row_max, one, row_sink, lacking)
                factor *= sink_factor
            if BFLOAT16:
                # a wrong sum makes out wrong: set out to NaN, which are_finite finds
                factor = gl.where(fits, factor, float("nan"))
                factor *= gl.where(shared.is_careful(count), HEADROOM, 1.0)
            lse2 = row_max + log2_of_sum(total)
            if ROW_ALPHA and not CAUSAL:
                # the sign of a row's α differs between the sides, so α does not cancel in the backward's scores either
                lse2 += row_alphas.load(ROW)
            row = start + gl.arange(0, WARPGROUP_ROWS, ROW)
            here = bounds.rows(work.head_row) + row
            inside = row < query_length
            gl.store(row_lse2 + here, gl.where(seen, lse2, float("inf")), mask=inside)
            if lse is not None:
                row_lse = lse2
                if sink is not None:
                    row_lse = whole_max + log2_of_sum(total)
                elif ROW_ALPHA and CAUSAL:
                    row_lse += row_alphas.load(ROW)
                gl.store(lse + here, gl.where(seen, row_lse * LN2, float("-inf")), mask=inside)

            acc = warpgroup_mma_wait(0, (acc,))
            values.consumer_release(n_end - 1)
            acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, ACC)), 1)
            if BFLOAT16:
                # per warp, 1 if any row of out is wrong
                wrong = gl.max(gl.where(are_finite(acc), 0, 1).reshape([WARPS, WARPGROUP_ROWS // WARPS * 4]), 1)
                overflow.store(gl.where(shared.is_careful(count), 0, wrong))
            # q has been read: store out to its slot
            out = shared.out_tile(count, out_desc, WARPGROUP)
            flat(out).store(acc.to(q.dtype))
            fence_async_shared()
            if gl.max(overflow.load(gl.BlockedLayout([WARPS], [32], [WARPS], [0])), 0) == 0:
                gluon_compat.store(out_desc, bounds.rows_at(head, start), out)
            shared.skip(n_end, sent + tiles)
        else:
            # this warpgroup has no rows: release the tiles that the others read
            overflow.store(gl.full([WARPS], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
            if TWO_SLOTS:
                tma.store_wait(0)
                queries.consumer_release(count - 1, count > 0)
            shared.skip(sent, sent + tiles)
        if not TWO_SLOTS:
            tma.store_wait(0)
            queries.consumer_release(count)
        sent += tiles
        count += 1
        state = wait_for_work(shared, count)
    tma.store_wait(0)
