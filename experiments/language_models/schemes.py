"""Position schemes of a model: decays, rotary embeddings, both, neither."""

from dataclasses import dataclass

from decayattn import DecayFlashAttention
from decayattn.nn import Rotary


@dataclass(frozen=True)
class Scheme:
    """A decay of the scores, by DecayFlashAttention's name, with or without rotary embeddings."""

    label: str
    decay: str = "none"
    rotary: bool = False


SCHEMES = {
    "scalar": Scheme("scalar decay (FoX)", "scalar"),
    "alibi-learned": Scheme("ALiBi, learned", "alibi-learned"),
    "alibi": Scheme("ALiBi", "alibi"),
    "retnet": Scheme("RetNet's rates", "retnet"),
    "rotary": Scheme("rotary", rotary=True),
    "rotary-scalar": Scheme("rotary and scalar decay", "scalar", rotary=True),
    "none": Scheme("no position"),
}


def attention_layer(scheme: str, width: int, heads: int, backend: str = "auto") -> DecayFlashAttention:
    """A causal layer with that scheme of SCHEMES. Schemes differ in no random number that they draw: after the same
    seed their projections start the same."""
    chosen = SCHEMES[scheme]
    position = Rotary() if chosen.rotary else None
    return DecayFlashAttention(width, heads, decay=chosen.decay, position=position, backend=backend)
