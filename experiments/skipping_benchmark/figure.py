"""Time over length, and what skipping gains where."""

from typing import Any

from matplotlib.figure import Figure
from shared.cases import DIRECTIONS
from shared.plots import frame, kilo, length_axis

from skipping_benchmark.workloads import SKIPPING, WHOLE

# colour-blind safe (Okabe and Ito)
_COLOURS = {WHOLE: "#000000", SKIPPING: "#d55e00"}
_BARS = ("#0072b2", "#56b4e9")


def draw(report: dict[str, Any]) -> Figure:
    """A panel of times over T, and one of speeds over the kernel that visits every tile, where they were measured."""
    over_length = [row for row in report["rows"] if row["study"] == "lengths"]
    compared = [row for row in report["rows"] if row["peer"] == SKIPPING and row["speed_over_whole"] is not None]
    compared = [row for row in compared if row["study"] != "lengths"]
    panels = [(panel, rows) for panel, rows in ((_times, over_length), (_gains, compared)) if rows]
    if not panels:
        raise ValueError("report: has no rows to draw")
    figure = Figure(figsize=(1.0 + 6.0 * len(panels), 4.8), dpi=150, layout="constrained")
    for (panel, rows), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, rows)
        frame(axes)
    figure.suptitle(f"{report['gpu']}, torch {report['torch']}, triton {report['triton']}", fontsize="medium")
    return figure


def _times(panel: Any, rows: list[dict[str, Any]]) -> None:
    for name, colour in _COLOURS.items():
        for direction, style in zip(DIRECTIONS, ("-", "--"), strict=True):
            own = [row for row in rows if (row["peer"], row["direction"]) == (name, direction)]
            own.sort(key=lambda row: row["length"])
            if own:
                lengths, times = zip(*((row["length"], row["ms"]) for row in own), strict=True)
                panel.plot(lengths, times, style, marker="o", color=colour, label=f"{name}, {direction}")
    panel.set_yscale("log")
    length_axis(panel, sorted({row["length"] for row in rows}))
    panel.set_xlabel("sequence length")
    panel.set_ylabel("ms")
    first = rows[0]
    title = f"H{first['heads']} D{first['head_dim']}, λ uniform with mean {first['mean_log_decay']:g}"
    panel.set_title(title, fontsize="medium")
    panel.legend(frameon=False)


def _gains(panel: Any, rows: list[dict[str, Any]]) -> None:
    def group_of(row: dict[str, Any]) -> tuple:
        return row["rates"], row["gain"], row["head_dim"], row["length"]

    groups = list(dict.fromkeys(map(group_of, rows)))
    for at, direction in enumerate(DIRECTIONS):
        own = {group_of(row): row for row in rows if row["direction"] == direction}
        places = [n + 0.4 * at - 0.2 for n in range(len(groups))]
        panel.bar(places, [own[group]["speed_over_whole"] for group in groups], 0.4, color=_BARS[at], label=direction)
        if not at:
            ideal = [own[group]["ideal"] for group in groups]
            marks = {"marker": "_", "s": 400, "color": "#000000", "zorder": 3}
            panel.scatter(range(len(groups)), ideal, label="visited tiles", **marks)
    names = [
        f"{rates}{f', q and k times {gain:g}' if gain != 1 else ''}\nD{dim} T{kilo(length)}"
        for rates, gain, dim, length in groups
    ]
    panel.set_xticks(range(len(groups)), names, fontsize="x-small", rotation=45, ha="right")
    panel.set_yscale("log")
    panel.axhline(1.0, color="#000000", linewidth=0.8)
    panel.set_ylabel("speed over the kernel that visits every tile")
    panel.legend(frameon=False)
