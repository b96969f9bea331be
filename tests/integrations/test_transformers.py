"""The language model for transformers: a plain formula, padding, transformers' own generation, and checkpoints."""

import copy
import inspect
import math
import re

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import safetensors.torch
import transformers
from cached_layers import by_hand
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from decayattn.integrations.transformers import DECAYS, DecayConfig, DecayForCausalLM, DecayModel, DecayModelCache
from decayattn.nn import DecayFlashAttention, ScalarDecay

VOCAB, LAYERS, HEADS = 50, 2, 4
RATES = (-0.7, -0.1, -0.02, 0.01)  # of the heads, where they are the user's own
LEFT_PADDING = (3, 0, 5)
# what this release of transformers calls a model's cache
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"
TOKENS = 9


def build(decay="scalar", *, dtype=torch.float64, **options):
    """A model with all parameters off their start, those of decays too."""
    torch.manual_seed(0)
    if decay.startswith("constant"):
        options.setdefault("log_decay", RATES)
    config = DecayConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=48, decay=decay, initializer_range=0.3, **options,
    )
    model = DecayForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def random_ids(tokens=TOKENS, seed=1):
    return torch.randint(1, VOCAB, (len(LEFT_PADDING), tokens), generator=torch.Generator().manual_seed(seed))


def left_padded():
    ids = random_ids()
    return ids, (torch.arange(TOKENS) >= torch.tensor(LEFT_PADDING)[:, None]).long()


def holes():
    """Padding in front, behind and in between."""
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1, 0, 1]])
    return random_ids(), mask


