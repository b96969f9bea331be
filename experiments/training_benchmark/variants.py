"""What is compared: attentions that a layer can have, each with a scalar decay, rotary embeddings, or neither."""

import contextlib
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from shared.peers import Absent, imported
from shared.provenance import ROOT
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from decayattn import DecayFlashAttention
from decayattn.nn import Rotary
from training_benchmark.model import OtherAttention, Size

# trained gates: mean half-lives of every head of the toy language model
TRAINED = ROOT / "results/train_h200/half_lives.json"
GATES = ("initial", "trained")
IDENTITY = "identity"
Layer = Callable[[Size, str, int], nn.Module]
BASELINE = "cudnn-rotary"


@dataclass(frozen=True)
class Variant:
    """One attention. `kind`: "decay", "rotary", "none", or "identity" for what is no attention and not checked.

    layer(size, backend, length) makes it for one length, backend being that of ours, or raises Absent; `gates` says
    whose half-lives its decay has; around() is entered around every step.
    """

    name: str
    label: str
    kind: str
    layer: Layer
    gates: str = "initial"
    ours: bool = False
    around: Callable[[], Any] = contextlib.nullcontext


def reference(kind: str, size: Size) -> nn.Module:
    """The oracle's layer of a kind."""
    return ours(size, "reference", 0, kind=kind)


def ours(
    size: Size, backend: str, length: int, *, kind: str, skip_tolerance: str | None = "auto"
) -> DecayFlashAttention:
    return DecayFlashAttention(
        size.width, size.heads, decay="scalar" if kind == "decay" else "none", skip_tolerance=skip_tolerance,
        position=Rotary() if kind == "rotary" else None, backend=backend,
    )


def _sdpa(size: Size, backend: str, length: int, *, rotary: bool) -> nn.Module:
    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return OtherAttention(size, attend, position=Rotary() if rotary else None)


def _cudnn() -> Any:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH)


def _flex(size: Size, backend: str, length: int) -> nn.Module:
    """FlexAttention with the decay in its score_mod; α is captured twice, because FlexAttention has no gradient for one
    tensor that is indexed both by query and by key."""
    _needs_gpu()
    from torch.nn.attention.flex_attention import flex_attention

    mask = _causal_mask(length)

    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        def score_mod(score, b, h, i, j):
            return score + (rows[b, h, i] - columns[b, h, j])

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        alpha = log_decay.cumsum(1).transpose(1, 2)
        return compiled(q, k, v, alpha, alpha.clone())

    return OtherAttention(size, attend, decay=True)


@functools.lru_cache(maxsize=1)
def _causal_mask(length: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")


def _fla(size: Size, backend: str, length: int) -> nn.Module:
    """flash-linear-attention's forgetting attention."""
    _needs_gpu()
    kernel = imported("fla.ops.forgetting_attn.parallel").parallel_forgetting_attn
    return OtherAttention(size, lambda q, k, v, log_decay: kernel(q, k, v, log_decay), decay=True)


def _fox(size: Size, backend: str, length: int, *, threshold: str | None) -> nn.Module:
    """The Forgetting Transformer's own kernel, with its pruning at e⁻¹⁰ ("auto") or without."""
    _needs_gpu()
    # not traced: Inductor compiles its Triton kernels anew, and fails
    kernel = torch.compiler.disable(imported("forgetting_transformer.ops.forgetting_attention").forgetting_attention)
    return OtherAttention(
        size, lambda q, k, v, log_decay: kernel(q, k, v, log_decay, adaptive_threshold=threshold), decay=True
    )


def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        raise Absent("needs a GPU")


def _identity(size: Size, backend: str, length: int) -> nn.Module:
    return OtherAttention(size, lambda q, k, v, log_decay: v)


def _both_gates(name: str, label: str, layer: Layer, is_ours: bool = False) -> list[Variant]:
    return [
        Variant(name, label, "decay", layer, ours=is_ours),
        Variant(f"{name}-trained", f"{label}, gates as trained", "decay", layer, "trained", is_ours),
    ]


VARIANTS = {
    variant.name: variant
    for variant in (
        *_both_gates("ours", "decayattn, decay", functools.partial(ours, kind="decay"), True),
        Variant(
            "ours-whole", "decayattn, decay, nothing skipped", "decay",
            functools.partial(ours, kind="decay", skip_tolerance=None), ours=True,
        ),
        Variant("ours-rotary", "decayattn, rotary, no decay", "rotary", functools.partial(ours, kind="rotary"),
                ours=True),
        Variant(BASELINE, "cuDNN (SDPA), rotary, no decay", "rotary", functools.partial(_sdpa, rotary=True),
                around=_cudnn),
        Variant("cudnn", "cuDNN (SDPA), no position, no decay", "none", functools.partial(_sdpa, rotary=False),
                around=_cudnn),
        Variant("flex", "FlexAttention, decay", "decay", _flex),
        Variant("fla", "flash-linear-attention, decay", "decay", _fla),
        Variant("fox", "Forgetting Transformer, decay", "decay", functools.partial(_fox, threshold=None)),
        *_both_gates(
            "fox-pruned", "Forgetting Transformer, decay, pruned", functools.partial(_fox, threshold="auto")
        ),
        Variant(IDENTITY, "no attention (its output is v)", "identity", _identity),
    )
}


def trained_half_lives(layers: int, heads: int) -> list[list[float]]:
    """Mean half-lives of the toy model's heads [layer][head], in tokens, stretched to so many layers and heads.

    Layer and rank of a head among the half-lives of its layer are kept, in between it is geometric.
    """
    found = [sorted(head["mean"] for head in layer) for layer in json.loads(TRAINED.read_text())["layers"]]
    result = []
    for layer in range(layers):
        source = [math.log(x) for x in found[layer * len(found) // layers]]
        at = [head * (len(source) - 1) / max(1, heads - 1) for head in range(heads)]
        low = [min(int(x), len(source) - 2) for x in at]
        result.append([
            math.exp(source[i] + (x - i) * (source[i + 1] - source[i])) for i, x in zip(low, at, strict=True)
        ])
    return result


@torch.no_grad()
def set_half_lives(layer: nn.Module, half_lives: list[float]) -> None:
    """The gates of a layer: these half-lives whatever the token."""
    log_decay = -math.log(2) / torch.tensor(half_lives, dtype=torch.float64)
    layer.decay.weight.zero_()
    layer.decay.bias.copy_(log_decay - (-torch.expm1(log_decay)).log())
