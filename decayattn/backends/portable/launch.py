"""Launches of the portable attention kernels: their buffers, tiles, memory paths and grids."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import sequences as sequence_blocks
from decayattn.backends.planning import skipping
from decayattn.backends.planning.sequences import Sequences, fill_outside, programs
from decayattn.backends.portable import backward as gradients
from decayattn.backends.portable import config, kernel_args
from decayattn.backends.portable.config import TileConfig, padded
from decayattn.backends.portable.forward import forward_kernel
from decayattn.backends.portable.kernel_args import Decay, Sizes, Tiled, Window, broadcast
from decayattn.backends.runtime import launching, outputs, tma
from decayattn.backends.runtime.integers import cdiv
from decayattn.backends.runtime.strided import Strided, contiguous_like, strided, uninitialised
from decayattn.problem import AttentionProblem, DecayPrefix, GradientRequest, Gradients, Inputs, Precomputed, Saved

_ROW_TERMS_BLOCK = 64
# 16-bit values in the longest line that a product reads from shared memory
_LINE = 64
# upper bound on the programs per multiprocessor for which one launch makes both gradients: measured at 8 heads up to
# T2048, where it is still faster, by 6 % at D = 64 and 9 % at D = 128
_MOST_PROGRAMS_OF_BOTH = 4
# the same for a forward with tiles of its own: measured at 8 heads up to T1024
_MOST_PROGRAMS_OF_FEW = 1


def forward(
    problem: AttentionProblem, inputs: Inputs, with_lse: bool = False, precomputed: Precomputed | None = None
) -> tuple[Tensor, Tensor | None, Saved]:
    """Return out (B, T_q, H, D_v), lse (B, H, T_q) or None, and the tensors that the backward reads."""
    q, k, v, log_decay, row_scale, bounds, _, sink, scale = inputs
    bias = _bias_to_read(inputs)
    with launching.on_device(problem.device):
        results = outputs.allocate(problem, q, with_lse, precomputed)
        out, row_lse2, lse = results
        q, k, v = _in_lines(q), _in_lines(k), _in_lines(v)
        sink = None if sink is None else sink.contiguous()
        given = (q, k, v, log_decay, row_scale, bounds, bias, sink, None if precomputed is None else out)
        terms = None if precomputed is None else precomputed.terms
        modes = problem, skipping.is_planned(problem), None if bias is None else bias.shape, with_lse, terms is None
        launch = launching.of_call(problem.device, given, *modes)
        sequences = sequence_blocks.find(problem, bounds, launch)
        fill_outside(problem, sequences, results, outputs.OF_NO_KEY, launch=launch)
        if log_decay is not None and problem.decay == "scalar":
            prefix = decay_prefix.build(problem, log_decay, sequences=sequences, launch=launch)
        else:
            prefix = decay_prefix.allocate(problem, q)
        first_block = skipping.plan(problem, q, k, log_decay, inputs.any_scale, prefix, sequences, launch, terms)
        most = _MOST_PROGRAMS_OF_FEW * launching.multiprocessors(problem.device)
        tile = _small_tile(problem, config.arch(problem.device), most, gradients=False)
        tile = tile or _tiles(config.FORWARD, problem, q, k, v)
        fixed = _fixed(problem, tile, config.dot_precision())
        launch(
            forward_kernel, fixed.row_programs,
            *_descriptors(problem, tile, q, k, v), _tiled(tile, sequences, (v,), q, k, v), strided(out),
            (row_lse2, lse), strided(row_scale), _decay(problem, log_decay, prefix), sequences,
            skipping.as_argument(problem, first_block), fixed.window, broadcast(bias), sink, scale, fixed.sizes,
            **fixed.constants,
        )
        return out, lse, Saved(row_lse2, *prefix, first_block)


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, saved: Saved, d_out: Tensor, d_lse: Tensor | None,
    requested: GradientRequest, dq: Tensor | None = None,
) -> Gradients:
    """Return the gradients of q, k, v and a scale per row, and as requested of log_decay and bias."""
    q, k, v, log_decay, row_scale, bounds, _, sink, scale = inputs
    bias = _bias_to_read(inputs)
    decay_gradient, bias_gradient, _ = requested
    row_lse2, prefix, first_block = saved.row_lse2, saved.prefix, saved.first_block
    with launching.on_device(problem.device):
        dq = contiguous_like(q) if dq is None else dq
        dk, dv = contiguous_like(k), contiguous_like(v)
        row_scale_grad = contiguous_like(row_lse2) if problem.row_scale else None
        q, k, v, d_out = _in_lines(q), _in_lines(k), _in_lines(v), _in_lines(d_out)
        delta = contiguous_like(row_lse2)
        decay_sums = contiguous_like(row_lse2) if decay_gradient else None
        column_sums = None
        if decay_gradient and problem.decay == "scalar":
            column_sums = uninitialised(delta, *prefix.beta.shape)
        # in 16 bits, the gradient of a constant decay reads the exact sums of dS
        score_sums = sink_probability = None
        if decay_gradient and problem.decay == "constant" and q.dtype.itemsize == 2:
            score_sums = contiguous_like(row_lse2)
            sink_probability = None if sink is None else saved.sink_probability
        given = (q, k, v, log_decay, row_scale, bounds, bias, d_out, d_lse, out, dq, sink_probability)
        deterministic = torch.are_deterministic_algorithms_enabled()
        planned, bias_shape = skipping.is_planned(problem), None if bias is None else bias.shape
        modes = problem, planned, bias_shape, decay_gradient, bias_gradient, deterministic
        launch = launching.of_call(problem.device, given, *modes, saved=(row_lse2, *prefix, first_block))
        sequences = sequence_blocks.find(problem, bounds, launch)
        fill_outside(problem, sequences, (dq, row_scale_grad, decay_sums), launch=launch)
        fill_outside(problem, sequences, (dk, dv), of_keys=True, launch=launch)
        plan = mirror = skipping.as_argument(problem, first_block)
        if plan is not None:
            mirror = skipping.as_argument(problem, skipping.last_granules(problem, first_block, sequences, launch))
        launch(
            gradients.row_terms_kernel,
            problem.batch * problem.num_heads * cdiv(problem.query_length, _ROW_TERMS_BLOCK),
            strided(out), strided(d_out), strided(d_lse), row_lse2, sink_probability, delta, score_sums,
            problem.query_length, problem.num_heads, D_V=problem.value_dim, BLOCK_M=_ROW_TERMS_BLOCK,
            BLOCK_DV=padded(problem.value_dim),
        )

        row_terms = kernel_args.RowTerms(row_lse2, delta, strided(row_scale), score_sums)
        decay = _decay(problem, log_decay, prefix)
        of_keys = kernel_args.KeyGradients(strided(dk), strided(dv), column_sums)
        d_bias, shared_bias = None, False
        if bias is not None and bias_gradient:
            # an entry per score if deterministic, added up in order at the end
            full = (problem.batch, problem.num_heads, problem.query_length, problem.key_length)
            d_bias = row_lse2.new_zeros(full if deterministic else (1,) * (4 - bias.ndim) + tuple(bias.shape))
            shared_bias = d_bias.shape != full
        of_queries = kernel_args.QueryGradients(strided(dq), decay_sums, row_scale_grad, broadcast(d_bias))
        precision, most = config.dot_precision(), _MOST_PROGRAMS_OF_BOTH * launching.multiprocessors(problem.device)
        tile = _small_tile(problem, config.arch(problem.device), most, gradients=True)
        if tile is not None:
            fixed = _fixed(problem, tile, precision)
            launch(
                gradients.gradients_kernel, fixed.key_programs + fixed.row_programs,
                _tiled(tile, sequences, (), q, k, v, d_out), row_terms, decay, of_queries, of_keys, plan, mirror,
                fixed.window, scale, fixed.key_sizes, fixed.key_programs, **fixed.constants,
            )
        else:
            tile = _tiles(config.KEY_GRADIENTS, problem, q, k, v, d_out)
            fixed = _fixed(problem, tile, precision)
            launch(
                gradients.key_gradients_kernel, fixed.key_programs,
                *_descriptors(problem, tile, q, k, v, d_out), _tiled(tile, sequences, (q, d_out), q, k, v, d_out),
                row_terms, decay, of_keys, sequences, mirror, fixed.window, broadcast(bias), scale, fixed.key_sizes,
                **fixed.constants,
            )
            tile = _tiles(config.QUERY_GRADIENTS, problem, q, k, v, d_out)
            fixed = _fixed(problem, tile, precision, shared_bias)
            launch(
                gradients.query_gradients_kernel, fixed.row_programs,
                *_descriptors(problem, tile, q, k, v, d_out), _tiled(tile, sequences, (k, v), q, k, v, d_out),
                row_terms, decay, of_queries, sequences, plan, fixed.window, broadcast(bias), scale, fixed.sizes,
                **fixed.constants,
            )

        d_decay = None
        if log_decay is not None and decay_sums is not None:
            if column_sums is None:
                d_decay = decay_sums.sum((0, 2), dtype=torch.float64).to(log_decay.dtype)
            else:
                d_decay = decay_prefix.gradient(problem, prefix, decay_sums, column_sums, log_decay, sequences, launch)
        d_scale = None if row_scale_grad is None else row_scale_grad.transpose(1, 2)
        if bias is not None and d_bias is not None:
            shape = bias.shape
            d_bias = d_bias.sum_to_size((1,) * (4 - len(shape)) + shape).reshape(shape).to(bias.dtype)
        return Gradients(dq, dk, dv, d_decay, d_scale, d_bias)


def _decay(problem: AttentionProblem, log_decay: Tensor | None, prefix: DecayPrefix) -> Decay:
    if log_decay is None:
        return Decay()
    if problem.decay == "constant":
        return Decay(log_decay, log_decay.stride(0))
    return Decay(prefix=prefix)


def _tiles(kernel: config.Kernel, problem: AttentionProblem, *tiled: Tensor) -> TileConfig:
    """Tiles of a kernel that reads these tensors in tiles."""
    gpu, dim = config.arch(problem.device), max(padded(problem.head_dim), padded(problem.value_dim))
    # with a bias, ptxas serialises the matrix products of the tiles for descriptors (compiled, not measured)
    descriptors = gpu == "sm90" and not problem.bias and not any(map(tma.unsupported, tiled))
    return config.choose(kernel, gpu, dim, problem.dtype, descriptors, problem.layout != "dense")


@functools.lru_cache(launching.REMEMBERED)
def _small_tile(problem: AttentionProblem, arch: str, most_programs: int, gradients: bool) -> TileConfig | None:
    """Tile of a small problem without a bias, with sequences that fill their batch entries; None for any other problem.

    It is that of a forward, or of one launch that makes the gradients of keys and of queries side by side. If either of
    these fills the GPU alone, two launches follow one another, each with its own tiles.
    """
    if problem.layout != "dense" or problem.bias:
        return None
    dim = max(padded(problem.head_dim), padded(problem.value_dim))
    tile = config.choose_small(gradients, arch, dim, problem.dtype)
    if tile is None:
        return None
    number = programs(problem, tile.block_m, problem.num_heads, of_keys=False)
    number += programs(problem, tile.block_n, problem.num_kv_heads, of_keys=True) if gradients else 0
    return tile if number <= most_programs else None


def _widths(problem: AttentionProblem) -> tuple[int, int]:
    """Tile widths of the head and of the value dimension.

    If products read them from shared memory (16 bits), both have lines of the same length, of up to 128 bytes. k and v
    may use the same shared memory in turn, and ptxas (12.8 and 12.9: Triton 3.6 to 3.8) takes the addresses of both
    from one register, which are wrong if the lengths differ. `_in_lines` ensures that lines are along D.
    """
    head, value = padded(problem.head_dim), padded(problem.value_dim)
    line = min(max(head, value), _LINE) if problem.dtype.itemsize == 2 else 0
    return max(head, line), max(value, line)


def _in_lines(x: Tensor) -> Tensor:
    """Return a (B, T, H, D) tensor with consecutive values along D instead of along tokens: x, or a copy.

    Triton lays out a tile in shared memory in the order of the tensor. So tiles of other tensors would have lines along
    tokens, of another length than those along D (`_widths`). With D = 1, memory for two values separates the tokens.
    """
    _, of_tokens, _, of_values = x.stride()
    if of_values == 1 and of_tokens != 1:
        return x
    dim = x.shape[3]
    return x.new_empty(*x.shape[:3], max(2, dim))[..., :dim].copy_(x)


class _Fixed(NamedTuple):
    """Properties of an attention kernel's launch that follow from the problem and its tile."""

    row_programs: int
    key_programs: int
    window: Window
    sizes: Sizes
    key_sizes: Sizes
    constants: dict[str, Any]  # those that the kernel is compiled for, and options of the launch


