"""Weights of other libraries' layers: what the layer computes with them, as a formula, is what ours computes."""

import re
from types import SimpleNamespace

import other_libraries
import pytest
import torch
from torch import nn

from decayattn import DecayFlashAttention
from decayattn.integrations.checkpoints import from_fla, from_fox
from decayattn.nn import ConstantDecay

transformers = pytest.importorskip("transformers")
from decayattn.integrations.transformers import DecayForCausalLM  # noqa: E402

WIDTH, HEADS = 24, 4
PRO = {"use_output_gate": True, "use_output_norm": True, "use_k_shift": True, "use_v_shift": True}


def randomised(layer):
    """Return the layer in float64, every parameter and buffer changed at random."""
    torch.manual_seed(0)
    for tensor in layer.double().state_dict().values():
        tensor.add_(0.5 * torch.randn_like(tensor))
    return layer


def check(theirs, ours, weights):
    ours.double().load_state_dict(weights)
    x = torch.randn(2, 11, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_from_fla_gives_outputs_of_the_layer(kv_heads, gate, bias):
    options = dict(num_kv_heads=kv_heads, qkv_bias=bias, use_output_gate=gate)
    theirs = randomised(other_libraries.ForgettingAttention(WIDTH, HEADS, **options))
    ours = DecayFlashAttention(WIDTH, HEADS, num_kv_heads=kv_heads, bias=bias, output_gate=gate)
    check(theirs, ours, from_fla(theirs.state_dict()))


@pytest.mark.parametrize(("heads", "norm"), [(HEADS, None), (HEADS, "per_head"), (HEADS, True), (1, True)])
@pytest.mark.parametrize("pro", [{}, {"use_output_gate": True}, PRO])
@pytest.mark.parametrize("fgate", ["full", "bias_only", "fixed", "none"])
def test_from_fox_gives_outputs_of_the_layer(fgate, pro, heads, norm):
    theirs = randomised(other_libraries.ForgettingAttentionLayer(
        WIDTH, heads, fgate_type=fgate, qk_norm=bool(norm), qk_norm_share_param_across_head=norm is True, **pro
    ))
    decay = {"full": "scalar", "none": "none"}.get(fgate) or ConstantDecay.from_values([0.0] * heads)
    ours = DecayFlashAttention(
        WIDTH, heads, decay=decay, qk_norm=norm or False, output_gate="use_output_gate" in pro, output_norm=pro == PRO,
        kv_shift=pro == PRO,
    )
    if norm:
        ours.q_norm.eps = ours.k_norm.eps = 1e-5
    check(theirs, ours, from_fox(theirs.state_dict()))


@pytest.mark.parametrize(("heads", "kv_heads", "of_all"), [(4, 1, True), (4, 4, True), (1, 1, True), (4, 2, False)])
def test_from_fla_takes_both_kinds_of_gains(heads, kv_heads, of_all):
    """One for all heads, as in early versions, or one for each."""
    theirs = other_libraries.ForgettingAttention(WIDTH, heads, num_kv_heads=kv_heads, qk_norm=True)
    if of_all:
        theirs.q_norm, theirs.k_norm = (other_libraries.GroupNorm(1, WIDTH // heads) for _ in "qk")
    randomised(theirs)
    ours = DecayFlashAttention(WIDTH, heads, num_kv_heads=kv_heads, qk_norm=True if of_all else "per_head")
    ours.q_norm.eps = ours.k_norm.eps = 1e-5
    check(theirs, ours, from_fla(theirs.state_dict()))


def test_prefix_selects_a_layer_of_a_model():
    theirs = randomised(torch.nn.ModuleDict({x: other_libraries.ForgettingAttention(WIDTH, HEADS) for x in "ab"}))
    model = {f"model.{name}": x for name, x in theirs.state_dict().items()}
    check(theirs["b"], DecayFlashAttention(WIDTH, HEADS), from_fla(model, prefix="model.b."))
    for convert in (from_fla, from_fox):
        for prefix in ("", "model.b", "b.", "model."):
            message = re.escape(f"prefix: expected that of one layer, for example 'model.a.', got {prefix!r}")
            with pytest.raises(ValueError, match=message):
                convert(model, prefix=prefix)


@pytest.mark.parametrize(("convert", "change", "options", "message"), [
    (from_fox, {}, {"ogate_act": "silu"}, "ogate_act: expected 'sigmoid', .* got 'silu'"),
    (from_fla, {}, {}, "f_proj.weight: expected in the state dict"),
    (from_fla, {}, {"prefix": "attn."}, r"prefix: expected that of one layer, for example '', got 'attn\.'"),
    (from_fla, {}, {"prefix": "attn."}, "attn.q_proj.weight: expected in the state dict"),
    (from_fox, {"q_conv1d.weight": 0.0}, {}, "q_conv1d.weight: expected no such parameter"),
    (from_fox, {"o_proj.weight": 0}, {}, "o_proj.weight: expected a floating dtype, got torch.int64; dequantise"),
    (from_fox, {"k_proj.shift_proj.weight": 0.0}, {}, "k_proj.shift_proj.weight: expected a shift .* none of v_proj"),
    (from_fox, {"v_proj.shift_proj.weight": 0.0}, {}, "v_proj.shift_proj.weight: expected a shift .* none of k_proj"),
])
def test_errors_name_parameters_and_prefixes(convert, change, options, message):
    state = other_libraries.ForgettingAttentionLayer(WIDTH, HEADS, use_output_gate=True).state_dict()
    change = {name: torch.tensor([value]) for name, value in change.items()}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        convert({} if "attn.q_proj" in message else state | change, **options)


# Whole models


class Mlp(nn.Module):
    def __init__(self, width, size, is_fused):
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * size if is_fused else size, bias=False)
        self.up_proj = None if is_fused else nn.Linear(width, size, bias=False)
        self.down_proj = nn.Linear(size, width, bias=False)

    def forward(self, x):
        gate, up = self.gate_proj(x).chunk(2, -1) if self.up_proj is None else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(gate * gate.sigmoid() * up)


class Model(nn.Module):
    """ForgettingTransformerForCausalLM of both libraries, by their documentation: names, shapes and logits."""

    def __init__(self, layer, vocab, width, heads, layers, size, is_fused, eps=1e-6, **options):
        super().__init__()
        self.model = nn.ModuleDict({"embeddings": nn.Embedding(vocab, width)})
        self.model["layers"] = nn.ModuleList(
            nn.ModuleDict({
                "attn_norm": nn.RMSNorm(width, eps=eps), "attn": layer(width, heads, **options),
                "mlp_norm": nn.RMSNorm(width, eps=eps), "mlp": Mlp(width, size, is_fused),
            }) for _ in range(layers)
        )
        self.model["norm"] = nn.RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.model["embeddings"](tokens)
        for block in self.model["layers"]:
            x = x + block["attn"](block["attn_norm"](x))[0]
            x = x + block["mlp"](block["mlp_norm"](x))
        return self.lm_head(self.model["norm"](x))


FOX = {"model_type": "forgetting_transformer-project_fox", "use_rope": False, "hidden_act": "swish"}
FLA = {"model_type": "forgetting_transformer", "qkv_bias": False, "attnres_block_size": None, "window_size": None}
SIZES = {"vocab_size": 50, "hidden_size": WIDTH, "num_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 32}


def theirs_and_ours(convert, config, is_fused, device=None, **options):
    layer = other_libraries.ForgettingAttention if convert is from_fla else other_libraries.ForgettingAttentionLayer
    sizes = [config[name] for name in ("vocab_size", "hidden_size", "num_heads", "num_hidden_layers")]
    with torch.device(device or "cpu"):
        theirs = Model(layer, *sizes, options.pop("size", 32), is_fused, **options)
        theirs = theirs if device else randomised(theirs)
        converted, weights = convert(theirs.state_dict(), config=config)
        ours = DecayForCausalLM(converted)
    if device is None:
        ours.double().load_state_dict(weights)
    assert {name: x.shape for name, x in weights.items()} == {name: x.shape for name, x in ours.state_dict().items()}
    return theirs, ours


@torch.no_grad()
@pytest.mark.parametrize(("convert", "config", "options"), [
    (from_fox, {}, {}),
    (from_fox, PRO | {"qk_norm": True}, PRO | {"qk_norm": True}),
    (from_fox, PRO | {"qk_norm": True, "norm_eps": 1e-3, "fgate_type": "bias_only"},
     PRO | {"qk_norm": True, "qk_norm_share_param_across_head": True, "norm_eps": 1e-3, "eps": 1e-3,
            "fgate_type": "bias_only"}),
    (from_fox, {"fgate_type": "none"}, {"fgate_type": "none"}),
    (from_fla, {}, {}),
    (from_fla, {"num_kv_heads": 2, "qk_norm": True, "use_output_gate": True},
     {"num_kv_heads": 2, "qk_norm": True, "use_output_gate": True}),
])
def test_model_gives_their_logits_and_tokens(convert, config, options, tmp_path):
    """Tokens of the cache are those of whole sequences, also after a save; the configuration may be their object."""
    config = (FOX if convert is from_fox else FLA) | SIZES | config
    theirs, ours = theirs_and_ours(convert, config, convert is from_fox, **options)
    tokens = torch.randint(0, 50, (2, 13))
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens))
    ours.save_pretrained(tmp_path)
    ours = DecayForCausalLM.from_pretrained(tmp_path)
    expected, drafting = tokens, {"prompt_lookup_num_tokens": 3, "eos_token_id": 50}  # drafts leave the cache
    for _ in range(20):
        expected = torch.cat([expected, theirs(expected)[:, -1:].argmax(-1)], 1)
    for rows, how in ((2, {}), (1, drafting)):
        given = {"attention_mask": torch.ones(rows, 13)} | how
        found = ours.generate(tokens[:rows], max_new_tokens=20, do_sample=False, pad_token_id=0, **given)
        assert torch.equal(found[:, :33], expected[:rows])  # in transformers 5.4, drafts may give one token more
    same = [convert(theirs.state_dict(), config=x)[0] for x in (config, SimpleNamespace(to_dict=lambda: config))]
    assert same[0].to_dict() == same[1].to_dict()


@pytest.mark.parametrize("pro", [False, True])
@pytest.mark.parametrize(("width", "heads", "layers", "of_pro", "of_llama"), [
    (768, 12, 12, 1792, 2048), (1024, 16, 24, 2560, 2816), (1536, 24, 24, 3584, 4096),
])
def test_published_configurations_convert_by_name_and_size(width, heads, layers, of_pro, of_llama, pro):
    """125M, 360M and 760M of the paper's repository; the published 760M weights share the gains of qk_norm."""
    config = FOX | {
        "vocab_size": 50304, "hidden_size": width, "num_heads": heads, "num_hidden_layers": layers,
        "intermediate_size": None, "hidden_ratio": 3.5 if pro else 4, "num_kv_heads": None, "bos_token_id": 0,
        "max_position_embeddings": None, "log_pruning_tolerance": None, "fgate_type": "full",
    }
    options = PRO | {"qk_norm": True, "qk_norm_share_param_across_head": True} if pro else {}
    theirs, ours = theirs_and_ours(
        from_fox, config | options, True, "meta", size=of_pro if pro else of_llama, **options
    )
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    assert (ours.config.kv_shift, ours.config.output_norm, ours.config.qk_norm) == (pro, pro, pro)
    assert (ours.config.bos_token_id, ours.config.tie_word_embeddings) == (0, False)


@torch.no_grad()
@pytest.mark.parametrize("left_out", [None, "lm_head.weight", "model.embeddings.weight"])
def test_tied_embeddings_stay_tied(left_out):
    config = FLA | SIZES | {"tie_word_embeddings": True}
    theirs = randomised(Model(other_libraries.ForgettingAttention, 50, WIDTH, HEADS, 2, 32, False))
    theirs.lm_head.weight = theirs.model["embeddings"].weight
    state = {name: x for name, x in theirs.state_dict().items() if name != left_out}
    converted, weights = from_fla(state, config=config)
    ours = DecayForCausalLM(converted).double()
    ours.load_state_dict(weights)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    tokens = torch.randint(0, 50, (2, 13))
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens))


