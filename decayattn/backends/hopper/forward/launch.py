"""Launches of the forward: buffers, descriptors, grid."""

import functools
import math

import torch
from torch import Tensor

from decayattn.backends.hopper import config
from decayattn.backends.hopper.common import descriptors, tile_table
from decayattn.backends.hopper.common.call import Modes, heads_together, limits_of, source_of
from decayattn.backends.hopper.forward.kernel import forward_kernel
from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import sequences as sequence_blocks
from decayattn.backends.planning import skipping
from decayattn.backends.planning.sequences import Sequences
from decayattn.backends.runtime import launching, outputs
from decayattn.backends.runtime.launching import Launch
from decayattn.backends.runtime.strided import strided, uninitialised
from decayattn.problem import AttentionProblem, DecayPrefix, Inputs, Precomputed, Saved


def forward(
    problem: AttentionProblem, inputs: Inputs, with_lse: bool = False, precomputed: Precomputed | None = None
) -> tuple[Tensor, Tensor | None, Saved]:
    """Return out (B, T_q, H, D_v), lse (B, H, T_q) or None, and the tensors that the backward reads."""
    q, k, v, log_decay, row_scale, bounds = inputs[:6]
    with launching.on_device(problem.device):
        results = outputs.allocate(problem, q, with_lse, precomputed)
        out, row_lse2, lse = results
        sink = None if inputs.sink is None else inputs.sink.contiguous()
        given = (q, k, v, log_decay, row_scale, bounds, sink, None if precomputed is None else out)
        terms = None if precomputed is None else precomputed.terms
        planned = skipping.is_planned(problem)
        launch = launching.of_call(problem.device, given, problem, planned, with_lse, terms is None)
        sequences = sequence_blocks.find(problem, bounds, launch)
        sequence_blocks.fill_outside(problem, sequences, results, outputs.OF_NO_KEY, launch=launch)
        widths = config.widths(problem.head_dim, problem.value_dim)
        schedule = config.forward(widths)
        # of all scores, in base 2; the kernel applies scales of rows to its products
        score_scale = 1.0 if row_scale is not None else inputs.scale / math.log(2)
        prefix, splits, bases, counter = _decay(problem, q, log_decay, score_scale, sequences, launch)
        # the plan's launches start while the launch before ends
        dependent = functools.partial(launch, launch_pdl=True)
        first_block = skipping.plan(problem, q, k, log_decay, inputs.any_scale, prefix, sequences, dependent, terms)
        tiles = tile_table.build(
            problem, bounds, schedule.rows, config.KEY_TILE, last_first=True, of_keys=False, launch=launch
        )
        source = source_of(problem)
        q_desc = source(q, config.WARPGROUP_ROWS, widths.qk)
        head_rows = problem.num_heads * (problem.batch if bounds is None else 1)
        work_tiles = tiles.row_tiles * head_rows
        group = problem.num_heads // problem.num_kv_heads
        keys_and_values = problem.longest_key * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
        rates = log_decay.contiguous() if problem.decay == "constant" else None
        decay_tensors = (
            row_lse2 if rates is None else rates, prefix.beta, bases, prefix.last_reset, prefix.next_reset, first_block,
        )
        launch(
            forward_kernel, min(work_tiles, launching.multiprocessors(problem.device)),
            q_desc, source(k, schedule.keys, widths.qk), source(v, schedule.keys, widths.v),
            None if splits is None else descriptors.key_splits(splits), source(out, config.WARPGROUP_ROWS, widths.v),
            (lse, row_lse2), decay_tensors, sink, counter, row_lse2 if tiles.rows is None else tiles.rows,
            (score_scale, strided(row_scale)), *limits_of(problem), work_tiles, tiles.row_tiles, problem.num_heads,
            group, heads_together(head_rows, keys_and_values, group), problem.query_length, problem.key_length,
            sequence_blocks.decay_blocks(problem), first_block.shape[-1],
            MODE_VALUES=Modes.of(problem, planned, packed=problem.layout == "packed").values,
            TILE_VALUES=schedule.values, num_warps=4, maxnreg=schedule.launch_registers, launch_pdl=True,
        )
        return out, lse, Saved(row_lse2, *prefix, first_block)


def _decay(
    problem: AttentionProblem, q: Tensor, log_decay: Tensor | None, score_scale: float, sequences: Sequences | None,
    launch: Launch,
) -> tuple[DecayPrefix, Tensor | None, Tensor, Tensor]:
    """Prepare the decay: the prefix, −α_j / scale of the keys, split for the products, and the bases of the blocks.

    α_j is relative to the key's block. The bases are read only if the decay is per token. Also zeroes the counter.
    """
    counter = uninitialised(q, 1, dtype=torch.int32)
    if problem.decay == "scalar":
        split = decay_prefix.allocate_split(problem, q)
        prefix = decay_prefix.build(problem, log_decay, split, -1.0 / score_scale, counter, sequences, launch)
        return prefix, *split, counter
    prefix = decay_prefix.allocate(problem, q)
    if problem.decay == "constant":
        splits = decay_prefix.constant_split(log_decay, -1.0 / score_scale, counter, launch)
        return prefix, splits, prefix.beta, counter
    return prefix, None, prefix.beta, counter.zero_()
