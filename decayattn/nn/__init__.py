"""Layers: DecayFlashAttention and the decay modules that it takes."""

from decayattn.nn.attention import DecayFlashAttention
from decayattn.nn.cache import DecayCache
from decayattn.nn.decay import ConstantDecay, Decay, ScalarDecay, alibi_log_decay, half_life, retnet_log_decay

__all__ = [
    "ConstantDecay",
    "Decay",
    "DecayCache",
    "DecayFlashAttention",
    "ScalarDecay",
    "alibi_log_decay",
    "half_life",
    "retnet_log_decay",
]
