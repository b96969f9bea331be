"""Tiles of the portable kernels: query rows and the keys that they see, q, k, v and dO, scales and biases."""

import triton
import triton.language as tl

from decayattn.backends.planning.prefix import prefix_of_head
from decayattn.backends.planning.skipping import first_planned_key
from decayattn.backends.portable.kernel_args import HeadDecay, QueryRows
from decayattn.backends.tiles.decay import base_difference, key_alpha, load_rate, row_alpha, row_anchor, side_of_head
from decayattn.backends.tiles.scores import LOG2E, decayed_score, visible
from decayattn.backends.tiles.visibility import keys_seen
from decayattn.problem import DecayPrefix


@triton.jit
def add_product(a, b, sums, PRECISION: tl.constexpr):
    """Return sums + a b.

    In IEEE float32 a tile's products have a sum of their own. In one chain, every addition is rounded relative to the
    whole sum: a large term would cause as many roundings of its size as rows or keys follow it. float64 has bits to
    spare, and with a second sum the kernels would spill.
    """
    if PRECISION == "ieee" and a.dtype == tl.float32:
        # the default, 0, makes Triton emit one chain; the option has no other effect on exact products
        sums += tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    else:
        sums = tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=sums.dtype)
    return sums


@triton.jit
def decay_of_head(decay, head, offsets, ACCUMULATOR: tl.constexpr, TRAITS: tl.constexpr):
    """Return the HeadDecay of a head that begins at these offsets."""
    DECAY: tl.constexpr = TRAITS.decay
    rate = load_rate(decay.rates, decay.rate_stride, head, DECAY, ACCUMULATOR)
    if DECAY == "scalar":
        prefix = prefix_of_head(decay.prefix, offsets)
    else:
        prefix = DecayPrefix(0, 0, 0, 0)  # never read; Triton's functions cannot return None
    return HeadDecay(rate, prefix)


@triton.jit
def load_rows(
    start, head, work, scale, row_scales, decay, CLAMPED: tl.constexpr, ACCUMULATOR: tl.constexpr, TRAITS: tl.constexpr
):
    """Return the QueryRows from `start` on of a head of work's sequence; all are inside it, unless CLAMPED."""
    BLOCK_M: tl.constexpr = TRAITS.block_m
    DECAY: tl.constexpr = TRAITS.decay
    first_position = work.key_length - work.query_length
    index = start + tl.arange(0, BLOCK_M)
    row = index
    if CLAMPED:
        row = tl.minimum(index, work.query_length - 1)
    position = row + first_position
    anchor = row_anchor(start, first_position)
    alpha = row_alpha(position, anchor, decay.rate, decay.prefix.beta, decay.prefix.base, DECAY)
    row_scale = load_scale(scale, row_scales, work.entry, head, work.first_row, row, ACCUMULATOR)
    return QueryRows(index, row, position, anchor, alpha, row_scale)


@triton.jit
def keys_of_rows(rows, work, heads, decay, prefix, window, plan, TRAITS: tl.constexpr):
    """[first, end) of the keys that rows of work's head see, without keys that the plan skips for all of them."""
    left, right = window.left, window.right
    if TRAITS.decay == "constant":
        left = side_of_head(decay.rates, decay.rate_stride, work.head, left)
        if not TRAITS.causal:
            right = side_of_head(decay.rates, decay.rate_stride, work.head, right)
    first, end = keys_seen(
        rows.position, work.key_length, prefix.last_reset, prefix.next_reset, TRAITS.causal, TRAITS.decay == "scalar",
        left, right,
    )
    if plan is not None:
        first = tl.maximum(first, first_planned_key(plan, work, heads, TRAITS.block_m, TRAITS.packed))
    return first, end


@triton.jit
def load_scale(scale, row_scales, entry, head, first, row, ACCUMULATOR: tl.constexpr):
    """s of rows of a sequence that begins at row `first`: a vector like `row` if every row has its own, or a scalar."""
    if row_scales is not None:
        strides = row_scales.strides
        offset = entry.to(tl.int64) * strides[0] + row.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]
        row_scale = tl.load(from_token(row_scales, first) + offset)
    else:
        row_scale = tl.full([], scale, ACCUMULATOR)
    return row_scale


