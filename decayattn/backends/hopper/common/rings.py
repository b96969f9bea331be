"""Between the producer warp and the consumer warpgroups: rings of buffers in shared memory, and the items' numbers."""

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
    """Arrive at a barrier, for a warpgroup whose warps need not have come here. Expecting 0 bytes is an arrival.

    mbarrier.arrive has a barrier of the warpgroup on either side, because Triton takes it for an access to all shared
    memory, and warps that wait for each other let the matrix products wait.
    """
    mbarrier.expect(barrier, 0, pred)


@gluon.jit
def arrive(barrier, pred=True):
    """Arrive at a barrier, for a warpgroup, when all its warps have come here."""
    copy_engine.thread_barrier()
    signal(barrier, pred)


@aggregate
class Ring:
    """Buffers that the producer fills in turn, and that every consumer releases after reading; n counts all fills."""

    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, ready, empty, STAGES):
        self.tiles = tiles
        self.ready = ready
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def tile(self, n):
        return self.tiles.index(stage(n, self.STAGES))

    @gluon.jit
    def arrival(self, n):
        """The barrier on which the n-th fill's copies complete."""
        return self.ready.index(stage(n, self.STAGES))

    @gluon.jit
    def wait_empty(self, n):
        mbarrier.wait(self.empty.index(stage(n, self.STAGES)), phase(n, self.STAGES) ^ 1)

    @gluon.jit
    def wait_ready(self, n, pred=True):
        mbarrier.wait(self.ready.index(stage(n, self.STAGES)), phase(n, self.STAGES), pred=pred)

    @gluon.jit
    def release(self, n, pred=True):
        arrive(self.empty.index(stage(n, self.STAGES)), pred)

    @gluon.jit
    def skip(self, n):
        """Release a tile unread. Not before it has come: an early arrival would count for the tile before it."""
        self.wait_ready(n)
        self.release(n)


@gluon.jit
def make_ring(tiles, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring that so many consumers release; 0 where another ring tells that its buffers are free.

    No barrier is made that nobody waits for: Triton would give its memory to something else, and to the GPU it still
    is a barrier. Where processes share the GPU's time, an H200 has written the barrier's state over what was there.
    """
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = ready
    if CONSUMERS > 0:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        if CONSUMERS > 0:
            mbarrier.init(empty.index(n), count=CONSUMERS)
    return Ring(tiles, ready, empty, STAGES)


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
def next_item(counter, items):
    """The number of the item after this one; `items`, after the last. Where every program has one, none is drawn."""
    following = items
    if gl.num_programs(0) < items:
        # relaxed: the number orders nothing else in memory
        following = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    return following
