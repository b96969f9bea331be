"""Compile the kernels for sm_90 on any machine, GPU or not, and hold them to what the hardware and config.py allow.

    python experiments/compile_kernels.py                                   # every tile of both backends, bfloat16
    python experiments/compile_kernels.py --decays scalar --paths TMA       # part of it

The launch functions run as they do on a GPU, on CPU tensors, with a driver that compiles and launches nothing; so what
is compiled is what would be launched. Printed per kernel: registers, bytes of register spills, shared memory, and
whether ptxas serialised the asynchronous matrix products (which costs a large part of the speed without a word). The
exit status is 1 if a kernel does not compile, needs more shared memory than a block has, serialises, or (with the
Triton that the tiles were chosen on; others bring another ptxas) spills more than config.py says.
"""

import argparse
import contextlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from decayattn.backends import hopper, launching, portable
from decayattn.backends.portable import decode as decoding
from decayattn.problem import AttentionProblem

SHARED_MEMORY = 232_448  # bytes that a block of sm_90 can have
MULTIPROCESSORS = 132
SKIP_TOLERANCE = 2.0**-24  # decay_attention's
PATHS = ["TMA", "both sides", "pointers", "small", "packed", "bias", "decode"]
# bytes that a path may spill beyond what config.py grants its tile: where skipping begins, and a tile of a bias, take
# registers. A bias has no tiles of its own yet; what these spills cost has not been measured
MORE_SPILLS = {"TMA": 4, "pointers": 8, "small": 0, "packed": 0, "bias": 448, "decode": 0}
# the same of the Hopper backend, by kernel and head dimension, whose loops are those of the TMA path: the other side of
# the diagonal takes registers, and so does where a sequence begins
HOPPER_MORE_SPILLS = {
    "TMA": {},
    "both sides": {
        ("forward_kernel", 128): 36,
        ("gradients_kernel", 64): 60, ("gradients_kernel", 128): 332,
    },
    "packed": {("forward_kernel", 128): 4},
}  # fmt: skip
# the Triton of the measurements in config.py
TUNED_ON = "3.6."
TABLES = {
    "forward_kernel": portable.config.FORWARD,
    "key_gradients_kernel": portable.config.KEY_GRADIENTS,
    "query_gradients_kernel": portable.config.QUERY_GRADIENTS,
}
HOPPER_TABLES = {"forward_kernel": hopper.config.forward, "gradients_kernel": hopper.config.backward}


