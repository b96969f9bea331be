"""Weights of other libraries' forgetting attention, for DecayFlashAttention and DecayForCausalLM.

Each function takes the state dict of such a layer, or of a model with the layer's prefix. It returns the state dict of
the DecayFlashAttention that computes the same; build that layer with the options of the other one. With the `config` of
a whole language model, the result is the configuration and the state dict of a DecayForCausalLM. MIGRATION.md has
examples. Parameters and options without an equivalent raise by name. Only a whole model needs transformers.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from decayattn.integrations.transformers import DecayConfig

State = Mapping[str, Tensor]

# parts of in_proj, in the order of its rows; a layer may lack those from the output gate on
_PARTS = ("q_proj", "k_proj", "v_proj", "g_proj", "k_shift", "v_shift")
_KEPT = ("q_norm.weight", "k_norm.weight", "output_norm.weight", "decay.weight", "decay.bias", "decay.log_decay")
_OF_FLA = {"f_proj.weight": "decay.weight", "f_proj.bias": "decay.bias"}
_OF_FOX = {
    "k_proj.linear.weight": "k_proj.weight", "k_proj.shift_proj.weight": "k_shift.weight",
    "v_proj.linear.weight": "v_proj.weight", "v_proj.shift_proj.weight": "v_shift.weight",
    "ogate_proj.weight": "g_proj.weight", "fgate_proj.weight": "decay.weight", "fgate_proj.bias": "decay.bias",
    "fgate_bias": "decay.log_decay",
}
# of models: the only value with an equivalent, and the reason
_ONLY = {
    "use_rope": (False, "DecayForCausalLM has no positions; convert its layers, with position=Rotary(rope_base)"),
    "qkv_bias": (False, "DecayForCausalLM has no biases; convert its layers, with bias=True"),
    "window_size": (None, "their layers do not pass it to the attention"),
    "hidden_act": ("swish", "the MLP of DecayForCausalLM is a SwiGLU"),
    "attnres_block_size": (None, "DecayForCausalLM adds residuals without weights"),
}


@overload
def from_fla(state: State, *, config: Mapping[str, Any] | object) -> "tuple[DecayConfig, dict[str, Tensor]]": ...
@overload
def from_fla(state: State, *, prefix: str = "", config: None = None) -> dict[str, Tensor]: ...
def from_fla(state: State, *, prefix: str = "", config: Any = None) -> Any:
    """DecayFlashAttention's state dict from that of flash-linear-attention's ForgettingAttention.

    Their options and ours: hidden_size, num_heads and num_kv_heads are embed_dim, num_heads and num_kv_heads.
    use_output_gate=True is output_gate=True. qkv_bias=True is bias=True; biases that they do not have become 0.
    qk_norm=True is qk_norm="per_head", in early versions qk_norm=True, with an eps of 1e-5: `layer.q_norm.eps =
    layer.k_norm.eps = 1e-5`. Their layer passes no window_size to its kernel.

    Args:
        state: the other layer's state dict, or that of a model around it.
        prefix: the layer's prefix of the names in state, including the dot.
        config: of a whole ForgettingTransformerForCausalLM: its configuration, or the dict of its config.json. Then
            return (DecayConfig, state dict) of a DecayForCausalLM. qkv_bias, window_size, attnres_block_size and
            another MLP than SwiGLU raise.

    Raises:
        TypeError, ValueError: for missing and quantised parameters, and for parameters and options without an
            equivalent, by name.
    """
    if config is not None:
        return _convert_model(state, _values(config, "forgetting_transformer", "from_fox"), from_fla)
    return _convert(_of_layer(state, prefix, _OF_FLA), prefix, _OF_FLA.items())


@overload
def from_fox(state: State, *, config: Mapping[str, Any] | object) -> "tuple[DecayConfig, dict[str, Tensor]]": ...
@overload
def from_fox(
    state: State, *, prefix: str = "", ogate_act: str = "sigmoid", config: None = None
) -> dict[str, Tensor]: ...
def from_fox(state: State, *, prefix: str = "", ogate_act: str = "sigmoid", config: Any = None) -> Any:
    """DecayFlashAttention's state dict from that of the official Forgetting Transformer's ForgettingAttentionLayer.

    Their options and ours: fgate_type="full" is decay="scalar"; "bias_only" and "fixed" are a frozen ConstantDecay;
    "none" is decay="none". use_output_gate=True is output_gate=True, and use_output_norm=True is output_norm=True.
    use_k_shift=True and use_v_shift=True together are kv_shift=True; one alone raises. qk_norm=True is
    qk_norm="per_head", and qk_norm=True with qk_norm_share_param_across_head=True, as in the published models, with an
    eps of 1e-5: `layer.q_norm.eps = layer.k_norm.eps = 1e-5`. use_rope=True needs position=Rotary(rope_base); no
    parameter shows this option. ogate_act="silu" raises. log_pruning_tolerance is skip_tolerance="auto", which skips
    less.

    Args:
        state, prefix: as in from_fla.
        ogate_act: the layer's option of that name; no parameter shows it.
        config: as in from_fla, of their ForgettingTransformerForCausalLM. use_rope, window_size and another MLP than
            SwiGLU raise. Constant gates become a frozen decay in every layer.

    Raises:
        TypeError, ValueError: for missing and quantised parameters, and for parameters and options without an
            equivalent, by name.
    """
    if config is not None:
        values = _values(config, "forgetting_transformer-project_fox", "from_fla")
        ogate_act = values.get("ogate_act", "sigmoid")
        return _convert_model(state, values, lambda own, prefix: from_fox(own, prefix=prefix, ogate_act=ogate_act))
    own = _of_layer(state, prefix, _OF_FOX)
    if "g_proj.weight" in own and ogate_act != "sigmoid":
        raise ValueError(f"ogate_act: expected 'sigmoid', as DecayFlashAttention has it, got {ogate_act!r}")
    for one, other in ("kv", "vk"):
        if f"{one}_shift.weight" in own and f"{other}_shift.weight" not in own:
            raise ValueError(
                f"{prefix}{one}_proj.shift_proj.weight: expected a shift of both keys and values, as "
                f"kv_shift is, got none of {other}_proj"
            )
    if "decay.log_decay" in own:
        logits = own["decay.log_decay"]
        own["decay.log_decay"] = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    return _convert(own, prefix)


def _of_layer(state: State, prefix: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters with the prefix, without it, and with our names where `names` has one."""
    layers = [name.removesuffix("q_proj.weight") for name in state if name.endswith("q_proj.weight")]
    if layers and prefix not in layers:
        raise ValueError(f"prefix: expected that of one layer, for example {layers[0]!r}, got {prefix!r}")
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {names.get(name, name): _floating(f"{prefix}{name}", value) for name, value in own.items()}


