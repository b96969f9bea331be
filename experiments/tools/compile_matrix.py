"""Compile the kernels with several versions of Triton, for several GPUs, and print what each needs, side by side.

    python experiments/tools/compile_matrix.py --short      # a part of the table: a few minutes on two cores
    python experiments/tools/compile_matrix.py              # all of it, for hours; writes results/compile_matrix.json

Versions of Triton are installed to a folder (`--folder`, which keeps them for the next time), and not into this
environment; compile_kernels.py runs with each. A cell is registers, bytes of spills and KB of shared memory, of all
variants of a kernel that has these tiles, the most. The exit status is 1 if a run of compile_kernels.py had a fault.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.provenance import ROOT, provenance

SCRIPT = Path(__file__).resolve().parent / "compile_kernels.py"
# PyTorch 2.10 to 2.14 bring 3.6.0, 3.7.0, 3.7.1 and 3.8; a build for CPUs takes the newest
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
TARGETS = ("sm_90", "sm_80", "sm_89", "sm_100", "sm_120", "gfx942")
# targets, with options of compile_kernels.py
WHOLE = [(target, ()) for target in TARGETS]
SHORT = [  # with the oldest and the newest version; with those between, the first
    ("sm_90", ("--head-dims", "64", "--decays", "scalar", "--paths", "TMA", "narrow")),
    ("sm_90", ("--head-dims", "128", "--decays", "scalar", "--paths", "TMA", "narrow")),
    ("sm_90", ("--backends", "hopper", "--head-dims", "64", "--decays", "scalar", "--paths", "row scales")),
    ("sm_90", ("--backends", "hopper", "--head-dims", "192", "256", "--decays", "scalar", "--paths", "TMA")),
    ("gfx942", ("--head-dims", "128", "--decays", "scalar", "--paths", "pointers", "decode")),
]
# options of which it takes a part of the table
PARTS = ("head-dims", "decays", "paths")
VALUES = ("registers", "spills", "shared")
# what tells one row of the table from another
ROW = ("target", "backend", "dim", "kernel", "path")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS, help="of Triton")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, help="a part of the table")
    parser.add_argument("--short", action="store_true", help="what is compiled after every change")
    for name in PARTS:
        parser.add_argument(f"--{name}", nargs="+", help="a part of the table, as for compile_kernels.py")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many compile at once")
    parser.add_argument("--folder", type=Path, help="where the versions are, or are put")
    parser.add_argument("--json", type=Path, help="default: results/compile_matrix.json, and none with --short")
    options = parser.parse_args()
    # of two values of an option the last one counts
    parts = [(f"--{name}", *values) for name in PARTS if (values := vars(options)[name.replace("-", "_")])]
    runs = [
        (version, target, (*arguments, *itertools.chain(*parts)))
        for version in options.versions
        for target, arguments in (short(version) if options.short else WHOLE)
        if options.targets is None or target in options.targets
    ]
    path = options.json or (None if options.short else ROOT / "results" / "compile_matrix.json")
    known = provenance("experiments/tools/compile_matrix.py", sys.argv[1:])
    kernels, failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        folders = {version: installed(version, options.folder or Path(temporary)) for version in options.versions}
        with ThreadPoolExecutor(options.processes) as pool:
            results = pool.map(lambda run: compiled(folders[run[0]], *run[1:]), runs)
            for (version, *_), (status, found) in zip(runs, results, strict=True):
                failed |= status != 0
                kernels += [{"triton": version, **kernel} for kernel in found]
                if path is not None:
                    write(path, known, kernels)  # as far as it has come
    print(table(kernels, options.versions))
    for kernel in kernels:
        for text in kernel["faults"]:
            print(f"fault: triton {kernel['triton']}: {', '.join(str(kernel[name]) for name in ROW)}: {text}")
    return int(failed)


def short(version: str) -> list[tuple[str, tuple[str, ...]]]:
    return SHORT if version in (VERSIONS[0], VERSIONS[-1]) else SHORT[:1]


def installed(version: str, folder: Path) -> Path:
    """The folder to put first on the path for a version of Triton."""
    target = folder / f"triton-{version}"
    if not (target / "triton" / "__init__.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    return target


def compiled(folder: Path, target: str, arguments: Iterable[str]) -> tuple[int, list[dict]]:
    """The exit status of compile_kernels.py with the Triton of the folder, and what it found."""
    with tempfile.TemporaryDirectory() as temporary:
        found = Path(temporary) / "kernels.json"
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join((str(folder), str(ROOT)))
        command = [sys.executable, str(SCRIPT), "--targets", target, *arguments, "--json", str(found)]
        done = subprocess.run(command, env=environment, check=False)
        return done.returncode, json.loads(found.read_text())["kernels"] if found.exists() else []


def most(kernels: Iterable[dict], names: Iterable[str]) -> dict[tuple, dict[str, int]]:
    """The largest values of the kernels that agree in these names."""
    found: dict[tuple, dict[str, int]] = {}
    for kernel in kernels:
        largest = found.setdefault(tuple(kernel[name] for name in names), dict.fromkeys(VALUES, 0))
        for value in VALUES:
            largest[value] = max(largest[value], kernel[value])
    return found


def table(kernels: list[dict], versions: Iterable[str]) -> str:
    """A Markdown table with a column per version of Triton."""
    found, versions = most(kernels, (*ROW, "triton")), list(versions)
    lines = [["target", "backend", "D", "kernel", "path", *versions], ["---"] * (len(ROW) + len(versions))]
    for row in dict.fromkeys(key[:-1] for key in found):
        cells = [found.get((*row, version)) for version in versions]
        lines.append([*map(str, row), *map(_cell, cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _cell(values: dict[str, int] | None) -> str:
    if values is None:
        return ""
    return f"{values['registers']} · {values['spills']} · {values['shared'] / 1024:.0f}"


def write(path: Path, known: dict, kernels: list[dict]) -> None:
    """One line per kernel, so that changes can be read."""
    names = ("triton", "target", "backend", "dim", "decay", "path", "kernel")
    notes: dict[tuple, set[str]] = {}
    for kernel in kernels:
        notes.setdefault(tuple(kernel[name] for name in names), set()).update(kernel["faults"] + kernel["notes"])
    rows = [
        json.dumps(dict(zip(names, key, strict=True)) | values | ({"notes": sorted(notes[key])} if notes[key] else {}))
        for key, values in most(kernels, names).items()
    ]
    head = json.dumps({"provenance": known, "versions": list(dict.fromkeys(kernel["triton"] for kernel in kernels))})
    path.write_text(head[:-1] + ',\n"kernels": [\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    sys.exit(main())
