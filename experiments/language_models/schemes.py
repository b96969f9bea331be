"""Position schemes of a model: decays, rotary embeddings, both, neither."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from decayattn import DecayFlashAttention
from decayattn.nn import Rotary
from language_models.positions import PerChannelDecay


@dataclass(frozen=True)
class Scheme:
    """A decay of the scores, by DecayFlashAttention's name, and a position module for queries and keys."""

    label: str
    decay: str = "none"
    position: Literal["rotary", "per channel"] | None = None

    @property
    def any_length(self) -> bool:
        """True if the scheme takes texts longer than those of its training."""
        return self.position != "per channel"

    @property
    def decays(self) -> bool:
        """True if its attention has a decay that the kernels know, and by which they skip."""
        return self.decay != "none"


SCHEMES = {
    "scalar": Scheme("scalar decay (FoX)", "scalar"),
    "alibi-learned": Scheme("ALiBi, learned", "alibi-learned"),
    "alibi": Scheme("ALiBi", "alibi"),
    "retnet": Scheme("RetNet's rates", "retnet"),
    "retnet-learned": Scheme("RetNet's rates, learned", "retnet-learned"),
    "rotary": Scheme("rotary", position="rotary"),
    "rotary-scalar": Scheme("rotary and scalar decay", "scalar", "rotary"),
    "none": Scheme("no position"),
    "per-channel": Scheme("decay per channel (Wall)", position="per channel"),
    "per-channel-scalar": Scheme("decay per channel and scalar decay", "scalar", "per channel"),
}


def attention_layer(
    scheme: str, width: int, heads: int, *, context: int | None = None, backend: str = "auto"
) -> DecayFlashAttention:
    """A causal layer with that scheme of SCHEMES. Schemes differ in no random number that they draw: after the same
    seed their projections start the same.

    context: the longest text, for a decay per channel.
    """
    chosen = SCHEMES[scheme]
    position: nn.Module | None = None
    if chosen.position == "rotary":
        position = Rotary()
    elif chosen.position == "per channel":
        if context is None:
            raise ValueError(f"context: expected a length with scheme {scheme!r}, got None")
        position = PerChannelDecay(width, heads, width // heads, context=context)
    layer = DecayFlashAttention(width, heads, decay=chosen.decay, position=position, backend=backend)
    if isinstance(position, PerChannelDecay):
        position.attach(layer)
    return layer
