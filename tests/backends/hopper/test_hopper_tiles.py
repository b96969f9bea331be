"""Parts of the Hopper kernels around the attention: tables of tiles, preparation and completion, the copy engine's
addresses. Plain Triton, so that it runs everywhere."""

import itertools
import math

import pytest
import torch
from pairwise import pairwise

from decayattn.backends.hopper import backend as hopper
from decayattn.backends.hopper import config
from decayattn.backends.hopper.backward import launch as launch_backward
from decayattn.backends.hopper.backward.row_terms import RowDecay, RowTermsTraits, row_terms_kernel, unpack_dq_kernel
from decayattn.backends.hopper.common import descriptors, tile_table
from decayattn.backends.hopper.common.fragments import FACTORS
from decayattn.backends.hopper.forward import launch
from decayattn.backends.planning.sequences import decay_blocks
from decayattn.backends.runtime import launching, tma
from decayattn.backends.runtime.strided import strided
from decayattn.backends.tiles import bf16_splits
from decayattn.problem import AttentionProblem

HEADS, DIM = 2, 40
# of the kernels, which fill up tiles
WIDTH = 64
PACKINGS = [
    ([3, 0, 333, 1, 130], None),
    ([256], [70]),
    ([20, 0, 7, 300, 1, 0, 40], [5, 4, 0, 33, 129, 0, 256]),
    ([0, 0], None),
    ([1] * 150, [2] * 150),  # more than a program counts at once
]


def packed(device, rows, keys=None) -> tuple[AttentionProblem, torch.Tensor]:
    """Sequences of so many rows and keys, and five of each that belong to none."""
    columns = []
    for lengths in (rows, keys or rows):
        columns += [[0, *itertools.accumulate(lengths)][:-1], lengths]
    bounds = torch.tensor(columns, dtype=torch.int32, device=device).T.contiguous()
    q, v = (torch.empty(1, sum(n) + 5, HEADS, DIM, dtype=torch.float16, device=device) for n in (rows, keys or rows))
    return AttentionProblem.of(q, v, None, None, True, (-1, -1), bounds, (max(rows), max(keys or rows))), bounds


def padded(device) -> tuple[AttentionProblem, torch.Tensor]:
    bounds = torch.tensor([[0, 40, 3, 200], [7, 300, 0, 0], [100, 0, 5, 9], [5, 150, 0, 129]], dtype=torch.int32)
    q, v = (torch.empty(4, n, HEADS, DIM, dtype=torch.float16, device=device) for n in (310, 210))
    return AttentionProblem.of(q, v, None, None, True, (-1, -1), bounds), bounds.to(device)


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


@pytest.mark.parametrize("tile", [64, 128, 192])
@pytest.mark.parametrize("lengths", [*PACKINGS, None])
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


def row_alpha(decay: RowDecay, kind: str, line: list[int], inside: int) -> torch.Tensor:
    """α (H, rows) of a tile's rows minus that at their reference, the first row of their 128."""
    rates, beta, base = decay.rates, decay.beta, decay.base
    start, length, tokens, entry, _, first_token, first_block, _ = line
    position = torch.arange(start, start + inside) + tokens - length
    reference = start // 128 * 128 + tokens - length
    if kind == "constant":
        return rates.double()[:, None] / math.log(2) * (position - reference).to(rates.device)
    position = position.clamp(min=0).to(rates.device)
    at, origin = first_block + position // 128, first_block + max(reference, 0) // 128
    return base[entry, :, at] - base[entry, :, origin, None] + beta[entry, :, first_token + position]


