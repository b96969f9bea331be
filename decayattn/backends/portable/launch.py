"""From tensors to launches: buffers, memory paths, grids. The kernels' only callers."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from decayattn.backends.planning import prefix as decay_prefix
from decayattn.backends.planning import sequences as sequence_blocks
from decayattn.backends.planning import skipping
from decayattn.backends.planning.sequences import Sequences, fill_outside, row_programs, token_programs
from decayattn.backends.portable import config
from decayattn.backends.portable.backward import (
    gradients_kernel,
    key_gradients_kernel,
    query_gradients_kernel,
    row_terms_kernel,
)
from decayattn.backends.portable.config import TileConfig
from decayattn.backends.portable.forward import forward_kernel
from decayattn.backends.runtime import launching, outputs, tma
from decayattn.backends.runtime.integers import cdiv, next_power_of_2
from decayattn.backends.runtime.launching import COMPILER_OPTIONS
from decayattn.problem import AttentionProblem, Gradients, Inputs, Saved

_ROW_TERMS_BLOCK = 64
# expected by the kernels where a problem has no such tensor; never read
_NO_STRIDES = (0, 0, 0)
# numbers of 16 bits in the longest line that a product reads from shared memory
_LINE = 64
# one launch makes the gradients of keys and queries up to so many programs per multiprocessor: measured at 8 heads up
# to T2048, where it is still faster, by 6 % at D = 64 and 9 % at D = 128
_MOST_PROGRAMS_OF_BOTH = 4
# a forward has tiles of its own up to so many: measured at 8 heads up to T1024
_MOST_PROGRAMS_OF_FEW = 1


def forward(problem: AttentionProblem, inputs: Inputs, with_lse: bool = False) -> tuple[Tensor, Tensor | None, Saved]:
    """out (B, T_q, H, D_v), lse (B, H, T_q) or None, and what the backward reads."""
    q, k, v, log_decay = inputs.q, inputs.k, inputs.v, inputs.log_decay
    scale, places, bias = inputs.any_scale, inputs.places, inputs.bias
    with launching.on_device(problem.device):
        results = outputs.allocate(problem, q, with_lse)
        out, row_references, lse = results
        if problem.is_empty:
            results.fill()
            return out, lse, Saved(row_references, *decay_prefix.allocate(problem, q), skipping.allocate(problem, q))
        given = (q, k, v, log_decay, _tensor(scale), places, bias)
        launch = launching.of_call(problem.device, given, problem, skipping.is_planned(problem), _shape(bias), with_lse)
        sequences = sequence_blocks.find(problem, places, launch)
        fill_outside(problem, sequences, results.of_no_key(), launch=launch)
        if problem.decay == "scalar":
            prefix = decay_prefix.build(problem, log_decay, sequences=sequences, launch=launch)
        else:
            prefix = decay_prefix.allocate(problem, q)
        first_block = skipping.plan(problem, q, k, log_decay, scale, prefix, sequences, launch)
        tile = _tile_of_few(problem) or _tiles(config.FORWARD, problem, q, k, v)
        programs, widths = row_programs(problem, sequences, tile.block_m, problem.num_heads), _widths(problem)
        launch(
            forward_kernel, programs,
            _source(q, tile.block_m, widths[0], tile), _source(k, tile.block_n, widths[0], tile),
            _source(v, tile.block_n, widths[1], tile), *_edges(sequences, tile, v),
            out, lse, row_references, _row_scales(scale, row_references), _rates(problem, log_decay, row_references),
            *prefix, sequences, skipping.as_argument(problem, first_block), *_window(problem), *_bias(bias),
            q.stride(), k.stride(), v.stride(), out.stride(), _row_scale_strides(scale),
            _rate_stride(problem, log_decay), _scale_number(scale),
            problem.query_length, problem.key_length, problem.num_heads, **_constants(problem, sequences, tile),
        )  # fmt: skip
        return out, lse, Saved(row_references, *prefix, first_block)


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    saved: Saved,
    d_out: Tensor,
    d_lse: Tensor | None,
    decay_gradient: bool,
    bias_gradient: bool,
) -> Gradients:
    """Of q, k, v and a scale per row, and as asked for of log_decay and bias."""
    q, k, v, log_decay = inputs.q, inputs.k, inputs.v, inputs.log_decay
    scale, places, bias = inputs.any_scale, inputs.places, inputs.bias
    row_references, prefix, first_block = saved.row_references, saved.prefix, saved.first_block
    with launching.on_device(problem.device):
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        row_scale_grad = torch.empty_like(row_references) if problem.row_scale else None
        if problem.is_empty:
            for gradient in (dq, dk, dv, row_scale_grad):
                if gradient is not None:
                    gradient.zero_()
            d_scale = None if row_scale_grad is None else row_scale_grad.transpose(1, 2)
            d_log_decay = torch.zeros_like(log_decay) if decay_gradient else None
            return Gradients(dq, dk, dv, d_log_decay, d_scale, torch.zeros_like(bias) if bias_gradient else None)

        rates, rate_stride = _rates(problem, log_decay, row_references), _rate_stride(problem, log_decay)
        row_scales, row_scale_strides = _row_scales(scale, row_references), _row_scale_strides(scale)
        delta = torch.empty_like(row_references)
        decay_sums = torch.empty_like(row_references) if decay_gradient else delta
        given = (q, k, v, log_decay, _tensor(scale), places, bias, d_out, d_lse, out)
        deterministic = torch.are_deterministic_algorithms_enabled()
        asked = (decay_gradient, bias_gradient, deterministic)
        modes = (problem, skipping.is_planned(problem), _shape(bias), *asked)
        launch = launching.of_call(problem.device, given, *modes, saved=(row_references, *prefix, first_block))
        sequences = sequence_blocks.find(problem, places, launch)
        per_row = [x for x in (row_scale_grad, decay_sums if decay_gradient else None) if x is not None]
        fill_outside(problem, sequences, [(x, 0.0) for x in (dq, *per_row)], launch=launch)
        fill_outside(problem, sequences, [(dk, 0.0), (dv, 0.0)], of_keys=True, launch=launch)
        window = _window(problem)
        plan = mirror = skipping.as_argument(problem, first_block)
        if plan is not None:
            mirror = skipping.as_argument(problem, skipping.last_granules(problem, first_block, sequences, launch))
        head_rows = problem.batch * problem.num_heads
        launch(
            row_terms_kernel, cdiv(problem.query_length, _ROW_TERMS_BLOCK) * head_rows,
            out, d_out, delta if d_lse is None else d_lse, row_references, delta,
            out.stride(), d_out.stride(), _NO_STRIDES if d_lse is None else d_lse.stride(),
            problem.query_length, problem.num_heads, D_V=problem.value_dim, BLOCK_M=_ROW_TERMS_BLOCK,
            BLOCK_DV=padded(problem.value_dim), HAS_D_LSE=d_lse is not None, **COMPILER_OPTIONS,
        )  # fmt: skip

        column_sums = delta.new_empty(prefix.local.shape)
        d_row_scales = delta if row_scale_grad is None else row_scale_grad
        of_rows = delta, row_references, row_scales, rates, *prefix
        strides = q.stride(), k.stride(), v.stride(), d_out.stride()
        sizes = rate_stride, _scale_number(scale), problem.query_length, problem.key_length
        d_bias, widths = None, _widths(problem)
        # read for the gradient of a constant decay only
        has_lse_gradient = decay_gradient and problem.decay == "constant" and d_lse is not None
        lse_gradient = (d_lse, d_lse.stride()) if has_lse_gradient else (None, None)
        tile = _tile_of_both(problem)
        if tile is not None:
            key_programs = token_programs(problem, sequences, tile.block_n, problem.num_kv_heads)
            launch(
                gradients_kernel, key_programs + row_programs(problem, sequences, tile.block_m, problem.num_heads),
                q, k, v, d_out, *of_rows, dq, dk, dv, decay_sums, column_sums, d_row_scales, *lse_gradient, plan,
                mirror, *window, *strides, dq.stride(), dk.stride(), dv.stride(), row_scale_strides, *sizes,
                problem.num_kv_heads, key_programs, DECAY_GRADIENT=decay_gradient,
                **_constants(problem, sequences, tile),
            )  # fmt: skip
        else:
            tile = _tiles(config.KEY_GRADIENTS, problem, q, k, v, d_out)
            launch(
                key_gradients_kernel, token_programs(problem, sequences, tile.block_n, problem.num_kv_heads),
                _source(q, tile.block_m, widths[0], tile), _source(k, tile.block_n, widths[0], tile),
                _source(v, tile.block_n, widths[1], tile), _source(d_out, tile.block_m, widths[1], tile),
                *_edges(sequences, tile, q, d_out), *of_rows, dk, dv, column_sums, sequences, mirror,
                *window, *_bias(bias), *strides, dk.stride(), dv.stride(), row_scale_strides, *sizes,
                problem.num_kv_heads, DECAY_GRADIENT=decay_gradient and problem.decay == "scalar",
                **_constants(problem, sequences, tile),
            )  # fmt: skip
            shared_bias = False
            if bias_gradient:
                d_bias, shared_bias = _bias_gradient(problem, bias, row_references, deterministic)
            tile = _tiles(config.QUERY_GRADIENTS, problem, q, k, v, d_out)
            launch(
                query_gradients_kernel, row_programs(problem, sequences, tile.block_m, problem.num_heads),
                _source(q, tile.block_m, widths[0], tile), _source(k, tile.block_n, widths[0], tile),
                _source(v, tile.block_n, widths[1], tile), _source(d_out, tile.block_m, widths[1], tile),
                *_edges(sequences, tile, k, v), *of_rows, dq, decay_sums, d_row_scales, *lse_gradient, sequences, plan,
                *window, *_bias(bias), *_bias(d_bias), *strides, dq.stride(), row_scale_strides, *sizes,
                problem.num_heads, DECAY_GRADIENT=decay_gradient, SHARED_BIAS=shared_bias,
                **_constants(problem, sequences, tile),
            )  # fmt: skip

        d_log_decay = None
        if decay_gradient and problem.decay == "scalar":
            d_log_decay = decay_prefix.gradient(problem, prefix, decay_sums, column_sums, log_decay, sequences, launch)
        elif decay_gradient:
            d_log_decay = decay_sums.sum((0, 2), dtype=torch.float64).to(log_decay.dtype)
        d_scale = None if row_scale_grad is None else row_scale_grad.transpose(1, 2)
        if bias_gradient:
            d_bias = d_bias.sum_to_size((1,) * (4 - bias.ndim) + bias.shape).reshape(bias.shape).to(bias.dtype)
        return Gradients(dq, dk, dv, d_log_decay, d_scale, d_bias)


def _window(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """How far a query sees. None compiles to nothing: a plain call does not pay for it."""
    left, right = (side if side >= 0 else None for side in problem.window)
    return left, right


def _bias(bias: Tensor | None) -> tuple:
    """A bias that broadcasts to (B, H, T_q, T_k), or its gradient, and its strides there."""
    if bias is None:
        return None, None
    strides = [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)]
    return bias.view(torch.uint8) if bias.dtype == torch.bool else bias, (0,) * (4 - bias.ndim) + tuple(strides)


def _bias_gradient(problem: AttentionProblem, bias: Tensor, like: Tensor, deterministic: bool) -> tuple[Tensor, bool]:
    """A zero buffer for dbias in like's dtype, and whether scores share entries of it, which are added up then.

    Atomics add in no fixed order: deterministic algorithms have every score's own entry, and sum afterwards.
    """
    full = (problem.batch, problem.num_heads, problem.query_length, problem.key_length)
    shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    if deterministic:
        shape = full
    return like.new_zeros(shape), shape != full


@functools.cache
def arch(device: torch.device) -> str:
    """What config.py calls the GPU; the interpreter on a CPU."""
    if device.type != "cuda":
        return "interpreter"
    gpu = torch.cuda.get_device_properties(device)
    # what a block can ask for beyond 48 KB; ROCm has no such limit
    shared_memory = getattr(gpu, "shared_memory_per_block_optin", gpu.shared_memory_per_block)
    return config.arch((gpu.major, gpu.minor), torch.version.hip is not None, shared_memory)


def _tiles(kernel: config.Kernel, problem: AttentionProblem, *tiled: Tensor) -> TileConfig:
    """The tiles of a kernel that reads these tensors in tiles."""
    gpu, dim = arch(problem.device), max(padded(problem.head_dim), padded(problem.value_dim))
    # with a bias, the tiles that were chosen for descriptors have their matrix products serialised (compiled, not
    # measured)
    descriptors = gpu == "sm90" and not problem.bias and not any(map(tma.misfit, tiled))
    return config.choose(kernel, gpu, dim, problem.dtype, descriptors, problem.layout != "dense")


def _tile_of_few(problem: AttentionProblem) -> TileConfig | None:
    """The tile of a forward that has few programs; None where there are more."""
    tile = _own_tile(problem, config.forward_of_few)
    if tile is None:
        return None
    programs = row_programs(problem, None, tile.block_m, problem.num_heads)
    most = _MOST_PROGRAMS_OF_FEW * launching.multiprocessors(problem.device)
    return tile if programs <= most else None


def _tile_of_both(problem: AttentionProblem) -> TileConfig | None:
    """The tile with which one launch makes the gradients of keys and of queries side by side.

    None where either fills the GPU alone: there they are launched one after the other, each with its own tiles.
    """
    tile = _own_tile(problem, config.both_gradients)
    if tile is None:
        return None
    programs = row_programs(problem, None, tile.block_m, problem.num_heads)
    programs += token_programs(problem, None, tile.block_n, problem.num_kv_heads)
    most = _MOST_PROGRAMS_OF_BOTH * launching.multiprocessors(problem.device)
    return tile if programs <= most else None


def _own_tile(
    problem: AttentionProblem, choose: Callable[[str, int, torch.dtype], TileConfig | None]
) -> TileConfig | None:
    """The tile of a small problem, which needs sequences that fill their batch entries, and no bias."""
    if problem.layout != "dense" or problem.bias:
        return None
    return choose(arch(problem.device), max(padded(problem.head_dim), padded(problem.value_dim)), problem.dtype)


def padded(dim: int) -> int:
    """Tile width of a head dimension: a power of two, and no narrower than a matrix instruction."""
    return max(16, next_power_of_2(dim))


def _widths(problem: AttentionProblem) -> tuple[int, int]:
    """Tile widths of the head and of the value dimension.

    Where products read them from shared memory (16 bits), both have lines of one length, of up to 128 bytes: k and v
    may follow one another in the same place there, and ptxas (12.8 and 12.9: Triton 3.6 to 3.8) takes the addresses of
    both from one register, wrong ones where the lengths differ.
    """
    head, value = padded(problem.head_dim), padded(problem.value_dim)
    line = min(max(head, value), _LINE) if problem.dtype.itemsize == 2 else 0
    return max(head, line), max(value, line)


def dot_precision() -> str:
    """How products of float32 are computed: PyTorch's setting; AMD's GPUs do not have TF32, but for one generation."""
    exact = torch.get_float32_matmul_precision() == "highest" or torch.version.hip is not None
    return "ieee" if exact else "tf32"


def _constants(problem: AttentionProblem, sequences: Sequences | None, tile: TileConfig) -> dict:
    """What an attention kernel is compiled for, and how it is launched."""
    return _constants_of(problem, tile, dot_precision(), *sequence_blocks.constants(problem, sequences).items())


@functools.lru_cache(launching.REMEMBERED)
def _constants_of(
    problem: AttentionProblem, tile: TileConfig, precision: str, *of_sequences: tuple[str, bool | int]
) -> dict:  # fmt: skip
    return dict(
        of_sequences,
        GROUP=problem.num_heads // problem.num_kv_heads,
        D=problem.head_dim,
        D_V=problem.value_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=_widths(problem)[0],
        BLOCK_DV=_widths(problem)[1],
        DECAY=problem.decay,
        CAUSAL=problem.causal,
        ROW_CANCELS=problem.causal and problem.decay != "none" and problem.dtype.itemsize == 2,
        ROW_SCALE=problem.row_scale,
        DESCRIPTOR=tile.descriptors,
        PRECISION=precision,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **COMPILER_OPTIONS,
    )


def _source(x: Tensor, rows: int, width: int, tile: TileConfig) -> Tensor | TensorDescriptor:
    """What load_tile reads tiles (rows, width) from."""
    return _descriptor(x.data_ptr(), x.dtype, x.shape, x.stride(), rows, width) if tile.descriptors else x


@functools.lru_cache(tma.CACHED_DESCRIPTORS)
def _descriptor(
    address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], rows: int, width: int
) -> TensorDescriptor:
    tile = [1, rows, 1, width]
    return TensorDescriptor(tma.Memory(address, dtype), list(shape), tma.usable_strides(shape, strides), tile)


def _edges(sequences: Sequences | None, tile: TileConfig, *tensors: Tensor) -> list[Tensor | None]:
    """What load_tile reads tiles from that a descriptor would not cut where a sequence ends."""
    return [x if tile.descriptors and sequences is not None else None for x in tensors]


def _tensor(scale: Tensor | float) -> Tensor | None:
    return scale if isinstance(scale, Tensor) else None


def _shape(bias: Tensor | None) -> torch.Size | None:
    return None if bias is None else bias.shape


def _scale_number(scale: Tensor | float) -> float:
    return 1.0 if isinstance(scale, Tensor) else scale


def _row_scales(scale: Tensor | float, unused: Tensor) -> Tensor:
    return scale if isinstance(scale, Tensor) else unused


def _row_scale_strides(scale: Tensor | float) -> tuple[int, ...]:
    return scale.stride() if isinstance(scale, Tensor) else _NO_STRIDES


def _rates(problem: AttentionProblem, log_decay: Tensor | None, unused: Tensor) -> Tensor:
    return log_decay if problem.decay == "constant" else unused


def _rate_stride(problem: AttentionProblem, log_decay: Tensor | None) -> int:
    return log_decay.stride(0) if problem.decay == "constant" else 0
