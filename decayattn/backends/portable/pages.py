"""Addresses of the tokens of a cache: consecutive in an entry, or in the pages that a block table names.

A block table is (B, blocks) int32, contiguous, or None; PAGE is the number of tokens per page. Table and blocks are
separate arguments: Triton 3.6 cannot test everywhere if a tuple with a 1 in it is None.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.runtime.strided import Strided


class CachedTokens(NamedTuple):
    """Tokens of a cache as split_kernel reads them."""

    k: Strided  # (B, T_max, H_kv, D); with a table (pages, page, H_kv, D)
    v: Strided
    alpha: Strided | None  # (B, T_max, H), or (pages, page, H)
    table: Tensor | None


def table_and_blocks(block_table: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a block table and its number of blocks as arguments of a kernel."""
    return (None, 0) if block_table is None else (block_table.contiguous(), block_table.shape[1])


@triton.jit
def entry_start(buffer, batch, table):
    """Start of an entry in a buffer of the cache; with a table, the start of the buffer."""
    start = buffer.data
    if table is None:
        start += batch.to(tl.int64) * buffer.strides[0]
    return start


@triton.jit
def token_offset(buffer, batch, token, used, table, blocks, PAGE: tl.constexpr):
    """Offsets of an entry's tokens from entry_start. The table is read for used tokens only."""
    strides = buffer.strides
    if table is None:
        offset = token.to(tl.int64) * strides[1]
    else:
        page = tl.load(table + batch.to(tl.int64) * blocks + token // PAGE, mask=used, other=0)
        offset = page.to(tl.int64) * strides[0] + (token % PAGE).to(tl.int64) * strides[1]
    return offset


@triton.jit
def has_place(token, table, blocks, PAGE: tl.constexpr):
    """True if a token has a page; without a table always, because the host has checked the capacity."""
    there = token == token
    if table is not None:
        there = token < blocks * PAGE
    return there
