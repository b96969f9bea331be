"""Reports as JSON: written, and gone on with by a later call."""

import json
import math
import sys
from pathlib import Path
from typing import Any


def resumed(new: dict[str, Any], output: Path | None) -> dict[str, Any]:
    """The report to go on with: the one in that file, if it is there and of the same code, machine and setup; else the
    new one. The exit status is 1, with a line, if it is of others."""
    if output is None or not output.exists():
        return new
    old, new = json.loads(output.read_text(encoding="utf-8")), json.loads(json.dumps(new))  # tuples become lists
    for name in ("commit", "trees", "gpu", "torch", "triton", "setup"):
        if old.get(name) != new[name]:
            sys.exit(f"error: {output.name} has {name} {old.get(name)}, expected {new[name]}; give another file, or "
                     "remove it")
    return old


def write(report: dict[str, Any], path: Path) -> None:
    """The report as strict JSON; a number that JSON cannot say (a NaN error) becomes its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_sayable(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _sayable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sayable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
