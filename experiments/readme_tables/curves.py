"""Loss over position as lines, in SVG: the figure of length_extrapolation.py in the README's few inches."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from extrapolation.figure import COLOURS, coarser
from language_models.schemes import SCHEMES
from shared.plots import kilo

from readme_tables.picture import STYLE

_WIDTH, _PLOT, _HEIGHT = 900, 560, 200
_LEFT, _TOP = 40, 24
# bytes before: to the left of it every scheme knows too little to differ
_FIRST = 64
# what loses its way leaves the plot upwards
_MOST = 1.45
_STEP = 0.1  # bits per byte between two lines of the grid

# by scheme, where a point is (bytes before) and what it is (bits per byte)
Curves = dict[str, list[tuple[float, float]]]


def curves_of(report: dict[str, Any]) -> Curves:
    """Mean over the seeds of every scheme that reads any length, in the shortest texts that are read."""
    length = min(row["length"] for run in report["runs"] for row in run["reading"])
    edges = np.array(report["edges"][str(length)])
    found = {}
    for name, scheme in SCHEMES.items():
        of_seeds = [
            row["bits"] for run in report["runs"] if run["scheme"] == name for row in run["reading"]
            if row["length"] == length
        ]
        if of_seeds and scheme.any_length:
            positions, means = coarser(edges, np.array(of_seeds, dtype=float))
            found[name] = [
                (float(x), float(y)) for x, y in zip(positions, means.mean(0), strict=True) if x >= _FIRST
            ]
    return found


def draw(curves: Curves, context: int, title: str) -> str:
    """A line per scheme over the position, logarithmic, its name beside where it ends; the trained length marked."""
    last = max(points[-1][0] for points in curves.values())
    least = _STEP * math.floor(min(y for points in curves.values() for _, y in points) / _STEP)
    bottom, right = _TOP + _HEIGHT, _LEFT + _PLOT

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / _FIRST) / math.log(last / _FIRST)
        return _LEFT + across * _PLOT, bottom - (y - least) / (_MOST - least) * _HEIGHT

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 40}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<clipPath id="plot"><rect x="{_LEFT}" y="{_TOP}" width="{_PLOT}" height="{_HEIGHT}"/></clipPath>',
        f'<text class="small" x="{_LEFT}" y="{_TOP - 10}">bits per byte</text>',
    ]
    for step in range(math.floor((_MOST - least) / _STEP + 1e-9) + 1):
        y = at(_FIRST, least + step * _STEP)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="small" x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{least + step * _STEP:.1f}</text>'
        )
    for power in range(math.ceil(math.log2(_FIRST)), math.floor(math.log2(last)) + 1):
        x = at(2.0**power, least)[0]
        parts.append(
            f'<text class="small" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{kilo(2**power)}</text>'
        )
    parts.append(
        f'<text class="small" x="{_LEFT + _PLOT / 2:g}" y="{bottom + 30}" text-anchor="middle">bytes before</text>'
    )
    x = at(context, least)[0]
    parts.append(f'<line class="line" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke-dasharray="2 3"/>')
    parts.append(
        f'<text class="small" x="{x - 5:.1f}" y="{_TOP + 10}" text-anchor="end">trained length, {kilo(context)}</text>'
    )
    for name, points in curves.items():
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" {_look(name)} clip-path="url(#plot)"/>')
    return "\n".join([*parts, *_names(curves, right), "</svg>"]) + "\n"


def _names(curves: Curves, right: float) -> Sequence[str]:
    """Names from the highest loss at the end to the lowest, with that loss."""
    parts = []
    for number, name in enumerate(sorted(curves, key=lambda name: -curves[name][-1][1])):
        y = _TOP + 12 + 24 * number
        parts.append(f'<line x1="{right + 14}" y1="{y}" x2="{right + 40}" y2="{y}" {_look(name)}/>')
        parts.append(
            f'<text x="{right + 48}" y="{y + 4}">{escape(SCHEMES[name].label)}: '
            f"{curves[name][-1][1]:.2f} at the right</text>"
        )
    return parts


def _look(name: str) -> str:
    """Attributes of a scheme's line; what is black in the figure is the text's colour, which a dark page turns."""
    colour = 'class="line"' if COLOURS[name] == "#000000" else f'stroke="{COLOURS[name]}"'
    return f'{colour} stroke-width="2"' + ("" if SCHEMES[name].decays else ' stroke-dasharray="6 4"')
