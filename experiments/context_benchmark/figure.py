"""Bytes over length, and the speed over one GPU."""

from typing import Any

from matplotlib.figure import Figure
from shared.plots import frame

from context_benchmark.measure import ALONE, BOTH, FORWARD

# colour-blind safe (Okabe and Ito)
_COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")

_NAMES = {"alibi": "ALiBi", "none": "no decay"}


def draw(report: dict[str, Any]) -> Figure:
    """A panel of bytes that a rank receives in a forward over T, and one of speeds of both where there are any."""
    forward = [row for row in report["rows"] if row["direction"] == FORWARD and row["received"] is not None]
    if not forward:
        raise ValueError("report: has no rows to draw")
    both = [row for row in report["rows"] if row["direction"] == BOTH and row["mode"] != ALONE]
    timed = [row for row in both if row["speed_over_alone"] is not None]
    panels = [(_bytes, forward), *([(_speeds, timed)] if timed else [])]
    figure = Figure(figsize=(1.0 + 7.0 * len(panels), 4.8), dpi=150, layout="constrained")
    for (panel, rows), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, rows)
        axes.set_xscale("log", base=2)
        ticks = sorted({row["length"] for row in rows})
        axes.set_xticks(ticks, [f"{length // 1024}k" if length >= 1024 else str(length) for length in ticks])
        axes.minorticks_off()
        axes.set_xlabel("sequence length")
        frame(axes)
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    first = forward[0]
    figure.suptitle(
        f"{first['ranks']} × {report['gpu'] or 'CPU process'}, H{first['heads']} H_kv{first['kv_heads']} "
        f"D{first['head_dim']} {first['dtype']}, torch {report['torch']}, triton {report['triton']}", fontsize="medium",
    )
    return figure


def _lines(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, list[dict[str, Any]]]]:
    decays = list(dict.fromkeys(row["decay"] for row in rows))
    found = []
    for mode, style in (("halo", "-"), ("heads", ":")):
        for decay, colour in zip(decays, _COLOURS, strict=False):
            own = sorted((r for r in rows if (r["mode"], r["decay"]) == (mode, decay)), key=lambda row: row["length"])
            if own:
                found.append((f"{mode}, {_NAMES.get(decay, f'mean λ {decay}')}", style, colour, own))
    return found


def _bytes(axes: Any, rows: list[dict[str, Any]]) -> None:
    for label, style, colour, own in _lines(rows):
        if style == "-" or own[0]["decay"] == rows[0]["decay"]:  # heads mode sends the same whatever the decay is
            label = label if style == "-" else "heads"
            axes.plot([r["length"] for r in own], [max(r["received"]) for r in own], style, marker="o", color=colour,
                      label=label)
    whole = {row["length"]: row["everything"] for row in rows}
    axes.plot(sorted(whole), [whole[n] for n in sorted(whole)], "--", color="#999999", label="everything")
    axes.set_yscale("log")
    axes.set_ylabel("bytes that a rank receives, forward")


def _speeds(axes: Any, rows: list[dict[str, Any]]) -> None:
    for label, style, colour, own in _lines(rows):
        axes.plot([r["length"] for r in own], [r["speed_over_alone"] for r in own], style, marker="o", color=colour,
                  label=label)
    axes.axhline(rows[0]["ranks"], color="#999999", linewidth=0.8)
    axes.set_ylabel("speed over one GPU, forward and backward")
