"""Run small problems under NVIDIA's compute-sanitizer: no kernel may read or write what is not its own, or race.

    python experiments/sanitize_kernels.py                                  # both tools, both backends; minutes
    python experiments/sanitize_kernels.py --tools memcheck --backends hopper

memcheck sees every access outside of an allocation (PyTorch's caching of allocations is off), racecheck what threads of
a block do to shared memory without waiting for each other. The problems are small and end anywhere: lengths that divide
nothing, resets, a window, grouped queries, packed sequences with empty ones. The exit status is 1 unless all are clean.
It takes a GPU and the sanitizer, which comes with the CUDA toolkit.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = {
    "memcheck": ["--tool", "memcheck"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
}
QUIETLY = ["--error-exitcode", "1", "--show-backtrace", "no"]
# every message once, without the threads and addresses that differ
_DIFFERENT = re.compile(r"\(\d+,\d+,\d+\)|0x[0-9a-f]+|Current Value.*|^=+ *")
CHILD = """
import torch
from decayattn import decay_attention, decay_attention_varlen

BACKEND, DIMS = {backend!r}, {dims}


def draw(*shape, dtype=torch.bfloat16):  # on the CPU, so that only kernels of ours are looked at
    return torch.randn(*shape).to("cuda", dtype).requires_grad_()


def decay(*shape):
    gate = -0.1 * torch.rand(*shape)
    return gate.masked_fill(torch.rand(*shape) < 0.01, -torch.inf).cuda().requires_grad_()


def differentiate(out, *leaves):
    torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))


torch.manual_seed(0)
for dim in DIMS:
    q, k, v = draw(1, 333, 2, dim), draw(1, 333, 1, dim), draw(1, 333, 1, dim)
    differentiate(decay_attention(q, k, v, backend=BACKEND), q, k, v)
    rates = (-torch.rand(2)).cuda().requires_grad_()
    differentiate(decay_attention(q, k, v, rates, window_size=(100, 0), backend=BACKEND), q, k, v, rates)
    q, k, v, gate = draw(1, 530, 2, dim), draw(1, 700, 1, dim), draw(1, 700, 1, dim), decay(1, 700, 2)
    differentiate(decay_attention(q, k, v, gate, backend=BACKEND), q, k, v, gate)
    ends = torch.tensor([3, 3, 130, 400], dtype=torch.int32).cuda()
    q, k, v, gate = draw(410, 2, dim), draw(410, 1, dim), draw(410, 1, dim), decay(410, 2)
    lengths = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=300, max_seqlen_k=300)
    differentiate(decay_attention_varlen(q, k, v, gate, **lengths, backend=BACKEND), q, k, v, gate)
torch.cuda.synchronize()
print("computed")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--backends", nargs="+", choices=["hopper", "triton"], default=["hopper", "triton"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    clean = True
    for backend in options.backends:
        child = [sys.executable, "-c", CHILD.format(backend=backend, dims=options.head_dims)]
        subprocess.run(child, check=True)  # compiles, so that the sanitizer waits for kernels only
        for tool in options.tools:
            clean &= run(tool, [sanitizer, *TOOLS[tool], *QUIETLY, *child], backend)
    return int(not clean)


def run(tool: str, command: list[str], backend: str) -> bool:
    """Whether the tool has nothing to say; what it says is printed."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    clean = done.returncode == 0 and "computed" in done.stdout
    print(f"{tool} {backend}: {'clean' if clean else 'NOT clean'}", flush=True)
    if not clean:
        lines = (done.stdout + done.stderr).splitlines()
        said = collections.Counter(_DIFFERENT.sub("", line).strip() for line in lines)
        print("\n".join(f"  {count:6d} × {line}" for line, count in said.most_common(40) if line), flush=True)
    return clean


if __name__ == "__main__":
    sys.exit(main())
