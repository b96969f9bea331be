"""Properties of a call that launches need: modes, descriptors of tensors, limits of a row's view, heads per chunk."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from decayattn.backends.hopper import config
from decayattn.backends.hopper.common import descriptors
from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv
from decayattn.problem import AttentionProblem, DecayName


@dataclass(frozen=True)
class Modes(config.Constants):
    """Constants apart from the schedule (config.py)."""

    decay: DecayName
    causal: bool
    window: bool
    planned: bool
    ragged: bool  # a table lists the tiles of all sequences; otherwise every batch entry is one sequence
    packed: bool  # of the forward; the others are of the backward
    row_scales: bool  # a scale per row
    decay_gradient: bool
    group: int  # query heads per head of keys
    limited: bool  # some head may have a limited view, because of a window or of a rate that resets at every token
    row_sums: bool  # the decay's gradient needs row sums of dS; a constant rate's needs sums of keys only
    sides: int  # of the diagonal that the backward visits in turn: 2 if a decay's sign differs on them

    @classmethod
    @functools.lru_cache(launching.REMEMBERED)
    def of(
        cls, problem: AttentionProblem, planned: bool, packed: bool = False, row_scales: bool = False,
        decay_gradient: bool = False, group: int = 0,
    ) -> "Modes":
        decay, window = problem.decay, problem.window != (-1, -1)
        return cls(
            decay, problem.causal, window, planned, problem.layout != "dense", packed, row_scales, decay_gradient,
            group, limited=window or decay == "constant", row_sums=decay_gradient and decay == "scalar",
            sides=1 if problem.causal or decay == "none" else 2,
        )


@gluon.constexpr_function
def modes_of(values):
    return Modes(*values)


def limits_of(problem: AttentionProblem) -> tuple[int, int]:
    """Upper bounds on the keys that a query sees before and after its own; the lengths if the window has no limit."""
    left, right = problem.window
    keys, rows = problem.key_length, problem.query_length
    # the last row is at the last key, so no row is more than query_length before another one
    return keys if left < 0 else min(left, keys), rows if right < 0 else min(right, rows)


def source_of(problem: AttentionProblem) -> Callable[[Tensor, int, int], TensorDescriptor]:
    """Return the function that makes descriptors of tokens for the problem's layout."""
    return descriptors.tokens if problem.layout == "dense" else descriptors.slices


def heads_together(heads: int, size: int, sharing: int = 1, minimum: int = 1) -> int:
    """Number of heads to compute together, so that their repeatedly read data stays in L2.

    size: bytes for `sharing` heads. The heads read up to CACHE_BYTES, or are `minimum` heads if that is more. Chunks
    are then made as equal as their number allows; the last one may be smaller.
    """
    groups = heads // sharing
    chunks = cdiv(groups, max(1, config.CACHE_BYTES // max(size, 1), cdiv(minimum, sharing)))
    return cdiv(groups, chunks) * sharing