class CompilingDriver:
    """As much of Triton's driver as compiling needs; it has no device."""

    launcher_cls = None
    utils = None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=["hopper", "triton"], default=["hopper", "triton"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument(
        "--decays", nargs="+", choices=["none", "constant", "scalar"], default=["scalar", "constant", "none"]
    )
    parser.add_argument(
        "--paths", nargs="+", choices=PATHS, default=PATHS,
        help="how tiles are read; both sides: as by TMA, not causal; small: so few that the gradients of keys and "
        "queries share a launch; packed: from packed sequences, with a window; bias: through pointers, with a bias and "
        "its gradient; decode: one query row over a key cache",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    driver.set_active(CompilingDriver())
    print(f"triton {triton.__version__}")
    failures = 0
    for backend, dim, decay in itertools.product(options.backends, options.head_dims, options.decays):
        for path in options.paths:
            if path not in (HOPPER_MORE_SPILLS if backend == "hopper" else MORE_SPILLS):
                continue
            if backend == "hopper" and dim > 128:
                continue
            dtype = getattr(torch, options.dtype)
            for kernel in compiled_kernels(backend, dim, decay, dtype, path):
                name, shared, found = kernel.metadata.name, kernel.metadata.shared, resources(kernel)
                allowed = allowed_spills(backend, name, dim, dtype, path)
                faults = [
                    fault
                    for fault, present in {
                        "serialised": found["serialised"],
                        "too much shared memory": shared > SHARED_MEMORY,
                        f"spills more than {allowed} B": triton.__version__.startswith(TUNED_ON)
                        and found["spills"] > allowed,
                    }.items()
                    if present
                ]
                failures += bool(faults)
                print(
                    f"{backend:7s} D{dim:<4d} {decay:9s} {path:9s} {name:24s} {found['registers']:3d} registers "
                    f"{found['spills']:5d} B spilled {shared:7d} B shared  {', '.join(faults)}",
                    flush=True,
                )
    print(f"{failures} faults")
    return int(failures > 0)


def allowed_spills(backend: str, kernel: str, dim: int, dtype: torch.dtype, path: str) -> int:
    """Bytes that config.py grants a kernel; the small ones around the attention have none."""
    if backend == "hopper":
        if kernel not in HOPPER_TABLES:
            return 0
        return HOPPER_TABLES[kernel](dim).spill_bytes + HOPPER_MORE_SPILLS[path].get((kernel, dim), 0)
    if kernel == "gradients_kernel":
        return portable.config.both_gradients("sm90", dim, dtype).spill_bytes
    if kernel not in TABLES:
        return 0
    if kernel == "forward_kernel" and path == "small" and dim <= 128:
        return portable.config.forward_of_few("sm90", dim, dtype).spill_bytes
    aligned = path in ("TMA", "small", "packed")
    tile = portable.config.choose(TABLES[kernel], "sm90", dim, dtype, aligned, path == "packed")
    return tile.spill_bytes + MORE_SPILLS[path]


def compiled_kernels(backend: str, dim: int, decay: str, dtype: torch.dtype, path: str) -> list:
    """The kernels of a forward and a backward (or of a decoding step), compiled and not launched."""
    # long, the decay prefix takes two launches, and short only one of them
    length = {"TMA": 4096, "both sides": 4096, "small": 256}.get(path, 1024)
    shape = (1 if path in ("packed", "small") else 2, length, 4, dim)
    # without a stride between the batch entries TMA cannot address a tensor
    filled = 2 if path in ("TMA", "both sides") else 1
    q, k, v, d_out = (torch.empty(filled, *shape[1:], dtype=dtype).expand(shape) for _ in range(4))
    log_decay = {"none": None, "constant": torch.empty(4), "scalar": torch.empty(shape[:3])}[decay]
    places, window, longest, bias = None, (-1, -1), None, None
    if path == "packed":
        places, window, longest = torch.empty(3, 4, dtype=torch.int32), (256, -1), (512, 512)
    if path == "bias":
        bias = torch.empty(shape[2], shape[1], shape[1])
    causal = path != "both sides"
    problem = AttentionProblem.of(q, v, log_decay, None, causal, window, places, longest, bias, SKIP_TOLERANCE)
    module = portable if backend == "triton" else hopper
    scale = dim**-0.5
    if path == "decode":
        alpha = log_decay.double().mT.contiguous().mT if decay == "scalar" else None
        with collecting() as kernels:
            decoding.decode(
                q[:, :1], k[:, :, :1], v[:, :, :1], log_decay if decay == "constant" else None, scale=scale,
                lengths=torch.empty(2, dtype=torch.int32), alpha=alpha, first=torch.empty(2, 4, 1, dtype=torch.int32),
            )  # fmt: skip
        return kernels
    with collecting() as kernels:
        for with_lse in (True, False):
            out, _, *saved = module.launch.forward(problem, q, k, v, log_decay, scale, places, bias, with_lse)
        backward = module.launch.backward if backend == "triton" else module.launch_backward.backward
        asked_for = decay != "none", bias is not None
        backward(problem, d_out, None, q, k, v, log_decay, scale, places, bias, out, *saved, *asked_for)
    return kernels


@contextlib.contextmanager
def collecting() -> Iterator[list]:
    """Every launch in this context compiles for sm_90 and is collected instead."""
    kernels, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(portable.launch, "_arch", return_value="sm90"),
        mock.patch.object(launching, "multiprocessors", return_value=MULTIPROCESSORS),
    ):
        yield kernels


def resources(kernel) -> dict[str, int | bool]:
    """What ptxas says of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr

    def number(pattern: str) -> int:
        return int(re.search(pattern, said).group(1))

    return {
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores"),
        "serialised": re.search(r"\(C75\d\d\)", said) is not None,
    }


if __name__ == "__main__":
    sys.exit(main())
