"""The marked blocks about training: what is learned, how fast, and how exactly."""

import math
from collections.abc import Sequence

from associative_recall.model import MODES
from associative_recall.report import in_order, selected
from training_benchmark.report import setting_of
from training_benchmark.variants import BASELINE, IDENTITY, VARIANTS

from readme_tables.results import Results

RECALL_FILE = "recall.json"
TRAINING_FILE = "benchmark_training.json"
PRECISION_FILE = "training_precision.json"
NOT_MEASURED = "Not measured yet."


def recall(results: Results) -> list[str]:
    """Accuracy by shape: a table per task, a row per width and mode."""
    if not results.has(RECALL_FILE):
        return [NOT_MEASURED]
    report = results.load(RECALL_FILE)
    lines = [f"![accuracy by tokens and pairs]({results.prefix}recall.png)", ""]
    for task in dict.fromkeys(row["task"] for row in in_order(report["rows"])):
        of_task = [row for row in in_order(report["rows"]) if row["task"] == task]
        shapes = selected(of_task[0]).shapes
        head = [f"{task}: queries answered rightly, %", *(f"T{shape.length}, {shape.pairs} pairs" for shape in shapes)]
        rows = []
        for row in of_task:
            chosen = selected(row)
            figures = zip(chosen.mean, chosen.least, chosen.most, strict=True)
            rows.append([f"d{row['width']}, {MODES[row['mode']]}", *map(_percent, figures)])
        lines += [*table(head, rows), ""]
    seeds = len(report["setup"]["seeds"])
    return [*lines, f"Mean of {seeds} seeds (range), {report['gpu']}, torch {report['torch'].split('+')[0]} "
            f"({results.link(RECALL_FILE)})."]


def _percent(figures: Sequence[float]) -> str:
    mean, least, most = (f"{100 * x:.0f}" for x in figures)
    return mean if least == most else f"{mean} ({least}–{most})"


def training_speed(results: Results) -> list[str]:
    """Tokens per second of a training step, relative to cuDNN's, a row per attention, a column per setting."""
    if not results.has(TRAINING_FILE):
        return [NOT_MEASURED]
    report = results.load(TRAINING_FILE)
    found = {(row["variant"], setting_of(row)): row for row in report["rows"]}
    settings = sorted({setting for _, setting in found}, key=lambda s: (s[2], s[0], s[1]))
    head = ["thousand tokens per second, × cuDNN with rotary (share of attention)"]
    head += [f"D{dim} T{length}{', compiled' if compiled else ''}" for dim, length, compiled in settings]
    rows = []
    for name in (name for name in VARIANTS if any(key[0] == name for key in found)):
        cells = [_speed(found.get((name, setting)), found.get((BASELINE, setting))) for setting in settings]
        rows.append([VARIANTS[name].label, *cells])
    absent = sorted({entry["variant"] for entry in report["missing"] if entry["kind"] == "absent"})
    said = [f"Absent: {', '.join(absent)}."] * bool(absent)
    failed = ["{variant}, {setting}: {kind}".format(**e) for e in report["missing"] if e["kind"] != "absent"]
    said += [f"No speed: {'; '.join(failed)}."] * bool(failed)
    where = f"{report['gpu']}, torch {report['torch'].split('+')[0]}, Triton {report['triton']}"
    return [f"![tokens per second]({results.prefix}benchmark_training.png)", "", *table(head, rows), "",
            " ".join([f"{where} ({results.link(TRAINING_FILE)}).", *said])]


def _speed(row: dict | None, base: dict | None) -> str:
    if row is None:
        return "–"
    text = f"{row['tokens_per_second'] / 1e3:.0f}"
    if base is not None:
        text += f", {row['tokens_per_second'] / base['tokens_per_second']:.2f}"
    if row["attention_share"] is not None and row["variant"] != IDENTITY:
        text += f" ({row['attention_share']:.0%})"
    return text


def precision(results: Results) -> list[str]:
    """How far trainings part from the one in float32, and the errors of gradients on its way."""
    if not results.has(PRECISION_FILE):
        return [NOT_MEASURED]
    report = results.load(PRECISION_FILE)
    checks = next((row["gradients"] for row in report["rows"] if "gradients" in row), [])
    head = ["", "bits per byte, last steps", "minus float32", "largest difference"]
    head += [f"error of dW_in / gates, step {check['step']}" for check in checks]
    rows = []
    for entry in report["summary"]:
        apart = [entry.get(key) for key in ("loss", "difference", "largest_difference")]
        cells = ["–" if x is None else f"{float(x) / math.log(2):.4f}" for x in apart]
        errors = [check["runs"].get(entry["run"]) for check in checks]
        cells += [f"{e['in_proj']:.1e} / {e['decay']:.1e}" if isinstance(e, dict) else "–" for e in errors]
        rows.append([report["labels"][entry["run"]], *cells])
    absent = [f"{report['labels'][entry['run']]} ({entry['kind']})" for entry in report["missing"]]
    where = f"{report['gpu']}, torch {report['torch'].split('+')[0]} ({results.link(PRECISION_FILE)})."
    return [f"![losses]({results.prefix}training_precision.png)", "", *table(head, rows), "",
            " ".join([where, *[f"Not there: {', '.join(absent)}."] * bool(absent)])]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


BLOCKS = {"recall": recall, "training_speed": training_speed, "precision": precision}
