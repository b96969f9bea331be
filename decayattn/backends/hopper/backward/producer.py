"""The backward's producer: one warp that fetches work tiles from the scheduler and streams their tiles.

It also stores the gradients that consumers leave in the buffers of keys and values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from decayattn.backends.hopper.backward.row_terms import terms_row_of_tile
from decayattn.backends.hopper.backward.work import find_work, query_tile, visit_count
from decayattn.backends.hopper.backward.zero_dq import publish_zeroed, start_zeroing, wait_zeroed
from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import FACTORS, PART, WARPGROUP_KEYS
from decayattn.backends.tiles.decay import DECAY_BLOCK, constant_rate, row_anchor


@gluon.jit
def _base_difference(work, tile, side, bases, key_base, rate):
    """α at the anchor of a tile's rows minus α at the start of the key tile, with the sign of the side."""
    anchor = row_anchor(tile * work.schedule.TILE.rows, work.bounds.first_position())
    if work.schedule.MODES.decay == "scalar":
        # formed in float64 and rounded once
        difference = (gl.load(bases + gl.maximum(anchor, 0) // DECAY_BLOCK) - key_base).to(gl.float32)
    elif work.schedule.MODES.decay == "constant":
        difference = (anchor - work.bounds.start).to(gl.float32) * rate
    else:
        difference = 0.0
    if work.schedule.MODES.sides == 2:
        difference = gl.where(side == 0, difference, -difference)
    return difference


@gluon.jit
def _store_gradients(schedule, index, shared, count, results):
    """Start to store dv of the count-th work tile from the buffer of its values, once both warpgroups have written it.

    COMMON_KEYS: also dk, from the buffer of its keys.
    """
    dk_desc, dv_desc = results
    mbarrier.wait(shared.barriers.dv_ready, count & 1)
    work = find_work(schedule, index)
    PARTS: gl.constexpr = schedule.TILE.keys // WARPGROUP_KEYS
    for part in gl.static_range(PARTS):
        gluon_compat.store(dv_desc, work.key_at(part), shared.values.index(part))
    if shared.TILE.common_keys:
        gluon_compat.store(dk_desc, work.key_at(0), shared.keys.index(0))


@gluon.jit
def _replace_keys(schedule, previous, work, shared, count, k_desc, v_desc, results):
    """Store gradients of the last work tile, and load keys and values of the count-th one into their buffers."""
    if count > 0:
        _store_gradients(schedule, previous, shared, count - 1, results)
        if shared.TILE.common_keys:
            tma.store_wait(0)
        else:
            mbarrier.wait(shared.barriers.keys_read, (count - 1) & 1)
    PARTS: gl.constexpr = schedule.TILE.keys // WARPGROUP_KEYS
    BLOCKS: gl.constexpr = schedule.TILE.blocks
    K_BYTES: gl.constexpr = BLOCKS * k_desc.block_type.nbytes
    mbarrier.expect(shared.barriers.keys_ready, PARTS * (K_BYTES + v_desc.block_type.nbytes))
    for part in gl.static_range(PARTS):
        for block in gl.static_range(BLOCKS):
            at = work.key_at(part, block * PART)
            gluon_compat.load(k_desc, at, shared.barriers.keys_ready, shared.keys.index(part * BLOCKS + block))
    if not shared.TILE.common_keys:
        tma.store_wait(0)
    for part in gl.static_range(PARTS):
        gluon_compat.load(v_desc, work.key_at(part), shared.barriers.keys_ready, shared.values.index(part))


@gluon.jit
def produce(schedule, shared, counters, sources, results, zeros_desc, decay):
    """Run the producer warp: keys and values of every work tile, and the query tiles of each head, partial ones first.

    Meanwhile it zeroes dq of the next chunk's heads (zero_dq.py). It loads keys once those of the last work tile have
    been read, and values once its dv has left. sources: the descriptors of q, k, v, d_out, the row terms and the rows'
    factors; results: those of dk and dv.
    """
    q_desc, k_desc, v_desc, d_out_desc, terms_desc, factors_desc = sources
    BLOCKS: gl.constexpr = schedule.TILE.blocks
    Q_BYTES: gl.constexpr = BLOCKS * q_desc.block_type.nbytes
    FACTOR_BYTES: gl.constexpr = FACTORS * factors_desc.block_type.nbytes if schedule.MODES.row_scales else 0
    ROWS: gl.constexpr = schedule.TILE.rows
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # the first index is fetched too, instead of program_id: waiting for zeros (zero_dq.py) is safe only for work tiles
    # of running programs
    index = gl.atomic_add(counters, 1)
    previous = index * 0  # not index itself: Triton would not see the assignment below as a change
    count = index * 0
    n = index * 0
    zeroed = index * 0  # the last chunk with zeros that this program has waited for
    while index < schedule.work_tiles:
        work = find_work(schedule, index)
        shared.publish(count, index)
        n_begin = n
        is_zeroing = start_zeroing(schedule, shared.zeros, zeros_desc, index)
        if schedule.chunk(index) > zeroed:
            wait_zeroed(schedule, counters, index)
            zeroed = schedule.chunk(index)
        _replace_keys(schedule, previous, work, shared, count, k_desc, v_desc, results)
        for member in range(schedule.MODES.group):
            head, head_row = work.head(member), work.head_row(member)
            tokens = work.bounds.tokens(head_row)
            bases = decay.base + work.bounds.blocks(head_row)
            key_base = 0.0
            rate = 0.0
            if schedule.MODES.decay == "scalar":
                key_base = gl.load(bases + work.bounds.start // DECAY_BLOCK)
            elif schedule.MODES.decay == "constant":
                rate = constant_rate(decay.rates, 1, head, gl.float32)
            limits = work.limits(member, decay.rates)
            ends = work.rows_of_ends(member, decay.last_reset + tokens, decay.next_reset + tokens, limits)
            for side in range(schedule.MODES.sides):
                visited = work.visited(ends, side)
                for visit in range(visit_count(visited)):
                    tile = query_tile(visit, visited)
                    stage = shared.stage(n)
                    # loaded before the wait, so that the copies start right after it
                    difference = _base_difference(work, tile, side, bases, key_base, rate)
                    mbarrier.wait(shared.barriers.empty.index(stage), shared.phase(n) ^ 1)
                    shared.differences.index(stage).store(gl.full([1], difference, gl.float32, LAYOUT))
                    shared.starts.index(stage).store(gl.full([1], tile * ROWS, gl.int32, LAYOUT))
                    ready = shared.barriers.queries_ready.index(stage)
                    terms_row = terms_row_of_tile(work.first_tile(member) + tile, side, schedule.MODES.sides, ROWS)
                    mbarrier.expect(ready, Q_BYTES + terms_desc.block_type.nbytes + FACTOR_BYTES)
                    for block in gl.static_range(BLOCKS):
                        at = work.bounds.rows_at(head, tile * ROWS, block * PART)
                        gluon_compat.load(q_desc, at, ready, shared.queries.index(stage * BLOCKS + block))
                    gluon_compat.load(terms_desc, [terms_row, 0], ready, shared.terms.index(stage))
                    if schedule.MODES.row_scales:
                        for n_factor in gl.static_range(FACTORS):
                            line = terms_row // ROWS * FACTORS + n_factor
                            there = shared.factors.index(stage * FACTORS + n_factor)
                            gluon_compat.load(factors_desc, [line, 0], ready, there)
                    ready = shared.barriers.d_outs_ready.index(stage)
                    mbarrier.expect(ready, d_out_desc.block_type.nbytes)
                    at = work.bounds.rows_at(head, tile * ROWS)
                    gluon_compat.load(d_out_desc, at, ready, shared.d_outs.index(stage))
                    n += 1
                    if is_zeroing & (n == n_begin + 2):
                        # by now the zeros have been in memory for long, and other programs wait for them
                        publish_zeroed(schedule, counters, index)
                        is_zeroing = False
        if is_zeroing:
            publish_zeroed(schedule, counters, index)
        count += 1
        previous = index
        # fetched late, so that the last work tiles go to programs that are done
        index = gl.atomic_add(counters, 1)
    shared.publish(count, schedule.work_tiles)
    if count > 0:
        _store_gradients(schedule, previous, shared, count - 1, results)
        tma.store_wait(0)
