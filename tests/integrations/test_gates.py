"""Decays that are added to pretrained models of transformers, and rates in their configurations."""

import copy
import inspect
import math
import threading

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache, Trainer, TrainingArguments

from decayattn.integrations import gates
from decayattn.integrations.transformers import add_decay
from decayattn.nn import ScalarDecay, alibi_log_decay

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
MODELS = {
    "llama": {}, "mistral": {"sliding_window": 12}, "qwen2": {}, "qwen3": {"head_dim": 16}, "phi3": {}, "gpt_neox": {},
    "olmo": {}, "olmo2": {}, "granite": {}, "gemma": {"head_dim": 16},
}


def build(kind="llama", **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | {"initializer_range": 0.3} | MODELS.get(kind, {}) | options)
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(batch=2, length=20):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def strengthen(model, seed=2):
    """Half-lives of a few tokens, which differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, ScalarDecay):
            module.bias.fill_(1.0)
            module.weight.normal_(0, 0.3, generator=generator)
    return model


def gated(kind="llama", **options):
    return strengthen(add_decay(build(kind, **options)))


def gemma3(options=None):
    """A model of text and images: token 61 is a patch of an image."""
    torch.manual_seed(0)
    text = dict(SIZES, head_dim=16, initializer_range=0.3, query_pre_attn_scalar=16) | (options or {})
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=28)
    tokens = dict(mm_tokens_per_image=4, boi_token_index=60, image_token_index=61, eoi_token_index=62)
    config = transformers.Gemma3Config(text_config=text, vision_config=dict(vision, patch_size=14), **tokens)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def _check_generation(model):
    """Every cache writes the tokens that no cache writes."""
    x, padded = tokens(), torch.ones(2, 20, dtype=torch.int64)
    padded[0, :4] = 0

    def write(x=x, **options):
        return model.generate(x, max_new_tokens=8, do_sample=False, **options)

    for options, others in (
        ({}, {}), ({}, {"cache_implementation": "static"}), ({"num_beams": 3}, {}), ({"attention_mask": padded}, {}),
        ({"x": x[:1]}, {"prompt_lookup_num_tokens": 3}),
    ):
        torch.testing.assert_close(write(**options, **others), write(**options, use_cache=False), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(MODELS)[1:])])
def test_gate_starts_at_the_model_and_generates(kind, tmp_path):
    model, x = build(kind), tokens()
    with torch.no_grad():
        own = model(x).logits
        assert (add_decay(model)(x).logits - own).abs().max() < 1e-3
        whole = strengthen(model)(x).logits
    assert (whole - own).abs().max() > 0.01
    _check_generation(model)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(x).logits, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gate_keeps_its_bits_in_every_cache(dtype, tmp_path):
    gated().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    decays = {p.dtype for name, p in model.named_parameters() if "decay" in name}
    assert decays == {torch.float64 if dtype == torch.float64 else torch.float32}
    _check_generation(model)
    with torch.no_grad():
        first = model(tokens())
    keys = first["cache" if "cache" in first else "past_key_values"].layers[0].keys
    assert keys.stride(2) * keys.itemsize % 16 == 0  # kernels load vectors of it


def test_constant_decay_equals_alibi():
    """A rate per head in the configuration is a bias; so is a learned rate of the same half-life."""
    model, x = build(), tokens()
    model.set_attn_implementation("sdpa")
    distance = torch.arange(20) - torch.arange(20)[:, None]
    bias = -torch.tensor(alibi_log_decay(4))[:, None, None] * distance
    bias = bias.masked_fill(distance > 0, -torch.inf).expand(2, 4, 20, 20)
    with torch.no_grad():
        expected = model(x, attention_mask=bias).logits
        rates = build(log_decay=alibi_log_decay(4))
        rates.set_attn_implementation("decayattn")
        torch.testing.assert_close(rates(x).logits, expected, rtol=1e-4, atol=1e-4)
        learned = add_decay(build(), "constant", half_lives=[-math.log(2) / x for x in alibi_log_decay(4)])
        torch.testing.assert_close(learned(x).logits, expected, rtol=1e-4, atol=1e-4)
    for each in (rates, learned):
        _check_generation(each)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["scalar", "constant"])
def test_packed_documents_give_logits_of_each_alone(kind):
    model, x = add_decay(build(), kind, half_lives=(2.0, 9.0)), tokens(1, 20)
    alone = torch.cat([model(x[:, :7]).logits, model(x[:, 7:]).logits], 1)
    positions = torch.cat([torch.arange(7), torch.arange(13)])[None]
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    for packing in ({}, dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=13, max_length_k=13)):
        found = model(x, position_ids=positions, use_cache=False, **packing).logits
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gate_trains_and_is_spared(checkpointing, tmp_path):
    model = add_decay(build(), half_lives=(4.0, 64.0))
    before = copy.deepcopy(model.state_dict())
    options = TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=1e-2, weight_decay=0.1, report_to=[], use_cpu=True,
        gradient_checkpointing=checkpointing, save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model, options, train_dataset=[{"input_ids": x, "labels": x} for x in tokens(8)])
    assert not [name for name in trainer.get_decay_parameter_names(model) if "decay" in name]
    trainer.train()
    gates = [name for name in before if "self_attn.decay" in name]
    assert len(gates) == 4
    assert all(not torch.equal(model.state_dict()[name], before[name]) for name in gates)


def test_gradients_are_equal_with_and_without_a_cache():
    model, x, gradients = gated(), tokens(), []
    for use_cache in (False, True):
        model.zero_grad()
        outputs = model(x, labels=x, use_cache=use_cache)
        outputs.loss.backward()
        gradients.append([p.grad.clone() for name, p in model.named_parameters() if "decay" in name])
    torch.testing.assert_close(gradients[1], gradients[0])
    cache = getattr(outputs, "cache", None) or outputs.past_key_values
    with pytest.raises(RuntimeError, match="cache: expected an empty one"):
        model(x, past_key_values=cache)


def test_gate_copies_and_compiles():
    model, x = copy.deepcopy(gated(num_hidden_layers=1)), tokens()
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, use_cache=False).logits, expected)


def test_base_checkpoint_starts_the_configured_decay(tmp_path):
    build().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.added_decay = {"decay": "scalar", "half_lives": [3.0, 48.0]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    found = model.model.layers[1].self_attn.decay.half_lives(torch.zeros(1, 1, 64))[0, 0]
    torch.testing.assert_close(found[[0, -1]], torch.tensor([3.0, 48.0]))


OTHER_KEYS = {
    "deepseek_v3": dict(
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gemma3n_text": dict(
        num_hidden_layers=6, num_kv_shared_layers=3, head_dim=16, layer_types=["full_attention"] * 6, laurel_rank=8,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, altup_num_inputs=2,
        activation_sparsity_pattern=None,
    ),
    "diffllama": {},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", OTHER_KEYS)
def test_cached_latents_and_shared_keys_are_right_or_raise(kind):
    """Their caches have no place for the decay of a token, and a second attention would have none."""
    x = tokens()
    try:
        model = gated(kind, **OTHER_KEYS[kind])
        whole = model(x, use_cache=False).logits
        first = model(x[:, :12])
        name = "cache" if "cache" in first else "past_key_values"
        rest = model(x[:, 12:], **{name: first[name]})
        raised = None
    except (RuntimeError, ValueError) as error:
        raised = str(error)
    if raised is not None:
        assert raised.startswith(("decay: expected one attention", "cache: expected ", "attn_implementation: "))
    else:
        torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole)


class QuantizedLayer(transformers.cache_utils.DynamicLayer):
    pass


def test_gate_refuses_quantised_caches_and_other_attention():
    model, cache = gated(), transformers.cache_utils.Cache(layers=[QuantizedLayer(), QuantizedLayer()])
    with torch.no_grad(), pytest.raises(ValueError, match="cache: expected one that keeps the bits of keys"):
        model(tokens(), past_key_values=cache, use_cache=True)
    prefix = transformers.DynamicCache(config=model.config)
    for layer in range(2):
        prefix.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), layer)
    with torch.no_grad(), pytest.raises(ValueError, match="cache: expected keys with a decay, got others"):
        model(tokens(), past_key_values=prefix)
    with torch.no_grad(), pytest.raises(ValueError, match="cache: expected a Cache with layers, got EncoderDecoder"):
        model(tokens(), past_key_values=transformers.EncoderDecoderCache(prefix, prefix))
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="attn_implementation: expected 'decayattn'"):
        model(tokens())


def test_gate_takes_preallocated_caches_and_any_class():
    """transformers allocates a static cache before a prompt that it reads in parts."""
    store = type("Store", (DynamicCache,), {})(config=gated().config)
    model, options = gated().eval(), dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = model.generate(tokens(), use_cache=False, **options)
    for caching in (dict(prefill_chunk_size=8, cache_implementation="static"), dict(past_key_values=store)):
        torch.testing.assert_close(model.generate(tokens(), **caching, **options), expected)


@torch.no_grad()
def test_gate_refuses_the_decay_of_another_thread():
    """Another call replaces the decay of one in progress, and may have its shape."""
    model = gated()
    layer = model.model.layers[1].self_attn

    def interrupt(*_):
        other = threading.Thread(target=gates._decay, args=(layer, (torch.zeros(2, 20, 64),), {}))
        other.start()
        other.join()

    hook = layer.q_proj.register_forward_hook(interrupt)
    with pytest.raises(RuntimeError, match=r"decay: expected one attention .* in another thread"):
        model(tokens(), use_cache=False)
    hook.remove()
    model(tokens(), use_cache=False)


def test_fixed_rates_refuse_other_attention():
    """Also rates that the configuration gets later."""
    model, later = build(log_decay=alibi_log_decay(4)), build()
    later.set_attn_implementation("decayattn")
    later.config.log_decay = alibi_log_decay(4)
    for each in (model, later):
        each.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match=r"the fixed rates of config.log_decay, got 'sdpa'; call model.set_attn"):
            each(tokens())
        each.set_attn_implementation("decayattn")
        each(tokens())
    model.config.log_decay = None
    model.set_attn_implementation("sdpa")
    model(tokens())
    later.config.log_decay = -0.1
    with pytest.raises(TypeError, match=r"config.log_decay: expected one number per head, .* got -0.1"):
        later(tokens())


def test_fixed_rates_in_a_tensor_are_saved(tmp_path):
    """JSON has no tensors, and the rates of a model are checked when it is built."""
    model = build(log_decay=torch.tensor(alibi_log_decay(4)))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="decayattn")
    model.set_attn_implementation("decayattn")
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits)
    with pytest.raises(ValueError, match=r"config.log_decay: expected finite log-decays, got \[nan"):
        build(log_decay=[math.nan] * 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_fixed_rates_of_an_encoder_ignore_padding(side):
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, initializer_range=0.3, log_decay=alibi_log_decay(4))
    model = transformers.AutoModel.from_config(config, attn_implementation="decayattn").eval()
    real, x = slice(5, 20) if side == "left" else slice(0, 15), tokens()
    mask = torch.zeros_like(x).index_fill(1, torch.arange(20)[real], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(input_ids=x, attention_mask=mask, position_ids=places).last_hidden_state[:, real]
        torch.testing.assert_close(padded, model(input_ids=x[:, real]).last_hidden_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", ["rates", "scalar", "constant"])
def test_decay_of_an_image_is_equal_in_a_static_cache(decay):
    """The tokens of an image see each other; the cache has unwritten keys after the prompt."""
    model = gemma3({"log_decay": alibi_log_decay(4)} if decay == "rates" else {})
    if decay == "rates":
        model.set_attn_implementation("decayattn")
    else:
        add_decay(model, decay, half_lives=(1.0, 9.0))
    x = torch.tensor([[2, 3, 60, 61, 61, 61, 61, 62, 5, 6, 7, 8]])
    given = dict(input_ids=x, pixel_values=torch.ones(1, 3, 28, 28), token_type_ids=(x == 61).long())
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        cached = model(**given, **{name: StaticCache(config=model.config, max_cache_len=30)}).logits
        torch.testing.assert_close(cached, model(**given, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "error"), [
    ("bart", "log_decay: expected a model without cross-attention, got BartForConditionalGeneration"),
    ("gemma3", "log_decay: no layer reads that of Gemma3Config; set it in a part, as text_config"),
])
def test_fixed_rates_refuse_models_that_cannot_use_them(kind, error):
    """Cross-attention has other distances with a cache; attention layers have the configuration of their part."""
    model = bart() if kind == "bart" else gemma3()
    model.config.log_decay = alibi_log_decay(4)
    model.set_attn_implementation("decayattn")
    with pytest.raises(ValueError, match=error):
        model(tokens())
    if kind == "bart":  # its encoder alone has the same configuration
        found = model.eval().get_encoder()(tokens()).last_hidden_state
        model.config.log_decay = None
        assert not torch.allclose(found, model.get_encoder()(tokens()).last_hidden_state)
    if kind == "gemma3":
        model.config.text_config.log_decay = list(model.config.log_decay)
        model(tokens())
        model.config.log_decay = alibi_log_decay(8)[:4]
        with pytest.raises(ValueError, match="that of Gemma3Config, and Gemma3TextConfig has other rates; remove"):
            model(tokens())
        model.config.log_decay = None
        model(tokens())


def test_fixed_rates_of_a_configuration_with_a_projector_raise():
    """The projector of Mistral 3 keeps the configuration of the whole model, and no attention reads it."""
    text = transformers.MistralConfig(**SIZES)
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=28)
    vision = transformers.PixtralVisionConfig(**vision, patch_size=14)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=61)
    config.log_decay = alibi_log_decay(4)
    model = transformers.Mistral3ForConditionalGeneration._from_config(config, attn_implementation="decayattn")
    with pytest.raises(ValueError, match="log_decay: no layer reads that of Mistral3Config"):
        model(tokens())


def test_fixed_rates_refuse_cross_attention_in_a_decoder():
    """Layers of Llama 3.2 attend to an image if there is one."""
    sizes = dict(cross_attention_layers=[1], rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(**SIZES, **sizes)
    config.log_decay = alibi_log_decay(4)
    model = transformers.MllamaForCausalLM._from_config(config, attn_implementation="decayattn")
    model(tokens())
    image = dict(cross_attention_states=torch.ones(2, 8, 64), cross_attention_mask=torch.zeros(2, 1, 20, 8))
    with pytest.raises(ValueError, match="without cross-attention, got MllamaTextCrossAttention"):
        model(tokens(), **image, full_text_row_masked_out_mask=torch.ones(2, 1, 20, 1))
    model = transformers.BartForCausalLM(bart().config)
    model.config.log_decay = alibi_log_decay(4)
    model.set_attn_implementation("decayattn")
    model(tokens())
    with pytest.raises(ValueError, match="without cross-attention, got BartForCausalLM"):
        model(tokens(), encoder_hidden_states=torch.ones(2, 8, 32))


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True])
def test_constant_decay_with_sinks_refuses_unwritten_keys(learned):
    """Compiled, a static cache gets a mask with its unwritten keys, which are in no distance to a sink."""
    sizes = dict(SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).eval()
    if learned:
        add_decay(model, "constant")
    else:
        model.config.log_decay = alibi_log_decay(4)
        model.set_attn_implementation("decayattn")
    cache = StaticCache(config=model.config, max_cache_len=32)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad(), pytest.raises(Exception, match="s_aux: expected none with constant rates, a cache"):
        torch.compile(model, backend="eager")(tokens(), **{name: cache})


@pytest.mark.slow
def test_constant_decay_with_sinks_takes_dynamic_cache_compiled():
    sizes = dict(SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.3)
    config = transformers.GptOssConfig(**sizes, sliding_window=4, log_decay=alibi_log_decay(4))
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="decayattn").eval()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens()[:, :15], **{name: cache})
        found = torch.compile(model, backend="eager")(tokens()[:, 15:], **{name: cache}).logits
        torch.testing.assert_close(found, model(tokens(), use_cache=False).logits[:, 15:], rtol=1e-4, atol=1e-4)


def bloom():
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))


def bart():
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64)
    sizes |= dict(encoder_attention_heads=4, decoder_attention_heads=4, init_std=0.4)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))


@pytest.mark.parametrize(("model", "options", "error", "message"), [
    (lambda: nn.Linear(2, 2), {}, TypeError, "model: expected a transformers.PreTrainedModel"),
    (build, {"decay": "alibi"}, ValueError, "decay: expected 'scalar' or 'constant', got 'alibi'"),
    (build, {"half_lives": (5.0, 1.0)}, ValueError, "^half_lives: expected two numbers"),
    (gated, {}, ValueError, "model: expected one without a decay, got config.added_decay"),
    (lambda: build(log_decay=[-1.0] * 4), {}, ValueError, "got config.log_decay"),
    (bart, {}, ValueError, "model: expected a decoder"),
    (bloom, {}, ValueError, "attn_implementation: expected a model with flash or sdpa"),
])
def test_add_decay_refuses_models_without_a_place_for_it(model, options, error, message):
    with pytest.raises(error, match=message):
        add_decay(model(), **options)
