"""Where the tokens of a cache are: behind one another in an entry, or in the pages that a block table names."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.runtime.arguments import Strided


class BlockTable(NamedTuple):
    """The pages of every entry, in the order of its tokens. No table is None."""

    data: Tensor  # (B, blocks) int32, the blocks of an entry behind one another
    stride: int  # from one entry to the next; one number, for Triton 3.6 cannot ask whether deeper tuples are None
    tokens: int  # that the pages of an entry hold


class CachedTokens(NamedTuple):
    """The tokens of a cache as split_kernel reads them."""

    k: Strided  # (B, T_max, H_kv, D); with a table (pages, page, H_kv, D)
    v: Strided
    alpha: Strided | None  # (B, T_max, H), or (pages, page, H)
    table: BlockTable | None


def block_table(table: Tensor | None, page: int) -> BlockTable | None:
    """As an argument of a kernel; page: tokens of one page."""
    if table is None:
        return None
    if table.stride(1) != 1:
        table = table.contiguous()
    return BlockTable(table, table.stride(0), table.shape[1] * page)


@triton.jit
def entry_start(buffer, batch, table):
    """Where an entry begins in a buffer of the cache, or, with a table, its first page."""
    start = buffer.data
    if table is None:
        start += batch.to(tl.int64) * buffer.strides[0]
    return start


@triton.jit
def token_offset(buffer, batch, token, used, table, PAGE: tl.constexpr):
    """From there to tokens of the entry. The table is read for those that are used only."""
    strides = buffer.strides
    if table is None:
        offset = token.to(tl.int64) * strides[1]
    else:
        page = tl.load(table.data + batch.to(tl.int64) * table.stride + token // PAGE, mask=used, other=0)
        offset = page.to(tl.int64) * strides[0] + (token % PAGE).to(tl.int64) * strides[1]
    return offset


@triton.jit
def has_place(token, table):
    """Whether there is a page for a token; without a table the host has seen to it."""
    there = token == token
    if table is not None:
        there = token < table.tokens
    return there