def _floating(name: str, value: Tensor) -> Tensor:
    """value, refused if it is quantised: its numbers have no meaning without their scales."""
    if not value.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {value.dtype}; dequantise the weights first")
    return value


def _convert(own: dict[str, Tensor], prefix: str, gate: Iterable[tuple[str, str]] = ()) -> dict[str, Tensor]:
    """Our state dict from parameters with the names of _PARTS, o_proj and _KEPT. gate: names, theirs and ours."""
    parts = [name for name in _PARTS if f"{name}.weight" in own]
    for theirs, ours in (*((f"{name}.weight",) * 2 for name in (*_PARTS[:3], "o_proj")), *gate):
        if ours not in own:
            raise ValueError(f"{prefix}{theirs}: expected in the state dict, got none")
    biases = [f"{name}.bias" for name in (*parts, "o_proj")]
    known = {*(f"{name}.weight" for name in (*parts, "o_proj")), *biases, *_KEPT}
    for name in sorted(own.keys() - known):
        raise ValueError(f"{prefix}{name}: expected no such parameter, because DecayFlashAttention has no equivalent")
    converted = {name: own[name] for name in _KEPT if name in own}
    converted["in_proj.weight"] = torch.cat([own[f"{name}.weight"] for name in parts])
    converted["out_proj.weight"] = own["o_proj.weight"]
    if own.keys() & biases:
        *of_parts, converted["out_proj.bias"] = (
            own.get(name, torch.zeros_like(own[name.replace("bias", "weight")][:, 0])) for name in biases
        )
        converted["in_proj.bias"] = torch.cat(of_parts)
    return converted


