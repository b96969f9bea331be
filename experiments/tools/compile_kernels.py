"""Compile the kernels without a GPU, and hold them to the limits of the hardware and of config.py. Usage::

    python experiments/tools/compile_kernels.py                              # every tile of both backends, bfloat16
    python experiments/tools/compile_kernels.py --decays scalar --paths TMA  # part of it
    python experiments/tools/compile_kernels.py --targets sm_80 gfx942       # the Triton kernels for other GPUs
    PYTHONPATH=folder python experiments/tools/compile_kernels.py            # with the Triton that is there

The launch functions run on CPU tensors, with a driver that launches nothing. Printed per kernel: registers, bytes of
register spills, shared memory. CI compiles a part with every supported Triton (.ci/run).

The exit status is 1 for a fault. A kernel does not compile, or needs more shared memory than a block has. ptxas
serialises its asynchronous matrix products, which costs a large part of the speed. It reads tiles in a way that ptxas
gets wrong (shares_an_address), or stores data in a barrier (reuses_a_barrier). It spills more than config.py allows, on
sm_90 with the Triton of its measurements. Other versions bring another ptxas, and tiles of other GPUs were never timed:
there spills are printed, and are no fault.
"""

import argparse
import contextlib
import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from shared.provenance import provenance
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from decayattn.backends.hopper import backend as hopper
from decayattn.backends.hopper import config as hopper_config
from decayattn.backends.planning import halo_bound, halo_rows
from decayattn.backends.portable import backend as portable
from decayattn.backends.portable import config as portable_config
from decayattn.backends.portable import decode as decoding
from decayattn.backends.runtime import launching
from decayattn.distributed.collectives import row_bytes, unpack
from decayattn.problem import DECAY_BLOCK, AttentionProblem, GradientRequest, Inputs
from decayattn.reference import CacheBuffers


@dataclass(frozen=True)
class Target:
    """A GPU to compile for, and the bytes of shared memory that a block can have there."""

    gpu: GPUTarget
    shared_memory: int

    @property
    def arch(self) -> str:
        """Its name in config.py."""
        hip = self.gpu.backend == "hip"
        return portable_config.arch_name((9, 4) if hip else divmod(self.gpu.arch, 10), hip, self.shared_memory)


# CUDA Programming Guide, technical specifications per compute capability; of CDNA 3, the local data share
TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 << 10),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10),
}
MULTIPROCESSORS = 132
SKIP_TOLERANCE = 2.0**-24  # decay_attention's
PATHS = {
    "TMA": "tiles by TMA", "both sides": "the same, not causal", "window": "the same with a window",
    "row scales": "the same with a scale per row", "deterministic": "the same with sums of integers",
    "pointers": "tiles through pointers",
    "narrow": "through pointers, D = 24 for 64, 88 for 128, D_v a third of it, gaps between the numbers of k",
    "small": "so few that the gradients of keys and queries share a launch", "packed": "sequences, with a window",
    "bias": "through pointers, with a bias and its gradient", "decode": "one query row over a key cache",
    "halo": "the plan of keys that other GPUs have, and their moves",
}
# bytes that a path may spill beyond what config.py grants its tile. "triton": where skipping begins, and a tile of a
# bias, take registers; a bias has no tiles of its own yet. "hopper", by kernel and head dimension, 192 being that of
# consume_192.py: the other side of the diagonal takes them. What these spills cost has not been measured
MORE_SPILLS = json.loads(Path(__file__).with_name("spills.json").read_text())
# paths of GPUs without tiles for descriptors and without tiles of small problems
OTHER_PATHS = ("pointers", "narrow", "packed", "bias", "decode", "halo")
TUNED_ON = "3.6."  # the Triton of the measurements in config.py
TABLES = {
    "forward_kernel": portable_config.FORWARD,
    "key_gradients_kernel": portable_config.KEY_GRADIENTS,
    "query_gradients_kernel": portable_config.QUERY_GRADIENTS,
}


