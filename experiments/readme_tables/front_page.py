"""The README's tables: which decay to take, and how fast it is."""

import statistics
import textwrap
from collections.abc import Mapping
from typing import Any

from associative_recall.report import selected
from extrapolation.results import of_column
from training_benchmark.report import setting_of
from training_benchmark.variants import BASELINE

from readme_tables.evidence import EXTRAPOLATION_FILE
from readme_tables.learning import NOT_MEASURED, RECALL_FILE, TRAINING_FILE, table
from readme_tables.results import Results, speeds

SPEED_FILE = "benchmark_sustained.json"
SKIPPING_FILE = "benchmark_skipping.json"
# schemes, with the layer's argument
CHOICES = {
    "scalar": '`decay="scalar"`, a forget gate', "alibi-learned": '`"alibi-learned"`', "alibi": '`"alibi"`',
    "retnet": '`"retnet"`', "rotary-scalar": '`"scalar"` and rotary embeddings',
    "rotary": '`"none"` and rotary embeddings', "none": '`"none"`',
}
_COLUMNS = ((0, 1024), (4096, 16384))  # bytes before
_LENGTHS = (2048, 8192, 32768)
_DIRECTIONS = ("forward", "backward")


def choice(results: Results) -> list[str]:
    """Bits per byte within and beyond the trained length, and accuracy of recall, a row per decay."""
    if not (results.has(EXTRAPOLATION_FILE) and results.has(RECALL_FILE)):
        return [NOT_MEASURED]
    read, recall = results.load(EXTRAPOLATION_FILE), results.load(RECALL_FILE)
    runs = {name: [run for run in read["runs"] if run["scheme"] == name] for name in CHOICES}
    bits = {name: [of_column(runs[name], *column, "bits") for column in _COLUMNS] for name in CHOICES}
    least = [min(statistics.fmean(row[n]) for row in bits.values() if row[n]) for n in range(len(_COLUMNS))]
    accuracy: dict[tuple[str, str], list[str]] = {}
    for row in sorted(recall["rows"], key=lambda row: row["width"]):
        accuracy.setdefault((row["task"], row["mode"]), []).append(f"{100 * selected(row).mean[-1]:.0f}")
    rows = []
    for name, label in CHOICES.items():
        means = [statistics.fmean(seeds) if seeds else None for seeds in bits[name]]
        cells = ["–" if x is None else f"{x:.3f}" for x in means]
        cells = [f"**{cell}**" if x == best else cell for cell, x, best in zip(cells, means, least, strict=True)]
        cells += [" / ".join(accuracy.get((task, name), ["–"])) for task in ("recall", "forgetting")]
        rows.append([label, *cells])
    head = ["decay", "bytes 0–1k", "bytes 4k–16k", "recall, %", "overwritten keys, %"]
    size = next(run["parameters"] for run in read["runs"] if run["parameters"])
    widths = " and ".join(str(width) for width in sorted({row["width"] for row in recall["rows"]}))
    length, pairs, _ = recall["setup"]["shapes"][-1]
    page = f"{results.prefix.removesuffix('results/')}experiments/README.md"
    return [*table(head, rows), "", *wrapped(
        f"Bits per byte of a {size / 1e6:.1f} M model that was trained on {read['settings']['context']:,} bytes; lower "
        f"is better. Queries that two layers of width {widths} answer, of {pairs} pairs of key and value in {length:,} "
        f"tokens. Means of 3 seeds ([extrapolation]({page}#length-extrapolation), [recall]({page}#associative-recall))."
    )]


def speed(results: Results) -> list[str]:
    """Attention and a training step relative to other libraries, and the gain of skipping, a column per length."""
    if not all(map(results.has, (SPEED_FILE, TRAINING_FILE, SKIPPING_FILE))):
        return [NOT_MEASURED]
    report, training, skipping = map(results.load, (SPEED_FILE, TRAINING_FILE, SKIPPING_FILE))
    attention = {
        (direction, shape.length, shape.head_dim): kernels["ours"]["ratio_to_cudnn"]
        for (shape, direction), kernels in speeds(report).items() if shape.causal
    }
    steps = {
        (row["variant"], length, dim): row["tokens_per_second"]
        for row in training["rows"] for dim, length, compiled in [setting_of(row)] if not compiled
    }
    gain = {
        (row["direction"], row["length"]): row["speed_over_whole"]
        for row in skipping["rows"] if (row["study"], row["peer"]) == ("lengths", "skipping")
    }
    rows = [
        [f"attention, {direction}, × cuDNN without a decay", *(_pair(attention, direction, n) for n in _LENGTHS)]
        for direction in _DIRECTIONS
    ]
    for peer, label in (
        (BASELINE, "cuDNN with rotary embeddings"), ("cudnn", "cuDNN without position embeddings"),
        ("fox-pruned", "FoX's kernel, pruned at e⁻¹⁰"),
    ):
        ratios = {("ours", *key): steps[("ours", *key)] / x for (name, *key), x in steps.items() if name == peer}
        rows.append([f"training step, × {label}", *(_pair(ratios, "ours", length) for length in _LENGTHS)])
    skips = [" / ".join(f"{gain[direction, length]:.2f}" for direction in _DIRECTIONS) for length in _LENGTHS]
    rows.append(["attention that skips, × the same without skipping", *skips])
    setup, cudnn = training["setup"], int(report["cudnn"])
    torch, triton = report["torch"].split("+")[0], report["triton"]
    head = [f"{report['gpu']}, bfloat16, causal", *(f"{length:,} tokens" for length in _LENGTHS)]
    return [*table(head, rows), "", *wrapped(
        "Cells are head dimension 64 / 128; in the last row, forward / backward at 128. Attention has its decay and "
        "the gradient, 16 heads, mean λ −0.01, and visits every key except in the last row. Training: 124 M "
        f"parameters, {setup['tokens']:,} tokens per step, eager, half-lives from 4 to 1,024 tokens. torch {torch}, "
        f"Triton {triton}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100} ({results.link(SPEED_FILE, 'attention')}, "
        f"{results.link(TRAINING_FILE, 'training')}, {results.link(SKIPPING_FILE, 'skipping')})."
    )]


def wrapped(text: str) -> list[str]:
    """Lines of at most 119 characters."""
    return textwrap.wrap(text, 119, break_long_words=False, break_on_hyphens=False)


def _pair(ratios: Mapping[Any, float], first: str, length: int) -> str:
    """A ratio for each head dimension."""
    return " / ".join(f"{ratios[first, length, dim]:.2f}" for dim in (64, 128) if (first, length, dim) in ratios) or "–"


BLOCKS = {"choice": choice, "speed": speed}
