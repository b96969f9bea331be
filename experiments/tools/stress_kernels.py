"""The same calls again and again, as training makes them: results that should repeat must, and none may be NaN. Usage::

    python experiments/tools/stress_kernels.py  # a minute, every shape, every backend that takes it
    python experiments/tools/stress_kernels.py --minutes 10 --load 8  # with eight processes that keep the GPU busy
    python experiments/tools/stress_kernels.py --shapes 16,2048,8,64 --backends hopper

A test calls a kernel once, on a problem for a few programs. A fault of one launch in thousands, with many work tiles
per program and launches back to back, shows only in a training that diverges. Some faults show only if other processes
use the GPU, too, which takes it from a kernel between any two instructions. Here q, k and v are slices of one
projection. Gates have half-lives of 2 to 4,096 tokens, and some keys far outweigh a row's nearest. Memory that a launch
allocates holds NaN, and other processes share the GPU's time. out (with lse and alone), lse, dk and dv are held to the
bits of the first call; dq and dλ, which "hopper" adds up in no fixed order, to its values. The first call is held to
the "triton" kernels' results, which the error budget of the tests knows.

Every deviation is a line: call, tensor, how many entries, the first one. The exit status is 1 if there is any.
Without a GPU the Triton kernels run in the interpreter, on short shapes.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from decayattn import decay_attention

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# B, T, H, D: the toy model's, and two that fill a GPU
SHAPES = ["16,2048,8,64", "4,8192,16,64", "4,8192,16,128"] if ON_GPU else ["1,70,1,16"]
# relative to a tensor's largest entry: how far sums in another order, and other kernels, may be off
ORDER, KERNELS = 1e-2, 5e-2
NAMES = ("out alone", "out", "lse", "dq", "dk", "dv", "dλ")
SUMS_IN_NO_ORDER = ("dq", "dλ")


def inputs(batch: int, length: int, heads: int, dim: int, far: float, seed: int) -> tuple[Tensor, ...]:
    """A projection (B, T, 3, H, D), log-decays, and the gradients of out and lse."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    options = dict(generator=random, device=DEVICE)
    projection = torch.randn(batch, length, 3, heads, dim, **options)
    if far:
        # a tenth of the rows look for a few keys, which outweigh all others by up to e^far
        seek = torch.rand(batch, length, heads, **options) < 0.1
        sought = torch.rand(batch, length, heads, **options) < 0.01
        projection[:, :, 0, :, 0] += torch.where(seek, 8.0, 0.0)
        strength = far * torch.rand(batch, length, heads, **options) * math.sqrt(dim) / 8
        projection[:, :, 1, :, 0] += torch.where(sought, strength, 0.0)
    half_lives = torch.logspace(1, 12, heads, base=2, device=DEVICE)
    logits = -math.log(2) / half_lives
    log_decay = logits * torch.rand(batch, length, heads, **options) * 2
    grad_out = torch.randn(batch, length, heads, dim, **options).to(dtype)
    return projection.to(dtype), log_decay, grad_out, torch.randn(batch, heads, length, **options)


def call(backend: str, given: tuple[Tensor, ...], tolerance: float | str | None) -> list[Tensor]:
    """The tensors of NAMES."""
    projection, log_decay, grad_out, grad_lse = given
    leaves = [projection.detach().requires_grad_(), log_decay.detach().requires_grad_()]
    q, k, v = leaves[0].unbind(2)
    options = dict(skip_tolerance=tolerance, backend=backend)
    # whoever wants no lse gets another kernel
    alone = decay_attention(q, k, v, leaves[1], **options)
    out, lse = decay_attention(q, k, v, leaves[1], return_lse=True, **options)
    d_projection, d_log_decay = torch.autograd.grad([alone, lse], leaves, [grad_out, grad_lse])
    return [alone.detach(), out.detach(), lse.detach(), *d_projection.unbind(2), d_log_decay]


