"""Gluon kernels for sm_90: TMA, WGMMA, warp specialisation."""

import functools

import torch

from decayattn.backends.hopper import config
from decayattn.backends.hopper.backward.launch import backward
from decayattn.backends.hopper.common import descriptors
from decayattn.backends.hopper.forward.launch import forward
from decayattn.backends.runtime import launching, tma
from decayattn.backends.runtime.integers import cdiv
from decayattn.problem import AttentionProblem, Inputs

__all__ = ["backward", "forward", "is_profitable", "unavailable", "unsupported"]

# key biases are divided by the scale and must stay in bfloat16's range
_MIN_SCALE = 1e-6


@functools.cache
def unavailable(dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why these kernels cannot run for this dtype on this device, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device}"
    if torch.version.hip is not None:  # a gfx90a reports capability 9.0, too
        return "it runs on NVIDIA GPUs, not with ROCm"
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"it needs compute capability 9.0, not {capability[0]}.{capability[1]}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {dtype}"
    return None


def unsupported(problem: AttentionProblem, inputs: Inputs) -> str | None:
    """Reason why these kernels cannot compute this problem, or None."""
    step = tma.ALIGNMENT // problem.dtype.itemsize
    for name, dim in (("D", problem.head_dim), ("D_v", problem.value_dim)):
        if dim % step:
            return f"it takes multiples of {step} as {name}, not {dim}"
    if problem.bias:
        return "it takes no bias"
    if inputs.scale < _MIN_SCALE:
        return f"it takes a scale of at least {_MIN_SCALE}, not {inputs.scale}"
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        if (reason := tma.unsupported(x)) is not None:
            return f"TMA cannot address {name}: {reason}"
        if problem.layout != "dense" and (reason := descriptors.slices_unsupported(x)) is not None:
            return f"TMA cannot address sequences in {name}: {reason}"
    return None


def is_profitable(problem: AttentionProblem) -> bool:
    """True if these kernels are faster than the Triton kernels, which have more and smaller tiles for few tokens.

    Measured for B1 H8, forward and backward as a CUDA graph, in µs::

        D     T      here   Triton
        64    1024   76     60
        64    2048   120    122
        128   1024   90     85
        128   2048   148    176
        256   64     27     38
        256   1024   136    200
    """
    if problem.layout != "dense" or config.is_wide(max(problem.head_dim, problem.value_dim)):
        return True
    tiles = problem.batch * problem.num_heads * cdiv(max(problem.query_length, problem.key_length), config.KEY_TILE)
    return 2 * tiles > launching.multiprocessors(problem.device)
