"""Pipelines of shared-memory buffers between a producer warp and consumer warpgroups, and the scheduler's counter."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common import gluon_compat
from decayattn.backends.hopper.common.gluon_compat import aggregate


@gluon.constexpr_function
def _exponent(power):
    return power.bit_length() - 1


@gluon.jit
def stage(n, STAGES: gl.constexpr):
    """Return n % STAGES, a power of two, in one instruction: the compiler does not know that n is not negative."""
    return n & (STAGES - 1)


@gluon.jit
def phase(n, STAGES: gl.constexpr):
    """Return n // STAGES % 2: the phase of a stage's barrier to wait for."""
    return (n >> _exponent(STAGES)) & 1


@gluon.jit
def opaque_next(n):
    """Return n + 1, in a way that the compiler cannot see.

    Otherwise it may count n and a loop's index, which depends on loaded values, in one register. ptxas then forms the
    addresses that follow from n in every thread, not once per warp: up to 70 instructions more for a tile (Triton 3.9).
    """
    return gl.inline_asm_elementwise("add.s32 $0, $1, 1;", "=r,r", [n], gl.int32, is_pure=True, pack=1)


@gluon.jit
def signal(barrier, pred=True):
    """Arrive at a barrier for a warpgroup; before Triton 3.8, without synchronising its warps first.

    Expecting 0 bytes is an arrival.
    """
    mbarrier.expect(barrier, 0, pred)


@gluon.jit
def arrive(barrier, pred=True):
    """Arrive at a barrier for a warpgroup, once all its warps have reached this point.

    The warps synchronise once. mbarrier.arrive would also make them do so afterwards before Triton 3.8, which treats it
    as an access to all shared memory. Warps that wait for each other delay the matrix products.
    """
    if gluon_compat.EXPECT_SYNCHRONISES:
        mbarrier.arrive(barrier, count=1, pred=pred)
    else:
        gluon_compat.thread_barrier()
        signal(barrier, pred)


@aggregate
class Pipeline:
    """Buffers that the producer fills in turn and every consumer releases after reading them; n counts all fills.

    A buffer is full once the copies (or the commit) that its `full` barrier counts are complete. It is empty again once
    all consumers have arrived at its `empty` barrier.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def tile(self, n):
        return self.tiles.index(stage(n, self.STAGES))

    @gluon.jit
    def full_barrier(self, n):
        """Return the barrier on which the n-th fill's copies complete."""
        return self.full.index(stage(n, self.STAGES))

    @gluon.jit
    def producer_acquire(self, n):
        mbarrier.wait(self.empty.index(stage(n, self.STAGES)), phase(n, self.STAGES) ^ 1)

    @gluon.jit
    def producer_commit(self, n):
        """Mark the producer's own stores of the n-th fill as complete: for buffers that TMA does not fill."""
        mbarrier.arrive(self.full_barrier(n), count=1)

    @gluon.jit
    def consumer_wait(self, n, pred=True):
        mbarrier.wait(self.full.index(stage(n, self.STAGES)), phase(n, self.STAGES), pred=pred)

    @gluon.jit
    def consumer_release(self, n, pred=True):
        arrive(self.empty.index(stage(n, self.STAGES)), pred)


@gluon.jit
def make_pipeline(tiles, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Make a pipeline with CONSUMERS releases per buffer; with 0, another pipeline's releases free its buffers.

    It makes no barrier without waiters: Triton would reuse its memory, which the GPU still treats as a barrier. When
    processes shared the GPU's time, an H200 wrote the barrier's state over the new contents.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = full
    if CONSUMERS > 0:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        if CONSUMERS > 0:
            mbarrier.init(empty.index(n), count=CONSUMERS)
    return Pipeline(tiles, full, empty, STAGES)


@gluon.constexpr_function
def stacked(count, shape):
    return [count, *shape]


@gluon.jit
def allocate_tiles(desc, COUNT: gl.constexpr):
    """Allocate shared memory for COUNT tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, stacked(COUNT, desc.block_shape), desc.layout)


@gluon.constexpr_function
def _matrix(shape):
    return list(shape[-2:])


@gluon.jit
def flat(tile):
    """View a (1, …, rows, D) tile of shared memory as (rows, D)."""
    return tile.reshape(_matrix(tile.shape))


@gluon.jit
def allocate_words(COUNT: gl.constexpr, DTYPE: gl.constexpr = gl.int32):
    """Allocate shared memory for COUNT values."""
    return gl.allocate_shared_memory(DTYPE, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def store_word(words, n, value, WARPS: gl.constexpr = 1):
    words.index(n).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])) + value)


@gluon.jit
def load_word(words, n, WARPS: gl.constexpr = 4):
    return gl.max(words.index(n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def fetch_next(counter, work_tiles):
    """Index of the program's next work tile; `work_tiles` after the last. Unused if every program has one work tile."""
    index = work_tiles
    if gl.num_programs(0) < work_tiles:
        # relaxed: the index orders no other memory access
        index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    return index
