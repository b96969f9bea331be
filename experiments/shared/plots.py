"""How plots look, whatever they show."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def frame(panel: Any) -> None:
    """A pale grid, and no line above or to the right."""
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def length_axis(panel: Any, lengths: Sequence[int]) -> None:
    """A logarithmic x axis that has these lengths of sequences for ticks."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, list(map(kilo, lengths)))
    panel.minorticks_off()


def kilo(length: int) -> str:
    """1024 as 1k, which is how lengths are said."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def legend_entries(panels: Iterable[Any]) -> dict[str, Any]:
    """Label → handle of everything that the panels show, each once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles


def save_beside(figure: Any, output: Path) -> None:
    """The figure of a report as PNG beside its JSON file."""
    plot = output.with_suffix(".png")
    figure.savefig(plot)
    print(f"wrote {output} and {plot.name}")