def generate(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    if "cache" in options:
        options[CACHE] = options.pop("cache")
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


def cache_of(output):
    return getattr(output, CACHE)


def plain_logits(model, row):
    """One sequence (T,) → (T, vocab_size), from the weights and the layers' formula."""
    weights = model.state_dict()

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt() * weights[name]

    x = weights["model.embed_tokens.weight"][row]
    for index, block in enumerate(model.model.layers[: model.config.num_hidden_layers]):
        prefix = f"model.layers.{index}."
        x = x + by_hand(block.self_attn, norm(x, prefix + "input_layernorm.weight"))
        y = norm(x, prefix + "post_attention_layernorm.weight")
        gate, up = (y @ weights[prefix + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[prefix + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


ALL_OPTIONS = {"qk_norm": True, "output_gate": True, "head_dim": 6, "window_size": (3, 0), "sink": True}


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("decay", DECAYS)
def test_logits_equal_a_plain_stack(decay, options):
    model, ids = build(decay, **options), random_ids()
    logits = model(ids).logits
    torch.testing.assert_close(logits, torch.stack([plain_logits(model, row) for row in ids]))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("batch", [left_padded, holes])
@pytest.mark.parametrize("decay", DECAYS)
def test_padded_rows_give_logits_of_their_tokens(decay, batch, use_cache):
    model, (ids, mask) = build(decay, window_size=(4, 0), sink=True), batch()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, use_cache=use_cache).logits
        for row, real, got in zip(ids, mask.bool(), logits, strict=True):
            torch.testing.assert_close(got[real], plain_logits(model, row[real]))
            assert (got[~real] == 0).all()  # so that they add nothing to gradients


def test_model_ignores_embeddings_at_padding():
    model, (ids, mask) = build(), holes()
    parameters, results = [p for n, p in model.named_parameters() if "embed_tokens" not in n], []
    for value in (0.0, math.nan):
        embeds = model.model.embed_tokens(ids).detach().masked_fill(mask[..., None] == 0, value).requires_grad_()
        logits = model(inputs_embeds=embeds, attention_mask=mask).logits
        results.append([logits, *torch.autograd.grad(logits.square().sum(), [embeds, *parameters])])
    assert all(map(torch.equal, *results))


def test_loss_is_the_shifted_cross_entropy():
    model, ids = build(), random_ids()
    labels = ids.clone()
    labels[0, 4:] = -100
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=7).loss * 7, expected * 19)
    assert model(ids, labels=labels, return_dict=False)[0] == out.loss


def test_logits_to_keep_and_hidden_states():
    model, (ids, mask) = build(), left_padded()
    whole = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(whole.hidden_states) == LAYERS + 1
    real = mask.bool()
    assert torch.equal(whole.hidden_states[0][real], model.model.embed_tokens(ids)[real])
    assert torch.equal(model.lm_head(whole.hidden_states[-1]), whole.logits)
    assert torch.equal(model(ids, attention_mask=mask, logits_to_keep=2).logits, whole.logits[:, -2:])
    kept = torch.tensor([1, 7])
    assert torch.equal(model(ids, attention_mask=mask, logits_to_keep=kept).logits, whole.logits[:, kept])
    embedded = model(inputs_embeds=model.model.embed_tokens(ids), attention_mask=mask)
    assert torch.equal(embedded.logits, whole.logits)
    assert embedded.hidden_states is None


@pytest.mark.parametrize("options", [{}, {"window_size": (2, 0), "sink": True}], ids=["plain", "window"])
@pytest.mark.parametrize("decay", DECAYS)
def test_left_padded_batch_generates_as_single_prompts(decay, options):
    model, (ids, mask) = build(decay, **options), left_padded()
    together = generate(model, ids, mask)
    assert len(together.unique()) > 5  # else the prompts would not matter
    assert torch.equal(generate(model, ids, mask, use_cache=False), together)
    for row, padding, tokens in zip(ids, LEFT_PADDING, together, strict=True):
        text = torch.cat([row[padding:], tokens])
        assert torch.equal(plain_logits(model, text)[-len(tokens) - 1 : -1].argmax(-1), tokens)


LENGTHS = (4, 1, 1, 3)


def packed(which):
    """Output of DataCollatorWithFlattening for rows of LENGTHS, and the rows."""
    rows = list(random_ids(seed=7).flatten().split([*LENGTHS, 27 - sum(LENGTHS)]))[: len(LENGTHS)]
    collator = transformers.DataCollatorWithFlattening(
        return_position_ids=which != "lengths", return_flash_attn_kwargs=which != "positions",
        return_seq_idx=which == "all",
    )
    return collator([{"input_ids": row.tolist()} for row in rows]), rows


@pytest.mark.parametrize("which", ["lengths", "positions", "all"])
@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences_give_logits_of_each_alone(decay, which):
    model, (batch, rows) = build(decay, window_size=(2, 0), sink=True), packed(which)
    out = model(**batch)
    alone = [model(row[None]).logits[0] for row in rows]
    torch.testing.assert_close(out.logits[0], torch.cat(alone))
    predictions = torch.cat([logits[:-1] for logits in alone])
    torch.testing.assert_close(out.loss, F.cross_entropy(predictions.float(), torch.cat([row[1:] for row in rows])))
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(torch.cat(alone).square().sum(), parameters)
    torch.testing.assert_close(torch.autograd.grad(out.logits.square().sum(), parameters), wanted)
    with torch.no_grad():
        assert cache_of(model(**batch)) is None


@pytest.mark.parametrize("positions", [[3, 4, 5, 0, 1, 2, 3], [-1, 0, 1, -1, 0, 1, 2], [1, 2, 3, 1, 2, 3, 4]])
def test_smallest_position_begins_a_sequence(positions):
    model, ids = build(), random_ids(tokens=7)[:1]
    out = model(ids, position_ids=torch.tensor([positions])).logits
    torch.testing.assert_close(out, torch.cat([model(part).logits for part in ids.split([3, 4], 1)], 1))


def test_packed_lengths_come_from_transformers():
    """Offsets and 0-d lengths of transformers' own function, which its flash attention takes."""
    model, (batch, _) = build(), packed("positions")
    offsets, lengths = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    for longest in (lengths, tuple(map(torch.as_tensor, lengths)), tuple(map(int, lengths))):
        given = dict(zip(names, (*offsets, *longest), strict=True))
        assert torch.equal(model(batch["input_ids"], **given).logits, model(**batch).logits)
    with pytest.raises(TypeError, match="expected an int"):
        model(batch["input_ids"], cu_seq_lens_q=offsets[0], max_length_q=torch.tensor(4.5))


@pytest.mark.parametrize("arguments", [
    {"attention_mask": torch.ones(1, sum(LENGTHS))}, {"use_cache": True}, {"cache": 1},
    {"input_ids": torch.ones(2, sum(LENGTHS), dtype=torch.long)},
    {"cu_seq_lens_q": None, "position_ids": None}, {"cu_seq_lens_q": None, "use_cache": True},
])
def test_model_refuses_impossible_packed_sequences(arguments):
    model, (batch, _) = build(), packed("all")
    del batch["labels"]
    name = "cu_seq_lens_k" if "cu_seq_lens_q" in arguments else "cu_seq_lens_q"
    with pytest.raises(ValueError, match=f"{name}: expected one row"), torch.no_grad():
        model(**batch | arguments)


RIGHT_PADDED = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, left_padded()[1][:, -5:], RIGHT_PADDED], ids=["full", "left", "right"])
def test_model_takes_positions_that_count_tokens(mask):
    """Numbers of tokens or of columns, as trainers and `generate` pass them, also after a cache."""
    model, ids = build(), random_ids(tokens=6)
    seen = torch.ones_like(ids) if mask is None else F.pad(mask, (0, 1), value=1)
    by_token = (seen.cumsum(1) - 1).masked_fill(seen == 0, 7)
    masks = [None, None] if mask is None else [mask, seen]
    for positions in (by_token, torch.arange(6).expand(3, -1), torch.arange(6, dtype=torch.int32)[None]):
        cache = DecayModelCache(model.config)
        for columns, columns_mask in zip((slice(0, 5), slice(5, 6)), masks, strict=True):
            given = {"input_ids": ids[:, columns], "attention_mask": columns_mask, "cache": cache}
            wanted = model(**{**given, "cache": copy.deepcopy(cache)}).logits
            assert torch.equal(model(**given, position_ids=positions[:, columns]).logits, wanted)
    for row in (3 + torch.arange(6)[None], torch.zeros(1, 0, dtype=torch.long)):
        one = ids[:1, : row.shape[1]]
        for use_cache in (None, True):  # neither is packed
            out = model(one, position_ids=row, use_cache=use_cache)
            assert torch.equal(out.logits, model(one, use_cache=use_cache).logits)
            assert cache_of(out).get_seq_length() == row.shape[1]
    assert torch.equal(generate(model, ids, position_ids=torch.arange(6).expand(3, -1)), generate(model, ids))