@functools.lru_cache(launching.REMEMBERED)
def _fixed(problem: AttentionProblem, tile: TileConfig, precision: str, shared_bias: bool = False) -> _Fixed:
    packed, searches = sequence_blocks.constants(problem).values()
    width, value_width = _widths(problem)
    row_cancels = problem.causal and problem.decay != "none" and problem.dtype.itemsize == 2
    traits = kernel_args.Traits(
        packed=bool(packed), searches=searches, group=problem.num_heads // problem.num_kv_heads, d=problem.head_dim,
        d_v=problem.value_dim, block_m=tile.block_m, block_n=tile.block_n, block_d=width, block_dv=value_width,
        decay=problem.decay, causal=problem.causal, row_cancels=row_cancels, precision=precision,
        shared_bias=shared_bias,
    )
    lengths = problem.query_length, problem.key_length
    return _Fixed(
        programs(problem, tile.block_m, problem.num_heads, of_keys=False),
        programs(problem, tile.block_n, problem.num_kv_heads, of_keys=True),
        # None compiles to nothing, so a call without a window costs nothing
        Window(*(side if side >= 0 else None for side in problem.window)),
        Sizes(*lengths, problem.num_heads), Sizes(*lengths, problem.num_kv_heads),
        dict(TRAITS=traits, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )


def _descriptors(
    problem: AttentionProblem, tile: TileConfig, q: Tensor, k: Tensor, v: Tensor, *d_out: Tensor
) -> list[TensorDescriptor | None]:
    """Descriptors for load_tile, in this order; None for tensors that it reads through pointers."""
    if not tile.descriptors:
        return [None for _ in (q, k, v, *d_out)]
    width, value_width = _widths(problem)
    tiles = [(tile.block_m, width), (tile.block_n, width), (tile.block_n, value_width), (tile.block_m, value_width)]
    return [
        _descriptor(x.data_ptr(), x.dtype, x.shape, x.stride(), *shape)
        for x, shape in zip((q, k, v, *d_out), tiles, strict=False)
    ]


@functools.lru_cache(tma.CACHED_DESCRIPTORS)
def _descriptor(
    address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], rows: int, width: int
) -> TensorDescriptor:
    tile = [1, rows, 1, width]
    return TensorDescriptor(tma.Memory(address, dtype), list(shape), tma.usable_strides(shape, strides), tile)


def _tiled(tile: TileConfig, sequences: Sequences | None, partial: tuple[Tensor, ...], *tensors: Tensor) -> Tiled:
    """q, k, v and perhaps dO as load_tile reads them through pointers; with descriptors, those of partial tiles."""
    needed = partial if sequences is not None else ()
    if not tile.descriptors:
        return Tiled(*map(strided, tensors))
    return Tiled(*(Strided(x if any(x is y for y in needed) else None, x.stride()) for x in tensors))


def _bias_to_read(inputs: Inputs) -> Tensor | None:
    """Return the bias; with float64 inputs a mask as 32-bit integers.

    Triton lays out the operands of a product for the narrowest value that was loaded for them. Triton 3.6 has no such
    layout of float64 for bytes and does not compile it.
    """
    bias = inputs.bias
    if bias is None or bias.dtype != torch.bool or inputs.q.dtype != torch.float64:
        return bias
    # convert each stored value once: a mask may be a view that repeats them
    once = bias[tuple(slice(1 if stride == 0 else None) for stride in bias.stride())]
    return once.int().expand(bias.shape)
