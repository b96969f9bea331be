"""Tables of the tiles of sequences that do not fill their batch entries, made on the device in every call.

A program fetches tiles, and sequences have different numbers of them. One launch lists every tile of rows, and of keys,
with its start and its sequence. So no program searches, and the host, which knows an upper bound of the tiles only,
does not synchronise. A table is int32: first (number of tiles, …), then a line of WORDS values per tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common.descriptors import SLICE_END
from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.planning.offsets import parts_before, start_of_head
from decayattn.backends.planning.sequences import most_tiles
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv
from decayattn.backends.runtime.launching import Launch
from decayattn.backends.runtime.strided import uninitialised
from decayattn.problem import DECAY_BLOCK, AttentionProblem

# words of a line: _list_tiles writes them; load_bounds and row_terms.py read them
START: gl.constexpr = gl.constexpr(0)  # the first row or key of the tile in its sequence
QUERY_LENGTH: gl.constexpr = gl.constexpr(1)
KEY_LENGTH: gl.constexpr = gl.constexpr(2)
ENTRY: gl.constexpr = gl.constexpr(3)  # the batch entry of the sequence
FIRST_ROW: gl.constexpr = gl.constexpr(4)  # of the sequence in its entry
FIRST_TOKEN: gl.constexpr = gl.constexpr(5)
FIRST_BLOCK: gl.constexpr = gl.constexpr(6)  # of the decay prefix of a head
FIRST_TILE: gl.constexpr = gl.constexpr(7)  # of the sequence among the tiles of rows in the table
WORDS = 8
LINE: gl.constexpr = gl.constexpr(WORDS)
_SLICE_END: gl.constexpr = gl.constexpr(SLICE_END)
_CHUNK = 128


class Tiles(NamedTuple):
    """Tiles of a call. Dense calls have no tables, and the numbers of tiles are those of a batch entry."""

    rows: Tensor | None
    keys: Tensor | None
    row_tiles: int  # per head, of all sequences: an upper bound
    key_tiles: int


def build(
    problem: AttentionProblem, bounds: Tensor | None, rows: int, keys: int, last_first: bool, of_keys: bool,
    launch: Launch = launching.uncached,
) -> Tiles:
    """List the tiles of `rows` rows, and with of_keys those of `keys` keys.

    The longest sequences, by their number of keys, come first. last_first: the last rows of a sequence come first.

    A sequence without a key has no tiles of rows. Offsets out of order, which are not allowed, give no tiles.
    """
    if bounds is None:
        return Tiles(None, None, cdiv(problem.query_length, rows), cdiv(problem.key_length, keys))
    row_tiles, key_tiles = most_tiles(problem, rows, of_keys=False), most_tiles(problem, keys, of_keys=True)
    row_table = uninitialised(bounds, 1 + row_tiles, WORDS)
    key_table = uninitialised(bounds, 1 + key_tiles, WORDS) if of_keys else None
    launch(
        _list_tiles, problem.sequences,
        bounds, problem.sequences, row_table, key_table, row_tiles, key_tiles, ROWS=rows, KEYS=keys,
        LAST_FIRST=last_first, PACKED=problem.layout == "packed", BLOCK=DECAY_BLOCK, CHUNK=_CHUNK,
    )
    return Tiles(row_table, key_table, row_tiles, key_tiles)


@triton.jit
def line_of_tile(table, tile):
    """Pointer to a tile's line; the number of tiles comes before the first one."""
    return table + (1 + tile) * LINE


@triton.jit(do_not_specialize=["count", "most_rows", "most_keys"])
def _list_tiles(
    bounds, count, row_table, key_table, most_rows, most_keys, ROWS: tl.constexpr, KEYS: tl.constexpr,
    LAST_FIRST: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):
    """Write the lines of one sequence. The longest come first, so that the last programs to finish have little to do.
    """
    sequence = tl.program_id(0)
    first_row, rows = tl.load(bounds + sequence * 4), tl.load(bounds + sequence * 4 + 1)
    first_token, tokens = tl.load(bounds + sequence * 4 + 2), tl.load(bounds + sequence * 4 + 3)
    row_tile, key_tile, all_rows, all_keys = sequence * 0, sequence * 0, sequence * 0, sequence * 0
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < count
        other_rows = tl.load(bounds + other * 4 + 1, mask=there, other=0)
        other_tokens = tl.load(bounds + other * 4 + 3, mask=there, other=0)
        before = (other_tokens > tokens) | ((other_tokens == tokens) & (other < sequence))
        row_tiles = tl.where(other_tokens > 0, tl.cdiv(other_rows, ROWS), 0)
        key_tiles = tl.cdiv(other_tokens, KEYS)
        row_tile += tl.sum(tl.where(before, row_tiles, 0), 0)
        key_tile += tl.sum(tl.where(before, key_tiles, 0), 0)
        all_rows += tl.sum(row_tiles, 0)
        all_keys += tl.sum(key_tiles, 0)
    entry, first_block = sequence, sequence * 0
    if PACKED:
        entry, first_block = sequence * 0, parts_before(first_token, sequence, BLOCK)
    # from QUERY_LENGTH to FIRST_TILE
    sequence_words = (rows, tokens, entry, first_row, first_token, first_block, row_tile)
    row_tiles = tl.where(tokens > 0, tl.cdiv(rows, ROWS), 0)
    _write_lines(row_table, row_tile, row_tiles, most_rows, sequence_words, ROWS, LAST_FIRST, CHUNK)
    in_order = all_rows <= most_rows
    if key_table is not None:
        _write_lines(key_table, key_tile, tl.cdiv(tokens, KEYS), most_keys, sequence_words, KEYS, False, CHUNK)
        in_order = in_order & (all_keys <= most_keys)
    if sequence == 0:
        tl.store(row_table, tl.where(in_order, all_rows, 0))
        if key_table is not None:
            tl.store(key_table, tl.where(in_order, all_keys, 0))


