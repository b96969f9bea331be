"""Launches of the backward: buffers, descriptors, grids."""

import functools
import math

import torch
from torch import Tensor

from decayattn.backends.hopper import config
from decayattn.backends.hopper.backward.kernel import BackwardDecay, gradients_kernel
from decayattn.backends.hopper.backward.row_terms import largest_kernel, row_terms_kernel, unpack_dq_kernel
from decayattn.backends.hopper.common import descriptors, tile_table
from decayattn.backends.hopper.common.call import Modes, heads_together, limits_of, source_of
from decayattn.backends.hopper.common.fragments import FACTORS, FRAGMENT_COLUMNS, FRAGMENT_ROWS, PART
from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import sequences as sequence_blocks
from decayattn.backends.planning import skipping
from decayattn.backends.runtime import launching, tma
from decayattn.backends.runtime.integers import cdiv
from decayattn.backends.runtime.strided import contiguous_like, strided, uninitialised
from decayattn.backends.tiles import bf16_splits
from decayattn.problem import AttentionProblem, GradientRequest, Gradients, Inputs, Saved

# rows of a program of row_terms_kernel; divides every query tile
_ROW_TERMS_BLOCK = 32


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, saved: Saved, d_out: Tensor, d_lse: Tensor | None,
    requested: GradientRequest, dq: Tensor | None = None,
) -> Gradients:
    """Return the gradients of q, k, v and a scale per row, and as requested of log_decay.

    The forward does not support a bias, so there is no gradient of one.
    """
    q, k, v, log_decay, row_scale, bounds = inputs[:6]
    decay_gradient = requested.decay_gradient
    row_lse2, prefix, first_block = saved.row_lse2, saved.prefix, saved.first_block
    with launching.on_device(problem.device):
        dq = contiguous_like(q) if dq is None else dq
        dk, dv = map(contiguous_like, (k, v))
        row_scale_grad = None if row_scale is None else contiguous_like(row_lse2)
        d_row_scale = None if row_scale_grad is None else row_scale_grad.transpose(1, 2)
        if tma.unsupported(d_out) or (bounds is not None and descriptors.slices_unsupported(d_out)):
            # autograd may pass any strides (such as an expanded sum's) and any address (such as a slice's of a
            # concatenation's gradient): `contiguous` would keep the address
            d_out = d_out.clone(memory_format=torch.contiguous_format)

        given = (q, k, v, log_decay, row_scale, bounds, d_out, d_lse, out, dq)
        # float32 sums by atomics depend on their order; integer ones do not
        deterministic = torch.are_deterministic_algorithms_enabled()
        planned = skipping.is_planned(problem)
        modes = (problem, planned, decay_gradient, deterministic)
        launch = launching.of_call(problem.device, given, *modes, saved=(row_lse2, *prefix, first_block))
        sequences = sequence_blocks.find(problem, bounds, launch)
        sequence_blocks.fill_outside(problem, sequences, (dq, row_scale_grad), launch=launch)
        sequence_blocks.fill_outside(problem, sequences, (dk, dv), of_keys=True, launch=launch)
        widths = config.widths(problem.head_dim, problem.value_dim)
        dim = widths.qk
        tile = config.backward(widths)
        tiles = tile_table.build(
            problem, bounds, tile.rows, tile.keys, last_first=False, of_keys=True, launch=launch
        )
        entries = problem.batch if bounds is None else 1  # entries with tile numbers of their own
        head_rows = entries * problem.num_heads
        scalar = problem.decay == "scalar"
        constant = problem.decay == "constant"
        new = functools.partial(uninitialised, row_lse2)
        rates = log_decay.contiguous() if constant else None
        blocks = sequence_blocks.decay_blocks(problem)
        group = problem.num_heads // problem.num_kv_heads
        modes = Modes.of(problem, planned, row_scales=problem.row_scale, decay_gradient=decay_gradient, group=group)
        sides = modes.sides
        terms = new(head_rows, tiles.row_tiles, sides, tile.rows, bf16_splits.SPLIT_COLUMNS, dtype=torch.bfloat16)
        scale, row_factors, of_scales = inputs.scale, None, None
        if row_scale is not None:
            row_factors = strided(row_scale), new(head_rows, tiles.row_tiles, sides, FACTORS.value, tile.rows)
            of_scales = strided(q), strided(row_scale), row_scale_grad
        # terms have LSE₂ divided by this scale, which products are multiplied by
        score_scale = 1.0 if row_scale is not None else scale / math.log(2)
        columns = FRAGMENT_COLUMNS.value
        dq_fragments = new(head_rows * tiles.row_tiles * tile.rows * dim // columns, columns)
        row_sums = contiguous_like(row_lse2) if decay_gradient and scalar else None
        kv_heads = entries * problem.num_kv_heads
        units, added_dq, added_sums = None, dq_fragments, row_sums
        if deterministic:
            largest = new(problem.batch, problem.num_kv_heads, 2).zero_()
            launch(
                largest_kernel, tiles.key_tiles * kv_heads, strided(k), strided(v), largest, tiles.keys,
                problem.key_length, tiles.key_tiles, problem.num_kv_heads, KEYS=tile.keys, D=dim,
                HEAD_DIM=problem.head_dim, VALUE_DIM=problem.value_dim, num_warps=4,
            )
            units, added_dq = new(*row_lse2.shape, dtype=torch.int32), dq_fragments.view(torch.int32)
            added_sums = None if row_sums is None else row_sums.view(torch.int32)
        # bytes of a head of keys: q and dO of its group, and dq in float32
        rows_size = problem.longest_query * group * dim * (2 * problem.dtype.itemsize + 4)
        together = heads_together(kv_heads, rows_size, minimum=cdiv(config.MIN_CHUNK_TILES, tiles.key_tiles))
        counters = new(cdiv(kv_heads, together), dtype=torch.int32)
        launch(
            row_terms_kernel, tiles.row_tiles * tile.rows // _ROW_TERMS_BLOCK * head_rows,
            strided(out), strided(d_out), strided(d_lse), row_lse2, terms, row_factors,
            (row_sums, dq_fragments, counters, (units, largest) if deterministic else None), tiles.rows,
            (rates, prefix.beta, prefix.base, problem.key_length, blocks) if sides == 2 else None,
            -1.0 / score_scale, problem.query_length, tiles.row_tiles, problem.num_heads, head_rows - together * group,
            counters.numel(),
            TRAITS=(dim, problem.value_dim, tile.rows, _ROW_TERMS_BLOCK, problem.decay, sides, group), num_warps=4,
            launch_pdl=deterministic,
        )

        mirror = skipping.last_granules(problem, first_block, sequences, launch) if modes.planned else first_block
        source = source_of(problem)
        column_sums = contiguous_like(prefix.beta) if decay_gradient and scalar else None
        rate_sums = None
        if decay_gradient and constant:
            rate_sums = new(problem.batch, problem.num_heads, blocks, 2)
            if bounds is not None or tile.common_keys:
                rate_sums.zero_()  # there may be more blocks than tiles
        decay_tensors = BackwardDecay(
            rates, prefix.beta, prefix.base, prefix.last_reset, prefix.next_reset, mirror,
            added_sums, column_sums, rate_sums,
        )
        launch(
            gradients_kernel, min(tiles.key_tiles * kv_heads, launching.multiprocessors(problem.device)),
            source(q, tile.rows, tile.columns), source(k, config.WARPGROUP_ROWS, tile.columns),
            source(v, config.WARPGROUP_ROWS, widths.v), source(d_out, tile.rows, widths.v),
            descriptors.columns(terms, tile.rows),
            source(dk, config.WARPGROUP_ROWS, tile.dk_columns), source(dv, config.WARPGROUP_ROWS, widths.v),
            added_dq if tile.blocks > 1 or tile.common_keys else descriptors.plain(added_dq, FRAGMENT_ROWS.value),
            descriptors.plain(dq_fragments, tile.zero_lines), units,
            decay_tensors, (row_lse2 if tiles.keys is None else tiles.keys, counters),
            scale if row_factors is None else descriptors.plain(row_factors[1], 1), *limits_of(problem),
            problem.query_length, problem.key_length, blocks, tiles.row_tiles, tiles.key_tiles, entries,
            problem.num_heads, together, MODE_VALUES=modes.values, TILE_VALUES=tile.values, num_warps=4,
            maxnreg=tile.launch_registers, launch_pdl=True,
        )

        dq_parts = tiles.row_tiles * (tile.rows // PART.value) * (dim // PART.value)
        launch(
            unpack_dq_kernel, dq_parts * head_rows // (1 if row_scale is None else dim // PART.value),
            added_dq, dq, tiles.rows, dq.stride(), scale, of_scales,
            units, added_sums if deterministic else None, problem.query_length, tiles.row_tiles,
            problem.num_heads, D=dim, HEAD_DIM=problem.head_dim, ROWS=tile.rows,
            num_warps=4 if row_scale is None else 8, launch_pdl=True,
        )

        d_log_decay = None
        if decay_gradient and scalar:
            d_log_decay = decay_prefix.gradient(problem, prefix, row_sums, column_sums, log_decay, sequences, launch)
        elif decay_gradient:
            d_log_decay = rate_sums.sum((0, 2, 3), dtype=torch.float64).to(log_decay.dtype)
        return Gradients(dq, dk, dv, d_log_decay, d_row_scale, None)
