"""Sequences sharded over several GPUs: context parallelism with a decay, on torch.distributed."""

from decayattn.distributed.api import ContextParallel, context_parallel_attention, fetched_tokens

__all__ = ["ContextParallel", "context_parallel_attention", "fetched_tokens"]
