"""Layers: DecayFlashAttention, its decay modules, and tools for training and generation with them."""

from decayattn.nn.attention import DecayFlashAttention
from decayattn.nn.cache import DecayCache
from decayattn.nn.capture import CapturedStep
from decayattn.nn.decay import ConstantDecay, Decay, ScalarDecay, alibi_log_decay, half_life, retnet_log_decay
from decayattn.nn.parallel import fully_shard_attention, tensor_parallel_plan
from decayattn.nn.rotary import Rotary
from decayattn.nn.training import parameter_groups, record_half_lives

__all__ = [
    "CapturedStep", "ConstantDecay", "Decay", "DecayCache", "DecayFlashAttention", "Rotary", "ScalarDecay",
    "alibi_log_decay", "fully_shard_attention", "half_life", "parameter_groups", "record_half_lives",
    "retnet_log_decay", "tensor_parallel_plan",
]
