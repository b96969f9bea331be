"""Rows of a consumer warpgroup: the keys that they see, and the mask of partial tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.fragments import (
    among_columns,
    bits_before,
    by_threads,
    common_columns,
    from_threads,
    where_bits,
)
from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.hopper.common.tile_table import TileBounds
from decayattn.backends.hopper.forward.decay import Decay
from decayattn.backends.hopper.forward.work import Walk


@aggregate
class Rows:
    """A warpgroup's rows of a work tile, and the key tiles that they visit.

    Visits are counted over all work tiles of the program: this work tile's first visit is `sent`, and the last one that
    these rows need is n_end − 1.
    """

    q: gl.shared_memory_descriptor
    count: gl.tensor
    sent: gl.tensor
    n_end: gl.tensor
    walk: Walk
    position: gl.tensor
    bounds: TileBounds
    decay: Decay

    @gluon.jit
    def first_key(self, is_right):
        """First key that each row sees on one side of the diagonal."""
        first = self.decay.first_key(self.position)
        if not self.decay.MODES.causal:
            first = gl.where(is_right, self.position + 1, first)
        return first

    @gluon.jit
    def keys_end(self, is_right):
        """End of the keys that each row sees on one side of the diagonal."""
        end = self.position + 1
        if not self.decay.MODES.causal:
            end = gl.where(is_right, self.decay.keys_end(self.position, self.bounds.key_length), end)
        return end


@gluon.jit
def masked(score, rows, tile, is_right, full_begin, BITS: gl.constexpr):
    """Scores of a partial tile, with −inf where a row does not see the key.

    full_begin: the first tile on that side of the diagonal without any row's first key
    BITS: mask by bit tests. With them ptxas compares eight columns at once and makes no branch; but in the loop over
    tiles they would take registers that P needs.
    """
    SCORE: gl.constexpr = score.type.layout
    KEYS: gl.constexpr = score.shape[1]
    # a row can have a first key other than 0
    MODES: gl.constexpr = rows.decay.MODES
    HAS_FIRST: gl.constexpr = MODES.decay == "scalar" or MODES.limited or not MODES.causal
    x = by_threads(score)
    end = rows.keys_end(is_right) - tile * KEYS
    if BITS:
        seen = bits_before(end, x)
        if HAS_FIRST:
            has_firsts = tile < full_begin
            if has_firsts:
                seen &= ~bits_before(rows.first_key(is_right) - tile * KEYS, x)
        x = where_bits(seen, x)
    else:
        key = common_columns(x)
        x = gl.where(key < among_columns(end, x), x, float("-inf"))
        if HAS_FIRST:
            has_firsts = tile < full_begin
            if has_firsts:
                x = gl.where(key >= among_columns(rows.first_key(is_right) - tile * KEYS, x), x, float("-inf"))
    return from_threads(x, SCORE)
