"""Tile shapes, warps, pipeline stages and memory path of the portable kernels.

All are pure functions of (arch, head dimension, dtype, alignment). Nothing is tuned at run time, so no first call
stalls, and all ranks choose the same.

Every size divides DECAY_BLOCK, so that a tile never straddles two blocks of the decay prefix. The milliseconds at the
entries were measured on one H200 (torch 2.11, Triton 3.6), bfloat16, causal, per-token decay, H16 T8192, B4. "ptr"
loads through pointers, "TMA" through descriptors. `python experiments/tools/sweep_tiles.py` measures them again.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from decayattn.backends.runtime.integers import next_power_of_2


class TileConfig(NamedTuple):
    """block_m query rows × block_n keys per tile; warps and pipeline stages of the launch; TMA descriptors or not.

    spill_bytes: upper bound on the register spills of such a kernel. `python experiments/tools/compile_kernels.py`
    counts them. Each entry was measured, spills included, against tiles that spill less.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    spill_bytes: int = 0


# Plain FMA instructions on fully unrolled tiles. Above 32 × 32 they spill much more and compile for tens of seconds.
# Measured for float32, D128, B1 H16 T2048: forward 2.1 ms at 32 × 32, 15 ms at 64 × 32; gradients of keys 4.3 ms,
# 43 ms at 32 × 64. The two large figures are from before a tile's products had a sum of their own. Tiles without spills
# are slower (forward 2.9 ms at 16 × 32, 3.4 ms at 32 × 16; gradients of keys 5.6 ms at 32 × 16), and so are 8 warps
# (6.7 ms).
_FLOAT32 = (TileConfig(32, 32, 4, 1), TileConfig(32, 32, 4, 1), TileConfig(16, 32, 4, 1))
_FLOAT64 = (TileConfig(32, 32, 4, 1), TileConfig(32, 32, 4, 1), TileConfig(16, 16, 4, 1))
_OTHER_FLOAT64 = (TileConfig(32, 32, 4, 1), TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 1))


@dataclass(frozen=True)
class Kernel:
    """Tiles of one kernel by head dimension: (up to 64, up to 128, up to 256)."""

    sm90_descriptors: tuple[TileConfig, TileConfig, TileConfig]
    sm90_pointers: tuple[TileConfig, TileConfig, TileConfig]
    # Packed or padded sequences in tensors that descriptors can address. Partial tiles are read through pointers even
    # so. TMA tiles spill in the loop over partial tiles, not in that over full ones. None of them has been timed
    sm90_sequences: tuple[TileConfig, TileConfig, TileConfig]
    # Other GPUs: compiled, not run on hardware. They fit in 99 KB of shared memory, the smallest of NVIDIA's GPUs from
    # Ampere on. AMD's compiler needs less, and they fit in 64 KB there
    other: tuple[TileConfig, TileConfig, TileConfig]
    float32: tuple[TileConfig, TileConfig, TileConfig] = _FLOAT32
    float64: tuple[TileConfig, TileConfig, TileConfig] = _FLOAT64
    # float64 on other GPUs: gradients above D = 128 need more than 99 KB with any tile
    other_float64: tuple[TileConfig, TileConfig, TileConfig] = _OTHER_FLOAT64


# shared memory of a block on the smallest GPUs that use `other`
_OTHER_SHARED_MEMORY = 99 << 10

# Triton's interpreter runs a program as numpy calls: small tiles, so that short sequences have several of each kind
_INTERPRETER = TileConfig(32, 32, 4, 1)

