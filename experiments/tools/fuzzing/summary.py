"""Outcomes of random calls: failures, each with the command that repeats it, and what passed only just."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

# of its budget: errors that pass with more are looked at
NEAR = 0.8


class Summary:
    """Outcomes of all calls. again: the command that repeats one; told: what passes is printed, too."""

    def __init__(self, again: Callable[[int], str], told: bool) -> None:
        self.again, self.told = again, told
        self.done = 0
        self.failures: list[dict[str, Any]] = []
        # by backend and tensor, of what passed: the largest error over its budget, and the call that had it
        self.worst: dict[str, dict[str, tuple[float, int]]] = collections.defaultdict(dict)
        self.ran: collections.Counter[str] = collections.Counter()
        self.cannot_tell = 0

    def add(self, number: int, result: dict[str, Any]) -> list[str]:
        """A line about the call if it failed."""
        self.done += 1
        for backend, tensors in result["ratios"].items():
            self.ran[backend] += 1
            for name, ratio in tensors.items():
                if ratio <= 1:
                    self.worst[backend][name] = max(self.worst[backend].get(name, (0.0, 0)), (ratio, number))
        self.cannot_tell += bool(result["cannot_tell"])
        if self.told:
            for backend, tensors in result["ratios"].items():
                print(backend, "  ".join(f"{name} {ratio:.2g}" for name, ratio in tensors.items()))
        if not result["failures"]:
            return []
        again = self.again(number)
        self.failures.append({"repeat": again, "call": result["call"], "failures": result["failures"]})
        failures = "; ".join(f"{what} {text}" for what, text in result["failures"])
        return [f"FAILED {again}: {failures}  # {result['call']}"]

    def kinds(self) -> dict[str, int]:
        """Number of calls by what failed: backend and tensor, backend and exception, "crash" and the like."""
        count = collections.Counter(what for failure in self.failures for what in {w for w, _ in failure["failures"]})
        return dict(count.most_common())

    def near(self) -> Iterator[tuple[str, str, float, str]]:
        """Backend, tensor, error over its budget, and how to repeat the call: what failed only just not."""
        for backend, tensors in self.worst.items():
            for name, (ratio, number) in sorted(tensors.items()):
                if ratio > NEAR:
                    yield backend, name, ratio, self.again(number)

    def text(self, asked: int, seconds: float) -> str:
        stopped = f" of {asked}, stopped in time" if self.done < asked else ""
        lines = [f"{self.done} calls{stopped} in {seconds:.0f} s, {len(self.failures)} failed"]
        lines += [f"  {count:5d} × {kind}" for kind, count in self.kinds().items()]
        lines.append("largest error over its budget, of those within it (calls):")
        for backend, tensors in self.worst.items():
            numbers = "  ".join(f"{name} {ratio:.2f}" for name, (ratio, _) in sorted(tensors.items()))
            lines.append(f"  {backend} ({self.ran[backend]})  {numbers}")
        lines += [f"  {backend} {name} {ratio:.2f}: {again}" for backend, name, ratio, again in self.near()]
        if self.cannot_tell:
            lines.append(
                f"{self.cannot_tell} calls had tensors that eager attention cannot hold, or no larger than their "
                "budget: not judged"
            )
        return "\n".join(lines)
