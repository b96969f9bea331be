"""Many small models side by side: attention layers whose heads belong to one model each."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decayattn import DecayFlashAttention
from decayattn.nn import ConstantDecay, Rotary, ScalarDecay, alibi_log_decay, retnet_log_decay
from decayattn.nn.decay import Decay

# what a mode is called in figures
MODES = {
    "scalar": "scalar decay (forget gate)",
    "alibi-learned": "constant decay, learned (ALiBi at first)",
    "alibi": "constant decay, ALiBi, fixed",
    "retnet": "constant decay, RetNet's rates, fixed",
    "rotary": "rotary, no decay",
    "rotary-scalar": "rotary and scalar decay",
    "none": "no position, no decay",
}
LAYERS = 2


class SideBySide(nn.Module):
    """M models of two attention layers, no MLP, tied embeddings: Zoology's, with a decay instead of positions.

    They are computed as one model of M times the heads, because one small model leaves a GPU waiting for launches. Each
    parameter has M as its first dimension, or M·H for what heads have. Models with the same of `seeds` start alike.

    tokens (S, B, T), positions (S, Q), `draw_of` (M,) which of the S draws a model sees -> logits (M, Q, vocabulary).
    """

    def __init__(
        self, seeds: Sequence[int], *, mode: str, width: int, heads: int, vocabulary: int, backend: str = "auto"
    ):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        self.models, self.width, self.vocabulary = len(seeds), width, vocabulary
        self.embedding = nn.Parameter(torch.empty(self.models, vocabulary, width))
        self.layers = nn.ModuleList(
            attention(self.models, width, heads, mode=mode, backend=backend) for _ in range(LAYERS)
        )
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(self.models, width)) for _ in range(LAYERS + 1))
        self.reset_parameters(seeds)

    @torch.no_grad()
    def reset_parameters(self, seeds: Sequence[int]) -> None:
        """Normal, with the variance of nn.Linear, 1 / (3·width); decays and norms keep theirs.

        With GPT-2's 0.02, which Zoology has, models of this width need many times the steps to find what they need.
        """
        std = 1 / math.sqrt(3 * self.width)
        for model, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(seed)
            self.embedding[model].normal_(0, std, generator=generator)
            for layer in self.layers:
                layer.in_proj.weight[model].normal_(0, std, generator=generator)
                layer.out_proj.weight[model].normal_(0, std / math.sqrt(2 * LAYERS), generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, draw_of: Tensor) -> Tensor:
        model = torch.arange(self.models, device=tokens.device)
        tokens = tokens.index_select(0, draw_of).permute(1, 2, 0) + model * self.vocabulary  # (B, T, M)
        # index_select, whose gradient is added in place; that of an embedding may wait for the device
        x = self.embedding.flatten(0, 1).index_select(0, tokens.flatten())
        x = x.view(*tokens.shape[:2], self.models * self.width)
        for gain, layer in zip(self.gains, self.layers, strict=False):
            x = x + layer(self._normalised(x, gain))
        asked = positions.index_select(0, draw_of).T * self.models + model  # (Q, M)
        x = x.view(-1, self.width).index_select(0, asked.flatten())
        x = self._normalised(x.view(1, -1, self.models * self.width), self.gains[-1])
        return x.view(-1, self.models, self.width).transpose(0, 1) @ self.embedding.mT

    def _normalised(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm of every model's channels."""
        return (F.rms_norm(x.unflatten(-1, gain.shape), (self.width,), eps=1e-6) * gain).flatten(-2)


def attention(models: int, width: int, heads: int, *, mode: str, backend: str) -> DecayFlashAttention:
    """The library's layer for M·d channels and M·H heads, its projections a matrix per model."""
    total = models * heads
    decay: str | nn.Module = "none"
    if mode in ("scalar", "rotary-scalar"):
        decay = Gates(models, width, heads)
    elif mode in ("alibi", "alibi-learned"):
        decay = ConstantDecay.from_values(alibi_log_decay(heads) * models, learned=mode == "alibi-learned")
    elif mode == "retnet":
        decay = ConstantDecay.from_values(retnet_log_decay(heads) * models)
    position = Rotary() if mode.startswith("rotary") else None
    layer = DecayFlashAttention(models * width, total, decay=decay, position=position, backend=backend)
    layer.in_proj = GroupedLinear(models, width, width, parts=3)
    layer.out_proj = GroupedLinear(models, width, width)
    return layer


class GroupedLinear(nn.Module):
    """A matrix per model: x (…, M·d_in) -> (…, parts·M·d_out), the parts (q, k, v) one behind the other."""

    def __init__(self, models: int, width_in: int, width_out: int, parts: int = 1):
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(models, width_in, parts * width_out))

    def forward(self, x: Tensor) -> Tensor:
        models, width_in, _ = self.weight.shape
        y = x.reshape(-1, models, width_in).transpose(0, 1) @ self.weight  # (M, B·T, parts·d_out)
        return y.unflatten(-1, (self.parts, -1)).permute(1, 2, 0, 3).reshape(*x.shape[:-1], -1)


class Gates(Decay):
    """ScalarDecay for models side by side: the gates of a model see its own channels. log_decay (B, T, M·H)."""

    def __init__(self, models: int, width: int, heads: int):
        super().__init__(models * heads)
        one = ScalarDecay(width, heads)
        self.weight = nn.Parameter(one.weight.detach().repeat(models, 1, 1))  # (M, H, d)
        self.bias = nn.Parameter(one.bias.detach().repeat(models, 1))  # (M, H)

    def forward(self, x: Tensor) -> Tensor:
        models, heads, width = self.weight.shape
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, models, width)
            logits = torch.einsum("nmd,mhd->nmh", wide, self.weight) + self.bias
            return F.logsigmoid(logits).reshape(*x.shape[:-1], models * heads)  # einsum chooses the strides
