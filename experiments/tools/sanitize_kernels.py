"""Run small problems under compute-sanitizer's memcheck: no kernel may read or write outside of an allocation.

    python experiments/tools/sanitize_kernels.py                  # both backends; minutes
    python experiments/tools/sanitize_kernels.py --backends hopper

PyTorch's caching of allocations is off. The problems are small, and their lengths divide nothing: resets, a window,
grouped queries, packed sequences with empty ones, scales of rows. Every message is printed once, with the number of
its lines; the exit status is 1 unless there is none. It takes a GPU and the sanitizer of the CUDA toolkit. The
sanitizer's racecheck does not follow the barriers of "hopper": it objects to a kernel that has only such a barrier.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys

import torch

from decayattn import decay_attention, decay_attention_varlen

BACKENDS = ["hopper", "triton"]
# no errors of the API: Triton 3.9 first asks for a mode of shared memory that older drivers do not know
MEMCHECK = ["--tool", "memcheck", "--error-exitcode", "1", "--show-backtrace", "no", "--report-api-errors", "no"]
_DIFFERENT = re.compile(r"\(\d+,\d+,\d+\)|0x[0-9a-f]+|Current Value.*|^=+ *")  # between messages of one fault
_DONE = "computed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--compute", action="store_true", help="only run the problems, for the sanitizer")
    options = parser.parse_args()
    if options.compute:
        for backend in options.backends:
            compute(backend, options.head_dims)
        torch.cuda.synchronize()
        print(_DONE, flush=True)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer: not on the PATH; install the CUDA toolkit", file=sys.stderr)
        return 1
    clean = True
    for backend in options.backends:
        child = [sys.executable, __file__, "--compute", "--backends", backend, "--head-dims"]
        child += map(str, options.head_dims)
        # compiles, so that the sanitizer waits for kernels only. Python has aborted at its end after all was computed,
        # so the status does not count here; under the sanitizer it does
        if _DONE not in subprocess.run(child, stdout=subprocess.PIPE, text=True, check=False).stdout:
            print(f"{backend}: not computed", file=sys.stderr)
            return 1
        uncached = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run([sanitizer, *MEMCHECK, *child], env=uncached, capture_output=True, text=True, check=False)
        found = done.returncode != 0 or _DONE not in done.stdout
        clean &= not found
        print(f"memcheck {backend}: {'NOT ' * found}clean", flush=True)
        if found:
            lines = (done.stdout + done.stderr).splitlines()
            said = collections.Counter(_DIFFERENT.sub("", line).strip() for line in lines)
            print("\n".join(f"  {count:6d} × {line}" for line, count in said.most_common(40) if line), flush=True)
    return int(not clean)


def compute(backend: str, head_dims: list[int]) -> None:
    """Forward and backward of the problems; inputs are drawn on the CPU, so that nearly all kernels are ours."""
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
        options = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=300, max_seqlen_k=300, backend=backend)
        differentiate(decay_attention_varlen(q, k, v, gate, **options), q, k, v, gate)
        scale = torch.randn(410, 2).cuda().requires_grad_()
        differentiate(decay_attention_varlen(q, k, v, gate, scale=scale, **options), q, k, v, gate, scale)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("cuda", torch.bfloat16).requires_grad_()


def gates(*shape: int) -> torch.Tensor:
    """Log-decays, a hundredth of them resets."""
    gate = -0.1 * torch.rand(*shape)
    return gate.masked_fill(torch.rand(*shape) < 0.01, -torch.inf).cuda().requires_grad_()


def differentiate(out: torch.Tensor, *leaves: torch.Tensor) -> None:
    torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))


if __name__ == "__main__":
    sys.exit(main())
