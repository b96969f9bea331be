"""The backward's consumers for up to 192 columns of q and k with up to 128 of v: 64 keys each, as in consume_128.py.

dk and dv of 64 keys take 160 registers of a thread, and the scores of 32 rows fit in the rest. So a query tile is
processed in two halves. q, k and dk are three blocks of 64 columns. dq is multiplied one tile later. Each warpgroup has
one outer block of it in every tile. In turns, one has the middle block and the other the row sums of dS. Threads add dq
up from their registers (consume_256.py)::

    half 0   S, dP | P | dV | dS → shared memory | dq₋₁ of an outer block | dK
    half 1   S, dP | P | dV | dS → shared memory | dq₋₁ of the middle block, or row sums₋₁ | dK

Additions to memory limit this kernel: with 64 keys per work tile (consume_256.py) there would be twice as many.

The barriers are those of kernel.py, with three slots of dSᵀ.

Tiles, per warpgroup: k, dk (3 blocks, 64, 64) · v, dv (64, 128) · q (3 blocks, ROWS, 64) · d_out (ROWS, 128) · scoreT,
pT, dpT, dsT (64, 32) · dq block (64, 64).
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

from decayattn.backends.hopper.backward.dq import (
    add_from_registers,
    add_row_sums,
    opaque_zero,
    start_dq_block,
    start_row_sums,
)
from decayattn.backends.hopper.backward.key_sums import key_sum_of_tile, sum_operands
from decayattn.backends.hopper.backward.score_tile import operand_of_dk, tile_probability
from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import PART, WARPGROUP_KEYS, operand_layout, product_layout
from decayattn.backends.hopper.common.pipelines import arrive, flat, signal, stacked
from decayattn.backends.tiles.scores import score_gradient

# blocks of q, k and dk, and the layout of one of dk
DK_BLOCKS: gl.constexpr = gl.constexpr(3)
DK: gl.constexpr = gl.constexpr(product_layout(PART.value))


@gluon.jit
def _add_dq(shared, n, visit, work, dq_target, zero, BLOCK: gl.constexpr):
    """Multiply a block of dq of the tile before the n-th, and add it to memory; visit: that tile's."""
    _, first_part, _, _, _ = dq_target
    dq = warpgroup_mma_wait(0, (start_dq_block(shared, shared.slot(n - 1), zero, BLOCK * PART),))
    part = first_part + visit // work.schedule.MODES.sides * shared.TILE.dq_parts + BLOCK
    add_from_registers(dq_target, part, dq, visit, work)


@gluon.jit
def _take_turn(shared, n, visit, work, dq_target, zero, WARPGROUP: gl.constexpr):
    """Do the same for the middle block of dq, or for the row sums of dS, while the other warpgroup does the other."""
    if (n & 1) == WARPGROUP:
        _add_dq(shared, n, visit, work, dq_target, zero, 1)
    elif work.schedule.MODES.row_sums:
        row_sum = warpgroup_mma_wait(0, (start_row_sums(shared, shared.slot(n - 1), zero),))
        add_row_sums(row_sum, dq_target, visit, work, 0, shared.TILE.widths.qk)


