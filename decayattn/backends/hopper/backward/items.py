"""What the Hopper backward works on: tiles of keys in their order, and the query tiles that see them.

An item is a tile of keys of a sequence and a head of keys, with the rows of all query heads of its group.

Not causal, a decay has one sign where rows i ≥ j have key j on their left side, and the other where rows i < j have it
on their right. Query tiles are visited first from the one, then from the other side, and those on the diagonal twice:
a visit has one sign, and no score needs its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.copy_engine import aggregate
from decayattn.backends.hopper.common.tile_table import Place, coordinates, dense_place, load_place
from decayattn.backends.hopper.config import KEY_TILE, WARPGROUP_ROWS
from decayattn.backends.planning.skipping import GRANULE
from decayattn.backends.tiles.decay import side_of_head
from decayattn.backends.tiles.scores import LOG2E, RESET_BELOW
from decayattn.backends.tiles.visibility import rows_that_see, tiles_between

KEYS: gl.constexpr = gl.constexpr(KEY_TILE)
# keys of one consumer warpgroup
SHARE: gl.constexpr = gl.constexpr(WARPGROUP_ROWS)
GRANULE_ROWS: gl.constexpr = gl.constexpr(GRANULE)


@gluon.constexpr_function
def has_row_sums(DECAY, DECAY_GRADIENT):
    """Whether the gradient of the decay takes the sums of rows of dS, too: a constant rate's takes moments of keys."""
    return DECAY_GRADIENT and DECAY == "scalar"


@aggregate
class Sizes:
    """The call's lengths and heads, and the number of its items.

    `together` heads are worked at together, tile by tile: so many that their rows stay in the cache. Causal, the first
    key tiles are seen by the most rows, and come first; the last ones of several heads then end at the same time. ALiBi
    and RetNet give the last heads the longest memory: where keys are skipped, these have most to do, and come first.
    """

    number: gl.tensor
    kv_heads: gl.tensor  # of all entries
    together: gl.tensor
    key_table: gl.tensor
    key_tiles: gl.tensor
    heads: gl.tensor
    query_axis: gl.tensor
    key_axis: gl.tensor
    block_axis: gl.tensor
    row_tiles: gl.tensor
    left: gl.tensor
    mirror: gl.tensor
    ROWS: gl.constexpr
    GROUP: gl.constexpr
    DECAY: gl.constexpr
    DECAY_GRADIENT: gl.constexpr
    ROW_SUMS: gl.constexpr
    RAGGED: gl.constexpr
    WINDOW: gl.constexpr
    PLANNED: gl.constexpr
    CAUSAL: gl.constexpr
    SIDES: gl.constexpr  # 2 where they differ, else 1: side 0 has all rows

    @gluon.constexpr_function
    def __init__(
        self, number, kv_heads, together, key_table, key_tiles, heads, query_axis, key_axis, block_axis, row_tiles,
        left, mirror, ROWS, GROUP, DECAY, DECAY_GRADIENT, RAGGED, WINDOW, PLANNED, CAUSAL, SIDES,
    ):  # fmt: skip
        self.number = number
        self.kv_heads = kv_heads
        self.together = together
        self.key_table = key_table
        self.key_tiles = key_tiles
        self.heads = heads
        self.query_axis = query_axis
        self.key_axis = key_axis
        self.block_axis = block_axis
        self.row_tiles = row_tiles
        self.left = left
        self.mirror = mirror
        self.ROWS = gl.constexpr(ROWS)
        self.GROUP = gl.constexpr(GROUP)
        self.DECAY = gl.constexpr(DECAY)
        self.DECAY_GRADIENT = gl.constexpr(DECAY_GRADIENT)
        self.ROW_SUMS = gl.constexpr(has_row_sums(DECAY, DECAY_GRADIENT))
        self.RAGGED = gl.constexpr(RAGGED)
        self.WINDOW = gl.constexpr(WINDOW)
        self.PLANNED = gl.constexpr(PLANNED)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.SIDES = gl.constexpr(SIDES)

    @gluon.jit
    def chunks(self):
        """How often heads are worked at together; the last heads are the first chunk, and the first heads, which may be
        fewer, the last one."""
        return gl.cdiv(self.kv_heads, self.together)

    @gluon.jit
    def chunk_items(self):
        """Of every chunk but the last one."""
        return self.together * self.key_tiles

    @gluon.jit
    def chunk(self, item):
        return item // self.chunk_items()

    @gluon.jit
    def tiles_of_chunk(self, chunk):
        """The first and the number of its query tiles, where tiles of all heads are counted through."""
        first, end = self.heads_of_chunk(chunk)
        tiles = self.GROUP * self.row_tiles
        return first * tiles, (end - first) * tiles

    @gluon.jit
    def heads_of_chunk(self, chunk):
        """Its first head of keys, and the end of them."""
        end = self.kv_heads - chunk * self.together
        return gl.maximum(end - self.together, 0), end