JUMP, RESTART = torch.tensor([[0, 1, 2, 5, 6]]), torch.tensor([[0, 1, 2, 0, 1]])


@torch.no_grad()
@pytest.mark.parametrize("arguments", [
    {"position_ids": JUMP}, {"position_ids": 2 * torch.arange(5)[None]},
    {"position_ids": RESTART, "use_cache": True}, {"position_ids": RESTART, "attention_mask": torch.ones(1, 5)},
    {"position_ids": torch.arange(5)[None], "rows": 2, "attention_mask": torch.tensor([[1, 1, 0, 1, 1]] * 2)},
    {"position_ids": torch.arange(100, 105)[None], "cached": 3},
    {"position_ids": torch.arange(5)[None], "cached": 3},
])
def test_model_refuses_positions_that_jump(arguments):
    """A model without positions cannot follow them; only restarts in one row mean packed sequences."""
    model, rows = build(), arguments.pop("rows", 1)
    ids, cached = random_ids()[:rows], arguments.pop("cached", 0)
    if cached:
        arguments["cache"] = cache_of(model(ids[:, :cached]))
    with pytest.raises(ValueError, match="position_ids: expected positions that count"):
        model(ids[:, :5], **arguments)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_model_takes_masks_of_every_dtype(dtype):
    model, (ids, mask) = build(), holes()
    assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits, model(ids, attention_mask=mask).logits)
    nothing = torch.ones(3, 0, dtype=dtype)
    assert model(ids[:, :0], attention_mask=nothing).logits.shape == (3, 0, VOCAB)


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(("mask", "remedy"), [
    ([1, 1, 2, 2, 3], "documents are kept apart"),
    ([0, 0, -1, 0, 0], "documents are kept apart"),
    ([LOWEST, LOWEST, 0.0, 0.0, 0.0], "numbers to add to scores"),
    ([0.0, 0.0, 0.0, 0.0, 0.0], "numbers to add to scores"),
    ([1.0, math.nan, 1.0, 1.0, 1.0], "numbers to add to scores"),
])
def test_model_refuses_masks_of_another_meaning(mask, remedy):
    model, ids = build(), random_ids()[:2, :5]
    rows = torch.tensor([[1] * 5, mask])
    for part in (model, model.model):
        with pytest.raises(ValueError, match=f"attention_mask: expected 1 or True for tokens .*{remedy}"):
            part(ids, attention_mask=rows)


@torch.no_grad()
def test_model_refuses_masks_that_contradict_the_cache():
    """Tokens cannot be masked after they were cached, and padding cannot be seen."""
    model, (ids, mask) = build(), left_padded()
    seen = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
    cache = cache_of(model(ids, attention_mask=mask))
    for wrong in (torch.ones_like(seen), seen * (torch.arange(TOKENS + 1) != 6), seen * 2, seen[:, -1:]):
        with pytest.raises(ValueError, match="attention_mask: expected"):
            model(ids[:, :1], attention_mask=wrong, cache=cache)
    model(ids[:, :1], attention_mask=seen, cache=cache)
    assert cache.get_seq_length() == TOKENS + 1


@pytest.mark.parametrize(("order", "copied", "layers"), [
    ((1,), False, 1), ((0, 1, 1, 0, 1), True, 5), ((0, 1, 0), False, 3), ((0, 1), False, 1),
])
def test_removed_and_repeated_layers_have_own_caches(order, copied, layers):
    """Layers are those that model.layers has, up to config.num_hidden_layers; shared ones see their own tokens."""
    model, (ids, mask) = build(sink=True), left_padded()
    blocks = model.model.layers
    model.model.layers = torch.nn.ModuleList(copy.deepcopy(blocks[i]) if copied else blocks[i] for i in order)
    tokens = []
    for model.config.num_hidden_layers in (layers, min(layers, len(order))):
        logits = model(ids, attention_mask=mask).logits
        tokens.append(generate(model, ids, mask))
        assert torch.equal(tokens[-1], generate(model, ids, mask, use_cache=False))
        cache = DecayModelCache(model.config)
        with torch.no_grad():
            parts = [model(ids[:, part], attention_mask=mask[:, : part.stop], cache=cache).logits for part in PARTS]
        torch.testing.assert_close(torch.cat(parts, 1), logits)
        assert len(cache) == len(cache.layers) == min(layers, len(order))
    for row, real, got in zip(ids, mask.bool(), logits, strict=True):
        torch.testing.assert_close(got[real], plain_logits(model, row[real]))
    assert torch.equal(tokens[0], tokens[-1])


PARTS = (slice(0, 6), slice(6, 7), slice(7, TOKENS))


@pytest.mark.parametrize("assistant", [{"assistant_early_exit": 1}, {"assistant_model": build("alibi")}])
def test_assisted_generation_gives_the_same_tokens(assistant):
    model, ids = build(), random_ids()[:1]
    assert torch.equal(generate(model, ids, **assistant), generate(model, ids))
    assert model.config.num_hidden_layers == LAYERS


