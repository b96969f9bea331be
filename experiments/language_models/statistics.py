"""What a model's attention does on a text: how long its heads remember, and how much of its work is left to do."""

from typing import Any

import torch
from torch import Tensor, nn

from decayattn import DecayFlashAttention, visited_fraction
from decayattn.backends import registry
from decayattn.nn.decay import half_life
from language_models.model import ByteLM


@torch.no_grad()
def attention_statistics(model: ByteLM, tokens: Tensor, *, visited: bool = True) -> list[dict[str, Any]]:
    """Of every layer on tokens (B, T), one number per head:

    half_lives: ln 2 / mean(−λ) in tokens, the half-life of the decay over a long stretch; None without a decay.
    visited: decayattn.visited_fraction, mean over B, of the layer's own skip_tolerance; None unless asked for. It takes
    a GPU or Triton's interpreter.
    """
    found: list[dict[str, Any]] = []
    handles = []
    for block in model.blocks:
        of_layer = _Inputs(block.attention)
        handles += of_layer.handles
        handles.append(
            block.attention.register_forward_hook(
                lambda layer, _, __, inputs=of_layer: found.append(inputs.statistics(layer, visited))
            )
        )
    try:
        model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found


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

    def statistics(self, layer: DecayFlashAttention, visited: bool) -> dict[str, Any]:
        half_lives = fraction = None
        if self.log_decay is not None:
            # a sequence's first λ is never used
            used = self.log_decay[:, 1:].flatten(0, 1).mean(0) if self.log_decay.ndim == 3 else self.log_decay
            half_lives = half_life(used.float()).tolist()
        if visited:
            options = {"scale": layer.scale, "window_size": layer.window_size, "skip_tolerance": layer.skip_tolerance}
            fraction = visited_fraction(self.q, self.k, self.log_decay, **options).mean(0).tolist()
        self.q = self.k = self.log_decay = None
        return {"half_lives": half_lives, "visited": fraction}