def _values(config: Any, model_type: str, other: str) -> Mapping[str, Any]:
    """The options of a model, without those that have no equivalent."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    if values.get("model_type", model_type) != model_type:
        raise ValueError(
            f"config: expected the model_type {model_type!r}, got {values['model_type']!r}; {other} is for the other "
            "library"
        )
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads"):
        if name not in values:
            raise ValueError(f"config.{name}: expected a number, got none")
    for name, (only, reason) in _ONLY.items():
        if values.get(name, only) != only:
            raise ValueError(f"config.{name}: expected {only!r}, got {values[name]!r}; {reason}")
    return values


def _convert_model(
    state: State, values: Mapping[str, Any], convert: Callable[..., dict[str, Tensor]]
) -> "tuple[DecayConfig, dict[str, Tensor]]":
    """DecayConfig and state dict from a model of either library; convert(state, prefix=…) is that of a layer."""
    from decayattn.integrations.transformers import DecayConfig

    rest, found = dict(state), {}

    def take(theirs: str, ours: str) -> None:
        if theirs not in rest:
            raise ValueError(f"{theirs}: expected in the state dict, got none")
        found[ours] = _floating(theirs, rest.pop(theirs))

    embeddings, head = "model.embeddings.weight", "lm_head.weight"
    if values.get("tie_word_embeddings"):  # their state dict may have either name, or both
        for one, other in ((embeddings, head), (head, embeddings)):
            if one in rest:
                rest.setdefault(other, rest[one])
        if head in rest and not (rest[head].is_meta or torch.equal(rest[head], rest[embeddings])):
            raise ValueError(
                f"{head}: expected the values of {embeddings} with config.tie_word_embeddings=True, got others; set it "
                "to False for a model with a head of its own"
            )
    take(embeddings, "model.embed_tokens.weight")
    take("model.norm.weight", "model.norm.weight")
    take(head, head)
    for n in range(values["num_hidden_layers"]):
        block = f"model.layers.{n}."
        take(f"{block}attn_norm.weight", f"{block}input_layernorm.weight")
        take(f"{block}mlp_norm.weight", f"{block}post_attention_layernorm.weight")
        gate, up = f"{block}mlp.gate_proj.weight", f"{block}mlp.up_proj.weight"
        if up not in rest and gate in rest:  # one matrix
            rest[gate], rest[up] = (half.clone() for half in rest[gate].chunk(2))
        for name in (gate, up, f"{block}mlp.down_proj.weight"):
            take(name, name)
        own = {name: rest.pop(name) for name in tuple(rest) if name.startswith(f"{block}attn.")}
        found |= {f"{block}self_attn.{name}": x for name, x in convert(own, prefix=f"{block}attn.").items()}
    for name in sorted(rest):
        raise ValueError(f"{name}: expected no such parameter, because DecayForCausalLM has no equivalent")
    return DecayConfig(**_options(values, found)), found


def _options(values: Mapping[str, Any], weights: State) -> dict[str, Any]:
    """Options of DecayConfig, from those of the other model and from its converted weights."""
    width, size = values["hidden_size"], values.get("intermediate_size")
    if size is None:  # their rule: about 2/3 · hidden_ratio · hidden_size, up to a multiple of 256
        ratio = values.get("hidden_ratio")
        size = 256 * -(-int(width * (4 if ratio is None else ratio) * 2 / 3) // 256)
    first = "model.layers.0.self_attn."
    gain, constants = weights.get(f"{first}q_norm.weight"), weights.get(f"{first}decay.log_decay")
    alike = (
        "vocab_size", "hidden_size", "num_hidden_layers", "initializer_range", "use_cache", "tie_word_embeddings",
        "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings",
    )
    return {name: values[name] for name in alike if values.get(name) is not None} | {
        "intermediate_size": size,
        "num_attention_heads": values["num_heads"],
        "num_key_value_heads": values.get("num_kv_heads"),
        "decay": "scalar" if f"{first}decay.weight" in weights else "none" if constants is None else "constant",
        "log_decay": None if constants is None else constants.tolist(),
        "qk_norm": gain is not None and ("per_head" if len(gain) == width else True),
        "qk_norm_eps": 1e-5,
        "output_gate": values.get("use_output_gate", False),
        "output_norm": values.get("use_output_norm", False),
        "kv_shift": values.get("use_k_shift", False),
        "rms_norm_eps": values.get("norm_eps", 1e-6),
    }
