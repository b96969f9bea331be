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
    d_scores_for_dq,
    in_units,
    is_loaded,
    opaque_zero,
    start_dq_part,
    units_of_dq,
)
from decayattn.backends.hopper.backward.key_sums import key_sum_of_tile, sum_operands
from decayattn.backends.hopper.backward.score_tile import operand_of_dk, tile_probability
from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import (
    DELTA,
    PART,
    WARPGROUP_KEYS,
    ones_of_splits,
    operand_layout,
    product_layout,
    to_fragments,
)
from decayattn.backends.hopper.common.pipelines import arrive, flat, signal, stacked
from decayattn.backends.tiles.scores import score_gradient


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
def next_tile_128(
    n, tile, previous, sums, keys, work, shared, dq_target, score_scale, WARPGROUP: gl.constexpr, PARTIAL: gl.constexpr
):
    """Add the n-th query tile; consume.py has the arguments."""
    dk, dv, key_sum = sums
    ROWS: gl.constexpr = work.schedule.TILE.rows
    D: gl.constexpr = shared.keys.shape[-1]
    DECAY: gl.constexpr = work.schedule.MODES.decay
    SCORE: gl.constexpr = product_layout(ROWS)
    OPERAND: gl.constexpr = operand_layout(dk.type.layout)
    DTYPE: gl.constexpr = shared.queries.dtype
    zero = gl.zeros([WARPGROUP_KEYS, ROWS], gl.float32, SCORE)
    stage = shared.stage(n)
    phase = shared.phase(n)
    query = flat(shared.queries.index(stage))
    d_out = flat(shared.d_outs.index(stage))

    own = WARPGROUP + opaque_zero(n)
    ROW_SCALES: gl.constexpr = work.schedule.MODES.row_scales
    LOADED: gl.constexpr = is_loaded(D, work.schedule.MODES)
    KEY_SUMS: gl.constexpr = 1 if work.schedule.MODES.decay_gradient else 0

    # In step with the first warpgroup, the second is 1 to 3 % slower. With a constant decay and D = 64, waiting at
    # every tile costs 1 to 5 %; waiting at partial tiles, which come first, is enough to keep them apart
    if WARPGROUP == 1 and (PARTIAL or D == 128 or DECAY != "constant"):
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
    p = tile_probability(scoreT, shared, stage, keys, score_scale, DECAY, PARTIAL, ROW_SCALES=ROW_SCALES)
    pT = p.to(DTYPE)
    dv = warpgroup_mma(gl.convert_layout(pT, OPERAND), d_out, dv, is_async=True)
    dpT = warpgroup_mma_wait(1, (dpT,))
    # float16 is coarse below 6e-5, and under strong rates the gradient of a rate comes from such P only
    FINE: gl.constexpr = work.schedule.MODES.decay_gradient and DECAY == "constant" and gl.float16 == DTYPE
    if D == 64 and not FINE:
        # rounded to 16 bits: in float32, P would take 64 registers in addition to the 64 of dP, and spill 100 bytes
        p = _widened(pT)
    d_scores = score_gradient(p, dpT, 0)
    dsT = d_scores.to(DTYPE)

    # wait here and not below: after an arrival at a neighbouring barrier, Triton would synchronise the warps
    shared.wait_d_scores(n - 1, pred=n > 0)
    if shared.TILE.slots == 2:
        # both have read the slot, for dq of tile n − 2; with three slots, they did so before q of this tile could come
        mbarrier.wait(shared.barriers.d_scores_read, (n - 1) & 1, pred=n > 0)
    # loaded after both waits: if one came between, ptxas 13.4 (Triton 3.9) would copy the 32 registers for each of the
    # products, and Triton 3.6 would synchronise the warps three times more
    before = d_scores_for_dq(shared, shared.slot(n - 1), WARPGROUP, LOADED)
    if LOADED:
        arrive(shared.barriers.d_scores_read)
    shared.d_scores.index(shared.slot(n) * 2 + WARPGROUP).store(dsT)
    if not LOADED:
        fence_async_shared()
    tma.store_wait(0)  # TMA has read the part that was stored a tile ago
    arrive(shared.barriers.d_scores_ready.index(shared.slot(n)))
    # dv is done by now. Keeping its operand in registers would leave ptxas too few at D = 128, and serialise the
    # products below
    dv = warpgroup_mma_wait(0, (dv,))
    dq, row_sum = start_dq_part(shared, n, before, WARPGROUP, work.schedule.MODES.row_sums, LOADED)
    left = gl.convert_layout(dsT, OPERAND)
    left_of_dk = operand_of_dk(left, d_scores, shared, stage, ROW_SCALES)
    dk = warpgroup_mma(left_of_dk, query, dk, is_async=True)
    # a product issued with dk (key_sums.py)
    weights, of_keys = sum_operands(shared, DECAY, PARTIAL)
    if KEY_SUMS:
        right = weights.index(opaque_zero(n)).permute((1, 0))
        of_keys = warpgroup_mma(left, right, of_keys, use_acc=False, is_async=True)
    units = units_of_dq(dq_target, previous, work, WARPGROUP if D == 64 else 0)  # loaded during the products
    dq, row_sum = warpgroup_mma_wait(1 + KEY_SUMS, (dq, row_sum))  # dk and its sums are still running
    if shared.TILE.slots == 2 and not LOADED:
        arrive(shared.barriers.d_scores_read)
    if D == 64:  # D = 128 would spill 20 bytes more
        row_sum = in_units(row_sum, units, True)
    shared.dq_parts.index(WARPGROUP).store(to_fragments(in_units(dq, units)))
    dk, of_keys = warpgroup_mma_wait(0, (dk, of_keys))
    fence_async_shared()  # not earlier: ptxas crashes while products are running
    arrive(shared.barriers.empty.index(stage))
    if previous >= 0:
        add_dq_part(row_sum, dq_target, previous, work, shared, WARPGROUP)
    if work.schedule.MODES.decay_gradient:
        key_sum += key_sum_of_tile(of_keys, work, tile, keys[0], PARTIAL)
    return dk, dv, key_sum


