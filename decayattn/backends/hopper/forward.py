"""Forward for sm_90: warp-specialised and persistent.

An item of work is 64 query rows per consumer warpgroup of one head. A producer warp draws items from a counter, and
streams their queries and their key and value tiles through rings of shared-memory buffers by TMA, so that the next
item's tiles arrive while this one's results leave. Every consumer warpgroup walks the keys that its rows see, from the
last tile to the first, with an online softmax whose exponentials overlap the product P V of the tile before
(FlashAttention 3's order, Shah et al., arXiv 2407.08608).

The decay costs no instruction per score: −α_j of a key, relative to its block and divided by the scale, stands in three
bfloat16 columns beside the keys (high, middle and low bits), and one more matrix instruction adds ones × columns to
Q Kᵀ. What a row and a tile share, α_i and the difference of two block bases, joins the row maximum and the log-sum-exp.

Tiles, per warpgroup: q, out (64, D) · k, v (KEYS, D) · columns (KEYS, 16) · ones (64, 16) · score, p (64, KEYS) ·
acc (64, D) · row_sum (64, 4), the partial sums of the four threads that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from decayattn.backends.hopper import copy_engine
from decayattn.backends.hopper.copy_engine import aggregate
from decayattn.backends.hopper.fragments import SHARES, by_threads, shares
from decayattn.backends.hopper.items import KEYS, ROWS, Decay, Sizes
from decayattn.backends.hopper.rings import Ring, allocate_words, load_word, make_ring, next_item, store_word
from decayattn.backends.hopper.tile_table import (
    LINE,
    Place,
    allocate_tiles,
    coordinates,
    flat,
)
from decayattn.backends.prefix import BIAS_COLUMNS, BIAS_PARTS
from decayattn.backends.tile_math import LN2, finite_or_zero, probability, rescale, visible
from decayattn.backends.tile_range import tiles_between

COLUMNS: gl.constexpr = gl.constexpr(BIAS_COLUMNS)
PARTS: gl.constexpr = gl.constexpr(BIAS_PARTS)
# powers of two by which scores may outgrow a row's maximum before it moves: p stays far from float16's 2^16
LAG: gl.constexpr = gl.constexpr(8.0)
# consumer warpgroups, as a width that a tensor can have
WARPGROUPS_PADDED: gl.constexpr = gl.constexpr(4)
# items whose queries are in shared memory at once: one at work, one that arrives
SLOTS: gl.constexpr = gl.constexpr(2)


# ----------------------------------------------------------------------------------------------------------------------
# Shared memory


@aggregate
class Buffers:
    """Everything in shared memory.

    queries is a ring of items, and its tiles are the warpgroups' q: tile (slot · warpgroups + warpgroup). drawn holds
    the items' numbers, each followed by its line of the table if there is one. columns and differences (of bases, one
    per warpgroup) follow the ring of the keys; a constant decay has the same columns for all keys of a head, which
    follow the ring of the queries.
    """

    queries: Ring
    keys: Ring
    values: Ring
    drawn: Ring
    columns: gl.shared_memory_descriptor
    differences: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor
    fences: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queries, keys, values, drawn, columns, differences, ones, fences):
        self.queries = queries
        self.keys = keys
        self.values = values
        self.drawn = drawn
        self.columns = columns
        self.differences = differences
        self.ones = ones
        self.fences = fences


# ----------------------------------------------------------------------------------------------------------------------
# From the producer to the consumers: an item's number, and the line of the table that the consumers would wait for


@gluon.jit
def _first_word(count, RAGGED: gl.constexpr):
    """Where the words of the count-th item are."""
    return count % SLOTS * (LINE if RAGGED else 1)


@gluon.jit
def _hand_over(drawn, count, item, place, RAGGED: gl.constexpr):
    first = _first_word(count, RAGGED)
    store_word(drawn.tiles, first, item)
    if RAGGED:
        store_word(drawn.tiles, first + 1, place.start)
        store_word(drawn.tiles, first + 2, place.query_length)
        store_word(drawn.tiles, first + 3, place.key_length)
        store_word(drawn.tiles, first + 4, place.entry)
        store_word(drawn.tiles, first + 5, place.first_row)
        store_word(drawn.tiles, first + 6, place.first_token)
        store_word(drawn.tiles, first + 7, place.first_block)


# ----------------------------------------------------------------------------------------------------------------------
# The producer


@gluon.jit
def _produce(buffers, sizes, decay, counter, q_desc, k_desc, v_desc, columns_desc, WARPGROUPS: gl.constexpr):
    """One warp: q of an item, then k (with its bias columns) and v of every tile, the last one first."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    queries, keys, values, drawn = buffers.queries, buffers.keys, buffers.values, buffers.drawn
    item = gl.program_id(0)
    count = item * 0
    sent = item * 0
    while item < sizes.items:
        following = next_item(counter, sizes.items)
        found = sizes.found(item, WARPGROUPS * ROWS)
        place, head = found.place, found.head
        start = place.start
        kv_head = head // sizes.group
        head_decay = decay.of(sizes, found)
        first = head_decay.first_of_item(found, WARPGROUPS)
        tile_end = found.tile_end(start, WARPGROUPS * ROWS)
        if decay.KIND == "scalar":
            warpgroup_start = start + gl.arange(0, WARPGROUPS_PADDED, LANES) * ROWS
            reference = gl.minimum(found.reference(warpgroup_start), place.key_length - 1)
            reference_bases = head_decay.base(reference // KEYS)
            tile_base = head_decay.base(tile_end - 1)

        queries.wait_empty(count)
        _hand_over(drawn, count, item, place, sizes.RAGGED)
        mbarrier.arrive(drawn.arrival(count), count=1)
        arrival = queries.arrival(count)
        if decay.KIND == "constant":
            # the columns of a constant decay are the same for every tile of the head
            mbarrier.expect(arrival, WARPGROUPS * q_desc.block_type.nbytes + columns_desc.block_type.nbytes)
            copy_engine.load(columns_desc, [head * KEYS, 0], arrival, buffers.columns.index(count % SLOTS))
        else:
            mbarrier.expect(arrival, WARPGROUPS * q_desc.block_type.nbytes)
        for w in gl.static_range(WARPGROUPS):
            q = queries.tiles.index(count % SLOTS * WARPGROUPS + w)
            at = coordinates(
                place.entry, head, start + w * ROWS, place.first_row, place.query_length, sizes.query_axis, sizes.RAGGED
            )
            copy_engine.load(q_desc, at, arrival, q)

        columns_row = sizes.blocks(found) * KEYS
        tiles = tile_end - first // KEYS
        for n in range(sent, sent + tiles):
            key = (tile_end - 1 - (n - sent)) * KEYS
            keys.wait_empty(n)
            if decay.KIND == "scalar":
                # formed exactly and rounded once; here, where a load and float64 arithmetic keep nobody waiting
                buffers.differences.index(n % keys.STAGES).store((reference_bases - tile_base).to(gl.float32))
                tile_base = head_decay.base(key // KEYS - 1)
                mbarrier.expect(keys.arrival(n), k_desc.block_type.nbytes + columns_desc.block_type.nbytes)
                columns = buffers.columns.index(n % keys.STAGES)
                copy_engine.load(columns_desc, [columns_row + key, 0], keys.arrival(n), columns)
            else:
                mbarrier.expect(keys.arrival(n), k_desc.block_type.nbytes)
            at = coordinates(
                place.entry, kv_head, key, place.first_token, place.key_length, sizes.key_axis, sizes.RAGGED
            )
            copy_engine.load(k_desc, at, keys.arrival(n), keys.tile(n))
            values.wait_empty(n)
            mbarrier.expect(values.arrival(n), v_desc.block_type.nbytes)
            copy_engine.load(v_desc, at, values.arrival(n), values.tile(n))
        sent += tiles
        count += 1
        item = following
    queries.wait_empty(count)
    store_word(drawn.tiles, _first_word(count, sizes.RAGGED), sizes.items)
    mbarrier.arrive(drawn.arrival(count), count=1)


# ----------------------------------------------------------------------------------------------------------------------
# The consumers


@gluon.jit
def _draw(drawn, count, RAGGED: gl.constexpr):
    """The number of the count-th item of this program."""
    drawn.wait_ready(count)
    return load_word(drawn.tiles, _first_word(count, RAGGED))


@gluon.jit
def _drawn_item(drawn, count, item, sizes, TILE: gl.constexpr):
    """The item that was drawn, until its queries are released."""
    if sizes.RAGGED:
        first = _first_word(count, True) + 1
        words = drawn.tiles
        place = Place(
            load_word(words, first), load_word(words, first + 1), load_word(words, first + 2),
            load_word(words, first + 3), load_word(words, first + 4), load_word(words, first + 5),
            load_word(words, first + 6), item * 0,
        )  # fmt: skip
        found = sizes.ragged_item(item, place)
    else:
        found = sizes.dense_item(item, TILE)
    return found


@gluon.jit
def _start_scores(q, buffers, n, count, zero, KIND: gl.constexpr):
    """Issue q·kᵀ of the n-th tile, with the decay's bias; divided by the scale, like everything before the softmax."""
    kT = flat(buffers.keys.tile(n)).permute((1, 0))
    score = warpgroup_mma(q, kT, zero, use_acc=False, is_async=True)
    # after the products: a strong decay is large, and every instruction that adds to it rounds it
    if KIND == "scalar":
        columns = buffers.columns.index(n % buffers.keys.STAGES)
        score = warpgroup_mma(buffers.ones, columns.permute((1, 0)), score, is_async=True)
    elif KIND == "constant":
        columns = buffers.columns.index(count % SLOTS)
        score = warpgroup_mma(buffers.ones, columns.permute((1, 0)), score, is_async=True)
    return score


@gluon.jit
def _base_difference(buffers, n, tile, reference, rate, WARPGROUP: gl.constexpr, KIND: gl.constexpr):
    """α at the warpgroup's reference minus α at the start of the n-th tile: one number."""
    if KIND == "scalar":
        # every thread reads all of them and keeps one
        EVERY: gl.constexpr = gl.BlockedLayout([WARPGROUPS_PADDED], [32], [4], [0])
        differences = buffers.differences.index(n % buffers.keys.STAGES).load(EVERY)
        mine = gl.arange(0, WARPGROUPS_PADDED, EVERY) == WARPGROUP
        difference = gl.sum(gl.where(mine, differences, 0.0), 0)
    elif KIND == "constant":
        difference = (reference - tile * KEYS).to(gl.float32) * rate
    else:
        difference = 0.0
    return difference


def _rescale_assembly(width):
    """acc · correction for the `width` accumulators of a thread, left out where no thread of the warp has a correction.

    Operands: the results; the accumulators, in the results' registers; the correction of each. A thread has two rows,
    which alternate every two accumulators.
    """
    first_row, second_row = f"${2 * width}", f"${2 * width + 2}"
    lines = [
        "{",
        ".reg .pred changed, any;",
        f"setp.neu.f32 changed, {first_row}, 0f3F800000;",
        f"setp.neu.or.f32 changed, {second_row}, 0f3F800000, changed;",
        "vote.sync.any.pred any, changed, 0xffffffff;",
        "@!any bra DONE;",
        *(f"mul.f32 ${n}, ${n}, {second_row if n // 2 % 2 else first_row};" for n in range(width)),
        "DONE:",
        "}",
    ]
    constraints = ["=r"] * width + [str(n) for n in range(width)] + ["r"] * width
    return "\n".join(lines), ",".join(constraints)


RESCALE_32: gl.constexpr = gl.constexpr(_rescale_assembly(32))
RESCALE_64: gl.constexpr = gl.constexpr(_rescale_assembly(64))


@gluon.jit
def _rescale(acc, correction, D: gl.constexpr):
    """acc · correction, for nothing where the correction is 1."""
    correction = gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout)), 1)
    _, factors = gl.broadcast(acc, correction)
    RESCALE: gl.constexpr = RESCALE_32 if D == 64 else RESCALE_64
    return gl.inline_asm_elementwise(
        RESCALE[0], RESCALE[1], [acc, factors], dtype=gl.float32, is_pure=True, pack=D // 2
    )


