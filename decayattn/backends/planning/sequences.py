"""Packed and padded sequences: their starts, the work tile of each program, and the rows outside all sequences.

A launch has one program per block of DECAY_BLOCK rows (or tokens) of the sequences. A grid of sequences × blocks of the
longest one would have many more. `ends` counts the blocks up to the end of every sequence; a program finds its sequence
by counting the ends at or before its block. The lengths are on the device, so the host launches an upper bound of the
blocks and does not synchronise.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.planning.offsets import parts_before, start_of_head
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv, next_power_of_2
from decayattn.backends.runtime.launching import Launch
from decayattn.backends.runtime.strided import uninitialised
from decayattn.problem import DECAY_BLOCK, AttentionProblem

_BLOCK: tl.constexpr = tl.constexpr(DECAY_BLOCK)
# ends that one search compares at once, and sequences that are compared with a block's rows at once
_CHUNK = 128
_SEARCHED: tl.constexpr = tl.constexpr(_CHUNK)
# sequences that one step of counting blocks reads
_COUNTED = 1024


class Sequences(NamedTuple):
    """Sequences that do not fill their batch entries, as the kernels read them; None if they do.

    Triton compiles a kernel again if an integer argument changes between a multiple of 16 and any other value. Numbers
    that differ from batch to batch are therefore rounded up to multiples of 16.
    """

    bounds: Tensor  # AttentionProblem's
    ends: Tensor  # (2, count) int32: blocks of rows, and blocks of tokens, up to the end of each sequence
    count: int  # sequences, then empty ones
    query_axis: int  # rows, tokens and decay blocks of the axes that hold the sequences
    key_axis: int
    block_axis: int
    row_blocks: int  # blocks that are launched per head: an upper bound of those that exist
    token_blocks: int


class WorkTile(NamedTuple):
    """Work of one program: a tile of rows or of tokens of one head of a sequence."""

    start: tl.tensor  # first row or token of the tile, within its sequence
    sequence: tl.tensor
    head: tl.tensor
    entry: tl.tensor  # batch entry of the sequence
    first_row: tl.tensor  # start of the sequence on the axis of queries, and its number of rows
    query_length: tl.tensor
    first_token: tl.tensor  # the same on the axis of keys
    key_length: tl.tensor


class HeadOffsets(NamedTuple):
    """Offsets of a head of a sequence in buffers (B, H, ·) of rows, of tokens and of decay blocks."""

    rows: tl.tensor
    tokens: tl.tensor
    blocks: tl.tensor


def find(problem: AttentionProblem, bounds: Tensor | None, launch: Launch = launching.uncached) -> Sequences | None:
    """Return the sequences at `bounds`, by one launch; None without bounds."""
    if bounds is None:
        return None
    count = _rounded_up(problem.sequences)
    ends = uninitialised(bounds, 2, count)
    launch(
        _count_blocks, 2,
        bounds, ends, problem.sequences, count, BLOCK=DECAY_BLOCK, CHUNK=_COUNTED,
    )
    return Sequences(
        bounds, ends, count, problem.query_length, problem.key_length, decay_blocks(problem),
        *(_rounded_up(most_tiles(problem, DECAY_BLOCK, of_keys)) for of_keys in (False, True)),
    )


def decay_blocks(problem: AttentionProblem) -> int:
    """Blocks of the decay prefix per head and batch entry."""
    if problem.layout == "packed":
        # every sequence may end in a partial block
        return problem.key_length // DECAY_BLOCK + problem.sequences
    return (problem.key_length + DECAY_BLOCK - 1) // DECAY_BLOCK  # symbolic lengths too


def most_tiles(problem: AttentionProblem, tile: int, of_keys: bool) -> int:
    """Upper bound on the tiles of rows (of_keys: tokens) of all sequences."""
    longest = problem.longest_key if of_keys else problem.longest_query
    tiles = problem.sequences * cdiv(longest, tile)
    if problem.layout == "packed":
        axis = problem.key_length if of_keys else problem.query_length
        return min(tiles, axis // tile + problem.sequences)
    return tiles


def _rounded_up(number: int) -> int:
    return cdiv(number, 16) * 16


def programs(problem: AttentionProblem, tile: int, heads: int, of_keys: bool) -> int:
    """Programs of a launch with one per head and tile of rows (of_keys: tokens)."""
    if problem.layout == "dense":
        return most_tiles(problem, tile, of_keys) * heads
    return _rounded_up(most_tiles(problem, DECAY_BLOCK, of_keys)) * (DECAY_BLOCK // tile) * heads


def constants(problem: AttentionProblem) -> dict[str, bool | int]:
    """Constants of `tile_of_program`. PACKED: one batch entry has all sequences. SEARCHES: to find one among all."""
    searches = 1
    while problem.layout != "dense" and _CHUNK**searches < _rounded_up(problem.sequences):
        searches += 1
    return {"PACKED": problem.layout == "packed", "SEARCHES": searches}


def fill_outside(
    problem: AttentionProblem, sequences: Sequences | None, tensors: tuple[Tensor | None, ...],
    values: tuple[float, ...] | None = None, of_keys: bool = False, launch: Launch = launching.uncached,
) -> None:
    """Fill rows (of_keys: tokens) of tensors (B, T, H, D) or (B, H, T) that have no sequence, or one without keys.

    values: one per tensor; by default 0.
    """
    if sequences is None:
        return
    axis = sequences.key_axis if of_keys else sequences.query_axis
    values = values or (0.0,) * len(tensors)
    filled, values = zip(*((x, y) for x, y in zip(tensors, values, strict=True) if x is not None), strict=True)
    strides, shapes = zip(*map(_tokens_first, filled), strict=True)
    launch(
        _fill_outside, cdiv(axis, DECAY_BLOCK) * problem.batch,
        sequences, filled, strides, shapes, values, problem.sequences, axis,
        OF_KEYS=of_keys, PACKED=problem.layout == "packed", BLOCK=DECAY_BLOCK, CHUNK=_CHUNK,
        WIDTH=next_power_of_2(max(width for _, width in shapes)), TENSORS=len(filled), num_warps=8,
    )


def _tokens_first(x: Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Strides of a tensor (B, T, H, D) or (B, H, T) as one of (B, T, H, D), and its H and D: faster than a view."""
    if x.ndim == 4:
        return x.stride(), (x.shape[2], x.shape[3])
    entry, head, token = x.stride()
    return (entry, token, head, 1), (x.shape[1], 1)