@torch.no_grad()
def test_model_refuses_caches_of_other_layers():
    model, ids = build(), random_ids()
    cache = cache_of(model(ids))
    model.config.num_hidden_layers = 1
    with pytest.raises(ValueError, match=f"{CACHE}: expected one of the 1 layers that the model runs, got .* by 2"):
        model(ids[:, :1], cache=cache)
    cache.reset()
    again = model(ids, cache=cache)
    assert torch.equal(again.logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"window_size": (2, 0)}, {"qk_norm": True}], ids=["window", "evicted"])
def test_dropped_tokens_keep_their_columns(options):
    """Tokens that leave a layer's cache stay in the mask, the positions and the length that transformers knows."""
    model = build(**options)
    for block in model.model.layers:
        block.self_attn.decay.weight.zero_()
        block.self_attn.decay.bias.fill_(0.5)  # half-lives of 1.5 tokens
    ids = torch.randint(1, VOCAB, (2, 300), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(300) >= torch.tensor([0, 40])[:, None]
    positions = mask.cumsum(1) - 1
    cache, wanted = DecayModelCache(model.config), model(ids, attention_mask=mask, use_cache=False).logits
    for part in (slice(0, 290), slice(290, 299), slice(295, 299), slice(299, 300)):
        cache.crop(min(part.start - cache.get_seq_length(), 0))
        seen = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
        torch.testing.assert_close(model(ids[:, part], **seen, cache=cache).logits, wanted[:, part])
        assert cache.get_seq_length() == part.stop
        if "qk_norm" in options:
            for layer, block in zip(cache.layers, model.model.layers, strict=True):
                layer.cache.evict(1e-12, block.self_attn.score_bound())
                assert layer.cache.longest < 260


@pytest.mark.parametrize(("decay", "options"), [
    ("scalar", {"num_beams": 3}), ("retnet-learned", {"do_sample": True, "num_return_sequences": 3}),
    ("scalar", {"num_beams": 2, "num_return_sequences": 2, "eos_token_id": 7, "repetition_penalty": 1.3}),
], ids=["beams", "samples", "two-beams"])
def test_generation_is_equal_with_and_without_a_cache(decay, options):
    model, (ids, mask) = build(decay), left_padded()
    tokens = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        tokens.append(generate(model, ids, mask, use_cache=use_cache, **options))
    assert torch.equal(*tokens)


def test_cache_continues_copies_and_repeats():
    model, (ids, mask) = build(), left_padded()
    size = "batch_size" if hasattr(transformers.Cache, "batch_size") else "max_batch_size"
    cache = DecayModelCache(model.config)
    assert not cache.is_initialized
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
    assert cache.is_initialized
    more = random_ids(tokens=4, seed=5)
    text, seen = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    expected = generate(model, text, seen)
    assert torch.equal(generate(model, text, seen, cache=copy.deepcopy(cache)), expected)
    assert cache.get_seq_length() == TOKENS

    twice = copy.deepcopy(cache)
    twice.batch_repeat_interleave(2)
    assert (getattr(cache, size), getattr(twice, size)) == (3, 6)
    repeated = [x.repeat_interleave(2, 0) for x in (text, seen)]
    assert torch.equal(generate(model, *repeated, cache=twice), expected.repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([2, 0]))
    some = generate(model, text[[2, 0]], seen[[2, 0]], cache=cache)
    assert torch.equal(some, expected[[2, 0]])
    cache.reset()
    assert (cache.get_seq_length(), cache.is_initialized) == (0, False)
    assert torch.equal(generate(model, text, seen, cache=cache), expected)


@pytest.mark.parametrize(("max_length", "sizes"), [
    (math.inf, [6, 6, 6, 20, 20, 42]),
    (1000, [6, 6, 6, 20, 20, 42]),  # not all at once
    (12, [6, 6, 6, 12, 12, 42]),
    (4, [4, 4, 10, 10, 22, 22]),
])
def test_growing_cache_gives_the_logits_of_the_sequence(max_length, sizes):
    model, ids = build(), random_ids(tokens=21)
    cache, logits, got = DecayModelCache(model.config, max_length), [], []
    with torch.no_grad():
        for piece in ids.split([3, 1, 1, 5, 1, 10], dim=1):
            out = model(piece, cache=cache)
            assert cache_of(out) is cache
            logits.append(out.logits)
            got.append(cache.layers[1].cache.max_length)
        torch.testing.assert_close(torch.cat(logits, 1), model(ids, use_cache=False).logits)
    assert cache.get_seq_length() == 21
    assert got == sizes


def test_generate_allocates_its_cache_once():
    """Generation passes no positions, which it would count at each step. Trainer keeps columns that forward names."""
    model, (ids, mask), given = build(), left_padded(), []
    assert "position_ids" in inspect.signature(model.forward).parameters
    model.model.register_forward_pre_hook(lambda _, __, named: given.append(named["position_ids"]), with_kwargs=True)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, return_dict_in_generate=True
    )
    assert given == [None] * 6
    assert isinstance(cache_of(out), DecayModelCache)
    for layer in cache_of(out).layers:
        assert layer.cache.max_length == layer.cache.longest == TOKENS + 5
        assert layer.cache.lengths.tolist() == [TOKENS + 5 - padding for padding in LEFT_PADDING]


