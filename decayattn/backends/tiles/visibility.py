"""Key tiles that a row tile visits, and row tiles that a key tile visits.

Visibility is an interval: the query at position i sees the keys first_i ≤ j < end_i, and both ends never decrease with
i. Causality, windows, resets and lengths that are no multiple of a tile are rules for the two ends. So the rows that
see a key j are an interval too. Positions count a sequence's keys; query row r has position r + first_position.
"""

import triton
import triton.language as tl

from decayattn.problem import GRANULE as _GRANULE

# consecutive query rows that skip the same keys: the row unit of a plan (planning/skipping.py)
GRANULE: tl.constexpr = tl.constexpr(_GRANULE)


@triton.jit
def keys_seen(
    position, key_length, last_reset, next_reset, CAUSAL: tl.constexpr, HAS_RESETS: tl.constexpr, left=None, right=None
):
    """[first, end) of the keys that a query sees; resets point at one head's tokens; left, right None: no limit."""
    first = position * 0  # zeros_like does not keep a Gluon kernel's layout
    end = first + key_length
    if HAS_RESETS:
        first = tl.load(last_reset + position, mask=position >= 0, other=0)
        end = tl.load(next_reset + position, mask=position >= 0, other=0)
    if CAUSAL:
        end = tl.maximum(position + 1, 0)
    if left is not None:
        first = tl.maximum(first, position - left)
    if right is not None:
        end = tl.minimum(end, tl.maximum(position + right + 1, 0))
    return first, end


@triton.jit
def rows_that_see(
    key, query_length, first_position, last_reset, next_reset, CAUSAL: tl.constexpr, HAS_RESETS: tl.constexpr,
    left=None, right=None,
):
    """[first, end) of the query rows that see this key: the mirror of keys_seen."""
    first = key * 0
    end = first + query_length
    if HAS_RESETS:
        first = tl.maximum(tl.load(last_reset + key) - first_position, 0)
        end = tl.maximum(tl.load(next_reset + key) - first_position, 0)
    if CAUSAL:
        first = tl.maximum(key - first_position, 0)
    if left is not None:
        end = tl.minimum(end, tl.maximum(key + left + 1 - first_position, 0))
    if right is not None:
        first = tl.maximum(first, key - right - first_position)
    return first, end


@triton.jit
def visited_tiles(first, end, BLOCK: tl.constexpr):
    """(begin, full_begin, full_end, end) in tiles of BLOCK indices, for a vector of intervals.

    Tiles in [full_begin, full_end) are full tiles, inside every interval. The rest of [begin, end) are
    partial tiles, where the kernel compares every index with the intervals. No interval reaches outside [begin, end).
    """
    return tiles_between(tl.min(first, 0), tl.max(first, 0), tl.min(end, 0), tl.max(end, 0), BLOCK)


@triton.jit
def tiles_between(first_min, first_max, end_min, end_max, BLOCK: tl.constexpr):
    """visited_tiles, given the extremes of the intervals' first and end indices."""
    visited_begin = first_min // BLOCK
    visited_end = tl.maximum(tl.cdiv(end_max, BLOCK), visited_begin)
    full_begin = tl.minimum(tl.cdiv(first_max, BLOCK), visited_end)
    full_end = tl.maximum(tl.minimum(end_min // BLOCK, visited_end), full_begin)
    return visited_begin, full_begin, full_end, visited_end


@triton.jit
def partial_tile(n, visited_begin, full_begin, full_end):
    """Index of the n-th partial tile: first those left of the full tiles, then those right of them."""
    left = full_begin - visited_begin
    return tl.where(n < left, visited_begin + n, full_end + n - left)
