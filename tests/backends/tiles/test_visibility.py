"""Keys that a row sees and tiles that a tile visits, against the definition of visibility pair by pair."""

import hypothesis
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from decayattn.backends.tiles.visibility import keys_seen, partial_tile, rows_that_see, visited_tiles

settings = hypothesis.settings(
    max_examples=150 if torch.cuda.is_available() else 30, deadline=None, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@triton.jit
def _store_visits(first, end, ranges, edges, most_edges, BLOCK: tl.constexpr):
    """One program's four ends of visited_tiles, and its partial tiles in the order of partial_tile."""
    tile_begin, full_begin, full_end, tile_end = visited_tiles(first, end, BLOCK)
    ranges += tl.program_id(0) * 4
    tl.store(ranges, tile_begin)
    tl.store(ranges + 1, full_begin)
    tl.store(ranges + 2, full_end)
    tl.store(ranges + 3, tile_end)
    for n in range(0, tile_end - tile_begin - (full_end - full_begin)):
        tl.store(edges + tl.program_id(0) * most_edges + n, partial_tile(n, tile_begin, full_begin, full_end))


@triton.jit
def _visits_of_intervals(firsts, ends, ranges, edges, most_edges, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    here = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _store_visits(tl.load(firsts + here), tl.load(ends + here), ranges, edges, most_edges, BLOCK)


@triton.jit
def _visits(
    last_reset, next_reset, firsts, ends, ranges, edges, most_edges, query_length, key_length, left, right,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MIRROR: tl.constexpr, CAUSAL: tl.constexpr, HAS_RESETS: tl.constexpr,
):
    """One tile of ROWS query rows and the keys that they see; MIRROR: of ROWS keys and the rows that see them."""
    first_position = key_length - query_length
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # indices past the end repeat the last one, as in the kernels
    if MIRROR:
        length = key_length
        index = tl.minimum(index, length - 1)
        first, end = rows_that_see(
            index, query_length, first_position, last_reset, next_reset, CAUSAL, HAS_RESETS, left, right
        )
    else:
        length = query_length
        index = tl.minimum(index, length - 1)
        position = index + first_position
        first, end = keys_seen(position, key_length, last_reset, next_reset, CAUSAL, HAS_RESETS, left, right)
    tl.store(firsts + index, first)
    tl.store(ends + index, end)
    _store_visits(first, end, ranges, edges, most_edges, BLOCK)


def visible_pairs(query_length, key_length, resets, causal, window):
    """(T_q, T_k): row i sees key j if no reset is in (min, max] of the two and j is in i's window, causal up to i."""
    i, j = torch.arange(query_length)[:, None] + key_length - query_length, torch.arange(key_length)
    visible = (j <= i) if causal else torch.ones_like(j <= i)
    left, right = window
    if left is not None:
        visible &= j >= i - left
    if right is not None:
        visible &= j <= i + right
    for reset in resets:
        visible &= (i >= reset) == (j >= reset)
    return visible


def check_visits(inside, ranges, edges, rows, block):
    """inside (lines, columns) is the visible part; one program had `rows` lines, tiles are `block` columns."""
    for lines, (begin, full_begin, full_end, end), edge in zip(inside.split(rows), ranges, edges, strict=True):
        assert begin <= full_begin <= full_end <= end
        edge = edge[edge >= 0].tolist()
        # every visited tile once: as full or as partial
        assert sorted(edge + list(range(full_begin, full_end))) == list(range(begin, end))
        seen = lines.any(0).nonzero().flatten() // block
        assert set(seen.tolist()) <= set(range(begin, end))
        for tile in range(full_begin, full_end):
            assert (tile + 1) * block <= lines.shape[1]
            assert lines[:, tile * block : (tile + 1) * block].all()


def check(query_length, key_length, resets, causal, rows, block, device, window=(None, None)):
    visible = visible_pairs(query_length, key_length, resets, causal, window)
    new = dict(dtype=torch.int32, device=device)
    # of every token, as the prefix records them
    last_reset = torch.tensor([max((r for r in resets if r <= t), default=0) for t in range(key_length)], **new)
    next_reset = torch.tensor([min((r for r in resets if r > t), default=key_length) for t in range(key_length)], **new)
    for mirror, pairs in ((False, visible), (True, visible.T)):
        lines, columns = pairs.shape
        programs, most_edges = triton.cdiv(lines, rows), triton.cdiv(columns, block)
        firsts, ends = torch.full((2, lines), -1, **new)
        ranges = torch.full((programs, 4), -1, **new)
        edges = torch.full((programs, most_edges), -1, **new)
        _visits[(programs,)](
            last_reset, next_reset, firsts, ends, ranges, edges, most_edges, query_length, key_length,
            *window, ROWS=rows, BLOCK=block, MIRROR=mirror, CAUSAL=causal, HAS_RESETS=bool(resets),
        )
        column = torch.arange(columns, device=device)
        assert torch.equal(((column >= firsts[:, None]) & (column < ends[:, None])).cpu(), pairs)
        check_visits(pairs, ranges.tolist(), edges.cpu(), rows, block)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "resets", "window"), [
    *((lengths, [], (None, None)) for lengths in (
        (1, 1), (32, 32), (33, 33), (31, 33), (33, 31), (1, 40), (40, 1), (40, 7),
    )),
    *(((40, 40), resets, (None, None)) for resets in ([1], [15, 16], [8, 31, 32], [39], list(range(1, 40)))),
    *((lengths, resets, window) for window in ((0, 0), (3, None), (None, 3), (7, 9), (16, 0), (100, 100))
      for lengths, resets in (((40, 40), []), ((9, 40), []), ((40, 9), []), ((1, 33), []), ((40, 40), [8, 31]))),
], ids=str)
def test_visits_equal_the_definition(lengths, resets, window, causal, device):
    check(*lengths, resets, causal, 8, 16, device, window)
    check(9 if resets else lengths[0], lengths[1], resets, causal, 16, 8, device, window)


@settings
@hypothesis.given(intervals=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=4, max_size=4))
def test_random_intervals(intervals, device):
    """For any rules: empty intervals, disjoint ones, ends that decrease."""
    firsts, ends = torch.tensor(intervals, dtype=torch.int32, device=device).T.contiguous()
    ranges = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    edges = torch.full((1, 10), -1, dtype=torch.int32, device=device)
    _visits_of_intervals[(1,)](firsts, ends, ranges, edges, 10, ROWS=4, BLOCK=8)
    column = torch.arange(60, device=device)
    inside = (column >= firsts[:, None]) & (column < ends[:, None])
    check_visits(inside.cpu(), ranges.tolist(), edges.cpu(), 4, 8)
