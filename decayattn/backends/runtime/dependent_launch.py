"""Launches that begin before the previous launch has ended (CUDA: programmatic dependent launch).

A kernel launched with launch_pdl may start once all programs of the previous launch have called let_next_start or
ended. It may read or overwrite results of that launch only after wait_for_launch_before. On GPUs before sm_90, and in
Triton's interpreter, launches run one after the other, and both functions do nothing. number may be any integer: inline
assembly needs an operand.
"""

import triton
import triton.language as tl

# the interpreter takes the GPU of its machine for its own
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def let_next_start(number):
    """Allow the next launch, if it is one with launch_pdl, to start as programs of this one end."""
    if not _INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_launch_before(number):
    """Wait, in a kernel launched with launch_pdl, until the previous launch has ended and its results are visible."""
    if not _INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )
