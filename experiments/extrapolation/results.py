"""What was found, as JSON that a later call adds to, and as a table."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from language_models.schemes import SCHEMES
from shared.plots import kilo
from shared.report import write

from extrapolation.settings import Run, Settings

__all__ = ["begin", "finished", "of_column", "table", "write"]

METHOD = {
    "corpus": "whole files; a package is on one side alone; copies of files, and packages that others carry, are left "
    "out",
    "same": "the runs of a seed have the same initial weights, but for what only one scheme has, and the same bytes at "
    "every step",
    "reading": "crops of held-out files, each within one file and beginning anywhere in it, none overlapping",
    "bits": "mean bits per byte of stretches of positions (edges: of each length), with the whole crop before them",
    "bits_in_windows": "of the same bytes with at most `context` bytes before each, windows half of that apart",
    "columns": "the same over the stretches of the table; standard_error is of bits − in_windows over crops",
    "attention": "of the first crop, by layer and head: half_lives, ln 2 / mean(−λ) in bytes; visited, "
    "decayattn.visited_fraction",
    "milliseconds": "of one forward of the model over one crop, with skip_tolerance='auto' and None, median of 3",
}


def begin(
    path: Path | None, settings: Settings, corpus: dict[str, Any], origin: dict[str, Any]
) -> dict[str, Any]:
    """The result that a file holds, under the origin of this call, or a new one.

    Raises ValueError for a file of other settings, another corpus, another commit or other code.
    """
    new = {
        **origin, "settings": settings.as_json(), "method": METHOD, "corpus": corpus,
        "edges": {str(length): settings.bins(length) for length in settings.lengths}, "runs": [],
    }
    if path is None or not path.exists():
        return new
    old = json.loads(path.read_text(encoding="utf-8"))
    for name, here, there in (
        *((name, x, old["settings"].get(name)) for name, x in new["settings"].items()),
        ("sha256 of the corpus", corpus["sha256"], old["corpus"]["sha256"]),
        ("commit", origin["commit"], old["commit"]),
        ("trees", origin["trees"], old.get("trees")),
    ):
        if here != there:
            raise ValueError(f"output: {path} has {name} {there}, this call {here}; give another --output")
    new["dirty"] = None if None in (new["dirty"], old["dirty"]) else new["dirty"] or old["dirty"]
    return new | {"runs": old["runs"]}


def finished(result: dict[str, Any]) -> set[Run]:
    return {Run(run["scheme"], run["seed"]) for run in result["runs"]}


def of_column(runs: list[dict[str, Any]], begin: int, end: int, key: str) -> list[float]:
    """One figure per seed of a stretch of the table; none where it was not read."""
    return [
        column[key]
        for run in runs
        for row in run["reading"]
        for column in row["columns"]
        if (column["begin"], column["end"]) == (begin, end) and column[key] is not None
    ]


def table(
    result: dict[str, Any], label: Callable[[str], str] = lambda name: SCHEMES[name].label
) -> tuple[list[str], list[list[str]]]:
    """(heading, a row per scheme): mean bits per byte over the seeds, and their range; a column "≤ C before" has the
    same bytes with no more than the trained length before each."""
    columns = Settings(**_as_arguments(result["settings"])).columns()
    context = result["settings"]["context"]
    head = ["bits per byte"]
    for begin, end in columns:
        head.append(f"{kilo(begin)}–{kilo(end)}")
        if begin >= context:
            head.append(f"{kilo(begin)}–{kilo(end)}, ≤ {kilo(context)} before")
    rows = []
    for name in SCHEMES:
        own = [run for run in result["runs"] if run["scheme"] == name]
        if not own:
            continue
        cells = []
        for begin, end in columns:
            cells.append(_mean_and_range(of_column(own, begin, end, "bits")))
            if begin >= context:
                cells.append(_mean_and_range(of_column(own, begin, end, "in_windows")))
        diverged = sum(run["diverged"] is not None for run in own)
        rows.append([label(name) + (f" ({diverged} of {len(own)} diverged)" if diverged else ""), *cells])
    return head, rows


def _as_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()}


def _mean_and_range(values: list[float]) -> str:
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f}–{max(values):.3f})"


def text(result: dict[str, Any]) -> str:
    """The table for a terminal."""
    head, rows = table(result)
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in [head, *rows])
