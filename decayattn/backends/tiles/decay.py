"""Decay of a tile's rows and keys in base 2; plain Triton kernels read it from rates or from the prefix.

`*_alpha` is α relative to an anchor of the tile. A row tile's anchor is the first row of its block of DECAY_BLOCK rows.
A key tile's anchor is the start of its block of DECAY_BLOCK tokens. Tiles never straddle those blocks, because their
sizes divide DECAY_BLOCK.
"""

import triton
import triton.language as tl

from decayattn.backends.tiles.scores import RESET_BELOW, base2_log_decay
from decayattn.problem import DECAY_BLOCK as _DECAY_BLOCK

DECAY_BLOCK: tl.constexpr = tl.constexpr(_DECAY_BLOCK)
# exceeds the distance of any pair, and its sum with a position fits 32 bits
_FAR: tl.constexpr = tl.constexpr(2**30)


@triton.jit
def constant_rate(rates, rate_stride, head, PRODUCT: tl.constexpr):
    """γ of a head in base 2, by base2_log_decay; 0 if it resets at every token."""
    return base2_log_decay(tl.load(rates + head * rate_stride), PRODUCT)


@triton.jit
def load_rate(rates, rate_stride, head, DECAY: tl.constexpr, ACCUMULATOR: tl.constexpr):
    """constant_rate, rounded once; 0 for any other decay."""
    if DECAY == "constant":
        rate = constant_rate(rates, rate_stride, head, tl.float64).to(ACCUMULATOR)
    else:
        rate = tl.full([], 0.0, ACCUMULATOR)
    return rate


@triton.jit
def side_of_head(rates, rate_stride, head, side):
    """Distance to a side that rows of a head with a constant decay see (None: no limit); 0 if γ is a reset."""
    resets = tl.load(rates + head * rate_stride) < RESET_BELOW
    return tl.where(resets, 0, _FAR if side is None else side)


@triton.jit
def row_anchor(start, first_position):
    """Position of the anchor of the row tile that starts at query row `start`."""
    return start // DECAY_BLOCK * DECAY_BLOCK + first_position


@triton.jit
def row_alpha(position, anchor, rate, beta, base, DECAY: tl.constexpr):
    """α of query positions relative to their tile's anchor; beta and base point at one head's prefix."""
    if DECAY == "scalar":
        seen = tl.maximum(position, 0)
        bases = tl.load(base + seen // DECAY_BLOCK) - tl.load(base + tl.maximum(anchor, 0) // DECAY_BLOCK)
        inside_block = tl.load(beta + seen)
        alpha = (bases + inside_block).to(inside_block.dtype)
    elif DECAY == "constant":
        alpha = (position - anchor).to(rate.dtype) * rate
    else:
        alpha = tl.zeros_like(position).to(rate.dtype)
    return alpha


@triton.jit
def key_alpha(key, start, length, rate, beta, DECAY: tl.constexpr):
    """α of the keys of the tile that starts at `start`, relative to that tile's anchor."""
    if DECAY == "scalar":
        alpha = tl.load(beta + key, mask=key < length, other=0.0)
    elif DECAY == "constant":
        alpha = (key - start).to(rate.dtype) * rate
    else:
        alpha = tl.zeros_like(key).to(rate.dtype)
    return alpha


@triton.jit
def base_difference(anchor, start, rate, base, beta, DECAY: tl.constexpr):
    """α at a row tile's anchor minus α at a key tile's, formed in float64 and rounded once."""
    if DECAY == "scalar":
        bases = tl.load(base + tl.maximum(anchor, 0) // DECAY_BLOCK) - tl.load(base + start // DECAY_BLOCK)
        difference = bases.to(beta.dtype.element_ty)
    elif DECAY == "constant":
        difference = ((anchor - start).to(tl.float64) * rate.to(tl.float64)).to(rate.dtype)
    else:
        difference = tl.full([], 0.0, rate.dtype)
    return difference
