"""What the producer and the consumers of the Hopper forward share: memory, and what they tell each other of an item.

The producer finds an item's place in memory and where its keys begin, and tells the consumers, who would wait for it.
They tell it whether what they summed overflowed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common import copy_engine, descriptors
from decayattn.backends.hopper.common.copy_engine import aggregate
from decayattn.backends.hopper.common.fragments import DEPTH
from decayattn.backends.hopper.common.rings import Ring, load_word, stage, store_word
from decayattn.backends.hopper.common.tile_table import Place, dense_place, stacked
from decayattn.backends.hopper.config import KEY_TILE
from decayattn.backends.hopper.forward.items import KEYS, Item
from decayattn.backends.tiles import parts

WARPS: gl.constexpr = gl.constexpr(4)
# consumer warpgroups, as a width that a tensor can have
WARPGROUPS_PADDED: gl.constexpr = gl.constexpr(4)
# items whose queries are in shared memory at once: one at work, one that arrives
SLOTS: gl.constexpr = gl.constexpr(2)
# what consumers are told of an item: its state, and more in `hand_over`
WORDS: gl.constexpr = gl.constexpr(12)
ITEM: gl.constexpr = gl.constexpr(1)
NORMAL: gl.constexpr = gl.constexpr(0)
CAREFUL: gl.constexpr = gl.constexpr(1)
END: gl.constexpr = gl.constexpr(2)
# rows that the copy engine fetches of β, keys of a tile that it fetches, and such tiles of a block
COLUMNS: gl.constexpr = gl.constexpr(parts.COLUMNS)
PART_KEYS: gl.constexpr = gl.constexpr(descriptors.PART_KEYS)
BETA_TILES: gl.constexpr = gl.constexpr(KEY_TILE // descriptors.PART_KEYS)


@aggregate
class Buffers:
    """Everything in shared memory.

    queries is a ring of items, and its tiles are the warpgroups' q: tile (slot · warpgroups + warpgroup). In the same
    slots, which are free when the queries are released, drawn holds WORDS about each item, firsts the smallest and the
    largest first key of each warpgroup's rows: (slot · 2) and (slot · 2 + 1), and overflows, which consumers write,
    whether a warp's sums did: (slot · 4 + warpgroup). beta and differences (of bases, one per warpgroup) follow the
    ring of the keys; a constant decay has the same beta for all keys of a head, which follow the ring of the queries.
    Not causal, ends is like firsts: where the rows' keys end; and signs has what multiplies beta left and right of the
    diagonal: ones, and minus ones. row_alphas is a warpgroup's own: α of its rows, from an item's beginning to its end;
    and so are fences (forward._next_tile).
    """

    queries: Ring
    keys: Ring
    values: Ring
    drawn: Ring
    beta: gl.shared_memory_descriptor
    differences: gl.shared_memory_descriptor
    firsts: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor
    signs: gl.shared_memory_descriptor
    overflows: gl.shared_memory_descriptor
    fences: gl.shared_memory_descriptor
    row_alphas: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, queries, keys, values, drawn, beta, differences, firsts, ends, signs, overflows, fences, row_alphas
    ):
        self.queries = queries
        self.keys = keys
        self.values = values
        self.drawn = drawn
        self.beta = beta
        self.differences = differences
        self.firsts = firsts
        self.ends = ends
        self.signs = signs
        self.overflows = overflows
        self.fences = fences
        self.row_alphas = row_alphas


@gluon.jit
def allocate_beta(desc, COUNT: gl.constexpr):
    """(COUNT, DEPTH, KEYS): what products add to the scores of tiles; zeros but for the rows that load_beta fetches."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DEPTH, KEYS], gl.bfloat16)
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    beta = gl.allocate_shared_memory(gl.bfloat16, [COUNT, DEPTH, KEYS], LAYOUT)
    for n in gl.static_range(COUNT):
        beta.index(n).store(gl.full([DEPTH, KEYS], 0.0, gl.bfloat16, ZEROS))
    return beta


