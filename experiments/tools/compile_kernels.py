"""Compile the kernels on any machine, GPU or not, and hold them to what the hardware and config.py allow. Usage::

    python experiments/tools/compile_kernels.py  # every tile of both backends, bfloat16
    python experiments/tools/compile_kernels.py --decays scalar --paths TMA       # part of it
    python experiments/tools/compile_kernels.py --targets sm_80 gfx942            # the Triton kernels for other GPUs
    python experiments/tools/compile_kernels.py --calls 100                       # the kernels of random calls

The launch functions run as they do on a GPU, on CPU tensors, with a driver that compiles and launches nothing. The
compiled kernels are those that a GPU would launch. Printed per kernel: registers, bytes of register spills, shared
memory, and whether ptxas serialised the asynchronous matrix products (which silently costs a large part of the speed).
The exit status is 1 if a kernel does not compile, needs more shared memory than a block has, or serialises. It is 1 if
a kernel reads tiles in a way that ptxas gets wrong (shares_an_address), or stores data where a barrier is
(reuses_a_barrier). On sm_90, with the Triton that the tiles were chosen on (others bring another ptxas), it is also 1
for more spills than config.py allows. Tiles of other targets were never timed; their spills are printed and are no
fault. Random calls are those of fuzz_kernels.py --family 1 in 16 bits; slowness is no fault.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
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
from decayattn.problem import DECAY_BLOCK, AttentionProblem, Held, Inputs
from tools.fuzzing import judge
from tools.fuzzing.draws import draw
from tools.fuzzing.tensors import build


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
PATHS = ["TMA", "both sides", "window", "row scales", "pointers", "narrow", "small", "packed", "bias", "decode", "halo"]
# bytes that a path may spill beyond what config.py grants its tile: where skipping begins, and a tile of a bias, take
# registers. A bias has no tiles of its own yet; what these spills cost has not been measured
MORE_SPILLS = {"TMA": 4, "pointers": 8, "narrow": 8, "small": 0, "packed": 0, "bias": 568, "decode": 0, "halo": 0}
# paths of GPUs without tiles for descriptors and without tiles of small problems
OTHER_PATHS = ("pointers", "narrow", "packed", "bias", "decode", "halo")
# the same of the Hopper backend, by kernel and its head dimension (192: consume_192.py), whose loops are those of the
# TMA path: the other side of the diagonal takes registers
HOPPER_MORE_SPILLS = {
    "TMA": {},
    "both sides": {
        ("forward_kernel", 256): 76, ("gradients_kernel", 64): 236, ("gradients_kernel", 128): 300,
        ("gradients_kernel", 192): 124, ("gradients_kernel", 256): 160,
    },
    "window": {
        ("forward_kernel", 128): 4, ("forward_kernel", 256): 52, ("gradients_kernel", 64): 72,
        ("gradients_kernel", 128): 152, ("gradients_kernel", 192): 184, ("gradients_kernel", 256): 160,
    },
    "row scales": {
        ("forward_kernel", 64): 164, ("forward_kernel", 256): 124, ("gradients_kernel", 64): 192,
        ("gradients_kernel", 128): 108, ("gradients_kernel", 192): 112,
    },
    "packed": {("forward_kernel", 256): 8},
}
# by kernel, head dimension and dtype: P in float32, for the gradient of a constant rate
HOPPER_FLOAT16_SPILLS = {("gradients_kernel", 64, torch.float16): 72}
# the Triton of the measurements in config.py
TUNED_ON = "3.6."
TABLES = {
    "forward_kernel": portable_config.FORWARD,
    "key_gradients_kernel": portable_config.KEY_GRADIENTS,
    "query_gradients_kernel": portable_config.QUERY_GRADIENTS,
}


class CompilingDriver:
    """The part of Triton's driver that compiling needs; it has no device."""

    launcher_cls = None
    utils = None

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> int:
        # one for each target: Triton remembers what it compiled by the device, and not by its kind
        return [*TARGETS.values()].index(self.target)

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=["hopper", "triton"], default=["hopper", "triton"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 192, 256])
    parser.add_argument(
        "--decays", nargs="+", choices=["none", "constant", "scalar"], default=["scalar", "constant", "none"]
    )
    parser.add_argument(
        "--paths", nargs="+", choices=PATHS, default=PATHS,
        help="how tiles are read; both sides: as by TMA, not causal; window: the same with a window; narrow: through "
        "pointers, D = 24 for 64, 88 for 128, and D_v a third of it, k with gaps between its numbers; small: so few "
        "that the gradients of keys and queries share a launch; packed: from packed sequences, with a window; bias: "
        "through pointers, with a bias and its gradient; decode: one query row over a key cache; halo: the plan of "
        "keys that other GPUs have, and what packs them and puts them in place",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=["sm_90"],
        help="the Hopper backend is compiled for sm_90 only",
    )
    parser.add_argument(
        "--calls", type=int, help="instead of the table, the kernels of so many random calls in 16 bits, each once"
    )
    parser.add_argument("--seed", type=int, default=0, help="what these are drawn from")
    parser.add_argument("--json", type=Path, help="where to write what is printed")
    options = parser.parse_args()
    print(f"triton {triton.__version__}")
    found = []
    for name in options.targets:
        driver.set_active(CompilingDriver(TARGETS[name]))
        for kernel in compiled(name, options) if options.calls is None else compiled_of_calls(name, options):
            found.append(kernel)
            print(line(kernel), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"triton": triton.__version__, "kernels": found}) + "\n")
    failures = sum(bool(kernel["faults"]) for kernel in found)
    print(f"{failures} faults")
    return int(failures > 0)


