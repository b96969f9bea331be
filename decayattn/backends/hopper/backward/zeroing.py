"""How dq of the Hopper backward, which is added to, becomes 0: by the copy engine, while other heads are worked at.

Heads are worked at in chunks of Sizes.together. With every item of a chunk its producer makes a share of the next
chunk's dq 0; the first chunk's is 0 before (row_terms.py). A launch that zeroed all of it would write twice as much as
dq has while nothing is multiplied. In memory, counters[0] is the number of items that were drawn, and counters[chunk],
for all chunks but the first, of how many shares the zeros are there.

Programs wait for each other, but only for items that were drawn before their own: if something else on the GPU keeps
some programs from starting, the others get on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decayattn.backends.hopper.common import copy_engine

# what is zeroed at once, of dq seen as rows of so many columns
LINES: gl.constexpr = gl.constexpr(8)
COLUMNS: gl.constexpr = gl.constexpr(256)


@gluon.jit
def allocate_zeros(zeros_desc):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    zeros = gl.allocate_shared_memory(gl.float32, [LINES, COLUMNS], zeros_desc.layout)
    zeros.store(gl.zeros([LINES, COLUMNS], gl.float32, LAYOUT))
    return zeros


@gluon.jit
def start_zeroing(sizes, zeros, zeros_desc, item, D: gl.constexpr):
    """Begin to zero an item's share of the next chunk's dq; whether there is a next chunk."""
    OF_A_TILE: gl.constexpr = sizes.ROWS * D // (LINES * COLUMNS)
    items = sizes.chunk_items()
    owed = sizes.chunk(item) + 1 < sizes.chunks()
    if owed:
        first_tile, tiles = sizes.tiles_of_chunk(sizes.chunk(item) + 1)
        share = gl.cdiv(tiles * OF_A_TILE, items)
        begin = item % items * share
        for n in range(begin, gl.minimum(begin + share, tiles * OF_A_TILE)):
            copy_engine.store(zeros_desc, [(first_tile * OF_A_TILE + n) * LINES, 0], zeros)
    return owed


@gluon.jit
def tell_zeroed(sizes, counters, item):
    """When the zeros that start_zeroing sent are in memory, count the item."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0;", "=r,r", [item], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    # one thread has sent them, and perhaps another one counts
    copy_engine.thread_barrier()
    gl.atomic_add(counters + sizes.chunk(item) + 1, 1, sem="release")


@gluon.jit
def wait_zeroed(sizes, counters, item):
    """Until dq of an item's chunk, which is not the first, is 0."""
    counter = counters + sizes.chunk(item)
    told = gl.atomic_add(counter, 0, sem="acquire")
    while told < sizes.chunk_items():
        told = gl.atomic_add(counter, 0, sem="acquire")
    # what the copy engine adds comes after the zeros
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, 0;", "=r,r", [told], dtype=gl.int32, is_pure=False, pack=1
    )
