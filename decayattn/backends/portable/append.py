"""Append tokens to a cache: one launch for keys, values, α and resets.

Some programs copy a tile of one key head's tokens. The others scan the new tokens of one query head: α of token t is α
of the token before it plus λ_t, in float64 and natural logarithm. The λ of a reset and of an entry's first token count
as 0.

Tiles: k (BLOCK_T, D) · v (BLOCK_T, D_v) · λ, α (BLOCK_S)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.planning.prefix import larger
from decayattn.backends.portable.config import padded
from decayattn.backends.portable.pages import entry_start, has_place, table_and_blocks, token_offset
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv, next_power_of_2
from decayattn.backends.runtime.strided import Strided, strided
from decayattn.backends.tiles.scores import RESET_BELOW
from decayattn.reference import CacheBuffers

# upper bound on the tokens that a program copies, and on those that one step scans; one for a single new token
_MOST_COPIED = 16
_MOST_SUMMED = 128


def append(
    cache: CacheBuffers, k: Tensor, v: Tensor, log_decay: Tensor | None, counted: Tensor | None
) -> Tensor | None:
    """Implement reference.append by one launch; the caller has checked the arguments."""
    batch, tokens, kv_heads, dim = k.shape
    value_dim, page = v.shape[3], 0 if cache.block_table is None else cache.keys.shape[1]
    first = None if cache.first is None else cache.first[..., None].expand(-1, -1, tokens)
    with launching.on_device(k.device):
        copied, summed = (min(next_power_of_2(tokens), most) for most in (_MOST_COPIED, _MOST_SUMMED))
        copies, heads, new_first = batch * kv_heads * cdiv(tokens, copied), 0, None
        if log_decay is not None:
            heads = log_decay.shape[2]
            new_first = first = torch.empty(batch, heads, tokens, device=k.device, dtype=torch.int32)
        given = (k, v, log_decay, counted, *cache)
        table, blocks = table_and_blocks(cache.block_table)
        launch = launching.of_call(k.device, given, k.shape, value_dim, heads, page, blocks)
        launch(
            append_kernel, copies + batch * heads,
            HeldTokens(
                strided(cache.keys), strided(cache.values), cache.lengths, cache.first, cache.log_evicted,
                strided(cache.alpha), table,
            ),
            NewTokens(strided(k), strided(v), strided(log_decay), counted, new_first), tokens, kv_heads, heads, copies,
            blocks, D=dim, D_V=value_dim, BLOCK_T=copied, BLOCK_S=summed, BLOCK_D=padded(dim),
            BLOCK_DV=padded(value_dim), PAGE=page,
        )
    return first


class HeldTokens(NamedTuple):
    """CacheBuffers for append_kernel, which writes all but lengths. `values` would hide that of Triton's tuples."""

    k: Strided
    v: Strided
    lengths: Tensor
    first: Tensor | None
    log_evicted: Tensor | None
    alpha: Strided | None
    table: Tensor | None


class NewTokens(NamedTuple):
    """New tokens that append_kernel reads, and the first keys that they see, (B, H, T); None if log_decay is."""

    k: Strided
    v: Strided
    log_decay: Strided | None
    counted: Tensor | None
    first: Tensor | None


@triton.jit
def append_kernel(
    held, new, tokens, kv_heads, heads, copies, blocks, D: tl.constexpr, D_V: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
):
    """Write NewTokens to HeldTokens: keys and values (the first `copies` programs), or α, first keys, log_evicted."""
    program = tl.program_id(0)
    if program < copies:
        # a tile of tokens of one key head
        tiles = tl.cdiv(tokens, BLOCK_T)
        batch, head = program // tiles // kv_heads, (program // tiles % kv_heads).to(tl.int64)
        token = program % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
        there = tl.load(held.lengths + batch) + token
        counts = token < _count(new, batch, tokens)
        inside = token < tokens
        fits = inside & has_place(there, held.table, blocks, PAGE)
        tokens_of_tile = (there, token, inside, counts, fits)
        _copy(held, held.k, new.k, batch, head, tokens_of_tile, blocks, D, BLOCK_D, PAGE)
        _copy(held, held.v, new.v, batch, head, tokens_of_tile, blocks, D_V, BLOCK_DV, PAGE)
    elif new.log_decay is not None:
        _continue_alpha(held, new, program - copies, heads, tokens, blocks, BLOCK_S, PAGE)


@triton.jit
def _count(new, batch, tokens):
    """Number of an entry's new tokens that count."""
    return tokens if new.counted is None else tl.load(new.counted + batch)


@triton.jit
def _copy(
    held, buffer, new, batch, head, tokens, blocks, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr
):
    """Copy rows of a head to a buffer, 0 if they do not count. tokens: places, indices; masks: exist, count, fit."""
    there, token, inside, counts, fits = tokens
    column = tl.arange(0, BLOCK)[None, :].to(tl.int64)  # strides may put tokens side by side and columns far apart
    rows = new.data + batch.to(tl.int64) * new.strides[0] + head * new.strides[2]
    rows += token.to(tl.int64)[:, None] * new.strides[1] + column * new.strides[3]
    x = tl.load(rows, mask=(inside & counts)[:, None] & (column < WIDTH), other=0.0)
    rows = entry_start(buffer, batch, held.table) + head * buffer.strides[2]
    offset = token_offset(buffer, batch, there, fits, held.table, blocks, PAGE)
    tl.store(rows + offset[:, None] + column * buffer.strides[3], x, mask=fits[:, None] & (column < WIDTH))


@triton.jit
def _continue_alpha(held, new, batch_head, heads, tokens, blocks, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Compute α and the first keys of one query head over the new tokens."""
    batch, head = batch_head // heads, (batch_head % heads).to(tl.int64)
    rate_strides = new.log_decay.strides
    rates = new.log_decay.data + batch.to(tl.int64) * rate_strides[0] + head * rate_strides[2]
    alpha = entry_start(held.alpha, batch, held.table) + head * held.alpha.strides[2]
    length, count = tl.load(held.lengths + batch), _count(new, batch, tokens)
    newest = length.to(tl.int64) - 1
    has_newest = (length > 0) & has_place(newest, held.table, blocks, PAGE)
    before = token_offset(held.alpha, batch, newest, has_newest, held.table, blocks, PAGE)
    before = tl.load(alpha + before, mask=has_newest, other=0.0)
    first = tl.load(held.first + batch_head)
    last_reset = 0
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside, position = token < tokens, length + token
        rate = tl.load(rates + token.to(tl.int64) * rate_strides[1], mask=inside & (token < count), other=0.0)
        is_reset = rate < RESET_BELOW
        step = tl.where(is_reset | (position == 0), 0.0, rate.to(tl.float64))
        fits = inside & has_place(position, held.table, blocks, PAGE)
        offset = token_offset(held.alpha, batch, position, fits, held.table, blocks, PAGE)
        tl.store(alpha + offset, before + tl.cumsum(step, 0), mask=fits)
        before += tl.sum(step, 0)
        resets = tl.associative_scan(tl.where(is_reset, position, 0), 0, larger)
        seen = tl.maximum(resets, first)
        tl.store(new.first + batch_head.to(tl.int64) * tokens + token, seen, mask=inside)
        first = tl.max(seen, 0)
        last_reset = tl.maximum(last_reset, tl.max(resets, 0))
    tl.store(held.first + batch_head, first)
    if held.log_evicted is not None:
        tl.store(held.log_evicted + batch_head, float("-inf"), mask=last_reset > 0)
