"""Groups of arguments of the portable kernels, for the host and for the kernels.

Triton passes (named) tuples to kernels, except for TMA descriptors, which are separate arguments. A field that is None
compiles to nothing. Integers in a tuple are specialised as others are: for 1 and for multiples of 16.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from decayattn.backends.runtime.strided import Strided
from decayattn.problem import DecayName, DecayPrefix


class Tiled(NamedTuple):
    """Inputs that the kernels read in tiles."""

    q: Strided  # (B, T_q, H, D)
    k: Strided  # (B, T_k, H_kv, D)
    v: Strided  # (B, T_k, H_kv, D_v)
    d_out: Strided | None = None  # (B, T_q, H, D_v)


class Decay(NamedTuple):
    rates: Tensor | None = None  # (H,), of a constant decay
    rate_stride: int | None = None
    prefix: DecayPrefix | None = None  # of a decay per token


class Sizes(NamedTuple):
    """Lengths of sequences that fill their batch entries, and heads; for other sequences, only the heads are read."""

    query_length: int
    key_length: int
    heads: int  # heads of the tiles that the programs own: H, or H_kv


class Window(NamedTuple):
    """Largest distance that a row sees to either side; None: no limit."""

    left: int | None
    right: int | None


class RowTerms(NamedTuple):
    """Values per query row that the gradients read."""

    row_lse2: Tensor  # (B, H, T_q), of the forward
    delta: Tensor  # (B, H, T_q)
    scales: Strided | None  # (B, T_q, H), if every row has its own scale
    score_sums: Tensor | None  # (B, H, T_q): exact Σ_j dS_ij, for the gradient of a constant decay in 16 bits


class QueryGradients(NamedTuple):
    """Outputs of a tile of query rows."""

    dq: Strided  # (B, T_q, H, D)
    decay_sums: Tensor | None  # (B, H, T_q); None without a gradient of the decay
    scales: Tensor | None  # (B, H, T_q); None for one scale
    bias: Strided | None  # (B, H, T_q, T_k) or smaller, with strides 0 in broadcast dimensions


class KeyGradients(NamedTuple):
    """Outputs of a tile of keys."""

    dk: Strided  # (B, T_k, H_kv, D)
    dv: Strided  # (B, T_k, H_kv, D_v)
    column_sums: Tensor | None  # (B, H, T_k), for the gradient of a decay per token


class Traits(NamedTuple):
    """Constants that an attention kernel is compiled for."""

    group: int  # query heads that share a key head
    d: int  # head dimensions of q and k, and of v
    d_v: int
    block_m: int  # tile sizes: query rows, keys, and columns for d and d_v
    block_n: int
    block_d: int
    block_dv: int
    decay: DecayName
    precision: str  # of products
    packed: bool = False  # sequences.constants
    searches: int = 1
    causal: bool = True
    row_cancels: bool = False  # tiles.scores.decayed_score
    shared_bias: bool = False  # several scores share one entry of the bias's gradient, which is their sum
    page: int = 0  # tokens per page of a cache; 0 without a block table


def broadcast(x: Tensor | None) -> Strided | None:
    """A bias that broadcasts to (B, H, T_q, T_k), or its gradient, with its strides there; booleans as bytes."""
    if x is None:
        return None
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return Strided(x.view(torch.uint8) if x.dtype == torch.bool else x, (0,) * (4 - x.ndim) + tuple(strides))


# ----------------------------------------------------------------------------------------------------------------------
# In kernels


class TileSource(NamedTuple):
    """A (B, T, H, D) tensor that load_tile reads: a TMA descriptor or None, and the tensor itself.

    A descriptor ends at the end of the tensor, not of a sequence: tiles at a sequence's end contain rows of the next
    one. That is harmless if those rows enter no sum. If they would, the tensor's pointer is given too, and load_tile
    reads tiles at a sequence's end through it.
    """

    descriptor: tl.tensor_descriptor | None
    tensor: Strided


class HeadDecay(NamedTuple):
    """The decay of one head."""

    rate: tl.tensor  # in base 2; 0 unless the decay is constant
    prefix: DecayPrefix  # pointers to the head's first token and block


class QueryRows(NamedTuple):
    """A tile of query rows, without q itself; every field is (BLOCK_M,) except the anchor and a single scale."""

    index: tl.tensor  # in the sequence
    row: tl.tensor  # index, but rows past the end repeat the last one: they widen no interval, and are never stored
    position: tl.tensor  # among the sequence's keys
    anchor: tl.tensor  # the position that alpha is relative to
    alpha: tl.tensor
    scale: tl.tensor
