"""What launches ask of a call (how tensors are addressed, how far rows see, which heads are computed together), and how
kernels read the tuples that they are compiled for."""

from collections.abc import Callable

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from decayattn.backends.hopper import config
from decayattn.backends.hopper.common import descriptors
from decayattn.backends.runtime.integers import cdiv
from decayattn.problem import AttentionProblem


@gluon.constexpr_function
def field(of_call, name):
    """A field of a NamedTuple that a kernel is compiled for."""
    return getattr(of_call, name)


def limits_of(problem: AttentionProblem) -> tuple[int, int]:
    """How many keys before its own a query sees at most, and how many behind it; without a limit, as many as there may
    be."""
    left, right = problem.window
    keys, rows = problem.key_length, problem.query_length
    # the last row stands at the last key, so it is at most so many rows behind another one
    return keys if left < 0 else min(left, keys), rows if right < 0 else min(right, rows)


def source_of(problem: AttentionProblem) -> Callable[[Tensor, int, int], TensorDescriptor]:
    """How the copy engine addresses tokens where the problem's sequences lie."""
    return descriptors.tokens if problem.layout == "dense" else descriptors.slices


def heads_together(heads: int, size: int, sharing: int = 1, minimum: int = 1) -> int:
    """So many heads that what they read again and again, `size` bytes for `sharing` of them, fits the L2, or `minimum`
    heads, if that is more; but no more than it takes for as few chunks of them, of which the last one may be smaller.
    """
    groups = heads // sharing
    chunks = cdiv(groups, max(1, config.CACHE_BYTES // max(size, 1), cdiv(minimum, sharing)))
    return cdiv(groups, chunks) * sharing
