"""Run small problems under NVIDIA's compute-sanitizer: no kernel may read or write what is not its own, or race.

    python experiments/tools/sanitize_kernels.py                                  # both tools, everything; minutes
    python experiments/tools/sanitize_kernels.py --tools memcheck --what hopper

memcheck sees every access outside of an allocation (PyTorch's caching of allocations is off), racecheck what threads of
a block do to shared memory without waiting for each other. The problems are small and end anywhere: lengths that divide
nothing, resets, a window, grouped queries, packed sequences with empty ones, scales of rows.

"control" is a kernel in which one warp writes a value and others read it after a wait on an mbarrier, as CUDA's
documentation has it. The "hopper" kernels wait in the same way: if racecheck objects to "control", its objections to
them mean nothing. A tool's output is printed, every message once with the lines that it names; the exit status is 1
unless all are clean. It takes a GPU and the sanitizer, which comes with the CUDA toolkit.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from decayattn import decay_attention, decay_attention_varlen

TOOLS = {
    "memcheck": ["--tool", "memcheck"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
}
QUIETLY = ["--error-exitcode", "1", "--show-backtrace", "no"]
WHAT = ("control", "hopper", "triton")
# what differs between two messages that say the same
_DIFFERENT = re.compile(r"\(\d+,\d+,\d+\)|0x[0-9a-f]+|Current Value.*|^=+ *")
_DONE = "computed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--compute", action="store_true", help="only run the problems, which the sanitizer looks at")
    options = parser.parse_args()
    if options.compute:
        for what in options.what:
            control() if what == "control" else compute(what, options.head_dims)
        torch.cuda.synchronize()
        print(_DONE, flush=True)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    clean = True
    for what in options.what:
        child = [sys.executable, __file__, "--compute", "--what", what, "--head-dims", *map(str, options.head_dims)]
        # compiles, so that the sanitizer waits for kernels only. Python has aborted at its end after all was computed,
        # so the status does not count here; where the sanitizer looks, it does
        if _DONE not in subprocess.run(child, stdout=subprocess.PIPE, text=True, check=False).stdout:
            print(f"{what}: not computed", file=sys.stderr)
            return 1
        for tool in options.tools:
            clean &= is_clean(tool, [sanitizer, *TOOLS[tool], *QUIETLY, *child], what)
    return int(not clean)


def is_clean(tool: str, command: list[str], what: str) -> bool:
    """True if the tool has nothing to say; its messages are printed."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    clean = done.returncode == 0 and _DONE in done.stdout
    print(f"{tool} {what}: {'clean' if clean else 'NOT clean'}", flush=True)
    if not clean:
        lines = (done.stdout + done.stderr).splitlines()
        said = collections.Counter(_DIFFERENT.sub("", line).strip() for line in lines)
        print("\n".join(f"  {count:6d} × {line}" for line, count in said.most_common(40) if line), flush=True)
    return clean


def compute(backend: str, head_dims: list[int]) -> None:
    """Forward and backward of the problems; inputs are drawn on the CPU, so that few kernels are not ours."""
    torch.manual_seed(0)
    for dim in head_dims:
        q, k, v = draw(1, 333, 2, dim), draw(1, 333, 1, dim), draw(1, 333, 1, dim)
        differentiate(decay_attention(q, k, v, backend=backend), q, k, v)
        rates = (-torch.rand(2)).cuda().requires_grad_()
        differentiate(decay_attention(q, k, v, rates, window_size=(100, 0), backend=backend), q, k, v, rates)
        q, k, v, gate = draw(1, 530, 2, dim), draw(1, 700, 1, dim), draw(1, 700, 1, dim), gates(1, 700, 2)
        differentiate(decay_attention(q, k, v, gate, backend=backend), q, k, v, gate)
        differentiate(decay_attention(q, k, v, gate, causal=False, backend=backend), q, k, v, gate)
        ends = torch.tensor([3, 3, 130, 400], dtype=torch.int32).cuda()
        q, k, v, gate = draw(410, 2, dim), draw(410, 1, dim), draw(410, 1, dim), gates(410, 2)
        lengths = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=300, max_seqlen_k=300)
        differentiate(decay_attention_varlen(q, k, v, gate, **lengths, backend=backend), q, k, v, gate)
        scale = torch.randn(410, 2).cuda().requires_grad_()
        out = decay_attention_varlen(q, k, v, gate, scale=scale, **lengths, backend=backend)
        differentiate(out, q, k, v, gate, scale)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("cuda", torch.bfloat16).requires_grad_()


def gates(*shape: int) -> torch.Tensor:
    """Log-decays, a hundredth of them resets."""
    gate = -0.1 * torch.rand(*shape)
    return gate.masked_fill(torch.rand(*shape) < 0.01, -torch.inf).cuda().requires_grad_()


def differentiate(out: torch.Tensor, *leaves: torch.Tensor) -> None:
    torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))


def control() -> None:
    """One number from one warp to others, through shared memory and an mbarrier."""
    from tools.sanitize_control import control_kernel

    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    control_kernel[(1,)](out, num_warps=4)
    assert out.item() == 7


if __name__ == "__main__":
    sys.exit(main())
