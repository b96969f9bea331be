"""Versions of the software, and the GPUs: facts that a defect may depend on."""

import collections
import contextlib
import importlib.metadata
import platform
import subprocess

import torch

from decayattn.check.text import row, section

# other names of a published package
_PUBLISHED_AS = {"triton": ("triton-rocm", "pytorch-triton-rocm", "triton-windows")}
NOT_INSTALLED = "not installed"


def report(device: torch.device) -> None:
    with section("Versions"):
        for name, found in versions(device):
            row(name, found, widths=(9,))


def versions(device: torch.device) -> list[tuple[str, str]]:
    """(name, version) of the software, then the GPUs."""
    numpy = [("numpy", version("numpy"))] if device.type == "cpu" else []  # the interpreter uses it
    return [
        ("decayattn", version("decayattn")),
        ("torch", f"{torch.__version__} ({_torch_build()})"),
        ("Triton", version("triton")),
        *numpy,
        ("Python", platform.python_version()),
        ("OS", platform.platform()),
        ("driver", _driver()),
        *(("GPU", text) for text in _gpus()),
    ]


def version(package: str) -> str:
    """Installed version of a package, under any of its names."""
    for name in (package, *_PUBLISHED_AS.get(package, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name) + ("" if name == package else f" ({name})")
    return NOT_INSTALLED


def _torch_build() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is None:
        return "without CUDA"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return f"CUDA {torch.version.cuda}, cuDNN {cudnn}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "no nvidia-smi, or it fails"


def _gpus() -> list[str]:
    """A line for each kind of GPU."""
    if not torch.cuda.is_available():
        return ["none that torch can use"]
    kinds: collections.Counter[str] = collections.Counter()
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        # PyTorch for CUDA has the name of the GPU as gcnArchName
        capability = gpu.gcnArchName if torch.version.hip is not None else f"{gpu.major}.{gpu.minor}"
        kinds[f"{gpu.name}, capability {capability}, {gpu.total_memory / 2**30:.1f} GiB"] += 1
    return [f"{count} x {kind}" for kind, count in kinds.items()]