def compiling_driver(target: Target) -> SimpleNamespace:
    """The part of Triton's driver that compiling needs; it has no device."""
    # one for each target: Triton remembers what it compiled by the device, and not by its kind
    device = [*TARGETS.values()].index(target)
    return SimpleNamespace(
        launcher_cls=None, utils=None, get_current_target=lambda: target.gpu, get_current_device=lambda: device,
        get_current_stream=lambda device=0: 0, get_active_torch_device=lambda: torch.device("cpu"),
        map_python_to_cpp_type=lambda name: name,
    )


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    some, decays = {"nargs": "+"}, ["scalar", "constant", "none"]
    parser.add_argument("--backends", **some, choices=["hopper", "triton"], default=["hopper", "triton"])
    parser.add_argument("--head-dims", **some, type=int, default=[64, 128, 192, 256])
    parser.add_argument("--decays", **some, choices=decays, default=decays)
    said = "; ".join(f"{path}: {about}" for path, about in PATHS.items())
    parser.add_argument("--paths", **some, choices=PATHS, default=list(PATHS), help=said)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--targets", **some, choices=TARGETS, default=["sm_90"], help="Hopper's: sm_90 only")
    parser.add_argument("--json", type=Path, help="file for the printed figures")
    options = parser.parse_args(argv)
    print(f"triton {triton.__version__}")
    found = []
    for name in options.targets:
        driver.set_active(compiling_driver(TARGETS[name]))
        for kernel in compiled(name, options):
            found.append(kernel)
            print(line(kernel), flush=True)
    failures = sum(bool(kernel["faults"]) for kernel in found)
    if options.json is not None:
        head = json.dumps(provenance("experiments/tools/compile_kernels.py", argv))
        lines = ",\n".join(dict.fromkeys(map(json.dumps, found)))  # one per kernel, for a readable diff
        options.json.write_text(f'{head[:-1]},\n"kernels": [\n{lines}\n]}}\n')
    print(f"{failures} faults")
    return int(failures > 0)