@triton.jit
def load_tile(
    source, entry, head, first, start, length,
    TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):
    """Load (TOKENS, WIDTH) of a TileSource from token `start` on of the sequence that begins at token `first`.

    MASKED: zeros beyond the sequence's length; or the values that follow there, if only a descriptor reads the tensor.
    """
    if source.descriptor is not None and (source.tensor.data is None or not MASKED):
        tile = source.descriptor.load([entry, start + first, head, 0]).reshape([TOKENS, WIDTH])
    else:
        pointers, row, column = _pointers(source.tensor, entry, head, start + first, TOKENS, WIDTH)
        if MASKED:
            tile = tl.load(pointers, mask=(start + row < length) & (column < DIM), other=0.0)
        elif DIM != WIDTH:
            tile = tl.load(pointers, mask=column < DIM, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def load_part(NAME: tl.constexpr, source, work, head, start, MASKED: tl.constexpr, TRAITS: tl.constexpr):
    """load_tile of "q", "k", "v" or "d_out", from the row or token `start` of work's sequence on."""
    OF_SCORES: tl.constexpr = NAME == "q" or NAME == "k"
    DIM: tl.constexpr = TRAITS.d if OF_SCORES else TRAITS.d_v
    WIDTH: tl.constexpr = TRAITS.block_d if OF_SCORES else TRAITS.block_dv
    if NAME == "q" or NAME == "d_out":
        first, length = work.first_row, work.query_length
        tile = load_tile(source, work.entry, head, first, start, length, TRAITS.block_m, DIM, WIDTH, MASKED)
    else:
        first, length = work.first_token, work.key_length
        tile = load_tile(source, work.entry, head, first, start, length, TRAITS.block_n, DIM, WIDTH, MASKED)
    return tile


@triton.jit
def from_token(tensor, first):
    """Move the pointer of a (B, T, H, ·) tensor to the first token of a sequence."""
    return tensor.data + first.to(tl.int64) * tensor.strides[1]


@triton.jit
def store_tile(
    target, entry, head, start, length, tile, TOKENS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Store (TOKENS, WIDTH) to a (B, T, H, DIM) tensor, moved to a sequence, from token `start` up to its length."""
    pointers, row, column = _pointers(target, entry, head, start, TOKENS, WIDTH)
    tl.store(pointers, tile.to(target.data.dtype.element_ty), mask=(start + row < length) & (column < DIM))


@triton.jit
def _pointers(tensor, entry, head, token, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses of a tile, its rows (TOKENS, 1) and its columns (1, WIDTH)."""
    # 64-bit offsets: strided views reach past 2^31 elements
    strides = tensor.strides
    corner = tensor.data + entry.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1]
    corner += head.to(tl.int64) * strides[2]
    row = tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    return corner + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[3], row, column


@triton.jit
def scores_of_rows(
    queries, scale2, k_source, kv_head, start, work, decay, bias,
    PARTIAL: tl.constexpr, ACCUMULATOR: tl.constexpr, TRAITS: tl.constexpr,
):
    """Decayed scores in base 2 of a tile of queries (q, rows, first, end) and of the keys from `start` on.

    Also returns the difference of their bases, which the scores lack if it cancels in a row, and the keys.
    scale2: s·log2(e), a scalar or (BLOCK_M, 1). In a PARTIAL tile, pairs that do not see each other have −inf.
    """
    BLOCK_N: tl.constexpr = TRAITS.block_n
    DECAY: tl.constexpr = TRAITS.decay
    rows, prefix, key_length = queries.rows, decay.prefix, work.key_length
    key = start + tl.arange(0, BLOCK_N)
    k = load_part("k", k_source, work, kv_head, start, PARTIAL, TRAITS)
    score = tl.dot(queries.q, tl.trans(k), input_precision=TRAITS.precision, out_dtype=ACCUMULATOR) * scale2
    key_side = key_alpha(key, start, key_length, decay.rate, prefix.beta, DECAY)
    difference = base_difference(rows.anchor, start, decay.rate, prefix.base, prefix.beta, DECAY)
    score = decayed_score(
        score, rows.alpha[:, None], key_side[None, :], difference, decay.rate, rows.position[:, None], key[None, :],
        DECAY, TRAITS.causal, TRAITS.row_cancels,
    )
    if bias is not None:
        score += load_bias(bias, rows.row[:, None], key[None, :], work, ACCUMULATOR)
    if PARTIAL:
        score = tl.where(visible(key[None, :], queries.first[:, None], queries.end[:, None]), score, float("-inf"))
    return score, difference, k


@triton.jit
def bias_of_head(bias, work, head):
    """Move the pointer of a bias to a head and to the first row and token of work's sequence."""
    strides = bias.strides
    data = bias.data + work.entry.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return data + work.first_row.to(tl.int64) * strides[2] + work.first_token.to(tl.int64) * strides[3]


@triton.jit
def load_bias(bias, row, key, work, ACCUMULATOR: tl.constexpr):
    """Load a tile of a head's bias in base 2, for rows (·, 1) and keys (1, ·) in either order; masked pairs: −inf."""
    inside = (row < work.query_length) & (key < work.key_length)
    tile = tl.load(_pairs(bias, row, key), mask=inside, other=0)
    if bias.data.dtype.element_ty.is_int():
        tile = tl.where(tile == 0, float("-inf"), 0.0).to(ACCUMULATOR)
    else:
        tile = tile.to(ACCUMULATOR) * LOG2E
    return tile


@triton.jit
def add_bias_gradient(d_bias, row, key, work, ds, SHARED: tl.constexpr):
    """Add dS to a head's bias gradient; SHARED: other rows or heads have the same entries."""
    inside = (row < work.query_length) & (key < work.key_length)
    if SHARED:
        tl.atomic_add(_pairs(d_bias, row, key), ds, mask=inside, sem="relaxed")
    else:
        tl.store(_pairs(d_bias, row, key), ds, mask=inside)


@triton.jit
def _pairs(bias, row, key):
    """Addresses of pairs of a row and a key."""
    return bias.data + row.to(tl.int64) * bias.strides[2] + key.to(tl.int64) * bias.strides[3]