@gluon.jit
def load_beta(desc, block, arrival, beta, n):
    """Fetch the parts of a block's keys: BETA_TILES tiles of the descriptor. Behind the rows of each lie those of the
    same keys that stay zeros."""
    COUNT: gl.constexpr = beta.shape[0] * BETA_TILES * (DEPTH // COLUMNS)
    tiles = copy_engine.reinterpret(beta, gl.bfloat16, stacked(COUNT, desc.block_shape), desc.layout)
    for part in gl.static_range(BETA_TILES):
        tile = tiles.index((n * BETA_TILES + part) * (DEPTH // COLUMNS))
        copy_engine.load(desc, [block, 0, part * PART_KEYS], arrival, tile)


@gluon.jit
def hand_over(
    buffers, count, state, item, found, tiles, tile_end, first_min, first_max, end_min, end_max,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """The count-th item of this program: `tiles` tiles of keys, walked from tile_end down (and then up, items.Walk)."""
    words, word, place = buffers.drawn.tiles, stage(count, SLOTS) * WORDS, found.place
    store_word(words, word, state)
    store_word(words, word + ITEM, item)
    store_word(words, word + 2, tiles)
    store_word(words, word + 3, tile_end)
    # an item without tiles has no rows either
    store_word(words, word + 4, gl.where(tiles > 0, place.start, place.query_length))
    store_word(words, word + 5, place.entry)
    store_word(words, word + 6, found.head_row)
    if RAGGED:
        store_word(words, word + 7, place.query_length)
        store_word(words, word + 8, place.key_length)
        store_word(words, word + 9, place.first_row)
        store_word(words, word + 10, place.first_token)
        store_word(words, word + 11, place.first_block)
    buffers.firsts.index(stage(count, SLOTS) * 2).store(first_min)
    buffers.firsts.index(stage(count, SLOTS) * 2 + 1).store(first_max)
    if not CAUSAL:
        buffers.ends.index(stage(count, SLOTS) * 2).store(end_min)
        buffers.ends.index(stage(count, SLOTS) * 2 + 1).store(end_max)
    mbarrier.arrive(buffers.drawn.arrival(count), count=1)


@gluon.jit
def draw(drawn, count):
    """The state of the count-th item, once it is there."""
    drawn.wait_ready(count)
    return state_of(drawn, count)


@gluon.jit
def state_of(drawn, count):
    """The state of an item that was drawn, until its queries are released."""
    return load_word(drawn.tiles, stage(count, SLOTS) * WORDS)


@gluon.jit
def drawn_item(drawn, count, sizes):
    """The item that was drawn, until its queries are released; its tiles, and where they end."""
    words, word = drawn.tiles, stage(count, SLOTS) * WORDS
    start, entry, head_row = load_word(words, word + 4), load_word(words, word + 5), load_word(words, word + 6)
    if sizes.RAGGED:
        place = Place(
            start, load_word(words, word + 7), load_word(words, word + 8), entry, load_word(words, word + 9),
            load_word(words, word + 10), load_word(words, word + 11), start * 0,
        )  # fmt: skip
    else:
        place = dense_place(start, sizes.query_axis, sizes.key_axis, entry)
    found = Item(place, head_row, head_row - entry * sizes.heads)
    return found, load_word(words, word + 2), load_word(words, word + 3)


@gluon.jit
def own(values, WARPGROUP: gl.constexpr):
    """Of one number per warpgroup in shared memory, this one's."""
    # every thread reads all of them and keeps one
    EVERY: gl.constexpr = gl.BlockedLayout([WARPGROUPS_PADDED], [32], [4], [0])
    every = values.load(EVERY)
    mine = gl.arange(0, WARPGROUPS_PADDED, EVERY) == WARPGROUP
    return gl.sum(gl.where(mine, every, 0), 0)


@gluon.jit
def least(values):
    """Of one number per warpgroup in shared memory, the smallest."""
    return gl.min(values.load(gl.BlockedLayout([WARPGROUPS_PADDED], [32], [4], [0])), 0)


@gluon.jit
def overflowed(buffers, count, WARPGROUPS: gl.constexpr):
    """Whether the sums of any warp did in the item that was in this one's slot."""
    EVERY: gl.constexpr = gl.BlockedLayout([WARPS], [32], [1], [0])
    some = 0
    for w in gl.static_range(WARPGROUPS):
        some |= gl.max(buffers.overflows.index(stage(count, SLOTS) * WARPGROUPS_PADDED + w).load(EVERY), 0)
    return some != 0
