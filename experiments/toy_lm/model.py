"""A small pre-norm transformer over bytes. Without a position embedding, it knows order by its decay alone."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decayattn import DecayFlashAttention
from decayattn.nn.decay import ConstantDecay

BYTES = 256
# explicit, because the default follows the dtype: the float64 reference of the gradient check would be another model
NORM_EPS = 1e-6


class ByteLM(nn.Module):
    """Logits of the next byte: tokens (B, T) of any integer dtype -> (B, T, 256).

    `decay` is one of Config.decay; `backend` is passed to every attention layer.
    """

    def __init__(self, *, layers: int, width: int, heads: int, decay: str, backend: str = "auto"):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(
            Block(width, DecayFlashAttention(width, heads, decay=make_decay(decay, heads), backend=backend))
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)  # the first predictions are near uniform: 8 bits per byte

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.long())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) with a SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        hidden = 16 * math.ceil(width * 8 / 3 / 16)  # 2/3 of the usual 4 × width: there are three matrices
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.mlp_in = nn.Linear(width, 2 * hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        gate, value = self.mlp_in(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * value)


def make_decay(name: str, heads: int) -> str | nn.Module:
    """What Config.decay means to DecayFlashAttention."""
    if name in ("scalar", "none"):
        return name
    preset, _, learned = name.partition("-")
    return getattr(ConstantDecay, preset)(heads, learned=bool(learned))


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of every next byte of crops (B, T + 1)."""
    logits = model(batch[:, :-1])
    # cross-entropy in float32 (float64 for a float64 model), whatever autocast made of the logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].long().flatten())


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, count: int, context: int, *, seed: int, temperature: float = 0.8
) -> bytes:
    """`count` bytes sampled after the prompt; every byte recomputes its whole context."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window = torch.tensor([text[-context:]], device=device)
        probabilities = (model(window)[0, -1].float() / temperature).softmax(-1)
        text.append(int(torch.multinomial(probabilities.cpu(), 1, generator=generator)))
    return bytes(text[len(prompt) :])


@torch.no_grad()
def decay_rates(model: ByteLM, tokens: Tensor) -> list[Tensor]:
    """−λ, in nats per token, of every layer on tokens (B, T): (B·(T − 1), H) for a decay per token, (1, H) else.

    Empty where the model has no decay. A sequence's first λ is never used and is left out.
    """
    rates = []

    def record(module: nn.Module, arguments: tuple, log_decay: Tensor) -> None:
        used = log_decay[:, 1:] if log_decay.ndim == 3 else log_decay
        rates.append(-used.reshape(-1, log_decay.shape[-1]).float().cpu())

    decays = [block.attention.decay for block in model.blocks]
    handles = [decay.register_forward_hook(record) for decay in decays if isinstance(decay, nn.Module)]
    try:
        model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return rates
