"""Pipelines of shared-memory buffers between a producer warp and consumer warpgroups, and the scheduler's counter."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common import copy_engine
from decayattn.backends.hopper.common.copy_engine import aggregate


@gluon.constexpr_function
def _exponent(power):
    return power.bit_length() - 1


@gluon.jit
def stage(n, STAGES: gl.constexpr):
    """n % STAGES, a power of two, of an n that is not negative, which the compiler does not know: one instruction."""
    return n & (STAGES - 1)


@gluon.jit
def phase(n, STAGES: gl.constexpr):
    """n // STAGES % 2: what a barrier of the stage waits for."""
    return (n >> _exponent(STAGES)) & 1


@gluon.jit
def signal(barrier, pred=True):
    """Arrive at a barrier for a warpgroup, whose warps are not synchronised first. Expecting 0 bytes is an arrival.

    mbarrier.arrive has a barrier of the warpgroup on either side, because Triton takes it for an access to all shared
    memory, and warps that wait for each other let the matrix products wait.
    """
    mbarrier.expect(barrier, 0, pred)


@gluon.jit
def arrive(barrier, pred=True):
    """Arrive at a barrier for a warpgroup, when all its warps have reached this point."""
    copy_engine.thread_barrier()
    signal(barrier, pred)


@aggregate
class Pipeline:
    """Buffers that the producer fills in turn and every consumer releases after it has read them; n counts all fills.

    A buffer is full when the copies (or the commit) that its `full` barrier counts are complete, and empty again when
    all consumers have arrived at its `empty` barrier.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, STAGES):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def tile(self, n):
        return self.tiles.index(stage(n, self.STAGES))

    @gluon.jit
    def full_barrier(self, n):
        """The barrier on which the n-th fill's copies complete."""
        return self.full.index(stage(n, self.STAGES))

    @gluon.jit
    def producer_acquire(self, n):
        mbarrier.wait(self.empty.index(stage(n, self.STAGES)), phase(n, self.STAGES) ^ 1)

    @gluon.jit
    def producer_commit(self, n):
        """The producer's own stores of the n-th fill are done: for buffers that the copy engine does not fill."""
        mbarrier.arrive(self.full_barrier(n), count=1)

    @gluon.jit
    def consumer_wait(self, n, pred=True):
        mbarrier.wait(self.full.index(stage(n, self.STAGES)), phase(n, self.STAGES), pred=pred)

    @gluon.jit
    def consumer_release(self, n, pred=True):
        arrive(self.empty.index(stage(n, self.STAGES)), pred)

    @gluon.jit
    def consumer_skip(self, n):
        """Release a tile unread, once it has arrived: an earlier release would count for the tile before it."""
        self.consumer_wait(n)
        self.consumer_release(n)


@gluon.jit
def make_pipeline(tiles, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A pipeline that so many consumers release; with 0, its buffers are free when another pipeline's are.

    No barrier is made for which nothing waits: Triton would reuse its memory, while to the GPU it still is a barrier.
    Where processes share the GPU's time, an H200 has written the barrier's state over what was there.
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


@gluon.jit
def allocate_words(COUNT: gl.constexpr, DTYPE: gl.constexpr = gl.int32):
    """Shared memory for COUNT numbers."""
    return gl.allocate_shared_memory(DTYPE, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def store_word(words, n, value, WARPS: gl.constexpr = 1):
    words.index(n).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])) + value)


@gluon.jit
def load_word(words, n, WARPS: gl.constexpr = 4):
    return gl.max(words.index(n).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def fetch_next(counter, work_tiles):
    """The number of the program's next work tile; `work_tiles` after the last. Not read where every program has one."""
    index = work_tiles
    if gl.num_programs(0) < work_tiles:
        # relaxed: the number orders nothing else in memory
        index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    return index
