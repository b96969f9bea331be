"""What was measured: the chosen learning rates, a table, a figure."""

import statistics
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from shared.plots import frame, legend_entries

from associative_recall.model import MODES
from associative_recall.task import TASKS
from associative_recall.training import Shape

METHOD = {
    "accuracy": "share of test queries whose most probable next token is the answer; [learning rate][seed][shape]",
    "selected": "the learning rate with the best validation accuracy, mean over shapes and seeds",
    "overwritten": "share of queries that are answered with the key's earlier value",
    "model": "two attention layers, no MLP, tied embeddings, no position embedding but for rotary; normal "
    "initialisation of variance 1 / (3·width); the decay starts as the library's: half-lives from 4 to 1,024 tokens "
    "(scalar), ALiBi, RetNet",
    "training": "all shapes at once, fresh sequences in every step, of which each counts the same; AdamW, warm-up over "
    "10 % and "
    "a line to 0; bfloat16 autocast on a GPU; the same data, steps, initial projections and rates for every mode",
    "seconds": "of a cell: all learning rates and seeds side by side, testing included",
}
# colour-blind safe (Okabe and Ito)
_COLOURS = {
    "scalar": "#d55e00", "alibi-learned": "#e69f00", "alibi": "#f0e442", "retnet": "#56b4e9", "rotary": "#000000",
    "rotary-scalar": "#cc79a7", "none": "#7f7f7f",
}
_MARKERS = dict(zip(MODES, "os^vDP*", strict=True))


class Selected(NamedTuple):
    """A cell at its chosen learning rate: per shape the mean over the seeds, the least and the most."""

    rate: float
    shapes: list[Shape]
    mean: list[float]
    least: list[float]
    most: list[float]


def selected(row: dict[str, Any], key: str = "test") -> Selected:
    """The learning rate by validation, the figures of `key`."""
    scores = [statistics.fmean(map(statistics.fmean, seeds)) for seeds in row["validation"]]
    best = scores.index(max(scores))
    columns = list(zip(*row[key][best], strict=True))  # per shape, one figure per seed
    mean, least, most = ([f(column) for column in columns] for f in (statistics.fmean, min, max))
    return Selected(row["learning_rates"][best], [Shape(*x) for x in row["shapes"]], mean, least, most)


def table(result: dict[str, Any]) -> str:
    """A line per cell: accuracy by shape, mean over seeds."""
    lines = []
    for row in in_order(result["rows"]):
        chosen = selected(row)
        cells = "  ".join(f"{shape}: {x:.2f}" for shape, x in zip(chosen.shapes, chosen.mean, strict=True))
        about = f"{row['task']:10} d{row['width']:<4} {row['mode']:14}"
        lines.append(f"{about} rate {chosen.rate:<7g} {cells}")
    return "\n".join(lines)


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By task, width and mode."""
    modes = list(MODES)
    return sorted(rows, key=lambda row: (TASKS.index(row["task"]), row["width"], modes.index(row["mode"])))


def draw(result: dict[str, Any]) -> Figure:
    """Accuracy by shape: a row of panels per task, a column per width; shaded from the least seed to the most."""
    rows = result["rows"]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    columns = sorted({row["width"] for row in rows})
    figure = Figure(figsize=(max(9.0, 1.0 + 4.5 * len(columns)), 1.6 + 2.7 * len(tasks)), dpi=150, layout="constrained")
    panels = figure.subplots(len(tasks), len(columns), squeeze=False, sharey=True)
    for at, task in enumerate(tasks):
        for panel, width in zip(panels[at], columns, strict=True):
            _draw_panel(panel, [row for row in rows if (row["task"], row["width"]) == (task, width)])
            if task == "forgetting":  # one of the two values of a key, whichever
                panel.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
            panel.set_title(f"{task}, width {width}", fontsize="small")
        panels[at][0].set_ylabel("queries answered rightly")
    for panel in panels[-1]:
        panel.set_xlabel("tokens, key-value pairs")
    handles = legend_entries(panels.flat)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    where = f"{result['gpu'] or 'CPU'}, torch {result['torch']}"
    figure.suptitle(f"Associative recall, seeds: {len(result['setup']['seeds'])}, {where}", fontsize="medium")
    return figure


def _draw_panel(panel: Any, rows: list[dict[str, Any]]) -> None:
    for mode in MODES:
        for row in rows:
            if row["mode"] != mode:
                continue
            chosen = selected(row)
            places = range(len(chosen.shapes))
            panel.plot(places, chosen.mean, color=_COLOURS[mode], marker=_MARKERS[mode], markersize=4,
                       linewidth=1.5, label=MODES[mode])
            panel.fill_between(places, chosen.least, chosen.most, color=_COLOURS[mode], alpha=0.18, linewidth=0)
    shapes = next((selected(row).shapes for row in rows), [])
    panel.set_xticks(range(len(shapes)), [f"{shape.length}, {shape.pairs}" for shape in shapes], fontsize="small")
    panel.set_ylim(-0.03, 1.03)
    frame(panel)
