"""Triton kernels for every CUDA GPU, and for Triton's interpreter on a CPU."""

import torch
import triton

from decayattn.backends.portable.append import append
from decayattn.backends.portable.decode import decode
from decayattn.backends.portable.launch import backward, forward
from decayattn.backends.runtime import interpreter
from decayattn.problem import AttentionProblem, Inputs

__all__ = ["append", "backward", "decode", "forward", "is_profitable", "unavailable", "unsupported"]


def unavailable(dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why these kernels cannot run for this dtype on this device, or None."""
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return f"it runs on CUDA devices, not on {device}"
    if reason := interpreter.fails():
        return reason
    if not triton.knobs.runtime.interpret:
        return "on a CPU it needs Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrong; use float16 or float32 there"
    return None


def unsupported(problem: AttentionProblem, inputs: Inputs) -> None:
    """None: these kernels support every problem."""
    return None


def is_profitable(problem: AttentionProblem) -> bool:
    """True: this backend comes last and takes the problems that the others leave."""
    return True
