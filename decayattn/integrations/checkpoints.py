"""Weights of other libraries' forgetting attention, for DecayFlashAttention.

Each function takes the state dict of such a layer, or of a model with the layer's prefix. It returns the state dict of
the DecayFlashAttention that computes the same::

    layer = DecayFlashAttention(width, num_heads)
    layer.load_state_dict(from_fla(model.state_dict(), prefix="model.layers.0.attn."))

Build the layer with the options of the other one; load_state_dict names mismatches. Missing parameters and those
without an equivalent raise a ValueError by name. Only torch is needed.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

_NORMS = {"q_norm.weight", "k_norm.weight"}
_NO_EQUIVALENT = {
    "k_proj.shift_proj.weight": "it mixes every token with the one before, which DecayFlashAttention does not do",
    "v_proj.shift_proj.weight": "it mixes every token with the one before, which DecayFlashAttention does not do",
    "output_norm.weight": "DecayFlashAttention does not normalise what its heads return",
}


def from_fla(state: Mapping[str, Tensor], *, prefix: str = "") -> dict[str, Tensor]:
    """DecayFlashAttention's state dict from that of flash-linear-attention's ForgettingAttention.

    Their options and ours: hidden_size, num_heads and num_kv_heads are embed_dim, num_heads and num_kv_heads.
    use_output_gate=True is output_gate=True. qkv_bias=True is bias=True; biases that they do not have become 0. Their
    layer passes no window_size to its kernel. qk_norm=True raises for more than one head, because it has a gain for
    every head and channel. In early versions it has one gain for all heads; that is qk_norm=True with an eps as in
    from_fox.

    Args:
        state: the other layer's state dict, or that of a model around it.
        prefix: the layer's prefix of the names in state, including the dot.
    """
    gate = {"f_proj.weight": "decay.weight", "f_proj.bias": "decay.bias"}
    return _convert(_of_layer(state, prefix), prefix, "g_proj", gate, required=gate)


def from_fox(state: Mapping[str, Tensor], *, prefix: str = "", ogate_act: str = "sigmoid") -> dict[str, Tensor]:
    """DecayFlashAttention's state dict from that of the official Forgetting Transformer's ForgettingAttentionLayer.

    Their options and ours: fgate_type="full" is decay="scalar"; "bias_only" and "fixed" are a frozen ConstantDecay;
    "none" is decay="none". use_output_gate=True is output_gate=True. qk_norm=True with
    qk_norm_share_param_across_head=True is qk_norm=True with an eps of 1e-5: `layer.q_norm.eps = layer.k_norm.eps =
    1e-5`. use_rope=True needs a rotary module as the layer's position; no parameter shows this option.

    use_k_shift, use_v_shift, use_output_norm, a gain per head in qk_norm and ogate_act="silu" raise. So the paper's FoX
    (LLaMA) can be converted, and FoX (Pro) cannot.

    Args:
        state, prefix: as in from_fla.
        ogate_act: the layer's option of that name; no parameter shows it.
    """
    own = _of_layer(state, prefix)
    if "ogate_proj.weight" in own and ogate_act != "sigmoid":
        raise ValueError(f"ogate_act: expected 'sigmoid', as DecayFlashAttention has it, got {ogate_act!r}")
    if "fgate_bias" in own:
        logits = own["fgate_bias"]
        own["fgate_bias"] = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    gate = {"fgate_proj.weight": "decay.weight", "fgate_proj.bias": "decay.bias", "fgate_bias": "decay.log_decay"}
    return _convert(own, prefix, "ogate_proj", gate)


def _of_layer(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    layers = [name.removesuffix("q_proj.weight") for name in state if name.endswith("q_proj.weight")]
    if layers and prefix not in layers:
        raise ValueError(f"prefix: expected that of one layer, for example {layers[0]!r}, got {prefix!r}")
    for name, reason in _NO_EQUIVALENT.items():
        if name in own:
            raise ValueError(f"{prefix}{name}: {reason}")
    return own


def _convert(
    own: dict[str, Tensor], prefix: str, output_gate: str, decay: Mapping[str, str], required: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Our state dict; decay maps the names of their forget gate's parameters to ours."""
    projections = ["q_proj", "k_proj", "v_proj"]
    if f"{output_gate}.weight" in own:
        projections.append(output_gate)
    weights = [f"{name}.weight" for name in projections]
    biases = [f"{name}.bias" for name in projections]
    for name in (*weights, "o_proj.weight", *required):
        if name not in own:
            raise ValueError(f"{prefix}{name}: expected in the state dict, got none")
    for name in sorted(own.keys() - {*weights, *biases, "o_proj.weight", "o_proj.bias", *decay, *_NORMS}):
        raise ValueError(f"{prefix}{name}: expected no such parameter, because DecayFlashAttention has no equivalent")

    # one matrix: the rows of q, k, v and the output gate, in this order
    converted = {"in_proj.weight": torch.cat([own[name] for name in weights]), "out_proj.weight": own["o_proj.weight"]}
    if own.keys() & {*biases, "o_proj.bias"}:
        for name in (*projections, "o_proj"):
            own.setdefault(f"{name}.bias", torch.zeros_like(own[f"{name}.weight"][:, 0]))
        converted["in_proj.bias"] = torch.cat([own[name] for name in biases])
        converted["out_proj.bias"] = own["o_proj.bias"]
    head_dim = _head_dim(own, decay)
    for name in sorted(own.keys() & _NORMS):
        gains, rows = own[name].shape[0], own[name.replace("norm", "proj")].shape[0]
        if gains == rows and head_dim is None:
            raise ValueError(
                f"{prefix}{name}: cannot tell one head from one gain per head; without a forget gate the state dict "
                "does not give the number of heads"
            )
        if gains == rows != head_dim:
            raise ValueError(f"{prefix}{name}: expected one gain for all heads, got one for every head")
        converted[name] = own[name]
    return converted | {ours: own[theirs] for theirs, ours in decay.items() if theirs in own}


def _head_dim(own: Mapping[str, Tensor], decay: Mapping[str, str]) -> int | None:
    """Columns of a head, from the rows of a forget gate (one per head) or a short gain; None without either."""
    rows = own["q_proj.weight"].shape[0]
    for name in decay:
        if name in own:
            return rows // own[name].shape[0]
    gains = own["q_norm.weight"].shape[0] if "q_norm.weight" in own else rows
    return gains if gains < rows else None
