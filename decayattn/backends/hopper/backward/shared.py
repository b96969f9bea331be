"""Shared memory of the backward: tiles, values, and the barriers between producer and consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common.gluon_compat import aggregate
from decayattn.backends.hopper.common.pipelines import Pipeline, load_word, store_word


@aggregate
class BackwardBarriers:
    """Barriers of the backward; kernel.py lists arrivals and waits of each."""

    queries_ready: gl.shared_memory_descriptor
    d_outs_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    first_scores: gl.shared_memory_descriptor  # warpgroup 0 has its scores of the tile: warpgroup 1 begins
    d_scores_ready: gl.shared_memory_descriptor
    d_scores_read: gl.shared_memory_descriptor  # both have read dSᵀ of the previous tile; with two slots only
    keys_ready: gl.shared_memory_descriptor
    keys_read: gl.shared_memory_descriptor  # both have read the keys, and dSᵀ of the last tile; not in consume_256.py
    dv_ready: gl.shared_memory_descriptor  # both have stored dv where v was; in consume_256.py also dk where k was
    # of consume_256.py only
    p_read: gl.shared_memory_descriptor  # both have read P of the previous tile, and dS of the one before that
    scaled_ready: gl.shared_memory_descriptor  # both have stored dS times scales of rows


@gluon.jit
def make_barriers(MODES: gl.constexpr, TILE: gl.constexpr):
    """Allocate each barrier, and initialise it for the number of arrivals in a phase of it.

    A field without waiters is another field's barrier (pipelines.make_pipeline has the reason).
    """
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    COMMON_KEYS: gl.constexpr = TILE.common_keys
    STAGES: gl.constexpr = TILE.stages
    SLOTS: gl.constexpr = TILE.slots
    queries_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    d_outs_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    first_scores = empty if COMMON_KEYS else gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    d_scores_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], LAYOUT)
    read = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    keys_read = read if COMMON_KEYS else gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    dv_ready = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    scaled_ready = gl.allocate_shared_memory(gl.int64, [1], LAYOUT) if COMMON_KEYS and MODES.row_scales else read
    for stage in gl.static_range(STAGES):
        mbarrier.init(queries_ready.index(stage), count=1)
        mbarrier.init(d_outs_ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
        if not COMMON_KEYS:
            mbarrier.init(first_scores.index(stage), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(d_scores_ready.index(slot), count=2)
    mbarrier.init(read, count=2)
    mbarrier.init(keys_ready, count=1)
    if not COMMON_KEYS:
        mbarrier.init(keys_read, count=2)
    if COMMON_KEYS and MODES.row_scales:
        mbarrier.init(scaled_ready, count=2)
    mbarrier.init(dv_ready, count=2)
    return BackwardBarriers(
        queries_ready, d_outs_ready, empty, first_scores, d_scores_ready, read, keys_ready, keys_read, dv_ready, read,
        scaled_ready,
    )


@aggregate
class BackwardShared:
    """All shared memory of the backward, with the barriers that guard each part (kernel.py)."""

    keys: gl.shared_memory_descriptor  # (2 · blocks, 1, …, 64, D / blocks)
    values: gl.shared_memory_descriptor  # (2, 1, …, 64, D_v); at the end dv, which is stored from here
    queries: gl.shared_memory_descriptor  # (STAGES · blocks, 1, …, ROWS, D / blocks)
    d_outs: gl.shared_memory_descriptor  # (STAGES, 1, …, ROWS, D_v)
    terms: gl.shared_memory_descriptor  # (STAGES, ROWS, 16)
    factors: gl.shared_memory_descriptor  # (STAGES · FACTORS, 1, ROWS), with a scale per row
    differences: gl.shared_memory_descriptor  # (STAGES, 1): α at the anchor of the rows minus α at the key tile's
    starts: gl.shared_memory_descriptor  # (STAGES, 1): the tile's first row
    d_scores: gl.shared_memory_descriptor  # (SLOTS tiles · 2 warpgroups, 64, ROWS); then dk
    p: gl.shared_memory_descriptor  # (1, 64, ROWS), of consume_256.py only: Pᵀ
    dq_parts: gl.shared_memory_descriptor  # (2, 16, 256), of consume_128.py only
    # written once, before all work tiles
    zeros: gl.shared_memory_descriptor  # (8, 256): initial values of dq
    ones: gl.shared_memory_descriptor  # (1, 8, keys of a product)
    weights: gl.shared_memory_descriptor  # (1, 8, ROWS): weights of rows in the sums of keys
    bits: gl.shared_memory_descriptor  # (1, 16, ROWS): the same in partial tiles of a constant decay (key_sums.py)
    # consume_192.py only, (2, 64, 16): ones_of_splits for the rows' LSE₂, and for their Δ
    splits: gl.shared_memory_descriptor
    published: Pipeline  # index of the work tile: one word
    barriers: BackwardBarriers
    TILE: gl.constexpr

    @gluon.jit
    def stage(self, n):
        return n % self.TILE.stages

    @gluon.jit
    def phase(self, n):
        return (n // self.TILE.stages) & 1

    @gluon.jit
    def slot(self, n):
        """Slot of dSᵀ of the n-th tile; n may be −1."""
        return (n + self.TILE.slots) % self.TILE.slots

    @gluon.jit
    def wait_d_scores(self, n, pred=True):
        """Wait until both warpgroups have stored dSᵀ of the n-th tile."""
        mbarrier.wait(self.barriers.d_scores_ready.index(self.slot(n)), (n // self.TILE.slots) & 1, pred=pred)

    @gluon.jit
    def publish(self, count, index):
        """Publish the index of the count-th work tile, for the producer."""
        self.published.producer_acquire(count)
        store_word(self.published.tiles, 0, index)
        self.published.producer_commit(count)

    @gluon.jit
    def published_index(self, count):
        """Index of the count-th work tile, once it is published, for the consumers."""
        self.published.consumer_wait(count)
        index = load_word(self.published.tiles, 0)
        self.published.consumer_release(count)
        return index
