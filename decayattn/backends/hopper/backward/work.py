"""Work tiles of the backward, their order, and the query tiles that each visits.

A work tile is a tile of keys of one sequence and one head of keys. It visits the rows of all query heads of its group.

Not causal, a decay has one sign for rows i ≥ j (key j is left of the diagonal) and the other for rows i < j (it is
right of it). So a work tile visits first the query tiles of one side, then those of the other. It visits tiles on the
diagonal twice: a visit has one sign.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.fragments import WARPGROUP_KEYS
from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.hopper.common.tile_table import Axes, TileBounds, dense_bounds, load_bounds
from decayattn.backends.tiles.decay import DECAY_BLOCK, side_of_head
from decayattn.backends.tiles.visibility import GRANULE, partial_tile, rows_that_see, tiles_between


@aggregate
class KeySchedule:
    """Lengths and heads of a call, constants of the kernel (call.Modes and config.BackwardConfig), and the work order.

    A chunk of `together` heads, with rows that fit the cache, takes turns tile by tile. Causal, the first key tiles are
    visible to the most rows and come first, so the last tiles of several heads end at the same time. The last heads
    come first: ALiBi and RetNet give them the longest memory, so they have the most work if keys are skipped.
    """

    work_tiles: gl.tensor
    kv_heads: gl.tensor  # of all entries
    together: gl.tensor
    key_table: gl.tensor
    key_tiles: gl.tensor
    heads: gl.tensor
    axes: Axes
    row_tiles: gl.tensor
    left: gl.tensor
    right: gl.tensor
    mirror: gl.tensor
    MODES: gl.constexpr
    TILE: gl.constexpr

    @gluon.jit
    def chunk_work_tiles(self):
        """Number of work tiles of every chunk but the last one."""
        return self.together * self.key_tiles

    @gluon.jit
    def chunk(self, index):
        return index // self.chunk_work_tiles()

    @gluon.jit
    def tiles_of_chunk(self, chunk):
        """(first, number) of a chunk's query tiles, counted through all heads."""
        first, end = self.heads_of_chunk(chunk)
        tiles = self.MODES.group * self.row_tiles
        return first * tiles, (end - first) * tiles

    @gluon.jit
    def heads_of_chunk(self, chunk):
        """[first, end) of a chunk's heads of keys. The last chunk has the first heads, and may have fewer."""
        end = self.kv_heads - chunk * self.together
        return gl.maximum(end - self.together, 0), end