def test_crop_removes_the_last_tokens():
    model, (ids, mask) = build(), left_padded()  # one entry has four tokens, and none is left of it
    cache = DecayModelCache(model.config)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, cache=cache).logits[:, -4:]
        for crop in (-4, torch.tensor(-4), TOKENS - 4):  # tokens to remove; tokens to keep
            cache.crop(crop)
            assert cache.get_seq_length() == TOKENS - 4
            assert type(cache.get_seq_length()) is int
            again = model(ids[:, -4:], attention_mask=mask, cache=cache).logits
            torch.testing.assert_close(again, expected)
        cache.crop(0)
        assert cache.get_seq_length() == TOKENS


@torch.no_grad()
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_crop_per_entry_keeps_the_columns(kind):
    model, (ids, mask) = build(), left_padded()
    cache, (drafts, last) = DecayModelCache(model.config), random_ids().split([TOKENS - 1, 1], 1)
    model(ids, attention_mask=mask, cache=cache)
    for step in range(6):
        mask = torch.cat([mask, torch.ones_like(drafts)], 1)
        model(drafts, attention_mask=mask, cache=cache)
        removed = [0 if b == step % len(ids) else TOKENS - 1 - b for b in range(len(ids))]
        cache.crop(kind([-count for count in removed]))
        for row, count in zip(mask, removed, strict=True):
            row[len(row) - count :] = 0
        ids = torch.cat([ids, drafts], 1)
        assert cache.get_seq_length() == ids.shape[1]
        assert all(layer.cache.max_length <= 2 * (layer.cache.lengths.max() + TOKENS) for layer in cache.layers)
    for more in ({}, {"attention_mask": torch.cat([mask, torch.ones_like(last)], 1)}):
        found = model(last, cache=cache, **more).logits[:, 0]
        for b, row in enumerate(found):
            text = torch.cat([ids[b][mask[b] == 1], last[b]])
            torch.testing.assert_close(row, model(text[None], use_cache=False).logits[0, -1])
        cache.crop(-1)
    with pytest.raises(ValueError, match="tokens: expected 0 to the"):
        cache.crop(kind([1] * len(ids)))


@torch.no_grad()
def test_model_takes_calls_without_tokens_or_rows():
    """Calls return empty shapes, cached by default; a cache that began without tokens takes later ones."""
    model, ids = build(), random_ids()
    assert model(ids[:0]).logits.shape == (0, TOKENS, VOCAB)
    empty = model(ids[:, :0])
    assert empty.logits.shape == (len(ids), 0, VOCAB)
    found = model(ids, cache=cache_of(empty)).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_model_starts_caches_without_gradients_only():
    model, ids = build(), random_ids()
    assert cache_of(model(ids)) is None
    with torch.no_grad():
        assert cache_of(model(ids)).get_seq_length() == TOKENS
        assert cache_of(model(ids, use_cache=False)) is None
    for _ in range(2):  # recomputed layers, too: transformers would drop their cache with a warning
        with pytest.raises(RuntimeError, match="no_grad"):
            model(ids, use_cache=True)
        model.train().gradient_checkpointing_enable()
    with torch.no_grad():
        assert cache_of(model(ids)).get_seq_length() == TOKENS


@pytest.mark.parametrize(("decay", "tied"), [(decay, number % 2 == 0) for number, decay in enumerate(DECAYS)])
def test_saved_model_loads_with_its_configuration(decay, tied, tmp_path):
    model = build(
        decay, dtype=torch.float32, tie_word_embeddings=tied, qk_norm=True, eos_token_id=4, window_size=(4, 0),
        sink=True, initial_half_lives=(2, 64) if decay == "scalar" else None,
    )
    ids = random_ids()
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in safetensors.torch.load_file(tmp_path / "model.safetensors")) != tied

    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config) is DecayConfig
    for name in ("decay", "log_decay", "eos_token_id", "window_size", "sink", "initial_half_lives"):
        assert getattr(config, name) == getattr(model.config, name), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is DecayForCausalLM
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base) is DecayModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize(("decay", "dtype"), [
    *((decay, torch.bfloat16) for decay in DECAYS), ("scalar", torch.float16),
])
def test_decay_stays_float32_in_a_16_bit_model(decay, dtype, tmp_path):
    model = build(decay, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=dtype)
    before = model.state_dict()
    for state in (loaded.state_dict(), again.state_dict()):
        assert state.keys() == before.keys()
        for name, value in state.items():
            kept = "decay" in name
            assert value.dtype == (torch.float32 if kept else dtype), name
            assert torch.equal(value, before[name] if kept else before[name].to(dtype)), name
    tokens = generate(again, *left_padded())
    assert torch.equal(tokens, generate(loaded, *left_padded()))


