"""Rows of a halo's exchange: pack them, unpack them into the halo, and add up the gradients that come back.

A row holds the values of one token and key head in k, v and λ per token, side by side. Its dtype is that of the first
of them that is present (distributed/collectives.py's pack has the same bits). For each batch entry and key head a rank
fetches all tokens from a first one up to its slice. Rows are sent and received in this order:

    rank | batch entry | key head | token        rank: the receiver when sending, the sender when receiving

The row index of a token is a sum over the lengths of the segments (rank, entry, head) before its own. Every program
computes the sum itself: the host knows the number of rows and sends the GPU no list. Each of the four steps is one
launch of a fixed number of programs, which share tiles of TOKENS tokens of one entry and head.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import next_power_of_2
from decayattn.backends.runtime.launching import COMPILER_OPTIONS, Launch
from decayattn.backends.runtime.strided import Strided

TOKENS: tl.constexpr = tl.constexpr(16)
# segments that one step of a sum over their lengths reads
_SEGMENTS: tl.constexpr = tl.constexpr(128)
# programs per multiprocessor, and warps per program: ptxas spills more with other numbers (run time not measured)
_PROGRAMS, _WARPS = 4, 4

# k, v and λ per token, or their gradients: (B, T, H_kv, D), (B, T, H_kv, D_v) and (B, T, H); None if absent
Parts = Sequence[Tensor | None]


class Segments(NamedTuple):
    """Rows that a rank sends and receives."""

    begins: Tensor  # (ranks, B·H_kv) int64: the first token that a rank fetches, on the axis of all slices
    offsets: Tensor  # (ranks + 1,) int64: starts of the slices, and the end of the last one
    rank: int
    heads: int  # key heads
    length: int  # tokens of the rank's slice
    halo: int  # tokens before the slice that any of its heads fetches
    kept: int  # tokens of the slice before the first one that another rank fetches
    sent: int  # rows to send
    received: int


class _Where(NamedTuple):
    """Segments as kernel arguments, without the numbers that differ from call to call (see launch_for)."""

    begins: Strided
    offsets: Tensor
    rank: int
    ranks: int
    heads: int
    pairs: int  # batch entries times key heads


class _Part(NamedTuple):
    """Values of one tensor within a row."""

    begin: int
    numbers: int  # values of the tensor
    width: int  # columns of a tile
    halves: bool  # the tensor's values are twice as wide as the row's: each is stored as two


def launch_for(segments: Segments, *tensors: Tensor | None) -> Launch:
    """Return the launch for these segments and tensors; kernels are not specialised for the numbers of tokens."""
    ranks, pairs = segments.begins.shape
    modes = segments.rank, ranks, pairs, segments.heads
    return launching.of_call(segments.begins.device, (segments.begins, *tensors), *modes)


def pack_sent(segments: Segments, parts: Parts) -> Tensor:
    """Return (rows, ·): the part of this rank's slice that other ranks fetch."""
    return _packed(segments, parts, segments.sent, 0, segments.kept, segments.length, SENT=True)


def pack_returned(segments: Segments, grads: Parts) -> Tensor:
    """Return (rows, ·): gradients of the rows that this rank fetched; grads are on the axis of halo and slice."""
    return _packed(segments, grads, segments.received, segments.halo, 0, segments.halo, SENT=False)


def extend(segments: Segments, rows: Tensor, parts: Parts, tokens: int) -> list[Tensor | None]:
    """Return the halo and the first tokens of the slice, for each part.

    Tokens that a head did not fetch are 0. Its first key gets λ = −inf, so that no row sees past it, unless nothing
    comes before that key.
    """
    extended = [None if x is None else x.new_empty(x.shape[0], segments.halo + tokens, *x.shape[2:]) for x in parts]
    if segments.begins.shape[1] and segments.halo + tokens:
        _launch(
            _extend, segments, parts,
            rows, *_strided(segments, parts), *extended, _where(segments), segments.halo, tokens,
        )
    return extended


def add_returned(segments: Segments, rows: Tensor, totals: Parts, grads: Parts, tokens: int) -> list[Tensor | None]:
    """Add to the slice's gradients, in place, those that every rank sends back.

    Also adds the gradients of the slice's first tokens on the axis of halo and slice. Sums are at least float32, rank
    by rank, so that their bits are the same every time.
    """
    if segments.begins.shape[1] and segments.length and (segments.sent or tokens):
        _launch(
            _add, segments, totals,
            rows, *_strided(segments, totals), *_strided(segments, grads), _where(segments), segments.halo, tokens,
            segments.kept, segments.length, others=grads,
        )
    return list(totals)


