"""Lookup of a program's sequence in a launch: blocks of packed sequences, against a bisection on the host."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl

from decayattn.backends.planning import sequences
from decayattn.problem import AttentionProblem


@triton.jit
def _count(ends, count, blocks, found, before, SEARCHES: tl.constexpr):
    sequence, start = sequences.count_ends(ends, count, tl.load(blocks + tl.program_id(0)), SEARCHES)
    tl.store(found + tl.program_id(0), sequence)
    tl.store(before + tl.program_id(0), start)


@pytest.mark.parametrize(("count", "searches"), [
    (1, 1), (127, 1), (128, 1), (129, 2), (255, 2), (256, 2), (1000, 2), (2**14, 2), (2**14 + 1, 3), (30_000, 3),
])
def test_a_block_finds_its_sequence(count, searches, device):
    """Sequences of 0 to 3 blocks: by bisection on the host."""
    ends = torch.randint(0, 4, (count,), device=device).cumsum(0).int()
    some = torch.randint(0, int(ends[-1]) + 3, (12,))
    blocks = torch.cat([some, torch.tensor([0, ends[-1] - 1, ends[-1]]).clamp(min=0)]).to(device, torch.int32)
    found, before = torch.empty(2, len(blocks), dtype=torch.int32, device=device)
    _count[(len(blocks),)](ends, count, blocks, found, before, SEARCHES=searches)
    q, bounds = torch.empty(1, 5, 1, 16, device=device), torch.zeros(count, 4, dtype=torch.int32, device=device)
    packed = AttentionProblem.of(q, q, None, None, True, bounds=bounds, longest=(5, 5))  # sequences of no token
    assert searches == sequences.constants(packed)["SEARCHES"]
    expected = torch.searchsorted(ends, blocks, right=True)
    assert torch.equal(found, expected.int())
    assert torch.equal(before, torch.cat([ends.new_zeros(1), ends])[expected])


def test_a_launch_has_programs_for_the_blocks_that_can_exist(device):
    """Not for as many as the longest sequence would need in each, and no fewer than lengths within the bounds have."""
    rows, keys = [4000, *[1] * 63], [*[130] * 63, 4000]
    q, k = torch.empty(1, sum(rows), 2, 16, device=device), torch.empty(1, sum(keys), 2, 16, device=device)
    starts = [[0, *itertools.accumulate(lengths)][:-1] for lengths in (rows, keys)]
    bounds = torch.tensor([*zip(starts[0], rows, starts[1], keys, strict=True)], dtype=torch.int32, device=device)
    problem = AttentionProblem.of(q, k, None, None, True, bounds=bounds, longest=(4000, 4000))
    found = sequences.find(problem, bounds)
    for lengths, ends, most in ((rows, found.ends[0], found.row_blocks), (keys, found.ends[1], found.token_blocks)):
        blocks = [math.ceil(length / 128) for length in lengths]
        assert ends.tolist() == [*itertools.accumulate(blocks)]
        assert sum(blocks) <= most <= sum(blocks) + 64 + 15
