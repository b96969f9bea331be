"""The forward's producer: one warp that fetches work tiles from the scheduler and streams their tiles by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.fragments import WARPGROUP_ROWS
from decayattn.backends.hopper.common.pipelines import fetch_next, stage
from decayattn.backends.hopper.forward.shared import (
    CAREFUL,
    END,
    NORMAL,
    PART_KEYS,
    WARPGROUPS_PADDED,
    load_beta,
    publish,
    publish_end,
    published_index,
)
from decayattn.backends.hopper.forward.work import Walk
from decayattn.backends.tiles.decay import DECAY_BLOCK, row_anchor
from decayattn.backends.tiles.visibility import tiles_between


@gluon.jit
def produce(shared, schedule, decay, counter, sources):
    """Fetch work tiles and stream them, until the sums of all of them are known to be right.

    The slot of a work tile shows if its sums overflowed once it is used again, one or two work tiles later. So empty
    work tiles follow the last ones. sources: the descriptors of q, k, v and beta.
    """
    next_index = gl.program_id(0)
    count = next_index * 0
    sent = next_index * 0
    state = next_index * 0
    # count of work tiles after which the overflows of all first passes are known
    known = next_index * 0
    while state != END:
        shared.queries.producer_acquire(count)
        again = shared.overflowed(count)
        index = gl.where(again, published_index(shared, count), next_index)
        is_first_pass = (again == 0) & (index < schedule.work_tiles)
        known = gl.where(is_first_pass, count + shared.queries.STAGES, known)
        state = gl.where(again, CAREFUL, gl.where(count < known, NORMAL, END))
        if state == END:
            publish_end(shared, count)
        else:
            tiles, next_index = _stream(
                shared, schedule, decay, count, sent, state, index, is_first_pass, next_index, counter, sources
            )
            sent += tiles
        count += 1


@gluon.jit
def _stream(shared, schedule, decay, count, sent, state, index, is_first_pass, next_index, counter, sources):
    """Stream a work tile: its q, its record, then k and v of its key tiles in the order of its Walk.

    Returns the number of visits (0 for an index beyond the last work tile) and the index of the next work tile. The
    first pass over a work tile fetches that index while its last tiles are in flight.
    """
    q_desc, k_desc, v_desc, beta_desc = sources
    KEYS: gl.constexpr = schedule.TILE.keys
    # Every thread loads the values that the loop depends on. So the compiler knows that they are the same in all
    # threads, and keeps them in uniform registers. It would not know that of values that a shuffle returned
    EVERY: gl.constexpr = gl.BlockedLayout([WARPGROUPS_PADDED], [32], [1], [0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    values = shared.values
    work = schedule.find(gl.minimum(index, schedule.work_tiles - 1))
    bounds, head = work.bounds, work.head
    start = bounds.start
    kv_head = head // schedule.group
    if index < schedule.work_tiles:
        # before any wait for memory
        _load_queries(shared, decay, work, count, q_desc, beta_desc)

    head_decay = decay.of(work)
    rate = head_decay.rate(head)
    tile_end = work.tile_end(start, schedule.TILE.rows)
    key = (tile_end - 1) * KEYS
    first_rows = start + gl.arange(0, WARPGROUPS_PADDED, LANES) * WARPGROUP_ROWS
    anchor = row_anchor(first_rows, bounds.first_position())
    if decay.MODES.decay == "scalar":
        anchor = gl.minimum(anchor, bounds.key_length - 1)
        anchor_bases = head_decay.base(anchor // DECAY_BLOCK)
        difference = anchor_bases.minus(head_decay.base(_block_of(tile_end - 1, KEYS)))
    else:
        anchor_bases = 0.0
        difference = (anchor - key).to(gl.float32) * rate
    if index < schedule.work_tiles:
        # before the next wait for memory: with few stages, consumers would wait for it
        _load_keys(shared, decay, work, sent, key, kv_head, difference, k_desc, beta_desc)

    left, right = _seen_tiles(head_decay, work, LANES)
    first_rows = _first_rows(work, EVERY)
    first_min = gl.min(head_decay.first_visited(first_rows + bounds.first_position(), first_rows), 0)
    tiles = tile_end - first_min // KEYS
    walk = Walk(schedule, tile_end, tiles, tile_end)
    if not decay.MODES.causal:
        final_row = gl.minimum(start + schedule.TILE.rows, bounds.query_length) - 1
        end_max = head_decay.keys_end(final_row + bounds.first_position(), bounds.key_length)
        right_begin = work.first_right_key() // KEYS
        walk = Walk(schedule, tile_end, tiles, right_begin)
        tiles += gl.maximum(gl.cdiv(end_max, KEYS) - right_begin, 0)
    tiles = gl.where(index < schedule.work_tiles, tiles, 0)
    publish(shared, count, state, index, work, tiles, tile_end, left, right)

    next_base = 0.0
    if decay.MODES.decay == "scalar":
        next_base = head_decay.base(_block_of(walk.tile_or_last(1, bounds), KEYS))
    # k of a tile precedes v of the previous tile: the order in which consumers release them
    for n in range(sent + 1, sent + tiles + 1):
        key_before = key
        key = walk.tile(n - sent) * KEYS
        if decay.MODES.decay == "scalar":
            difference = anchor_bases.minus(next_base)
            # one tile early
            next_base = head_decay.base(_block_of(walk.tile_or_last(n + 1 - sent, bounds), KEYS))
        elif decay.MODES.decay == "constant":
            difference = (anchor - key).to(gl.float32) * rate
        if n < sent + tiles:
            _load_keys(shared, decay, work, n, key, kv_head, difference, k_desc, beta_desc)
        if is_first_pass & (n == sent + gl.maximum(tiles - 1, 1)):
            # while the last tiles are in flight
            next_index = fetch_next(counter, schedule.work_tiles)
        values.producer_acquire(n - 1)
        mbarrier.expect(values.full_barrier(n - 1), v_desc.block_type.nbytes)
        at = bounds.keys_at(kv_head, key_before)
        gluon_compat.load(v_desc, at, values.full_barrier(n - 1), values.tile(n - 1))
    return tiles, next_index


@gluon.jit
def _block_of(tile, KEYS: gl.constexpr):
    """Block of the decay prefix that has a tile of keys."""
    return tile // (DECAY_BLOCK // KEYS)


@gluon.jit
def _first_rows(work, LAYOUT: gl.constexpr):
    """First row of each warpgroup; the last row of the sequence for a warpgroup after it."""
    warpgroup = gl.minimum(gl.arange(0, WARPGROUPS_PADDED, LAYOUT), work.schedule.TILE.warpgroups - 1)
    return gl.minimum(work.bounds.start + warpgroup * WARPGROUP_ROWS, work.bounds.query_length - 1)


@gluon.jit
def _seen_tiles(decay, work, LAYOUT: gl.constexpr):
    """Key tiles that each warpgroup's rows see left and right of the diagonal, for the record (publish)."""
    bounds, first_rows = work.bounds, _first_rows(work, LAYOUT)
    first_position = first_rows + bounds.first_position()
    final_position = gl.minimum(first_rows + WARPGROUP_ROWS, bounds.query_length) - 1 + bounds.first_position()
    KEYS: gl.constexpr = work.schedule.TILE.keys
    # both ends of a row's visible keys grow with the row: a warpgroup's first and last row have the extremes
    first_min = decay.first_visited(first_position, first_rows)
    first_max = decay.first_visited(final_position, first_rows)
    # a tile that ends with the first row's own key counts as partial too: after it every row has a maximum
    own = gl.maximum(first_position, 0)
    left = tiles_between(first_min, first_max, own, work.tile_end(first_rows, WARPGROUP_ROWS) * KEYS, KEYS)
    right = left
    if not decay.MODES.causal:
        end_min = decay.keys_end(first_position, bounds.key_length)
        end_max = decay.keys_end(final_position, bounds.key_length)
        # the first tile counts as partial too: rows before all keys have no other
        right_first = gl.maximum(final_position, 0) + 1
        right = tiles_between(right_first * 0, right_first, end_min, end_max, KEYS)
    return left, right


