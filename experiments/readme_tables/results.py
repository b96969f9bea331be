"""What was measured, as results/ has it; figures without a known origin are refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shared.provenance import trees_of

# what a figure's file has to say of its origin, besides its GPU
_ORIGIN = ("commit", "torch", "triton", "command")


class Refused(Exception):
    """A file in results/ that may not be quoted; the message says why."""


class Shape(NamedTuple):
    """One attention problem."""

    head_dim: int
    value_dim: int
    length: int
    batch: int
    heads: int
    causal: bool


# of a shape and a direction, every kernel's figures: ms, ms_range, tflops, ratio_to_cudnn
Speeds = dict[tuple[Shape, str], dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Results:
    """A folder of results, and how a page that quotes it calls it ("results/", or "../results/")."""

    folder: Path
    prefix: str = "results/"

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def link(self, name: str, text: str = "JSON") -> str:
        return f"[{text}]({self.prefix}{name})"

    def load(self, name: str, on_gpu: bool = True) -> dict[str, Any]:
        """The JSON file of that name, its origin beside its figures; raises Refused unless the origin is whole, and for
        code that was not the commit's: by what git said then ("dirty"), or by the code's trees, where git knows the
        commit and the report, which may be older, names them."""
        report = json.loads((self.folder / name).read_text(encoding="utf-8"))
        report |= report.pop("provenance", {})  # some files keep it apart
        absent = [key for key in (*_ORIGIN, *["gpu"] * on_gpu) if not report.get(key)]
        if not report.get("gpu") and "+cpu" not in str(report.get("torch")):
            absent.append("gpu")  # without one, only a torch for CPUs is believed
        if absent:
            raise Refused(f"results/{name}: lacks {', '.join(dict.fromkeys(absent))}; nobody could measure it again")
        if report.get("dirty"):
            raise Refused(f"results/{name}: the code differed from commit {report['commit'][:9]} when it was measured")
        trees = report.get("trees", {})
        known = trees_of(report["commit"], self.folder) if trees else None
        differ = [folder for folder in trees if known is not None and trees[folder] != known.get(folder)]
        if differ:
            raise Refused(f"results/{name}: {' and '.join(differ)} differed from commit {report['commit'][:9]} when it "
                          "was measured")
        return report


def speeds(report: dict[str, Any]) -> Speeds:
    """The rows of benchmark_sustained.py."""
    found = {}
    for row in report["rows"]:
        value_dim = row.get("value_dim") or row["head_dim"]
        shape = Shape(row["head_dim"], value_dim, row["length"], row["batch"], row["heads"], row["causal"])
        found[shape, row["direction"]] = row["kernels"]
    return found
