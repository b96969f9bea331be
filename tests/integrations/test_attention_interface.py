"""attn_implementation="decayattn" for ordinary models of transformers: what "eager" computes; and Trainer."""

import copy
import functools
import itertools
import json
import os
import pickle
import sys
import types

import pytest
import torch
from repository_files import ROOT

pytest.importorskip("transformers")

import transformers
from tools import sweep_architectures
from torch.utils._python_dispatch import TorchDispatchMode

import decayattn.integrations.transformers as integration
from decayattn.integrations import attention_interface

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    initializer_range=0.4,  # attention counts
)


WIDTHS = dict(
    vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, dropout=0.0,
    init_std=0.4,
)
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=5)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**WIDTHS)),
}


def pair(kind: str = "llama"):
    """The same model with sdpa and with ours."""
    torch.manual_seed(0)
    theirs = MODELS[kind]()
    ours = type(theirs)(copy.deepcopy(theirs.config))
    ours.load_state_dict(theirs.state_dict())
    theirs.set_attn_implementation("sdpa")
    ours.set_attn_implementation("decayattn")
    for model, name in ((theirs, "sdpa"), (ours, "decayattn")):
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        assert {config._attn_implementation for config in configs} == {name}
    return theirs.eval(), ours.eval()


def padding(side: str) -> torch.Tensor:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, {"left": slice(0, 4), "right": slice(8, 12)}[side]] = 0
    return mask


def check_logits_and_gradients(kind, real, **inputs):
    """Compare the models' logits for the real tokens, and the gradients of their squares."""
    results = []
    for model in pair(kind):
        logits = model(**inputs).logits
        logits[real].square().sum().backward()
        results.append((logits[real].detach(), [p.grad for p in model.parameters()]))
    (theirs, their_gradients), (ours, our_gradients) = results
    assert torch.allclose(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())))
    largest = max(float(gradient.abs().max()) for gradient in their_gradients)
    for ours, theirs in zip(our_gradients, their_gradients, strict=True):
        # those of the keys' biases are 0 but for rounding
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()) + 1e-6 * largest)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("case", ["plain", "left", "right", "packed"])
def test_logits_and_gradients_equal_sdpa(kind, case):
    ids = torch.randint(1, 64, (1 if case == "packed" else 2, 12))
    options, real = {}, torch.ones_like(ids, dtype=torch.bool)
    if case == "packed":
        options["position_ids"] = torch.tensor([[*range(5), *range(7)]])
        _, model = pair(kind)  # equal to transformers' flash attention; sdpa would take them for one sequence
        plain, masked = (model(ids, attention_mask=mask, **options).logits for mask in (None, ids > 0))
        assert torch.equal(plain, masked)
    elif case != "plain":
        options["attention_mask"] = padding(case)
        real = options["attention_mask"].bool()
    check_logits_and_gradients(kind, real, input_ids=ids, use_cache=False, **options)


@pytest.mark.parametrize("side", ["left", "right"])
def test_encoder_equals_sdpa_at_padding_too(side):
    """Queries that are padding see the tokens, as sdpa has it: a model may pool over them."""
    ids = torch.randint(1, 64, (2, 12))
    check_logits_and_gradients("bert", ids > 0, input_ids=ids, attention_mask=padding(side))


@pytest.mark.parametrize("length", [5, 12, 15])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_encoder_decoder_equals_sdpa(side, length):
    """Whatever is padding among the encoder's tokens, the decoder's queries are not; as many as those, fewer, more."""
    ids, decoder_ids = torch.randint(4, 64, (2, 12)), torch.randint(4, 64, (2, length))
    mask = None if side is None else padding(side)
    check_logits_and_gradients(
        "bart", decoder_ids > 0, input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False
    )


@pytest.mark.parametrize(("kind", "side"), [
    ("llama", "left"), ("mistral", "left"), ("bart", "left"), ("bart", "right"),
])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_writes_the_tokens_of_sdpa(kind, side, cache):
    ids, mask = torch.randint(4, 64, (2, 12)), padding(side)
    texts = [
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, cache_implementation=cache)
        for model in pair(kind)
    ]
    assert torch.equal(*texts)


