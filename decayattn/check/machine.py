"""Facts that a defect may depend on: versions, GPUs, the backends that run here, and the choice of "auto"."""

import collections
import importlib.metadata
import importlib.util
import itertools
import platform
import sys
from typing import Any

import torch
from torch.utils import collect_env

import decayattn
from decayattn import normalize
from decayattn.backends import registry
from decayattn.check.calls import half
from decayattn.check.processes import one_line


def versions() -> list[tuple[str, str]]:
    """(name, version) of the software, then the GPUs."""
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = ", ".join(f"{name} {number}" for name, number in found.items() if number) or "without CUDA"
    gpus: collections.Counter[str] = collections.Counter()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        # PyTorch for CUDA has the name of the GPU as gcnArchName
        capability = gpu.gcnArchName if torch.version.hip is not None else f"{gpu.major}.{gpu.minor}"
        gpus[f"{gpu.name}, capability {capability}, {gpu.total_memory / 2**30:.1f} GiB"] += 1
    kinds = [f"{count} x {kind}" for kind, count in gpus.items()] or ["none that torch can use"]
    return [
        ("decayattn", decayattn.__version__),
        ("torch", f"{torch.__version__} ({build})"),
        ("Triton", version("triton")),
        ("numpy", version("numpy")),  # the interpreter uses it
        ("Python", platform.python_version()),
        ("OS", platform.platform()),
        ("driver", collect_env.get_nvidia_driver_version(collect_env.run) or "no nvidia-smi, or it fails"),
        *(("GPU", kind) for kind in kinds),
    ]


def version(module: str) -> str:
    """Installed packages that contain the module (Triton has several names), with their versions."""
    packages = sorted({*importlib.metadata.packages_distributions().get(module, ())})
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages) or "not installed"


def backends(device: torch.device) -> tuple[dict[str, str], list[str]]:
    """Kernel backends that cannot be checked here, with the reasons; and the reasons that are faults."""
    unchecked, faults = dict[str, str](), list[str]()
    for name in registry.AUTOMATIC:
        try:
            found = registry.load(name)
        except Exception as error:
            found = one_line(error)
        if isinstance(found, str):
            unchecked[name] = f"cannot be imported: {found}"
            if importlib.util.find_spec("triton") is not None:
                faults.append(f"backend {name} {unchecked[name]}")
            continue
        # the interpreter takes no bfloat16, "hopper" only 16 bits
        if (reason := found.unavailable(torch.float16, device)) is not None:
            unchecked[name] = reason
    triton = sys.modules.get("triton")
    if device.type == "cuda" and triton is not None and triton.knobs.runtime.interpret:
        reason = "TRITON_INTERPRET is set: on a GPU, too, Triton would interpret its kernels instead of compiling them"
        return dict.fromkeys(registry.AUTOMATIC, reason), [*faults, reason]
    return unchecked, faults


# ordinary calls: causal, with a decay per token; the 16-bit dtype and T = 1024 unless given
CALLS: dict[str, dict[str, Any]] = {
    "D64": {}, "D128": {"head_dim": 128}, "D256": {"head_dim": 256}, "D64, T 256": {"length": 256},
    "D64, with a bias": {"bias": True}, "D64, float32": {"dtype": torch.float32}, "D64, 1 query": {"queries": 1},
}


def choose(
    device: torch.device, head_dim: int = 64, length: int = 1024, queries: int | None = None, bias: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[str, ...]:
    """Backend that "auto" takes for a call, then reasons against faster ones."""
    q, k, v = (
        torch.empty(2, tokens, 8, head_dim, dtype=dtype or half(device), device=device)
        for tokens in (queries or length, length, length)
    )
    log_decay = torch.empty(2, length, 8, device=device)
    added = torch.empty(1, 8, 1, length, device=device) if bias else None
    problem, inputs = normalize.dense(q, k, v, log_decay, None, True, bias=added)
    chosen: str = registry.select(problem, "auto")
    if chosen == "auto":
        chosen = registry.resolve(problem, "auto", inputs)
    reasons = []
    for name in itertools.takewhile(lambda name: name != chosen, registry.AUTOMATIC):
        reason = registry.objection(problem, name, inputs)
        if reason is None and device.type == "cpu":
            reason = "on a CPU it can only be interpreted, which is for debugging"
        reasons.append(f"not {name}: {reason or 'it is slower for so few tokens'}")
    return chosen, *reasons
