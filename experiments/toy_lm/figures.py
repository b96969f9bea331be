"""What a run shows at its end: the loss curve, and the half-lives of its decay per head and layer."""

import csv
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: a server has no display
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D


def read_log(folder: Path, metric: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric over a run's logs; every resume has its own, which replaces what it repeats."""
    found = folder.glob("logs/from_step_*/metrics.csv")
    logs = sorted((int(log.parent.name.removeprefix("from_step_")), log) for log in found)
    ends = [start for start, _ in logs[1:]] + [math.inf]
    points = []
    for (start, log), end in zip(logs, ends, strict=True):
        with log.open(newline="") as file:
            rows = [(int(row["step"]), row.get(metric)) for row in csv.DictReader(file)]
        points += [(step, float(value)) for step, value in rows if value and start <= step < end]
    return tuple(zip(*points, strict=True)) if points else ((), ())


def draw_loss(folder: Path, title: str) -> Path:
    """loss.png: training and validation bits per byte over the steps."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    axes.plot(*read_log(folder, "train_bits"), color="tab:blue", alpha=0.45, linewidth=1, label="training batch")
    steps, bits = read_log(folder, "val_bits")
    axes.plot(steps, bits, color="tab:red", marker="o", markersize=4, label="validation")
    if bits:
        end = (steps[-1], bits[-1])
        axes.annotate(f"{bits[-1]:.2f}", end, (0, -18), textcoords="offset points", ha="center", color="tab:red")
    axes.set(title=title, xlabel="optimiser step", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _save(figure, folder / "loss.png")


def save_half_lives(folder: Path) -> None:
    """half_lives.json: the last row of the run's attention.json."""
    log = _attention(folder)
    layers = [[{"mean": float(life)} for life in layer["half_lives"]] for layer in log["rows"][-1]["layers"]]
    table = {"step": log["rows"][-1]["step"], "unit": "tokens", "tokens": log["bytes"], "layers": layers}
    (folder / "half_lives.json").write_text(json.dumps(table, indent=1) + "\n")


def draw_half_lives(folder: Path, title: str) -> Path:
    """decay.png: the half-lives in the last row of the run's attention.json, with the first row as hollow marks."""
    log = _attention(folder)
    start, now = ([layer["half_lives"] for layer in log["rows"][n]["layers"]] for n in (0, -1))
    count, heads, context = len(now), len(now[0]), log["context"]
    figure, axes = plt.subplots(figsize=(max(8.0, 1.5 + 0.16 * count * heads), 4.8), layout="constrained")
    colors = plt.get_cmap("viridis")([h / max(1, heads - 1) * 0.9 for h in range(heads)])
    for layer in range(count):
        if layer % 2:
            axes.axvspan(layer - 0.5, layer + 0.5, color="0.96", zorder=0)
        for h in range(heads):
            x = layer + 0.8 * ((h + 0.5) / heads - 0.5)
            axes.plot(x, float(start[layer][h]), marker="o", markersize=7, mfc="none", mec="0.45", linestyle="none")
            axes.plot(x, float(now[layer][h]), marker="o", markersize=5, color=colors[h], linestyle="none")
    axes.axhline(context, color="tab:red", linestyle="--", linewidth=1)
    axes.annotate(f"context, {context}", (1, context), xycoords=("axes fraction", "data"), xytext=(-4, 3),
                  textcoords="offset points", ha="right", color="tab:red", fontsize=9)
    axes.set(
        title=title, ylabel="half-life (tokens)", yscale="log", xlim=(-0.5, count - 0.5),
        xticks=range(count), xticklabels=[f"layer {layer + 1}" for layer in range(count)],
        xlabel=f"the {heads} heads of each layer, in order\n{_definition(log)}",
    )
    axes.grid(axis="y", alpha=0.3)
    marks = [
        Line2D([], [], marker="o", mfc="none", mec="0.45", linestyle="none", markersize=7, label="at the start"),
        Line2D([], [], marker="o", color="tab:green", linestyle="none", markersize=5, label="now"),
    ]
    axes.legend(handles=marks, frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2)
    return _save(figure, folder / "decay.png")


def _attention(folder: Path) -> dict:
    return json.loads((folder / "attention.json").read_text(encoding="utf-8"))


def _definition(log: dict) -> str:
    return f"half-life of the mean λ over {log['bytes']:,} tokens (bytes)\nof the validation text, in tokens"


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_half_lives_over_training(folder: Path, title: str) -> Path:
    """half_lives.png from the run's attention.json: a panel per layer, a line per head."""
    log = _attention(folder)
    rows, count = log["rows"], len(log["rows"][0]["layers"])
    columns = min(4, count)
    figure, panels = plt.subplots(
        math.ceil(count / columns), columns, figsize=(1 + 3.2 * columns, 0.8 + 2.6 * math.ceil(count / columns)),
        layout="constrained", sharex=True, sharey=True, squeeze=False,
    )
    steps = [row["step"] for row in rows]
    for layer, axes in enumerate(panels.flat):
        if layer >= count:
            axes.set_axis_off()
            continue
        heads = list(zip(*(map(float, row["layers"][layer]["half_lives"]) for row in rows), strict=True))
        for h, values in enumerate(heads):
            axes.plot(steps, values, color=plt.get_cmap("viridis")(h / max(1, len(heads) - 1) * 0.9), linewidth=1.4)
        axes.axhline(log["context"], color="tab:red", linestyle="--", linewidth=1)
        axes.set(title=f"layer {layer + 1}", yscale="log")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{title}\nevery head, context {log['context']} dashed", fontsize="medium")
    figure.supxlabel(f"optimiser step\n{_definition(log)}", fontsize="medium")
    figure.supylabel("half-life (tokens)", fontsize="medium")
    return _save(figure, folder / "half_lives.png")


def draw_visited_over_training(folder: Path, title: str) -> Path | None:
    """visited.png from the run's attention.json: a line per layer, and the time of a step; None where nobody knows."""
    log = _attention(folder)
    rows = [row for row in log["rows"] if all(layer["visited"] is not None for layer in row["layers"])]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    steps, count = [row["step"] for row in rows], len(rows[0]["layers"])
    for layer in range(count):
        fractions = [sum(row["layers"][layer]["visited"]) / len(row["layers"][layer]["visited"]) for row in rows]
        color = plt.get_cmap("viridis")(layer / max(1, count - 1) * 0.9)
        axes.plot(steps, fractions, color=color, marker="o", markersize=3, label=f"layer {layer + 1}")
    axes.set(
        title=title, xlabel="optimiser step", ylabel=f"fraction of tiles visited, text of {log['bytes']:,} bytes",
        ylim=(0, 1.05),
    )
    axes.grid(alpha=0.3)
    timed = [(row["step"], row["milliseconds_per_step"]) for row in log["rows"]]
    timed = [(step, ms) for step, ms in timed if ms is not None]
    if timed:
        times = axes.twinx()
        times.plot(*zip(*timed, strict=True), color="tab:red", linestyle=":", label="time of a step")
        times.set_ylabel("ms per step", color="tab:red")
        times.set_ylim(0, 1.3 * max(ms for _, ms in timed))
    axes.legend(frameon=False, fontsize=9, ncols=2)
    return _save(figure, folder / "visited.png")
