"""How the Hopper kernels are fed: pure functions of (head dimension, dtype). Nothing is tuned at run time."""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from decayattn.backends.runtime.integers import cdiv

# rows of one consumer warpgroup: the height of a WGMMA instruction
WARPGROUP_ROWS = 64
# keys per tile: a block of the decay prefix, so that the difference of two bases is one number per tile. Where that are
# too many for the registers, half of one
KEY_TILE = 128
# the kernels': the copy engine fills up tiles of others with zeros on their way to shared memory
HEAD_DIMS = (64, 128, 256)
# what programs read again and again at the same time, keys and values or rows: a share of the 50 MB of L2. With half as
# much the backward was 1 to 3 % slower, and the forward the same
CACHE_BYTES = 32 << 20
# of the heads that the backward works at together: each zeros a share of the next ones' dq, for which those wait. With
# a few, where there are few keys, they would come one after the other (not measured)
MIN_CHUNK_TILES = 32


@functools.cache
def kernel_dim(head_dim: int, value_dim: int) -> int:
    """The head dimension of the kernels that take D and D_v."""
    return next(dim for dim in HEAD_DIMS if dim >= max(head_dim, value_dim))


def is_wide(dim: int) -> bool:
    """Of a kernel's head dimension: dk and dv of a backward's warpgroup do not fit beside the scores of consumer.py."""
    return dim > 128


class Widths(NamedTuple):
    """Columns of tiles."""

    qk: int
    read: int  # of q and k: those behind hold no numbers, and no product takes them
    v: int


@functools.cache
def widths(head_dim: int, value_dim: int) -> Widths:
    """Of the tiles for D and D_v."""
    dim = kernel_dim(head_dim, value_dim)
    if not is_wide(dim):
        return Widths(dim, dim, dim)
    return Widths(dim, cdiv(head_dim, 64) * 64, max(128, kernel_dim(value_dim, 1)))


# decayattn/backends/hopper/backward/*.py
Consumers = Literal["consumer", "three_blocks", "wide"]

# what two consumer warpgroups leave of the register file
_REGISTERS, _LAUNCH_REGISTERS = 240, 168


@dataclass(frozen=True)
class ForwardConfig:
    """Keys per tile, consumer warpgroups of 64 rows, key and value tiles in flight, work tiles whose queries have a
    place in shared memory, bytes it may spill, registers per thread.

    `registers` is what a consumer's thread gets, `launch_registers` what every thread of the launch gets before the
    producer gives its share away; both are what the register file of 65,536 has room for.
    """

    keys: int
    warpgroups: int
    stages: int
    slots: int
    spill_bytes: int
    registers: int = _REGISTERS
    launch_registers: int = _LAUNCH_REGISTERS

    @property
    def rows(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def producer_registers(self) -> int:
        """What the consumers leave of the launch's: the producer has a warpgroup's share."""
        return (self.warpgroups + 1) * self.launch_registers - self.warpgroups * self.registers


@functools.cache
def forward(dim: int) -> ForwardConfig:
    """The forward's schedule for a kernel_dim."""
    if dim == 64:
        # latency-bound with two warpgroups: the third is worth 12 %; four stages, which let them drift, 4 to 6 %
        # spilled: what a work tile needs at its end, and what its edge tiles need; where the decay is constant, also
        # two registers of the loop over whole tiles
        return ForwardConfig(KEY_TILE, 3, stages=4, slots=2, spill_bytes=208, registers=160, launch_registers=128)
    if dim == 128:
        return ForwardConfig(KEY_TILE, 2, stages=2, slots=2, spill_bytes=12)
    # acc takes half of the registers, so that there are half as many scores; two stages and one slot fill the memory
    return ForwardConfig(KEY_TILE // 2, 2, stages=2, slots=1, spill_bytes=12)


@dataclass(frozen=True)
class BackwardConfig:
    """The consumers, by their file; keys of a work tile, columns of a tile of q or k, rows of a query tile, tiles of q
    and dO in flight, slots for dSᵀ, lines of dq that are zeroed at once, columns of dk that are stored at once, spills
    and registers per thread (as in ForwardConfig)."""

    consumers: Consumers
    keys: int
    columns: int
    rows: int
    stages: int
    slots: int
    zero_lines: int
    dk_columns: int
    spill_bytes: int
    registers: int = _REGISTERS
    launch_registers: int = _LAUNCH_REGISTERS


@functools.cache
def backward(widths: Widths) -> BackwardConfig:
    """The backward's schedule; two consumer warpgroups, of 64 keys each but in wide.py.

    dk and dv take 128 registers of a thread at D = 128, leaving room for scores of 64 rows; two stages of q and dO,
    with dSᵀ and dq on their way out, fill the shared memory (213 and 223 KB).

    spill_bytes are those of kernels with one side (work.py), hardly any in a loop over tiles. With two sides, a decay
    per token spills 300 bytes (D = 64), 368 (D = 128, where each loop loads one word), 248 (three blocks) and 292
    (wide).
    """
    if widths.qk == 64:
        return BackwardConfig("consumer", KEY_TILE, 64, 128, 2, slots=2, zero_lines=8, dk_columns=64, spill_bytes=68)
    if widths.qk == 128:
        return BackwardConfig("consumer", KEY_TILE, 128, 64, 2, slots=3, zero_lines=8, dk_columns=64, spill_bytes=72)
    if widths.read <= 192 and widths.v <= 128:
        return BackwardConfig(
            "three_blocks", KEY_TILE, 64, 64, 2, slots=3, zero_lines=2, dk_columns=64, spill_bytes=160
        )
    return BackwardConfig("wide", KEY_TILE // 2, 256, 64, 2, slots=2, zero_lines=2, dk_columns=256, spill_bytes=132)
