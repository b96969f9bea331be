"""The rows of a consumer warpgroup: which keys they see, and the mask of edge tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.copy_engine import aggregate
from decayattn.backends.hopper.common.fragments import (
    KEYS,
    among_columns,
    bits_before,
    by_threads,
    common_columns,
    from_threads,
    where_bits,
)
from decayattn.backends.hopper.common.tile_table import TileBounds
from decayattn.backends.hopper.forward.decay import Decay
from decayattn.backends.hopper.forward.work import Walk


@aggregate
class Side:
    """What rows see on one side of the diagonal: the largest of their first keys, and the tiles that all see whole."""

    first_max: gl.tensor
    whole_begin: gl.tensor
    whole_end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first_max, whole_begin, whole_end):
        self.first_max = first_max
        self.whole_begin = whole_begin
        self.whole_end = whole_end


@aggregate
class Rows:
    """A warpgroup's rows of a work tile, and the key tiles that they visit.

    Visits are counted through all work tiles of the program: this one's first is `sent`, and n_end is behind the last
    one that these rows need.
    """

    q: gl.shared_memory_descriptor
    count: gl.tensor
    sent: gl.tensor
    n_end: gl.tensor
    walk: Walk
    left: Side
    right: Side
    position: gl.tensor
    bounds: TileBounds
    decay: Decay
    HAS_FIRST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, count, sent, n_end, walk, left, right, position, bounds, decay):
        self.q = q
        self.count = count
        self.sent = sent
        self.n_end = n_end
        self.walk = walk
        self.left = left
        self.right = right
        self.position = position
        self.bounds = bounds
        self.decay = decay
        # whether a row can have a first key other than 0
        self.HAS_FIRST = gl.constexpr(decay.KIND == "scalar" or decay.HAS_LEFT or not decay.CAUSAL)

    @gluon.jit
    def first_max(self, is_right):
        """The largest first key that a row sees on one side of the diagonal."""
        first_max = self.left.first_max
        if not self.decay.CAUSAL:
            first_max = gl.where(is_right, self.right.first_max, first_max)
        return first_max

    @gluon.jit
    def first_key(self, is_right):
        """The first key that each row sees on one side of the diagonal."""
        first = self.decay.first_key(self.position)
        if not self.decay.CAUSAL:
            first = gl.where(is_right, self.position + 1, first)
        return first

    @gluon.jit
    def keys_end(self, is_right):
        """Where the keys end that each row sees on one side of the diagonal."""
        end = self.position + 1
        if not self.decay.CAUSAL:
            end = gl.where(is_right, self.decay.keys_end(self.position, self.bounds.key_length), end)
        return end


@gluon.jit
def masked(score, rows, tile, is_right, BITS: gl.constexpr):
    """The scores of an edge tile, −inf where a row does not see the key.

    BITS: by bit tests. ptxas compares eight columns at once with them and makes no branch; but in the loop over tiles
    they need registers that P has.
    """
    SCORE: gl.constexpr = score.type.layout
    x = by_threads(score)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    end = rows.keys_end(is_right) - tile * KEYS
    if BITS:
        seen = bits_before(end, LAYOUT)
        if rows.HAS_FIRST:
            has_firsts = tile * KEYS < rows.first_max(is_right)
            if has_firsts:
                seen &= ~bits_before(rows.first_key(is_right) - tile * KEYS, LAYOUT)
        x = where_bits(seen, x)
    else:
        key = common_columns(x)
        x = gl.where(key < among_columns(end, x), x, float("-inf"))
        if rows.HAS_FIRST:
            has_firsts = tile * KEYS < rows.first_max(is_right)
            if has_firsts:
                x = gl.where(key >= among_columns(rows.first_key(is_right) - tile * KEYS, x), x, float("-inf"))
    return from_threads(x, SCORE)