FORWARD = Kernel(
    sm90_descriptors=(
        TileConfig(64, 128, 4, 3, True),  # 1.55 ms; 128 × 64 1.63, ptr 1.59
        # 2.53 ms; 128 × 128 with 8 warps 2.54, ptr 2.71; a 4th stage 3.77 (one program per SM)
        TileConfig(64, 64, 4, 3, True),
        TileConfig(64, 32, 4, 3, True),  # 4.34 ms; ptr 128 × 64 4.40
    ),
    sm90_pointers=(
        TileConfig(128, 64, 4, 3, spill_bytes=32),  # 1.59 ms; 64 × 128 1.61
        TileConfig(64, 64, 4, 3, spill_bytes=16),  # 2.71 ms; 128 × 64 with 8 warps 2.79, 128 × 128 2.97
        # 4.40 ms; 64 × 32 6.47. 60 B of the spills are for a constant decay only, which was not timed
        TileConfig(128, 64, 8, 2, spill_bytes=208),
    ),
    sm90_sequences=(
        TileConfig(64, 128, 4, 3, True),
        TileConfig(64, 64, 4, 3, True),
        TileConfig(64, 32, 4, 3, True, 144),
    ),
    # with 4 warps, D = 256 spills up to 184 B on sm_80, and 328 B with a bias on sm_89
    other=(TileConfig(128, 64, 4, 2), TileConfig(64, 64, 4, 2), TileConfig(64, 32, 8, 1)),
)

KEY_GRADIENTS = Kernel(
    sm90_descriptors=(
        TileConfig(64, 64, 4, 3, spill_bytes=28),  # ptr 2.52 ms; TMA 2.57, 64 × 128 with 8 warps 3.04
        TileConfig(32, 64, 4, 3, True, 48),  # 4.17 ms; ptr 64 × 128 4.36; TMA 64 × 128 7.44 (wgmma serialised)
        TileConfig(64, 64, 8, 2, spill_bytes=948),  # ptr 18.2 ms; TMA 27.9; dk and dv fill the registers at this width
    ),
    sm90_pointers=(
        TileConfig(64, 64, 4, 3, spill_bytes=28),  # 2.52 ms
        TileConfig(64, 128, 8, 3, spill_bytes=144),  # 4.36 ms; 32 × 64 with 4 warps 4.82
        TileConfig(64, 64, 8, 2, spill_bytes=864),  # 18.2 ms; 32 × 64 22.1
    ),
    sm90_sequences=(
        TileConfig(64, 64, 4, 3, spill_bytes=48),
        TileConfig(32, 64, 4, 3, True, 320),
        TileConfig(64, 64, 8, 2, spill_bytes=1088),
    ),
    other=(TileConfig(64, 64, 4, 2), TileConfig(32, 64, 4, 2), TileConfig(32, 32, 4, 1)),
    float32=(*_FLOAT32[:2], TileConfig(16, 16, 4, 1)),  # 11.5 ms; 32 × 16 11.6, 16 × 32 13.8 (B1 H16 T2048)
)

QUERY_GRADIENTS = Kernel(
    sm90_descriptors=(
        TileConfig(64, 128, 4, 2, spill_bytes=272),  # ptr 1.76 ms; TMA 1.81, 64 × 64 2.02
        TileConfig(64, 64, 4, 3, True),  # 2.78 ms; ptr 3.23
        # ptr 7.72 ms; TMA 12.1, 64 × 32 11.4. The spills are for a constant decay's gradient only, which was not timed
        TileConfig(128, 32, 8, 2, spill_bytes=64),
    ),
    sm90_pointers=(
        TileConfig(64, 128, 4, 2, spill_bytes=280),  # 1.76 ms
        TileConfig(64, 64, 4, 2, spill_bytes=148),  # 3.23 ms; a 3rd stage 4.34, 128 × 64 with 8 warps 3.27
        TileConfig(128, 32, 8, 2, spill_bytes=64),  # 7.72 ms; as above
    ),
    sm90_sequences=(
        TileConfig(64, 128, 4, 2, spill_bytes=256),
        # 160 B and 16 B without a constant decay's gradient
        TileConfig(64, 64, 4, 3, True, 196),
        TileConfig(128, 32, 8, 2, spill_bytes=64),
    ),
    other=(TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 2), TileConfig(32, 32, 4, 1)),
)