@gluon.jit
def _softmax(score, row_max, row_sum, difference, scale, tile, first, end, edge, HAS_FIRST: gl.constexpr):
    """Unnormalised p of a tile, the new (row_max, row_sum), and the factor for what was summed before.

    row_max is a maximum that lags behind: it moves when a row's scores grow by more than LAG, so that most tiles
    correct nothing. p is at most 2^LAG then.
    """
    SCORE: gl.constexpr = score.type.layout
    key = gl.expand_dims(tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORE)), 0)
    if edge:
        if HAS_FIRST:
            sees = visible(key, gl.expand_dims(first, 1), gl.expand_dims(end, 1))
        else:
            sees = key < gl.expand_dims(end, 1)
        score = gl.where(sees, score, float("-inf"))
    tile_max = gl.max(score, 1) * scale + difference
    new_max = gl.where(tile_max > row_max + LAG, tile_max, row_max)
    anchor = finite_or_zero(new_max)
    p = probability(score * scale, gl.expand_dims(anchor - difference, 1))
    correction = rescale(row_max, anchor)
    row_sum = row_sum * gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, SHARES), assert_trivial=True), 1)
    row_sum += shares(by_threads(p))
    return p, new_max, row_sum, correction


@gluon.jit
def _consume(
    buffers, sizes, decay, out_desc, lse, row_references, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: 64 query rows of every item through the keys that they see."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    KIND: gl.constexpr = decay.KIND
    # whether a row can have a first key other than 0
    HAS_FIRST: gl.constexpr = KIND == "scalar" or decay.WINDOW
    queries, keys, values = buffers.queries, buffers.keys, buffers.values
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    fence = buffers.fences.index(WARPGROUP)
    item = _draw(buffers.drawn, 0, sizes.RAGGED)
    count = item * 0
    sent = item * 0
    while item < sizes.items:
        found = _drawn_item(buffers.drawn, count, item, sizes, WARPGROUPS * ROWS)
        place, head = found.place, found.head
        query_length, first_position = place.query_length, found.first_position()
        item_start = place.start
        start = item_start + WARPGROUP * ROWS
        head_decay = decay.of(sizes, found)
        item_end = found.tile_end(item_start, WARPGROUPS * ROWS)
        # nothing waits for these loads before the first scores are on their way
        item_first = head_decay.first_of_item(found, WARPGROUPS)
        if start < query_length:
            # rows past the end repeat the last one, and are never stored
            final_row = gl.minimum(start + ROWS, query_length) - 1
            position = gl.minimum(start + gl.arange(0, ROWS, ROW), final_row) + first_position
            first = head_decay.first_key(position)
            end = gl.maximum(position + 1, 0)
            # both ends of what a row sees grow with the row, so the first and the last one know them all
            first_min = head_decay.first_visited(start + first_position, start)
            first_max = head_decay.first_visited(final_row + first_position, start)
            end_min = gl.maximum(start + first_position + 1, 0)
            tile_end = found.tile_end(start, ROWS)
            reference = found.reference(start)
            rate = head_decay.rate(head)

            # n counts the tiles of all items; an item is walked from item_end down
            n_begin = item_end - tile_end
            for n in range(sent, sent + n_begin):
                keys.skip(n)
                values.skip(n)
            n = sent + n_begin
            queries.wait_ready(count)
            keys.wait_ready(n)
            q = flat(queries.tiles.index(count % SLOTS * WARPGROUPS + WARPGROUP))
            score = _start_scores(q, buffers, n, count, zero, KIND)
            difference = _base_difference(buffers, n, tile_end - 1, reference, rate, WARPGROUP, KIND)
            # out of the item before stood in its q
            tma.store_wait(0)
            queries.release(count - 1, count > 0)
            score = warpgroup_mma_wait(0, (score,))
            keys.release(n)
            begin, whole_begin, whole_end, _ = tiles_between(first_min, first_max, end_min, tile_end * KEYS, KEYS)
            row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            row_sum = gl.zeros([ROWS, 4], gl.float32, SHARES)
            p, row_max, row_sum, _ = _softmax(
                score, row_max, row_sum, difference, scale, tile_end - 1, first, end, True, HAS_FIRST
            )
            p = gl.convert_layout(p.to(q.dtype), P)
            acc = gl.zeros([ROWS, D], gl.float32, ACC)
            n_end = sent + item_end - begin
            keys.wait_ready(n + 1, n + 1 < n_end)
            for n in range(sent + n_begin + 1, n_end):
                # the scores of this tile while P V of the tile before it runs
                tile = item_end - 1 - (n - sent)
                score = _start_scores(q, buffers, n, count, zero, KIND)
                difference = _base_difference(buffers, n, tile, reference, rate, WARPGROUP, KIND)
                values.wait_ready(n - 1)
                acc = warpgroup_mma(p, flat(values.tile(n - 1)), acc, is_async=True)
                score = warpgroup_mma_wait(1, (score,))
                keys.release(n)
                edge = (tile >= whole_end) | (tile < whole_begin)
                next_p, row_max, row_sum, correction = _softmax(
                    score, row_max, row_sum, difference, scale, tile, first, end, edge, HAS_FIRST
                )
                # ptxas would hoist the wait for P V above the exponentials; a store that needs their sum keeps it below
                fence.store(row_sum)
                keys.wait_ready(n + 1, n + 1 < n_end)
                acc = warpgroup_mma_wait(0, (acc,))
                values.release(n - 1)
                acc = _rescale(acc, correction, D)
                p = gl.convert_layout(next_p.to(q.dtype), P)
            reference_base = head_decay.reference_base(reference)
            values.wait_ready(n_end - 1)
            acc = warpgroup_mma(p, flat(values.tile(n_end - 1)), acc, is_async=True)

            total = gl.convert_layout(gl.sum(row_sum, 1), ROW, assert_trivial=True)
            # a row that saw no key: total 0 gives out 0 and lse −inf
            seen = total > 0
            total = gl.where(seen, total, 1.0)
            row_reference = row_max + gl.log2(total)
            row_lse = (row_reference + head_decay.row_alpha(position, reference, reference_base, rate)) * LN2
            row = start + gl.arange(0, ROWS, ROW)
            here = sizes.rows(found) + row
            inside = row < query_length
            gl.store(row_references + here, gl.where(seen, row_reference, float("inf")), mask=inside)
            gl.store(lse + here, gl.where(seen, row_lse, float("-inf")), mask=inside)

            acc = warpgroup_mma_wait(0, (acc,))
            values.release(n_end - 1)
            acc = acc * gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, ACC)), 1)
            # this warpgroup's q is read, and out has its shape
            q.store(acc.to(q.dtype))
            fence_async_shared()
            out = queries.tiles.index(count % SLOTS * WARPGROUPS + WARPGROUP)
            at = coordinates(place.entry, head, start, place.first_row, query_length, sizes.query_axis, sizes.RAGGED)
            copy_engine.store(out_desc, at, out)
            for n in range(n_end, sent + item_end - item_first // KEYS):
                keys.skip(n)
                values.skip(n)
        else:
            # no rows here: let the other warpgroups have their tiles
            tma.store_wait(0)
            queries.release(count - 1, count > 0)
            for n in range(sent, sent + item_end - item_first // KEYS):
                keys.skip(n)
                values.skip(n)
        sent += item_end - item_first // KEYS
        count += 1
        item = _draw(buffers.drawn, count, sizes.RAGGED)
    tma.store_wait(0)


# ----------------------------------------------------------------------------------------------------------------------
# The kernel

_INTEGERS = [
    "rate_stride", "left", "items", "row_tiles", "heads", "group", "together", "query_length", "key_length", "blocks",
    "granules",
]  # fmt: skip


@gluon.jit(do_not_specialize=_INTEGERS)
def forward_kernel(
    q_desc, k_desc, v_desc, columns_desc, out_desc, lse, row_references, rates, local, bases, last_reset, plan, counter,
    table, scale, rate_stride, left, items, row_tiles, heads, group, together, query_length, key_length, blocks,
    granules, KIND: gl.constexpr, RAGGED: gl.constexpr, PACKED: gl.constexpr, WINDOW: gl.constexpr,
    PLANNED: gl.constexpr, D: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out = softmax(s q·kᵀ + decay) v and its log-sum-exp, causal.

    scale is s·log2(e), positive; counter is 0, and not read where every program has one item; columns_desc is not
    read without a decay; table, of tiles of rows, is not read unless RAGGED, left not unless WINDOW, and plan, the
    first block of every granule, not unless PLANNED. query_length, key_length, blocks, those of the decay prefix, and
    granules are of the axes on which the sequences lie.
    """
    if RAGGED:
        # the host only knows bounds
        row_tiles = gl.load(table)
        items = row_tiles * heads
    sizes = Sizes(
        items, row_tiles, heads, group, together, query_length, key_length, blocks, granules, table, RAGGED, PACKED
    )
    decay = Decay(rates, rate_stride, local, bases, last_reset, left, plan, KIND, WINDOW, PLANNED)

    q_tiles = allocate_tiles(q_desc, SLOTS * WARPGROUPS)
    k_tiles = allocate_tiles(k_desc, STAGES)
    v_tiles = allocate_tiles(v_desc, STAGES)
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    drawn = allocate_words(SLOTS * (LINE if RAGGED else 1))
    FENCE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    fences = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, ROWS, 4], FENCE)
    differences = gl.allocate_shared_memory(gl.float32, [STAGES, WARPGROUPS_PADDED], WORD)
    if KIND == "none":
        columns = q_tiles
        ones = q_tiles
    else:
        COLUMN_TILES: gl.constexpr = STAGES if KIND == "scalar" else SLOTS
        columns = gl.allocate_shared_memory(columns_desc.dtype, [COLUMN_TILES, KEYS, COLUMNS], columns_desc.layout)
        # ones in the columns that hold the bias
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        value = gl.expand_dims((column < PARTS).to(columns_desc.dtype), 0)
        value, _ = gl.broadcast(value, gl.full([ROWS, COLUMNS], 0.0, columns_desc.dtype, LAYOUT))
        ones = gl.allocate_shared_memory(columns_desc.dtype, [ROWS, COLUMNS], columns_desc.layout, value)
        fence_async_shared()
    buffers = Buffers(
        make_ring(q_tiles, SLOTS, WARPGROUPS), make_ring(k_tiles, STAGES, WARPGROUPS),
        make_ring(v_tiles, STAGES, WARPGROUPS), make_ring(drawn, SLOTS, WARPGROUPS), columns, differences, ones, fences,
    )  # fmt: skip

    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 0, 2, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 1, 2, D)),
                (_produce, (buffers, sizes, decay, counter, q_desc, k_desc, v_desc, columns_desc, 2)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 0, 3, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 1, 3, D)),
                (_consume, (buffers, sizes, decay, out_desc, lse, row_references, scale, 2, 3, D)),
                (_produce, (buffers, sizes, decay, counter, q_desc, k_desc, v_desc, columns_desc, 3)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