@pytest.mark.parametrize(("convert", "config", "message"), [
    (from_fox, {"use_rope": True}, "config.use_rope: expected False, got True; DecayForCausalLM has no positions"),
    (from_fox, {"hidden_act": "sigmoid"}, "config.hidden_act: expected 'swish', got 'sigmoid'; the MLP"),
    (from_fox, {"window_size": 8}, "config.window_size: expected None, got 8"),
    (from_fox, {"ogate_act": "silu"}, "ogate_act: expected 'sigmoid', .* got 'silu'"),
    (from_fox, FLA, "config: expected the model_type 'forgetting_transformer-project_fox', .* from_fla is for"),
    (from_fla, FOX, "config: expected the model_type 'forgetting_transformer', .* from_fox is for"),
    (from_fla, {"qkv_bias": True}, "config.qkv_bias: expected False, got True; DecayForCausalLM has no biases"),
    (from_fla, {"tie_word_embeddings": True}, "lm_head.weight: expected the values of model.embeddings.weight with"),
    (from_fla, {"attnres_block_size": 4}, "config.attnres_block_size: expected None, got 4"),
    (from_fla, {"num_hidden_layers": 3}, "model.layers.2.attn_norm.weight: expected in the state dict, got none"),
    (from_fla, {"num_hidden_layers": 1}, "model.layers.1.attn.f_proj.bias: expected no such parameter"),
])
def test_models_without_equivalent_are_refused_by_name(convert, config, message):
    config = (FOX if convert is from_fox else FLA) | SIZES | config
    layer = other_libraries.ForgettingAttention if convert is from_fla else other_libraries.ForgettingAttentionLayer
    state = Model(layer, 50, WIDTH, HEADS, 2, 32, False, use_output_gate=True).state_dict()
    with pytest.raises(ValueError, match=message):
        convert(state, config=config)
    if config == FLA | SIZES | {"qkv_bias": True}:
        with pytest.raises(ValueError, match=r"config.num_heads: expected a number, got none"):
            convert(state, config={name: x for name, x in (FLA | SIZES).items() if name != "num_heads"})
        with pytest.raises(ValueError, match=r"model.norm.weight: expected in the state dict, got none"):
            convert({name: x for name, x in state.items() if name != "model.norm.weight"}, config=FLA | SIZES)
        with pytest.raises(TypeError, match=r"lm_head.weight: expected a floating dtype, got torch.uint8"):
            convert(state | {"lm_head.weight": state["lm_head.weight"].byte()}, config=FLA | SIZES)
