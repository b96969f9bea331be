"""Loss over position, far beyond the trained length: decays, rotary embeddings and neither, in one model. Usage::

    python experiments/studies/length_extrapolation.py                      # 8 schemes, 3 seeds; on a CPU in miniature
    python experiments/studies/length_extrapolation.py --minutes 9          # stops in time; the same command goes on
    python experiments/studies/length_extrapolation.py --devices 2          # a process for each GPU

Byte-level models of one shape are trained on texts of one length. They are read at every position of longer texts, from
packages outside the training text, by default all installed Python source. The cells of a seed have the same bytes at
every step and the same initial weights, except those that only one scheme has. bits: mean bits per byte of stretches of
positions (edges: of each length) with the whole crop before them. columns: of the stretches of the table, also with at
most the trained length before each byte (in_windows).

needles: lines with a random key and a value of random hexadecimal digits, at five depths of every text. The last lines
repeat them in a random order. bits: of a digit of a repeated value, 4 without retrieval. found: share of the digits
with a probability over one half.
"""

import functools
import itertools
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import harness
from benchmarks.harness import Run
from language_models import corpus as corpora
from language_models.corpus import Corpus, TrainingCrops, crops, held_out_starts
from language_models.schemes import SCHEMES, attention_layer
from shared.options import positive
from shared.provenance import ROOT
from toy_lm.model import ByteLM, learning_rate_factor, next_byte_loss, parameter_groups

from studies import grid

OPTIONS = {
    "schemes": (list(SCHEMES), list(SCHEMES), "what to compare", SCHEMES),
    "seeds": ([0, 1, 2], [0], "a model of each scheme for every seed", int),
    "data": (None, None, "folder of your own; each file or folder in it is a package; None: installed Python", Path),
    "corpus_bytes": (None, 4_000_000, "take packages up to this number of bytes; None: all", positive),
    "layers": (4, 2, "transformer blocks"),
    "width": (512, 64, "channels of the residual stream"),
    "heads": (8, 4, "attention heads"),
    "context": (1024, 32, "bytes of a training text"),
    "batch_size": (64, 32, "texts of a step"),
    "steps": (1200, 60, "steps of a training"),
    "learning_rate": (2e-3, 3e-3, "its peak, the same in every scheme"),
    "precision": ("bfloat16", "float32", "of products", ("bfloat16", "float32")),
    "compile": (False, False, "train with compiled blocks"),
    "lengths": ([16_384, 65_536], [128, 512], "of the texts that are read, multiples of the context"),
    "crops": ([128, 32], [32, 8], "texts of each length, at most"),
    "without_decay_up_to": (16_384, 128, "the longest text for schemes without decay"),
    "folder": (ROOT / "runs/length_extrapolation",) * 2 + ("of the texts", Path),
    "output": (ROOT / "results/length_extrapolation.json", ROOT / "runs/length_extrapolation/cpu.json", "JSON file",
               Path),
} | grid.OPTIONS
# labels, of what the report of 45755f8 compared too: a decay per channel, by a product of rescaled queries and keys
LABELS = {name: scheme.label for name, scheme in SCHEMES.items()} | {
    "per-channel": "decay per channel (Wall)", "per-channel-scalar": "decay per channel and scalar decay",
}
# sizes of the model, its training and its reading; results with other ones are not put together
SETTINGS = ("layers", "width", "heads", "context", "batch_size", "steps", "learning_rate", "lengths", "crops",
            "without_decay_up_to", "precision", "corpus_bytes", "compile")
FIXED = {"weight_decay": 0.1, "clip": 1.0, "held_out": 0.15, "crops_per_file": 4}


def check_options(options: Namespace, cuda: bool) -> Iterator[str]:
    if len(options.lengths) != len(options.crops):
        yield "--crops: expected as many numbers as --lengths"
    if any(length % options.context for length in options.lengths) or options.context % 2:
        yield "--lengths: expected multiples of --context, which is even"
    if options.width % options.heads:
        yield f"--heads: expected a divisor of the width, {options.width}"


