"""Repeat the same calls as training makes them: results that should repeat must, and none may be NaN. Usage::

    python experiments/tools/stress_kernels.py                        # a minute, every shape, every backend
    python experiments/tools/stress_kernels.py --minutes 10 --load 8  # with eight processes that keep the GPU busy
    python experiments/tools/stress_kernels.py --shapes 16,2048,8,64 --backends hopper

Some faults show in one launch of thousands, others only where other processes take the GPU from a kernel. Here q, k and
v are slices of one projection, half-lives are 2 to 4,096 tokens, some keys far outweigh a row's nearest. Memory that a
launch allocates holds NaN. out (with lse and alone), lse, dk and dv must repeat the bits of the first call. dq and dλ,
which "hopper" adds up in no fixed order, must repeat its values. The first call is compared with the "triton" kernels.

Every deviation is a line: call, tensor, number of entries, the first one. The exit status is 1 if there is any.
Without a GPU the Triton kernels run in the interpreter, on short shapes.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from shared.poison import poisoned_allocations

from decayattn import decay_attention

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# B, T, H, D: the toy model's, and two that fill a GPU
SHAPES = ["16,2048,8,64", "4,8192,16,64", "4,8192,16,128"] if ON_GPU else ["1,70,1,16"]
# bounds on errors of sums in another order, and of other kernels, relative to a tensor's largest entry
ORDER, KERNELS = 1e-2, 5e-2
NAMES = ("out alone", "out", "lse", "dq", "dk", "dv", "dλ")
SUMS_IN_NO_ORDER = ("dq", "dλ")
BUSY = """
import torch
x = torch.randn(4096, 4096, device="cuda")
x @ x
torch.cuda.synchronize()
print(flush=True)
while True:
    x @ x
    torch.cuda.synchronize()
"""


def inputs(batch: int, length: int, heads: int, dim: int, far: float) -> tuple[Tensor, ...]:
    """A projection (B, T, 3, H, D), log-decays, and the gradients of out and lse."""
    random, rows = torch.Generator(DEVICE).manual_seed(0), (batch, length, heads)
    dtype, options = torch.bfloat16 if ON_GPU else torch.float32, dict(generator=random, device=DEVICE)
    projection = torch.randn(batch, length, 3, heads, dim, **options)
    if far:
        # a tenth of the rows look for a few keys, which outweigh all others by up to e^far
        seek, sought = (torch.rand(rows, **options) < share for share in (0.1, 0.01))
        projection[:, :, 0, :, 0] += torch.where(seek, 8.0, 0.0)
        strength = far * torch.rand(rows, **options) * math.sqrt(dim) / 8
        projection[:, :, 1, :, 0] += torch.where(sought, strength, 0.0)
    half_lives = torch.logspace(1, 12, heads, base=2, device=DEVICE)
    log_decay = -math.log(2) / half_lives * torch.rand(rows, **options) * 2
    grad_out = torch.randn(*rows, dim, **options).to(dtype)
    return projection.to(dtype), log_decay, grad_out, torch.randn(batch, heads, length, **options)


def call(backend: str, given: tuple[Tensor, ...], tolerance: float | str | None) -> list[Tensor]:
    """The tensors of NAMES."""
    projection, log_decay, grad_out, grad_lse = given
    leaves = [projection.detach().requires_grad_(), log_decay.detach().requires_grad_()]
    arguments, options = (*leaves[0].unbind(2), leaves[1]), dict(skip_tolerance=tolerance, backend=backend)
    alone = decay_attention(*arguments, **options)  # without lse another kernel runs
    out, lse = decay_attention(*arguments, return_lse=True, **options)
    d_projection, d_log_decay = torch.autograd.grad([alone, lse], leaves, [grad_out, grad_lse])
    return [alone.detach(), out.detach(), lse.detach(), *d_projection.unbind(2), d_log_decay]


def deviations(found: list[Tensor], expected: list[Tensor], exact: bool, allowed: float) -> list[str]:
    """Deviations from the expected tensors, as text."""
    lines = []
    for name, x, y in zip(NAMES, found, expected, strict=True):
        same = x == y if exact and name not in SUMS_IN_NO_ORDER else (x - y).abs() <= allowed * y.abs().amax()
        wrong = ~same | ~x.isfinite()
        if bool(wrong.any()):
            first = tuple(wrong.nonzero()[0].tolist())
            values = f"{float(x[first])!r} instead of {float(y[first])!r}"
            lines.append(f"{name}: {int(wrong.sum())} of {wrong.numel()} entries, the first {list(first)}: {values}")
    return lines


def stress(shape: Sequence[int], backend: str, far: float, tolerance: float | str | None, seconds: float) -> int:
    """Repeat a call for some seconds; return the number of calls that deviated."""
    given, failed, calls = inputs(*shape, far), 0, 0
    title = "B{} T{} H{} D{}".format(*shape) + f" {backend}, far keys {far:g}, skip_tolerance {tolerance}"
    try:
        first = call(backend, given, tolerance)
    except ValueError as refusal:
        print(f"{title}: refused ({refusal})", flush=True)
        return 0
    found = deviations(first, call("triton", given, tolerance), False, KERNELS)
    lines = [f"first call, compared with triton: {line}" for line in found]
    end = time.monotonic() + seconds
    while time.monotonic() < end or calls == 0:
        calls += 1
        with poisoned_allocations():  # the memory of the last call holds the right values
            again = call(backend, given, tolerance)
        lines += [f"call {calls}: {line}" for line in deviations(again, first, True, ORDER)]
        print("".join(f"DEVIATES {title}: {line}\n" for line in lines), end="", flush=True)
        failed += bool(lines)
        lines = []
    print(f"{title}: {calls} calls, {failed} deviated", flush=True)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--minutes", type=float, default=1.0, help="time of all calls, without compiling")
    option("--shapes", nargs="+", default=SHAPES, metavar="B,T,H,D", help="batch, tokens, heads, head dimension")
    option("--backends", nargs="+", default=["hopper", "triton"] if ON_GPU else ["triton"])
    option("--far", nargs="+", type=float, default=[0.0, 120.0], help="logits of keys that outweigh all others")
    option("--load", type=int, default=2 * ON_GPU, help="processes that keep the GPU busy meanwhile")
    options = parser.parse_args(argv)
    shapes = [tuple(map(int, text.split(","))) for text in options.shapes]
    cases = [(s, b, f, t) for s in shapes for b in options.backends for f in options.far for t in ("auto", None)]
    busy = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for _ in range(options.load)]
    try:
        if not all(process.stdout.readline() for process in busy):
            raise RuntimeError("a process that was to keep the GPU busy has ended")
        failed = sum(stress(*case, 60 * options.minutes / len(cases)) for case in cases)
    finally:
        for process in busy:
            process.kill()
    print(f"{failed} calls deviated" if failed else "every call repeated")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