def _packed(
    segments: Segments, parts: Parts, number: int, before: int, begin: int, end: int, SENT: bool
) -> Tensor:
    first = next(x for x in parts if x is not None)
    rows = first.new_empty(number, _row(segments, parts)["ROW"])
    if number:
        _launch(
            _pack, segments, parts, rows, *_strided(segments, parts), _where(segments), before, begin, end, SENT=SENT
        )
    return rows


def _launch(
    kernel: triton.runtime.JITFunction, segments: Segments, parts: Parts, *args, others: Parts = (), **constants
) -> None:
    """Launch a kernel. parts: tensors of a row; others: further tensors of the caller that the kernel reads."""
    device = segments.begins.device
    with launching.on_device(device):
        launch_for(segments, *parts, *others)(
            kernel, _PROGRAMS * launching.multiprocessors(device), *args, **_row(segments, parts), **constants,
            num_warps=_WARPS, **COMPILER_OPTIONS,
        )


def _where(segments: Segments) -> _Where:
    ranks, pairs = segments.begins.shape
    begins = Strided(segments.begins, segments.begins.stride())
    return _Where(begins, segments.offsets, segments.rank, ranks, segments.heads, pairs)


def _strided(segments: Segments, parts: Parts) -> list[Strided | None]:
    """Return all parts as (B, T, H_kv, ·)."""
    k, v, log_decay = (None if x is None else Strided(x, x.stride()) for x in parts)
    if log_decay is not None:
        entry, token, head = log_decay.strides
        group = log_decay.data.shape[2] // segments.heads
        log_decay = Strided(log_decay.data, (entry, token, head * group, head))
    return [k, v, log_decay]


def _row(segments: Segments, parts: Parts) -> dict[str, _Part | int | None]:
    k, v, log_decay = parts
    group = None if log_decay is None else log_decay.shape[2] // segments.heads
    numbers = *(None if x is None else x.shape[3] for x in (k, v)), group
    return _row_of(numbers, tuple(None if x is None else x.dtype for x in parts))


@functools.lru_cache(launching.REMEMBERED)
def _row_of(numbers: tuple[int | None, ...], dtypes: tuple[torch.dtype | None, ...]) -> dict[str, _Part | int | None]:
    """Constants that the kernels are compiled for."""
    parts: list[_Part | None] = []
    carrier, row = next(dtype for dtype in dtypes if dtype is not None), 0
    for count, dtype in zip(numbers, dtypes, strict=True):
        if count is None or dtype is None:
            parts.append(None)
            continue
        halves = dtype.itemsize > carrier.itemsize
        assert not halves or (dtype, carrier.itemsize) == (torch.float32, 2)
        parts.append(_Part(row, count, next_power_of_2(count), halves))
        row += count * (2 if halves else 1)
    return {**dict(zip(("K", "V", "DECAY"), parts, strict=True)), "ROW": row}


# ----------------------------------------------------------------------------------------------------------------------
# Kernels. Tokens count on the axis of a tensor; positions (int64) count on the axis of all slices


@triton.jit
def _segment(where, peer, pair, SENT: tl.constexpr):
    """Segment of an entry's key head that a peer receives (SENT) or sends.

    Returns its first position, its end, the peer's rows before it and the number of all the peer's rows.
    """
    if SENT:
        fetching, owning = peer, where.rank
    else:
        fetching, owning = where.rank, peer
    slice_begin, end = tl.load(where.offsets + owning), tl.load(where.offsets + owning + 1)
    begins, stride = where.begins.data + fetching * where.begins.strides[0], where.begins.strides[1]
    before, number = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for chunk in range(0, where.pairs, _SEGMENTS):
        other = chunk + tl.arange(0, _SEGMENTS)
        begin = tl.load(begins + other * stride, mask=other < where.pairs, other=end)
        rows = tl.maximum(end - tl.maximum(begin, slice_begin), 0)
        before += tl.sum(tl.where(other < pair, rows, 0), 0)
        number += tl.sum(rows, 0)
    return tl.maximum(tl.load(begins + pair * stride), slice_begin), end, before, number


@triton.jit
def _numbers(x, entry, head, token, column):
    """Pointers to values of a (B, T, H_kv, ·) tensor."""
    strides = x.strides
    of_head = x.data + entry * strides[0] + head * strides[2]
    return of_head + token.to(tl.int64)[:, None] * strides[1] + column.to(tl.int64)[None, :] * strides[3]