def compiled(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """Facts of every kernel that was compiled for a target."""
    target, dtype = TARGETS[name], getattr(torch, options.dtype)
    for backend, dim, decay in itertools.product(options.backends, options.head_dims, options.decays):
        if backend == "hopper" and name != "sm_90":
            continue
        of_backend = HOPPER_MORE_SPILLS if backend == "hopper" else MORE_SPILLS if name == "sm_90" else OTHER_PATHS
        for path in options.paths:
            if path not in of_backend:
                continue
            of_call = {"target": name, "backend": backend, "dim": dim, "decay": decay, "path": path}
            try:
                kernels = compiled_kernels(backend, dim, decay, dtype, path, target)
            except Exception as error:  # the compiler's, of many kinds; the other kernels are compiled all the same
                yield of_call | not_compiled(error)
                continue
            strict = name == "sm_90" and triton.__version__.startswith(TUNED_ON)
            for kernel in kernels:
                found = judged(kernel, target)
                allowed = allowed_spills(backend, kernel.metadata.name, dim, dtype, path, target)
                spills = [f"spills more than {allowed} B"] if found["spills"] > allowed else []
                faults = [*found["faults"], *["serialised"] * found["serialised"], *(spills if strict else [])]
                yield of_call | found | {"faults": faults, "notes": [] if strict else spills}


def compiled_of_calls(name: str, options: argparse.Namespace) -> Iterator[dict]:
    """The same of random calls."""
    target, seen = TARGETS[name], set()
    calls = (draw(options.seed, number, calls_per_family=1) for number in itertools.count())
    in_16_bits = (call for call in calls if getattr(torch, call.family.dtype).itemsize == 2)
    for call in itertools.islice(in_16_bits, options.calls):
        case, family = build(call, torch.device("cpu")), call.family
        decay = {"none": "none", "token": "scalar"}.get(family.decay, "constant")
        for backend in options.backends:
            if backend == "hopper" and name != "sm_90":
                continue
            of_call = {
                "target": name, "backend": backend, "dim": max(family.head_dim, family.value_dim), "decay": decay,
                "path": f"call {call.number}",
            }
            module = portable if backend == "triton" else hopper
            with collecting(target) as kernels, mock.patch.object(module, "unavailable", return_value=None):
                try:
                    judge.run(case, backend)
                except Exception as error:
                    if not judge.is_refused(backend, error):
                        yield of_call | not_compiled(error)
            for kernel in kernels:
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    yield of_call | judged(kernel, target) | {"notes": []}


def not_compiled(error: Exception) -> dict:
    traceback.print_exception(error)
    nothing = {"registers": 0, "spills": 0, "shared": 0, "serialised": False, "notes": []}
    return {"kernel": "-", **nothing, "faults": [f"does not compile: {type(error).__name__}"]}


def judged(kernel, target: Target) -> dict:
    """Facts of a compiled kernel, and its faults."""
    ptx = kernel.asm.get("ptx", "")
    known = {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared, **resources(kernel, target)}
    wrong = {
        "too much shared memory": known["shared"] > target.shared_memory,
        "something else where a barrier is": reuses_a_barrier(ptx),
        "tiles of two layouts at one address": shares_an_address(ptx),
    }
    return known | {"faults": [fault for fault, is_there in wrong.items() if is_there]}


def line(kernel: dict) -> str:
    return (
        f"{kernel['target']:7s}{kernel['backend']:7s} D{kernel['dim']:<4d} {kernel['decay']:9s} {kernel['path']:9s} "
        f"{kernel['kernel']:24s} {kernel['registers']:3d} registers {kernel['spills']:5d} B spilled "
        f"{kernel['shared']:7d} B shared  {', '.join(kernel['faults'] + kernel['notes'])}"
    )


def allowed_spills(backend: str, kernel: str, dim: int, dtype: torch.dtype, path: str, target: Target) -> int:
    """Bytes that config.py grants a kernel; the small ones around the attention have none, but for a halo's."""
    arch = target.arch
    if backend == "hopper":
        if kernel not in ("forward_kernel", "gradients_kernel"):
            return 0
        widths = hopper_config.widths(dim, value_dim_of(backend, dim))
        tile = hopper_config.forward(widths.qk) if kernel == "forward_kernel" else hopper_config.backward(widths)
        if kernel == "forward_kernel" or tile.consumers != "consume_192":
            dim = widths.qk
        of_path, of_dtype = (kernel, dim), (kernel, dim, dtype)
        more = HOPPER_MORE_SPILLS[path].get(of_path, 0) + HOPPER_FLOAT16_SPILLS.get(of_dtype, 0)
        return tile.spill_bytes + more
    if kernel == "gradients_kernel":
        return portable_config.both_gradients(arch, dim, dtype).spill_bytes
    if kernel not in TABLES:
        return MORE_SPILLS["halo"] if path == "halo" and arch == "sm90" else 0
    if kernel == "forward_kernel" and path == "small" and dim <= 128:
        return portable_config.forward_of_few(arch, dim, dtype).spill_bytes
    aligned = path in ("TMA", "small", "packed")
    tile = portable_config.choose(TABLES[kernel], arch, dim, dtype, aligned, path == "packed")
    return tile.spill_bytes + (MORE_SPILLS[path] if arch == "sm90" else 0)


def value_dim_of(backend: str, dim: int) -> int:
    """D_v of a D: 128 beside 192, for which "hopper" has consumers of its own (consume_192.py)."""
    return 128 if (backend, dim) == ("hopper", 192) else dim


def compiled_kernels(
    backend: str, dim: int, decay: str, dtype: torch.dtype, path: str, target: Target = TARGETS["sm_90"]
) -> list:
    """The kernels of a forward and a backward (or of a decoding step), compiled and not launched."""
    # long, the decay prefix takes two launches, and short only one of them
    length = {"TMA": 4096, "both sides": 4096, "window": 4096, "row scales": 4096, "small": 256}.get(path, 1024)
    shape = (1 if path in ("packed", "small") else 2, length, 4, dim)
    # without a stride between the batch entries TMA cannot address a tensor
    filled = 2 if path in ("TMA", "both sides", "window", "row scales") else 1
    of_values = (*shape[:3], value_dim_of(backend, dim))
    q, k, v, d_out = (
        torch.empty(filled, *x[1:], dtype=dtype).expand(x) for x in (shape, shape, of_values, of_values)
    )
    if path == "narrow":
        narrow = dim - 40
        q, v, d_out = q[..., :narrow], v[..., : narrow // 3], d_out[..., : narrow // 3]
        k = k.new_empty(*shape[1:3], 2 * narrow)[..., ::2].expand(*shape[:3], narrow)
    log_decay = {"none": None, "constant": torch.empty(4), "scalar": torch.empty(shape[:3])}[decay]
    bounds, window, longest, bias = None, (-1, -1), None, None
    if path == "packed":
        bounds, window, longest = torch.empty(3, 4, dtype=torch.int32), (256, -1), (512, 512)
    if path == "bias":
        bias = torch.empty(shape[2], shape[1], shape[1])
    if path == "window":
        window = (256, 200)
    causal = path not in ("both sides", "window")
    row_scale = torch.empty(shape[:3]) if path == "row scales" else None
    problem = AttentionProblem.of(q, v, log_decay, row_scale, causal, window, bounds, longest, bias, SKIP_TOLERANCE)
    module = portable if backend == "triton" else hopper
    scale = dim**-0.5 if row_scale is None else 1.0
    if path == "decode":
        alpha = log_decay.double().mT.contiguous().mT if decay == "scalar" else None
        with collecting(target) as kernels:
            lengths, first = torch.empty(2, dtype=torch.int32), torch.empty(2, 4, dtype=torch.int32)
            held = Held(k, v, lengths, first, torch.empty(2, 4, dtype=torch.float64), alpha)
            k_pages, v_pages = (torch.empty(9, 16, 4, dim, dtype=dtype) for _ in range(2))
            alpha_pages = None if alpha is None else torch.empty(9, 16, 4, dtype=torch.float64)
            table = torch.empty(2, 40, dtype=torch.int32)
            paged = Held(k_pages, v_pages, lengths, first, None, alpha_pages, table)
            one_block = paged._replace(block_table=table[:, :1])  # a number that is 1 is no argument
            appended = (held, slice(1), None), (held, slice(300), lengths), (paged, slice(1), None)
            for cache, new, counted in (*appended, (one_block, slice(1), None)):
                rates = log_decay[:, new] if decay == "scalar" else None
                portable.append(cache, k[:, new], v[:, new], rates, counted)
            for cache in (held, paged):
                inputs = Inputs(
                    q[:, :1], cache.keys[:, :, :1], cache.values[:, :, :1], log_decay if decay == "constant" else None,
                    scale=scale,
                )
                decoding.decode(
                    inputs, torch.empty(2, dtype=torch.int32), alpha=cache.alpha,
                    first=torch.empty(2, 4, 1, dtype=torch.int32), block_table=cache.block_table,
                )
        return kernels
    if path == "halo":
        with collecting(target) as kernels:
            if log_decay is not None:
                summary = halo_bound.summarise(problem, q, k, log_decay, scale, length // DECAY_BLOCK)
                everyone, offsets = summary.keys.repeat(3, 1), torch.empty(4, dtype=torch.int64)
                cu_seqlens = None, torch.empty(9, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
                for rank, offsets_of_sequences in zip((1, 2, 2), cu_seqlens, strict=True):  # 1 is no argument
                    place = halo_bound.Place((length,) * 3, rank, offsets, 0, length, offsets_of_sequences)
                    halo_bound.first_keys(problem, place, everyone, summary, SKIP_TOLERANCE)
            heads, length = k.shape[2], k.shape[1]
            for rank in (1, 2):
                begins, offsets = torch.empty(4, 2 * heads, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
                segments = halo_rows.Segments(begins, offsets, rank, heads, length, 128, 32, 9, 9)
                rates = log_decay if decay == "scalar" else None
                parts, grads = (k, v, rates), (None, v, rates)
                rows = halo_rows.pack_sent(segments, parts)
                halo_rows.extend(segments, rows, parts, length)
                for asked in (parts, grads):
                    halo_rows.add_returned(segments, halo_rows.pack_returned(segments, asked), asked, asked, 96)
        return kernels
    inputs = Inputs(q, k, v, log_decay, row_scale, bounds, bias, scale=scale)
    with collecting(target) as kernels:
        module.forward(problem, inputs._replace(sink=q.new_empty(problem.num_heads)), True)
        for with_lse in (True, False):
            out, _, saved = module.forward(problem, inputs, with_lse)
        asked_for = decay != "none", bias is not None
        module.backward(problem, inputs, out, saved, d_out, None, *asked_for)
    return kernels


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
    if target.gpu.backend == "hip":
        said = kernel.asm["amdgcn"]
        return {
            "registers": _number(r"\.vgpr_count: +(\d+)", said),
            "spills": 4 * _number(r"\.vgpr_spill_count: +(\d+)", said),
            "serialised": False,
        }
    said = _assembled(kernel.asm["ptx"], target.gpu.arch)
    return {
        "registers": _number(r"Used (\d+) registers", said),
        "spills": _number(r"(\d+) bytes spill stores", said),
        "serialised": re.search(r"\(C75\d\d\)", said) is not None,
    }


def shares_an_address(ptx: str) -> bool:
    """True if matrix products read tiles of two layouts through descriptors that are formed from one register.

    The upper half of a descriptor says how the tile's lines lie; the address is in the lower one. ptxas 12.8 and 12.9
    (Triton 3.6 to 3.8) have formed wrong descriptors where two upper halves were added to one register: products of
    other memory, or an illegal access.
    """
    layouts: dict[str, set[int]] = {}
    for register, number in re.findall(r"add\.s64\s+%rd\d+, (%rd\d+), (-?\d{16,});", ptx):
        # what an address may have beyond 32 bits is carried, not a layout
        layouts.setdefault(register, set()).add((int(number) % 2**64 + 2**14) >> 32)
    return any(len(found) > 1 for found in layouts.values())


def reuses_a_barrier(ptx: str) -> bool:
    """True if something else is kept where an mbarrier was made that was not invalidated.

    Triton gives memory away that nothing uses any more, and a barrier's ends where nobody waits for it. To the GPU it
    is a barrier until mbarrier.inval says otherwise: where processes shared the time of an H200, words that were stored
    there read as the barrier's first state after some context switches.
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
    """Output of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        name = f"--gpu-name={sm_arch_from_capability(capability)}"
        command = [get_ptxas(capability).path, "-v", name, str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text).group(1))


if __name__ == "__main__":
    sys.exit(main())
