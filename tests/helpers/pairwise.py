"""Parameters of tests that have many combinations."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch


def pairwise(*axes: Sequence[Any], also_on_gpu: bool = False) -> list[Any]:
    """Every combination of a value per axis. In the interpreter, where each takes seconds, only enough of them that any
    two values of two axes occur together; also on a GPU, for kernels that take seconds to compile."""
    combinations = list(itertools.product(*map(range, map(len, axes))))
    pairs = {at: set(itertools.combinations(enumerate(at), 2)) for at in combinations}
    missing, some = set().union(*pairs.values()), set()
    while missing:
        best = max(combinations, key=lambda at: len(missing & pairs[at]))
        some.add(best)
        missing -= pairs[best]
    if torch.cuda.is_available() and not also_on_gpu:
        some = combinations
    return [tuple(axis[n] for axis, n in zip(axes, at, strict=True)) for at in combinations if at in some]
