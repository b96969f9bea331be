"""Arguments of the portable kernels that travel together, on the host and in the kernels.

Triton passes (named) tuples to kernels, except for TMA descriptors, which are arguments of their own. A field that is
None compiles to nothing. Integers in a tuple are compiled for as others are: that they are 1, or multiples of 16.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from decayattn.backends.runtime.arguments import Strided
from decayattn.problem import DecayName, DecayPrefix


class Tiled(NamedTuple):
    """The inputs, which are read in tiles."""

    q: Strided  # (B, T_q, H, D)
    k: Strided  # (B, T_k, H_kv, D)
    v: Strided  # (B, T_k, H_kv, D_v)
    d_out: Strided | None = None  # (B, T_q, H, D_v)


class NoPrefix(NamedTuple):
    """DecayPrefix's fields for decays without one: kernels name them in branches that they do not compile."""

    local: None = None
    base: None = None
    last_reset: None = None
    next_reset: None = None


class Decay(NamedTuple):
    rates: Tensor | None = None  # (H,), of a constant decay
    rate_stride: int | None = None
    prefix: DecayPrefix | NoPrefix = NoPrefix()  # of a decay per token


class Sizes(NamedTuple):
    """Of sequences that fill their batch entries; of others, only the heads are read."""

    query_length: int
    key_length: int
    heads: int  # of the tiles that the programs own: H, or H_kv


class Window(NamedTuple):
    """How far a row sees to either side; None without a limit."""

    left: int | None
    right: int | None


class RowTerms(NamedTuple):
    """What the gradients read per query row."""

    row_lse2: Tensor  # (B, H, T_q), of the forward
    delta: Tensor  # (B, H, T_q)
    scales: Strided | None  # (B, T_q, H), where every row has a scale of its own
    score_sums: Tensor | None  # (B, H, T_q): what Σ_j dS_ij is, for the gradient of a constant decay in 16 bits


class QueryGradients(NamedTuple):
    """What a tile of query rows writes."""

    dq: Strided  # (B, T_q, H, D)
    decay_sums: Tensor | None  # (B, H, T_q); None where the decay's gradient is not asked for
    scales: Tensor | None  # (B, H, T_q); None for one scale
    bias: Strided | None  # (B, H, T_q, T_k) or smaller, strides 0 where it broadcasts


class KeyGradients(NamedTuple):
    """What a tile of keys writes."""

    dk: Strided  # (B, T_k, H_kv, D)
    dv: Strided  # (B, T_k, H_kv, D_v)
    column_sums: Tensor | None  # (B, H, T_k), for the gradient of a decay per token


class Traits(NamedTuple):
    """What an attention kernel is compiled for."""

    packed: bool  # sequences.constants
    searches: int
    group: int  # query heads that share a key head
    d: int  # head dimensions of q and k, and of v
    d_v: int
    block_m: int  # tiles: rows of queries, keys, and columns for d and d_v
    block_n: int
    block_d: int
    block_dv: int
    decay: DecayName
    causal: bool
    row_cancels: bool  # tiles.scores.decayed_score
    precision: str  # of products
    shared_bias: bool = False  # whether several scores have one entry of the bias's gradient, to which all are added


def broadcast(x: Tensor | None) -> Strided | None:
    """A bias that broadcasts to (B, H, T_q, T_k), or its gradient, with its strides there; booleans as bytes."""
    if x is None:
        return None
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return Strided(x.view(torch.uint8) if x.dtype == torch.bool else x, (0,) * (4 - x.ndim) + tuple(strides))


# ----------------------------------------------------------------------------------------------------------------------
# In kernels


class TileSource(NamedTuple):
    """A (B, T, H, D) tensor that load_tile reads: a TMA descriptor, or None, and the tensor itself.

    A descriptor ends at the end of the tensor, not of a sequence: tiles at a sequence's end contain rows of the next
    one. That is harmless for rows that enter no sum. Where rows enter a sum, the tensor's pointer is given as well, and
    tiles at a sequence's end are read through it.
    """

    descriptor: tl.tensor_descriptor | None
    tensor: Strided


class HeadDecay(NamedTuple):
    """The decay of one head."""

    rate: tl.tensor  # in base 2; 0 unless the decay is constant
    prefix: DecayPrefix  # pointers to the head's first token and block


class QueryRows(NamedTuple):
    """A tile of query rows, without q itself; (BLOCK_M,) but for the anchor and one scale."""

    index: tl.tensor  # in the sequence
    row: tl.tensor  # the same, but rows past the end repeat the last one: they widen no interval, and are never stored
    position: tl.tensor  # among the sequence's keys
    anchor: tl.tensor  # the position that alpha is relative to
    alpha: tl.tensor
    scale: tl.tensor