@torch.no_grad()
def test_positions_do_not_cut_padded_rows():
    ids, mask = torch.randint(4, 64, (1, 12)), padding("left")[:1]
    positions = torch.tensor([[0] * 4 + [*range(3), *range(5)]])
    theirs, ours = (model(ids, attention_mask=mask, position_ids=positions).logits[0, 4:] for model in pair())
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_masks_of_keys_hide_queries_outside_a_window_only():
    """A window counts from a query's own token, as in a causal call; a row without a key gives zeros."""
    q, k, v = (torch.randn(3, 4, 6, 8) for _ in range(3))
    mask, index = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0] * 6]), torch.arange(6)
    attend = functools.partial(attention_interface.attention, torch.nn.Module(), q, k, v, mask, is_causal=False)
    assert not attend()[0][2].any()
    visible = mask.bool()[:, None, None] & ((index[:, None] - index).abs() < 2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
    assert torch.allclose(attend(sliding_window=2)[0][mask.bool()], expected[mask.bool()], atol=1e-5)


def test_attention_takes_sinks():
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    found, weights = attention_interface.attention(torch.nn.Module(), q, k, v, None, s_aux=torch.full((4,), 50.0))
    assert weights is None
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dropout": 0.1}, "dropout: expected 0"), ({"softcap": 30.0}, "softcap: there is no soft cap")],
)
def test_attention_refuses_absent_features_by_name(options, message):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=message):
        attention_interface.attention(torch.nn.Module(), q, q, q, None, **options)
    with pytest.raises(ValueError, match="attention_mask: expected in every row one stretch"):
        attention_interface.attention(torch.nn.Module(), q, q, q, torch.tensor([[1, 0, 1, 1]]))


# Architectures

# test_no_architecture_is_wrong has all of them
OUTCOMES = dict.fromkeys((
    "GPT2LMHeadModel", "Gemma3ForCausalLM",
    "PaliGemmaForConditionalGeneration",  # its text model's is_causal is not that of its masks
    "PegasusXForConditionalGeneration",  # its decoder's is_causal is False
), "right") | dict.fromkeys((
    "MptForCausalLM", "FalconForCausalLM", "LEDForConditionalGeneration", "RoFormerForMaskedLM",
    "VaultGemmaForCausalLM", "MambaForCausalLM",
), "refused")


@pytest.mark.parametrize("name", OUTCOMES)
def test_architectures_equal_eager_attention_or_raise(name):
    transformers.logging.set_verbosity_error()
    found = sweep_architectures.judge(name)
    assert found["outcome"] == OUTCOMES[name], found


def test_mask_of_ones_judges_calls_without_a_mask(monkeypatch):
    """Eager attention of Moshi in transformers 5.17 is not causal without a mask; a model like that."""

    class Seeing(transformers.LlamaModel):
        def forward(self, input_ids, attention_mask=None, **options):
            if attention_mask is None and self.config._attn_implementation == "eager":
                attention_mask = torch.zeros(len(input_ids), 1, *[input_ids.shape[1]] * 2)
            return super().forward(input_ids, attention_mask, **options)

    monkeypatch.setattr(transformers, "Seeing", Seeing, raising=False)
    found = sweep_architectures.judge("Seeing")
    assert found["outcome"] == "right", found
    assert "batch-2 last-token batch-1" in found["compared"]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_architecture_is_wrong(part):
    """Every architecture of transformers, as results/architectures.json has it."""
    names = sweep_architectures.architectures()[part::4]
    found = dict(sweep_architectures.sweep(names, os.cpu_count() or 1))
    assert not {name: outcome for name, outcome in found.items() if outcome["outcome"] == "wrong"}
    recorded = json.loads((ROOT / "results/architectures.json").read_text())
    if recorded["transformers"] == transformers.__version__:
        kinds = {name: outcome["outcome"] for name, outcome in found.items()}
        assert kinds == {name: recorded["architectures"].get(name, {}).get("outcome") for name in names}


