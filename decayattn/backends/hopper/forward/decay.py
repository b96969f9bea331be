"""Decay of the forward: α of rows, bases of key blocks, and visibility by resets and windows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.tiles.decay import DECAY_BLOCK, constant_rate, side_of_head
from decayattn.backends.tiles.visibility import GRANULE, keys_seen


@aggregate
class Base:
    """α at the start of a block, as the sum of two float32 values."""

    high: gl.tensor
    low: gl.tensor

    @gluon.jit
    def minus(self, other):
        """Return the difference as one float32 value."""
        return (self.high - other.high) + (self.low - other.low)


@aggregate
class RowAlpha:
    """α of rows relative to their anchor, as loaded terms: only `sum` waits for the loads."""

    base: Base
    anchor_base: Base
    beta: gl.tensor

    @gluon.jit
    def sum(self):
        return self.base.minus(self.anchor_base) + self.beta


@aggregate
class Decay:
    """Pointers to the decay (rates of a constant one, the prefix of one per token), and rules for the visible keys.

    Causal, no row sees keys after its own. With a window, it sees at most `left` keys before it and, not causal,
    `right` after it. Planned, the plan has the first block that a granule of rows visits (skipping.py).
    """

    rates: gl.tensor  # (H,), of a constant decay
    beta: gl.tensor  # of a decay per token: α in its block
    bases: gl.tensor  # and at the blocks' starts, as pairs of float32
    last_reset: gl.tensor
    next_reset: gl.tensor  # not causal
    plan: gl.tensor  # for every granule of rows, the first block of keys that it visits
    left: gl.tensor
    right: gl.tensor
    MODES: gl.constexpr

    @gluon.jit
    def of(self, work):
        """Return the same decay, with pointers to the sequence and head of a work tile and with the head's window."""
        tokens = work.bounds.tokens(work.head_row)
        left, right = self.left, self.right
        if self.MODES.decay == "constant":
            left = side_of_head(self.rates, 1, work.head, self.left if self.MODES.window else None)
            if not self.MODES.causal:
                right = side_of_head(self.rates, 1, work.head, self.right if self.MODES.window else None)
        return Decay(
            self.rates, self.beta + tokens, self.bases + work.bounds.blocks(work.head_row) * 2,
            self.last_reset + tokens, self.next_reset + tokens, self.plan + work.granules(), left, right, self.MODES,
        )

    @gluon.jit
    def first_key(self, position):
        """First key that a position sees: its last reset, or the start of its window."""
        left = self.left if self.MODES.limited else None
        first, _ = keys_seen(position, 0, self.last_reset, self.last_reset, True, self.MODES.decay == "scalar", left)
        return first

    @gluon.jit
    def keys_end(self, position, key_length):
        """End of the keys that a position sees, not causal: its next reset, its window's end or the sequence's."""
        right = self.right if self.MODES.limited else None
        _, end = keys_seen(
            position, key_length, self.last_reset, self.next_reset, False, self.MODES.decay == "scalar", None, right
        )
        return end

    @gluon.jit
    def first_visited(self, position, row):
        """First key that a row at this position visits: the first one that it sees, or the plan's, if that is later."""
        first = self.first_key(position)
        if self.MODES.planned:
            first = gl.maximum(first, gl.load(self.plan + row // GRANULE) * DECAY_BLOCK)
        return first

    @gluon.jit
    def rate(self, head):
        """γ of a head in base 2."""
        rate = 0.0
        if self.MODES.decay == "constant":
            rate = constant_rate(self.rates, 1, head, gl.float32)
        return rate

    @gluon.jit
    def base(self, block):
        """α at the start of a block."""
        here = self.bases + gl.maximum(block, 0) * 2
        return Base(gl.load(here), gl.load(here + 1))

    @gluon.jit
    def row_alpha(self, position, anchor, rate):
        """α of positions relative to the anchor."""
        if self.MODES.decay == "scalar":
            token = gl.maximum(position, 0)
            base, anchor_base = self.base(token // DECAY_BLOCK), self.base(anchor // DECAY_BLOCK)
            alpha = RowAlpha(base, anchor_base, gl.load(self.beta + token))
        else:
            zero = (anchor * 0).to(gl.float32)
            alpha = RowAlpha(Base(zero, zero), Base(zero, zero), (position - anchor).to(gl.float32) * rate)
        return alpha
