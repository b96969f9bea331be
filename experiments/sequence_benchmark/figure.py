"""One picture of a report: a panel for each part that was measured."""

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from shared.cases import DIRECTIONS

# colour-blind safe (Okabe and Ito)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw(report: dict[str, Any]) -> Figure:
    """Bars with the range over the rounds, and the cache's length over the tokens of a long text."""
    panels: list[Callable[[Any, dict[str, Any]], None]] = []
    for key, panel in (("packed", _packed), ("decode", _decode), ("generate", _generate), ("stream", _stream)):
        if report[key]:
            panels.append(panel)
    if not panels:
        raise ValueError("report: has no results to draw")
    figure = Figure(figsize=(1.0 + 4.8 * len(panels), 4.4), dpi=150, layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, report)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report['device']}, torch {report['torch']}, triton {report['triton']}", fontsize="medium")
    return figure


def _packed(axes: Any, report: dict[str, Any]) -> None:
    rows = report["packed"]
    groups = list(dict.fromkeys((direction, row["head_dim"]) for direction in DIRECTIONS for row in rows))
    names = list(dict.fromkeys(row["workload"] for row in rows))
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        own = [row for row in rows if row["workload"] == name]
        offset = (at - (len(names) - 1) / 2) * width
        places = [groups.index((row["direction"], row["head_dim"])) + offset for row in own]
        _bars(axes, places, own, "tflops", width, name, _COLOURS[at])
    axes.set_xticks(range(len(groups)), [f"{direction}\nD {head_dim}" for direction, head_dim in groups])
    axes.set_ylabel("TFLOP/s of the visible pairs")
    axes.set_title("packed sequences, sliding window", fontsize="medium")
    axes.legend(frameon=False)


def _decode(axes: Any, report: dict[str, Any]) -> None:
    rows = report["decode"]
    _bars(axes, list(range(len(rows))), rows, "gigabytes_per_second", 0.6, None, _COLOURS[0])
    axes.set_xticks(range(len(rows)), [row["decay"].replace(", ", "\n") for row in rows])
    axes.set_ylabel("GB/s")
    first = rows[0]
    axes.set_title(f"one new token, B {first['batch']}, {first['tokens']:,} tokens cached", fontsize="medium")


def _generate(axes: Any, report: dict[str, Any]) -> None:
    rows = report["generate"]
    _bars(axes, list(range(len(rows))), rows, "tokens_per_second", 0.6, None, _COLOURS[0])
    axes.set_xticks(range(len(rows)), [row["mode"] for row in rows])
    axes.set_ylabel("tokens per second")
    axes.set_title(f"text after a prompt of {rows[0]['prompt']:,} tokens", fontsize="medium")


def _stream(axes: Any, report: dict[str, Any]) -> None:
    stream = report["stream"]
    axes.plot(stream["tokens"], stream["before"], color=_COLOURS[0], label="before an eviction")
    axes.plot(stream["tokens"], stream["after"], color=_COLOURS[1], label="after it")
    axes.axhline(stream["held_bound"], color="#000000", linestyle="--", linewidth=1, label="bound after it")
    axes.set_xlabel("tokens written")
    axes.set_ylabel("tokens in the longest cache")
    axes.set_title(f"an eviction every {stream['evict_every']} tokens", fontsize="medium")
    axes.legend(frameon=False)


def _bars(
    axes: Any, places: list[float], rows: list[dict[str, Any]], value: str, width: float, label: str | None, colour: str
) -> None:
    speed = [row[value] for row in rows]
    below = [row[value] - row[f"{value}_range"][0] for row in rows]
    above = [row[f"{value}_range"][1] - row[value] for row in rows]
    axes.bar(places, speed, width, yerr=[below, above], capsize=3, label=label, color=colour)
