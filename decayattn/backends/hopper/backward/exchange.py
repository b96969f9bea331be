"""What the producer and the consumers of the Hopper backward share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common.copy_engine import aggregate
from decayattn.backends.hopper.common.rings import Ring, load_word, store_word


@aggregate
class Buffers:
    """Shared memory: tiles, numbers, and the barriers that say which of them may be read or written."""

    keys: gl.shared_memory_descriptor  # (2, 1, …, 64, D)
    values: gl.shared_memory_descriptor  # the same; then the place of dv on its way out
    queries: gl.shared_memory_descriptor  # (STAGES, 1, …, ROWS, D), as are d_outs
    d_outs: gl.shared_memory_descriptor
    terms: gl.shared_memory_descriptor  # (STAGES, ROWS, 16)
    differences: gl.shared_memory_descriptor  # (STAGES, 1): α at the reference of the rows minus α at the key tile's
    starts: gl.shared_memory_descriptor  # (STAGES, 1): the tile's first row
    d_scores: gl.shared_memory_descriptor  # (SLOTS tiles · 2 warpgroups, 64, ROWS); then the place of dk
    dq_parts: gl.shared_memory_descriptor  # (2, 16, 256)
    zeros: gl.shared_memory_descriptor  # (8, 256)
    ones: gl.shared_memory_descriptor  # (1, 8, keys of a product)
    weights: gl.shared_memory_descriptor  # (1, 8 or 16, ROWS): what rows count for in the sums of keys
    queries_ready: gl.shared_memory_descriptor
    d_outs_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    first_scores: gl.shared_memory_descriptor  # the first warpgroup has its scores
    d_scores_ready: gl.shared_memory_descriptor
    d_scores_read: gl.shared_memory_descriptor  # dSᵀ of the tile before has been, by both; with two slots only
    keys_ready: gl.shared_memory_descriptor
    keys_read: gl.shared_memory_descriptor  # and dSᵀ of the last tile, by both
    dv_ready: gl.shared_memory_descriptor  # it stands where the values were
    drawn: Ring  # the number of the item
    STAGES: gl.constexpr
    SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, keys, values, queries, d_outs, terms, differences, starts, d_scores, dq_parts, zeros, ones, weights,
        queries_ready, d_outs_ready, empty, first_scores, d_scores_ready, d_scores_read, keys_ready, keys_read,
        dv_ready, drawn, STAGES, SLOTS,
    ):  # fmt: skip
        self.keys = keys
        self.values = values
        self.queries = queries
        self.d_outs = d_outs
        self.terms = terms
        self.differences = differences
        self.starts = starts
        self.d_scores = d_scores
        self.dq_parts = dq_parts
        self.zeros = zeros
        self.ones = ones
        self.weights = weights
        self.queries_ready = queries_ready
        self.d_outs_ready = d_outs_ready
        self.empty = empty
        self.first_scores = first_scores
        self.d_scores_ready = d_scores_ready
        self.d_scores_read = d_scores_read
        self.keys_ready = keys_ready
        self.keys_read = keys_read
        self.dv_ready = dv_ready
        self.drawn = drawn
        self.STAGES = gl.constexpr(STAGES)
        self.SLOTS = gl.constexpr(SLOTS)

    @gluon.jit
    def stage(self, n):
        return n % self.STAGES

    @gluon.jit
    def phase(self, n):
        return (n // self.STAGES) & 1

    @gluon.jit
    def slot(self, n):
        """Where dSᵀ of the n-th tile is; n may be −1."""
        return (n + self.SLOTS) % self.SLOTS

    @gluon.jit
    def wait_d_scores(self, n, pred=True):
        """Until both warpgroups' dSᵀ of the n-th tile is there."""
        mbarrier.wait(self.d_scores_ready.index(self.slot(n)), (n // self.SLOTS) & 1, pred=pred)

    @gluon.jit
    def hand_over(self, count, item):
        """The producer's count-th item."""
        self.drawn.wait_empty(count)
        store_word(self.drawn.tiles, 0, item)
        mbarrier.arrive(self.drawn.arrival(count), count=1)

    @gluon.jit
    def draw(self, count):
        """The number of the count-th item, for the consumers."""
        self.drawn.wait_ready(count)
        item = load_word(self.drawn.tiles, 0)
        self.drawn.release(count)
        return item
