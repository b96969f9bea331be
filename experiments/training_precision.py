"""What rounding does to a training whose gates are strong: bfloat16 beside float32, and others' kernels beside ours.

    python experiments/training_precision.py                  # on a GPU: planned for 8 minutes
    python experiments/training_precision.py --minutes 9      # begin no run that would end later; the next call goes on

The same small byte-level decoder is trained by every kernel, from the same weights on the same bytes (the Python
standard library, or --data), its forget gates with half-lives from a quarter of a token to 4 tokens at first. Two right
trainings part, too, as small differences grow: "perturbed" is the float32 run with first weights that are off at random
by 2⁻⁹, which is bfloat16's rounding. On the way of the float32 run, gradients of every kernel are held beside float64.
Who cannot be imported is named as absent. A loss of ours that is not finite is exit status 1. Without a GPU a tiny
model takes a few steps, ours by the eager reference.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from shared.options import declare, declare_output, expect_positive, positive
from shared.peers import Absent, reason
from shared.plots import frame, save_beside
from shared.progress import Progress, in_time
from shared.provenance import ROOT, provenance
from shared.report import resumed, write
from training_benchmark.precision import BASE, RUNS, Setup, losses_of, smooth, summary, train

from decayattn.backends import registry

METHOD = {
    "losses": "nats per byte of every step's batch",
    "loss": "mean over the last `window` steps; difference: to the float32 run's; largest_difference: over any stretch "
    "of so many steps",
    "gradients": "‖g − g64‖ / ‖g64‖ of the projections' weights (in_proj), of the gates' (decay) and of all, on the "
    "weights of the float32 run at that step, one sequence of check_length bytes; float64 by the eager reference",
    "log_decay": "mean λ [layer][head] after the training, natural log",
}
# colour-blind safe (Okabe and Ito)
_COLOURS = dict(zip((run.name for run in RUNS), ("#000000", "#999999", "#d55e00", "#e69f00", "#009e73", "#cc79a7"),
                    strict=True))
GPU_DEFAULTS = {
    "layers": 4, "width": 256, "head_dim": 64, "context": 4096, "batch": 4, "steps": 2000, "check_length": 2048,
    "window": 100, "backend": "auto", "output": ROOT / "results/training_precision.json",
}
CPU_DEFAULTS = {
    "layers": 1, "width": 32, "head_dim": 16, "context": 64, "batch": 4, "steps": 20, "check_length": 64, "window": 10,
    "backend": "reference",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing; the exit status is 1 if a run of ours fails or has a loss that is not finite."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    result = begin(options, argv)
    wrong = run_all(options, result, "cuda" if cuda else "cpu")
    if result["rows"]:
        print(table(result))
        if options.output:
            save_beside(draw(result), options.output)
    return int(wrong)


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    names = [run.name for run in RUNS]
    option("--runs", "what to train", choices=names, nargs="+", default=names)
    option("--layers", "layers", type=positive)
    option("--width", "width", type=positive)
    option("--head-dim", "head dimension", type=positive)
    option("--context", "bytes of a sequence", type=positive)
    option("--batch", "sequences of a step", type=positive)
    option("--steps", "optimiser steps", type=positive)
    option("--learning-rate", "constant after a warm-up over a twentieth of the steps", type=float, default=1e-3)
    option("--half-lives", "shortest and longest at first, in tokens", type=float, nargs=2, default=[0.25, 4.0])
    option("--check-length", "bytes of the gradient check", type=positive)
    option("--window", "steps over which losses are averaged", type=positive)
    option("--data", "text to train on, a file or a folder; None: the Python standard library", default=None)
    option("--backend", "of decay_attention", choices=registry.NAMES)
    option("--minutes", "begin no run that would end later; None: all of them", type=float, default=None)
    option("--seed", "of weights and batches", type=int, default=0)
    declare_output(option, "JSON file that results are kept in; None: printed only")
    options = parser.parse_args(argv)
    expect_positive(parser, options, "minutes")
    if options.width % options.head_dim:
        parser.error(f"--head-dim: expected a divisor of the width, {options.width}, got {options.head_dim}")
    if options.window > options.steps:
        parser.error(f"--window: expected at most the steps, {options.steps}, got {options.window}")
    if not 0 < options.half_lives[0] <= options.half_lives[1] < math.inf:
        parser.error(f"--half-lives: expected 0 < shortest <= longest < inf, got {options.half_lives}")
    return options


def setup_of(options: argparse.Namespace) -> Setup:
    """What all runs have in common."""
    return Setup(
        options.layers, options.width, options.head_dim, options.context, options.batch, options.steps,
        options.learning_rate, tuple(options.half_lives), options.check_length, options.data, options.backend,
        options.seed,
    )


def begin(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The report to go on with."""
    new: dict[str, Any] = provenance("experiments/training_precision.py", argv, options.commit)
    setup = vars(setup_of(options)) | {"half_lives": list(options.half_lives), "window": options.window}
    setup["data"] = options.data and Path(options.data).name
    new |= {"method": METHOD, "setup": setup, "labels": {run.name: run.label for run in RUNS}}
    new |= {"missing": [], "summary": [], "rows": []}
    return resumed(new, options.output)


