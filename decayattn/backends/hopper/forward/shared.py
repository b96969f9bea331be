"""Shared memory of the forward, and the record of a work tile that the producer publishes and the consumers read."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common import descriptors, gluon_compat
from decayattn.backends.hopper.common.fragments import DEPTH, SPLIT_COLUMNS, WARPS
from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.hopper.common.pipelines import Pipeline, load_word, stacked, stage, store_word
from decayattn.backends.hopper.common.tile_table import TileBounds, dense_bounds
from decayattn.backends.hopper.forward.work import QueryWork

# consumer warpgroups, as a size that a tensor can have
WARPGROUPS_PADDED: gl.constexpr = gl.constexpr(4)
# keys of a tile of β that TMA fetches, SPLIT_COLUMNS rows of them
PART_KEYS: gl.constexpr = gl.constexpr(descriptors.PART_KEYS)

# states of a record: first pass; second pass, which treats every tile as partial; no work tile left
NORMAL: gl.constexpr = gl.constexpr(0)
CAREFUL: gl.constexpr = gl.constexpr(1)
END: gl.constexpr = gl.constexpr(2)

# words of a record (publish, published_work); those from QUERY_LENGTH on are written for ragged calls only
STATE: gl.constexpr = gl.constexpr(0)
INDEX: gl.constexpr = gl.constexpr(1)
TILES: gl.constexpr = gl.constexpr(2)
TILE_END: gl.constexpr = gl.constexpr(3)
START: gl.constexpr = gl.constexpr(4)
ENTRY: gl.constexpr = gl.constexpr(5)
HEAD_ROW: gl.constexpr = gl.constexpr(6)
QUERY_LENGTH: gl.constexpr = gl.constexpr(7)
KEY_LENGTH: gl.constexpr = gl.constexpr(8)
FIRST_ROW: gl.constexpr = gl.constexpr(9)
FIRST_TOKEN: gl.constexpr = gl.constexpr(10)
FIRST_BLOCK: gl.constexpr = gl.constexpr(11)
WORDS: gl.constexpr = gl.constexpr(12)
# bounds of the key tiles that each warpgroup's rows see on a side of the diagonal (visibility.tiles_between)
VISITED_BEGIN: gl.constexpr = gl.constexpr(0)
FULL_BEGIN: gl.constexpr = gl.constexpr(1)
FULL_END: gl.constexpr = gl.constexpr(2)
VISITED_END: gl.constexpr = gl.constexpr(3)
BOUNDS: gl.constexpr = gl.constexpr(4)


@aggregate
class ForwardShared:
    """All shared memory of the forward.

    Three pipelines have barriers of their own: queries (SLOTS work tiles: one in use and, of two, one being loaded),
    keys and values (STAGES key tiles). The other buffers follow one of them::

        with queries  published   the record of the work tile; its own barrier signals that it is written
                      left        the key tiles that each warpgroup's rows see left of the diagonal (seen_tile)
                      right       the same, right of it; not read if causal
                      overflows   1 if sums of a warp overflowed: written by consumers, read by the producer
                      beta        −α_j / scale of a tile's keys, if the decay is constant
        with keys     beta        the same, if the decay is per token
                      differences α at each warpgroup's anchor minus α where β is 0: at the start of the tile's block,
                                  or of the tile, if the decay is constant
        constant      signs       ones and minus ones: factors of beta left and right of the diagonal; not causal only
        a warpgroup's row_alphas  α of its rows, from the first tile of a work tile to its end
                      fences      see consumer._next_tile
    """

    queries: Pipeline
    keys: Pipeline
    values: Pipeline
    published: Pipeline
    beta: gl.shared_memory_descriptor
    differences: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    signs: gl.shared_memory_descriptor
    overflows: gl.shared_memory_descriptor
    fences: gl.shared_memory_descriptor
    row_alphas: gl.shared_memory_descriptor
    TILE: gl.constexpr

    @gluon.jit
    def skip(self, begin, end):
        """Release key tiles unread, after their arrival: an earlier release would count for the previous tile."""
        for n in range(begin, end):
            self.keys.consumer_wait(n)
            self.keys.consumer_release(n)
            self.values.consumer_wait(n)
            self.values.consumer_release(n)

    @gluon.jit
    def query_tile(self, count, WARPGROUP: gl.constexpr):
        """Buffer of a warpgroup's q of the count-th work tile."""
        return self.queries.tiles.index(stage(count, self.queries.STAGES) * self.TILE.warpgroups + WARPGROUP)

    @gluon.jit
    def out_tile(self, count, desc, WARPGROUP: gl.constexpr):
        """The same memory for the warpgroup's out, as a tile of desc, which is as large or smaller."""
        tile = self.query_tile(count, WARPGROUP)
        COUNT: gl.constexpr = tile.shape[-1] // desc.block_shape[-1]
        if COUNT > 1:
            tile = gluon_compat.reinterpret(tile, desc.dtype, stacked(COUNT, desc.block_shape), desc.layout).index(0)
        return tile

    @gluon.jit
    def is_careful(self, count):
        """True in the second pass over the count-th work tile; valid until its queries are released."""
        return published_state(self, count) == CAREFUL

    @gluon.jit
    def overflow(self, count, WARPGROUP: gl.constexpr):
        """Flags (WARPS,) of a warpgroup for the count-th work tile: 1 if sums of the warp overflowed."""
        return self.overflows.index(stage(count, self.queries.STAGES) * WARPGROUPS_PADDED + WARPGROUP)

    @gluon.jit
    def overflowed(self, count):
        """True if any sum overflowed in the work tile that last used the slot of the count-th one."""
        EVERY: gl.constexpr = gl.BlockedLayout([WARPS], [32], [1], [0])
        some = 0
        WARPGROUPS: gl.constexpr = self.TILE.warpgroups
        for w in gl.static_range(WARPGROUPS):
            some |= gl.max(self.overflow(count, w).load(EVERY), 0)
        return some != 0


