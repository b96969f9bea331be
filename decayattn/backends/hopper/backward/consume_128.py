"""The backward's consumers: two warpgroups, each with 64 keys of a work tile, through the query tiles that see them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from decayattn.backends.hopper.backward.dq import (
    add_dq_part,
    add_row_sums,
    d_scores_for_dq,
    is_loaded,
    opaque_zero,
    stage_dq_part,
    start_dq_part,
)
from decayattn.backends.hopper.backward.key_sums import key_sum_of_tile
from decayattn.backends.hopper.backward.row_terms import DELTA
from decayattn.backends.hopper.backward.score_tile import keys_of_head, operand_of_dk, scaled_scores
from decayattn.backends.hopper.backward.work import WARPGROUP_KEYS, find_work, query_tile, visits
from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import (
    KEYS,
    PART,
    SHARES,
    bits_before,
    by_threads,
    from_threads,
    ones_of_splits,
    operand_layout,
    product_layout,
    where_bits,
)
from decayattn.backends.hopper.common.pipelines import arrive, signal
from decayattn.backends.hopper.common.tile_table import flat, stacked
from decayattn.backends.tiles.scores import LOG2E, decayed_score, probability, score_gradient


@gluon.jit
def _widened(x):
    """Convert 16-bit values to float32."""
    if x.dtype == gl.bfloat16:
        # two instructions per pair, fewer than the conversion takes
        x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        x = x.to(gl.float32)
    return x


@gluon.jit
def _next_tile(
    n, tile, previous, gradients, keys, work, shared, dq_target, score_scale, WARPGROUP: gl.constexpr,
    D: gl.constexpr, EDGE: gl.constexpr,
):
    """Add the n-th query tile to gradients, (dk, dv, key_sum), and dq of the previous visit to its target.

    keys: (key, α of it, first and end of the rows that see it), one per key of the warpgroup
    dq_target: (descriptor of the fragments, first part of the head, row sums, first row of the head)
    previous: the previous visit as tile · SIDES + side; −1 if there is none in this head
    """
    dk, dv, key_sum = gradients
    _, key_alpha, first, end = keys
    dq_desc, first_part, row_sums, first_row = dq_target
    ROWS: gl.constexpr = work.schedule.ROWS
    DECAY: gl.constexpr = work.schedule.DECAY
    SCORE: gl.constexpr = product_layout(ROWS)
    OPERAND: gl.constexpr = operand_layout(dk.type.layout)
    DTYPE: gl.constexpr = shared.queries.dtype
    zero = gl.zeros([WARPGROUP_KEYS, ROWS], gl.float32, SCORE)
    stage = shared.stage(n)
    phase = shared.phase(n)
    query = flat(shared.queries.index(stage))
    d_out = flat(shared.d_outs.index(stage))

    own = WARPGROUP + opaque_zero(n)
    ROW_SUMS: gl.constexpr = work.schedule.ROW_SUMS
    ROW_SCALES: gl.constexpr = work.schedule.ROW_SCALES
    LOADED: gl.constexpr = is_loaded(D, ROW_SUMS, ROW_SCALES)
    KEY_SUMS: gl.constexpr = 1 if work.schedule.DECAY_GRADIENT else 0

    # In step with the first warpgroup, the second is 1 to 3 % slower. With a constant decay and D = 64, waiting at
    # every tile costs 1 to 5 %; waiting at partial tiles, which come first, is enough to keep them apart
    if WARPGROUP == 1 and (EDGE or D == 128 or DECAY != "constant"):
        mbarrier.wait(shared.barriers.first_scores.index(stage), phase)
    mbarrier.wait(shared.barriers.queries_ready.index(stage), phase)
    key = flat(shared.keys.index(own))
    scoreT = warpgroup_mma(key, query.permute((1, 0)), zero, use_acc=False, is_async=True)
    terms = shared.terms.index(stage).permute((1, 0))
    if not ROW_SCALES:
        scoreT = warpgroup_mma(ones_of_splits(0, SCORE), terms, scoreT, is_async=True)
    mbarrier.wait(shared.barriers.d_outs_ready.index(stage), phase)
    value = flat(shared.values.index(own))
    dpT = warpgroup_mma(value, d_out.permute((1, 0)), zero, use_acc=False, is_async=True)
    dpT = warpgroup_mma(ones_of_splits(DELTA, SCORE), terms, dpT, is_async=True)
    scoreT = warpgroup_mma_wait(2, (scoreT,))
    if WARPGROUP == 0:
        signal(shared.barriers.first_scores.index(stage))
    # inlined tile_probability of score_tile.py: with the call ptxas allocates other registers, which has not been timed
    if DECAY != "none":
        # the term that the tile's rows share is added to the key's
        key_alpha = key_alpha - shared.differences.index(stage).load(key_alpha.type.layout)
    scoreT = scaled_scores(scoreT, shared, stage, score_scale, ROW_SCALES)
    scoreT = decayed_score(scoreT, 0, gl.expand_dims(key_alpha, 1), 0, 0, 0, 0, DECAY, True, DECAY != "none")
    if EDGE:
        # read the tile's first row here: if it were known earlier, the compiler would compare before the scores are
        # ready
        here = shared.starts.index(stage).load(key_alpha.type.layout)
        x = by_threads(scoreT)
        seen = bits_before(end - here, x) & ~bits_before(first - here, x)
        scoreT = from_threads(where_bits(seen, x), SCORE)
    p = probability(scoreT, 0)
    pT = p.to(DTYPE)
    dv = warpgroup_mma(gl.convert_layout(pT, OPERAND), d_out, dv, is_async=True)
    dpT = warpgroup_mma_wait(1, (dpT,))
    # float16 is coarse below 6e-5, and under strong rates the gradient of a rate comes from such P only
    FINE: gl.constexpr = work.schedule.DECAY_GRADIENT and DECAY == "constant" and shared.queries.dtype == gl.float16
    if D == 64 and not FINE:
        # rounded to 16 bits: in float32, P would take 64 registers in addition to the 64 of dP, and spill 100 bytes
        p = _widened(pT)
    d_scores = score_gradient(p, dpT, 0)
    dsT = d_scores.to(DTYPE)

    # wait here and not below: after an arrival at a neighbouring barrier, Triton would synchronise the warps
    shared.wait_d_scores(n - 1, pred=n > 0)
    before = d_scores_for_dq(shared, shared.slot(n - 1), WARPGROUP, D, LOADED)
    if shared.SLOTS == 2:
        # both have read the slot, for dq of tile n − 2; with three slots, they did so before q of this tile could come
        mbarrier.wait(shared.barriers.d_scores_read, (n - 1) & 1, pred=n > 0)
        if LOADED:
            arrive(shared.barriers.d_scores_read)
    shared.d_scores.index(shared.slot(n) * 2 + WARPGROUP).store(dsT)
    if not LOADED:
        fence_async_shared()
    tma.store_wait(0)  # TMA has read the part that stage_dq_part stored a tile ago
    arrive(shared.barriers.d_scores_ready.index(shared.slot(n)))
    # dv is done by now. Keeping its operand in registers would leave ptxas too few at D = 128, and serialise the
    # products below
    dv = warpgroup_mma_wait(0, (dv,))
    dq, row_sum = start_dq_part(shared, n, before, WARPGROUP, D, ROW_SUMS, LOADED)
    left = gl.convert_layout(dsT, OPERAND)
    left_of_dk = operand_of_dk(left, d_scores, shared, stage, ROW_SCALES)
    dk = warpgroup_mma(left_of_dk, query, dk, is_async=True)
    # a product issued with dk (key_sums.py)
    weights = shared.constants.weights
    if DECAY == "constant" and EDGE:
        weights = shared.constants.bits
    COLUMNS: gl.constexpr = weights.shape[1]
    of_keys = gl.zeros([WARPGROUP_KEYS, COLUMNS], gl.float32, product_layout(COLUMNS))
    if KEY_SUMS:
        right = weights.index(opaque_zero(n)).permute((1, 0))
        of_keys = warpgroup_mma(left, right, of_keys, use_acc=False, is_async=True)
    dq, row_sum = warpgroup_mma_wait(1 + KEY_SUMS, (dq, row_sum))  # dk and its sums are still running
    if shared.SLOTS == 2 and not LOADED:
        arrive(shared.barriers.d_scores_read)
    stage_dq_part(shared, dq, WARPGROUP)
    dk, of_keys = warpgroup_mma_wait(0, (dk, of_keys))
    fence_async_shared()  # not earlier: ptxas crashes while products are running
    arrive(shared.barriers.empty.index(stage))
    if previous >= 0:
        add_dq_part(dq_desc, first_part + previous // work.schedule.SIDES * 2, shared, WARPGROUP)
        if ROW_SUMS:
            add_row_sums(row_sum, row_sums, first_row, previous, work, WARPGROUP, D)
    if work.schedule.DECAY_GRADIENT:
        key_sum += key_sum_of_tile(of_keys, work, tile, keys[0], EDGE)
    return dk, dv, key_sum


@gluon.jit
def _dk_staging(dk_desc, shared, n, HALF: gl.constexpr, WARPGROUP: gl.constexpr):
    """Return a slot of dSᵀ that stages 64 columns of this warpgroup's dk, after a work tile's last query tile, n − 1.

    It is not the last tile's slot, which the other warpgroup reads once more at the first tile of its next work tile.
    """
    staging = shared.d_scores.index(shared.slot(n + HALF) * 2 + WARPGROUP)
    # view the whole slot as tiles of dk and use the first: at D = 64 the slot is twice as large as a tile, and Triton
    # 3.8 reinterprets a buffer only as one of the same size
    COUNT: gl.constexpr = staging.shape[0] * staging.shape[1] // (WARPGROUP_KEYS * PART)
    tiles = gluon_compat.reinterpret(staging, dk_desc.dtype, stacked(COUNT, dk_desc.block_shape), dk_desc.layout)
    return tiles.index(0)


@gluon.jit
def _store_dk(dk_desc, dk, n, work, shared, WARPGROUP: gl.constexpr, D: gl.constexpr):
    """Start to store dk, 64 columns at a time."""
    halves = (dk, dk)
    if D == 128:
        halves = gl.split(gl.permute(gl.reshape(dk, [WARPGROUP_KEYS, 2, PART]), [0, 2, 1]))
    HALVES: gl.constexpr = D // PART
    for half in gl.static_range(HALVES):
        flat(_dk_staging(dk_desc, shared, n, half, WARPGROUP)).store(halves[half])
    fence_async_shared()
    gluon_compat.thread_barrier()
    for half in gl.static_range(HALVES):
        staging = _dk_staging(dk_desc, shared, n, half, WARPGROUP)
        gluon_compat.store(dk_desc, work.key_at(WARPGROUP, half * PART), staging)


@gluon.jit
def consume(schedule, shared, dq_desc, dk_desc, decay, scale, WARPGROUP: gl.constexpr, D: gl.constexpr):
    """Run one consumer warpgroup: its 64 keys of every work tile, through the query tiles that see the tile's keys."""
    ROWS: gl.constexpr = schedule.ROWS
    DECAY: gl.constexpr = schedule.DECAY
    SCORE: gl.constexpr = product_layout(ROWS)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORE)
    ACC: gl.constexpr = product_layout(D)
    LOADED: gl.constexpr = is_loaded(D, schedule.ROW_SUMS, schedule.ROW_SCALES)
    index = shared.published_index(0)
    count = index * 0
    n = index * 0
    while index < schedule.work_tiles:
        work = find_work(schedule, index)
        own_start = work.bounds.start + WARPGROUP * WARPGROUP_KEYS
        key = own_start + gl.arange(0, WARPGROUP_KEYS, KEY)
        inside = gl.minimum(key, work.bounds.key_length - 1)
        dk = gl.zeros([WARPGROUP_KEYS, D], gl.float32, ACC)
        dv = gl.zeros([WARPGROUP_KEYS, D], gl.float32, ACC)
        for member in range(schedule.GROUP):
            tokens = work.first_token(member)
            first_part = work.first_tile(member) * 2 + WARPGROUP
            first_row = work.first_row(member)
            dq_target = (dq_desc, first_part, decay.sums.rows, first_row)
            key_alpha, rows, ends = keys_of_head(work, member, tokens, key, inside, decay)
            key_sum = gl.zeros([WARPGROUP_KEYS, 4], gl.float32, SHARES)
            # the previous visit, as tile · SIDES + side
            previous = -1
            for side in range(schedule.SIDES):
                first, end = work.rows_of_side(rows, side)
                visited = work.visited(ends, side)

                # wait late, so that the loads above run while the keys arrive
                mbarrier.wait(shared.barriers.keys_ready, count & 1)
                # One thread waits until dk of the last work tile has left the slots of dSᵀ. The barrier holds back the
                # others, which write there too
                tma.store_wait(0)
                gluon_compat.thread_barrier()
                for EDGE in gl.static_range(1, -1, -1):
                    first_visit, end_visit = visits(visited, EDGE)
                    for visit in range(first_visit, end_visit):
                        tile = query_tile(visit, visited)
                        dk, dv, key_sum = _next_tile(
                            n, tile, previous, (dk, dv, key_sum), (key, key_alpha, first, end), work, shared, dq_target,
                            scale * LOG2E, WARPGROUP, D, EDGE,
                        )
                        previous = tile * schedule.SIDES + side
                        n += 1
                if schedule.SIDES == 2:
                    # right of the diagonal the sign is reversed: with a change of sign after each side, sums are
                    # left − right
                    key_alpha, key_sum = -key_alpha, -key_sum
            if member == schedule.GROUP - 1:
                # store dv to the buffer of this warpgroup's values
                flat(shared.values.index(WARPGROUP)).store(dv.to(shared.values.dtype))
                fence_async_shared()
                arrive(shared.barriers.dv_ready)
            # dq of the head's last tile
            shared.wait_d_scores(n - 1, pred=previous >= 0)
            last = d_scores_for_dq(shared, shared.slot(n - 1), WARPGROUP, D, LOADED)
            dq, row_sum = start_dq_part(shared, n, last, WARPGROUP, D, schedule.ROW_SUMS, LOADED)
            dq, row_sum = warpgroup_mma_wait(0, (dq, row_sum))
            arrive(shared.barriers.keys_read, member == schedule.GROUP - 1)
            if previous >= 0:
                tma.store_wait(0)
                gluon_compat.thread_barrier()
                stage_dq_part(shared, dq, WARPGROUP)
                fence_async_shared()
                gluon_compat.thread_barrier()
                add_dq_part(dq_desc, first_part + previous // schedule.SIDES * 2, shared, WARPGROUP)
                if schedule.ROW_SUMS:
                    add_row_sums(row_sum, decay.sums.rows, first_row, previous, work, WARPGROUP, D)
            if schedule.DECAY_GRADIENT:
                # Find the work tile again: its bounds would take registers in the loop. store_key_sums is inlined for
                # the same reason as tile_probability
                done = find_work(schedule, index)
                tokens, own_start = done.first_token(member), done.bounds.start + WARPGROUP * WARPGROUP_KEYS
                total = gl.sum(key_sum, 1)
                if DECAY == "scalar":
                    total *= 0.25  # of 4 copies
                    share = gl.arange(0, WARPGROUP_KEYS, total.type.layout)
                    here = decay.sums.columns + tokens + own_start + share
                    gl.store(here, total, mask=own_start + share < done.bounds.key_length)
                else:
                    tile = done.first_block(member) + done.bounds.start // KEYS
                    gl.store(decay.sums.rates + tile * 2 + WARPGROUP, gl.sum(total, 0))

        # both warpgroups have read dSᵀ of the last tile, too
        mbarrier.wait(shared.barriers.keys_read, count & 1)
        _store_dk(dk_desc, (dk * scale).to(shared.d_scores.dtype), n, find_work(schedule, index), shared, WARPGROUP, D)
        count += 1
        index = shared.published_index(count)
    tma.store_wait(0)
