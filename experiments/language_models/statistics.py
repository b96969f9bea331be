"""What a model's attention does on a text: how long its heads remember, and how much of its work is left to do."""

from typing import Any

import torch
from torch import Tensor, nn

from decayattn import DecayFlashAttention, visited_fraction
from decayattn.backends import registry
from decayattn.nn import record_half_lives
from language_models.model import ByteLM


@torch.no_grad()
def attention_statistics(model: ByteLM, tokens: Tensor, *, visited: bool = True) -> list[dict[str, Any]]:
    """Statistics of every layer on tokens (B, T), one value per head:

    half_lives: decayattn.nn.record_half_lives, in tokens; None without a decay.
    visited: decayattn.visited_fraction, mean over B, of the layer's own skip_tolerance; None unless asked for. It takes
    a GPU or Triton's interpreter.
    """
    found: list[list[float] | None] = []
    handles = []
    for block in model.blocks:
        of_layer = _Inputs(block.attention)
        handles += of_layer.handles
        handles.append(
            block.attention.register_forward_hook(
                lambda layer, _, __, inputs=of_layer: found.append(inputs.visited(layer) if visited else None)
            )
        )
    try:
        with record_half_lives(model) as half_lives:
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    lives = [half_lives.get(f"blocks.{n}.attention") for n in range(len(found))]
    return [
        {"half_lives": None if of_heads is None else of_heads.tolist(), "visited": fraction}
        for of_heads, fraction in zip(lives, found, strict=True)
    ]


def can_tell_visits(device: torch.device) -> bool:
    """Whether there is a GPU, or Triton's interpreter, for the plan of what is visited."""
    kernels = registry.load("triton")
    return not isinstance(kernels, str) and kernels.unavailable(torch.float32, device) is None


class _Inputs:
    """What a layer gives to decay_attention in a call, as hooks see it."""

    def __init__(self, layer: DecayFlashAttention):
        self.q = self.k = self.log_decay = None
        self.handles = [layer.in_proj.register_forward_hook(self._projected)]
        self.layer = layer
        if layer.q_norm is not None or layer.log_scale is not None:
            raise ValueError("model: expected attention without qk_norm and learned scale")
        if layer.position is not None:
            self.handles.append(layer.position.register_forward_hook(self._placed))
        if isinstance(layer.decay, nn.Module):
            self.handles.append(layer.decay.register_forward_hook(self._decayed))

    def _projected(self, _: nn.Module, __: tuple, result: Tensor) -> None:
        q, k, _, _ = result.split(self.layer.split_sizes, dim=-1)
        self.q, self.k = (x.unflatten(-1, (-1, self.layer.head_dim)) for x in (q, k))

    def _placed(self, _: nn.Module, __: tuple, result: tuple[Tensor, Tensor]) -> None:
        self.q, self.k = result

    def _decayed(self, _: nn.Module, __: tuple, result: Tensor) -> None:
        self.log_decay = result

    def visited(self, layer: DecayFlashAttention) -> list[float]:
        options = {"scale": layer.scale, "window_size": layer.window_size, "skip_tolerance": layer.skip_tolerance}
        fraction = visited_fraction(self.q, self.k, self.log_decay, **options).mean(0).tolist()
        self.q = self.k = self.log_decay = None
        return fraction