def run_all(options: argparse.Namespace, result: dict[str, Any], device: str) -> bool:
    """Every run that is not in the report yet, as far as the minutes reach; whether one of ours went wrong."""
    wrong = False
    done = {row["run"] for row in result["rows"]}
    todo = [run for run in RUNS if run.name in options.runs and run.name not in done]
    progress = Progress(len(todo) * options.steps)
    for run in in_time(todo, options.minutes, progress, "runs"):
        is_ours = run.variant.startswith("ours")
        result["missing"] = [entry for entry in result["missing"] if entry["run"] != run.name]
        try:
            row = train(run, setup_of(options), device, lambda steps, run=run: progress.step(run.name, steps))
            result["rows"].append(row)
            finite = all(map(math.isfinite, row["losses"]))
            wrong |= is_ours and not finite
            progress.print(f"{run.name}: {'' if finite else 'NOT FINITE, '}{row['seconds']:.0f} s")
        except Exception as error:  # one that is absent or fails must not take the others with it
            kind = "absent" if isinstance(error, Absent) else "failed"
            result["missing"].append({"run": run.name, "kind": kind, "reason": reason(error)})
            wrong |= is_ours
            progress.print(f"{run.name}: {kind}: {reason(error)}")
        result["summary"] = summary(result["rows"], options.window)
        if options.output:
            write(result, options.output)
    progress.close()
    return wrong


def table(result: dict[str, Any]) -> str:
    """A line per run: its loss, how far from float32, and the errors of its gradients at the end of the float32 run."""
    last = next((row["gradients"][-1]["runs"] for row in result["rows"] if row["run"] == BASE), {})
    lines = [f"{'':28}{'loss':>8} {'− float32':>10} {'largest':>8}  relative errors of gradients at the end of float32"]
    for entry in result["summary"]:
        apart = "".join(f"{entry.get(key, math.nan):{width}.4f}" for key, width in
                        (("difference", 11), ("largest_difference", 9)))
        errors = last.get(entry["run"])
        said = ", ".join(f"{name} {x:.1e}" for name, x in errors.items()) if isinstance(errors, dict) else ""
        lines.append(f"{entry['run']:28}{entry['loss']:8.4f}{apart}  {said}")
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Figure:
    """Left the losses, right what they differ by from the float32 run's, both averaged over the window."""
    window = result["setup"]["window"]
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    losses = {row["run"]: losses_of(row) for row in result["rows"]}
    for name, values in losses.items():
        steps = range(window, len(values) + 1)
        style = {"color": _COLOURS[name], "linewidth": 1.3, "label": result["labels"][name]}
        left.plot(steps, smooth(values, window) / math.log(2), **style)
        if BASE in losses and name != BASE:
            right.plot(steps, smooth(values - losses[BASE], window) / math.log(2), **style)
    right.axhline(0, color="black", linewidth=0.8)
    left.set(ylabel="bits per byte", xlabel="step", title=f"training loss, mean of {window} steps")
    right.set(xlabel="step", title="minus that of the float32 run")
    for panel in (left, right):
        frame(panel)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False,
                  fontsize="small")
    figure.suptitle(f"Training with strong gates, {result['gpu'] or 'CPU'}, torch {result['torch']}",
                    fontsize="medium")
    return figure


if __name__ == "__main__":
    sys.exit(main())
