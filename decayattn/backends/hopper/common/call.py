"""Properties of a call that launches need: descriptors of its tensors, limits of a row's view, heads per chunk."""

from collections.abc import Callable

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from decayattn.backends.hopper import config
from decayattn.backends.hopper.common import descriptors
from decayattn.backends.runtime.integers import cdiv
from decayattn.problem import AttentionProblem


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