def test_decay_model_takes_its_own_name():
    config = integration.DecayConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="decayattn")
    model.set_attn_implementation("decayattn")
    assert model(torch.ones(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 64)


def test_unsupported_models_raise_for_every_request():
    kind = transformers.BloomForCausalLM
    config = sweep_architectures.small_config(kind.config_class, {})
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    asked = copy.deepcopy(config)
    asked._attn_implementation = "decayattn"
    for ask in (
        lambda: kind._from_config(copy.deepcopy(config), attn_implementation="decayattn"), lambda: kind(asked),
        lambda: kind(type(config)(attn_implementation="decayattn")),
        lambda: eager.set_attn_implementation("decayattn"),
    ):
        with pytest.raises(ValueError, match=r"got BloomForCausalLM; pass attn_implementation=\"eager\""):
            ask()
    # an assignment that nothing checks gets eager attention's masks
    ids = torch.arange(5, 17)[None]
    expected = eager(ids).logits
    eager.config._attn_implementation = "decayattn"
    assert torch.equal(eager(ids).logits, expected)


def test_parts_of_a_model_have_their_own_attention(tmp_path):
    kind = transformers.LlavaForConditionalGeneration
    config = sweep_architectures.small_config(kind.config_class, {})
    theirs = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.arange(5, 17)[None]
    for asked in ("decayattn", {"text_config": "decayattn", "vision_config": "sdpa"}):
        for model in (kind.from_pretrained(tmp_path, attn_implementation=asked), copy.deepcopy(theirs)):
            model.set_attn_implementation(asked)
            text, vision = model.config.text_config, model.config.vision_config
            assert text._attn_implementation == "decayattn"
            assert vision._attn_implementation == ("decayattn" if asked == "decayattn" else "sdpa")
            assert torch.allclose(model.eval()(ids).logits, theirs(ids).logits, atol=1e-5)


def test_support_survives_copies_and_subclasses(monkeypatch):
    """Masks of padding alone, not complete ones; of a class without a file, too, as a notebook defines it. A class
    without flash attention makes the masks of its config complete, in other models, too."""
    monkeypatch.setattr(attention_interface, "_DESCRIBES_PADDING", {})
    ids, masks = torch.randint(1, 64, (2, 12)), []

    def attention(module, query, key, value, attention_mask, **options):
        masks.append(attention_mask)
        return attention_interface.attention(module, query, key, value, attention_mask, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "decayattn", attention)
    _, model = pair()
    monkeypatch.setitem(sys.modules, "no_file", types.ModuleType("no_file"))
    bases, config = (transformers.LlamaForCausalLM,), transformers.LlamaConfig(**SIZES)
    defined = type("Defined", bases, {"__module__": "no_file"})
    for one in (
        model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
        defined._from_config(copy.deepcopy(config), attn_implementation="decayattn"),
    ):
        one(ids, attention_mask=padding("left"))
        one(ids)
    assert {mask.shape for mask in masks} == {(2, 1, 1, 12)}
    without_flash = type("Defined", bases, {"__module__": "no_file", "_supports_flash_attn": False})
    for one in (without_flash._from_config(config, attn_implementation="decayattn"), model):
        one(ids)
        assert masks[-1].shape == (2, 1, 12, 12)


def test_attention_takes_masks_of_pairs_and_position_bias():
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    bias, visible = torch.randn(1, 4, 6, 6, requires_grad=True), torch.rand(2, 1, 6, 6) < 0.7
    visible[..., 0] = True
    added = torch.zeros(2, 1, 6, 6).masked_fill(~visible, torch.finfo().min)
    for mask, given in ((visible, bias), (added, bias), (None, bias), (visible, None)):
        seen = torch.ones(6, 6).tril().bool() if mask is None else visible
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen if given is None else bias.masked_fill(~seen, -torch.inf), enable_gqa=True
        ).transpose(1, 2)
        found = attention_interface.attention(torch.nn.Module(), q, k, v, mask, position_bias=given)[0]
        assert torch.allclose(found, expected, atol=1e-5)
        if given is not None:
            gradients = [torch.autograd.grad(x.square().sum(), bias)[0] for x in (found, expected)]
            assert torch.allclose(*gradients, atol=1e-4)
    with pytest.raises(ValueError, match="bias: "):  # a mask of the new tokens alone, over a cache
        attention_interface.attention(torch.nn.Module(), q[:, :, 3:], k, v, visible[..., 3:, 3:])


# Packed sequences, caches, compiled code


