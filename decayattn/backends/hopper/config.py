"""How the Hopper kernels are fed: pure functions of (head dimension, dtype). Nothing is tuned at run time."""

import functools
from dataclasses import dataclass

# rows of one consumer warpgroup: the height of a WGMMA instruction
WARPGROUP_ROWS = 64
# keys per tile: a block of the decay prefix, so that the difference of two bases is one number per tile
KEY_TILE = 128
# the kernels': the copy engine fills up tiles of others with zeros on their way to shared memory
HEAD_DIMS = (64, 128)
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


@dataclass(frozen=True)
class ForwardConfig:
    """Consumer warpgroups of 64 rows, key and value tiles in flight, registers per thread, bytes it may spill.

    `registers` is what a consumer's thread gets, `launch_registers` what every thread of the launch gets before the
    producer gives its share away; both are what the register file of 65,536 has room for.
    """

    warpgroups: int
    stages: int
    registers: int
    launch_registers: int
    spill_bytes: int

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
        return ForwardConfig(warpgroups=3, stages=4, registers=160, launch_registers=128, spill_bytes=208)
    return ForwardConfig(warpgroups=2, stages=2, registers=240, launch_registers=168, spill_bytes=12)


@dataclass(frozen=True)
class BackwardConfig:
    """Rows of a query tile, query tiles in flight, slots for their dSᵀ, registers per thread and spills (as in
    ForwardConfig)."""

    rows: int
    stages: int
    slots: int
    registers: int
    launch_registers: int
    spill_bytes: int


@functools.cache
def backward(dim: int) -> BackwardConfig:
    """The backward's schedule for a kernel_dim; two consumer warpgroups of 64 keys each.

    dk and dv take 128 registers of a thread at D = 128, leaving room for scores of 64 rows; two stages of q and dO,
    with dSᵀ and dq on their way out, fill the shared memory (213 and 223 KB).

    spill_bytes are those of kernels with one side (work.py), none of them in a loop over tiles. With two sides, a decay
    per token spills 300 bytes (D = 64) and 368 (D = 128, where each loop loads one word).
    """
    if dim == 64:
        return BackwardConfig(rows=128, stages=2, slots=2, registers=240, launch_registers=168, spill_bytes=68)
    return BackwardConfig(rows=64, stages=2, slots=3, registers=240, launch_registers=168, spill_bytes=72)
