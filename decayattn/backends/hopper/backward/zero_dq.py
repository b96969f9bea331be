"""Zeroing of dq before the backward adds it up: by TMA, while other heads are computed.

Heads are computed in chunks of KeySchedule.together. With every work tile of a chunk, the producer zeroes a share of
the next chunk's dq; row_terms.py zeroes the first chunk's before. A launch that zeroed all of it would write twice the
bytes of dq while nothing is computed. counters[0] is the number of work tiles that were fetched. counters[chunk], for
all chunks but the first, is the number of shares with zeros in memory. Timeline::

    program 0    tile 0 of chunk 0, zeros share 0 of chunk 1 | counters[1] += 1 | … | tile 0 of chunk 1
    program 1    tile 1 of chunk 0, zeros share 1 of chunk 1 | counters[1] += 1 | … | tile 1 of chunk 1
                                                    waits for counters[1] = work tiles of a chunk ↑

Programs wait for each other, but only for work tiles that were fetched before their own: if something else on the GPU
keeps some programs from starting, the others still finish.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common import gluon_compat

# columns of dq, seen as lines of consecutive values
LINE_VALUES: gl.constexpr = gl.constexpr(256)


@gluon.jit
def allocate_zeros(zeros_desc):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    LINES: gl.constexpr = zeros_desc.block_shape[0]
    zeros = gl.allocate_shared_memory(gl.float32, [LINES, LINE_VALUES], zeros_desc.layout)
    zeros.store(gl.zeros([LINES, LINE_VALUES], gl.float32, LAYOUT))
    return zeros


@gluon.jit
def start_zeroing(schedule, zeros, zeros_desc, index):
    """Start to zero a work tile's share of the next chunk's dq; return True if there is a next chunk."""
    # lines that one copy zeroes
    LINES: gl.constexpr = zeros_desc.block_shape[0]
    OF_A_TILE: gl.constexpr = schedule.TILE.rows * schedule.TILE.widths.qk // (LINES * LINE_VALUES)
    work_tiles = schedule.chunk_work_tiles()
    has_next = schedule.chunk(index) + 1 < gl.cdiv(schedule.kv_heads, schedule.together)
    if has_next:
        first_tile, tiles = schedule.tiles_of_chunk(schedule.chunk(index) + 1)
        share = gl.cdiv(tiles * OF_A_TILE, work_tiles)
        begin = index % work_tiles * share
        for n in range(begin, gl.minimum(begin + share, tiles * OF_A_TILE)):
            gluon_compat.store(zeros_desc, [(first_tile * OF_A_TILE + n) * LINES, 0], zeros)
    return has_next


@gluon.jit
def publish_zeroed(schedule, counters, index):
    """Wait until the zeros of start_zeroing are in memory, and count the work tile's share."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0;", "=r,r", [index], dtype=gl.int32, is_pure=False,
        pack=1,
    )
    # one thread has stored the zeros, and another one may count them
    gluon_compat.thread_barrier()
    gl.atomic_add(counters + schedule.chunk(index) + 1, 1, sem="release")


@gluon.jit
def wait_zeroed(schedule, counters, index):
    """Wait until dq of a work tile's chunk, which is not the first, is zeroed."""
    counter = counters + schedule.chunk(index)
    zeroed = gl.atomic_add(counter, 0, sem="acquire")
    while zeroed < schedule.chunk_work_tiles():
        zeroed = gl.atomic_add(counter, 0, sem="acquire")
    # TMA adds to dq only after this fence. Threads that add themselves have waited for keys, which are loaded later
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, 0;", "=r,r", [zeroed], dtype=gl.int32, is_pure=False, pack=1
    )
