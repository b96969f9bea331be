"""Softmax flash attention with scores that decay with distance, and the gradient of the decay."""

from decayattn.functional import decay_attention, decay_attention_varlen, visited_fraction
from decayattn.nn.attention import DecayFlashAttention
from decayattn.paged import decay_attention_paged
from decayattn.probabilities import attention_rows, decay_matrix

__all__ = [
    "DecayFlashAttention", "attention_rows", "decay_attention", "decay_attention_paged", "decay_attention_varlen",
    "decay_matrix", "visited_fraction",
]
__version__ = "0.1.0"