@pytest.mark.parametrize(
    ("lengths", "rows", "decay"), pairwise([*PACKINGS[:3], None], [64, 128], ["none", "constant", "scalar"])
)
def test_what_stands_around_the_gradients(lengths, rows, decay, device):
    """Row terms in the tiles of a table, of one side or two, zeros that are added to, and dq back in its place."""
    problem, bounds = padded(device) if lengths is None else packed(device, *lengths)
    axes = (problem.batch, problem.query_length)
    out, d_out = torch.randn(2, *axes, HEADS, DIM, device=device).half()
    d_lse, row_lse2 = torch.randn(2, axes[0], HEADS, axes[1], device=device)
    for part in (0, 5):
        row_lse2[..., part::31] = torch.inf  # rows that see nothing
    tiles = tile_table.build(problem, bounds, rows, 128, last_first=False, of_keys=True)
    rates = -torch.rand(HEADS, device=device)
    beta = -100 * torch.rand(axes[0], HEADS, problem.key_length, device=device)
    base = -1e4 * torch.rand(axes[0], HEADS, decay_blocks(problem), dtype=torch.float64, device=device)
    of_rows = RowDecay(rates, beta, base, problem.key_length, base.shape[-1])
    sides = 1 if decay == "none" else 2
    terms = row_lse2.new_empty(HEADS, tiles.row_tiles, sides, rows, bf16_splits.SPLIT_COLUMNS, dtype=torch.bfloat16)
    fragments = row_lse2.new_full((HEADS * tiles.row_tiles * rows * WIDTH // 256, 256), 7)
    row_sums = torch.empty_like(row_lse2)
    counters = torch.full([4], 7, dtype=torch.int32, device=device)
    block = launch_backward._ROW_TERMS_BLOCK
    # once with one scale, and once with one per row
    scales = torch.randn(HEADS, *axes, device=device).movedim(0, 2)
    factors = row_lse2.new_empty(*terms.shape[:3], FACTORS.value, rows)
    terms_of_scales = torch.empty_like(terms)
    both = (terms, None, -8.0), (terms_of_scales, (strided(scales), factors), -1.0)
    for own_terms, row_factors, score_factor in both:
        row_terms_kernel[(tiles.row_tiles * rows // block * HEADS,)](
            strided(out), strided(d_out), strided(d_lse), row_lse2, own_terms, row_factors,
            (row_sums, fragments, counters), tiles.rows, of_rows if sides == 2 else None, score_factor,
            problem.query_length, tiles.row_tiles, HEADS, 1, 3,
            TRAITS=RowTermsTraits(WIDTH, DIM, rows, block, decay, sides),
        )

    assert counters.tolist() == [0, 0, 0, 7]
    delta = (out.float() * d_out.float()).sum(-1).transpose(1, 2) - d_lse
    delta = torch.where(row_lse2 < torch.inf, delta, 0.0)
    fragments = fragments.view(HEADS, tiles.row_tiles, -1)
    dq = torch.full_like(out, 7)
    expected = dq.clone()
    gradient = torch.randn(HEADS, tiles.row_tiles, rows, WIDTH, device=device)
    for n, line in enumerate(lines(problem, bounds, rows, False, False)):
        start, length, _, entry, first_row, *_ = line
        inside, here = min(rows, length - start), slice(first_row + start, first_row + min(start + rows, length))
        here_lse2 = row_lse2[entry, :, here].double()
        sees = here_lse2 < torch.inf
        for side in range(sides):
            columns = terms[:, n, side].double()
            splits = bf16_splits.SPLITS
            added, taken = columns[..., :splits].sum(-1), columns[..., splits : 2 * splits].sum(-1)
            if sides == 1:
                assert torch.equal(added[:, :inside][sees], -8.0 * here_lse2[sees])
            else:
                alpha = row_alpha(of_rows, decay, line, inside)
                expected_terms = -8.0 * (here_lse2 + alpha * (-1, 1)[side])
                torch.testing.assert_close(added[:, :inside][sees], expected_terms[sees], rtol=1e-6, atol=2e-4)
            torch.testing.assert_close(-taken[:, :inside], delta[entry, :, here].double(), rtol=1e-5, atol=1e-4)
            # finite, and far below all scores
            assert (added[:, :inside][~sees] < -1e38).all()
            assert (added[:, inside:] < -1e38).all()
            assert added.isfinite().all()
            assert (taken[:, inside:] == 0).all()
            assert (columns[..., 2 * bf16_splits.SPLITS :] == 0).all()
            own_scale, own_lse2 = factors[:, n, side].unbind(1)
            torch.testing.assert_close(own_scale[:, :inside], scales[entry, here].mT / math.log(2))
            seen = added > -1e38
            torch.testing.assert_close(8.0 * own_lse2[seen].double(), added[seen], rtol=1e-6, atol=2e-4)
            assert (own_lse2[~seen] < -1e38).all()
            assert (terms_of_scales[:, n, side, :, :splits] == 0).all()
            assert torch.equal(terms_of_scales[:, n, side, :, splits:], terms[:, n, side, :, splits:])
        assert (fragments[1:, n] == 0).all()
        assert (fragments[0, n] == 7).all()
        assert (row_sums[entry, :, here] == 0).all()
        expected[entry, here] = (0.5 * gradient[:, n, :inside, :DIM]).transpose(0, 1).half()

    # as fragments.to_fragments leaves a part of 64 × 64
    pieces = gradient.view(HEADS, tiles.row_tiles, rows // 64, 4, 2, 8, 8, 4, 2)
    fragments.copy_(pieces.permute(0, 1, 2, 6, 3, 5, 7, 4, 8).reshape(fragments.shape))
    unpack_dq_kernel[(tiles.row_tiles * rows // 64 * HEADS,)](
        fragments, dq, tiles.rows, dq.stride(), 0.5, None, problem.query_length, tiles.row_tiles, HEADS, D=WIDTH,
        HEAD_DIM=DIM, ROWS=rows,
    )
    assert torch.equal(dq, expected)  # and nothing outside was written
    q, d_scales = torch.randn_like(out), torch.full_like(row_lse2, 7)
    unpack_dq_kernel[(tiles.row_tiles * rows // 64 * HEADS,)](
        fragments, dq, tiles.rows, dq.stride(), 0.5, (strided(q), strided(scales), d_scales), problem.query_length,
        tiles.row_tiles, HEADS, D=WIDTH, HEAD_DIM=DIM, ROWS=rows,
    )
    expected_scales = torch.full_like(d_scales, 7)
    for n, line in enumerate(lines(problem, bounds, rows, False, False)):
        start, length, _, entry, first_row, *_ = line
        inside, here = min(rows, length - start), slice(first_row + start, first_row + min(start + rows, length))
        own = gradient[:, n, :inside, :DIM].transpose(0, 1)
        expected[entry, here] = (own * scales[entry, here][..., None]).half()
        expected_scales[entry, :, here] = (own * q[entry, here].float()).sum(-1).mT
    assert torch.equal(dq, expected)
    torch.testing.assert_close(d_scales, expected_scales, rtol=1e-5, atol=1e-4)


def test_heads_together(monkeypatch):
    monkeypatch.setattr(config, "CACHE_BYTES", 1000)
    assert [launch.heads_together(12, size) for size in (50, 84, 130, 200, 333, 999, 1001)] == [12, 6, 6, 4, 3, 1, 1]
    assert launch.heads_together(12, 500, sharing=3) == 6
    assert launch.heads_together(12, 1001, sharing=3) == 3
    assert launch.heads_together(7, 200) == 4
    assert launch.heads_together(7, 0) == 7
    assert launch.heads_together(12, 1001, minimum=6) == 6
    assert launch.heads_together(12, 1001, minimum=5) == 4
    assert launch.heads_together(12, 1001, sharing=3, minimum=5) == 6
    assert launch.heads_together(3, 1001, minimum=32) == 3
    for heads, most in itertools.product((1, 2, 521, 512, 1046, 70_001), (1, 2, 3, 7, 40, 512)):
        together = launch.heads_together(heads, 1000 // most)
        most = max(1, 1000 // (1000 // most))
        # prime or not, no fewer than half of those that fit, and as few chunks as can be
        assert min(heads, -(-most // 2)) <= together <= most
        assert -(-heads // together) == -(-heads // most)


def test_what_the_copy_engine_can_address(device):
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


@pytest.mark.parametrize(
    ("length", "dims", "expected"),
    [(1024, (128, 128), False), (4096, (128, 128), True), (64, (256, 256), True), (64, (64, 136), True)],
)
def test_few_tokens_are_left_to_others_up_to_128_columns(monkeypatch, length, dims, expected):
    monkeypatch.setattr(launching, "multiprocessors", lambda device: 132)
    q, v = (torch.empty(1, length, 8, dim, dtype=torch.bfloat16) for dim in dims)
    assert hopper.is_profitable(AttentionProblem.of(q, v, None, None, True, (-1, -1))) == expected


def test_gpus_of_another_make_are_refused(monkeypatch):
    """Though they may have the capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    unavailable, gpu = hopper.unavailable.__wrapped__, torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert unavailable(torch.bfloat16, gpu) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "not with ROCm" in unavailable(torch.bfloat16, gpu)
