"""Loss over position, as in the figure of the Forgetting Transformer's paper (arXiv 2503.02130)."""

from typing import Any

import numpy as np
from language_models.schemes import SCHEMES
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.plots import frame, kilo, length_axis

# colour-blind safe (Okabe and Ito); the broken lines are schemes that have no decay that the kernels know
COLOURS = {
    "scalar": "#d55e00", "rotary-scalar": "#cc79a7", "alibi-learned": "#0072b2", "alibi": "#56b4e9",
    "retnet": "#009e73", "retnet-learned": "#007a5a", "rotary": "#000000", "none": "#999999",
    "per-channel": "#e69f00", "per-channel-scalar": "#b8860b",
}


def draw(result: dict[str, Any]) -> Figure:
    """A panel per length that was read: mean over the seeds, their range shaded, the trained length marked."""
    lengths = sorted({row["length"] for run in result["runs"] for row in run["reading"]})
    if not lengths:
        raise ValueError("result: no run has been read")
    figure = Figure(figsize=(1.5 + 6.5 * len(lengths), 5.2), dpi=150, layout="constrained")
    for axes, length in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        _panel(axes, result, length)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=min(5, len(labels)))
    size = next(run["parameters"] for run in result["runs"] if run["parameters"])
    seeds = len({run["seed"] for run in result["runs"]})
    where = result["gpu"] or "CPU"
    figure.suptitle(
        f"Python source, {size / 1e6:.1f} M parameters, {seeds} seed{'s' * (seeds > 1)}: mean and range; {where}",
        fontsize="medium",
    )
    return figure


def _panel(axes: Axes, result: dict[str, Any], length: int) -> None:
    edges = np.array(result["edges"][str(length)])
    context = result["settings"]["context"]
    within, lowest = [], np.inf
    for name, scheme in SCHEMES.items():
        curves = [
            row["bits"] for run in result["runs"] if run["scheme"] == name for row in run["reading"]
            if row["length"] == length
        ]
        if not curves:
            continue
        positions, of_seeds = coarser(edges, np.array(curves, dtype=float))  # None is NaN
        mean = of_seeds.mean(0)
        style = "-" if scheme.decays else "--"
        axes.plot(positions, mean, style, color=COLOURS[name], label=scheme.label, linewidth=1.6)
        axes.fill_between(positions, of_seeds.min(0), of_seeds.max(0), color=COLOURS[name], alpha=0.2, linewidth=0)
        within += mean[(positions > context / 4) & (positions <= context)].tolist()
        lowest = min(lowest, np.nanmin(mean))
    axes.axvline(context, color="#1f2328", linewidth=1, linestyle=":")
    axes.annotate(f"trained length, {kilo(context)}", (context, 1), xycoords=("data", "axes fraction"),
                  xytext=(4, -12), textcoords="offset points", fontsize="small")
    length_axis(axes, [int(context * 2.0**power) for power in range(-4, 10) if 1 <= context * 2.0**power <= length])
    middle = float(np.median(within))
    # what loses its way leaves the panel upwards; where it goes is in the table
    axes.set_ylim(min(0.8 * middle, 0.97 * lowest), 2.2 * middle)
    crops = max(row["crops"] for run in result["runs"] for row in run["reading"] if row["length"] == length)
    axes.set(xlabel="position (bytes before)", ylabel="bits per byte", title=f"{crops} texts of {kilo(length)} bytes")
    frame(axes)


def coarser(edges: np.ndarray, curves: np.ndarray, per_octave: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Means over stretches that grow with the position: (their middles, (seeds, stretches))."""
    widths = np.diff(edges)
    # the first stretch begins at 0, and is alone
    groups = [-1, *np.floor(per_octave * np.log2(edges[1:-1] / edges[1]))]
    positions, means = [], []
    for group in np.unique(groups):
        own = groups == group
        share = widths[own] / widths[own].sum()
        positions.append(np.sqrt(max(edges[:-1][own][0], edges[1] / 4) * edges[1:][own][-1]))
        means.append(curves[:, own] @ share)
    return np.array(positions), np.array(means).T
