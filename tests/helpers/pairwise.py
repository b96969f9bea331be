"""Parameters of tests that have many combinations."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def pairwise(*axes: Sequence[Any], also_on_gpu: bool = False) -> list[Any]:
    """Every combination of a value per axis. In the interpreter, where each takes seconds, only enough of them that any
    two values of two axes occur together; also on a GPU, for kernels that take seconds to compile."""
    combinations = list(itertools.product(*map(range, map(len, axes))))
    missing = set().union(*map(pairs, combinations))
    some = set()
    while missing:
        best = max(combinations, key=lambda combination: len(missing & pairs(combination)))
        some.add(best)
        missing -= pairs(best)
    if torch.cuda.is_available() and not also_on_gpu:
        some = combinations
    return [tuple(axis[n] for axis, n in zip(axes, at, strict=True)) for at in combinations if at in some]


def pairs(combination: Iterable[int]) -> set[tuple[tuple[int, int], ...]]:
    """Pairs of (axis, value) of two axes."""
    return set(itertools.combinations(enumerate(combination), 2))
