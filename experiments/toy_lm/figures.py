"""Figures of a run: loss, half-lives of every head, tiles that the attention visits; and a text sample."""

import csv
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: a server has no display
import numpy as np
from matplotlib import pyplot as plt
from torch import Tensor

from toy_lm.model import ByteLM, generate


def draw(folder: Path, title: str, context: int) -> None:
    """Write loss.png; half_lives.png of a model with a decay; visited.png if attention.json has visited tiles."""
    log = json.loads((folder / "attention.json").read_text())
    visited = [row for row in log["rows"] if row["layers"][0]["visited"] is not None]
    drawn = {"loss": _loss(folder, title)}
    if log["rows"][0]["layers"][0]["half_lives"] is not None:
        drawn["half_lives"] = _half_lives(log, title, context)
    if visited:
        drawn["visited"] = _visited(visited, title, log["bytes"])
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)


def read_log(folder: Path, metric: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric. Every resume has a log of its own, which replaces the steps that it repeats."""
    logs = {int(log.parent.name.removeprefix("from_step_")): log for log in folder.glob("logs/from_step_*/metrics.csv")}
    starts, steps, values = sorted(logs), [], []
    for start, after, end in zip(starts, [-1, *starts[1:]], [*starts[1:], math.inf], strict=True):
        with logs[start].open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get(metric) and after < float(row["step"]) <= end:
                    steps.append(int(float(row["step"])))
                    values.append(float(row[metric]))
    return steps, values


def write_sample(model: ByteLM, text: Tensor, folder: Path, device: str, seed: int) -> str:
    """Write sample.txt: a text that the model continues."""
    model = model.float().to(device)
    for block in model.blocks:
        block.attention.backend = "auto"  # that of the training may have no cache
    prompt = bytes(text[:100].tolist())
    texts = (part.decode(errors="replace") for part in (prompt, generate(model, prompt, 400, seed=seed)))
    sample = "--- prompt (validation text)\n{}\n--- continuation by the model\n{}\n".format(*texts)
    (folder / "sample.txt").write_text(sample, encoding="utf-8")
    return sample


def _loss(folder: Path, title: str) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    axes.plot(*read_log(folder, "train_bits"), color="tab:blue", alpha=0.45, linewidth=1, label="training batch")
    steps, bits = read_log(folder, "val_bits")
    axes.plot(steps, bits, color="tab:red", marker="o", markersize=4, label=f"validation, at the end {bits[-1]:.2f}")
    axes.set(title=title, xlabel="optimiser step", ylabel="bits per byte", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _half_lives(log: dict, title: str, context: int) -> plt.Figure:
    """A panel per layer, a line per head."""
    rows, count = log["rows"], len(log["rows"][0]["layers"])
    columns, lines = min(4, count), math.ceil(count / 4)
    figure, panels = plt.subplots(
        lines, columns, figsize=(1 + 3.2 * columns, 0.8 + 2.6 * lines), layout="constrained", sharex=True, sharey=True,
        squeeze=False,
    )
    for axes in panels.flat[count:]:
        axes.set_axis_off()
    for layer, axes in enumerate(panels.flat[:count]):
        heads = list(zip(*(map(float, row["layers"][layer]["half_lives"]) for row in rows), strict=True))
        for head, color in enumerate(plt.get_cmap("viridis")(np.linspace(0, 0.9, len(heads)))):
            axes.plot([row["step"] for row in rows], heads[head], color=color, linewidth=1.4, label=f"head {head + 1}")
        axes.axhline(context, color="tab:red", linestyle="--", linewidth=1)
        axes.set(title=f"layer {layer + 1}", yscale="log")
        axes.grid(alpha=0.3)
    panels.flat[0].legend(frameon=False, fontsize=7, ncols=2)
    definition = f"half-life of the mean λ over {log['bytes']:,} bytes of the validation text"
    figure.suptitle(f"{title}: {definition}; context {context} dashed", fontsize="medium")
    figure.supxlabel("optimiser step", fontsize="medium")
    figure.supylabel("half-life (bytes)", fontsize="medium")
    return figure


def _visited(rows: list[dict], title: str, length: int) -> plt.Figure:
    """A line per layer: the mean over its heads."""
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    count, steps = len(rows[0]["layers"]), [row["step"] for row in rows]
    for layer, color in enumerate(plt.get_cmap("viridis")(np.linspace(0, 0.9, count))):
        means = [np.mean(row["layers"][layer]["visited"]) for row in rows]
        axes.plot(steps, means, marker="o", markersize=3, color=color, label=f"layer {layer + 1}")
    axes.set(title=title, xlabel="optimiser step", ylim=(0, 1.05))
    axes.set_ylabel(f"fraction of tiles visited, text of {length:,} bytes")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9, ncols=2)
    return figure
