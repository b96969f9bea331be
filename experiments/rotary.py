"""Rotary position embeddings, as the `position` of a layer."""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotary embeddings (Su et al., arXiv 2104.09864): of q and k (B, T, H, D), channel n of the first half of D and of
    the second are turned together by position · base^(−2n/D) radians.

    The angles are in float32, and so is the turning under autocast; the result has the dtype that came. `start` (B,) is
    the position of the first token, 0 by default.

    Raises ValueError for an odd head dimension.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {head_dim}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("frequencies", (base**-exponents).float(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        position = torch.arange(q.shape[1], device=q.device, dtype=torch.float32)[None]  # (1 or B, T)
        if start is not None:
            position = position + start[:, None]
        angle = position[:, :, None, None] * self.frequencies  # (1 or B, T, 1, D/2)
        cos, sin = angle.cos(), angle.sin()
        return turned(q, cos, sin), turned(k, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) with its two halves as the coordinates of planes that turn."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
