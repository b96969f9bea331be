"""Small layers, tokens for them, and their documentation as a formula."""

import math

import torch
from torch import nn

import decayattn
from decayattn import DecayFlashAttention, decay_attention

WIDTH, HEADS = 12, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # elsewhere Triton's interpreter runs the kernels
BACKENDS = ["reference", "triton"]
EVERYTHING = {
    "num_kv_heads": 2, "head_dim": 6, "value_dim": 5, "bias": True, "qk_norm": True, "output_gate": True,
    "scale": "learned",
}
PRO = {"kv_shift": True, "output_norm": True, "output_gate": True, "qk_norm": "per_head"}
GROUPED_PRO = PRO | {"num_kv_heads": 2, "head_dim": 6, "value_dim": 5, "bias": True}


class Rotary(decayattn.nn.Rotary):
    """Rotary embeddings with angles in float64, which may be compared from any start."""

    def _rates(self, dim, device):
        return super()._rates(dim, device).double()


class Resets(nn.Module):
    """A decay of one's own: λ from x, and a reset of one head wherever the first channel of x is above a threshold."""

    def forward(self, x):
        resets = x[..., :1] > torch.tensor([0.5, 1.0, 2.0, 9.0]).to(x)
        log_decay = x[..., :HEADS].to(torch.promote_types(x.dtype, torch.float32)).sigmoid() - 0.8
        return log_decay.masked_fill(resets, -1e9 if x.shape[1] % 2 else -math.inf)  # the same, both


def build(backend="reference", *, dtype=torch.float64, **options):
    """A layer with all parameters off their start."""
    layer = DecayFlashAttention(WIDTH, HEADS, backend=backend, dtype=dtype, **options).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(batch=2, length=24, dtype=torch.float64):
    return torch.randn(batch, length, WIDTH, dtype=dtype, device=DEVICE)


def by_hand(layer, x, memory=None, log_decay=None, resets=None):
    """The layer's documentation for one sequence, (T, WIDTH): shifts token by token."""
    source, kv_heads = x if memory is None else memory, layer.num_kv_heads
    weights = layer.in_proj.weight.split(layer.split_sizes)
    biases = [0] * len(weights) if layer.in_proj.bias is None else layer.in_proj.bias.split(layer.split_sizes)
    inputs = (x, source, source, x, source, source)
    projected = [y @ w.T + b for y, w, b in zip(inputs, weights, biases, strict=False)]
    q, k, v = (y.unflatten(-1, (n, -1)) for y, n in zip(projected, (HEADS, kv_heads, kv_heads), strict=False))
    if log_decay is None and layer.decay is not None:
        log_decay = layer.decay(source[None])
        log_decay = log_decay[0].expand(-1, HEADS) if log_decay.ndim > 1 else log_decay
    if resets is not None:
        log_decay = log_decay.masked_fill(resets[:, None], -math.inf)
    if layer.kv_shift:
        restarts = torch.zeros(len(source), kv_heads, 1, dtype=torch.bool, device=x.device)
        if log_decay is not None and log_decay.ndim == 2:
            restarts = (log_decay < -1e3).unflatten(-1, (kv_heads, -1)).any(-1, keepdim=True)
        k, v = (shifted_by_hand(y, a.sigmoid(), restarts) for y, a in zip((k, v), projected[-2:], strict=True))

    def norm(y, weight):
        gain = weight if len(weight) == y.shape[-1] else weight.view(y.shape[-2:])
        return y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain

    if layer.qk_norm:
        q, k = norm(q, layer.q_norm.weight), norm(k, layer.k_norm.weight)
    if layer.position is not None:
        q, k = (y[0] for y in layer.position(q[None], k[None]))
    per_token = log_decay is not None and log_decay.ndim == 2
    out = decay_attention(
        q[None], k[None], v[None], log_decay[None] if per_token else log_decay, sink=layer.sink, causal=layer.causal,
        scale=layer.scale if layer.log_scale is None else layer.log_scale.exp() / layer.head_dim**0.5,
        window_size=layer.window_size, backend="reference",
    )[0]
    if layer.output_norm is not None:
        out = norm(out, layer.output_norm.weight)
    out = out.flatten(-2)
    return layer.out_proj(out * projected[3].sigmoid() if layer.output_gate else out)


def shifted_by_hand(y, a, restarts):
    rows = []
    for t in range(len(y)):
        previous = 0 * y[t] if t == 0 else torch.where(restarts[t], 0, y[t - 1])
        rows.append(a[t, :, None] * previous + (1 - a[t, :, None]) * y[t])
    return torch.stack(rows) if rows else y
