"""Options that fuzzers share, and the outcomes of their calls."""

import argparse
import collections
from collections.abc import Iterator, Sequence
from typing import Any

from shared.options import above_zero

from tools.fuzzing.draws import CALLS_PER_FAMILY

NEAR = 0.8  # of its budget: errors that pass with more are listed
OPTIONS_OF_ALL = {
    "seed": (0, 0, "seed of the calls, which are drawn from it and their numbers", int),
    "only": (None, None, "number of one call to make, with the errors of all tensors", int),
    "family": (CALLS_PER_FAMILY, CALLS_PER_FAMILY, "calls that share what kernels are compiled for: more of them are "
               "faster and vary less; part of the draw"),
    "minutes": (None, None, "stop after these minutes", above_zero),
}


class Summary:
    """Outcomes of all calls. names: of the options that repeat one, unless they are None."""

    def __init__(self, script: str, options: argparse.Namespace, names: Sequence[str]) -> None:
        self.script, self.options, self.names = script, options, names
        self.verbose = options.only is not None  # calls that pass print a line
        self.done = self.failed = self.cannot_tell = 0
        # by backend and tensor, of those that passed: the largest error over its budget, and the call that had it
        self.worst: dict[str, dict[str, tuple[float, int]]] = collections.defaultdict(dict)
        # calls by backend, and by what failed: backend and tensor, backend and exception, "crash" and the like
        self.ran: collections.Counter[str] = collections.Counter()
        self.kinds: collections.Counter[str] = collections.Counter()

    def again(self, number: int) -> str:
        """Command that repeats a call."""
        words = ["python", self.script]
        for name in self.names:
            value = number if name == "only" else getattr(self.options, name)
            if value is not None:
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return " ".join(words)

    def add(self, number: int, result: dict[str, Any]) -> list[str]:
        """A line about the call if it failed."""
        self.done += 1
        self.cannot_tell += bool(result["cannot_tell"])
        for backend, tensors in result["ratios"].items():
            self.ran[backend] += 1
            for name, ratio in tensors.items():
                if ratio <= 1:
                    self.worst[backend][name] = max(self.worst[backend].get(name, (0.0, 0)), (ratio, number))
            if self.verbose:
                print(backend, "  ".join(f"{name} {ratio:.2g}" for name, ratio in tensors.items()))
        if not result["failures"]:
            return []
        self.failed += 1
        self.kinds.update({what for what, _ in result["failures"]})
        failures = "; ".join(f"{what} {text}" for what, text in result["failures"])
        return [f"FAILED {self.again(number)}: {failures}  # {result['call']}"]

    def lines(self, asked: int, seconds: float) -> Iterator[str]:
        stopped = f" of {asked}, stopped in time" if self.done < asked else ""
        yield f"{self.done} calls{stopped} in {seconds:.0f} s, {self.failed} failed"
        yield from (f"  {count:5d} × {kind}" for kind, count in self.kinds.most_common())
        yield "largest error over its budget, of those within it (calls):"
        for backend, tensors in self.worst.items():
            numbers = "  ".join(f"{name} {ratio:.2f}" for name, (ratio, _) in sorted(tensors.items()))
            yield f"  {backend} ({self.ran[backend]})  {numbers}"
        for backend, tensors in self.worst.items():
            for name, (ratio, number) in sorted(tensors.items()):
                if ratio > NEAR:
                    yield f"  {backend} {name} {ratio:.2f}: {self.again(number)}"
        if self.cannot_tell:
            yield (f"{self.cannot_tell} calls had tensors that eager attention cannot hold, or no larger than their "
                   "budget: not judged")