@gluon.jit
def _load_queries(shared, decay, work, count, q_desc, beta_desc):
    """Load q of every warpgroup, and β of a constant decay.

    That β is relative to the first key of a tile, so all key tiles of a head share it.
    """
    WARPGROUPS: gl.constexpr = shared.TILE.warpgroups
    BETA_PARTS: gl.constexpr = shared.TILE.keys // PART_KEYS
    barrier = shared.queries.full_barrier(count)
    if decay.MODES.decay == "constant":
        mbarrier.expect(barrier, WARPGROUPS * q_desc.block_type.nbytes + BETA_PARTS * beta_desc.block_type.nbytes)
        load_beta(beta_desc, work.head, 0, barrier, shared.beta, stage(count, shared.queries.STAGES))
    else:
        mbarrier.expect(barrier, WARPGROUPS * q_desc.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        q = shared.query_tile(count, w)
        gluon_compat.load(q_desc, work.bounds.rows_at(work.head, work.bounds.start + w * WARPGROUP_ROWS), barrier, q)


@gluon.jit
def _load_keys(shared, decay, work, n, key, kv_head, difference, k_desc, beta_desc):
    """Load k of the n-th tile, with its β and the difference of bases."""
    keys = shared.keys
    BETA_PARTS: gl.constexpr = shared.TILE.keys // PART_KEYS
    keys.producer_acquire(n)
    barrier = keys.full_barrier(n)
    if decay.MODES.decay != "none":
        shared.differences.index(stage(n, keys.STAGES)).store(difference)
    if decay.MODES.decay == "scalar":
        mbarrier.expect(barrier, k_desc.block_type.nbytes + BETA_PARTS * beta_desc.block_type.nbytes)
        in_block = key % DECAY_BLOCK if shared.TILE.keys < DECAY_BLOCK else 0
        block = work.bounds.blocks(work.head_row) + key // DECAY_BLOCK
        load_beta(beta_desc, block, in_block, barrier, shared.beta, stage(n, keys.STAGES))
    else:
        mbarrier.expect(barrier, k_desc.block_type.nbytes)
    gluon_compat.load(k_desc, work.bounds.keys_at(kv_head, key), barrier, keys.tile(n))
