"""A small pre-norm transformer over bytes. Its only position information is the decay of its attention."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decayattn.nn
from decayattn import DecayFlashAttention, visited_fraction
from decayattn.nn import CapturedStep, DecayCache, record_half_lives

BYTES = 256
DOCUMENT = 0  # the byte that begins a document, where documents are kept apart
# explicit: RMSNorm's default follows the dtype, and the float64 copy of the gradient check would be another model
NORM_EPS = 1e-6


class ByteLM(nn.Module):
    """Logits of the next byte: tokens (B, T) of any integer dtype -> (B, T, 256).

    Args:
        layers, width, heads: blocks, channels of the residual stream, attention heads.
        decay, backend: of DecayFlashAttention.
        documents: "together": attention crosses the borders of documents. "resets": the decay is reset at every byte 0.
            "packed": a sequence ends before every byte 0.
        make_attention: makes the attention layer of a block, in place of DecayFlashAttention.
    """

    def __init__(
        self, layers: int, width: int, heads: int, decay: str = "scalar", documents: str = "together",
        backend: str = "auto", make_attention: Callable[[], nn.Module] | None = None,
    ):
        super().__init__()
        self.options = {"layers": layers, "width": width, "heads": heads, "decay": decay, "documents": documents}
        self.options["backend"] = backend
        make = make_attention or (lambda: DecayFlashAttention(width, heads, decay=decay, backend=backend))
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, make()) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)  # near-uniform first predictions: 8 bits per byte

    def forward(self, tokens: Tensor, caches: Sequence[DecayCache] | None = None) -> Tensor:
        """With caches, under torch.no_grad(), the tokens of one document follow those of earlier calls."""
        x, options = self.embedding(tokens.long()), {}
        if caches is None and self.options["documents"] == "resets":
            options = {"resets": tokens == DOCUMENT}
        elif caches is None and self.options["documents"] == "packed":
            options = {"cu_seqlens": document_offsets(tokens), "max_seqlen": tokens.shape[1]}
            x = x.flatten(0, 1)[None]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache=cache, **options)
        return self.head(self.norm(x.reshape(*tokens.shape, -1)))

    def make_caches(self, batch_size: int, max_length: int) -> list[DecayCache]:
        """An empty cache per block."""
        return [block.attention.make_cache(batch_size, max_length) for block in self.blocks]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) with a SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        hidden = mlp_width(width)
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.mlp_in = nn.Linear(width, 2 * hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **options)
        gate, value = self.mlp_in(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * value)


def mlp_width(width: int) -> int:
    """Hidden channels of the SwiGLU: 2/3 of the usual 4 · width, because it has three matrices."""
    return 16 * math.ceil(width * 8 / 3 / 16)


def document_offsets(tokens: Tensor) -> Tensor:
    """cu_seqlens of consecutive crops (B, T): a sequence begins with each crop and at each DOCUMENT byte."""
    starts = tokens == DOCUMENT
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=tokens.numel()).to(torch.int32)


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of every next byte of crops (B, T + 1)."""
    return mean_loss(model(batch[:, :-1]), batch[:, 1:].long())


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in float32, under autocast too, or in float64 for a float64 model."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameter_groups(model: ByteLM, weight_decay: float) -> list[dict[str, Any]]:
    """decayattn.nn.parameter_groups, which leaves the embedding without weight decay too."""
    model.embedding.weight._no_weight_decay = True
    return decayattn.nn.parameter_groups(model, weight_decay)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first 5 % of the steps, then a cosine from 1 to 0.1."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


@torch.no_grad()
def attention_statistics(model: ByteLM, tokens: Tensor, *, visited: bool = True) -> list[dict[str, Any]]:
    """Statistics of every layer over tokens (B, T), one value per head:

    half_lives: decayattn.nn.record_half_lives, in tokens; None without a decay.
    visited: decayattn.visited_fraction, mean over B; None unless asked for. It takes a GPU or Triton's interpreter.
    """
    fractions: list[list[float] | None] = []

    def record(layer: DecayFlashAttention, arguments: tuple[Tensor]) -> None:
        if not visited:
            return fractions.append(None)
        q, k, *_ = layer.in_proj(arguments[0]).split(layer.split_sizes, dim=-1)
        q, k = (x.unflatten(-1, (-1, layer.head_dim)) for x in (q, k))
        q, k = (q, k) if layer.position is None else layer.position(q, k)
        log_decay = None if layer.decay is None else layer.decay(arguments[0])
        fraction = visited_fraction(q, k, log_decay, scale=layer.scale, skip_tolerance=layer.skip_tolerance)
        fractions.append(fraction.mean(0).tolist())

    hooks = [block.attention.register_forward_pre_hook(record) for block in model.blocks]
    try:
        with record_half_lives(model) as recorded:
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    half_lives = {name: of_heads.tolist() for name, of_heads in recorded.items()}
    return [{"half_lives": half_lives.get(f"blocks.{n}.attention"), "visited": x} for n, x in enumerate(fractions)]


@torch.no_grad()
def generate(model: ByteLM, prompt: bytes, count: int, *, seed: int, temperature: float = 0.8) -> bytes:
    """Sample up to `count` bytes after the prompt, with a key-value cache; there may be more than in the training.
    Where documents are kept apart, the prompt's last one counts, and the text ends with it."""
    generator, apart = torch.Generator().manual_seed(seed), model.options["documents"] != "together"
    prompt = prompt[max(0, prompt.rfind(DOCUMENT)) if apart else 0 :]
    caches = model.make_caches(1, len(prompt) + count)
    tokens = torch.tensor([list(prompt)], device=model.head.weight.device)
    text, step = b"", lambda tokens: model(tokens, caches)[0, -1]
    while len(text) < count:
        probabilities = (step(tokens).float() / temperature).softmax(-1)
        new = int(torch.multinomial(probabilities.cpu(), 1, generator=generator))
        if apart and new == DOCUMENT:
            break
        text += bytes([new])
        tokens = torch.tensor([[new]], device=tokens.device)
        if len(text) == 1:
            step = CapturedStep(step, caches, tokens)  # on a GPU, one CUDA graph instead of many launches
    return text
