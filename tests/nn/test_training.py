"""Tools for training loops: groups of parameters, recorded half-lives, and modules that are reset in any order."""

import math

import pytest
import torch
from torch import nn

from decayattn import DecayFlashAttention

WIDTH, HEADS = 8, 4


@pytest.mark.parametrize("order", [list, reversed])
def test_modules_reset_in_any_order_as_a_fresh_layer(order):
    """FSDP's loop after to_empty: parents first (pytorch#104187)."""
    options = dict(bias=True, qk_norm=True, sink=True, scale="learned", output_gate=True)
    fresh = DecayFlashAttention(WIDTH, HEADS, **options)
    with torch.device("meta"):
        layer = DecayFlashAttention(WIDTH, HEADS, **options)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    for module in order([*layer.modules()]):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert {type(part).__name__ for part in (layer.in_proj, layer.out_proj)} == {"Linear"}
    for name, value in layer.state_dict().items():
        if name in ("in_proj.weight", "out_proj.weight"):
            bound = 1 / math.sqrt(value.shape[1])
            assert 0.8 * bound < value.abs().max() <= bound
        else:
            assert torch.equal(value, fresh.state_dict()[name]), name
