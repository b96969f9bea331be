"""Speeds as bars, in SVG: text, so that a test can tell whether it says what the JSON says."""

from collections.abc import Sequence
from html import escape

from readme_tables.results import Shape

# colour-blind safe (Okabe and Ito); ours stand out
COLOURS = {
    "ours": "#d55e00", "ours, no decay": "#e69f00", "flash_attn": "#999933", "flex": "#56b4e9", "fla": "#009e73",
    "fox": "#cc79a7",
}
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 10px }
text.inside { font-size: 9px; fill: #ffffff }
.line { stroke: #1f2328 }
.grid { stroke: #1f2328; opacity: 0.15 }
@media (prefers-color-scheme: dark) { text:not(.inside) { fill: #e6edf3 } .line, .grid { stroke: #e6edf3 } }"""
_WIDTH, _PANEL, _HEIGHT = 900, 400, 210
_LEFT, _TOP, _GAP = 40, 62, 50
_STEP = 0.25  # between two lines of the grid

# by (kernel, shape, direction): speed as a multiple of cuDNN's
Ratios = dict[tuple[str, Shape, str], float]


def draw(ratios: Ratios, labels: dict[str, str], title: str) -> str:
    """A panel per direction, a group of bars per shape, and a line where cuDNN is."""
    shapes = sorted({shape for _, shape, _ in ratios})
    kernels = [name for name in labels if any(kernel == name for kernel, _, _ in ratios)]
    top = _STEP * (int(max(ratios.values()) / _STEP) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_TOP + _HEIGHT + 50}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        *_legend(kernels, labels),
    ]
    for number, direction in enumerate(("forward", "backward")):
        parts += _panel(_LEFT + number * (_PANEL + _GAP), direction, shapes, kernels, ratios, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(kernels: Sequence[str], labels: dict[str, str]) -> list[str]:
    parts, columns = [], 3
    for number, name in enumerate(kernels):
        x, y = _LEFT + number % columns * 290, 4 + number // columns * 18
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{escape(_short(labels[name]))}</text>')
    return parts


def _short(label: str) -> str:
    return label.replace("decay and its gradient", "decay + gradient").replace("decay without its", "decay, no")


def _panel(
    left: int, direction: str, shapes: Sequence[Shape], kernels: Sequence[str], ratios: Ratios, top: float
) -> list[str]:
    bottom = _TOP + _HEIGHT
    scale = _HEIGHT / top
    parts = [f'<text x="{left + _PANEL / 2:g}" y="{_TOP - 8}" text-anchor="middle">{direction}</text>']
    for step in range(round(top / _STEP) + 1):
        y = bottom - step * _STEP * scale
        kind = "line" if step * _STEP == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{left}" y1="{y:.1f}" x2="{left + _PANEL}" y2="{y:.1f}"/>')
        if step % 2 == 0:
            parts.append(
                f'<text class="small" x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{step * _STEP:.1f}</text>'
            )
    group = _PANEL / len(shapes)
    bar = group * 0.84 / len(kernels)
    for at, shape in enumerate(shapes):
        begin = left + at * group + group * 0.08
        for number, name in enumerate(kernels):
            ratio = ratios.get((name, shape, direction))
            if ratio is None:
                continue
            x, height = begin + number * bar, ratio * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{bar - 1:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[name]}"><title>{ratio:.2f}</title></rect>'
            )
            if name == "ours":
                place = f"translate({x + bar / 2 + 3:.1f} {bottom - height + 4:.1f}) rotate(-90)"
                parts.append(f'<text class="inside" transform="{place}" text-anchor="end">{ratio:.2f}</text>')
        middle = left + (at + 0.5) * group
        for line, text in enumerate((f"D = {shape.head_dim}", f"T = {shape.length}", f"B = {shape.batch}")):
            parts.append(
                f'<text class="small" x="{middle:.1f}" y="{bottom + 14 + 13 * line}" text-anchor="middle">{text}</text>'
            )
    parts.append(f'<text class="small" x="{left + _PANEL}" y="{bottom - scale - 3:.1f}" text-anchor="end">cuDNN</text>')
    return parts