@triton.jit
def _write_lines(
    table, first, tiles, most, sequence_words, TILE: tl.constexpr, LAST_FIRST: tl.constexpr, CHUNK: tl.constexpr,
):
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        line = line_of_tile(table, first + tile)
        inside = (tile < tiles) & (first + tile < most)
        tl.store(line + START, (tiles - 1 - tile if LAST_FIRST else tile) * TILE, mask=inside)
        for i in tl.static_range(len(sequence_words)):
            tl.store(line + QUERY_LENGTH + i, tl.zeros([CHUNK], tl.int32) + sequence_words[i], mask=inside)


# ----------------------------------------------------------------------------------------------------------------------
# In Gluon kernels


@aggregate
class Axes:
    """Lengths of the axes that hold the sequences: of rows, keys, and blocks of the decay prefix.

    RAGGED: a table has the bounds of every sequence; otherwise each fills its batch entry.
    """

    rows: gl.tensor
    keys: gl.tensor
    blocks: gl.tensor
    RAGGED: gl.constexpr


@aggregate
class TileBounds:
    """A line of a table: the start of a tile, and the bounds of its sequence."""

    axes: Axes
    start: gl.tensor
    query_length: gl.tensor
    key_length: gl.tensor
    entry: gl.tensor
    first_row: gl.tensor
    first_token: gl.tensor
    first_block: gl.tensor
    first_tile: gl.tensor

    @gluon.jit
    def first_position(self):
        return self.key_length - self.query_length

    @gluon.jit
    def rows(self, head_row, LARGE: gl.constexpr = True):
        """Offset of the sequence's rows in a buffer (B, H, T_q)."""
        return start_of_head(head_row, self.axes.rows, self.first_row, LARGE)

    @gluon.jit
    def tokens(self, head_row):
        return start_of_head(head_row, self.axes.keys, self.first_token)

    @gluon.jit
    def blocks(self, head_row):
        return start_of_head(head_row, self.axes.blocks, self.first_block, False)

    @gluon.jit
    def rows_at(self, head, row, COLUMN: gl.constexpr = 0):
        """TMA coordinates of a tile: rows of a head from `row` of the sequence on, and its columns from COLUMN on."""
        return _coordinates(self, head, row, self.first_row, self.query_length, self.axes.rows, COLUMN)

    @gluon.jit
    def keys_at(self, head, key, COLUMN: gl.constexpr = 0):
        """The same of keys of a head of keys."""
        return _coordinates(self, head, key, self.first_token, self.key_length, self.axes.keys, COLUMN)


@gluon.jit
def load_bounds(axes, table, tile):
    line = line_of_tile(table, tile)
    return TileBounds(
        axes, gl.load(line + START), gl.load(line + QUERY_LENGTH), gl.load(line + KEY_LENGTH), gl.load(line + ENTRY),
        gl.load(line + FIRST_ROW), gl.load(line + FIRST_TOKEN), gl.load(line + FIRST_BLOCK),
        gl.load(line + FIRST_TILE),
    )


@gluon.jit
def dense_bounds(axes, start, batch):
    """TileBounds of a tile of a sequence that fills its batch entry."""
    zero = start * 0
    return TileBounds(axes, start, axes.rows, axes.keys, batch, zero, zero, zero, zero)


@gluon.jit
def _coordinates(bounds, head, row, first, length, axis, COLUMN: gl.constexpr):
    """TMA coordinates: for descriptors.slices if RAGGED, where all batch entries are one axis; else descriptors.tokens.

    The sequence has `length` rows from `first` on.
    """
    if bounds.axes.RAGGED:
        at = (_SLICE_END, bounds.entry * axis + first + length, head, _SLICE_END - length + row, COLUMN)
    else:
        at = (bounds.entry, head, row, COLUMN)
    return at