@gluon.jit
def next_tile_192(
    n, tile, previous, sums, keys, work, shared, dq_target, score_scale, WARPGROUP: gl.constexpr, PARTIAL: gl.constexpr
):
    """Add the n-th query tile; consume.py has the arguments, and dk is a tuple of its blocks."""
    dk, dv, key_sum = sums
    HALF: gl.constexpr = shared.TILE.score_rows
    DECAY: gl.constexpr = work.schedule.MODES.decay
    ROW_SCALES: gl.constexpr = work.schedule.MODES.row_scales
    KEY_SUMS: gl.constexpr = work.schedule.MODES.decay_gradient
    SCORE: gl.constexpr = product_layout(HALF)
    DTYPE: gl.constexpr = shared.queries.dtype
    stage, phase = shared.stage(n), shared.phase(n)
    weights, of_keys = sum_operands(shared, DECAY, PARTIAL)

    if WARPGROUP == 1:
        mbarrier.wait(shared.barriers.first_scores.index(stage), phase)
    mbarrier.wait(shared.barriers.queries_ready.index(stage), phase)
    for half in gl.static_range(2):
        # another 0 in each half: with the same one, 24 registers of matrix descriptors would live through both halves
        zero = opaque_zero(n + half)
        own = WARPGROUP + zero
        first_block = (stage + zero) * DK_BLOCKS
        terms = shared.terms.index(stage + zero).slice(half * HALF, HALF, 0).permute((1, 0))
        d_out = flat(shared.d_outs.index(stage + zero)).slice(half * HALF, HALF, 0)
        scoreT = gl.zeros([WARPGROUP_KEYS, HALF], gl.float32, SCORE)
        for block in gl.static_range(DK_BLOCKS):
            key = flat(shared.keys.index(own * DK_BLOCKS + block))
            query = flat(shared.queries.index(first_block + block)).slice(half * HALF, HALF, 0)
            scoreT = warpgroup_mma(key, query.permute((1, 0)), scoreT, use_acc=block > 0, is_async=True)
        # ones from shared memory: in registers, they would take eight
        if not ROW_SCALES:
            scoreT = warpgroup_mma(shared.splits.index(zero), terms, scoreT, is_async=True)
        if half == 0:
            mbarrier.wait(shared.barriers.d_outs_ready.index(stage), phase)
        dpT = gl.zeros([WARPGROUP_KEYS, HALF], gl.float32, SCORE)
        value = flat(shared.values.index(own))
        dpT = warpgroup_mma(value, d_out.permute((1, 0)), dpT, use_acc=False, is_async=True)
        dpT = warpgroup_mma(shared.splits.index(zero + 1), terms, dpT, is_async=True)
        scoreT = warpgroup_mma_wait(2, (scoreT,))
        if half == 0 and WARPGROUP == 0:
            signal(shared.barriers.first_scores.index(stage))
        p = tile_probability(scoreT, shared, stage, keys, score_scale, DECAY, PARTIAL, half * HALF, ROW_SCALES)
        pT = gl.convert_layout(p.to(DTYPE), operand_layout(dv.type.layout))
        dv = warpgroup_mma(pT, d_out, dv, is_async=True)
        dpT = warpgroup_mma_wait(1, (dpT,))
        d_scores = score_gradient(p, dpT, 0)
        dsT = d_scores.to(DTYPE)

        # wait here and not below: after an arrival at a neighbouring barrier, Triton would synchronise the warps
        if half == 0:
            shared.wait_d_scores(n - 1, pred=n > 0)
        shared.d_scores.index(shared.slot(n) * 2 + WARPGROUP).slice(half * HALF, HALF, 1).store(dsT)
        if half == 1:
            fence_async_shared()
            arrive(shared.barriers.d_scores_ready.index(shared.slot(n)))
        dv = warpgroup_mma_wait(0, (dv,))
        # finish dq before issuing dk: for both, ptxas would have too few registers, and serialise all products
        if previous >= 0:
            if half == 0:
                _add_dq(shared, n, previous, work, dq_target, zero, 2 * WARPGROUP)
            else:
                _take_turn(shared, n, previous, work, dq_target, zero, WARPGROUP)
        left = gl.convert_layout(dsT, operand_layout(DK))
        left_of_dk = operand_of_dk(left, d_scores, shared, stage, ROW_SCALES, half * HALF)
        blocks = ()
        for block in gl.static_range(DK_BLOCKS):
            query = flat(shared.queries.index(first_block + block)).slice(half * HALF, HALF, 0)
            blocks += (warpgroup_mma(left_of_dk, query, dk[block], is_async=True),)
        if KEY_SUMS:
            right = weights.index(zero).slice(half * HALF, HALF, 1).permute((1, 0))
            of_keys = warpgroup_mma(left, right, of_keys, use_acc=half > 0, is_async=True)
        dk0, dk1, dk2, of_keys = warpgroup_mma_wait(0, (blocks[0], blocks[1], blocks[2], of_keys))
        dk = (dk0, dk1, dk2)
    arrive(shared.barriers.empty.index(stage))
    if KEY_SUMS:
        key_sum += key_sum_of_tile(of_keys, work, tile, keys[0], PARTIAL)
    return dk, dv, key_sum


@gluon.jit
def end_head_192(n, previous, is_last, work, shared, dq_target, WARPGROUP: gl.constexpr):
    """Add dq and the row sums of a head's last visit."""
    shared.wait_d_scores(n - 1, pred=previous >= 0)
    if previous >= 0:
        _add_dq(shared, n, previous, work, dq_target, opaque_zero(n), 2 * WARPGROUP)
        _take_turn(shared, n, previous, work, dq_target, opaque_zero(n), WARPGROUP)
    arrive(shared.barriers.keys_read, is_last)


@gluon.jit
def store_192(n, dk, dv, work, shared, dk_desc, scale, WARPGROUP: gl.constexpr):
    """Start to store dk, block after block, from the two slots of dSᵀ that are not the last tile's (consume_128.py)."""
    blocks = (dk[0] * scale, dk[1] * scale, dk[2] * scale)
    for block in gl.static_range(DK_BLOCKS):
        if block >= 2:
            tma.store_wait(0)
            gluon_compat.thread_barrier()
        staging = shared.d_scores.index(shared.slot(n + block % 2) * 2 + WARPGROUP)
        tiles = gluon_compat.reinterpret(staging, dk_desc.dtype, stacked(1, dk_desc.block_shape), dk_desc.layout)
        flat(tiles.index(0)).store(blocks[block].to(dk_desc.dtype))
        fence_async_shared()
        gluon_compat.thread_barrier()
        gluon_compat.store(dk_desc, work.key_at(WARPGROUP, block * PART), tiles.index(0))
