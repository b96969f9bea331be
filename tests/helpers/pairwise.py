"""Parameters of tests that have many combinations."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of a value per axis. In the interpreter, where each takes seconds, only some are not slow: so
    many that any two values of two axes are together in one of them."""
    combinations = list(itertools.product(*map(range, map(len, axes))))
    missing = set().union(*map(pairs, combinations))
    quick = set()
    while missing:
        best = max(combinations, key=lambda combination: len(missing & pairs(combination)))
        quick.add(best)
        missing -= pairs(best)
    return [
        pytest.param(
            *(axis[n] for axis, n in zip(axes, combination, strict=True)),
            marks=[] if combination in quick or torch.cuda.is_available() else pytest.mark.slow,
        )
        for combination in combinations
    ]


def pairs(combination: Iterable[int]) -> set[tuple[tuple[int, int], ...]]:
    """Of (axis, value) of two axes."""
    return set(itertools.combinations(enumerate(combination), 2))
