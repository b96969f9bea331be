"""Tables of tiles of the Hopper kernels, and addresses of the copy engine. Plain Triton, which runs everywhere."""

import itertools
import json

import pytest
import torch

from decayattn.backends.hopper import config
from decayattn.backends.hopper.backward import launch as launch_backward
from decayattn.backends.hopper.backward.row_terms import row_terms_kernel
from decayattn.backends.hopper.common import descriptors, tile_table
from decayattn.backends.hopper.common.call import Modes
from decayattn.backends.hopper.forward import launch
from decayattn.backends.runtime import tma
from decayattn.backends.runtime.strided import strided
from decayattn.backends.tiles.bf16_splits import SPLIT_COLUMNS, SPLITS
from decayattn.problem import AttentionProblem, Inputs

HEADS, DIM = 2, 40
PACKINGS = [
    ([3, 0, 333, 1, 130], None),
    ([256], [70]),
    ([20, 0, 7, 300, 1, 0, 40], [5, 4, 0, 33, 129, 0, 256]),
    ([0, 0], None),
    ([1] * 150, [2] * 150),  # more than a program counts at once
]


def packed(device, rows, keys=None) -> tuple[AttentionProblem, torch.Tensor]:
    """Sequences of these rows and keys, and five of each that belong to none."""
    columns = []
    for lengths in (rows, keys or rows):
        columns += [[0, *itertools.accumulate(lengths)][:-1], lengths]
    bounds = torch.tensor(columns, dtype=torch.int32, device=device).T.contiguous()
    q, v = (torch.empty(1, sum(n) + 5, HEADS, DIM, dtype=torch.float16, device=device) for n in (rows, keys or rows))
    return AttentionProblem.of(Inputs(q, v, v, bounds=bounds), True, longest=(max(rows), max(keys or rows))), bounds


def padded(device) -> tuple[AttentionProblem, torch.Tensor]:
    bounds = torch.tensor([[0, 40, 3, 200], [7, 300, 0, 0], [100, 0, 5, 9], [5, 150, 0, 129]], dtype=torch.int32)
    q, v = (torch.empty(4, n, HEADS, DIM, dtype=torch.float16, device=device) for n in (310, 210))
    return AttentionProblem.of(Inputs(q, v, v, bounds=bounds), True), bounds.to(device)


