"""Looks that all plots share."""

from collections.abc import Iterable, Sequence
from typing import Any


def frame(panel: Any) -> None:
    """A pale grid, and no line above or to the right."""
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def length_axis(panel: Any, lengths: Sequence[int]) -> None:
    """A logarithmic x axis with these sequence lengths as ticks."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, list(map(kilo, lengths)))
    panel.minorticks_off()


def kilo(length: int) -> str:
    """1024 as 1k."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def legend_entries(panels: Iterable[Any]) -> dict[str, Any]:
    """Label → handle of everything that the panels show, each once."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found
