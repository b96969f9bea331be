"""Loss curves and speed of the toy language model on several devices beside one, a run per strategy.

    python experiments/benchmark_strategies.py                      # on two GPUs: 7 runs of 2.5 minutes
    python experiments/benchmark_strategies.py --minutes 8          # no run that would end later; the next call goes on
    python experiments/benchmark_strategies.py --strategies one ddp # part of it

Every run is train_toy_lm.py as a user starts it: the same weights, bytes and total batch, its gradients checked against
one process before the first step and after the last. "one" is one device; "one again" repeats it, because the atomic
additions of a gradient have no fixed order: what the two differ by is noise. A run that fails is exit status 1.
Without a GPU a tiny model takes a few steps in two processes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from shared.options import declare, declare_output, expect_positive, positive
from shared.plots import frame, save_beside
from shared.progress import Progress, in_time
from shared.provenance import ROOT, provenance
from shared.report import resumed, write
from toy_lm.figures import read_log
from toy_lm.statistics import read

# of train_toy_lm.py, for each run; "one" runs have one device
STRATEGIES = {
    "one": [],
    "one again": [],
    "ddp": ["--strategy", "ddp"],
    "fsdp": ["--strategy", "fsdp"],
    "tensor": ["--strategy", "tensor"],
    "context, halo": ["--strategy", "context", "--context_mode", "halo"],
    "context, heads": ["--strategy", "context", "--context_mode", "heads"],
}
# bytes of the gradient check: the script's own 512 take a minute at either end of a run on a GPU
_CHECKED = 256
METHOD = {
    "train_bits, validation_bits": "bits per byte, by step",
    "tokens_per_second": "of the median milliseconds_per_step between validations, the first stretch left out, in "
    "which kernels are compiled",
    "difference": "of the mean training loss to that of one device, over all logged steps; largest_difference: of a "
    "single one",
    "gradients": f"every gradient through the kernels, on sequences of {_CHECKED} bytes, before the first step and "
    "after the last, within its error budget around that of one process in float64: else the run fails",
}
# colour-blind safe (Okabe and Ito)
_COLOURS = dict(zip(STRATEGIES, ("#000000", "#999999", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00"),
                    strict=True))
_SIZES = ("layers", "width", "heads", "context", "batch_size", "steps")
GPU_DEFAULTS = {
    # so much that a step waits for the GPU and not for Python: with a batch of 16 and width 512, a step took 60 ms on
    # one GPU, and 58 on two
    "layers": 8, "width": 768, "heads": 12, "context": 2048, "batch_size": 64, "steps": 160, "devices": 2,
    "output": ROOT / "results/benchmark_strategies.json",
}
CPU_DEFAULTS = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch_size": 4, "steps": 12, "devices": 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; the exit status is 1 if a run fails."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    if cuda and torch.cuda.device_count() < options.devices:
        print(f"--devices: expected at most {torch.cuda.device_count()}, the GPUs that are here, got {options.devices}")
        return 2
    result: dict[str, Any] = provenance("experiments/benchmark_strategies.py", argv, options.commit)
    setup = {name: getattr(options, name) for name in ("devices", *_SIZES)} | {"more": options.more}
    result = resumed(result | {"method": METHOD, "setup": setup, "rows": []}, options.output)
    failed = run_all(options, result)
    print(table(result))
    if options.output and result["rows"]:
        save_beside(draw(result), options.output)
    return int(failed)


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--strategies", "what to run", choices=tuple(STRATEGIES), nargs="+", default=list(STRATEGIES))
    option("--devices", "GPUs, or processes on a CPU, of the runs on several", type=positive)
    for name in _SIZES:
        option(f"--{name.replace('_', '-')}", "of the model and its training", type=positive)
    option("--more", "further options of train_toy_lm.py for every run, as in --more='--decay alibi'", type=str.split,
           default=[])
    option("--minutes", "begin no run that would end later; None: all of them", type=float, default=None)
    option("--limit", "seconds after which a run has failed", type=positive, default=600)
    declare_output(option, "JSON file that results are kept in; None: printed only")
    options = parser.parse_args(argv)
    expect_positive(parser, options, "minutes")
    return options


def run_all(options: argparse.Namespace, result: dict[str, Any]) -> bool:
    """Every run that is not in the report yet, as far as the minutes reach; whether one failed."""
    failed = False
    done = {row["run"] for row in result["rows"]}
    todo = [name for name in options.strategies if name not in done]
    progress = Progress(len(todo))
    for name in in_time(todo, options.minutes, progress, "runs"):
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            status, said = train(name, options, Path(folder, "run"))
            seconds = time.perf_counter() - begun
            if status:
                failed = True
                progress.print(f"{name}: FAILED with status {status}, {seconds:.0f} s\n{said[-3000:]}")
            else:
                result["rows"].append({"run": name, "seconds": round(seconds, 1)} | read_run(Path(folder, "run")))
                progress.print(f"{name}: {seconds:.0f} s")
        compare(result)
        if options.output:
            write(result, options.output)
        progress.step(name)
    progress.close()
    return failed


def train(name: str, options: argparse.Namespace, folder: Path) -> tuple[int | str, str]:
    """(exit status, what it printed) of one training."""
    sizes = [word for size in _SIZES for word in (f"--{size}", str(getattr(options, size)))]
    devices = 1 if name.startswith("one") else options.devices
    every = max(1, options.steps // 6)
    command = [
        sys.executable, str(ROOT / "experiments/train_toy_lm.py"), "--run", str(folder), "--devices", str(devices),
        *STRATEGIES[name], *sizes, "--validate_every", str(every), "--sample_bytes", "0",
        "--check_context", str(_CHECKED), *options.more,
    ]
    try:
        run = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=options.limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or ""  # bytes, in some versions of Python
        printed = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return f"none after {options.limit} seconds", printed
    return run.returncode, run.stdout


def read_run(folder: Path) -> dict[str, Any]:
    """What a run's folder has."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    stretches = [row["milliseconds_per_step"] for row in read(folder) if row["milliseconds_per_step"] is not None]
    milliseconds = statistics.median(stretches[1:] or stretches)
    found = {"parameters": summary["parameters"], "strategy": summary["strategy"], "devices": summary["devices"]}
    for key, metric in (("train_bits", "train_bits"), ("validation_bits", "val_bits")):
        steps, bits = read_log(folder, metric)
        found[key] = {"steps": list(steps), "bits": list(bits)}
    return found | {"milliseconds_per_step": milliseconds, "stretches": stretches}