@functools.cache
def arch(device: torch.device) -> str:
    """Name of the GPU's tiles; "interpreter" on a CPU."""
    if device.type != "cuda":
        return "interpreter"
    gpu = torch.cuda.get_device_properties(device)
    # a block may ask for more than 48 KB up to this limit, which ROCm does not have
    shared_memory = getattr(gpu, "shared_memory_per_block_optin", gpu.shared_memory_per_block)
    return arch_name((gpu.major, gpu.minor), torch.version.hip is not None, shared_memory)


def arch_name(capability: tuple[int, int], hip: bool, shared_memory: int) -> str:
    """Name of a GPU's tiles: "sm90", or "other" or "small" by a block's shared memory. gfx90a reports 9.0, too."""
    if capability == (9, 0) and not hip:
        return "sm90"
    return "other" if shared_memory >= _OTHER_SHARED_MEMORY else "small"


def padded(dim: int) -> int:
    """Tile width of a head dimension: a power of two, at least a matrix instruction's width."""
    return max(16, next_power_of_2(dim))


def dot_precision() -> str:
    """Precision of float32 products: PyTorch's setting. Only one generation of AMD's GPUs has TF32."""
    exact = torch.get_float32_matmul_precision() == "highest" or torch.version.hip is not None
    return "ieee" if exact else "tf32"


def choose(
    kernel: Kernel, arch: str, dim: int, dtype: torch.dtype, aligned: bool, sequences: bool = False
) -> TileConfig:
    """Choose the kernel's tiles.

    arch: a result of `arch`. dim: the larger of the padded head and value dimensions.
    aligned: TMA descriptors can address every tensor that the kernel reads in tiles.
    sequences: they do not fill their batch entries.
    """
    if arch == "interpreter":
        return _INTERPRETER
    if dtype.itemsize == 8:
        tiles = kernel.float64 if arch == "sm90" else kernel.other_float64
    elif dtype.itemsize == 4:
        tiles = kernel.float32
    elif arch != "sm90":
        tiles = kernel.other
    elif aligned:
        tiles = kernel.sm90_sequences if sequences else kernel.sm90_descriptors
    else:
        tiles = kernel.sm90_pointers
    return tiles[0 if dim <= 64 else 1 if dim <= 128 else 2]


# Small problems: tiles up to D = 64 and up to D = 128.

# A forward of few programs, through pointers: the GPU takes as long as with three descriptors, and the host launches it
# 15 to 20 µs faster. B1 H8, prefix and forward as a CUDA graph, µs at T256, 512, 1024: D64 10.2, 17.2, 22.4 (with
# descriptors 10.4, 17.2, 21.7; 64 × 64 9.6, 17.7, 25.3); D128 12.2, 19.9, 27.8 (12.0, 19.9, 27.6; 64 × 128 12.4, 19.9,
# 26.1, with more spills)
_FORWARD_OF_FEW = (TileConfig(64, 128, 4, 2), TileConfig(64, 64, 4, 3, spill_bytes=16))
# One launch of both gradients, through pointers. B1 H8, forward and backward as a CUDA graph, µs at T256, 1024, 2048:
# D64 29.0, 60.1, 121 (8 warps 31.0, 79.6, 182; two launches 36.3, 67.3, 130); D128 38.7, 84.5, 176 (64 × 32 34.9, 95.4,
# 224; two launches 44.5, 91.6, 194)
_BOTH_GRADIENTS = (TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 2, spill_bytes=432))


def choose_small(gradients: bool, arch: str, dim: int, dtype: torch.dtype) -> TileConfig | None:
    """Tile of a forward of few programs, or of one launch of both gradients; None: the problem has no such tile."""
    if gradients and arch == "interpreter":
        return _INTERPRETER
    if arch != "sm90" or dtype.itemsize != 2 or dim > 128:
        return None
    return (_BOTH_GRADIENTS if gradients else _FORWARD_OF_FEW)[0 if dim <= 64 else 1]
