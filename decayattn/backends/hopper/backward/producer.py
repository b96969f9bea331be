"""The Hopper backward's producer: one warp that draws items and sends them, and takes their dv away."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from decayattn.backends.hopper.backward.items import found_item, load_rate
from decayattn.backends.hopper.backward.zeroing import start_zeroing, tell_zeroed, wait_zeroed
from decayattn.backends.hopper.common import copy_engine
from decayattn.backends.planning.prefix import DECAY_BLOCK
from decayattn.backends.tiles.visibility import edge_tile

BLOCK: gl.constexpr = gl.constexpr(DECAY_BLOCK)


@gluon.jit
def _base_difference(work, tile, side, bases, key_base, rate):
    """α at the reference of a tile's rows minus α at the start of the key tile, with the sign of the side."""
    reference = tile * work.sizes.ROWS // BLOCK * BLOCK + work.first_position()
    if work.sizes.DECAY == "scalar":
        # formed in float64 and rounded once
        difference = (gl.load(bases + gl.maximum(reference, 0) // BLOCK) - key_base).to(gl.float32)
    elif work.sizes.DECAY == "constant":
        difference = (reference - work.place.start).to(gl.float32) * rate
    else:
        difference = 0.0
    if work.sizes.SIDES == 2:
        difference = gl.where(side == 0, difference, -difference)
    return difference


@gluon.jit
def _store_dv(sizes, item, buffers, count, dv_desc):
    """Begin to store dv of an item, which is the count-th, from where its values were."""
    mbarrier.wait(buffers.dv_ready, count & 1)
    work = found_item(sizes, item)
    for w in gl.static_range(2):
        copy_engine.store(dv_desc, work.key_at(w), buffers.values.index(w))


@gluon.jit
def _exchange_keys(sizes, previous, work, buffers, count, k_desc, v_desc, dv_desc):
    """dv of the item before, keys and values of the count-th one."""
    if count > 0:
        _store_dv(sizes, previous, buffers, count - 1, dv_desc)
        mbarrier.wait(buffers.keys_read, (count - 1) & 1)
    mbarrier.expect(buffers.keys_ready, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for w in gl.static_range(2):
        copy_engine.load(k_desc, work.key_at(w), buffers.keys_ready, buffers.keys.index(w))
    tma.store_wait(0)
    for w in gl.static_range(2):
        copy_engine.load(v_desc, work.key_at(w), buffers.keys_ready, buffers.values.index(w))


@gluon.jit
def produce(
    sizes, buffers, counters, q_desc, k_desc, v_desc, d_out_desc, terms_desc, dv_desc, zeros_desc, rates, rate_stride,
    base, last_reset, next_reset, D: gl.constexpr,
):  # fmt: skip
    """The producer warp: keys and values of an item, and the query tiles of each of its heads, edge tiles first; and
    zeros where dq of other heads will be added up.

    An item's keys come when those of the item before have been read, and its values when dv of that has left.
    """
    ROWS: gl.constexpr = sizes.ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # the first one is drawn, too: who waits for zeros (zeroing.py) waits for items that running programs have begun
    item = gl.atomic_add(counters, 1)
    previous = item * 0  # not item itself: Triton would take the assignment below for no change
    count = item * 0
    n = item * 0
    zeroed = item * 0  # chunks after the first, whose zeros have been waited for
    while item < sizes.number:
        work = found_item(sizes, item)
        buffers.hand_over(count, item)
        n_begin = n
        owed = start_zeroing(sizes, buffers.zeros, zeros_desc, item, D)
        if sizes.chunk(item) > zeroed:
            wait_zeroed(sizes, counters, item)
            zeroed = sizes.chunk(item)
        _exchange_keys(sizes, previous, work, buffers, count, k_desc, v_desc, dv_desc)
        for member in range(sizes.GROUP):
            tokens = work.first_token(member)
            bases = base + work.first_block(member)
            key_base = 0.0
            rate = 0.0
            if sizes.DECAY == "scalar":
                key_base = gl.load(bases + work.place.start // BLOCK)
            elif sizes.DECAY == "constant":
                rate = load_rate(rates, rate_stride, work.head(member))
            left = work.left_of(member, rates, rate_stride)
            ends = work.rows_of_ends(member, last_reset + tokens, next_reset + tokens, left)
            for side in range(sizes.SIDES):
                begin, whole_begin, whole_end, end = work.visited(ends, side)
                edges = end - begin - (whole_end - whole_begin)
                for m in range(end - begin):
                    tile = gl.where(m < edges, edge_tile(m, begin, whole_begin, whole_end), whole_begin + m - edges)
                    stage = buffers.stage(n)
                    # loaded before the wait: the tile's copies start right after it
                    difference = _base_difference(work, tile, side, bases, key_base, rate)
                    mbarrier.wait(buffers.empty.index(stage), buffers.phase(n) ^ 1)
                    buffers.differences.index(stage).store(gl.full([1], difference, gl.float32, LAYOUT))
                    buffers.starts.index(stage).store(gl.full([1], tile * ROWS, gl.int32, LAYOUT))
                    ready = buffers.queries_ready.index(stage)
                    terms_row = ((work.first_tile(member) + tile) * sizes.SIDES + side) * ROWS
                    mbarrier.expect(ready, q_desc.block_type.nbytes + terms_desc.block_type.nbytes)
                    at = work.query_at(member, tile * ROWS)
                    copy_engine.load(q_desc, at, ready, buffers.queries.index(stage))
                    copy_engine.load(terms_desc, [terms_row, 0], ready, buffers.terms.index(stage))
                    ready = buffers.d_outs_ready.index(stage)
                    mbarrier.expect(ready, d_out_desc.block_type.nbytes)
                    copy_engine.load(d_out_desc, at, ready, buffers.d_outs.index(stage))
                    n += 1
                    if owed & (n == n_begin + 2):
                        # they have been there for long, and others will wait for them
                        tell_zeroed(sizes, counters, item)
                        owed = False
        if owed:
            tell_zeroed(sizes, counters, item)
        count += 1
        previous = item
        # drawn late: the last ones go to those who are done
        item = gl.atomic_add(counters, 1)
    buffers.hand_over(count, sizes.number)
    if count > 0:
        _store_dv(sizes, previous, buffers, count - 1, dv_desc)
        tma.store_wait(0)
