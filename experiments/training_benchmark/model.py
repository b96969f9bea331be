"""A decoder of GPT-2's size, whose attention is somebody's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decayattn import DecayFlashAttention


@dataclass(frozen=True)
class Size:
    """The default has 124 M parameters, 85 M of them in the layers."""

    layers: int = 12
    width: int = 768
    head_dim: int = 64
    vocabulary: int = 50_304

    @property
    def heads(self) -> int:
        return self.width // self.head_dim


class Decoder(nn.Module):
    """Pre-norm blocks with an MLP of four times the width, tied embeddings, no position embedding of its own.

    attention(size) makes the layer of a block; all of them have the parameters of a DecayFlashAttention.
    """

    def __init__(self, size: Size, attention: Callable[[Size], nn.Module]):
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width, attention(size)) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of every next token of (B, T + 1)."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens[:, 1:])

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), self.embedding.weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def compile_parts(self) -> None:
        """torch.compile the block, once for all layers, and what follows the last one."""
        for block in self.blocks:
            block.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class OtherAttention(nn.Module):
    """Projections and decay as DecayFlashAttention has them, with somebody else's kernel between them.

    attend(q, k, v, log_decay): q, k, v (B, T, H, D), log_decay (B, T, H) or None -> (B, T, H, D).
    """

    def __init__(
        self, size: Size, attend: Callable[..., Tensor], *, decay: bool = False, position: nn.Module | None = None
    ):
        super().__init__()
        own = DecayFlashAttention(size.width, size.heads, decay="scalar" if decay else "none", position=position)
        self.in_proj, self.out_proj, self.decay, self.position = own.in_proj, own.out_proj, own.decay, own.position
        self.shape, self.attend = (size.heads, size.head_dim), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, self.shape) for part in self.in_proj(x).chunk(3, dim=-1))
        if self.position is not None:
            q, k = self.position(q, k)
        out = self.attend(q, k, v, None if self.decay is None else self.decay(x))
        return self.out_proj(out.flatten(-2))