@triton.jit(do_not_specialize=["number"])
def _count_blocks(bounds, ends, number, count, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Count the blocks of rows (program 0) or tokens (program 1) of `number` sequences, then of empty ones to count."""
    side = tl.program_id(0)
    before = side * 0
    for start in range(0, count, CHUNK):
        sequence = start + tl.arange(0, CHUNK)
        length = tl.load(bounds + sequence * 4 + 2 * side + 1, mask=sequence < number, other=0)
        blocks = tl.cdiv(length, BLOCK)
        tl.store(ends + side * count + sequence, before + tl.cumsum(blocks, 0), mask=sequence < count)
        before += tl.sum(blocks, 0)


@triton.jit
def tile_of_program(
    sequences, heads, query_length, key_length, TILE: tl.constexpr, OF_KEYS: tl.constexpr, PACKED: tl.constexpr,
    SEARCHES: tl.constexpr, HEADS_INNERMOST: tl.constexpr = False, program=None,
):
    """Return the WorkTile of a program: TILE rows of a sequence (OF_KEYS: tokens).

    program: its index; None: this program's. Given if another kernel shares the launch.
    A program without work has a start at or after the sequence's end. Heads are outermost, so that consecutive programs
    share the keys that they read. HEADS_INNERMOST, the order of memory, is for kernels that read tokens once. The last
    rows of a sequence come first, as do its first tokens: causal, they have the most pairs. `sequences` is None if
    sequences fill their batch entries; their lengths are then query_length and key_length.
    """
    if program is None:
        program = tl.program_id(0)
    if sequences is None:
        tiles = tl.cdiv(key_length if OF_KEYS else query_length, TILE)
        if HEADS_INNERMOST:
            head, tile, sequence = program % heads, program // heads % tiles, program // heads // tiles
        else:
            tile, head, sequence = program % tiles, program // tiles % heads, program // tiles // heads
        entry, first_row, first_token = sequence, sequence * 0, sequence * 0
        if not OF_KEYS:
            tile = tiles - 1 - tile
    else:
        tiles = (sequences.token_blocks if OF_KEYS else sequences.row_blocks) * (_BLOCK // TILE)
        if HEADS_INNERMOST:
            head, tile = program % heads, program // heads
        else:
            tile, head = program % tiles, program // tiles
        ends = sequences.ends
        if OF_KEYS:
            ends += sequences.count
        sequence, before = count_ends(ends, sequences.count, tile // (_BLOCK // TILE), SEARCHES)
        tile -= before * (_BLOCK // TILE)
        # the upper bound leaves programs without a sequence after the last one
        there = sequence < sequences.count
        own = sequences.bounds + sequence * 4
        first_row = tl.load(own, mask=there, other=0)
        query_length = tl.load(own + 1, mask=there, other=0)
        first_token = tl.load(own + 2, mask=there, other=0)
        key_length = tl.load(own + 3, mask=there, other=0)
        entry = sequence
        if PACKED:
            entry = sequence * 0
        if not OF_KEYS:
            blocks = tl.cdiv(query_length, _BLOCK)
            tile = tl.where(there, blocks * (_BLOCK // TILE) - 1 - tile, 0)
    return WorkTile(tile * TILE, sequence, head, entry, first_row, query_length, first_token, key_length)


@triton.jit
def sequence_of_program(sequences, heads, query_length, key_length, PACKED: tl.constexpr):
    """Return the WorkTile of a program that works on all rows and tokens of one head of a sequence."""
    head, sequence = tl.program_id(0) % heads, tl.program_id(0) // heads
    start, entry, first_row, first_token = sequence * 0, sequence, sequence * 0, sequence * 0
    if sequences is not None:
        own = sequences.bounds + sequence * 4
        first_row, query_length = tl.load(own), tl.load(own + 1)
        first_token, key_length = tl.load(own + 2), tl.load(own + 3)
        if PACKED:
            entry = sequence * 0
    return WorkTile(start, sequence, head, entry, first_row, query_length, first_token, key_length)


@triton.jit
def count_ends(ends, count, block, SEARCHES: tl.constexpr):
    """Number of ends, which never decrease, at or before a block, and the last of them, or 0: by _SEARCHED groups."""
    found, before = block * 0, block * 0
    for search in tl.static_range(SEARCHES):
        group = _SEARCHED ** (SEARCHES - 1 - search)  # without annotation: a constexpr cannot be assigned again
        index = found + tl.arange(0, _SEARCHED) * group + group - 1
        end = tl.load(ends + index, mask=index < count, other=2147483647)
        passed = end <= block
        before = tl.maximum(before, tl.max(tl.where(passed, end, 0), 0))
        found += tl.sum(passed.to(tl.int32), 0) * group
    return found, before


@triton.jit
def offsets_of_head(sequences, work, head, heads, PACKED: tl.constexpr):
    """HeadOffsets of a head of work's sequence: work's own head, or others of its group."""
    buffer_row = (work.sequence * heads + head).to(tl.int64)
    if sequences is None:
        rows, tokens = buffer_row * work.query_length, buffer_row * work.key_length
        blocks = buffer_row * tl.cdiv(work.key_length, _BLOCK)
    else:
        if PACKED:
            buffer_row = head.to(tl.int64)
        rows = start_of_head(buffer_row, sequences.query_axis, work.first_row)
        tokens = start_of_head(buffer_row, sequences.key_axis, work.first_token)
        first_block = 0
        if PACKED:
            first_block = parts_before(work.first_token, work.sequence, _BLOCK)
        blocks = start_of_head(buffer_row, sequences.block_axis, first_block)
    return HeadOffsets(rows, tokens, blocks)


@triton.jit(do_not_specialize=["number"])
def _fill_outside(
    sequences, tensors, strides, shapes, values, number, axis, OF_KEYS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, TENSORS: tl.constexpr,
):
    """Fill one block of rows (OF_KEYS: tokens) of a batch entry; most blocks are inside sequences: nothing to fill."""
    blocks = tl.cdiv(axis, BLOCK)
    entry = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    begin, end = entry, entry + 1
    if PACKED:
        begin, end = entry * 0, number
    covered = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, CHUNK):
        sequence = start + tl.arange(0, CHUNK)
        there = sequence < end
        own = sequences.bounds + sequence * 4
        first = tl.load(own + 2 if OF_KEYS else own, mask=there, other=0)
        length = tl.load(own + 3 if OF_KEYS else own + 1, mask=there, other=0)
        if not OF_KEYS:
            length = tl.where(tl.load(own + 3, mask=there, other=0) == 0, 0, length)
        inside = (row[:, None] >= first[None, :]) & (row[:, None] < (first + length)[None, :])
        covered = tl.maximum(covered, tl.max(inside.to(tl.int32), 1))
    outside = (covered == 0) & (row < axis)
    if tl.max(outside.to(tl.int32), 0) != 0:
        column = tl.arange(0, WIDTH)
        for i in tl.static_range(TENSORS):
            mask = outside[:, None] & (column < shapes[i][1])[None, :]
            here = tensors[i] + entry.to(tl.int64) * strides[i][0]
            here += row.to(tl.int64)[:, None] * strides[i][1] + column.to(tl.int64)[None, :] * strides[i][3]
            value = tl.full([BLOCK, WIDTH], values[i], tl.float32).to(tensors[i].dtype.element_ty)
            for _ in range(0, shapes[i][0]):
                tl.store(here, value, mask=mask)
                here += strides[i][2]
