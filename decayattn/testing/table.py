"""Comparisons as a table of text, and their ratio."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "wrong", "cannot tell"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Line of the table: labels, figures and verdict. "cannot tell": the budget is no smaller than the result."""

    error: float
    budget: float
    relative_error: float
    norm: str  # "frobenius", "maximum", or "zeros": the entries that must be 0
    verdict: Verdict

    @property
    def labels(self) -> dict[str, str]:
        """Cells before the figures, by heading."""
        raise NotImplementedError

    @property
    def passed(self) -> bool:
        return self.verdict == "ok"


def format_table(rows: Sequence[Row]) -> str:
    """Comparisons or gradient rows as an aligned monospace table; decay parameters are marked with λ."""
    if not rows:
        return "(nothing to compare)"
    cells: list[tuple[Any, ...]] = [(*rows[0].labels, "relative error", "error", "budget", "norm", "verdict")]
    for row in rows:
        numbers = (f"{x:.2e}" for x in (row.relative_error, row.error, row.budget))
        cells.append((*row.labels.values(), *numbers, row.norm, "VIOLATED" if row.verdict == "wrong" else row.verdict))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def ratio(a: float, b: float) -> float:
    """a / b, with 0 / 0 = 0."""
    return a / b if b else (math.inf if a else 0.0)
