"""From tensors to the forward's launches: buffers, descriptors, grid."""

import functools
import math

import torch
import triton
from torch import Tensor

from decayattn.backends import COMPILER_OPTIONS
from decayattn.backends import prefix as decay_prefix
from decayattn.backends.hopper import config, descriptors
from decayattn.backends.hopper.forward import forward_kernel
from decayattn.backends.prefix import DecayPrefix
from decayattn.problem import AttentionProblem


def forward(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float,
    places: None = None, bias: None = None,
) -> tuple[Tensor, Tensor, Tensor, DecayPrefix]:  # fmt: skip
    """out (B, T_q, H, D_v), lse (B, H, T_q); for the backward the row references (B, H, T_q) and the decay prefix."""
    with torch.cuda.device(problem.device):
        out = q.new_empty(problem.batch, problem.query_length, problem.num_heads, problem.value_dim)
        lse = q.new_empty(problem.batch, problem.num_heads, problem.query_length, dtype=torch.float32)
        row_references = torch.empty_like(lse)
        if 0 in (problem.batch, problem.query_length, problem.key_length):
            empty_rows = lse.fill_(-torch.inf), row_references.fill_(torch.inf)
            return out.zero_(), *empty_rows, decay_prefix.allocate(problem, q)
        schedule = config.forward(problem.head_dim)
        score_scale = scale / math.log(2)  # base 2
        counter = torch.empty(1, dtype=torch.int32, device=q.device)
        prefix, columns = _decay(problem, q, log_decay, score_scale, counter)
        q_desc = descriptors.tokens(q, config.WARPGROUP_ROWS)
        row_tiles = triton.cdiv(problem.query_length, schedule.rows)
        items = row_tiles * problem.batch * problem.num_heads
        programs = min(items, _multiprocessors(problem.device))
        forward_kernel[(programs,)](
            q_desc, descriptors.tokens(k, config.KEY_TILE), descriptors.tokens(v, config.KEY_TILE),
            q_desc if columns is None else descriptors.matrix(columns, config.KEY_TILE),
            descriptors.tokens(out, config.WARPGROUP_ROWS),
            lse, row_references, log_decay if problem.decay == "constant" else lse,
            prefix.local, prefix.base, prefix.last_reset, counter,
            score_scale, log_decay.stride(0) if problem.decay == "constant" else 0,
            items, row_tiles, problem.num_heads, problem.num_heads // problem.num_kv_heads, _heads_together(problem),
            problem.query_length, problem.key_length,
            D=problem.head_dim, KIND=problem.decay, WARPGROUPS=schedule.warpgroups, STAGES=schedule.stages,
            REGISTERS=schedule.registers,
            num_warps=4, maxnreg=schedule.launch_registers, **COMPILER_OPTIONS,
        )  # fmt: skip
        return out, lse, row_references, prefix


def _decay(
    problem: AttentionProblem, q: Tensor, log_decay: Tensor | None, score_scale: float, counter: Tensor
) -> tuple[DecayPrefix, Tensor | None]:
    """The prefix, and the decay of the keys as columns of the products: −α_j / scale, relative to the key's block.

    Zeroes the counter on the way.
    """
    if problem.decay == "scalar":
        blocks = triton.cdiv(problem.key_length, decay_prefix.DECAY_BLOCK)
        columns = q.new_empty(
            problem.batch, problem.num_heads, blocks, decay_prefix.DECAY_BLOCK, decay_prefix.BIAS_COLUMNS,
            dtype=torch.bfloat16,
        )  # fmt: skip
        return decay_prefix.build(problem, log_decay, columns, -1.0 / score_scale, counter), columns
    prefix = decay_prefix.allocate(problem, q)
    if problem.decay == "constant":
        return prefix, decay_prefix.constant_columns(log_decay, -1.0 / score_scale, counter)
    counter.zero_()
    return prefix, None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _heads_together(problem: AttentionProblem) -> int:
    """Query heads whose rows are worked at together: a divisor of all of them, with keys and values that fit the L2."""
    group = problem.num_heads // problem.num_kv_heads
    size = problem.key_length * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    together = max(1, config.CACHE_BYTES // size * group)
    heads = problem.batch * problem.num_heads
    return next(n for n in range(min(together, heads), 0, -1) if heads % n == 0)
