"""From tensors to the launches of the backward: buffers, descriptors, grids."""

import torch
import triton
from torch import Tensor

from decayattn.backends import COMPILER_OPTIONS
from decayattn.backends import prefix as decay_prefix
from decayattn.backends.hopper import config, descriptors
from decayattn.backends.hopper.backward import gradients_kernel, row_terms_kernel, unpack_dq_kernel
from decayattn.backends.prefix import DecayPrefix
from decayattn.problem import AttentionProblem

# rows of a program of row_terms_kernel; divides every query tile
_ROW_TERMS_BLOCK = 64
# dq is added up in parts of 64 × 64, each as 16 × 256 fragments
_PART = 64
_FRAGMENTS = (16, 256)
# expected by the kernels where a problem has no such tensor; never read
_NO_STRIDES = (0, 0, 0)


def backward(
    problem: AttentionProblem, d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    log_decay: Tensor | None, scale: float, places: None, bias: None, out: Tensor, row_references: Tensor,
    prefix: DecayPrefix, decay_gradient: bool, bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:  # fmt: skip
    """dq, dk, dv and dλ (shape of log_decay; None if not asked for); the forward refuses a scale per row and a bias, so
    they have no gradient here."""
    with torch.cuda.device(problem.device):
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if 0 in (problem.batch, problem.query_length, problem.key_length):
            d_log_decay = torch.zeros_like(log_decay) if decay_gradient else None
            return dq.zero_(), dk.zero_(), dv.zero_(), d_log_decay, None, None
        if descriptors.misfit(d_out):
            d_out = d_out.contiguous()  # autograd may hand over any strides, such as an expanded sum's

        tile = config.backward(problem.head_dim)
        head_rows = problem.batch * problem.num_heads
        row_tiles = triton.cdiv(problem.query_length, tile.rows)
        row_blocks = row_tiles * tile.rows // _ROW_TERMS_BLOCK
        scalar = problem.decay == "scalar"
        constant = problem.decay == "constant"
        new, unused = row_references.new_empty, row_references
        terms = new(head_rows, row_tiles, 2, tile.rows)
        dq_fragments = new(head_rows * row_tiles * tile.rows * problem.head_dim // _FRAGMENTS[1], _FRAGMENTS[1])
        row_sums = torch.empty_like(row_references) if decay_gradient and scalar else unused
        row_terms_kernel[(row_blocks * head_rows,)](
            out, d_out, unused if d_lse is None else d_lse, row_references, terms, row_sums, dq_fragments,
            out.stride(), d_out.stride(), _NO_STRIDES if d_lse is None else d_lse.stride(),
            problem.query_length, problem.num_heads,
            D=problem.head_dim, ROWS=tile.rows, BLOCK_M=_ROW_TERMS_BLOCK, HAS_D_LSE=d_lse is not None,
            ROW_SUMS=decay_gradient and scalar, num_warps=4, **COMPILER_OPTIONS,
        )  # fmt: skip

        key_tiles = triton.cdiv(problem.key_length, config.KEY_TILE)
        column_sums = torch.empty_like(prefix.local) if decay_gradient and scalar else unused
        rate_sums = new(head_rows, key_tiles, 2) if decay_gradient and constant else unused
        gradients_kernel[(key_tiles * problem.batch * problem.num_kv_heads,)](
            descriptors.tokens(q, tile.rows), descriptors.tokens(k, config.WARPGROUP_ROWS),
            descriptors.tokens(v, config.WARPGROUP_ROWS), descriptors.tokens(d_out, tile.rows),
            descriptors.plain(terms, 1), descriptors.tokens(dk, config.WARPGROUP_ROWS),
            descriptors.tokens(dv, config.WARPGROUP_ROWS), descriptors.plain(dq_fragments, _FRAGMENTS[0]),
            log_decay if constant else unused, prefix.local, prefix.base, prefix.last_reset, prefix.next_reset,
            row_sums, column_sums, rate_sums, log_decay.stride(0) if constant else 0, scale,
            problem.query_length, problem.key_length, problem.num_heads,
            D=problem.head_dim, ROWS=tile.rows, STAGES=tile.stages, GROUP=problem.num_heads // problem.num_kv_heads,
            DECAY=problem.decay, DECAY_GRADIENT=decay_gradient, REGISTERS=tile.registers,
            num_warps=4, maxnreg=tile.launch_registers, **COMPILER_OPTIONS,
        )  # fmt: skip

        parts = row_tiles * (tile.rows // _PART) * (problem.head_dim // _PART)
        unpack_dq_kernel[(parts * head_rows,)](
            dq_fragments, dq, dq.stride(), scale, problem.query_length, problem.num_heads,
            D=problem.head_dim, ROWS=tile.rows, PART=_PART, num_warps=4, **COMPILER_OPTIONS,
        )  # fmt: skip

        d_log_decay = None
        if decay_gradient and scalar:
            d_log_decay = decay_prefix.gradient(problem, prefix, row_sums, column_sums, log_decay)
        elif decay_gradient:
            sums = rate_sums.view(problem.batch, problem.num_heads, -1)
            d_log_decay = sums.sum((0, 2), dtype=torch.float64).to(log_decay.dtype)
        return dq, dk, dv, d_log_decay, None, None