@pytest.mark.parametrize("decay", ["scalar", "alibi", "retnet-learned", "none"])
def test_tensors_missing_in_a_checkpoint_start_as_new(decay, tmp_path):
    model = build(decay, dtype=torch.float32, sink=True)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    saved = safetensors.torch.load_file(path)
    endings = ("decay.bias", "decay.log_decay", "decay.sign", "norm.weight", "sink")
    lost = {name for name in saved if name.endswith(endings)}
    safetensors.torch.save_file({n: x for n, x in saved.items() if n not in lost}, path, metadata={"format": "pt"})
    fresh = DecayForCausalLM(model.config).state_dict()
    for name, value in DecayForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(value, (fresh if name in lost else saved)[name]), name


class OwnModel(transformers.PreTrainedModel):
    """A user's own model, with values of its own for a new layer."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        if config.early:
            self.post_init()
        self.layer = DecayFlashAttention(16, 4, **config.layer)
        for name, value in self.layer.state_dict().items():
            if re.search("decay|sink|log_scale", name):
                value.add_(0.5)
        if not config.early:
            self.post_init()


@pytest.mark.parametrize("kind", ["scalar", "alibi", "alibi-learned", "none"])
@pytest.mark.parametrize("early", [False, True], ids=["", "layer after post_init"])
def test_own_models_start_tensors_missing_in_a_checkpoint(early, kind, tmp_path):
    layer = dict(decay=kind, sink=True, scale="learned")
    model = OwnModel(transformers.PretrainedConfig(layer=layer, early=early))
    fresh = DecayFlashAttention(16, 4, **layer)
    expected = {name: x for name, x in fresh.state_dict().items() if "_proj" not in name}
    saved = model.layer.state_dict()
    assert not any(torch.equal(saved[name], x) for name, x in expected.items())  # a new model keeps its own values
    kept = {name: x for name, x in saved.items() if name in ("decay.weight", "decay.sign", "log_scale")}
    model.save_pretrained(tmp_path, state_dict={f"layer.{name}": x for name, x in kept.items()})
    loaded = OwnModel.from_pretrained(tmp_path).layer.state_dict()
    for name, value in (expected | kept).items():
        assert torch.equal(loaded[name], value), name


def test_new_model_starts_as_configured():
    torch.manual_seed(0)
    config = DecayConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert config.intermediate_size == 192  # a multiple of 64 at 8/3
    start = ScalarDecay(64, 4)
    for name, value in model.state_dict().items():
        if ".decay." in name:
            assert torch.equal(value, start.state_dict()[name.rsplit(".", 1)[1]])
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value))
        else:
            # the standard deviation of n samples is itself off by 1/√(2n) of it
            assert abs(value.std() / 0.02 - 1) < 5 / math.sqrt(2 * value.numel()), name


@pytest.mark.parametrize(("decay", "options"), [
    *((decay, {"log_decay": kind(RATES)}) for decay in ("constant", "constant-learned")
      for kind in (list, torch.tensor)),
    ("scalar", {"initial_half_lives": [2, 4096]}), ("scalar", {"initial_half_lives": [9.0, 2.0, 9.0, 5.0]}),
])
def test_decays_start_as_configured(decay, options, tmp_path):
    """New and loaded models start there; learned rates do, too."""
    config = DecayConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, decay=decay, **options
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    loaded, x = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), torch.zeros(64)
    assert loaded.config.log_decay == config.log_decay
    expected = ScalarDecay(64, 4, **options)(x) if decay == "scalar" else torch.tensor(RATES)
    for block in (*model.model.layers, *loaded.model.layers):
        torch.testing.assert_close(block.self_attn.decay(x), expected)
    learned = {name for name, _ in model.named_parameters() if ".decay." in name}
    assert len(learned) == {"constant": 0, "constant-learned": 2, "scalar": 4}[decay]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # the name in every release of 5
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_gradient_checkpointing_recomputes_blocks_exactly(kind):
    model, (ids, mask) = build().train(), left_padded()
    batch = packed("all")[0] if kind == "packed" else {"input_ids": ids, "labels": ids}
    batch |= {"attention_mask": mask} if kind == "padded" else {}
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    found = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(calls) == 3


@pytest.mark.parametrize("make", [
    lambda: build("scalar", sink=True, qk_norm=True), lambda: build("alibi-learned", tie_word_embeddings=True),
    lambda: transformers.AutoModelForTokenClassification.from_config(build("retnet-learned", sink=True).config),
    lambda: torch.compile(DecayFlashAttention(16, 4, sink=True, scale="learned"), backend="eager"),
])
def test_trainer_spares_decays_sinks_and_scales(make, tmp_path):
    """Weight decay would pull a gate's bias to 0, a half-life of one token, and a learned rate to -1 per token."""
    model = make()
    arguments = transformers.TrainingArguments(str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, arguments)
    decayed = set(trainer.get_decay_parameter_names(model))
    spared = {n for n, _ in model.named_parameters() if re.search(r"decay|sink|log_scale|norm|bias", n)}
    assert decayed >= dict(model.named_parameters()).keys() - spared
    assert not decayed & spared
    groups = {group["weight_decay"]: group["params"] for group in trainer.create_optimizer().param_groups}
    assert set(groups[0.0]) == {model.get_parameter(name) for name in spared}
    assert len(groups[0.0]) + len(groups[0.1]) == len(list(model.parameters()))


