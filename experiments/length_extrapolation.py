"""Loss over position, far beyond the trained length: decays, rotary embeddings and neither, in one and the same model.

    python experiments/length_extrapolation.py                      # 9 schemes, 3 seeds
    python experiments/length_extrapolation.py --minutes 9          # stops in time; the same command goes on
    python experiments/length_extrapolation.py --devices 2          # a process for each GPU
    python experiments/length_extrapolation.py --preset cpu         # the same in miniature, a minute on a CPU
    python experiments/length_extrapolation.py --draw results/length_extrapolation.json

Byte-level models of one shape are trained on texts of one length, on the same bytes from the same initial weights, and
read at every position of longer texts, which come from packages that are not in the training text. What is read is
Python source: by default all that is installed, the standard library and every distribution. Each run (a scheme and a
seed) is added to the output as soon as it is read. A call goes on with what the output lacks; a run that was cut off by
--minutes or Ctrl-C goes on from its checkpoint, which lies in --folder.

Exit status: 0 all is there, or --minutes or Ctrl-C ended the call; 1 a model diverged; 2 a wrong option.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from extrapolation import results, workers
from extrapolation.settings import DEFAULT_SCHEMES, Run, Settings
from language_models import corpus as corpora
from language_models.schemes import SCHEMES
from shared.options import declare, declare_output, positive
from shared.plots import kilo
from shared.progress import Progress
from shared.provenance import ROOT, provenance

PRESETS: dict[str, dict[str, Any]] = {
    "gpu": {
        "layers": 4, "width": 512, "heads": 8, "context": 1024, "batch_size": 64, "steps": 1200, "learning_rate": 2e-3,
        "lengths": [16_384, 65_536], "crops": [128, 32], "without_decay_up_to": 16_384, "precision": "bfloat16",
        "seeds": [0, 1, 2], "output": ROOT / "results/length_extrapolation.json",
    },
    "cpu": {
        "layers": 2, "width": 64, "heads": 4, "context": 32, "batch_size": 32, "steps": 60, "learning_rate": 3e-3,
        "lengths": [128, 512], "crops": [32, 8], "without_decay_up_to": 128, "precision": "float32",
        "seeds": [0], "corpus_bytes": 4_000_000, "output": ROOT / "runs/length_extrapolation/cpu.json",
    },
}
SCRIPT = "experiments/length_extrapolation.py"


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    if options.draw:
        return draw(options.draw, options.plot)
    try:
        return measure(options, argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, defaults filled in from the preset."""
    cuda = torch.cuda.is_available()
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--preset", choices=tuple(PRESETS), default="gpu" if cuda else "cpu")
    preset = first.parse_known_args(argv)[0].preset
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[first]
    )
    option = declare(parser, {field.name: field.default for field in fields(Settings)} | PRESETS[preset])
    option("--schemes", "what to compare", choices=tuple(SCHEMES), nargs="+", default=DEFAULT_SCHEMES)
    option("--seeds", "a model of each scheme for every seed", type=int, nargs="+")
    option("--data", "folder of your own; each file or folder in it is a package; None: installed Python", type=Path)
    option("--held-out", "share of the bytes in packages that are only read", type=float)
    option("--corpus-bytes", "take packages until there are so many bytes; None: all", type=positive)
    option("--layers", "transformer blocks", type=positive)
    option("--width", "channels of the residual stream", type=positive)
    option("--heads", "attention heads", type=positive)
    option("--context", "bytes of a training text", type=positive)
    option("--batch-size", "texts of a step", type=positive)
    option("--steps", "steps of a training", type=positive)
    option("--learning-rate", "its peak, the same in every scheme", type=float)
    option("--weight-decay", "of the matrices", type=float)
    option("--clip", "largest norm of the gradient", type=float)
    option("--precision", "of products", choices=("bfloat16", "float32"))
    option("--lengths", "of the texts that are read, multiples of the context", type=positive, nargs="+")
    option("--crops", "texts of each length, at most", type=positive, nargs="+")
    option("--crops-per-file", "texts of one file, at most", type=positive)
    option("--without-decay-up-to", "the longest text for schemes without decay", type=positive)
    option("--compile", "compile the MLPs with torch.compile", action="store_true", default=False)
    option("--device", "where", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    option("--devices", "GPUs, a process for each; on a CPU, processes", type=positive, default=1)
    option("--minutes", "end in time: no new run that would not fit; checkpoint of the one in progress", type=float)
    option("--folder", "of checkpoints and texts", type=Path, default=ROOT / "runs/length_extrapolation")
    declare_output(option, "JSON file, added to where it exists", plot=True)
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw the figure of a result, and do nothing else")
    options = parser.parse_args(argv)
    options.minutes_from = time.time()
    if len(options.lengths) != len(options.crops):
        parser.error("--crops: expected as many numbers as --lengths")
    if any(length % options.context for length in options.lengths) or options.context % 2:
        parser.error("--lengths: expected multiples of --context, which is even")
    if options.width % options.heads:
        parser.error("--heads: must divide the width")
    if options.device == "cuda" and not torch.cuda.device_count() >= options.devices:
        parser.error(f"--devices: expected at most {torch.cuda.device_count()}, the GPUs of this machine")
    if options.minutes is not None and not options.minutes > 0:
        parser.error("--minutes: expected a number above 0")
    options.plot = options.plot or (options.draw or options.output).with_suffix(".png")
    return options


def measure(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Do what is not done yet."""
    settings = Settings(
        **{field.name: _plain(getattr(options, field.name)) for field in fields(Settings)}
    )
    begun = time.monotonic()
    packages = corpora.installed() if options.data is None else corpora.in_folder(options.data)
    corpus = corpora.build(
        packages, options.folder, held_out=options.held_out, most_bytes=options.corpus_bytes
    )
    _tell_corpus(corpus, settings, time.monotonic() - begun)
    result = results.begin(options.output, settings, corpus.description, provenance(SCRIPT, argv, options.commit))
    wanted = [Run(scheme, seed) for seed in options.seeds for scheme in options.schemes]
    runs = [run for run in wanted if run not in results.finished(result)]
    print(f"{len(wanted) - len(runs)} of {len(wanted)} runs are there", flush=True)
    devices = [f"cuda:{n}" for n in range(options.devices)] if options.device == "cuda" else ["cpu"] * options.devices
    deadline = None if options.minutes is None else options.minutes_from + 60 * options.minutes
    job = workers.Job(settings, options.folder, options.compile, deadline)
    if runs:
        _work(workers.reports(job, runs, devices), runs, result, options, len(devices))
    print(f"\n{results.text(result)}" if result["runs"] else "no run is done yet", flush=True)
    if result["runs"]:
        draw(options.output, options.plot)
    left = [run for run in wanted if run not in results.finished(result)]
    if left:
        print(f"{len(left)} of {len(wanted)} runs are left; the same command goes on")
    return int(any(run["diverged"] is not None for run in result["runs"]))


def _work(
    reports: Any, runs: Sequence[Run], result: dict[str, Any], options: argparse.Namespace, slots: int
) -> None:
    """Write every result as it comes, and say how long it will take."""
    begun, done, estimated = time.monotonic(), 0, False
    bar = Progress(options.steps * len(runs))
    for report in reports:
        bar.step(str(report.run), report.steps)
        if report.seconds_per_step is not None and not estimated:
            estimated = True
            bar.print(_estimate(report.seconds_per_step, len(runs), slots, options))
        if report.stopped:
            bar.print(f"{report.run}: stopped, its checkpoint is in {options.folder}")
        if report.result is None:
            continue
        done += 1
        result["runs"].append(report.result | {"gpu": result["gpu"], "date": result["date"]})
        results.write(result, options.output)
        left = (time.monotonic() - begun) / done * (len(runs) - done)
        bar.print(f"{_in_words(report.result)}; {done} of {len(runs)}, about {left / 60:.1f} minutes left")
    bar.close()


def _estimate(seconds: float, runs: int, slots: int, options: argparse.Namespace) -> str:
    tokens = options.batch_size * options.context
    training = seconds * options.steps
    return (
        f"{1e3 * seconds:.1f} ms per step, {tokens / seconds:,.0f} bytes per second: {training:.0f} s to train one "
        f"model, {runs * training / slots / 60:.1f} minutes for {runs} on {slots} device{'s' * (slots > 1)}, and the "
        "reading"
    )


def _in_words(run: dict[str, Any]) -> str:
    name = f"{run['scheme']}, seed {run['seed']}"
    if run["diverged"] is not None:
        return f"{name}: diverged by step {run['diverged']}"
    columns = [column for row in run["reading"] for column in row["columns"] if column["bits"] is not None]
    said = ", ".join(f"{column['bits']:.3f} to {kilo(column['end'])}" for column in columns)
    return f"{name}: {run['training']['seconds']:.0f} + {run['reading_seconds']:.0f} s, bits per byte {said}"


def _tell_corpus(corpus: corpora.Corpus, settings: Settings, seconds: float) -> None:
    said = corpus.description
    sides = (f"{said[side]['bytes']:,} bytes of {said[side]['packages']} packages {side}" for side in
             (corpora.TRAINING, corpora.HELD_OUT))
    print(f"{', '.join(sides)} (SHA-256 {said['sha256'][:16]}), read in {seconds:.0f} s", flush=True)
    for length, crops in zip(settings.lengths, settings.crops, strict=True):
        found = len(corpora.held_out_starts(corpus, length + 1, crops, settings.crops_per_file))
        print(f"{found} held-out texts of {length:,} bytes", flush=True)


def draw(result: Path, plot: Path) -> int:
    """Write the figure of a result; without matplotlib, say so."""
    try:
        from extrapolation import figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(f"no figure: matplotlib is not installed here; --draw {result.name} draws it where it is")
        return 0
    found = json.loads(result.read_text(encoding="utf-8"))
    if not any(run["reading"] for run in found["runs"]):
        print("no figure: no run has been read")
        return 0
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.draw(found).savefig(plot)
    print(f"wrote {plot}")
    return 0


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
