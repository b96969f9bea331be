"""Schedules of the Hopper kernels: pure functions of (head dimension, dtype). Nothing is tuned at run time."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

from decayattn.backends.runtime.integers import cdiv

# rows of one consumer warpgroup: the height of a WGMMA instruction
WARPGROUP_ROWS = 64
# keys per tile: a block of the decay prefix, so that the difference of two bases is one value per tile; or half a
# block, where a whole one needs too many registers
KEY_TILE = 128
# head dimensions of the kernels; for others TMA fills tiles with zeros on their way to shared memory
HEAD_DIMS = (64, 128, 256)
# share of the 50 MB of L2 for data that concurrent programs read repeatedly: keys and values, or rows. With half of it
# the backward was 1 to 3 % slower, and the forward as fast
CACHE_BYTES = 32 << 20
# Minimum of key tiles of the heads that the backward computes together (a chunk). Each tile zeroes a share of the next
# chunk's dq, and that chunk waits for it. With few tiles per chunk, chunks would run one after the other (not measured)
MIN_CHUNK_TILES = 32


@functools.cache
def kernel_dim(head_dim: int, value_dim: int) -> int:
    """Head dimension of the kernels for D and D_v."""
    return next(dim for dim in HEAD_DIMS if dim >= max(head_dim, value_dim))


def is_wide(dim: int) -> bool:
    """True if dk and dv of a warpgroup do not fit in registers with the scores of consume_128.py (dim above 128)."""
    return dim > 128


class Widths(NamedTuple):
    """Columns of tiles of q and k, and of v."""

    qk: int
    read: int  # columns of q and k that products read; those after hold no values
    v: int


@functools.cache
def widths(head_dim: int, value_dim: int) -> Widths:
    """Return the widths of the tiles for D and D_v."""
    dim = kernel_dim(head_dim, value_dim)
    if not is_wide(dim):
        return Widths(dim, dim, dim)
    return Widths(dim, cdiv(head_dim, 64) * 64, max(128, kernel_dim(value_dim, 1)))


# registers per thread that the register file of 65,536 allows with two consumer warpgroups
_REGISTERS, _LAUNCH_REGISTERS = 240, 168


@dataclass(frozen=True)
class Constants:
    """Base of constants that a kernel is compiled for. The kernel gets `values`, and makes the object again.

    Triton's hooks write values as JSON, and it finds compiled kernels by them. So there are no properties: a change of
    one would leave old kernels in use.
    """

    @functools.cached_property
    def values(self) -> tuple:
        return dataclasses.astuple(self)


@dataclass(frozen=True)
class ForwardConfig(Constants):
    """Schedule of the forward.

    The widths of its tiles; keys per tile; consumer warpgroups of 64 rows; stages: key and value tiles in flight;
    slots: work tiles with their queries in shared memory; spill_bytes: upper bound on register spills; rows of a work
    tile; registers per thread.

    A consumer thread has `registers`. Every thread of the launch has `launch_registers` until the producer gives its
    share away. Both are the most that the register file of 65,536 allows.
    """

    widths: Widths
    keys: int
    warpgroups: int
    stages: int
    slots: int
    spill_bytes: int
    rows: int = 2 * WARPGROUP_ROWS
    registers: int = _REGISTERS
    launch_registers: int = _LAUNCH_REGISTERS


@functools.cache
def forward(widths: Widths) -> ForwardConfig:
    """Return the forward's schedule."""
    if widths.qk == 64:
        # Latency-bound with two warpgroups: the third gains 12 %; four stages, which let them drift apart, 4 to 6 %.
        # Spilled are values that the end of a work tile needs, or (with a window) its partial tiles
        return ForwardConfig(
            widths, KEY_TILE, warpgroups=3, stages=4, slots=2, spill_bytes=28, rows=3 * WARPGROUP_ROWS, registers=160,
            launch_registers=128,
        )
    if widths.qk == 128:
        return ForwardConfig(widths, KEY_TILE, warpgroups=2, stages=2, slots=2, spill_bytes=12)
    # acc takes half of the registers, hence half as many scores; two stages and one slot fill the shared memory
    return ForwardConfig(widths, KEY_TILE // 2, warpgroups=2, stages=2, slots=1, spill_bytes=12)


@dataclass(frozen=True)
class BackwardConfig(Constants):
    """Schedule of the backward.

    widths of its tiles; columns of a buffer of q or k; blocks: buffers that make up a tile of them; slots for dSᵀ; keys
    of a work tile; rows of a query tile; stages: tiles of q and dO in flight; zero_lines: lines of dq that one copy
    zeroes; dk_columns: columns of dk that one copy stores; spill_bytes and registers as in ForwardConfig.
    """

    widths: Widths
    columns: int
    blocks: int
    slots: int
    spill_bytes: int
    keys: int = KEY_TILE
    rows: int = 64
    score_rows: int = 32  # rows of the scores that a warpgroup has at once
    dq_parts: int = 4  # of a query tile, (64, 64) each
    common_keys: bool = False  # True if both warpgroups have all keys of a work tile
    stages: int = 2
    zero_lines: int = 2
    dk_columns: int = 64
    registers: int = _REGISTERS
    launch_registers: int = _LAUNCH_REGISTERS


@functools.cache
def backward(widths: Widths) -> BackwardConfig:
    """Return the backward's schedule: two consumer warpgroups, of 64 keys each except in consume_256.py.

    At D = 128 dk and dv take 128 registers per thread, which leaves registers for scores of 64 rows. Two stages of q
    and dO, with dSᵀ and dq on their way out, fill the shared memory (213 and 223 KB).

    spill_bytes are those of kernels with one side (work.py); hardly any are in a loop over tiles. With two sides, a
    decay per token spills 104 bytes (D = 64), 168 (D = 128), 244 (consume_192.py) and 252 (consume_256.py).
    """
    if widths.qk == 64:
        return BackwardConfig(
            widths, columns=64, blocks=1, slots=2, spill_bytes=52, rows=128, score_rows=128, dq_parts=2, zero_lines=8
        )
    if widths.qk == 128:
        return BackwardConfig(
            widths, columns=128, blocks=1, slots=3, spill_bytes=56, score_rows=64, dq_parts=2, zero_lines=8
        )
    if widths.read <= 192 and widths.v <= 128:
        return BackwardConfig(widths, columns=64, blocks=3, slots=3, spill_bytes=160)
    return BackwardConfig(
        widths, columns=256, blocks=1, slots=2, spill_bytes=132, keys=KEY_TILE // 2, common_keys=True, dk_columns=256
    )