def measure(run: Run) -> None:
    """Read the texts, and train and read the models that the report lacks."""
    options = run.options
    settings = Namespace(**{name: getattr(options, name) for name in SETTINGS}, **FIXED)
    try:
        packages = corpora.installed() if options.data is None else corpora.in_folder(options.data)
        corpus = corpora.build(
            packages, options.folder, held_out=settings.held_out, most_bytes=settings.corpus_bytes
        )
        texts = [len(held_out_starts(corpus, length + 1, count, settings.crops_per_file))
                 for length, count in zip(settings.lengths, settings.crops, strict=True)]
    except ValueError as error:
        sys.exit(f"error: {error}")
    said = corpus.description
    for side in (corpora.TRAINING, corpora.HELD_OUT):
        print(f"{said[side]['bytes']:,} bytes of {said[side]['packages']} packages {side}", flush=True)
    print(f"{texts} held-out texts of {settings.lengths} bytes", flush=True)
    run.report |= {"settings": vars(settings), "corpus": said,
                   "edges": {str(length): bins(settings.context, length) for length in settings.lengths}}
    run.resume(**vars(settings), sha256=said["sha256"])
    cells = [(scheme, seed) for seed in options.seeds for scheme in options.schemes]
    grid.fill(run, ("scheme", "seed"), cells, train, (settings, options.folder), say)
    print("\n".join(" | ".join(row) for row in cells_of_table(run.report)))
    if run.report["rows"]:
        draw(run.report).savefig(options.output.with_suffix(".png"))


def bins(context: int, length: int) -> list[int]:
    """Edges of stretches of positions, which have a mean loss each: 6 to an octave, from a 64th of the context on."""
    octaves = math.log2(length / context)
    edges = {round(context * 2 ** (n / 6)) for n in range(-36, math.ceil(6 * octaves))}
    return sorted({0, length, *(edge for edge in edges if edge < length)})


def columns(context: int, longest: int) -> list[tuple[int, int]]:
    """The stretches of positions of the table, [begin, end): to the context, 4, 16 and 64 times it."""
    edges = [0, *(context * factor for factor in (1, 4, 16, 64))]
    return [(begin, end) for begin, end in itertools.pairwise(edges) if end <= longest]


@functools.lru_cache(maxsize=1)  # one for all cells of a process
def _text(folder: Path, device: str) -> tuple[Corpus, Tensor]:
    corpus = corpora.load(folder)
    return corpus, corpus.text.to(device)