def lines(problem: AttentionProblem, bounds: torch.Tensor, tile: int, of_keys: bool, last_first: bool) -> list[list]:
    """Expected lines of a table of tiles of rows (or keys)."""
    found, row_tile = [], 0
    longest_first = sorted(enumerate(bounds.tolist()), key=lambda sequence: -sequence[1][3])
    for n, (first_row, rows, first_token, tokens) in longest_first:
        entry, first_block = (0, first_token // 128 + n) if problem.layout == "packed" else (n, 0)
        starts = list(range(0, tokens if of_keys else rows if tokens else 0, 128 if of_keys else tile))
        for start in reversed(starts) if last_first else starts:
            found.append([start, rows, tokens, entry, first_row, first_token, first_block, row_tile])
        row_tile += -(-rows // tile) if tokens else 0
    return found


@pytest.mark.parametrize(("lengths", "tile"), [
    (PACKINGS[0], 64), (PACKINGS[1], 64), (PACKINGS[2], 64), (PACKINGS[2], 128), (PACKINGS[2], 192), (PACKINGS[3], 192),
    (PACKINGS[4], 128), (None, 128), (None, 192),
])
def test_tables_of_tiles(lengths, tile, device):
    problem, bounds = padded(device) if lengths is None else packed(device, *lengths)
    for last_first, of_keys in ((True, False), (False, True)):
        tiles = tile_table.build(problem, bounds, tile, 128, last_first=last_first, of_keys=of_keys)
        tables = [(tiles.rows, tiles.row_tiles, lines(problem, bounds, tile, False, last_first))]
        if of_keys:
            tables.append((tiles.keys, tiles.key_tiles, lines(problem, bounds, tile, True, False)))
        assert (tiles.keys is not None) == of_keys
        for table, bound, expected in tables:
            assert table[0, 0] == len(expected) <= bound == len(table) - 1
            assert table[1 : 1 + len(expected)].tolist() == expected


def test_offsets_out_of_order_have_no_tiles(device):
    """Offsets out of order are the caller's fault, but must not reach beyond a table."""
    problem, _ = packed(device, [100] * 4)
    bounds = torch.tensor([[0, 400, 0, 400]] * 4, dtype=torch.int32, device=device)
    tiles = tile_table.build(problem, bounds, 64, 128, last_first=False, of_keys=True)
    assert tiles.rows[0, 0] == tiles.keys[0, 0] == 0


def test_rows_without_a_key_have_no_terms(device):
    """Nor rows past the end: an LSE₂ far below all scores, and no Δ for any gradient of lse. Other tests are of rows
    with keys, by the results."""
    rows, tile, block = 70, 128, launch_backward._ROW_TERMS_BLOCK
    out, d_out = torch.randn(2, 1, rows, HEADS, DIM, device=device).half()
    d_lse, row_lse2 = torch.randn(2, 1, HEADS, rows, device=device)
    row_lse2[..., ::31], d_lse[..., ::31] = torch.inf, torch.nan
    terms = row_lse2.new_empty(HEADS, 1, 1, tile, SPLIT_COLUMNS, dtype=torch.bfloat16)
    counters = torch.zeros(4, dtype=torch.int32, device=device)
    zeroed = torch.empty_like(row_lse2), row_lse2.new_empty(HEADS * tile * 64), counters, None
    row_terms_kernel[(tile // block * HEADS,)](
        strided(out), strided(d_out), strided(d_lse), row_lse2, terms, None, zeroed, None, None,
        -8.0, rows, 1, HEADS, 0, 3, TRAITS=(64, DIM, tile, block, "none", 1, 1),
    )
    added, taken = terms[:, 0, 0].double()[..., : 2 * SPLITS].unflatten(-1, (2, SPLITS)).sum(-1).unbind(-1)
    seen = torch.nn.functional.pad(row_lse2[0] < torch.inf, (0, tile - rows))
    assert torch.equal(added[seen], -8.0 * row_lse2[row_lse2 < torch.inf].double())
    assert (added[~seen] < -1e38).all()
    assert added.isfinite().all()
    assert (taken[~seen] == 0).all()
    assert (taken[seen] != 0).all()


def test_heads_together(monkeypatch):
    monkeypatch.setattr(config, "CACHE_BYTES", 1000)
    for heads, size, options, expected in (
        (12, 500, dict(sharing=3), 6), (12, 1001, dict(sharing=3), 3), (7, 0, {}, 7), (12, 1001, dict(minimum=5), 4),
        (12, 1001, dict(sharing=3, minimum=5), 6), (3, 1001, dict(minimum=32), 3),
    ):
        assert launch.heads_together(heads, size, **options) == expected
    for heads, most in itertools.product((1, 2, 521, 512, 1046, 70_001), (1, 2, 3, 7, 40, 512)):
        together = launch.heads_together(heads, 1000 // most)
        most = max(1, 1000 // (1000 // most))
        # prime or not, no fewer than half of those that fit, and as few chunks as can be
        assert min(heads, -(-most // 2)) <= together <= most
        assert -(-heads // together) == -(-heads // most)


def test_copy_engine_addresses_16_bytes(device):
    """Strides that are never used, of dimensions of size 1, do not matter, and a descriptor gets others for them."""
    x = torch.empty(2, 40, 3, 64, dtype=torch.float16, device=device)
    odd = torch.empty(2 * 40 * 3 * 65, dtype=torch.float16, device=device)
    addressed = [x, x.transpose(1, 2), x[:, ::2], x[..., :24], odd[:64].as_strided((1, 1, 1, 64), (7, 5, 3, 1))]
    assert [tma.unsupported(y) for y in addressed] == [None] * 5
    refused = {
        "address": odd[1 : 1 + 64 * 4].view(1, 4, 1, 64),
        "last dimension": x[..., ::2],
        "stride 195": odd.view(2, 40, 3, 65)[..., :64],
        "stride 0": x[:, :1].expand(2, 40, 3, 64),
    }
    for reason, y in refused.items():
        assert reason in tma.unsupported(y)
    assert tma.usable_strides(x.shape, x.stride()) == list(x.stride())
    assert tma.usable_strides((1, 40, 1, 24), (3, 64, 5, 7)) == [384, 64, 384, 1]


@pytest.mark.parametrize("shape", [(1, 50, 3, 64), (3, 50, 1, 128), (2, 1, 2, 64), (1, 1, 1, 64)])
def test_slices_end_where_they_say(shape, device):
    """The copy engine's rule: an element outside of any axis is none, else its address is the sum of the strides."""
    x = torch.empty(*shape[:2], 2, *shape[2:], dtype=torch.float16, device=device)[:, :, 1]
    description = descriptors.slices(x, 64, 128)
    end, tokens = descriptors.SLICE_END, shape[0] * shape[1]
    assert all(0 < stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in description.strides[:-1])
    for first, length in {(0, tokens), (0, 0), (tokens // 3, tokens // 2), (tokens - 1, 1)}:
        for head, token in itertools.product(range(shape[2]), {0, length // 2, length, length + 63}):
            at = (end, first + length, head, end - length + token, 0)
            inside = all(0 <= i < size for i, size in zip(at, description.shape, strict=True))
            assert inside == (token < length)
            if inside:
                element = sum(i * stride for i, stride in zip(at, description.strides, strict=True))
                batch, row = divmod(first + token, shape[1])
                expected = batch * x.stride(0) + row * x.stride(1) + head * x.stride(2)
                assert 2 * element % 2**64 == 2 * expected


def test_slices_need_one_token_axis(device):
    x = torch.zeros(2, 3, 4, 64, device=device)
    assert descriptors.slices_unsupported(x) is None
    assert descriptors.slices_unsupported(x.transpose(1, 2).contiguous().transpose(1, 2)) is not None
    assert descriptors.slices_unsupported(x[:, :2]) is not None
    assert descriptors.slices_unsupported(x[:1, :2]) is None
    assert descriptors.slices_unsupported(x[:1, :1].expand(1, 2**30 - 1, 4, 64)) is None
    assert "1073741824 tokens" in descriptors.slices_unsupported(x[:1, :1].expand(1, 2**30, 4, 64))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_constants_of_kernels_are_values(dims):
    """Triton's hooks write them as JSON. Its cache of compiled kernels would not see the change of a property."""
    widths = config.widths(*dims)
    forward, backward = config.forward(widths), config.backward(widths)
    for constants in (forward, backward, Modes.of(packed("cpu", [3])[0], planned=False)):
        assert json.dumps(constants.values)
        assert not any(isinstance(x, property) for x in vars(type(constants)).values())
    assert forward.rows == forward.warpgroups * config.WARPGROUP_ROWS
    assert backward.dq_parts * 64**2 == backward.rows * widths.qk