def poison() -> None:
    """Have what is allocated next hold NaN: the memory that was freed is taken, filled and freed again."""
    if ON_GPU:
        free = [torch.full((1 << 26,), math.nan, device=DEVICE) for _ in range(8)]  # 256 MB each
        free += [torch.full((1 << n,), math.nan, device=DEVICE) for n in range(8, 24)]
        del free


def deviations(found: list[Tensor], expected: list[Tensor], exact: bool, allowed: float) -> list[str]:
    """Deviations from the expected tensors, as text."""
    lines = []
    for name, x, y in zip(NAMES, found, expected, strict=True):
        if exact and name not in SUMS_IN_NO_ORDER:
            wrong = x != y
        else:
            wrong = ~((x - y).abs() <= allowed * y.abs().amax())
        wrong |= ~x.isfinite()
        if bool(wrong.any()):
            first = tuple(wrong.nonzero()[0].tolist())
            values = f"{float(x[first])!r} instead of {float(y[first])!r}"
            lines.append(f"{name}: {int(wrong.sum())} of {wrong.numel()} entries, the first {list(first)}: {values}")
    return lines


def stress(shape: Sequence[int], backend: str, far: float, tolerance: float | str | None, seconds: float) -> int:
    """Calls for so many seconds; how many deviated."""
    given = inputs(*shape, far, seed=0)
    title = f"B{shape[0]} T{shape[1]} H{shape[2]} D{shape[3]} {backend}, far keys {far:g}, skip_tolerance {tolerance}"
    try:
        first = call(backend, given, tolerance)
    except ValueError as refusal:
        print(f"{title}: refused ({refusal})", flush=True)
        return 0
    failed, calls = 0, 0
    lines = [f"first call, beside triton: {line}" for line in deviations(
        first, call("triton", given, tolerance), False, KERNELS)]
    end = time.monotonic() + seconds
    while time.monotonic() < end or calls == 0:
        poison()  # before every call: the memory of the last one holds what should be there
        calls += 1
        lines += [f"call {calls}: {line}" for line in deviations(call(backend, given, tolerance), first, True, ORDER)]
        for line in lines:
            print(f"DEVIATES {title}: {line}", flush=True)
        failed += bool(lines)
        lines.clear()
    print(f"{title}: {calls} calls, {failed} deviated", flush=True)
    return failed


def load(processes: int) -> list[subprocess.Popen]:
    """Processes that multiply matrices until they are ended; every one has begun."""
    program = """
import torch
x = torch.randn(4096, 4096, device="cuda")
x @ x
torch.cuda.synchronize()
print(flush=True)
while True:
    x @ x
    torch.cuda.synchronize()
"""
    begun = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(processes)]
    for process in begun:
        if not process.stdout.readline():
            for other in begun:
                other.kill()
            raise RuntimeError("a process that was to keep the GPU busy has ended")
    return begun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--minutes", type=float, default=1.0, help="how long all of it takes, less compiling")
    option("--shapes", nargs="+", default=SHAPES, metavar="B,T,H,D", help="batch, tokens, heads, head dimension")
    option("--backends", nargs="+", default=["hopper", "triton"] if ON_GPU else ["triton"])
    option("--far", nargs="+", type=float, default=[0.0, 120.0], help="logits of keys that outweigh all others")
    option("--load", type=int, default=2 * ON_GPU, help="processes that keep the GPU busy meanwhile")
    options = parser.parse_args(arguments)
    shapes = [tuple(int(size) for size in text.split(",")) for text in options.shapes]
    cases = [(s, b, f, t) for s in shapes for b in options.backends for f in options.far for t in ("auto", None)]
    busy = load(options.load)
    try:
        failed = sum(stress(*case, 60 * options.minutes / len(cases)) for case in cases)
    finally:
        for process in busy:
            process.kill()
    print(f"{failed} calls deviated" if failed else "every call repeated")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
