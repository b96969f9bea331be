"""Forward for sm_90: out = softmax(s q·kᵀ + decay) v, warp-specialised and persistent.

A work tile is 64 query rows per consumer warpgroup, of one head. Programs are persistent, and their producer fetches
work tiles from a counter. Loads of the next work tile overlap the stores of this one. At D = 64 there are three
consumer warpgroups and four stages, at D = 128 two and two (config.py). Above, a tile has half as many keys, so that
its scores fit in registers with a larger acc. There is then one slot for q, and the next q is loaded once out has left
it.

Timeline and barriers::

    producer (1 warp)    q0 → record 0 → k0 | k1 v0 | k2 v1 | … | q1 → record 1 → …            TMA
                          │ queries.full        ↑ keys.empty, values.empty (all warpgroups)
                          │ published.full      │
                          ↓ keys.full, values.full
    consumer 0            S0, P0 | S1 ∥ O += P0 V0, P1 | S2 ∥ O += P1 V1, P2 | … | O → q's slot → TMA store
    consumer 1 (and 2)    the same with the next 64 rows; they wait for each other only through `empty`

    pipeline     stages   full: arrivals by                        empty: arrivals by
    queries      SLOTS    TMA: q of all warpgroups                 consumers, when out of the last work tile has left
    published    SLOTS    the producer, its record is written      (with queries)
    keys         STAGES   TMA: k, and β if the decay is per token  consumers, after S
    values       STAGES   TMA: v                                   consumers, after P V

A full tile of keys is visible to all rows of a warpgroup. A PARTIAL tile is masked key by key.

The softmax is online. It starts at the tile of the rows' own keys and goes down to the first key; not causal, it then
goes up from there to the last key (work.Walk). The exponentials of a tile overlap the product P V of the previous tile
(FlashAttention 3's order, Shah et al., arXiv 2407.08608).

A row's maximum is that of its partial tiles, one of which has its own key. bfloat16 has the exponents of float32, so
full tiles look for no other maximum. Their exponentials begin once the scores are there, with a fifth fewer
instructions. A row that sees few keys of its first tile starts with the maximum of another row, if that is much larger
(softmax.AHEAD): the row's own scores may become as large. At the end of a work tile its sums show if the maximum
sufficed. It did not if a far key outweighs it by 2^120 (2^96 if a partial tile follows), or if P V overflowed. Then the
producer sends the work tile again (CAREFUL): every tile is treated as partial, with P so small that nothing overflows.

Every warpgroup runs its own copy of the code, and short work tiles wait for instruction fetches. So full tiles have a
loop of their own, half as long as that of partial tiles and without a branch. Values that few rows need stay outside of
it: a row's α, for a requested log-sum-exp, and its first key, if it is in the tile.

The decay costs no instruction per score. β, which is −α_j of a key relative to its block, divided by the scale, is
stored as three bfloat16 rows next to the keys (high, middle and low bits). One more matrix instruction adds ones × β to
Q Kᵀ. The terms that a row and a tile share, α_i and the difference of two block bases, are added to the row maximum and
the log-sum-exp. Right of the diagonal all this has the reversed sign, and the α_i that the row maximum leaves out
counts twice.

With a scale per row, products are multiplied before β, undivided, is added. This costs a multiplication per score, and
P V of the previous tile starts only after the tile's scores.

Tiles, per warpgroup: q (64, D) · k (KEYS, D) · v (KEYS, D_v) · beta (16, KEYS) · score, p (64, KEYS) ·
acc, out (64, D_v) · row_sum (64, 4). row_sum has the partial sums of the four threads that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from decayattn.backends.hopper import config
from decayattn.backends.hopper.common.call import modes_of
from decayattn.backends.hopper.common.fragments import DEPTH, WARPGROUP_ROWS
from decayattn.backends.hopper.common.pipelines import allocate_tiles, allocate_words, make_pipeline
from decayattn.backends.hopper.common.tile_table import Axes
from decayattn.backends.hopper.forward.consumer import consume
from decayattn.backends.hopper.forward.decay import Decay
from decayattn.backends.hopper.forward.producer import produce
from decayattn.backends.hopper.forward.shared import (
    BOUNDS,
    WARPGROUPS_PADDED,
    WARPS,
    WORDS,
    ForwardShared,
    allocate_beta,
)
from decayattn.backends.hopper.forward.work import QuerySchedule
from decayattn.backends.runtime.dependent_launch import wait_for_launch_before


@gluon.constexpr_function
def _config_of(values):
    widths, *others = values
    return config.ForwardConfig(config.Widths(*widths), *others)


# separate arguments: Triton specialises integers in a tuple (for 1 and multiples of 16) despite do_not_specialize
_INTEGERS = [
    "left", "right", "work_tiles", "row_tiles", "heads", "group", "together", "query_length", "key_length", "blocks",
    "granules",
]


@gluon.jit(do_not_specialize=_INTEGERS)
def forward_kernel(
    q_desc, k_desc, v_desc, beta_desc, out_desc, row_outputs, decay_tensors, sink, counter, table, scales, left, right,
    work_tiles, row_tiles, heads, group, together, query_length, key_length, blocks, granules,
    MODE_VALUES: gl.constexpr, TILE_VALUES: gl.constexpr,
):
    """out = softmax(s q·kᵀ + decay) v and its log-sum-exp. Launched by programmatic dependent launch.

    beta_desc: −α_j / scale of the keys (undivided with a scale per row), or None without a decay
    decay_tensors: the pointers of a Decay. All are present, as an aggregate requires; the modes decide which are read
    row_outputs: lse, or None if not requested, and row_lse2, which the backward reads
    sink: (H,), or None
    counter: the scheduler's, 0; not read if every program has one work tile
    table: tiles of rows; read only if ragged
    scales: s·log2(e), positive, and None; or 1, and the s of every row, Strided (B, T_q, H)
    left, right: upper bounds on the keys that a row sees before and after its own; read with a window only, and right
        only if not causal
    group: query heads per head of keys; together: heads that are computed at the same time (QuerySchedule)
    query_length, key_length, blocks (of the decay prefix), granules: lengths of the axes that hold the sequences
    MODE_VALUES, TILE_VALUES: the values of a call.Modes and of a config.ForwardConfig
    """
    MODES: gl.constexpr = modes_of(MODE_VALUES)
    TILE: gl.constexpr = _config_of(TILE_VALUES)
    KIND: gl.constexpr = MODES.decay
    CAUSAL: gl.constexpr = MODES.causal
    SLOTS: gl.constexpr = TILE.slots
    WARPGROUPS: gl.constexpr = TILE.warpgroups
    STAGES: gl.constexpr = TILE.stages
    rates, token_beta, bases, last_reset, next_reset, plan = decay_tensors
    decay = Decay(rates, token_beta, bases, last_reset, next_reset, plan, left, right, MODES)

    q_tiles = allocate_tiles(q_desc, SLOTS * WARPGROUPS)
    k_tiles = allocate_tiles(k_desc, STAGES)
    v_tiles = allocate_tiles(v_desc, STAGES)
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    published = allocate_words(SLOTS * WORDS)
    overflows = gl.allocate_shared_memory(gl.int32, [SLOTS * WARPGROUPS_PADDED, WARPS], WORD)
    for n in gl.static_range(SLOTS * WARPGROUPS_PADDED):
        overflows.index(n).store(gl.full([WARPS], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    FENCE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    fences = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, WARPGROUP_ROWS, 4], FENCE)
    row_alphas = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, WARPGROUP_ROWS], WORD)
    differences = gl.allocate_shared_memory(gl.float32, [STAGES, WARPGROUPS_PADDED], WORD)
    left_tiles = gl.allocate_shared_memory(gl.int32, [SLOTS * BOUNDS, WARPGROUPS_PADDED], WORD)
    right_tiles, beta, signs = left_tiles, q_tiles, q_tiles
    if not CAUSAL:
        right_tiles = gl.allocate_shared_memory(gl.int32, [SLOTS * BOUNDS, WARPGROUPS_PADDED], WORD)
    if KIND != "none":
        beta = allocate_beta(beta_desc, STAGES if KIND == "scalar" else SLOTS, TILE.keys)
        if not CAUSAL:
            SIGNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, DEPTH], gl.bfloat16)
            signs = gl.allocate_shared_memory(gl.bfloat16, [2, WARPGROUP_ROWS, DEPTH], SIGNS)
            ONES: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
            signs.index(0).store(gl.full([WARPGROUP_ROWS, DEPTH], 1.0, gl.bfloat16, ONES))
            signs.index(1).store(gl.full([WARPGROUP_ROWS, DEPTH], -1.0, gl.bfloat16, ONES))
        fence_async_shared()
    shared = ForwardShared(
        make_pipeline(q_tiles, SLOTS, WARPGROUPS), make_pipeline(k_tiles, STAGES, WARPGROUPS),
        make_pipeline(v_tiles, STAGES, WARPGROUPS), make_pipeline(published, SLOTS, 0), beta, differences,
        left_tiles, right_tiles, signs, overflows, fences, row_alphas, TILE,
    )
    wait_for_launch_before(work_tiles)
    if MODES.ragged:
        # the host knows only an upper bound
        row_tiles = gl.load(table)
        work_tiles = row_tiles * heads
    axes = Axes(query_length, key_length, blocks, MODES.ragged)
    schedule = QuerySchedule(work_tiles, row_tiles, heads, group, together, axes, granules, table, MODES, TILE)

    consuming = (shared, schedule, decay, (out_desc, row_outputs), sink, scales)
    producing = (shared, schedule, decay, counter, (q_desc, k_desc, v_desc, beta_desc))
    # the rest of the launch's: the producer has a warpgroup's share
    PRODUCER: gl.constexpr = (WARPGROUPS + 1) * TILE.launch_registers - WARPGROUPS * TILE.registers
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [(consume, (consuming, 0)), (consume, (consuming, 1)), (produce, producing)],
            [4, 1], [TILE.registers, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [(consume, (consuming, 0)), (consume, (consuming, 1)), (consume, (consuming, 2)), (produce, producing)],
            [4, 4, 1], [TILE.registers, TILE.registers, PRODUCER],
        )
