"""Work tiles of the forward, their order, and the order in which each visits its key tiles.

A work tile is a tile of query rows of one sequence and one head: 64 rows for every consumer warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.hopper.common.tile_table import Axes, TileBounds, dense_bounds, load_bounds
from decayattn.backends.planning.offsets import parts_before, start_of_head
from decayattn.backends.tiles.decay import DECAY_BLOCK
from decayattn.backends.tiles.visibility import GRANULE


@aggregate
class QuerySchedule:
    """Lengths and heads of a call, and the order of its work tiles.

    Dense, every batch entry is one sequence, and row_tiles counts the tiles of one entry. Ragged, a table lists the
    tiles of all sequences, and row_tiles counts all of them. The axes are those of the tensors in memory. A tile of
    keys is a block of the decay prefix, or half of one.
    """

    work_tiles: gl.tensor
    row_tiles: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    together: gl.tensor
    axes: Axes
    granule_axis: gl.tensor
    table: gl.tensor
    MODES: gl.constexpr
    TILE: gl.constexpr

    @gluon.jit
    def find(self, index):
        """Return the work tile with this index.

        `together` heads, with keys that fit the cache, take turns tile by tile; the last chunk may have fewer heads.
        """
        chunk = self.together * self.row_tiles
        first, rest = index // chunk * self.together, index % chunk
        heads = gl.minimum(self.together, self.work_tiles // self.row_tiles - first)
        head_row, tile = first + rest % heads, rest // heads
        if self.MODES.ragged:
            bounds, head = load_bounds(self.axes, self.table, tile), head_row
            head_row = bounds.entry * self.heads + head
        else:
            # tiles that see the most keys come first
            start = (self.row_tiles - 1 - tile) * self.TILE.rows
            bounds, head = dense_bounds(self.axes, start, head_row // self.heads), head_row % self.heads
        return QueryWork(self, bounds, head_row, head)


@aggregate
class QueryWork:
    """A work tile of the forward: a tile of query rows of a sequence, and its head."""

    schedule: QuerySchedule
    bounds: TileBounds
    head_row: gl.tensor
    head: gl.tensor

    @gluon.jit
    def granules(self):
        """Offset of the granules of the sequence and head in a plan (as skipping.granules_of_head)."""
        bounds, first_granule = self.bounds, 0
        if self.schedule.MODES.packed:
            # the sequence's index, which follows from two offsets of the table (offsets.parts_before)
            sequence = bounds.first_block - bounds.first_token // DECAY_BLOCK
            first_granule = parts_before(bounds.first_row, sequence, GRANULE)
        return start_of_head(self.head_row, self.schedule.granule_axis, first_granule, False)

    @gluon.jit
    def tile_end(self, start, ROWS: gl.constexpr):
        """End of the key tiles of the rows from `start` on, at least 1.

        Rows that see no key visit one tile, in which every score is masked.
        """
        final_row = gl.minimum(start + ROWS, self.bounds.query_length) - 1
        return gl.maximum(gl.cdiv(final_row + 1 + self.bounds.first_position(), self.schedule.TILE.keys), 1)

    @gluon.jit
    def first_right_key(self):
        """First key to the right of the diagonal, for the first row."""
        return gl.maximum(self.bounds.start + self.bounds.first_position() + 1, 0)


@aggregate
class Walk:
    """Order in which a work tile visits key tiles.

    The first left_visits go down from left_end, left of the diagonal, so that softmax begins where decayed scores are
    largest. Not causal, the others go up from right_begin, right of the diagonal. Tiles on the diagonal are visited
    twice.
    """

    schedule: QuerySchedule
    left_end: gl.tensor
    left_visits: gl.tensor
    right_begin: gl.tensor

    @gluon.jit
    def is_right(self, visit):
        return visit >= self.left_visits

    @gluon.jit
    def tile(self, visit):
        tile = self.left_end - 1 - visit
        if not self.schedule.MODES.causal:
            tile = gl.where(self.is_right(visit), self.right_begin + (visit - self.left_visits), tile)
        return tile

    @gluon.jit
    def tile_or_last(self, visit, bounds):
        """Like `tile`, for a visit that may be beyond the last one."""
        return gl.minimum(self.tile(visit), (bounds.key_length - 1) // self.schedule.TILE.keys)
