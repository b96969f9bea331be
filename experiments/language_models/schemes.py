"""Position schemes of a model: decays, rotary embeddings, both, neither."""

from dataclasses import dataclass, field
from typing import Any

from decayattn import DecayFlashAttention
from decayattn.nn import Rotary


@dataclass(frozen=True)
class Scheme:
    """A decay of the scores, by DecayFlashAttention's name, with or without rotary embeddings; options: further
    ones."""

    label: str
    decay: str = "none"
    rotary: bool = False
    options: dict[str, Any] = field(default_factory=dict)


SCHEMES = {
    "scalar": Scheme("scalar decay (FoX)", "scalar"),
    "alibi-learned": Scheme("ALiBi, learned", "alibi-learned"),
    "alibi": Scheme("ALiBi", "alibi"),
    "retnet": Scheme("RetNet's rates", "retnet"),
    "rotary": Scheme("rotary", rotary=True),
    "rotary-scalar": Scheme("rotary and scalar decay", "scalar", rotary=True),
    "none": Scheme("no position"),
    "pro": Scheme("Pro block of FoX", "scalar", options={
        "qk_norm": "per_head", "kv_shift": True, "output_norm": True, "output_gate": True}),
}


def attention_layer(scheme: str, width: int, heads: int, backend: str = "auto") -> DecayFlashAttention:
    """A causal layer with that scheme of SCHEMES. After the same seed the projections of all schemes start the same,
    except those of "pro", which has more rows."""
    chosen = SCHEMES[scheme]
    position = Rotary() if chosen.rotary else None
    return DecayFlashAttention(width, heads, decay=chosen.decay, position=position, backend=backend,
                               **chosen.options)
