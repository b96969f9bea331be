"""TFLOP/s over sequence length: a column per direction, a row of panels per head dimension."""

from typing import Any

from matplotlib.figure import Figure
from shared.cases import DIRECTIONS
from shared.peers import without_decay
from shared.plots import frame, legend_entries, length_axis

# colour-blind safe (Okabe and Ito); ours stands out by weight and by its own colour, peers without a decay are dashed
_PEER_COLOURS = {
    "cudnn": "#000000",
    "flash": "#7f7f7f",
    "flash_attn": "#999933",
    "flex": "#56b4e9",
    "flex-grad": "#0072b2",
    "fla": "#009e73",
    "fox": "#cc79a7",
}
_OUR_COLOURS = ("#d55e00", "#e69f00", "#f0e442")
_MARKERS = "osD^vP"


def draw(report: dict[str, Any]) -> Figure:
    """The rows of a report; a bar at every point spans the rounds."""
    rows = report["rows"]
    if not rows:
        raise ValueError("report: has no rows to draw")
    head_dims = sorted({row["head_dim"] for row in rows})
    lengths = sorted({row["length"] for row in rows})
    names = list(dict.fromkeys(row["peer"] for row in rows))
    figure = Figure(figsize=(11, 1.4 + 3.5 * len(head_dims)), dpi=150, layout="constrained")
    panels = figure.subplots(len(head_dims), len(DIRECTIONS), squeeze=False, sharex=True, sharey="row")
    for panel_row, head_dim in zip(panels, head_dims, strict=True):
        for panel, direction in zip(panel_row, DIRECTIONS, strict=True):
            chosen = [row for row in rows if row["head_dim"] == head_dim and row["direction"] == direction]
            for name in names:
                _draw_peer(panel, name, names, [row for row in chosen if row["peer"] == name])
            _dress(panel, f"{direction}, head dimension {head_dim}", lengths)
        panel_row[0].set_ylabel("TFLOP/s")
    for panel in panels[-1]:
        panel.set_xlabel("sequence length")
    handles = legend_entries(panels.flat)
    labels = [report["peers"].get(name, name) for name in handles]
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(_title(report))
    return figure


def _draw_peer(panel: Any, name: str, names: list[str], rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["length"])
    speed = [row["tflops"] for row in rows]
    below = [row["tflops"] - row["tflops_range"][0] for row in rows]
    above = [row["tflops_range"][1] - row["tflops"] for row in rows]
    is_ours = name not in _PEER_COLOURS
    ours = [other for other in names if other not in _PEER_COLOURS]
    colour = _OUR_COLOURS[ours.index(name) % len(_OUR_COLOURS)] if is_ours else _PEER_COLOURS[name]
    dashed = name in ("cudnn", "flash", "flash_attn") or name.endswith(without_decay(""))
    panel.errorbar(
        [row["length"] for row in rows], speed, yerr=[below, above], label=name, color=colour, capsize=3,
        linestyle="--" if dashed else "-", linewidth=2.8 if is_ours else 1.5,
        marker=_MARKERS[names.index(name) % len(_MARKERS)], markersize=7 if is_ours else 5, zorder=3 if is_ours else 2,
    )


def _dress(panel: Any, title: str, lengths: list[int]) -> None:
    panel.set_title(title, fontsize="medium")
    length_axis(panel, lengths)
    panel.set_ylim(bottom=0)
    frame(panel)


def _title(report: dict[str, Any]) -> str:
    first = report["rows"][0]
    tokens = sorted({row["batch"] * row["length"] for row in report["rows"]})
    volume = f"{tokens[0]:,} tokens a batch, " if len(tokens) == 1 else ""
    kind = "causal attention" if first["causal"] else "attention, not causal"
    what = f"{kind}, {first['decay']} decay, {first['dtype']}, {first['heads']} heads"
    where = f"{volume}{report['gpu'] or 'CPU'}, torch {report['torch']}, triton {report['triton']}"
    return f"{what}\n{where}"