@gluon.jit
def end_head_128(n, previous, is_last, work, shared, dq_target, WARPGROUP: gl.constexpr):
    """Add dq and the row sums of a head's last visit."""
    D: gl.constexpr = shared.keys.shape[-1]
    LOADED: gl.constexpr = is_loaded(D, work.schedule.MODES)
    shared.wait_d_scores(n - 1, pred=previous >= 0)
    last = d_scores_for_dq(shared, shared.slot(n - 1), WARPGROUP, LOADED)
    dq, row_sum = start_dq_part(shared, n, last, WARPGROUP, work.schedule.MODES.row_sums, LOADED)
    units = units_of_dq(dq_target, previous, work, WARPGROUP if D == 64 else 0)
    dq, row_sum = warpgroup_mma_wait(0, (dq, row_sum))
    arrive(shared.barriers.keys_read, is_last)
    if previous >= 0:
        tma.store_wait(0)
        gluon_compat.thread_barrier()
        shared.dq_parts.index(WARPGROUP).store(to_fragments(in_units(dq, units)))
        fence_async_shared()
        gluon_compat.thread_barrier()
        add_dq_part(row_sum, dq_target, previous, work, shared, WARPGROUP)


@gluon.jit
def store_128(n, dk, dv, work, shared, dk_desc, scale, WARPGROUP: gl.constexpr):
    """Start to store dk, 64 columns at a time, from slots of dSᵀ, after a work tile's last query tile, n − 1.

    None is that tile's slot, which the other warpgroup reads once more at the first tile of its next work tile.
    """
    D: gl.constexpr = shared.keys.shape[-1]
    dk = (dk * scale).to(shared.d_scores.dtype)
    halves = (dk, dk)
    if D == 128:
        halves = gl.split(gl.permute(gl.reshape(dk, [WARPGROUP_KEYS, 2, PART]), [0, 2, 1]))
    HALVES: gl.constexpr = D // PART
    # view a whole slot as tiles of dk and use the first: at D = 64 the slot is twice as large as a tile, and Triton 3.8
    # reinterprets a buffer only as one of the same size
    COUNT: gl.constexpr = shared.TILE.rows // PART
    staged = ()
    for half in gl.static_range(HALVES):
        slot = shared.d_scores.index(shared.slot(n + half) * 2 + WARPGROUP)
        tiles = gluon_compat.reinterpret(slot, dk_desc.dtype, stacked(COUNT, dk_desc.block_shape), dk_desc.layout)
        staged += (tiles.index(0),)
        flat(staged[half]).store(halves[half])
    fence_async_shared()
    gluon_compat.thread_barrier()
    for half in gl.static_range(HALVES):
        gluon_compat.store(dk_desc, work.key_at(WARPGROUP, half * PART), staged[half])
