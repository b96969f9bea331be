"""Options of scripts as tables: name → (default on a GPU, default on a CPU, help, and type or choices)."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.provenance import ROOT


def parser_of(doc: str | None, options: Mapping[str, tuple], cuda: bool) -> argparse.ArgumentParser:
    """The parser of a table; a list takes any number of values, False is a flag, numbers are above 0."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (on_gpu, on_cpu, help, *kind) in options.items():
        default = on_gpu if cuda else on_cpu
        shown = default.relative_to(ROOT) if isinstance(default, Path) else default
        if isinstance(shown, list):
            shown = " ".join(map(str, shown))
        settings: dict[str, Any] = {"default": default, "help": f"{help} (default: {shown})".replace("%", "%%")}
        sample = next(iter([*on_gpu, *on_cpu]), "") if isinstance(on_gpu, list) else on_gpu
        if on_gpu is False:
            settings["action"] = "store_true"
        elif kind and not callable(kind[0]):
            settings["choices"] = tuple(kind[0])
        else:
            settings["type"] = kind[0] if kind else {int: positive, float: above_zero}.get(type(sample), type(sample))
        if isinstance(on_gpu, list):
            settings["nargs"] = "*"
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    return parser


def positive(text: str) -> int:
    """Type of an option that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return number


def above_zero(text: str) -> float:
    """Type of an option that measures something."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return number
