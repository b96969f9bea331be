"""Launches that begin while the one before them ends (CUDA: programmatic dependent launch).

A kernel launched with launch_pdl may start when all programs of the launch before it have let it, or have ended. What
that launch writes is there for who waits, and until then nothing of it may be read or overwritten. On GPUs before
sm_90 launches come one after the other, and both functions do nothing. number may be any: inline assembly needs one.
"""

import triton
import triton.language as tl


@triton.jit
def let_next_start(number):
    """From here on the next launch may start where programs of this one end, if it is one with launch_pdl."""
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_launch_before(number):
    """In a kernel launched with launch_pdl, wait until the launch before has ended: what it wrote is there then."""
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )
