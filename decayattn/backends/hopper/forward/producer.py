"""The Hopper forward's producer: one warp that draws items and sends them, ahead of the consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from decayattn.backends.hopper.common import copy_engine
from decayattn.backends.hopper.common.rings import load_word, next_item, stage, store_word
from decayattn.backends.hopper.common.tile_table import coordinates
from decayattn.backends.hopper.forward.exchange import (
    BETA_TILES,
    CAREFUL,
    END,
    ITEM,
    NORMAL,
    SLOTS,
    WARPGROUPS_PADDED,
    WORDS,
    hand_over,
    load_beta,
    overflowed,
)
from decayattn.backends.hopper.forward.items import KEYS, ROWS, Walk


@gluon.jit
def produce(buffers, sizes, decay, counter, q_desc, k_desc, v_desc, beta_desc, WARPGROUPS: gl.constexpr):
    """Draw items and send them, until all are known to be right.

    The producer learns of an item's overflow when it sends the one after the next: the last ones are followed by empty
    ones until that is known.
    """
    following = gl.program_id(0)
    count = following * 0
    sent = following * 0
    state = following * 0
    # when so many items have been sent, it is known of all before whether their sums overflowed
    known = following * 0
    while state != END:
        buffers.queries.wait_empty(count)
        again = overflowed(buffers, count, WARPGROUPS)
        words, word = buffers.drawn.tiles, stage(count, SLOTS) * WORDS
        item = gl.where(again, load_word(words, word + ITEM, 1), following)
        fresh = (again == 0) & (item < sizes.items)
        known = gl.where(fresh, count + SLOTS, known)
        state = gl.where(again, CAREFUL, gl.where(count < known, NORMAL, END))
        if state == END:
            store_word(words, word, state)
            mbarrier.arrive(buffers.drawn.arrival(count), count=1)
        else:
            tiles, following = _send(
                buffers, sizes, decay, count, sent, state, item, fresh, following, counter, q_desc, k_desc, v_desc,
                beta_desc, WARPGROUPS,
            )  # fmt: skip
            sent += tiles
        count += 1


@gluon.jit
def _send(
    buffers, sizes, decay, count, sent, state, item, fresh, following, counter, q_desc, k_desc, v_desc, beta_desc,
    WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """q of an item, then k and v of every tile in the order of its Walk.

    How many tiles (of an item beyond all items: none), and the following item, which is drawn on the way if this one is
    `fresh`.
    """
    # on which the loop depends, every thread has: numbers that went through a shuffle, the compiler would not take for
    # the same in all threads, and not keep in registers that a warp has once
    EVERY: gl.constexpr = gl.BlockedLayout([WARPGROUPS_PADDED], [32], [1], [0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    queries, values = buffers.queries, buffers.values
    found = sizes.found(gl.minimum(item, sizes.items - 1), WARPGROUPS * ROWS)
    place, head = found.place, found.head
    start = place.start
    kv_head = head // sizes.group
    if item < sizes.items:
        # before anything that waits for memory
        arrival = queries.arrival(count)
        if decay.KIND == "constant":
            # β of a constant decay is the same for every tile of the head
            mbarrier.expect(arrival, WARPGROUPS * q_desc.block_type.nbytes + BETA_TILES * beta_desc.block_type.nbytes)
            load_beta(beta_desc, head, arrival, buffers.beta, stage(count, SLOTS))
        else:
            mbarrier.expect(arrival, WARPGROUPS * q_desc.block_type.nbytes)
        for w in gl.static_range(WARPGROUPS):
            q = queries.tiles.index(stage(count, SLOTS) * WARPGROUPS + w)
            at = coordinates(
                place.entry, head, start + w * ROWS, place.first_row, place.query_length, sizes.query_axis, sizes.RAGGED
            )
            copy_engine.load(q_desc, at, arrival, q)

    head_decay = decay.of(sizes, found)
    first_rows = start + gl.minimum(gl.arange(0, WARPGROUPS_PADDED, EVERY), WARPGROUPS - 1) * ROWS
    first_rows = gl.minimum(first_rows, place.query_length - 1)
    final_rows = gl.minimum(first_rows + ROWS, place.query_length) - 1
    # both ends of what a row sees grow with the row, so the first and the last one know them all
    first_min = head_decay.first_visited(first_rows + found.first_position(), first_rows)
    first_max = head_decay.first_visited(final_rows + found.first_position(), first_rows)
    tile_end = found.tile_end(start, WARPGROUPS * ROWS)
    tiles = tile_end - gl.min(first_min, 0) // KEYS
    if decay.CAUSAL:
        end_min, end_max = first_min, first_max
        walk = Walk(tile_end, tiles, tile_end, True)
    else:
        end_min = head_decay.keys_end(first_rows + found.first_position(), place.key_length)
        end_max = head_decay.keys_end(final_rows + found.first_position(), place.key_length)
        right_begin = found.first_right_key() // KEYS
        walk = Walk(tile_end, tiles, right_begin, False)
        tiles += gl.maximum(gl.cdiv(gl.max(end_max, 0), KEYS) - right_begin, 0)
    tiles = gl.where(item < sizes.items, tiles, 0)
    reference = found.reference(start + gl.arange(0, WARPGROUPS_PADDED, LANES) * ROWS)
    rate = head_decay.rate(head)
    if decay.KIND == "scalar":
        reference = gl.minimum(reference, place.key_length - 1)
        reference_bases = head_decay.base(reference // KEYS)
        next_tile = tile_end - 2
        if not decay.CAUSAL:
            next_tile = walk.tile_or_last(1, place)
        next_base = head_decay.base(next_tile)
        difference = reference_bases.minus(head_decay.base(tile_end - 1))
    else:
        reference_bases = 0.0
        next_base = 0.0
        difference = (reference - (tile_end - 1) * KEYS).to(gl.float32) * rate

    hand_over(
        buffers, count, state, item, found, tiles, tile_end, first_min, first_max, end_min, end_max, decay.CAUSAL,
        sizes.RAGGED,
    )  # fmt: skip
    # k of a tile before v of the tile before it: in this order consumers release them
    for n in range(sent, sent + tiles + (tiles > 0)):
        key = walk.tile(n - sent) * KEYS
        if n < sent + tiles:
            _send_keys(buffers, sizes, decay, found, n, key, kv_head, difference, k_desc, beta_desc)
        if fresh & (n == sent + tiles - 1):
            # the following item, while there is time
            following = next_item(counter, sizes.items)
        if n > sent:
            values.wait_empty(n - 1)
            mbarrier.expect(values.arrival(n - 1), v_desc.block_type.nbytes)
            key_before = key + KEYS
            if not decay.CAUSAL:
                key_before = walk.tile(n - 1 - sent) * KEYS
            at = coordinates(
                place.entry, kv_head, key_before, place.first_token, place.key_length, sizes.key_axis, sizes.RAGGED
            )
            copy_engine.load(v_desc, at, values.arrival(n - 1), values.tile(n - 1))
        if decay.KIND == "scalar":
            difference = reference_bases.minus(next_base)
            next_tile = key // KEYS - 2
            if not decay.CAUSAL:
                next_tile = walk.tile_or_last(n + 2 - sent, place)
            next_base = head_decay.base(next_tile)
        elif decay.KIND == "constant":
            difference = (reference - walk.tile(n + 1 - sent) * KEYS).to(gl.float32) * rate
    return tiles, following


@gluon.jit
def _send_keys(buffers, sizes, decay, found, n, key, kv_head, difference, k_desc, beta_desc):
    """k of the n-th tile, with its β and the difference of bases."""
    keys, place = buffers.keys, found.place
    keys.wait_empty(n)
    arrival = keys.arrival(n)
    if decay.KIND != "none":
        buffers.differences.index(stage(n, keys.STAGES)).store(difference)
    if decay.KIND == "scalar":
        mbarrier.expect(arrival, k_desc.block_type.nbytes + BETA_TILES * beta_desc.block_type.nbytes)
        load_beta(beta_desc, sizes.blocks(found) + key // KEYS, arrival, buffers.beta, stage(n, keys.STAGES))
    else:
        mbarrier.expect(arrival, k_desc.block_type.nbytes)
    at = coordinates(place.entry, kv_head, key, place.first_token, place.key_length, sizes.key_axis, sizes.RAGGED)
    copy_engine.load(k_desc, at, arrival, keys.tile(n))
