"""Work tiles of the forward, their order, and the order in which each visits its key tiles.

A work tile is a tile of query rows of one sequence and one head: 64 rows for every consumer warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.hopper.common.tile_table import TileBounds, coordinates, dense_bounds, load_bounds
from decayattn.backends.planning.offsets import parts_before, start_of_head
from decayattn.backends.tiles.decay import DECAY_BLOCK
from decayattn.backends.tiles.visibility import GRANULE


@aggregate
class QuerySchedule:
    """Lengths and heads of a call, and the order of its work tiles.

    Dense, every batch entry is one sequence, and row_tiles counts the tiles of one entry. RAGGED, a table lists the
    tiles of all sequences, and row_tiles counts all of them. The axes are those of the tensors in memory. A tile has
    KEYS keys: a block of the decay prefix, or half of one.
    """

    work_tiles: gl.tensor
    row_tiles: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    together: gl.tensor
    query_axis: gl.tensor
    key_axis: gl.tensor
    block_axis: gl.tensor
    granule_axis: gl.tensor
    table: gl.tensor
    RAGGED: gl.constexpr
    PACKED: gl.constexpr
    KEYS: gl.constexpr

    @gluon.jit
    def head_and_tile(self, index):
        """(head_row, tile) of a work tile.

        `together` heads, with keys that fit the cache, take turns tile by tile; the last chunk may have fewer heads.
        """
        chunk = self.together * self.row_tiles
        first, rest = index // chunk * self.together, index % chunk
        heads = gl.minimum(self.together, self.work_tiles // self.row_tiles - first)
        return first + rest % heads, rest // heads

    @gluon.jit
    def dense_work(self, index, TILE: gl.constexpr):
        """Work tile of a dense call; tiles that see the most keys come first."""
        head_row, tile = self.head_and_tile(index)
        start = (self.row_tiles - 1 - tile) * TILE
        bounds = dense_bounds(start, self.query_axis, self.key_axis, head_row // self.heads)
        return QueryWork(bounds, head_row, head_row % self.heads, self.KEYS)

    @gluon.jit
    def ragged_work(self, index, bounds):
        head, _ = self.head_and_tile(index)
        return QueryWork(bounds, bounds.entry * self.heads + head, head, self.KEYS)

    @gluon.jit
    def find(self, index, TILE: gl.constexpr):
        """Return the work tile with this index."""
        if self.RAGGED:
            _, tile = self.head_and_tile(index)
            work = self.ragged_work(index, load_bounds(self.table, tile))
        else:
            work = self.dense_work(index, TILE)
        return work

    @gluon.jit
    def rows(self, work):
        """Offset of the rows of a work tile's sequence and head in a buffer (B, H, T_q)."""
        return start_of_head(work.head_row, self.query_axis, work.bounds.first_row)

    @gluon.jit
    def tokens(self, work):
        return start_of_head(work.head_row, self.key_axis, work.bounds.first_token)

    @gluon.jit
    def blocks(self, work):
        return start_of_head(work.head_row, self.block_axis, work.bounds.first_block, False)

    @gluon.jit
    def granules(self, work):
        """Offset of the granules of a work tile's sequence and head in a plan (as skipping.granules_of_head)."""
        bounds, first_granule = work.bounds, 0
        if self.PACKED:
            # the sequence's index, which follows from two offsets of the table (offsets.parts_before)
            sequence = bounds.first_block - bounds.first_token // DECAY_BLOCK
            first_granule = parts_before(bounds.first_row, sequence, GRANULE)
        return start_of_head(work.head_row, self.granule_axis, first_granule, False)

    @gluon.jit
    def rows_at(self, work, row):
        """TMA coordinates of rows of a work tile's head from `row` of its sequence on."""
        bounds = work.bounds
        return coordinates(
            bounds.entry, work.head, row, bounds.first_row, bounds.query_length, self.query_axis, self.RAGGED
        )

    @gluon.jit
    def keys_at(self, work, kv_head, key):
        """TMA coordinates of keys of a head of keys from `key` of a work tile's sequence on."""
        bounds = work.bounds
        return coordinates(
            bounds.entry, kv_head, key, bounds.first_token, bounds.key_length, self.key_axis, self.RAGGED
        )


@aggregate
class QueryWork:
    """A work tile of the forward: a tile of query rows of a sequence, and its head."""

    bounds: TileBounds
    head_row: gl.tensor
    head: gl.tensor
    KEYS: gl.constexpr

    @gluon.jit
    def first_position(self):
        return self.bounds.key_length - self.bounds.query_length

    @gluon.jit
    def anchor(self, start):
        """Anchor of α of rows, the same in every backend: the position of the first row of a block of rows."""
        return start // DECAY_BLOCK * DECAY_BLOCK + self.first_position()

    @gluon.jit
    def tile_end(self, start, ROWS: gl.constexpr):
        """End of the key tiles of the rows from `start` on, at least 1.

        Rows that see no key visit one tile, in which every score is masked.
        """
        final_row = gl.minimum(start + ROWS, self.bounds.query_length) - 1
        return gl.maximum(gl.cdiv(final_row + 1 + self.first_position(), self.KEYS), 1)

    @gluon.jit
    def first_right_key(self):
        """First key to the right of the diagonal, for the first row."""
        return gl.maximum(self.bounds.start + self.first_position() + 1, 0)


@aggregate
class Walk:
    """Order in which a work tile visits key tiles.

    The first left_visits go down from left_end, left of the diagonal, so that softmax begins where decayed scores are
    largest. Not CAUSAL, the others go up from right_begin, right of the diagonal. Tiles on the diagonal are visited
    twice.
    """

    left_end: gl.tensor
    left_visits: gl.tensor
    right_begin: gl.tensor
    CAUSAL: gl.constexpr
    KEYS: gl.constexpr

    @gluon.jit
    def is_right(self, visit):
        return visit >= self.left_visits

    @gluon.jit
    def tile(self, visit):
        tile = self.left_end - 1 - visit
        if not self.CAUSAL:
            tile = gl.where(self.is_right(visit), self.right_begin + (visit - self.left_visits), tile)
        return tile

    @gluon.jit
    def tile_or_last(self, visit, bounds):
        """Like `tile`, for a visit that may be beyond the last one."""
        return gl.minimum(self.tile(visit), (bounds.key_length - 1) // self.KEYS)