def test_label_smoothing_shifts_the_labels(tmp_path):
    """Trainer shifts them by the name of the model's class; without a shift, a model learns to copy its input."""
    model, ids = build("scalar", dtype=torch.float32), random_ids()
    options = dict(label_smoothing_factor=1e-9, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), **options))
    found = trainer.compute_loss(model, dict(input_ids=ids, labels=ids))
    torch.testing.assert_close(found, model(ids, labels=ids).loss)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("what", ["Sequence", "Token"])
def test_classifiers_learn_from_padded_batches(what, side, tmp_path):
    """On top of a language model's checkpoint."""
    options = {"sink": True, "pad_token_id": 0, "num_labels": 3, "classifier_dropout": 0.0}
    build(dtype=torch.float32, **options).save_pretrained(tmp_path)
    model = getattr(transformers, f"AutoModelFor{what}Classification").from_pretrained(tmp_path)
    assert model.score.weight.std() < 0.5  # initialised, which the checkpoint does not do
    torch.nn.init.normal_(model.score.weight)
    ids = random_ids()
    mask = torch.arange(TOKENS) >= torch.tensor(LEFT_PADDING)[:, None]
    mask = mask if side == "left" else mask.flip(1)
    ids = ids * mask
    of_rows = what == "Sequence"
    labels = torch.tensor([2, 0, 1]) if of_rows else (ids % 3).masked_fill(~mask, -100)
    out = model(ids, attention_mask=mask.long(), labels=labels)
    states = [model.model(row[None, real]).last_hidden_state[0] for row, real in zip(ids, mask, strict=True)]
    if of_rows:
        torch.testing.assert_close(out.logits, model.score(torch.stack([state[-1] for state in states])))
        torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, labels))
    else:
        torch.testing.assert_close(out.logits[mask], model.score(torch.cat(states)))
        torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[mask], labels[mask]))
    rows = [{"input_ids": ids[n], "attention_mask": mask[n], "labels": labels[n]} for n in range(3)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=1e-3, lr_scheduler_type="constant", per_device_train_batch_size=3,
        report_to=[], use_cpu=True, save_strategy="no",
    )
    before = copy.deepcopy(model.state_dict())
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert model(ids, attention_mask=mask.long(), labels=labels).loss < out.loss


IDS = random_ids()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"input_ids": None}, ValueError, "input_ids, inputs_embeds: expected exactly one"),
    ({"input_ids": IDS[0]}, ValueError, r"input_ids: expected \(B, T\), got \(9,\)"),
    ({"attention_mask": [[1] * TOKENS] * 3}, TypeError, r"attention_mask: expected a tensor, got \[\[1"),
    *(({"attention_mask": torch.ones(shape)}, ValueError, r"attention_mask: expected \(B, past \+ T\) = \(3, 9\)")
      for shape in ((3, TOKENS - 1), (2, TOKENS), (3, 1, TOKENS, TOKENS))),
    ({CACHE: transformers.DynamicCache()}, TypeError, f"{CACHE}: expected a DecayModelCache, got a DynamicCache"),
    ({"cu_seq_lens_q": torch.arange(TOKENS)}, ValueError, "cu_seq_lens_q: expected one row"),
    ({"seq_idx": torch.arange(TOKENS)}, ValueError, "seq_idx: expected one row"),
    *(({"position_ids": positions}, ValueError, r"position_ids: expected \(B, T\) = \(3, 9\), got")
      for positions in (torch.arange(TOKENS), torch.arange(TOKENS).expand(2, -1), torch.arange(3)[None])),
    ({"position_ids": torch.zeros(3, TOKENS)}, TypeError, "position_ids: expected an integer tensor"),
    ({"output_attentions": True}, ValueError, "output_attentions: "), ({"is_causal": False}, ValueError, "is_causal: "),
    ({"token_type_ids": torch.zeros_like(IDS)}, ValueError, "token_type_ids: "),
    *(({name: 3}, TypeError, f"{name}: unexpected argument of the model, got 3 of type int")
      for name in ("attention_masks", "head_mask", "window_size")),
])
def test_errors_name_arguments_of_the_model(arguments, error, message):
    model = build()
    for part in (model, model.model):
        with pytest.raises(error, match=message):
            part(**{"input_ids": IDS, **arguments})


def test_errors_name_caches_of_generate():
    model = build()
    with pytest.raises(ValueError, match="cache_implementation: expected None or 'dynamic'"):
        generate(model, IDS, cache_implementation="static")
    with pytest.raises(NotImplementedError, match="DecayFlashAttention"):
        DecayModelCache(model.config).update(IDS, IDS, 0)


