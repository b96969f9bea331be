"""The marked blocks about training: what is learned, how fast, and how exactly."""

from collections.abc import Sequence

from associative_recall.model import MODES
from associative_recall.report import in_order, selected

from readme_tables.results import Results

RECALL_FILE = "recall.json"
NOT_MEASURED = "Not measured yet."


def recall(results: Results) -> list[str]:
    """Accuracy over pairs: a table per task, a row per length, width and mode."""
    if not results.has(RECALL_FILE):
        return [NOT_MEASURED]
    report = results.load(RECALL_FILE)
    counts = sorted({count for row in report["rows"] for count in row["pairs"]})
    lines = [f"![accuracy over pairs]({results.prefix}recall.png)", ""]
    for task in dict.fromkeys(row["task"] for row in in_order(report["rows"])):
        head = [f"{task}: queries answered rightly, %", *(f"{count} pairs" for count in counts)]
        rows = []
        for row in in_order(report["rows"]):
            if row["task"] != task:
                continue
            chosen = selected(row)
            shown = dict(zip(chosen.pairs, zip(chosen.mean, chosen.least, chosen.most, strict=True), strict=True))
            about = f"T{row['length']} d{row['width']}, {MODES[row['mode']]}"
            rows.append([about, *(_percent(shown.get(count)) for count in counts)])
        lines += [*table(head, rows), ""]
    seeds = len(report["setup"]["seeds"])
    return [*lines, f"Mean of {seeds} seeds (range), {report['gpu']}, torch {report['torch'].split('+')[0]} "
            f"({results.link(RECALL_FILE)})."]


def _percent(figures: Sequence[float] | None) -> str:
    if figures is None:
        return ""
    mean, least, most = (f"{100 * x:.0f}" for x in figures)
    return mean if least == most else f"{mean} ({least}–{most})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


BLOCKS = {"recall": recall}
