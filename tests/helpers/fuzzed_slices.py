"""Runs of fuzz_context.py's calls, right ones and some with a fault, on every rank of a group."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from shared import ranks
from tools import fuzz_context

from decayattn.distributed import halo_exchange


def fuzzed(group, argv, wrong=None):
    """Exit status and printed text."""
    options = fuzz_context.parse(["--ranks", str(dist.get_world_size(group)), *argv])
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        if wrong is not None:
            wrong(patch, dist.get_rank(group))
        status = fuzz_context.fuzz(options, group, group, torch.device("cpu"))
    return status, printed.getvalue()


def without_a_key(patch, rank):
    """No row sees the first token of its rank's part of the sequence."""
    patch.setattr(halo_exchange, "first_keys", lambda plan: torch.ones_like(plan.begins[0]))


def one_gradient(patch, rank):
    """The last rank's dq is larger by a hundredth."""
    attend = ranks.context_parallel_attention

    def larger(q, *rest, **options):
        if q.requires_grad:
            q.register_hook(lambda gradient: gradient * (1 + rank * 1e-2))
        return attend(q, *rest, **options)

    patch.setattr(ranks, "context_parallel_attention", larger)


def raises(patch, rank):
    """The last rank runs out of memory."""

    def run(*_):
        if rank:
            raise RuntimeError("no memory")

    patch.setattr(fuzz_context, "run_slices", run)