def compare(result: dict[str, Any]) -> None:
    """Speeds, and differences to one device, of all rows."""
    setup, rows = result["setup"], result["rows"]
    one = next((row for row in rows if row["run"] == "one"), None)
    for row in rows:
        seconds = row["milliseconds_per_step"] / 1e3
        row["tokens_per_second"] = setup["batch_size"] * setup["context"] / seconds
        if one is not None:
            row["speed_over_one"] = one["milliseconds_per_step"] / row["milliseconds_per_step"]
            pairs = list(zip(row["train_bits"]["bits"], one["train_bits"]["bits"], strict=True))
            apart = [own - other for own, other in pairs]
            row["difference"] = statistics.fmean(apart)
            row["largest_difference"] = max(map(abs, apart))


def table(result: dict[str, Any]) -> str:
    """A line per run."""
    lines = [f"{'':16}{'tokens/s':>10} {'/one':>6} {'validation bits':>16} {'− one':>9} {'at most':>9}"]
    for row in result["rows"]:
        speed = f"{row['speed_over_one']:.2f}" if "speed_over_one" in row else "–"
        apart = f"{row['difference']:+10.4f}{row['largest_difference']:10.4f}" if "difference" in row else ""
        bits = row["validation_bits"]["bits"][-1]
        lines.append(f"{row['run']:16}{row['tokens_per_second']:10.0f} {speed:>6}{bits:17.4f}{apart}")
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Figure:
    """Left the losses, right tokens per second."""
    rows = result["rows"]
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        left.plot(row["train_bits"]["steps"], row["train_bits"]["bits"], color=_COLOURS[row["run"]], linewidth=1.2,
                  label=row["run"])
    left.set(xlabel="step", ylabel="bits per byte", title="training loss, the same total batch")
    left.legend(frameon=False, fontsize="small")
    names = [row["run"] for row in rows]
    right.barh(names, [row["tokens_per_second"] / 1e3 for row in rows], color=[_COLOURS[name] for name in names])
    right.invert_yaxis()
    right.set(xlabel="thousand tokens per second", title=f"speed, {result['setup']['devices']} devices")
    for panel in (left, right):
        frame(panel)
    sizes = "{layers} layers, width {width}, context {context}, batch {batch_size}".format(**result["setup"])
    figure.suptitle(f"{sizes}; {result['gpu'] or 'CPU'}, torch {result['torch']}", fontsize="medium")
    return figure


if __name__ == "__main__":
    sys.exit(main())