@triton.jit
def _contiguous_numbers(x, entry, head, token, column, length, heads, NUMBERS: tl.constexpr):
    """Pointers to values of a contiguous (B, length, heads, NUMBERS) tensor."""
    of_token = (entry * length + token) * heads + head
    return x + of_token[:, None] * NUMBERS + column[None, :]


@triton.jit
def _store_in_rows(rows, row, there, x, entry, head, token, PART: tl.constexpr, ROW: tl.constexpr):
    """Store a part of tokens into their rows, for tokens that have one."""
    column = tl.arange(0, PART.width)
    inside = there[:, None] & (column < PART.numbers)[None, :]
    value = tl.load(_numbers(x, entry, head, token, column), mask=inside)
    here = rows + row[:, None] * ROW + PART.begin
    CARRIER: tl.constexpr = rows.dtype.element_ty
    if PART.halves:  # the low half first, as in memory
        bits = value.to(tl.int32, bitcast=True)
        tl.store(here + 2 * column[None, :], bits.to(tl.int16).to(CARRIER, bitcast=True), mask=inside)
        tl.store(here + 2 * column[None, :] + 1, (bits >> 16).to(tl.int16).to(CARRIER, bitcast=True), mask=inside)
    else:
        tl.store(here + column[None, :], value.to(CARRIER), mask=inside)