def train(cell: tuple[str, int], settings: Namespace, folder: Path, device: str) -> dict[str, Any]:
    """The row of one cell: its training, and its reading. Raises FloatingPointError for a loss that is not finite."""
    (scheme, seed), (corpus, text) = cell, _text(folder, device)
    model = build_model(settings, scheme, seed).to(device)
    batches = TrainingCrops(corpus, text, settings.context, settings.batch_size, seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay), lr=settings.learning_rate, betas=(0.9, 0.95),
        fused=text.is_cuda,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps))
    if settings.compile:
        torch.compiler.reset()  # of the last cell's blocks: as many kinds of one class are too many
        for block in model.blocks:
            block.compile(dynamic=False)
    losses, began = torch.zeros(settings.steps, device=device), time.monotonic()
    for step in range(settings.steps):
        with autocast(settings, text.device):
            loss = next_byte_loss(model, batches.batch(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
    if not losses.isfinite().all():
        raise FloatingPointError(f"the loss of step {int(losses.isfinite().cumprod(0).sum())} is not finite")
    bits, seconds = [float(part.mean()) / math.log(2) for part in losses.chunk(100)], time.monotonic() - began
    eager = build_model(settings, scheme, seed).to(device)  # reads other lengths than the compiled one
    eager.load_state_dict(model.state_dict())
    most = math.inf if SCHEMES[scheme].decay != "none" else settings.without_decay_up_to
    lengths = [length for length in settings.lengths if length <= most]
    return {"training": {"bits": bits, "seconds": round(seconds, 1)},
            "parameters": sum(p.numel() for p in model.parameters()),
            "reading": list(read(eager, lengths, settings, corpus, text)),
            "needles": list(retrieve(eager, [settings.context, *lengths], settings, corpus, text))}


def build_model(settings: Namespace, scheme: str, seed: int) -> ByteLM:
    """The model with the initial weights of a seed: the same on every device, and in all schemes but "pro"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = settings.width, settings.heads
        return ByteLM(settings.layers, *sizes, make_attention=lambda: attention_layer(scheme, *sizes))


def autocast(settings: Namespace, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.precision == "bfloat16")


# tokens of a call: of the memory that it takes, the most is for the products of the MLP
_TOKENS = {"cuda": 2**18, "cpu": 2**13}


@torch.no_grad()
def read(
    model: ByteLM, lengths: Sequence[int], settings: Namespace, corpus: Corpus, text: Tensor
) -> Iterator[dict[str, Any]]:
    """Mean bits per byte for every length, by stretches of `bins` and by columns of the table. in_windows: of the same
    bytes in windows of the trained length, half a window apart, where the second halves count."""
    model.eval()
    context = settings.context
    for length in lengths:
        tokens = held_out(corpus, text, length, settings)
        of_crops = {"bits": losses(model, tokens, settings).double(),
                    "in_windows": losses_in_windows(model, tokens, settings).double()}
        mean, shorter = of_crops["bits"].mean(0), max((n for n in settings.lengths if n < length), default=0)
        yield {
            "length": length, "crops": len(tokens),
            "bits": [round(float(mean[a:b].mean()), 5) for a, b in itertools.pairwise(bins(context, length))],
            "columns": [
                {"begin": a, "end": b} | {key: float(x[:, a:b].mean(1).mean()) for key, x in of_crops.items()}
                for a, b in columns(context, length) if b > shorter
            ],
        }


def held_out(corpus: Corpus, text: Tensor, length: int, settings: Namespace) -> Tensor:
    """Crops of length + 1 bytes; of a length that is not in the settings as many as of the first one."""
    count = dict(zip(settings.lengths, settings.crops, strict=True)).get(length, settings.crops[0])
    return crops(text, held_out_starts(corpus, length + 1, count, settings.crops_per_file), length + 1)


# of the text before the repeated lines
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# a needle: a key of 8 letters, and a value of 8 digits behind 13 bytes
_LINE, _VALUE = 23, slice(13, 21)


@torch.no_grad()
def retrieve(
    model: ByteLM, lengths: Sequence[int], settings: Namespace, corpus: Corpus, text: Tensor
) -> Iterator[dict[str, Any]]:
    """By depth, the mean bits of the digits of repeated values and the share that is found; for lengths with room."""
    for length in lengths:
        if length > 2 * len(DEPTHS) * _LINE:
            tokens, places = with_needles(held_out(corpus, text, length, settings))
            bits = losses(model, tokens, settings).gather(1, places.flatten(1) - 1).view(places.shape)
            yield {"length": length, "texts": len(tokens), "bits": bits.mean((0, 2)).tolist(),
                   "found": (bits < 1).float().mean((0, 2)).tolist()}


def with_needles(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Texts (B, T) with needles in place of bytes; the places (B, depths, digits) of the values at the end."""
    random, size = np.random.default_rng(tokens.shape[1]), (len(tokens), len(DEPTHS), 8)
    lines = np.tile(np.frombuffer(b'\nkkkkkkkk = "vvvvvvvv"\n', np.uint8), (*size[:2], 1))
    lines[..., 1:9] = random.integers(*b"a{", size)
    lines[..., _VALUE] = np.frombuffer(b"0123456789abcdef", np.uint8)[random.integers(16, size=size)]
    repeats = tokens.shape[1] - len(DEPTHS) * _LINE
    order = random.permuted(np.tile(np.arange(len(DEPTHS)), (len(tokens), 1)), axis=1)
    begins = np.stack([[[int(depth * (repeats - _LINE)) for depth in DEPTHS]] * len(tokens), repeats + _LINE * order])
    places = torch.from_numpy(begins[..., None] + np.arange(_LINE)).to(tokens.device)
    written = torch.from_numpy(lines).to(tokens.device).flatten(1)
    tokens = tokens.scatter(1, places[0].flatten(1), written).scatter(1, places[1].flatten(1), written)
    return tokens, places[1, ..., _VALUE]


def losses(model: ByteLM, tokens: Tensor, settings: Namespace) -> Tensor:
    """Bits of every byte after the first of tokens (B, T + 1), (B, T) float32; byte t + 1 has t + 1 bytes before it."""
    parts = []
    for part in tokens.split(max(1, _TOKENS[tokens.device.type] // tokens.shape[1])):
        with autocast(settings, tokens.device):
            logits = model(part[:, :-1])
        target = part[:, 1:].long()
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
        parts.append(loss.view(target.shape) * (1 / math.log(2)))
    return torch.cat(parts)


def losses_in_windows(model: ByteLM, tokens: Tensor, settings: Namespace) -> Tensor:
    """The same with at most `context` bytes before each, at least half as many but at the beginning."""
    size, half = settings.context, settings.context // 2
    windows = tokens.unfold(1, size + 1, half)  # (B, number, size + 1)
    of_windows = losses(model, windows.flatten(0, 1), settings).unflatten(0, windows.shape[:2])
    return torch.cat([of_windows[:, 0, :half], of_windows[:, :, half:].flatten(1)], dim=1)


def kilo(length: int) -> str:
    """1024 as 1k."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def runs_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of a report, which older ones call runs."""
    return report["runs"] if "runs" in report else report["rows"]


def sizes_of(report: dict[str, Any]) -> tuple[float, float]:
    """Millions of parameters of the smallest model, and of the largest."""
    sizes = [run["parameters"] / 1e6 for run in runs_of(report) if run["parameters"]]
    return min(sizes), max(sizes)


def say(row: dict[str, Any]) -> str:
    known = (column for reading in row["reading"] for column in reading["columns"])
    return "bits per byte " + ", ".join(f"{column['bits']:.3f} to {kilo(column['end'])}" for column in known)


def bits_of(report: dict[str, Any]) -> dict[tuple[str, int, int, str], list[float]]:
    """The seeds' figures of every (scheme, begin, end, "bits" or "in_windows")."""
    found: dict[tuple[str, int, int, str], list[float]] = {}
    for run in runs_of(report):
        for column in (column for row in run["reading"] for column in row["columns"]):
            for key in ("bits", "in_windows"):
                if column[key] is not None:
                    found.setdefault((run["scheme"], column["begin"], column["end"], key), []).append(column[key])
    return found


def cells_of_table(report: dict[str, Any]) -> list[list[str]]:
    """The heading, and a row per scheme: mean bits per byte over the seeds, and their range; a column "≤ C before" has
    the same bytes with no more than the trained length before each."""
    context, found = report["settings"]["context"], bits_of(report)
    stretches = [(a, b, key) for a, b in columns(context, max(report["settings"]["lengths"]))
                 for key in ("bits", *["in_windows"] * (a >= context))]

    def cell(values: list[float]) -> str:
        spread = f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.3f}{spread}" if values else "–"

    head = [f"{kilo(a)}–{kilo(b)}" + f", ≤ {kilo(context)} before" * (key == "in_windows") for a, b, key in stretches]
    there = {name for name, *_ in found}
    return [["bits per byte", *head],
            *([label, *(cell(found.get((name, *at), [])) for at in stretches)] for name, label in LABELS.items()
              if name in there)]


# colour-blind safe (Okabe and Ito); the broken lines are schemes that have no decay that the kernels know
COLOURS = {
    "scalar": "#d55e00", "rotary-scalar": "#cc79a7", "alibi-learned": "#0072b2", "alibi": "#56b4e9",
    "retnet": "#009e73", "rotary": "#000000", "none": "#999999", "per-channel": "#e69f00",
    "per-channel-scalar": "#b8860b", "pro": "#999933",
}
BROKEN = ("rotary", "none", "per-channel")


def draw(report: dict[str, Any]) -> Figure:
    """A panel per length that was read, as in arXiv 2503.02130: mean over the seeds, range, the trained length."""
    runs = runs_of(report)
    lengths = sorted({row["length"] for run in runs for row in run["reading"]})
    (least, most), seeds = sizes_of(report), len({run["seed"] for run in runs})
    figure = Figure(figsize=(1.5 + 6.5 * len(lengths), 5.2), dpi=150, layout="constrained")
    spread = f"mean and range of {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"Python source, {least:.1f} to {most:.1f} M parameters, {spread}; {report['gpu'] or 'CPU'}",
                    fontsize="medium")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        _panel(axes, report, length)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=5)
    return figure


def _panel(axes: Any, report: dict[str, Any], length: int) -> None:
    context = report["settings"]["context"]
    read = [(run["scheme"], row) for run in runs_of(report) for row in run["reading"] if row["length"] == length]
    edges, within, lowest = np.array(report["edges"][str(length)]), [], np.inf
    positions = np.sqrt(np.maximum(edges[:-1], edges[1] / 4) * edges[1:])
    for name, label in LABELS.items():
        of_seeds = np.array([row["bits"] for of, row in read if of == name], dtype=float)
        if not len(of_seeds):
            continue
        mean = of_seeds.mean(0)
        style = "--" if name in BROKEN else "-"
        axes.plot(positions, mean, style, color=COLOURS[name], label=label, linewidth=1.6)
        axes.fill_between(positions, of_seeds.min(0), of_seeds.max(0), color=COLOURS[name], alpha=0.2, linewidth=0)
        within += mean[(positions > context / 4) & (positions <= context)].tolist()
        lowest = min(lowest, np.nanmin(mean))
    axes.axvline(context, color="#1f2328", linewidth=1, linestyle=":")
    axes.annotate(f"trained length, {kilo(context)}", (context, 1), xycoords=("data", "axes fraction"),
                  xytext=(4, -12), textcoords="offset points", fontsize="small")
    ticks = [int(context * 2.0**power) for power in range(-4, 10) if 1 <= context * 2.0**power <= length]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, list(map(kilo, ticks)))
    axes.minorticks_off()
    middle = float(np.median(within))
    # curves that diverge leave the panel upwards; the table has their values
    axes.set_ylim(min(0.8 * middle, 0.97 * lowest), 2.2 * middle)
    crops = max(row["crops"] for _, row in read)
    axes.set(xlabel="position (bytes before)", ylabel="bits per byte", title=f"{crops} texts of {kilo(length)} bytes")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