@gluon.jit
def allocate_beta(desc, COUNT: gl.constexpr, KEYS: gl.constexpr):
    """Allocate (COUNT, DEPTH, KEYS), which products add to the scores; zeros except in rows that load_beta fetches."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DEPTH, KEYS], gl.bfloat16)
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    beta = gl.allocate_shared_memory(gl.bfloat16, [COUNT, DEPTH, KEYS], LAYOUT)
    for n in gl.static_range(COUNT):
        beta.index(n).store(gl.full([DEPTH, KEYS], 0.0, gl.bfloat16, ZEROS))
    return beta


@gluon.jit
def load_beta(desc, block, key, barrier, beta, n):
    """Fetch the splits of a tile's keys, from `key` of a block on, as tiles of the descriptor.

    The other rows of beta stay zeros.
    """
    PARTS: gl.constexpr = beta.shape[2] // PART_KEYS
    COUNT: gl.constexpr = beta.shape[0] * PARTS * (DEPTH // SPLIT_COLUMNS)
    tiles = gluon_compat.reinterpret(beta, gl.bfloat16, stacked(COUNT, desc.block_shape), desc.layout)
    for part in gl.static_range(PARTS):
        tile = tiles.index((n * PARTS + part) * (DEPTH // SPLIT_COLUMNS))
        gluon_compat.load(desc, [block, 0, key + part * PART_KEYS], barrier, tile)


# ----------------------------------------------------------------------------------------------------------------------
# The record of a work tile


@gluon.jit
def publish(shared, count, state, index, work, tiles, tile_end, left, right):
    """Publish the count-th work tile of this program: `tiles` visits of key tiles, from tile_end down (work.Walk).

    left, right: the tiles that each warpgroup's rows see on either side of the diagonal (visibility.tiles_between).
    """
    words, word, bounds = shared.published.tiles, stage(count, shared.published.STAGES) * WORDS, work.bounds
    store_word(words, word + STATE, state)
    store_word(words, word + INDEX, index)
    store_word(words, word + TILES, tiles)
    store_word(words, word + TILE_END, tile_end)
    # a work tile without key tiles has no rows either
    store_word(words, word + START, gl.where(tiles > 0, bounds.start, bounds.query_length))
    store_word(words, word + ENTRY, bounds.entry)
    store_word(words, word + HEAD_ROW, work.head_row)
    if work.schedule.MODES.ragged:
        store_word(words, word + QUERY_LENGTH, bounds.query_length)
        store_word(words, word + KEY_LENGTH, bounds.key_length)
        store_word(words, word + FIRST_ROW, bounds.first_row)
        store_word(words, word + FIRST_TOKEN, bounds.first_token)
        store_word(words, word + FIRST_BLOCK, bounds.first_block)
    _store_seen(shared.left, count, left, state)
    if not work.schedule.MODES.causal:
        _store_seen(shared.right, count, right, state)
    shared.published.producer_commit(count)


@gluon.jit
def publish_end(shared, count):
    """Publish that no work tile is left."""
    store_word(shared.published.tiles, stage(count, shared.published.STAGES) * WORDS + STATE, END)
    shared.published.producer_commit(count)


@gluon.jit
def published_index(shared, count):
    """Index of the work tile that last used the slot of the count-th one; for the producer."""
    return load_word(shared.published.tiles, stage(count, shared.published.STAGES) * WORDS + INDEX, 1)


@gluon.jit
def published_state(shared, count):
    """State of the count-th work tile, from its publication until its queries are released."""
    return load_word(shared.published.tiles, stage(count, shared.published.STAGES) * WORDS + STATE)


@gluon.jit
def wait_for_work(shared, count):
    """Wait until the count-th work tile is published, and return its state."""
    shared.published.consumer_wait(count)
    return published_state(shared, count)


@gluon.jit
def published_work(shared, count, schedule):
    """(work, tiles, tile_end) of a published work tile, valid until its queries are released."""
    words, word = shared.published.tiles, stage(count, shared.published.STAGES) * WORDS
    start = load_word(words, word + START)
    entry, head_row = load_word(words, word + ENTRY), load_word(words, word + HEAD_ROW)
    if schedule.MODES.ragged:
        bounds = TileBounds(
            schedule.axes, start, load_word(words, word + QUERY_LENGTH), load_word(words, word + KEY_LENGTH), entry,
            load_word(words, word + FIRST_ROW), load_word(words, word + FIRST_TOKEN),
            load_word(words, word + FIRST_BLOCK), start * 0,
        )
    else:
        bounds = dense_bounds(schedule.axes, start, entry)
    work = QueryWork(schedule, bounds, head_row, head_row - entry * schedule.heads)
    return work, load_word(words, word + TILES), load_word(words, word + TILE_END)


@gluon.jit
def _seen(side, count, BOUND: gl.constexpr):
    """One bound of every warpgroup's key tiles in the count-th work tile, on a side (shared.left or shared.right)."""
    return side.index(stage(count, side.shape[0] // BOUNDS) * BOUNDS + BOUND)


@gluon.jit
def _store_seen(side, count, tiles, state):
    begin, full_begin, full_end, end = tiles
    _seen(side, count, VISITED_BEGIN).store(begin)
    _seen(side, count, FULL_BEGIN).store(full_begin)
    # a second pass treats every tile as partial
    _seen(side, count, FULL_END).store(gl.where(state == CAREFUL, full_begin, full_end))
    _seen(side, count, VISITED_END).store(end)


@gluon.jit
def seen_tile(side, count, BOUND: gl.constexpr, WARPGROUP: gl.constexpr):
    """One bound of a warpgroup's key tiles, valid until the queries of the work tile are released."""
    return select(_seen(side, count, BOUND), WARPGROUP)


@gluon.jit
def first_seen(side, count):
    """First key tile that any warpgroup's rows see on a side."""
    every = _seen(side, count, VISITED_BEGIN).load(gl.BlockedLayout([WARPGROUPS_PADDED], [32], [4], [0]))
    return gl.min(every, 0)


@gluon.jit
def select(values, WARPGROUP: gl.constexpr):
    """Return one warpgroup's value, of one value per warpgroup in shared memory."""
    # every thread reads all of them and keeps one
    EVERY: gl.constexpr = gl.BlockedLayout([WARPGROUPS_PADDED], [32], [4], [0])
    every = values.load(EVERY)
    mine = gl.arange(0, WARPGROUPS_PADDED, EVERY) == WARPGROUP
    return gl.sum(gl.where(mine, every, 0), 0)
