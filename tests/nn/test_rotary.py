"""Rotary embeddings against those of transformers' Llama."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from decayattn.nn import Rotary

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("base", "scaling"), [(10_000.0, None), (500_000.0, LLAMA3)])
def test_rotary_equals_llama(base, scaling, dtype):
    torch.manual_seed(0)
    q, k, start = torch.randn(2, 9, 4, 64), torch.randn(2, 9, 2, 64), torch.tensor([3, 20_000], dtype=torch.int32)
    parameters = {"rope_type": "llama3" if scaling else "default", "rope_theta": base, **(scaling or {})}
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters))
    cos, sin = theirs(q, start[:, None] + torch.arange(9))
    found = Rotary(base, scaling=scaling)(q.to(dtype), k.to(dtype), start=start)
    expected = apply_rotary_pos_emb(q.to(dtype).float(), k.to(dtype).float(), cos, sin, unsqueeze_dim=2)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b.to(dtype), rtol=0, atol=1e-4 if dtype == torch.float32 else 0.02)


def test_rotary_keeps_channels_beyond_dim():
    q, k = torch.randn(1, 5, 2, 10), torch.randn(1, 5, 1, 10)
    found, expected = Rotary(dim=4)(q, k), Rotary()(q[..., :4], k[..., :4])
    for a, b, x in zip(found, expected, (q, k), strict=True):
        assert torch.equal(a, torch.cat([b, x[..., 4:]], -1))


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"base": 1}, ValueError, "base: expected a finite number above 1"),
    ({"base": "10000"}, TypeError, "base: expected a finite number above 1"),
    ({"dim": 3}, ValueError, "dim: expected an even number"),
    ({"scaling": {"factor": 2.0}}, ValueError, "scaling: expected Llama 3's"),
])
def test_rotary_names_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        Rotary(**options)


def test_rotary_names_head_dimensions_too_small():
    for rotary, width in ((Rotary(), 7), (Rotary(dim=8), 6)):
        with pytest.raises(ValueError, match="dim: expected an even number up to the head dimension"):
            rotary(*torch.randn(2, 1, 3, 1, width))
