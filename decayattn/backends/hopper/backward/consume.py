"""The loop of the backward's consumers, which is the same for all head dimensions: work tiles, heads, query tiles.

Each of consume_128.py, consume_192.py and consume_256.py has three functions for it: a query tile's contribution, dq of
a head's last query tile, and the store of a work tile's gradients. Timeline::

    work tile    zeros | head 0                                               | head 1 … | dv and dk → shared memory
    head         keys | tile 0 | tile 1, dq of tile 0 | … | dq of the last tile | sums of keys
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from decayattn.backends.hopper.backward.consume_128 import end_head_128, next_tile_128, store_128
from decayattn.backends.hopper.backward.consume_192 import end_head_192, next_tile_192, store_192
from decayattn.backends.hopper.backward.consume_256 import end_head_256, next_tile_256, store_256
from decayattn.backends.hopper.backward.key_sums import store_key_sums
from decayattn.backends.hopper.backward.score_tile import keys_of_head
from decayattn.backends.hopper.backward.work import find_work, query_tile, visits
from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import SHARES, WARPGROUP_KEYS, product_layout
from decayattn.backends.hopper.common.pipelines import arrive, flat, opaque_next
from decayattn.backends.tiles.scores import LOG2E


@gluon.jit
def _zeros(shared, WARPGROUP: gl.constexpr):
    """Return (dk, dv) before the first query tile; dk is a tuple of its blocks if there are several.

    Warpgroups with common keys have half of the columns each; of dk, only the first 64 if the others hold no values.
    """
    D_V: gl.constexpr = shared.values.shape[-1]
    COMMON_KEYS: gl.constexpr = shared.TILE.common_keys
    HALF: gl.constexpr = 128 if shared.TILE.widths.read - 128 * WARPGROUP > 64 else 64
    DK: gl.constexpr = HALF if COMMON_KEYS else shared.TILE.columns
    DV: gl.constexpr = D_V // 2 if COMMON_KEYS else D_V
    dk = gl.zeros([WARPGROUP_KEYS, DK], gl.float32, product_layout(DK))
    dv = gl.zeros([WARPGROUP_KEYS, DV], gl.float32, product_layout(DV))
    if shared.TILE.blocks > 1:
        dk = (dk, dk, dk)
    return dk, dv


@gluon.jit
def _walk(consuming, WARPGROUP: gl.constexpr, NEXT_TILE: gl.constexpr, END_HEAD: gl.constexpr, STORE: gl.constexpr):
    """Run one consumer warpgroup: its part of every work tile, through the query tiles that see the tile's keys.

    NEXT_TILE(n, tile, previous, sums, keys, work, shared, dq_target, score_scale, WARPGROUP, PARTIAL): add the n-th
        query tile to sums, (dk, dv, key_sum), and dq of the previous visit to its target.
    END_HEAD(n, previous, is_last, work, shared, dq_target, WARPGROUP): add dq of the head's last visit; is_last: the
        head is the group's last one.
    STORE(n, dk, dv, work, shared, dk_desc, scale, WARPGROUP): store gradients after a work tile's last head.

    keys: (key, α of it, first and end of the rows that see it), one per key of the warpgroup
    dq_target: (memory of dq or its descriptor, first part of the head, row sums, first row of the head, units of the
        rows or None)
    previous: the previous visit as tile · SIDES + side; −1 if there is none in this head
    """
    schedule, shared, dq_memory, units, dk_desc, decay, scale = consuming
    COMMON_KEYS: gl.constexpr = shared.TILE.common_keys
    # consumers of consume_256.py share their keys, and the second one makes the sums
    OWN: gl.constexpr = 0 if COMMON_KEYS else WARPGROUP
    KEY_SUMS: gl.constexpr = schedule.MODES.decay_gradient and (WARPGROUP == 1 or not COMMON_KEYS)
    # first part of dq that the warpgroup adds; those of consume_192.py take turns
    FIRST_PART: gl.constexpr = 0 if shared.TILE.blocks > 1 else WARPGROUP * (shared.TILE.dq_parts // 2)
    KEY: gl.constexpr = gl.SliceLayout(1, product_layout(shared.TILE.score_rows))
    index = shared.published_index(0)
    count = index * 0
    n = index * 0
    while index < schedule.work_tiles:
        work = find_work(schedule, index)
        key = work.bounds.start + OWN * WARPGROUP_KEYS + gl.arange(0, WARPGROUP_KEYS, KEY)
        inside = gl.minimum(key, work.bounds.key_length - 1)
        dk, dv = _zeros(shared, WARPGROUP)
        for member in range(schedule.MODES.group):
            tokens = work.bounds.tokens(work.head_row(member))
            key_alpha, rows, ends = keys_of_head(work, member, tokens, key, inside, decay)
            first_part = work.first_tile(member) * shared.TILE.dq_parts + FIRST_PART
            # 2^31 rows would not fit in any GPU's memory
            first_row = work.bounds.rows(work.head_row(member), False)
            dq_target = (dq_memory, first_part, decay.row_sums, first_row, units)
            key_sum = gl.zeros([WARPGROUP_KEYS, 4], gl.float32, SHARES)
            # the previous visit, as tile · SIDES + side
            previous = -1
            for side in range(schedule.MODES.sides):
                first, end = work.rows_of_side(rows, side)
                visited = work.visited(ends, side)
                # wait late, so that the loads above run while the keys arrive
                mbarrier.wait(shared.barriers.keys_ready, count & 1)
                if not COMMON_KEYS:
                    # One thread waits until dk of the last work tile has left the slots of dSᵀ. The barrier holds back
                    # the others, which write there too
                    tma.store_wait(0)
                    gluon_compat.thread_barrier()
                for PARTIAL in gl.static_range(1, -1, -1):
                    first_visit, end_visit = visits(visited, PARTIAL)
                    for visit in range(first_visit, end_visit):
                        tile = query_tile(visit, visited)
                        dk, dv, key_sum = NEXT_TILE(
                            n, tile, previous, (dk, dv, key_sum), (key, key_alpha, first, end), work, shared, dq_target,
                            scale * LOG2E, WARPGROUP, PARTIAL,
                        )
                        previous = tile * schedule.MODES.sides + side
                        n = opaque_next(n)
                if schedule.MODES.sides == 2:
                    # right of the diagonal the sign is reversed: with a change of sign after each side, sums are
                    # left − right
                    key_alpha, key_sum = -key_alpha, -key_sum
            is_last = member == schedule.MODES.group - 1
            if not COMMON_KEYS:  # noqa: SIM102 (one is known when it compiles, the other when it runs)
                if is_last:
                    # store dv to the buffer of this warpgroup's values
                    flat(shared.values.index(WARPGROUP)).store(dv.to(shared.values.dtype))
                    fence_async_shared()
                    arrive(shared.barriers.dv_ready)
            END_HEAD(n, previous, is_last, work, shared, dq_target, WARPGROUP)
            if KEY_SUMS:
                # find the work tile again: its bounds would take registers in the loop
                store_key_sums(find_work(schedule, index), member, key_sum, decay, OWN)
        if not COMMON_KEYS:
            # both warpgroups have read dSᵀ of the last tile, too
            mbarrier.wait(shared.barriers.keys_read, count & 1)
        STORE(n, dk, dv, find_work(schedule, index), shared, dk_desc, scale, WARPGROUP)
        count += 1
        index = shared.published_index(count)
    if not COMMON_KEYS:
        tma.store_wait(0)


@gluon.jit
def consume(consuming, WARPGROUP: gl.constexpr):
    """Run one consumer warpgroup."""
    _, shared, _, _, _, _, _ = consuming
    if shared.TILE.common_keys:
        _walk(consuming, WARPGROUP, next_tile_256, end_head_256, store_256)
    elif shared.TILE.blocks > 1:
        _walk(consuming, WARPGROUP, next_tile_192, end_head_192, store_192)
    else:
        _walk(consuming, WARPGROUP, next_tile_128, end_head_128, store_128)
