"""Backward for sm_90: dq, dk, dv and the sums for the decay's gradient, in one pass over the scores with five products.

Formulas::

    P = exp2(s log2(e) q·kᵀ + decay − LSE₂)     dP = dO·vᵀ      dS = P (dP − Δ)
    dv = Σ_i Pᵀ dO     dk = Σ_i dSᵀ q     dq = Σ_j dS k         (transposed: scoreT, pT, dpT, dsT)

A work tile is 128 keys, with the query tiles that see them, over the query heads of the group. Programs are persistent,
and their producer fetches work tiles from a counter. The two consumer warpgroups own 64 keys each and keep dk and dv in
registers.

Timeline and barriers::

    producer (1 warp)  record → k v → | q0 terms0 | dO0 | q1 terms1 | dO1 | …     TMA; dv of the last tile → TMA store
                          │ published.full, keys_ready       ↑ keys_read, dv_ready
                          ↓ queries_ready, d_outs_ready      │ empty
    consumer 0         S0 dP0 P0 dV0 dS0 | dq₋₁ part, dK0 | S1 dP1 P1 dV1 dS1 | dq0 part, dK1 | …      TMA adds dq parts
                          │ first_scores         ↕ d_scores_ready, d_scores_read
    consumer 1                  S0 dP0 P0 dV0 dS0 | dq₋₁ part, dK0 | …            (starts once 0 has its scores)

    barrier          stages   arrivals by                          waited for by
    published        1        producer: index of the work tile     consumers
    keys_ready       1        TMA: k and v of the work tile        consumers
    queries_ready    STAGES   TMA: q and row terms                 consumers, before S
    d_outs_ready     STAGES   TMA: dO                              consumers, before dP
    first_scores     STAGES   consumer 0, after S                  consumer 1: one multiplies while the other computes
    d_scores_ready   SLOTS    both consumers: dSᵀ is stored        both, for dq of that tile, one tile later
    d_scores_read    1        both: dSᵀ of the previous tile read  both, before they store to its slot (two SLOTS only)
    empty            STAGES   both consumers, after dK             producer, before the next q, terms and dO
    dv_ready         1        both: dv is where v was              producer, before it stores dv
    keys_read        1        both, after dq of the last tile      producer, before the next k; both, before dk leaves

dq needs all keys of a tile, so dSᵀ goes through shared memory. Each warpgroup multiplies one half of dq one tile later,
when neither has to wait for the other. TMA adds dq in float32 to a buffer, in the order in which registers hold a
product (fragments.py). The warpgroups run out of step, so that one multiplies while the other computes.

Shared memory is reused at once. At the end of a work tile, dv goes to the buffer of the values while dq of the last
tile is multiplied. The next keys are loaded once that product has read the current ones. dk leaves from a slot of dSᵀ.

LSE₂ and Δ are one value per row and cost no instruction per score. Each is three bfloat16 columns (bf16_splits.py) that
come with q, and one more matrix instruction of ones × columns adds them to Q Kᵀ and to V dOᵀ (row_terms.py). With a
scale per row, the scale and LSE₂ come as float32, for one multiplication and addition per score. dk is then made of dS
times the scale; dq and the sums are made of dS alone. The gradient of a scale is made of q and the sum Σ_j dS k.

Row and column sums of dS read the same rounded dSᵀ as the products, so both cancel wherever the gradient of a decay
cancels. Both are products with few columns: sums of keys are issued with dk (key_sums.py), sums of rows with dq.
PARTIAL tiles, which are masked, come first. They and full tiles have a loop each: in a common loop, full tiles would
jump over a third of the instructions or more (D = 64).

Not causal, the sign of a decay differs between the sides of the diagonal, and the loops run once per side (work.py). A
row has an LSE₂ for each side, with ∓α_i. The producer sends the side's LSE₂, and the difference of two bases with the
side's sign. So the loops do not depend on the side, except for adding row sums. α_j and the sums of keys change sign
between sides.

consume.py has the loop of all consumers. Beyond 128 columns their threads add dq themselves: those of consume_192.py,
up to 192 columns with a D_v of up to 128, have 64 keys each; those of consume_256.py have 64 keys together.

zero_dq.py zeroes the memory that dq is added to. row_terms.py prepares the row terms before this kernel and unpacks dq
after it.

Tiles, per warpgroup of consume_128.py: k, v, dk, dv (64, D) · q, d_out (ROWS, D) · terms (ROWS, 16) · scoreT, pT, dpT,
dsT (64, ROWS) · dq part (64, 64).
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from decayattn.backends.hopper import config
from decayattn.backends.hopper.backward.consume import consume
from decayattn.backends.hopper.backward.dq import is_loaded, product_keys
from decayattn.backends.hopper.backward.key_sums import BIT_COLUMNS, bit_weights
from decayattn.backends.hopper.backward.producer import produce
from decayattn.backends.hopper.backward.shared import BackwardShared, make_barriers
from decayattn.backends.hopper.backward.work import KeySchedule
from decayattn.backends.hopper.backward.zero_dq import allocate_zeros
from decayattn.backends.hopper.common.call import modes_of
from decayattn.backends.hopper.common.fragments import (
    COPIES,
    DELTA,
    DEPTH,
    FACTORS,
    FRAGMENT_COLUMNS,
    FRAGMENT_ROWS,
    WARPGROUP_KEYS,
    ones_of_columns,
)
from decayattn.backends.hopper.common.pipelines import allocate_tiles, allocate_words, make_pipeline
from decayattn.backends.hopper.common.tile_table import Axes
from decayattn.backends.runtime.dependent_launch import let_next_start, wait_for_launch_before
from decayattn.backends.tiles.scores import LN2


class BackwardDecay(NamedTuple):
    """Tensors of the decay; the modes decide which are read."""

    rates: Tensor | None  # (H,), of a constant decay; None without one
    beta: Tensor  # of a decay per token: α in its block
    base: Tensor  # and at the blocks' starts, float64
    last_reset: Tensor
    next_reset: Tensor
    mirror: Tensor  # for every block of keys, the last granule of rows that visits it (skipping.last_granules)
    # sums for its gradient; None if it needs none
    row_sums: Tensor | None  # (B, H, T_q): Σ_j dS of a row, added up in memory; of a decay per token
    key_sums: Tensor | None  # (B, H, T_k): Σ_i dS of a key; of a decay per token
    rate_sums: Tensor | None  # (B, H, blocks, 2): Σ dS (i − j) of a consumer's keys; of a constant decay


@gluon.constexpr_function
def _config_of(values):
    widths, *others = values
    return config.BackwardConfig(config.Widths(*widths), *others)


# separate arguments: Triton specialises integers in a tuple (for 1 and multiples of 16) despite do_not_specialize
_INTEGERS = [
    "left", "right", "query_length", "key_length", "blocks", "row_tiles", "key_tiles", "entries", "heads", "together",
]


@gluon.jit(do_not_specialize=_INTEGERS)
def gradients_kernel(
    q_desc, k_desc, v_desc, d_out_desc, terms_desc, dk_desc, dv_desc, dq_fragments, zeros_desc, units, decay, scheduler,
    scale, left, right, query_length, key_length, blocks, row_tiles, key_tiles, entries, heads, together,
    MODE_VALUES: gl.constexpr, TILE_VALUES: gl.constexpr,
):
    """Compute dk and dv of all key tiles over their groups of query heads; add up dq, row sums, and sums of a rate.

    Launched by programmatic dependent launch.

    dq_fragments: a descriptor of parts; the tensor itself if threads add to it
    units: under deterministic algorithms those of rows (row_terms_kernel), else None
    scale: s; or, with a scale per row, a descriptor of the rows' factors (row_terms.py)
    scheduler: key_table, the tiles of keys, read only if ragged; and counters, 0 (zero_dq.py)
    left, right: upper bounds on the keys that a row sees before and after its own; read with a window only, and right
        only if not causal
    query_length, key_length, blocks (of the decay prefix): lengths of the axes that hold the sequences
    key_tiles: those of an entry; together: heads of keys that are computed at the same time (KeySchedule)
    MODE_VALUES, TILE_VALUES: the values of a call.Modes and of a config.BackwardConfig
    """
    MODES: gl.constexpr = modes_of(MODE_VALUES)
    TILE: gl.constexpr = _config_of(TILE_VALUES)
    COMMON_KEYS: gl.constexpr = TILE.common_keys
    BLOCKED: gl.constexpr = TILE.blocks > 1
    ROWS: gl.constexpr = TILE.rows
    STAGES: gl.constexpr = TILE.stages
    key_table, counters = scheduler
    DTYPE: gl.constexpr = q_desc.dtype
    STEP: gl.constexpr = product_keys(is_loaded(TILE.widths.qk, MODES))
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COPIES, STEP], DTYPE)
    # columns that are stored or read one half at a time: no swizzle pattern may cross the halves
    STORED: gl.constexpr = TILE.score_rows
    MULTIPLIED: gl.constexpr = STORED if BLOCKED else ROWS
    D_SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_KEYS, STORED], DTYPE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COPIES, MULTIPLIED], DTYPE)
    KEY_PARTS: gl.constexpr = TILE.keys // WARPGROUP_KEYS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(DTYPE, [1, COPIES, STEP], ONES)
    ones.index(0).store(gl.full([COPIES, STEP], 1.0, DTYPE, LAYOUT))
    column = gl.expand_dims(gl.arange(0, COPIES, gl.SliceLayout(1, LAYOUT)), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    weights = gl.allocate_shared_memory(DTYPE, [1, COPIES, ROWS], WEIGHTS)
    bits = weights
    if MODES.decay == "constant":
        # 1 in the first column, the row's index in the second; 0 in the others makes the sums shares
        weights.index(0).store(gl.where(column == 0, 1, gl.where(column == 1, row, 0)).to(DTYPE))
        if MODES.decay_gradient:
            BITS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BIT_COLUMNS, MULTIPLIED], DTYPE)
            bits = gl.allocate_shared_memory(DTYPE, [1, BIT_COLUMNS, ROWS], BITS)
            column = gl.expand_dims(gl.arange(0, BIT_COLUMNS, gl.SliceLayout(1, LAYOUT)), 1)
            bits.index(0).store(bit_weights(column, row, ROWS).to(DTYPE))
    else:
        weights.index(0).store(gl.full([COPIES, ROWS], 1.0, DTYPE, LAYOUT))
    splits = ones
    if BLOCKED:
        SPLITS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_KEYS, DEPTH], gl.bfloat16)
        splits = gl.allocate_shared_memory(gl.bfloat16, [2, WARPGROUP_KEYS, DEPTH], SPLITS)
        splits.index(0).store(ones_of_columns(0, LAYOUT))
        splits.index(1).store(ones_of_columns(DELTA, LAYOUT))
    zeros = allocate_zeros(zeros_desc)
    fence_async_shared()
    p = ones
    if COMMON_KEYS:
        p = gl.allocate_shared_memory(DTYPE, [1, WARPGROUP_KEYS, ROWS], D_SCORES)
    factors, factors_desc = ones, terms_desc
    if MODES.row_scales:
        factors_desc = scale
        scale = LN2  # of dk: factors are in base 2
        factors = gl.allocate_shared_memory(gl.float32, [STAGES * FACTORS, 1, ROWS], factors_desc.layout)
    shared = BackwardShared(
        allocate_tiles(k_desc, KEY_PARTS * TILE.blocks),
        allocate_tiles(v_desc, KEY_PARTS),
        allocate_tiles(q_desc, STAGES * TILE.blocks),
        allocate_tiles(d_out_desc, STAGES),
        gl.allocate_shared_memory(terms_desc.dtype, [STAGES, ROWS, DEPTH], terms_desc.layout),
        factors,
        allocate_words(STAGES, gl.float32),
        allocate_words(STAGES),
        gl.allocate_shared_memory(DTYPE, [TILE.slots * KEY_PARTS, WARPGROUP_KEYS, ROWS], D_SCORES),
        p,
        gl.allocate_shared_memory(dq_fragments.dtype, [2, FRAGMENT_ROWS, FRAGMENT_COLUMNS], dq_fragments.layout)
        if not (BLOCKED or COMMON_KEYS) else ones,
        zeros, ones, weights, bits, splits,
        make_pipeline(allocate_words(1), 1, 2),
        make_barriers(MODES, TILE),
        TILE,
    )

    let_next_start(heads)
    wait_for_launch_before(heads)
    if MODES.ragged:
        # the host knows only an upper bound
        key_tiles = gl.load(key_table)
    kv_heads = entries * (heads // MODES.group)
    axes = Axes(query_length, key_length, blocks, MODES.ragged)
    schedule = KeySchedule(
        key_tiles * kv_heads, kv_heads, together, key_table, key_tiles, heads, axes, row_tiles, left, right,
        decay.mirror, MODES, TILE,
    )
    sources = (q_desc, k_desc, v_desc, d_out_desc, terms_desc, factors_desc)
    consuming = (schedule, shared, dq_fragments, units, dk_desc, decay, scale)
    gl.warp_specialize(
        [
            (consume, (consuming, 0)),
            (consume, (consuming, 1)),
            (produce, (schedule, shared, counters, sources, (dk_desc, dv_desc), zeros_desc, decay)),
        ],
        [4, 1],
        [TILE.registers, 24],
    )
    # keeps the barrier's memory to the end: Triton reuses it if nothing waits for it (pipelines.make_pipeline)
    mbarrier.invalidate(shared.barriers.d_scores_read)
