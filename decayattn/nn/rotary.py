"""Rotary position embeddings, for a layer's `position`."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from decayattn.validation import check_number, check_positive_int

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Rotary(nn.Module):
    r"""Rotary embeddings (Su et al., arXiv 2104.09864) in Llama's convention, without parameters.

    At position t, channels c and c + dim/2 of q and k turn by the angle t · base^(−2c/dim), in float32.

    Positions count from `start`. A layer passes it with a cache and with a context. In packed sequences they continue
    across documents; within a document, scores depend only on their differences.

    Args:
        base: 10,000 in Llama 2, 500,000 in Llama 3.
        dim: number of channels that turn, the first ones of a head; an even number. Default: all.
        scaling: that of Llama 3, as in its configuration: factor, low_freq_factor, high_freq_factor and
            original_max_position_embeddings. Wavelengths above original / low_freq_factor grow by factor, those below
            original / high_freq_factor stay, and those between are interpolated.

    Raises:
        TypeError, ValueError: for a bad argument, by name.
    """

    def __init__(
        self, base: float = 10_000.0, *, dim: int | None = None, scaling: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.base = check_number("base", base, "a finite number above 1", lambda number: 1 < number < math.inf)
        if dim is not None and check_positive_int("dim", dim) % 2:
            raise ValueError(f"dim: expected an even number, got {dim}")
        if scaling is not None and any(name not in scaling for name in _LLAMA3):
            raise ValueError(f"scaling: expected Llama 3's {', '.join(_LLAMA3)}, got {dict(scaling)}")
        self.dim = dim
        self.scaling = scaling

    def forward(self, q: Tensor, k: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turn the first `dim` channels of q (B, T, H, D) and k (B, T, H_kv, D); the dtypes stay.

        start (B,): position of the first token of each batch entry; default 0.
        """
        dim = q.shape[-1] if self.dim is None else self.dim
        if dim > q.shape[-1] or dim % 2:
            raise ValueError(f"dim: expected an even number up to the head dimension, {q.shape[-1]}, got {dim}")
        position = torch.arange(q.shape[1], device=q.device, dtype=torch.float32)[None]
        if start is not None:
            position = position + start[:, None]
        angle = position[..., None, None] * self._rates(dim, q.device)  # (1 or B, T, 1, dim / 2)
        cos, sin = angle.cos(), angle.sin()
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def extra_repr(self) -> str:
        parts = [f"base={self.base:g}"]
        parts += [f"{name}={value}" for name, value in (("dim", self.dim), ("scaling", self.scaling)) if value]
        return ", ".join(parts)

    def _rates(self, dim: int, device: torch.device) -> Tensor:
        """Radians per token, (dim / 2,)."""
        rates = 1.0 / self.base ** (torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        if self.scaling is None:
            return rates
        factor, low, high, original = (self.scaling[name] for name in _LLAMA3)
        turns = original * rates / (2 * math.pi)  # over the original length of training
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return rates * (kept + (1 - kept) / factor)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dim = 2 * cos.shape[-1]
    first, second = x[..., :dim].chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat([rotated, x[..., dim:]], dim=-1)