@pytest.mark.parametrize(("fields", "error", "message"), [
    ({"num_key_value_heads": 5}, ValueError, "num_key_value_heads: expected a divisor of .*_heads = 12, got 5"),
    ({"backend": "flash"}, ValueError, "backend: expected one of 'auto', 'reference', .* got 'flash'"),
    ({"value_dim": 99}, ValueError, "value_dim: expected no such option: DecayFlashAttention has it"),
    ({"initial_half_lives": (4, 2)}, ValueError, "initial_half_lives: expected two numbers of tokens"),
    ({"initial_half_lives": (2, 4), "decay": "alibi"}, ValueError, "initial_half_lives: expected only with decay="),
    ({"decay": "constant", "log_decay": [-1]}, ValueError, "log_decay: expected num_attention_heads = 12 .* got 1"),
    ({"decay": "constant-learned", "log_decay": [0] * 12}, ValueError, "log_decay: expected no 0 with learned"),
    ({"log_decay": [-1] * 12}, ValueError, "log_decay: expected only with decay='constant' or 'constant-learned'"),
    ({"num_heads": 4}, ValueError, "num_heads: expected no such option"),
    ({"output_attentions": True}, ValueError, "output_attentions: flash attention never has"),
    ({"decay": "forget"}, ValueError, "decay: expected one of scalar"),
    ({"hidden_size": 30, "num_attention_heads": 4}, ValueError, "hidden_size: expected a multiple"),
    *(({name: 2}, TypeError, f"^{name}: no option of DecayConfig; did you mean {meant}\\?")
      for name, meant in (("num_attention_head", "num_attention_heads"), ("sinks", "sink"))),
])
def test_errors_name_fields_of_the_configuration(fields, error, message):
    with pytest.raises(error, match=message):
        DecayConfig(**fields)


OTHER_ARCHITECTURES = {
    "window_size": {"sliding_window": 4096, "use_sliding_window": True}, "no dropout": {"resid_pdrop": 0.1},
    "SwiGLU": {"hidden_act": "gelu", "ffn_dim": 64}, "`decay` gives the order": {"rope_scaling": {"type": "linear"}},
    "num_hidden_layers": {"layer_types": ["full_attention", "sliding_attention"]}, "RMSNorm": {"layer_norm_eps": 1e-5},
    "capped or scaled": {"attn_logit_softcapping": 50.0}, "no biases": {"attention_bias": True},
    "no experts": {"num_local_experts": 8}, "num_key_value_heads": {"n_head": 4, "kv_lora_rank": 8},
    "initial_half_lives": {"half_lives": (4, 64)}, "causal": {"bidirectional": True},
    "DecayFlashAttention": {"add_cross_attention": True},
}


def test_config_refuses_options_of_other_architectures():
    for remedy, options in OTHER_ARCHITECTURES.items():
        for name, value in options.items():
            expected = f"^{name}: expected no option of another architecture, got .*{remedy}"
            with pytest.raises(ValueError, match=expected):
                DecayConfig(**{name: value})


def test_config_keeps_neutral_and_own_options(tmp_path):
    """Neutral values, options of transformers itself, and keys that mean nothing to any model."""
    neutral = {
        "sliding_window": None, "attention_dropout": 0.0, "hidden_act": "silu", "attention_bias": False,
        "layer_types": ["full_attention"] * 12, "num_experts": 0,
    }
    own = {
        "note": "x", "data": {"mix": [0.5, 0.5]}, "lr_decay": 0.1, "auto_map": {"AutoConfig": "a.B"},
        "quantization_config": {"quant_method": "own"}, "loss_type": "ForCausalLM",
    }
    of_transformers = {
        "num_labels": 3, "classifier_dropout": 0.2, "torch_dtype": "bfloat16", "attn_implementation": None,
        "temperature": 0.5, "output_hidden_states": True, "output_router_logits": False, "_any_attention": 1,
    }
    config = DecayConfig(**neutral, **own, **of_transformers)
    for _ in range(2):
        assert own.items() <= config.to_dict().items()
        assert (config.num_labels, config.classifier_dropout, config.dtype) == (3, 0.2, torch.bfloat16)
        config.save_pretrained(tmp_path)
        config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert copy.deepcopy(config).to_dict() == config.to_dict()


def test_model_takes_arguments_of_every_transformers_model():
    """Arguments without effect pass: those of its own tools, and None or False for any known name."""
    model, ids = build(), random_ids()
    expected = model(ids).logits
    names = ("position_ids", "token_type_ids", "output_attentions", "head_mask", "past_key_values", "cache")
    nothing = dict.fromkeys(names)
    harmless = {"output_attentions": False, "output_router_logits": False, "is_causal": True, "return_dict": True}
    for arguments in (nothing, harmless, {"cache_position": torch.arange(TOKENS)}, {"num_items_in_batch": 7}):
        assert torch.equal(model(ids, **arguments).logits, expected)
    assert torch.equal(model.model(ids, **harmless).last_hidden_state, model.model(ids).last_hidden_state)
    model.config.return_dict = False
    assert torch.equal(model(ids)[0], expected)


def test_model_takes_caches_by_the_name_of_any_release():
    """transformers renamed it in 5.24, and programs use both names."""
    model, ids = build(), random_ids()
    with torch.no_grad():
        cache = cache_of(model(ids))
        assert {CACHE}.issuperset(set(model(ids).keys()) - {"logits"})
        expected = model(ids[:, :1], cache=copy.deepcopy(cache))
        again = copy.deepcopy(cache)
        assert torch.equal(model(ids[:, :1], past_key_values=again).logits, expected.logits)
        assert again.get_seq_length() == TOKENS + 1
        for part in (model, model.model):
            with pytest.raises(ValueError, match="cache, past_key_values: expected one of them"):
                part(ids[:, :1], cache=cache, past_key_values=cache)
