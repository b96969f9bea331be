"""The program: versions, backends, the table of errors, a line of speed, and the faults.

Exit status: 0 without faults, 1 with any, 2 for a wrong option, 130 if interrupted. A fault is a result outside its
budget, a kernel that fails, or a backend that cannot be imported although Triton is installed. Backends without Triton
or without their GPU are not checked: the last line names them.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence

import torch
from torch.utils import collect_env

import decayattn
from decayattn.backends import registry
from decayattn.backends.runtime import interpreter
from decayattn.check import calls
from decayattn.check.calls import Case, Tasks, Verdict, one_line


def row(text: str, first: str | None = None) -> None:
    """Print a line of a table, with the first column if there is one."""
    print("  " + (text if first is None else f"{first:9}  {text}").rstrip(), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m decayattn.check", description="Is decayattn right and fast on this machine?",
        epilog="exit status: 0 if all that was checked is right, 1 if anything is wrong, 2 for a wrong option",
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ["cpu", *["cuda"] * (gpus > 0), *(f"cuda:{n}" for n in range(gpus))]
    parser.add_argument("--no-speed", action="store_true", help="measure no times (a CPU never does)")
    parser.add_argument("--device", choices=devices, default=devices[gpus > 0], help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device(options.device)
    begin = time.perf_counter()
    if device.type == "cpu" and "triton" not in sys.modules and interpreter.fails() is None:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    unchecked, wrong = backends(device)
    cases = calls.cases(device, unchecked)
    # each backend compiles while others are judged
    started = [Tasks(calls.judge, [(case, str(device)) for case in some]) for some in cases.values()]
    try:
        print("Versions")
        for name, found in versions():
            row(found, name)
        print("\nBackends")
        for name in registry.NAMES[1:]:
            row(unchecked.get(name, "runs here"), name)
        everything = list(itertools.chain(*cases.values()))
        faulty = report_errors(everything, itertools.chain.from_iterable(started), wrong)
    finally:
        for tasks in started:
            tasks.process.kill()
    for case in everything:
        if case.kind == "timed" and case.backend not in faulty and not options.no_speed:
            print(f"\nSpeed: {case.name}, B{case.batch} H{case.heads}", flush=True)
            for found in Tasks(calls.measure, [(case, str(device))]):
                row("ERROR " + found if isinstance(found, str) else "; ".join(found))
                wrong += [f"speed: {found}"] * isinstance(found, str)
    seconds = f"{time.perf_counter() - begin:.0f} s"
    print(f"\nWrong, {len(wrong)} in {seconds}:" if wrong else f"\nAll that was checked is right ({seconds}).")
    for text in wrong:
        row(text)
    if unchecked:
        print(f"Not checked, for the reasons above: {', '.join(unchecked)}.")
    return 1 if wrong else 0


def versions() -> list[tuple[str, str]]:
    """(name, version) of the software, then the GPUs."""
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = ", ".join(f"{name} {number}" for name, number in found.items() if number) or "without CUDA"
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        # PyTorch for CUDA has the name of the GPU as gcnArchName
        capability = gpu.gcnArchName if torch.version.hip is not None else f"{gpu.major}.{gpu.minor}"
        gpus.append(f"{gpu.name}, capability {capability}, {gpu.total_memory / 2**30:.1f} GiB")
    kinds = [f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)] or ["none that torch can use"]
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


def report_errors(cases: Sequence[Case], verdicts: Iterable[Verdict | str], wrong: list[str]) -> set[str]:
    """Print the table of errors, append the faults to `wrong`, and return the backends that have them."""
    print("\nErrors against float64, as fractions of the error budget (above 1: FAIL)")
    width = max(len(case.name) for case in cases)
    row(f"{'call':{width}}  seconds   worst  of", "backend")
    faulty, fallbacks = set(), dict[str, None]()  # ordered
    for case, verdict in zip(cases, verdicts, strict=True):
        if isinstance(verdict, str):
            found, fault = f"{'':7}   ERROR  {verdict}", verdict
        else:
            mark = "ok" if verdict.passed else "FAIL"
            found = f"{verdict.seconds:7.1f}  {verdict.fraction:6.2f}  {verdict.tensor:10}  {mark}"
            fault = "" if verdict.passed else f"{verdict.tensor} is {verdict.fraction:.2f} times its error budget"
            fallbacks |= dict.fromkeys(verdict.fallbacks)
        row(f"{case.name:{width}}  {found}", case.backend)
        if fault:
            faulty.add(str(case.backend))
            wrong.append(f"{case.backend}, {case.name}: {fault}")
    print("\nPrivate names of PyTorch and Triton that are not used here")
    row("; ".join(fallbacks) or "none")
    return faulty


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
