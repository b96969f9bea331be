"""Small layers, and tokens for them, for the tests of generation with a cache."""

import torch
from torch import nn

from decayattn import DecayFlashAttention

WIDTH, HEADS = 12, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # elsewhere Triton's interpreter runs the kernels
BACKENDS = ["reference", "triton"]


class Rotary(nn.Module):
    """Rotary embeddings (arXiv 2104.09864) that know where the new tokens begin."""

    def forward(self, q, k, start=None):
        time = torch.arange(q.shape[1], device=q.device).expand(q.shape[0], -1)
        time = time if start is None else time + start[:, None]
        return self.rotate(q, time), self.rotate(k, time)

    @staticmethod
    def rotate(x, time):
        a, b = x[..., 0::2], x[..., 1::2]
        frequency = 100.0 ** -torch.linspace(0, 1, x.shape[3] // 2, dtype=torch.float64, device=x.device)
        angle = (time[..., None] * frequency)[:, :, None]
        turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


def build(backend="reference", *, dtype=torch.float64, **options):
    """A layer with all parameters off their start."""
    layer = DecayFlashAttention(WIDTH, HEADS, backend=backend, dtype=dtype, **options).to(DEVICE)
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(batch=2, length=24, dtype=torch.float64):
    return torch.randn(batch, length, WIDTH, dtype=dtype, device=DEVICE)