@pytest.mark.parametrize("positions", [
    [*range(6), *range(100, 106)], [2 * i for i in range(12)], [0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 5, 6],
    [5, 6, 7, 3, 4, 5, 6, 7, 8, 9, 10, 11],
])
def test_positions_that_jump_do_not_cut_sequences(positions):
    """PoSE, interpolation, one position for an image, going back, and positions in three dimensions."""
    ids, positions = torch.randint(1, 64, (1, 12)), torch.tensor([positions])
    theirs, ours = pair()
    options = dict(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    if int(positions[0, 0]) == int(positions.min()):
        assert torch.allclose(ours(**options).logits, theirs(**options).logits, atol=1e-5)
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    plain, multimodal = (
        attention_interface.attention(torch.nn.Module(), q, k, v, None, position_ids=given)[0]
        for given in (None, positions.expand(3, 1, 12))
    )
    assert torch.equal(multimodal, plain)


def test_sequences_start_at_the_smallest_position():
    """Starts as in transformers' flash attention; the same by cu_seq_lens, also over rows of a batch."""
    q, k, v = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    attend = functools.partial(attention_interface.attention, torch.nn.Module())
    for positions, offsets in (
        ([2, 4, 6, 2, 7, 9, 2, 2, 3, 3, 5, 6], [0, 3, 6, 7, 12]), ([*range(5), *range(7)], [0, 5, 12]),
    ):
        starts = torch.tensor(offsets, dtype=torch.int32)
        longest = starts.diff().max()  # a tensor, as transformers computes it
        for causal in (True, False):
            expected = attend(
                q, k, v, None, is_causal=causal, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest,
                max_length_k=longest,
            )[0]
            parts = [
                attend(*(x[:, :, begin:end] for x in (q, k, v)), None, is_causal=causal)[0]
                for begin, end in itertools.pairwise(offsets)
            ]
            assert torch.allclose(expected, torch.cat(parts, 1), atol=1e-6)
            found = attend(q, k, v, None, is_causal=causal, position_ids=torch.tensor([positions]))[0]
            assert torch.allclose(found, expected, atol=1e-6)
            twice = torch.cat([starts, starts[1:] + 12])
            rows = attend(*(torch.cat([x, x]) for x in (q, k, v)), None, is_causal=causal, cu_seq_lens_q=twice)[0]
            assert torch.allclose(rows, torch.cat([expected, expected]), atol=1e-6)


@pytest.mark.parametrize(("layers", "padded"), [((1,), False), ((1,), True), ((0,), True), ((0, 1), True)])
def test_layers_that_ignore_the_cache_raise(layers, padded):
    _, model = pair()
    for layer in layers:
        own = model.model.layers[layer].self_attn
        own.forward = lambda *x, past_key_values=None, cache=None, forward=own.forward, **o: forward(*x, **o)
    ids = torch.randint(4, 64, (2, 12))
    mask = padding("left") if padded else torch.ones_like(ids)
    with pytest.raises(ValueError, match="ignores the cache needs use_cache=False"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=False)


@pytest.mark.parametrize(("kind", "batch", "side"), [
    ("llama", 1, "ones"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("llama", 1, None), ("llama", 2, "left"), ("mistral", 2, "ones"), ("bert", 1, "left"),
    )),
])
def test_compiled_models_have_one_graph(kind, batch, side):
    _, model = pair(kind)
    ids = torch.randint(1, 64, (batch, 12))
    options = {} if kind == "bert" else {"position_ids": torch.arange(12)[None].expand(batch, -1), "use_cache": False}
    if side is not None:
        options["attention_mask"] = padding(side)[:batch] if side == "left" else torch.ones_like(ids)
    if side == "ones" and kind == "llama":  # packed
        options["position_ids"] = torch.tensor([[*range(5), *range(7)]])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found, expected = (one(ids, **options).logits for one in (compiled, model))
    assert torch.allclose(found, expected, atol=1e-5)
    found.square().sum().backward()


class Synchronisations(TorchDispatchMode):
    """Number of times that the host reads a tensor's values, where a GPU would be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("side", [None, "ones", "left"])
def test_forwards_synchronise_at_most_once(batch, side):
    _, model = pair()
    ids = torch.randint(1, 64, (batch, 12))
    mask = {None: None, "ones": torch.ones_like(ids), "left": padding("left")[:batch]}[side]
    options = {} if mask is None else {"position_ids": torch.arange(12)[None].expand(batch, -1)}
    model(ids)  # what happens once per process
    with torch.no_grad(), Synchronisations() as found:
        model(ids, attention_mask=mask, **options)
    assert found.count <= 1


# Trainer


def train(folder: str, options: dict) -> list[float]:
    """Losses of a few steps of the causal language model, of which every process has its share of the batch."""
    torch.manual_seed(0)
    config = integration.DecayConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, decay="scalar", sink=True,
        backend="reference" if options["use_cpu"] else "auto",
    )
    model = integration.DecayForCausalLM(config)
    ids = torch.arange(16 * 32).reshape(32, 16) * 7 % 64
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=4 // world, max_steps=4, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_two_processes_of_trainer_learn_as_one(ranks, tmp_path):
    """On GPUs by FSDP2."""
    pytest.importorskip("accelerate")
    options = {"fsdp": "full_shard auto_wrap", "use_cpu": False}
    options |= {"fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["DecayBlock"]}}
    options = {"use_cpu": True} if ranks.device == "cpu" else options
    alone = train(str(tmp_path), {"use_cpu": True})
    assert alone[-1] < alone[0] - 0.2
    for losses in ranks(train, str(tmp_path), options):
        assert losses == pytest.approx(alone, abs=1e-3)