@aggregate
class Item:
    """An item: a key tile of a head of keys.

    RAGGED: place is a line of the table of key tiles, all sequences lie on the axes, and tiles of rows are those of the
    table of all sequences. Dense, the axes are the sequences.
    """

    sizes: Sizes
    place: Place
    kv_head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, sizes, place, kv_head):
        self.sizes = sizes
        self.place = place
        self.kv_head = kv_head

    @gluon.jit
    def first_position(self):
        return self.place.key_length - self.place.query_length

    @gluon.jit
    def head(self, member):
        return self.kv_head * self.sizes.GROUP + member

    @gluon.jit
    def head_row(self, member):
        return self.place.entry * self.sizes.heads + self.head(member)

    @gluon.jit
    def first_row(self, member):
        """Where the rows of a head begin in buffers (B, H, T_q); 2^31 rows would not fit in any GPU's memory."""
        return self.head_row(member) * self.sizes.query_axis + self.place.first_row

    @gluon.jit
    def first_token(self, member):
        return self.head_row(member).to(gl.int64) * self.sizes.key_axis + self.place.first_token

    @gluon.jit
    def first_block(self, member):
        return self.head_row(member) * self.sizes.block_axis + self.place.first_block

    @gluon.jit
    def first_tile(self, member):
        """A head's first query tile, where tiles of all heads are counted through."""
        if self.sizes.RAGGED:
            first = self.head(member) * self.sizes.row_tiles + self.place.first_tile
        else:
            first = self.head_row(member) * self.sizes.row_tiles
        return first

    @gluon.jit
    def query_at(self, member, row):
        """The rows of a head from `row` on, for the copy engine."""
        place = self.place
        return coordinates(
            place.entry, self.head(member), row, place.first_row, place.query_length, self.sizes.query_axis,
            self.sizes.RAGGED,
        )  # fmt: skip

    @gluon.jit
    def key_at(self, WARPGROUP: gl.constexpr, COLUMN: gl.constexpr = 0):
        """The keys of a warpgroup, from a column on, for the copy engine."""
        place = self.place
        return coordinates(
            place.entry, self.kv_head, place.start + WARPGROUP * SHARE, place.first_token, place.key_length,
            self.sizes.key_axis, self.sizes.RAGGED, COLUMN,
        )  # fmt: skip

    @gluon.jit
    def left_of(self, member, rates, rate_stride):
        """How far the rows of a head see to their left; not read without a window or a constant decay."""
        left = self.sizes.left
        if self.sizes.DECAY == "constant":
            left = side_of_head(rates, rate_stride, self.head(member), left if self.sizes.WINDOW else None)
        return left

    @gluon.jit
    def rows_of(self, key, last_reset, next_reset, left):
        """(first, own, end): rows [first, end) see a key, those from the key's own on have it on their left."""
        HAS_RESETS: gl.constexpr = self.sizes.DECAY == "scalar"
        CAUSAL: gl.constexpr = self.sizes.CAUSAL
        rows = self.place.query_length
        inside = gl.minimum(key, self.place.key_length - 1)
        if self.sizes.DECAY == "constant":
            # not causal, a window is a rate's that resets everywhere, and as wide to the right
            first, end = rows_that_see(
                inside, rows, self.first_position(), last_reset, next_reset, CAUSAL, HAS_RESETS, left, left
            )
        elif self.sizes.WINDOW:
            first, end = rows_that_see(
                inside, rows, self.first_position(), last_reset, next_reset, CAUSAL, HAS_RESETS, left
            )
        else:
            first, end = rows_that_see(inside, rows, self.first_position(), last_reset, next_reset, CAUSAL, HAS_RESETS)
        # counted on beyond the last row, it leaves keys past the end without rows
        own = gl.maximum(key - self.first_position(), 0)
        if CAUSAL:
            first = own
        else:
            first = gl.where(own < end, first, end)
        return first, own, end

    @gluon.jit
    def rows_of_side(self, rows, side):
        """[first, end) of the rows of one side that see a key, from what rows_of says of it."""
        first, own, end = rows
        if self.sizes.SIDES == 2:
            first, end = gl.where(side == 0, own, first), gl.where(side == 0, end, gl.minimum(own, end))
        return first, end

    @gluon.jit
    def rows_of_ends(self, member, last_reset, next_reset, left):
        """rows_of the tile's first and last key, by which `visited` knows all: what it says grows with the key.

        PLANNED, rows behind the last granule that visits the tile do not see it (skipping.py).
        """
        first_min, own_min, end_min = self.rows_of(self.place.start, last_reset, next_reset, left)
        first_max, own_max, end_max = self.rows_of(self.place.start + KEYS - 1, last_reset, next_reset, left)
        if self.sizes.PLANNED:
            last_granule = gl.load(self.sizes.mirror + self.first_block(member) + self.place.start // KEYS)
            planned = (last_granule + 1) * GRANULE_ROWS
            end_min, end_max = gl.minimum(end_min, planned), gl.minimum(end_max, planned)
        return (first_min, own_min, end_min), (first_max, own_max, end_max)

    @gluon.jit
    def visited(self, ends, side):
        """The query tiles of a side that see a key of the tile, as tiles_between orders them."""
        first_min, end_min = self.rows_of_side(ends[0], side)
        first_max, end_max = self.rows_of_side(ends[1], side)
        return tiles_between(first_min, first_max, end_min, end_max, self.sizes.ROWS)


@gluon.jit
def found_item(sizes, item):
    """An item by its number."""
    rest = item % sizes.chunk_items()
    first, end = sizes.heads_of_chunk(sizes.chunk(item))
    tile = rest // (end - first)
    kv_head = end - 1 - rest % (end - first)
    if sizes.RAGGED:
        place = load_place(sizes.key_table, tile)
    else:
        kv_heads = sizes.heads // sizes.GROUP
        place = dense_place(tile * KEYS, sizes.query_axis, sizes.key_axis, kv_head // kv_heads)
        kv_head = kv_head % kv_heads
    return Item(sizes, place, kv_head)


@gluon.jit
def load_rate(rates, rate_stride, head):
    """γ of a head in base 2; 0 where it resets everywhere (left_of)."""
    rate = gl.load(rates + head * rate_stride)
    return gl.where(rate < RESET_BELOW, 0.0, (rate * LOG2E).to(gl.float32))
