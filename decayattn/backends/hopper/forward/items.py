"""What the Hopper forward works on: tiles of rows in their order, and where the decay of their keys is.

An item is a tile of rows of a sequence and a head, 64 rows per consumer warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.copy_engine import aggregate
from decayattn.backends.hopper.common.tile_table import Place, dense_place, load_place
from decayattn.backends.hopper.config import KEY_TILE, WARPGROUP_ROWS
from decayattn.backends.planning.sequences import parts_before
from decayattn.backends.tiles.decay import side_of_head
from decayattn.backends.tiles.scores import LOG2E, RESET_BELOW
from decayattn.backends.tiles.visibility import keys_seen

ROWS: gl.constexpr = gl.constexpr(WARPGROUP_ROWS)
KEYS: gl.constexpr = gl.constexpr(KEY_TILE)


@aggregate
class Sizes:
    """The call's lengths and heads, and the order of its items.

    Dense, an item is a tile of rows of one of all batch entries' heads, and the axes are the sequences. With a table
    (RAGGED), all sequences have their tiles of rows there, and an item is one of them and a head.
    """

    items: gl.tensor
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

    @gluon.constexpr_function
    def __init__(
        self, items, row_tiles, heads, group, together, query_axis, key_axis, block_axis, granule_axis, table, RAGGED,
        PACKED,
    ):  # fmt: skip
        self.items = items
        self.row_tiles = row_tiles
        self.heads = heads
        self.group = group
        self.together = together
        self.query_axis = query_axis
        self.key_axis = key_axis
        self.block_axis = block_axis
        self.granule_axis = granule_axis
        self.table = table
        self.RAGGED = gl.constexpr(RAGGED)
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def place(self, item):
        """(head_row, tile): so many heads `together` that their keys fit the cache, tile after tile; the last ones may
        be fewer."""
        chunk = self.together * self.row_tiles
        first, rest = item // chunk * self.together, item % chunk
        heads = gl.minimum(self.together, self.items // self.row_tiles - first)
        return first + rest % heads, rest // heads

    @gluon.jit
    def dense_item(self, item, TILE: gl.constexpr):
        """The longest rows come first."""
        head_row, tile = self.place(item)
        start = (self.row_tiles - 1 - tile) * TILE
        place = dense_place(start, self.query_axis, self.key_axis, head_row // self.heads)
        return Item(place, head_row, head_row % self.heads)

    @gluon.jit
    def ragged_item(self, item, place):
        head, _ = self.place(item)
        return Item(place, place.entry * self.heads + head, head)

    @gluon.jit
    def found(self, item, TILE: gl.constexpr):
        """An item by its number."""
        if self.RAGGED:
            _, tile = self.place(item)
            found = self.ragged_item(item, load_place(self.table, tile))
        else:
            found = self.dense_item(item, TILE)
        return found

    @gluon.jit
    def rows(self, item):
        """Where the rows of an item's head begin in buffers (B, H, T_q)."""
        return item.head_row.to(gl.int64) * self.query_axis + item.place.first_row

    @gluon.jit
    def tokens(self, item):
        return item.head_row.to(gl.int64) * self.key_axis + item.place.first_token

    @gluon.jit
    def blocks(self, item):
        return item.head_row * self.block_axis + item.place.first_block

    @gluon.jit
    def granules(self, item):
        """Where those of a plan begin, as skipping.offset_of_head has them."""
        place, granules = item.place, item.head_row * self.granule_axis
        if self.PACKED:
            # the sequence's number, of which the table has this much
            sequence = place.first_block - place.first_token // KEYS
            granules += parts_before(place.first_row, sequence, ROWS)
        return granules


@aggregate
class Item:
    """A tile of rows of a sequence, and the head that it is of."""

    place: Place
    head_row: gl.tensor
    head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, place, head_row, head):
        self.place = place
        self.head_row = head_row
        self.head = head

    @gluon.jit
    def first_position(self):
        return self.place.key_length - self.place.query_length

    @gluon.jit
    def reference(self, start):
        """What row references count from, in every backend: the position of the first row of a block of rows."""
        return start // KEYS * KEYS + self.first_position()

    @gluon.jit
    def tile_end(self, start, ROWS_: gl.constexpr):
        """End of the key tiles of the rows from `start`: at least 1, since rows that see no key also visit a tile,
        where everything is masked."""
        final_row = gl.minimum(start + ROWS_, self.place.query_length) - 1
        return gl.maximum(gl.cdiv(final_row + 1 + self.first_position(), KEYS), 1)

    @gluon.jit
    def first_right_key(self):
        """The first key to the right of the first row's own."""
        return gl.maximum(self.place.start + self.first_position() + 1, 0)


