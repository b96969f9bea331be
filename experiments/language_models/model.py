"""A small pre-norm transformer over bytes. Without a position embedding, it knows order by its decay alone."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decayattn.nn import CapturedStep, DecayCache
from language_models.schemes import attention_layer

BYTES = 256
DOCUMENT = 0  # the byte with which a document begins, where documents are kept apart
# explicit, because the default follows the dtype: the float64 reference of the gradient check would be another model
NORM_EPS = 1e-6


class ByteLM(nn.Module):
    """Logits of the next byte: tokens (B, T) of any integer dtype -> (B, T, 256).

    With the caches of make_caches, the tokens follow those of earlier calls (under torch.no_grad()), and are those of
    one document.

    `decay` is a scheme of language_models.schemes; `documents` is one of "together", "resets" and "packed", as in
    toy_lm's Config; `backend` is passed to every attention layer. `context`: the longest text, where a scheme needs it.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, decay: str, documents: str = "together", backend: str = "auto",
        context: int | None = None,
    ):
        super().__init__()
        self.documents = documents
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(
            Block(width, attention_layer(decay, width, heads, context=context, backend=backend))
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)  # the first predictions are near uniform: 8 bits per byte

    def forward(self, tokens: Tensor, caches: Sequence[DecayCache] | None = None) -> Tensor:
        x = self.embedding(tokens.long())
        where = [{"cache": cache} for cache in caches or [None] * len(self.blocks)]
        if caches is None and self.documents == "resets":
            where = [{"resets": tokens == DOCUMENT}] * len(self.blocks)
        elif caches is None and self.documents == "packed":
            where = [{"cu_seqlens": document_offsets(tokens), "max_seqlen": tokens.shape[1]}] * len(self.blocks)
            x = x.flatten(0, 1)[None]
        for block, options in zip(self.blocks, where, strict=True):
            x = block(x, **options)
        return self.head(self.norm(x)).reshape(*tokens.shape, BYTES)

    def make_caches(self, batch_size: int, max_length: int) -> list[DecayCache]:
        """One empty cache per block."""
        return [block.attention.make_cache(batch_size, max_length) for block in self.blocks]


def mlp_width(width: int) -> int:
    """Hidden channels of a SwiGLU: 2/3 of the usual 4 · width, because it has three matrices."""
    return 16 * math.ceil(width * 8 / 3 / 16)


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

    def forward(self, x: Tensor, **options) -> Tensor:
        return self.feed_forward(x + self.attention(self.attention_norm(x), **options))

    def feed_forward(self, x: Tensor) -> Tensor:
        """x + mlp(norm(x)): the same in every scheme, and compiled once where it is compiled."""
        gate, value = self.mlp_in(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * value)


def document_offsets(tokens: Tensor) -> Tensor:
    """cu_seqlens of crops (B, T) behind one another: a sequence begins with a crop and at every DOCUMENT byte."""
    starts = tokens == DOCUMENT
    starts[:, 0] = True
    offsets = starts.flatten().nonzero().flatten()
    return torch.cat([offsets, offsets.new_tensor([tokens.numel()])]).to(torch.int32)


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of every next byte of crops (B, T + 1)."""
    logits = model(batch[:, :-1])
    # cross-entropy in float32 (float64 for a float64 model), whatever autocast made of the logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].long().flatten())


@torch.no_grad()
def generate(model: ByteLM, prompt: bytes, count: int, *, seed: int, temperature: float = 0.8) -> bytes:
    """`count` bytes sampled after the prompt, each from the keys and values of all bytes before it.

    Where documents are kept apart, only the last one of the prompt counts, and the text ends where that document does.
    Nothing ends at the length that the model was trained on: it has no position embedding, and the cache is as long as
    the text will be.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    caches = model.make_caches(1, len(prompt) + count)
    apart = model.documents != "together"
    text, new = b"", prompt[max(0, prompt.rfind(DOCUMENT)) if apart else 0 :]

    def step(tokens: Tensor) -> Tensor:
        return model(tokens, caches)[0, -1]

    captured: CapturedStep | None = None
    for _ in range(count):
        tokens = torch.tensor([list(new)], device=device)
        if text and captured is None:
            captured = CapturedStep(step, caches, tokens)
        logits = step(tokens) if captured is None else captured(tokens)
        probabilities = (logits.float() / temperature).softmax(-1)
        new = bytes([int(torch.multinomial(probabilities.cpu(), 1, generator=generator))])
        if apart and new[0] == DOCUMENT:
            break
        text += new
    return text