@triton.jit
def _load_of_rows(rows, row, there, column, PART: tl.constexpr, ROW: tl.constexpr):
    """Load a part that _store_in_rows stored, two halves as one float32; 0 for a token without a row."""
    inside = there[:, None] & (column < PART.numbers)[None, :]
    here = rows + row[:, None] * ROW + PART.begin
    if PART.halves:
        low = tl.load(here + 2 * column[None, :], mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        high = tl.load(here + 2 * column[None, :] + 1, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        value = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        value = tl.load(here + column[None, :], mask=inside, other=0.0)
    return value


@triton.jit(do_not_specialize=["before", "begin", "end"])
def _pack(
    rows, k, v, log_decay, where, before, begin, end,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, ROW: tl.constexpr, SENT: tl.constexpr,
):
    """Pack tokens from begin to end into rows for the ranks that fetch them, or that they were fetched from.

    before: tokens of the axis before the slice.
    """
    tiles = tl.cdiv(end - begin, TOKENS)
    first = tl.load(where.offsets + where.rank) - before
    for tile in range(tl.program_id(0), where.pairs * tiles, tl.num_programs(0)):
        pair = (tile // tiles).to(tl.int64)
        entry, head = pair // where.heads, pair % where.heads
        token = begin + tile % tiles * TOKENS + tl.arange(0, TOKENS)
        position = first + token
        of_peer = tl.full([], 0, tl.int64)
        for peer in range(where.rank + 1 if SENT else 0, where.ranks if SENT else where.rank):
            segment_begin, segment_end, of_segment, number = _segment(where, peer, pair, SENT)
            there = (position >= segment_begin) & (position < segment_end) & (token < end)
            row = of_peer + of_segment + position - segment_begin
            if k is not None:
                _store_in_rows(rows, row, there, k, entry, head, token, K, ROW)
            if v is not None:
                _store_in_rows(rows, row, there, v, entry, head, token, V, ROW)
            if log_decay is not None:
                _store_in_rows(rows, row, there, log_decay, entry, head, token, DECAY, ROW)
            of_peer += number


@triton.jit(do_not_specialize=["halo", "tokens"])
def _extend(
    rows, k, v, log_decay, extended_k, extended_v, extended_log_decay, where, halo, tokens,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, ROW: tl.constexpr,
):
    """`extend`: take every token of halo and slice from its row or from the slice, or write 0."""
    length = halo + tokens
    tiles = tl.cdiv(length, TOKENS)
    first = tl.load(where.offsets + where.rank) - halo
    for tile in range(tl.program_id(0), where.pairs * tiles, tl.num_programs(0)):
        pair = (tile // tiles).to(tl.int64)
        token = tile % tiles * TOKENS + tl.arange(0, TOKENS)
        position = first + token
        row, of_peer = tl.full([TOKENS], -1, tl.int64), tl.full([], 0, tl.int64)
        for peer in range(0, tl.where(tile % tiles * TOKENS < halo, where.rank, 0)):
            begin, end, of_segment, number = _segment(where, peer, pair, False)
            row = tl.where((position >= begin) & (position < end), of_peer + of_segment + position - begin, row)
            of_peer += number
        if k is not None:
            _extend_part(rows, row, k, extended_k, where, pair, token, halo, length, None, K, ROW)
        if v is not None:
            _extend_part(rows, row, v, extended_v, where, pair, token, halo, length, None, V, ROW)
        if log_decay is not None:
            # no row sees past a head's first key, so its λ is unused; with nothing before the key, λ stays as it was
            begins = where.begins
            key = tl.load(begins.data + where.rank * begins.strides[0] + pair * begins.strides[1])
            hides = (position == key) & (token > 0)
            _extend_part(rows, row, log_decay, extended_log_decay, where, pair, token, halo, length, hides, DECAY, ROW)


@triton.jit
def _extend_part(
    rows, row, x, extended, where, pair, token, halo, length, hides, PART: tl.constexpr, ROW: tl.constexpr,
):
    """Extend one part. hides: True for tokens that get −inf instead; None: no token."""
    entry, head = pair // where.heads, pair % where.heads
    column = tl.arange(0, PART.width)
    is_number = (column < PART.numbers)[None, :]
    own = ((token >= halo) & (token < length))[:, None] & is_number
    value = tl.load(_numbers(x, entry, head, token - halo, column), mask=own, other=0.0)
    fetched = _load_of_rows(rows, row, row >= 0, column, PART, ROW).to(value.dtype)
    value = tl.where((row >= 0)[:, None], fetched, value)
    if hides is not None:
        value = tl.where(hides[:, None], float("-inf"), value)
    here = _contiguous_numbers(extended, entry, head, token, column, length, where.heads, PART.numbers)
    tl.store(here, value, mask=(token < length)[:, None] & is_number)


@triton.jit(do_not_specialize=["halo", "tokens", "kept", "length"])
def _add(
    rows, total_k, total_v, total_log_decay, k, v, log_decay, where, halo, tokens, kept, length,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, ROW: tl.constexpr,
):
    """`add_returned`: for every pair, the tiles with any of the first tokens, and those from `kept` on."""
    tiles = tl.cdiv(length, TOKENS)
    firsts = tl.minimum(tl.cdiv(tokens, TOKENS), tiles)
    begin = tl.maximum(kept // TOKENS, firsts)
    of_pair = firsts + tl.maximum(tiles - begin, 0)
    for tile in range(tl.program_id(0), where.pairs * of_pair, tl.num_programs(0)):
        pair, n = (tile // of_pair).to(tl.int64), tile % of_pair
        token = tl.where(n < firsts, n, begin + n - firsts) * TOKENS + tl.arange(0, TOKENS)
        if total_k is not None:
            _add_part(rows, total_k, k, where, pair, token, halo, tokens, length, K, ROW)
        if total_v is not None:
            _add_part(rows, total_v, v, where, pair, token, halo, tokens, length, V, ROW)
        if total_log_decay is not None:
            _add_part(rows, total_log_decay, log_decay, where, pair, token, halo, tokens, length, DECAY, ROW)


@triton.jit
def _add_part(rows, totals, x, where, pair, token, halo, tokens, length, PART: tl.constexpr, ROW: tl.constexpr):
    entry, head = pair // where.heads, pair % where.heads
    column = tl.arange(0, PART.width)
    is_number = (column < PART.numbers)[None, :]
    here, inside = _numbers(totals, entry, head, token, column), (token < length)[:, None] & is_number
    ACCUMULATOR: tl.constexpr = tl.float64 if totals.data.dtype.element_ty == tl.float64 else tl.float32
    total = tl.load(here, mask=inside, other=0.0).to(ACCUMULATOR)
    is_first = (token < tokens)[:, None] & is_number
    of_first = tl.load(_numbers(x, entry, head, halo + token, column), mask=is_first, other=0.0)
    total += of_first.to(ACCUMULATOR)
    position = tl.load(where.offsets + where.rank) + token
    of_peer = tl.full([], 0, tl.int64)
    for peer in range(where.rank + 1, where.ranks):
        begin, _, of_segment, number = _segment(where, peer, pair, True)
        there = (position >= begin) & (token < length)
        returned = _load_of_rows(rows, of_peer + of_segment + position - begin, there, column, PART, ROW)
        total += returned.to(ACCUMULATOR)  # 0 for a token without a row
        of_peer += number
    tl.store(here, total.to(totals.data.dtype.element_ty), mask=inside)
