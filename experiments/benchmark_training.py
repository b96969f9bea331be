"""Tokens per second of training a 124 M decoder with one attention or the other; correct first.

    python experiments/benchmark_training.py                        # all of it on a GPU: about 20 minutes
    python experiments/benchmark_training.py --minutes 9 --compiled-lengths         # eager alone, as much as fits
    python experiments/benchmark_training.py --lengths --head-dims 64               # then the rest, into the same file
    python experiments/benchmark_training.py --lengths 8192 --compiled-lengths --variants ours cudnn-rotary identity

Every variant steps on the same parameters and the same tokens; its first step is held against float64 before it is
timed. Steps follow one another for --seconds, in interleaved rounds, so that all meet the power limit. Eager at every
length, compiled at --compiled-lengths, which cost most of the time: each variant is compiled anew for each of them. A
setting (head dimension, length, eager or compiled) is done or not: --output keeps those that are. Who cannot be
imported is named as absent. The exit status is 1 if a variant of ours is wrong or fails. Without a GPU there are no
speeds: the checks run on a tiny model, ours in Triton's interpreter.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

# in this process: the pool of processes that compiles for FlexAttention has hung for good (torch 2.11)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from shared.options import declare, declare_output, expect_positive, positive
from shared.plots import save_beside
from shared.progress import Progress, in_time
from shared.provenance import ROOT, provenance
from shared.report import resumed, write
from shared.timing import interpret_kernels
from training_benchmark import measure, report
from training_benchmark.measure import Models, Setting
from training_benchmark.model import Size
from training_benchmark.variants import IDENTITY, VARIANTS

from decayattn.backends import registry

GPU_DEFAULTS = {
    "layers": 12, "width": 768, "vocabulary": 50_304, "head_dims": [64, 128], "lengths": [8192, 2048, 32768],
    "compiled_lengths": [8192], "tokens": 32768, "check_length": 1024, "backend": "auto",
    "output": ROOT / "results/benchmark_training.json",
}
CPU_DEFAULTS = {
    "layers": 2, "width": 32, "vocabulary": 64, "head_dims": [16], "lengths": [70], "compiled_lengths": [],
    "tokens": 70, "check_length": 70, "backend": "triton",
}
# what all settings of a report have in common
SETUP = (
    "tokens", "layers", "width", "vocabulary", "check_length", "backend", "rounds", "seconds", "seed",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a variant of ours is wrong or fails."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    if not cuda:
        interpret_kernels()
        print("No GPU, so no speeds: the first step of each variant beside float64, ours in Triton's interpreter.")
    result = begin(options, argv)
    run(options, result, "cuda" if cuda else "cpu")
    if result["rows"] and options.output:
        save_beside(report.draw(result), options.output)
    return int(any(entry["ours"] for entry in result["missing"]))


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--variants", "attentions", choices=tuple(VARIANTS), nargs="+", default=list(VARIANTS))
    option("--head-dims", "head dimensions", type=positive, nargs="+", metavar="D")
    option("--lengths", "tokens of context, eager", type=positive, nargs="*", metavar="T")
    option("--compiled-lengths", "tokens of context, compiled", type=positive, nargs="*", metavar="T")
    option("--tokens", "tokens of a step: B = max(1, tokens // T)", type=positive)
    option("--layers", "layers", type=positive)
    option("--width", "width", type=positive)
    option("--vocabulary", "tokens", type=positive)
    option("--check-length", "tokens of the first step that is held against float64", type=positive)
    option("--backend", "our backend", choices=registry.NAMES)
    option("--rounds", "interleaved rounds", type=positive, default=3)
    option("--seconds", "how long steps follow one another for one figure", type=float, default=0.5)
    option("--minutes", "begin no setting that would end later; None: all of them", type=float, default=None)
    option("--seed", "seed of weights and tokens", type=int, default=0)
    declare_output(option, "JSON file that results are kept in")
    options = parser.parse_args(argv)
    if not cuda and options.output:
        parser.error("--output: no GPU here, so there is no speed to write")
    for head_dim in options.head_dims:
        if options.width % head_dim or head_dim % 2:
            parser.error(f"--head-dims: expected even divisors of the width, {options.width}, got {head_dim}")
    expect_positive(parser, options, "seconds", "minutes")
    return options


def begin(options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The report to go on with."""
    new: dict[str, Any] = provenance("experiments/benchmark_training.py", argv, options.commit)
    new |= {"method": report.METHOD, "setup": {name: getattr(options, name) for name in SETUP}}
    new |= {"variants": {name: VARIANTS[name].label for name in options.variants}}
    new |= {"missing": [], "checks": [], "rows": []}
    return resumed(new, options.output)


def settings(options: argparse.Namespace) -> list[Setting]:
    """Eager first: what is compiled costs the most time."""
    found = []
    for compiled, lengths in ((False, options.lengths), (True, options.compiled_lengths)):
        for length in lengths:
            for head_dim in options.head_dims:
                size = Size(options.layers, options.width, head_dim, options.vocabulary)
                found.append(Setting(size, max(1, options.tokens // length), length, compiled))
    return found


def run(options: argparse.Namespace, result: dict[str, Any], device: str) -> None:
    """Every setting that is not in the report yet, as far as the minutes reach."""
    known = {report.setting_of(row) for row in result["rows"]}
    todo = [s for s in settings(options) if (s.size.head_dim, s.length, s.compiled) not in known]
    each = len(options.variants) * (1 + (1 + options.rounds) * (device == "cuda"))
    progress = Progress(len(todo) * each)
    for number, setting in enumerate(in_time(todo, options.minutes, progress, "settings")):
        progress.print(f"\n{setting}")
        # what an earlier call, cut off, said of this setting
        for part in ("missing", "checks"):
            result[part] = [entry for entry in result[part] if entry["setting"] != str(setting)]
        measure_one(setting, options, result, progress, device)
        progress.step("", (number + 1) * each - progress.done)  # a variant that failed has fewer steps
        if options.output:
            write(result, options.output)
    progress.close()


def measure_one(
    setting: Setting, options: argparse.Namespace, result: dict[str, Any], progress: Progress, device: str
) -> None:
    """Check everybody, then time those that passed."""
    chosen = [VARIANTS[name] for name in options.variants]
    models = Models(setting, options.backend, device, options.seed)
    passed = []

    def missing(name: str, kind: str, why: str) -> None:
        entry = {"setting": str(setting), "variant": name, "ours": VARIANTS[name].ours, "kind": kind, "reason": why}
        result["missing"].append(entry)
        progress.print(f"  {name}: {kind}: {why}")

    for variant, found in measure.check(models, chosen, min(options.check_length, setting.length)):
        progress.step(f"checked {variant.name}")
        if not found["passed"]:
            missing(variant.name, found["kind"], found["reason"])
            continue
        passed.append(variant)
        if variant.kind != IDENTITY:
            errors = ", ".join(f"{name} {x:.1e} of {found['budget'][name]:.1e}" for name, x in found["errors"].items())
            progress.print(f"  {variant.name}: relative errors {errors}")
            result["checks"].append({"setting": str(setting), "variant": variant.name} | found)
    if device != "cuda":
        return
    torch.cuda.empty_cache()
    with measure.compiler(setting.compiled):
        timed, failed = measure.time_rounds(models, passed, options.rounds, options.seconds, progress.step)
    for name, why in failed.items():
        missing(name, "failed", why)
    found_rows = measure.rows(setting, timed)
    result["rows"] += found_rows
    progress.print(report.table(found_rows))


if __name__ == "__main__":
    sys.exit(main())
