"""The backward's consumers beyond 128 columns, where dk and dv of a warpgroup's own keys would take all registers.

The two warpgroups share the 64 keys of a work tile. Each has half of the columns of dk, dv and dq, which need all rows
of a query tile. Each has half of the rows of the scores, which need all columns. So P and dS go through shared memory.
dq of a tile is multiplied during the next one, in two parts of 64 columns, and threads add it up from their registers.
Through shared memory, as in narrower kernels, dq would be a quarter of the shared memory traffic::

    each     S, dq₋₁ (1), dP | P | dq₋₁ (2) ∥ dS | P, dS → shared memory | dV, dK | S …
             its rows                               waits for the other's   its columns

    barrier          stages         arrivals by                      waited for by
    d_scores_ready   SLOTS          both: P and dS are stored        both, before dV
    scaled_ready     1              both: dS times the scales of     both, before dK
                                    its rows is stored, with a
                                    scale per row
    p_read           1              both, after dq of the last tile  both, before they store the next P and dS
                                    and dV; with such scales, and dK
    dv_ready         1              both: dv and dk are where v      producer, before it stores them
                                    and k were

A scale per row multiplies dS for dK alone. The product is stored where dS of the previous tile was, after both
warpgroups have read that for dq₋₁. They have done so by the time they have stored P and dS; for this, they wait for
part 2 earlier than without such scales.

The other barriers are those of kernel.py, without keys_read. dk and dv of a work tile are stored to the buffers of its
keys and values, and the next keys and values are loaded once they have left: one pause per work tile.

Tiles, per warpgroup: dk (64, D / 2) · dv (64, D_v / 2) · scoreT, pT, dpT, dsT (64, 32) · dq part (64, 64).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from decayattn.backends.hopper.backward.dq import (
    SUMS,
    add_from_registers,
    add_row_sums,
    opaque_zero,
    start_dq_block,
    start_row_sums,
)
from decayattn.backends.hopper.backward.key_sums import key_sum_of_tile, sum_operands
from decayattn.backends.hopper.backward.score_tile import operand_of_dk, tile_probability
from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import (
    COPIES,
    DELTA,
    PART,
    WARPGROUP_KEYS,
    ones_of_splits,
    product_layout,
)
from decayattn.backends.hopper.common.pipelines import arrive, flat
from decayattn.backends.tiles.scores import score_gradient


@gluon.constexpr_function
def _parts(warpgroup, read):
    """Number of a warpgroup's parts with columns that hold values."""
    return max(0, min(2, read // 64 - 2 * warpgroup))


@gluon.jit
def _start_scores(keys, rows, terms, FIRST: gl.constexpr, READ: gl.constexpr):
    """Issue keys · rowsᵀ plus a term per row: (64, 32).

    The term's splits are in the columns of `terms` from FIRST on; FIRST < 0: no term.
    """
    ROWS: gl.constexpr = rows.shape[0]  # zeros takes no plain int
    SCORE: gl.constexpr = product_layout(ROWS)
    score = gl.zeros([WARPGROUP_KEYS, ROWS], gl.float32, SCORE)
    for begin in gl.static_range(0, READ, PART):
        right = rows.slice(begin, PART, 1).permute((1, 0))
        score = warpgroup_mma(keys.slice(begin, PART, 1), right, score, use_acc=begin > 0, is_async=True)
    if FIRST >= 0:
        score = warpgroup_mma(ones_of_splits(FIRST, SCORE), terms, score, is_async=True)
    return score


@gluon.jit
def next_tile_256(
    n, tile, previous, sums, keys, work, shared, dq_target, score_scale, WARPGROUP: gl.constexpr, PARTIAL: gl.constexpr
):
    """Add the n-th query tile; consume.py has the arguments."""
    dk, dv, key_sum = sums
    _, first_part, _, _, _ = dq_target
    OWN: gl.constexpr = shared.TILE.score_rows
    DECAY: gl.constexpr = work.schedule.MODES.decay
    DTYPE: gl.constexpr = shared.queries.dtype
    OWN_PARTS: gl.constexpr = _parts(WARPGROUP, shared.TILE.widths.read)
    ROW_SCALES: gl.constexpr = work.schedule.MODES.row_scales
    # warpgroup 0 makes the row sums, the other one the sums of keys
    ROW_SUMS: gl.constexpr = work.schedule.MODES.row_sums and WARPGROUP == 0
    KEY_SUMS: gl.constexpr = work.schedule.MODES.decay_gradient and WARPGROUP == 1
    D_V: gl.constexpr = shared.values.shape[-1]
    D: gl.constexpr = shared.keys.shape[-1]
    stage, phase = shared.stage(n), shared.phase(n)
    query, d_out = flat(shared.queries.index(stage)), flat(shared.d_outs.index(stage))
    own = opaque_zero(n)
    previous_part = first_part + previous // work.schedule.MODES.sides * shared.TILE.dq_parts

    mbarrier.wait(shared.barriers.queries_ready.index(stage), phase)
    own_terms = shared.terms.index(stage).slice(WARPGROUP * OWN, OWN, 0).permute((1, 0))
    own_query = query.slice(WARPGROUP * OWN, OWN, 0)
    # the terms have LSE₂ divided by the scale of all scores; with a scale per row, tile_probability subtracts LSE₂
    LSE2: gl.constexpr = -1 if ROW_SCALES else 0
    scoreT = _start_scores(flat(shared.keys.index(own)), own_query, own_terms, LSE2, shared.TILE.widths.read)
    row_sum = gl.zeros([PART, COPIES], gl.float32, SUMS)
    before = shared.slot(n - 1)
    if OWN_PARTS > 0:
        first_dq = start_dq_block(shared, before, own, WARPGROUP * D // 2)
    if ROW_SUMS:
        row_sum = start_row_sums(shared, before, own)
    mbarrier.wait(shared.barriers.d_outs_ready.index(stage), phase)
    own_d_out = d_out.slice(WARPGROUP * OWN, OWN, 0)
    dpT = _start_scores(flat(shared.values.index(own)), own_d_out, own_terms, DELTA, D_V)
    # numbers of products issued for dP, and for dq with the row sums
    OF_DP: gl.constexpr = D_V // 64 + 1
    OF_DQ: gl.constexpr = (1 if OWN_PARTS > 0 else 0) + (1 if ROW_SUMS else 0)
    scoreT = warpgroup_mma_wait(OF_DP + OF_DQ, (scoreT,))
    p = tile_probability(scoreT, shared, stage, keys, score_scale, DECAY, PARTIAL, WARPGROUP * OWN, ROW_SCALES)
    if OWN_PARTS > 0:
        first_dq, row_sum = warpgroup_mma_wait(OF_DP, (first_dq, row_sum))
        if previous >= 0:
            add_from_registers(dq_target, previous_part, first_dq, previous, work)
    if ROW_SUMS and previous >= 0:
        add_row_sums(row_sum, dq_target, previous, work, 0, D)
    dpT = warpgroup_mma_wait(0, (dpT,))
    if OWN_PARTS > 1:
        # issued only after dP is ready: earlier, ptxas would have too few registers, and serialise all products
        second_dq = start_dq_block(shared, before, own, WARPGROUP * D // 2 + PART)
    d_scores = score_gradient(p, dpT, 0)
    dsT = d_scores.to(DTYPE)
    mbarrier.wait(shared.barriers.p_read, (n - 1) & 1, pred=n > 0)
    pT = shared.p.index(own)
    pT.slice(WARPGROUP * OWN, OWN, 1).store(p.to(DTYPE))
    shared.d_scores.index(shared.slot(n)).slice(WARPGROUP * OWN, OWN, 1).store(dsT)
    if ROW_SCALES and OWN_PARTS > 1:
        # once both have arrived, its operand is overwritten
        second_dq = warpgroup_mma_wait(0, (second_dq,))
        if previous >= 0:
            add_from_registers(dq_target, previous_part + 1, second_dq, previous, work)
    fence_async_shared()
    arrive(shared.barriers.d_scores_ready.index(shared.slot(n)))
    shared.wait_d_scores(n)
    dv = warpgroup_mma(pT, d_out.slice(WARPGROUP * D_V // 2, D_V // 2, 1), dv, is_async=True)
    left = shared.d_scores.index(shared.slot(n))
    left_of_dk = left
    if ROW_SCALES:
        left_of_dk = shared.d_scores.index(before)
        scaled = operand_of_dk(dsT, d_scores, shared, stage, ROW_SCALES, WARPGROUP * OWN)
        left_of_dk.slice(WARPGROUP * OWN, OWN, 1).store(scaled)
        fence_async_shared()
        arrive(shared.barriers.scaled_ready)
        mbarrier.wait(shared.barriers.scaled_ready, n & 1)
    dk = warpgroup_mma(left_of_dk, query.slice(WARPGROUP * D // 2, dk.shape[1], 1), dk, is_async=True)
    weights, of_keys = sum_operands(shared, DECAY, PARTIAL)
    if KEY_SUMS:
        of_keys = warpgroup_mma(left, weights.index(own).permute((1, 0)), of_keys, use_acc=False, is_async=True)
    # number of products issued after dv
    LATER: gl.constexpr = 2 if KEY_SUMS else 1
    if OWN_PARTS > 1 and not ROW_SCALES:
        second_dq = warpgroup_mma_wait(LATER + 1, (second_dq,))
        if previous >= 0:
            add_from_registers(dq_target, previous_part + 1, second_dq, previous, work)
    dv = warpgroup_mma_wait(LATER, (dv,))
    if not ROW_SCALES:
        arrive(shared.barriers.p_read)
    dk, of_keys = warpgroup_mma_wait(0, (dk, of_keys))
    if ROW_SCALES:
        arrive(shared.barriers.p_read)
    arrive(shared.barriers.empty.index(stage))
    if KEY_SUMS:
        key_sum += key_sum_of_tile(of_keys, work, tile, keys[0], PARTIAL)
    return dk, dv, key_sum


@gluon.jit
def end_head_256(n, previous, is_last, work, shared, dq_target, WARPGROUP: gl.constexpr):
    """Add dq and the row sums of a head's last visit."""
    _, first_part, _, _, _ = dq_target
    D: gl.constexpr = shared.keys.shape[-1]
    last, last_part = shared.slot(n - 1), first_part + previous // work.schedule.MODES.sides * shared.TILE.dq_parts
    for part in gl.static_range(_parts(WARPGROUP, shared.TILE.widths.read)):
        dq = start_dq_block(shared, last, opaque_zero(n), WARPGROUP * D // 2 + part * PART)
        dq = warpgroup_mma_wait(0, (dq,))
        if previous >= 0:
            add_from_registers(dq_target, last_part + part, dq, previous, work)
    if work.schedule.MODES.row_sums and WARPGROUP == 0:
        row_sum = warpgroup_mma_wait(0, (start_row_sums(shared, last, opaque_zero(n)),))
        if previous >= 0:
            add_row_sums(row_sum, dq_target, previous, work, 0, D)


@gluon.jit
def store_256(n, dk, dv, work, shared, dk_desc, scale, WARPGROUP: gl.constexpr):
    """Store dv to the buffer of the values, and dk to that of the keys.

    The other warpgroup had its last scores before it stored dS of the last tile, and for dq it reads its own columns of
    the keys only. So only warps of this warpgroup may still read the overwritten columns.
    """
    gluon_compat.thread_barrier()
    values, keys = flat(shared.values.index(0)), flat(shared.keys.index(0))
    D: gl.constexpr = shared.keys.shape[-1]
    D_V: gl.constexpr = shared.values.shape[-1]
    values.slice(WARPGROUP * D_V // 2, D_V // 2, 1).store(dv.to(values.dtype))
    keys.slice(WARPGROUP * D // 2, dk.shape[1], 1).store((dk * scale).to(keys.dtype))
    fence_async_shared()
    arrive(shared.barriers.dv_ready)