def compiled(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """Facts of every kernel that was compiled for a target."""
    target, dtype = TARGETS[name], getattr(torch, options.dtype)
    strict = name == "sm_90" and triton.__version__.startswith(TUNED_ON)
    for backend, dim, decay in itertools.product(options.backends, options.head_dims, options.decays):
        if backend == "hopper" and name != "sm_90":
            continue
        of_backend = MORE_SPILLS[backend] if name == "sm_90" else OTHER_PATHS
        for path in (path for path in options.paths if path in of_backend):
            of_call = {"target": name, "backend": backend, "dim": dim, "decay": decay, "path": path}
            try:
                kernels = compiled_kernels(backend, dim, decay, dtype, path, target)
            except Exception as error:  # the compiler's, of many kinds; the other kernels are compiled all the same
                traceback.print_exception(error)
                fault = f"does not compile: {type(error).__name__}"
                yield of_call | dict(kernel="-", registers=0, spills=0, shared=0, faults=[fault], notes=[])
                continue
            for kernel in kernels:
                found, ptx = resources(kernel, target), kernel.asm.get("ptx", "")
                found |= {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared}
                allowed = allowed_spills(backend, kernel.metadata.name, dim, dtype, path, target)
                spills = [f"spills more than {allowed} B"] if found["spills"] > allowed else []
                faults = {
                    "too much shared memory": found["shared"] > target.shared_memory,
                    "something else where a barrier is": reuses_a_barrier(ptx),
                    "tiles of two layouts at one address": shares_an_address(ptx),
                    "serialised": found["serialised"],
                }
                said = [fault for fault, is_there in faults.items() if is_there] + spills * strict
                yield of_call | found | {"faults": said, "notes": [] if strict else spills}


def line(kernel: dict) -> str:
    return (
        "{target:7s}{backend:7s} D{dim:<4d} {decay:9s} {path:10s} {kernel:24s} {registers:3d} registers {spills:5d} B "
        "spilled {shared:7d} B shared  "
    ).format(**kernel) + ", ".join(kernel["faults"] + kernel["notes"])


def allowed_spills(backend: str, kernel: str, dim: int, dtype: torch.dtype, path: str, target: Target) -> int:
    """Bytes that config.py grants a kernel; the small ones around the attention have none."""
    arch = target.arch
    if backend == "hopper":
        if kernel not in ("forward_kernel", "gradients_kernel"):
            return 0
        widths = hopper_config.widths(dim, value_dim_of(backend, dim))
        tile = (hopper_config.forward if kernel == "forward_kernel" else hopper_config.backward)(widths)
        if kernel == "forward_kernel" or tile.blocks == 1:
            dim = widths.qk
        # P in float32, for the gradient of a constant rate
        in_float32 = (kernel, dim, dtype) == ("gradients_kernel", 64, torch.float16)
        return tile.spill_bytes + MORE_SPILLS[backend][path].get(f"{kernel} {dim}", 0) + 72 * in_float32
    if kernel == "gradients_kernel":
        return portable_config.choose_small(True, arch, dim, dtype).spill_bytes
    if kernel not in TABLES:
        return 0
    if kernel == "forward_kernel" and path == "small" and dim <= 128:
        return portable_config.choose_small(False, arch, dim, dtype).spill_bytes
    aligned = path in ("TMA", "small", "packed")
    tile = portable_config.choose(TABLES[kernel], arch, dim, dtype, aligned, path == "packed")
    return tile.spill_bytes + (MORE_SPILLS[backend][path] if arch == "sm90" else 0)


def value_dim_of(backend: str, dim: int) -> int:
    """D_v of a D: 128 with 192, for which "hopper" has consumers of its own (consume_192.py)."""
    return 128 if (backend, dim) == ("hopper", 192) else dim


def compiled_kernels(
    backend: str, dim: int, decay: str, dtype: torch.dtype, path: str, target: Target = TARGETS["sm_90"]
) -> list:
    """The kernels of a forward and a backward (or of a decoding step, or a halo), compiled and not launched."""
    by_tma = path in ("TMA", "both sides", "window", "row scales", "deterministic")
    # of a long sequence the decay prefix takes two launches, of a short one only one of them
    length = 4096 if by_tma else 256 if path == "small" else 1024
    shape = (1 if path in ("packed", "small") else 2, length, 4, dim)
    filled = 2 if by_tma else 1  # without a stride between the batch entries TMA cannot address a tensor
    of_values = (*shape[:3], value_dim_of(backend, dim))
    q, k, v, d_out = (torch.empty(filled, *x[1:], dtype=dtype).expand(x) for x in (shape, shape, of_values, of_values))
    if path == "narrow":
        narrow = dim - 40
        q, v, d_out = q[..., :narrow], v[..., : narrow // 3], d_out[..., : narrow // 3]
        k = k.new_empty(*shape[1:3], 2 * narrow)[..., ::2].expand(*shape[:3], narrow)
    log_decay = {"none": None, "constant": torch.empty(4), "scalar": torch.empty(shape[:3])}[decay]
    bounds, window, longest = None, (256, 200) if path == "window" else (-1, -1), None
    if path == "packed":
        bounds, window, longest = torch.empty(3, 4, dtype=torch.int32), (256, -1), (512, 512)
    bias = torch.empty(shape[2], shape[1], shape[1]) if path == "bias" else None
    row_scale = torch.empty(shape[:3]) if path == "row scales" else None
    causal = path not in ("both sides", "window")
    scale = dim**-0.5 if row_scale is None else 1.0
    inputs = Inputs(q, k, v, log_decay, row_scale, bounds, bias, scale=scale)
    problem = AttentionProblem.of(inputs, causal, window, longest, SKIP_TOLERANCE)
    with collecting(target) as kernels:
        if path == "decode":
            decode(inputs, decay)
        elif path == "halo":
            plan_halo(problem, inputs)
        else:
            module = portable if backend == "triton" else hopper
            module.forward(problem, inputs._replace(sink=q.new_empty(problem.num_heads)), True)
            for with_lse in (True, False):
                out, _, saved = module.forward(problem, inputs, with_lse)
            requested = GradientRequest(decay != "none", bias is not None, sink_gradient=False)
            torch.use_deterministic_algorithms(path == "deterministic")
            try:
                module.backward(problem, inputs, out, saved, d_out, None, requested)
            finally:
                torch.use_deterministic_algorithms(False)
    return kernels


def decode(inputs: Inputs, decay: str) -> None:
    """Append to a cache, contiguous and in pages, and attend to it."""
    q, k, v, log_decay = inputs.q, inputs.k, inputs.v, inputs.log_decay
    alpha = log_decay.double().mT.contiguous().mT if decay == "scalar" else None
    lengths, first = torch.empty(2, dtype=torch.int32), torch.empty(2, 4, dtype=torch.int32)
    held = CacheBuffers(k, v, lengths, first, torch.empty(2, 4, dtype=torch.float64), alpha)
    k_pages, v_pages = (torch.empty(9, 16, *k.shape[2:], dtype=k.dtype) for _ in range(2))
    alpha_pages = None if alpha is None else torch.empty(9, 16, 4, dtype=torch.float64)
    table = torch.empty(2, 40, dtype=torch.int32)
    paged = CacheBuffers(k_pages, v_pages, lengths, first, None, alpha_pages, table)
    one_block = paged._replace(block_table=table[:, :1])  # a number that is 1 is no argument
    for cache, new, counted in (
        (held, slice(1), None), (held, slice(300), lengths), (paged, slice(1), None), (one_block, slice(1), None),
    ):
        rates = log_decay[:, new] if decay == "scalar" else None
        portable.append(cache, k[:, new], v[:, new], rates, counted)
    for cache in (held, paged):
        rates = log_decay if decay == "constant" else None
        row = Inputs(q[:, :1], cache.keys[:, :, :1], cache.values[:, :, :1], rates, scale=inputs.scale)
        options = dict(first=first[..., None], block_table=cache.block_table)
        decoding.decode(row, torch.empty(2, dtype=torch.int32), alpha=cache.alpha, **options)


def plan_halo(problem: AttentionProblem, inputs: Inputs) -> None:
    """Plan a halo, and move its rows."""
    q, k, log_decay, length = inputs.q, inputs.k, inputs.log_decay, inputs.k.shape[1]
    if log_decay is not None:
        summary = halo_bound.summarise(problem, q, k, log_decay, inputs.scale, length // DECAY_BLOCK)
        everyone, offsets = summary.keys.repeat(3, 1), torch.empty(4, dtype=torch.int64)
        for rank, sequence in ((1, None), (2, torch.empty(2, dtype=torch.int64))):  # 1 is no argument
            place = halo_bound.Place((length,) * 3, rank, offsets, 0, length, sequence)
            halo_bound.first_keys(problem, place, everyone, summary, SKIP_TOLERANCE)
    decays = None if log_decay is None or log_decay.ndim == 1 else log_decay[..., None]
    tensors, runs = (k, inputs.v, decays), torch.empty(9, 5, dtype=torch.int64)
    for mode in ("read", "write", "add"):
        rows = unpack(torch.empty(64, row_bytes(tensors), dtype=torch.uint8), tensors)
        halo_rows.move(mode, tensors, rows, runs, (0, 64))


@contextlib.contextmanager
def collecting(target: Target) -> Iterator[list]:
    """Every launch in this context compiles for the target and is collected instead."""
    kernels, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(portable_config, "arch", return_value=target.arch),
        mock.patch.object(launching, "multiprocessors", return_value=MULTIPROCESSORS),
    ):
        yield kernels


def resources(kernel, target: Target) -> dict[str, int | bool]:
    """Registers and bytes of a thread by ptxas, or by the assembler of AMD's GPUs."""
    hip = target.gpu.backend == "hip"
    said = kernel.asm["amdgcn"] if hip else _assembled(kernel.asm["ptx"], target.gpu.arch)
    patterns = (r"\.vgpr_count: +(\d+)", r"\.vgpr_spill_count: +(\d+)") if hip else (
        r"Used (\d+) registers", r"(\d+) bytes spill stores")
    registers, spills = (int(re.search(pattern, said).group(1)) for pattern in patterns)
    serialised = re.search(r"\(C75\d\d\)", said) is not None
    return {"registers": registers, "spills": 4 * spills if hip else spills, "serialised": not hip and serialised}


def shares_an_address(ptx: str) -> bool:
    """True if matrix products read tiles of two layouts through descriptors that are formed from one register.

    The upper half of a descriptor says how the tile's lines lie. ptxas 12.8 and 12.9 (Triton 3.6 to 3.8) have formed
    wrong descriptors where two upper halves were added to one register: products of other memory, or an illegal access.
    """
    layouts: dict[str, set[int]] = {}
    for register, number in re.findall(r"add\.s64\s+%rd\d+, (%rd\d+), (-?\d{16,});", ptx):
        # what an address may have beyond 32 bits is carried, not a layout
        layouts.setdefault(register, set()).add((int(number) % 2**64 + 2**14) >> 32)
    return any(len(found) > 1 for found in layouts.values())


def reuses_a_barrier(ptx: str) -> bool:
    """True if something else is kept where an mbarrier was made that was not invalidated.

    Triton reuses a barrier's memory after the last wait; to the GPU it is a barrier until mbarrier.inval. Where
    processes shared an H200, words that were stored there read as the barrier's first state after context switches.
    """
    address = r"\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?\s*\]"
    begins = {register: int(number) for register, number in re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)}
    begins["global_smem"] = 0

    def places(instruction: str) -> set[int]:
        found = re.findall(rf"{instruction}[^\[\n;]*{address}", ptx)
        return {begins[register] + int(number or 0) for register, number in found if register in begins}

    barriers = places(r"mbarrier\.init") - places(r"mbarrier\.inval")
    others = places(r"\b(?:ld|st|atom|red|ldmatrix|stmatrix)\.(?:\w+\.)*?shared")
    return any(barrier <= other < barrier + 8 for barrier in barriers for other in others)


@functools.lru_cache(32)  # the small kernels around the attention come again
def _assembled(ptx: str, capability: int) -> str:
    """Output of ptxas, with Triton's options."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", f"--gpu-name={sm_arch_from_capability(capability)}", "-o", "/dev/null"]
        options += ["--regAllocOptLevel=2"] * (tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))
        faster = launching.faster_ptxas() if capability == 90 else None
        command = [(faster or get_ptxas(capability)).path, *options, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
