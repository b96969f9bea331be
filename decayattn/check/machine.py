"""Facts that a defect may depend on: versions, GPUs, and the backends that run here."""

import collections
import importlib.metadata
import importlib.util
import platform
import sys

import torch
from torch.utils import collect_env

import decayattn
from decayattn.backends import registry
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