@aggregate
class KeyWork:
    """A work tile of the backward: a key tile of a head of keys.

    Dense, every batch entry is one sequence. Ragged, bounds come from the table of key tiles, and tiles of rows are
    counted through all sequences.
    """

    schedule: KeySchedule
    bounds: TileBounds
    kv_head: gl.tensor

    @gluon.jit
    def head(self, member):
        return self.kv_head * self.schedule.MODES.group + member

    @gluon.jit
    def head_row(self, member):
        return self.bounds.entry * self.schedule.heads + self.head(member)

    @gluon.jit
    def first_tile(self, member):
        """First query tile of a head, counted through all heads."""
        if self.schedule.MODES.ragged:
            first = self.head(member) * self.schedule.row_tiles + self.bounds.first_tile
        else:
            first = self.head_row(member) * self.schedule.row_tiles
        return first

    @gluon.jit
    def key_at(self, NTH: gl.constexpr, COLUMN: gl.constexpr = 0):
        """TMA coordinates of WARPGROUP_KEYS keys, from a column on."""
        return self.bounds.keys_at(self.kv_head, self.bounds.start + NTH * WARPGROUP_KEYS, COLUMN)

    @gluon.jit
    def limits(self, member, rates):
        """Upper bounds on the keys that a row of a head sees before its own and, not causal, after it.

        Not read without a window or a constant decay.
        """
        left, right = self.schedule.left, self.schedule.right
        if self.schedule.MODES.decay == "constant":
            left = side_of_head(rates, 1, self.head(member), left if self.schedule.MODES.window else None)
            if not self.schedule.MODES.causal:
                right = side_of_head(rates, 1, self.head(member), right if self.schedule.MODES.window else None)
        return left, right

    @gluon.jit
    def rows_of(self, key, last_reset, next_reset, limits):
        """(first, own, end): rows [first, end) see the key, which is left of the diagonal for those from `own` on."""
        HAS_RESETS: gl.constexpr = self.schedule.MODES.decay == "scalar"
        CAUSAL: gl.constexpr = self.schedule.MODES.causal
        rows = self.bounds.query_length
        inside = gl.minimum(key, self.bounds.key_length - 1)
        LIMITED: gl.constexpr = self.schedule.MODES.limited
        first, end = rows_that_see(
            inside, rows, self.bounds.first_position(), last_reset, next_reset, CAUSAL, HAS_RESETS,
            limits[0] if LIMITED else None, limits[1] if LIMITED and not CAUSAL else None,
        )
        # not clipped to the last row: keys past the end get no rows
        own = gl.maximum(key - self.bounds.first_position(), 0)
        if CAUSAL:
            first = own
        else:
            first = gl.where(own < end, first, end)
        return first, own, end

    @gluon.jit
    def rows_of_side(self, rows, side):
        """[first, end) of the rows on one side of the diagonal that see a key, from its rows_of."""
        first, own, end = rows
        if self.schedule.MODES.sides == 2:
            first, end = gl.where(side == 0, own, first), gl.where(side == 0, end, gl.minimum(own, end))
        return first, end

    @gluon.jit
    def rows_of_ends(self, member, last_reset, next_reset, limits):
        """rows_of the first and the last key of the tile, which bound those of all its keys (they grow with the key).

        Planned, rows after the last granule that visits the tile do not count (skipping.py).
        """
        first_min, own_min, end_min = self.rows_of(self.bounds.start, last_reset, next_reset, limits)
        last_key = self.bounds.start + self.schedule.TILE.keys - 1
        first_max, own_max, end_max = self.rows_of(last_key, last_reset, next_reset, limits)
        if self.schedule.MODES.planned:
            blocks = self.bounds.blocks(self.head_row(member))
            last_granule = gl.load(self.schedule.mirror + blocks + self.bounds.start // DECAY_BLOCK)
            # rounded up to full tiles, which need no mask: the additional rows do see the keys
            planned = gl.cdiv((last_granule + 1) * GRANULE, self.schedule.TILE.rows) * self.schedule.TILE.rows
            end_min, end_max = gl.minimum(end_min, planned), gl.minimum(end_max, planned)
        return (first_min, own_min, end_min), (first_max, own_max, end_max)

    @gluon.jit
    def visited(self, ends, side):
        """(begin, full_begin, full_end, end) of the query tiles on a side that see a key of the tile (tiles_between).
        """
        first_min, end_min = self.rows_of_side(ends[0], side)
        first_max, end_max = self.rows_of_side(ends[1], side)
        return tiles_between(first_min, first_max, end_min, end_max, self.schedule.TILE.rows)


@gluon.jit
def visit_count(visited):
    """Number of query tiles of a side, from its KeyWork.visited."""
    begin, _, _, end = visited
    return end - begin


@gluon.jit
def partial_count(visited):
    """Number of partial tiles among them."""
    begin, full_begin, full_end, end = visited
    return end - begin - (full_end - full_begin)


@gluon.jit
def visits(visited, PARTIAL: gl.constexpr):
    """[first, end) of the visits to partial tiles, or to full ones."""
    first, end = partial_count(visited), visit_count(visited)
    if PARTIAL:
        first, end = first * 0, first
    return first, end


@gluon.jit
def query_tile(visit, visited):
    """Tile of a visit, for the producer and the consumers: partial tiles come first, then full ones."""
    begin, full_begin, full_end, _ = visited
    partials = partial_count(visited)
    partial = partial_tile(visit, begin, full_begin, full_end)
    return gl.where(visit < partials, partial, full_begin + visit - partials)


@gluon.jit
def find_work(schedule, index):
    """Return the work tile with this index."""
    rest = index % schedule.chunk_work_tiles()
    first, end = schedule.heads_of_chunk(schedule.chunk(index))
    tile = rest // (end - first)
    kv_head = end - 1 - rest % (end - first)
    if schedule.MODES.ragged:
        bounds = load_bounds(schedule.axes, schedule.key_table, tile)
    else:
        kv_heads = schedule.heads // schedule.MODES.group
        bounds = dense_bounds(schedule.axes, tile * schedule.TILE.keys, kv_head // kv_heads)
        kv_head = kv_head % kv_heads
    return KeyWork(schedule, bounds, kv_head)