@aggregate
class Walk:
    """The order in which an item's tiles are visited: left of the diagonal from left_end down, so that softmax begins
    where decayed scores are largest; after those left_visits, not CAUSAL, right of it from right_begin up. Tiles on the
    diagonal are visited twice."""

    left_end: gl.tensor
    left_visits: gl.tensor
    right_begin: gl.tensor
    CAUSAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, left_end, left_visits, right_begin, CAUSAL):
        self.left_end = left_end
        self.left_visits = left_visits
        self.right_begin = right_begin
        self.CAUSAL = gl.constexpr(CAUSAL)

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
    def tile_or_last(self, visit, place):
        """The same, of a visit that may be beyond the last one."""
        return gl.minimum(self.tile(visit), (place.key_length - 1) // KEYS)


@aggregate
class Base:
    """α at the start of a block, as the sum of two float32 numbers."""

    high: gl.tensor
    low: gl.tensor

    @gluon.constexpr_function
    def __init__(self, high, low):
        self.high = high
        self.low = low

    @gluon.jit
    def minus(self, other):
        """One number, rounded where the high ones do not cancel."""
        return (self.high - other.high) + (self.low - other.low)


@aggregate
class RowAlpha:
    """α of rows relative to their reference, as what is loaded for it: no wait before it is added up."""

    base: Base
    reference_base: Base
    local: gl.tensor

    @gluon.constexpr_function
    def __init__(self, base, reference_base, local):
        self.base = base
        self.reference_base = reference_base
        self.local = local

    @gluon.jit
    def sum(self):
        return self.base.minus(self.reference_base) + self.local


@aggregate
class Decay:
    """Where the decay is in memory: rates of a constant one, the prefix of one per token; CAUSAL, whether rows see no
    keys after their own; WINDOW, how many before it at most (HAS_LEFT: of a head, whose rate may reset everywhere);
    PLANNED, where a granule's rows need not look for more (skipping.py)."""

    rates: gl.tensor
    rate_stride: gl.tensor
    local: gl.tensor
    bases: gl.tensor
    last_reset: gl.tensor
    next_reset: gl.tensor
    left: gl.tensor
    plan: gl.tensor
    KIND: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    PLANNED: gl.constexpr
    HAS_LEFT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, rates, rate_stride, local, bases, last_reset, next_reset, left, plan, KIND, CAUSAL, WINDOW, PLANNED
    ):
        self.rates = rates
        self.rate_stride = rate_stride
        self.local = local
        self.bases = bases
        self.last_reset = last_reset
        self.next_reset = next_reset
        self.left = left
        self.plan = plan
        self.KIND = gl.constexpr(KIND)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.WINDOW = gl.constexpr(WINDOW)
        self.PLANNED = gl.constexpr(PLANNED)
        self.HAS_LEFT = gl.constexpr(WINDOW or KIND == "constant")

    @gluon.jit
    def of(self, sizes, item):
        """The same, pointing at the tokens, blocks and granules of an item's head, with its window."""
        tokens = sizes.tokens(item)
        left = self.left
        if self.KIND == "constant":
            left = side_of_head(self.rates, self.rate_stride, item.head, self.left if self.WINDOW else None)
        return Decay(
            self.rates, self.rate_stride, self.local + tokens, self.bases + sizes.blocks(item) * 2,
            self.last_reset + tokens, self.next_reset + tokens, left, self.plan + sizes.granules(item),
            self.KIND, self.CAUSAL, self.WINDOW, self.PLANNED,
        )  # fmt: skip

    @gluon.jit
    def first_key(self, position):
        """The first key that a position sees: its last reset, or where its window begins."""
        HAS_RESETS: gl.constexpr = self.KIND == "scalar"
        if self.HAS_LEFT:
            first, _ = keys_seen(position, 0, self.last_reset, self.last_reset, True, HAS_RESETS, self.left)
        else:
            first, _ = keys_seen(position, 0, self.last_reset, self.last_reset, True, HAS_RESETS)
        return first

    @gluon.jit
    def keys_end(self, position, key_length):
        """Where the keys end that a position sees, not causal: its next reset, or the sequence."""
        HAS_RESETS: gl.constexpr = self.KIND == "scalar"
        if self.KIND == "constant":
            # not causal, a window is a rate's that resets everywhere, and as wide to the right
            _, end = keys_seen(
                position, key_length, self.last_reset, self.next_reset, False, HAS_RESETS, None, self.left
            )
        else:
            _, end = keys_seen(position, key_length, self.last_reset, self.next_reset, False, HAS_RESETS)
        return end

    @gluon.jit
    def first_visited(self, position, row):
        """The first key of the tiles that a row visits which is at this position: where a tile begins, or first_key."""
        first = self.first_key(position)
        if self.PLANNED:
            first = gl.maximum(first, gl.load(self.plan + row // ROWS) * KEYS)
        return first

    @gluon.jit
    def rate(self, head):
        """γ of a head in base 2."""
        if self.KIND == "constant":
            rate = gl.load(self.rates + head * self.rate_stride)
            rate = gl.where(rate < RESET_BELOW, 0.0, (rate * LOG2E).to(gl.float32))
        else:
            rate = 0.0
        return rate

    @gluon.jit
    def base(self, tile):
        """α at the start of a tile's block."""
        here = self.bases + gl.maximum(tile, 0) * 2
        return Base(gl.load(here), gl.load(here + 1))

    @gluon.jit
    def row_alpha(self, position, reference, rate):
        """α of positions relative to the reference."""
        if self.KIND == "scalar":
            token = gl.maximum(position, 0)
            alpha = RowAlpha(self.base(token // KEYS), self.base(reference // KEYS), gl.load(self.local + token))
        else:
            zero = (reference * 0).to(gl.float32)
            alpha = RowAlpha(Base(zero, zero), Base(zero, zero), (position - reference).to(gl.float32) * rate)
        return alpha
