"""The program: options, the sections in order, and a list of faults at the end.

Exit status: 0 without faults, 1 with any, 2 for a wrong option, 130 if interrupted. A fault is a result outside its
budget, a kernel that fails, or a backend that cannot be imported although Triton is installed. Backends without Triton
or without their GPU are not checked: the last line names them.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from decayattn.check import choice, errors, processes, speed, versions
from decayattn.check.text import row


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(
        "python -m decayattn.check", description="Is decayattn right and fast on this machine?",
        epilog="exit status: 0 if all that was checked is right, 1 if anything is wrong, 2 for a wrong option",
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--no-speed", action="store_true", help="measure no times (a CPU never does)")
    parser.add_argument("--device", default=default, help="cpu, cuda or cuda:N (here: %(default)s)")
    parser.add_argument(
        "--processes", type=int, help="parallel processes; 1: this one alone (default: by cores and memory)"
    )
    options = parser.parse_args(arguments)
    try:
        device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device: expected cpu, cuda or cuda:N, got {options.device!r}")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device: expected cpu, cuda or cuda:N, got {options.device!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            parser.error(f"--device: torch can use {count} GPUs here, got {options.device!r}")
        device = torch.device("cuda", device.index or 0)
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes: expected at least 1, got {options.processes}")
    return options, device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    options, device = parse(arguments)
    begin = time.perf_counter()
    if device.type == "cuda" and options.processes != 1:
        processes.prepare()
    choice.enable_interpreter(device)
    missing = choice.missing_backends()
    unchecked = choice.unchecked_backends(device, missing)
    times = device.type == "cuda" and not options.no_speed
    count = options.processes or errors.default_processes(device)
    if (reason := errors.no_halo(device, count)) is not None:
        unchecked["halo"] = reason
    tasks = errors.cases(device, unchecked)
    with errors.judging(tasks, device, count) as verdicts:  # worker processes compile from here on
        versions.report(device)
        wrong = choice.report(device, missing)
        if times:
            speed.load(device)
        found, concerned = errors.report(tasks, verdicts, unchecked)
    wrong += found
    if times:
        wrong += speed.report(device, concerned)
    seconds = f"{time.perf_counter() - begin:.0f} s"
    print(f"Wrong, {len(wrong)} in {seconds}:" if wrong else f"All that was checked is right ({seconds}).")
    for text in wrong:
        row(text)
    if unchecked:
        print(f"Not checked, for the reasons above: {', '.join(unchecked)}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
