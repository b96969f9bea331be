"""A decoder-only language model of DecayFlashAttention layers for Hugging Face transformers.

Importing this module registers the model with transformers' Auto classes, so import it before you load a checkpoint.
`AutoConfig.for_model("decayattn", hidden_size=768, …)` makes a configuration. The import also registers
attn_implementation="decayattn" for ordinary models (attention_interface). In any model with layers of this library,
Trainer gives no weight decay to decays, sinks and learned scales. from_pretrained gives the layer's initial values to
those that a checkpoint lacks. Needs the extra `transformers`.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, Trainer, modeling_layers
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from decayattn import validation
from decayattn.backends import registry
from decayattn.compatibility import refuse_unless
from decayattn.integrations import attention_interface  # noqa: F401, registers it
from decayattn.integrations.gates import add_decay  # noqa: F401, published here
from decayattn.nn import ConstantDecay, DecayCache, DecayFlashAttention, attention
from decayattn.nn.decay import ScalarDecay
from decayattn.nn.training import spared_parameters
from decayattn.problem import BackendName

# the layer's presets, and "constant" with the log_decay of the configuration
DecayPreset = attention.DecayPreset | Literal["constant-learned"]
DECAYS = (*attention.DECAYS, "constant-learned")

# words in names of other models' options, and the equivalent here
_OTHER_ARCHITECTURES = {
    r"sliding|windows?": "window_size=(tokens - 1, 0) is this model's window",
    r"rope|rotary|alibi|pos|positions?|sinusoidal": "the model has no positions; `decay` gives the order",
    r"\w*drop(out)?|bias|experts?|moe|route[rd]?": "the model has no dropout, no biases and no experts",
    r"(?<!grad_)norm|layernorm|ln": "norms are RMSNorm, with rms_norm_eps and qk_norm",
    r"\w*softcap\w*|logits?|multipliers?|scale|scaling": "nothing is capped or scaled",
    r"layers?": "num_hidden_layers is the number of layers, which are alike",
    r"heads|[dnv]_head|head_size|qkv?|q|kv|query": "heads are num_attention_heads, num_key_value_heads and head_dim",
    r"half_li(fe|ves)|forget|forget_gate|fgate|learned_decay|decay_rates?":
        "the decay is `decay`, with log_decay or initial_half_lives",
    r"bidirectional|prefix_lm": "the model is causal",
    r"act|activation|afn|gelu|swiglu|attn|attention|residual|mlp|ffn?|dff|embd|inner|d_model|mamba|ssm|conv":
        "a block is DecayFlashAttention and a SwiGLU, with hidden_size and intermediate_size",
}
# values of such options that hold here, too
_NEUTRAL: tuple[object, ...] = (None, 0, {}, "silu", "swish", "swiglu", "full_attention")
# options that transformers writes into any configuration, or reads in DecayForTokenClassification
_OF_TRANSFORMERS = {"attn_implementation", "experts_implementation", "classifier_dropout", "token_classification_bias"}
_OF_TRANSFORMERS |= {field.name for field in dataclasses.fields(PreTrainedConfig)}
_OF_TRANSFORMERS |= set(transformers.GenerationConfig().to_dict())

# the cache's name as an argument and output of every model: "cache" since transformers 5.24, "past_key_values" before
_CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


class DecayConfig(PreTrainedConfig):
    """Configuration of DecayModel and DecayForCausalLM.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, initializer_range, use_cache,
            tie_word_embeddings and the token ids: as in transformers' other language models.
        intermediate_size: hidden width of the SwiGLU; default 8/3 · hidden_size, up to the next multiple of 64.
        num_key_value_heads: key and value heads, a divisor of num_attention_heads; default num_attention_heads.
        head_dim: default hidden_size / num_attention_heads.
        decay: "scalar", a forget gate per token and head; "alibi", "retnet" or "constant", one constant per head, and
            the same with the suffix "-learned"; "none".
        log_decay: the constants of "constant" and the initial values of "constant-learned", one number per attention
            head as in ConstantDecay, the same in every layer. Natural logarithms, below 0 for a decay.
        initial_half_lives: initial half-lives of a forget gate, in tokens, (shortest, longest) or one number per
            attention head, as in ScalarDecay; only with decay="scalar". Default: that of ScalarDecay.
        qk_norm, output_gate, output_norm, kv_shift, window_size, sink, backend: as in DecayFlashAttention.
        rms_norm_eps: of the model's norms and of output_norm.
        qk_norm_eps: of the norms of queries and keys.
        max_position_embeddings: the intended length of sequences, for other tools; it has no effect here.
        kwargs: transformers' own options, among them num_labels, classifier_dropout (0.1) and token_classification_bias
            (True), and your own keys, which have no effect. Misspelled options raise, and so do options of other
            architectures unless their value changes nothing: None, False, 0, hidden_act="silu".

    Raises:
        TypeError, ValueError: for every bad value, by name.
    """

    model_type = "decayattn"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012, transformers' name and type

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        decay: DecayPreset = "scalar",
        log_decay: Sequence[float] | Tensor | None = None,
        initial_half_lives: Sequence[float] | Tensor | None = None,
        qk_norm: bool | Literal["per_head"] = False,
        output_gate: bool = False,
        output_norm: bool = False,
        kv_shift: bool = False,
        window_size: tuple[int, int] | None = None,
        sink: bool = False,
        rms_norm_eps: float = 1e-6,
        qk_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        backend: BackendName = "auto",
        **kwargs,
    ):
        if decay not in DECAYS:
            raise ValueError(f"decay: expected one of {', '.join(DECAYS)}, got {decay!r}")
        _refuse_other_architectures(kwargs)
        self.vocab_size = validation.check_positive_int("vocab_size", vocab_size)
        self.hidden_size = validation.check_positive_int("hidden_size", hidden_size)
        intermediate_size = 64 * -(-8 * self.hidden_size // 192) if intermediate_size is None else intermediate_size
        self.intermediate_size = validation.check_positive_int("intermediate_size", intermediate_size)
        self.num_hidden_layers = validation.check_positive_int("num_hidden_layers", num_hidden_layers)
        self.num_attention_heads = heads = validation.check_positive_int("num_attention_heads", num_attention_heads)
        self.num_key_value_heads = validation.check_kv_heads(
            "num_key_value_heads", num_key_value_heads, "num_attention_heads", heads
        )
        self.head_dim = validation.check_head_dim(
            "head_dim", head_dim, "hidden_size", self.hidden_size, "num_attention_heads", heads
        )
        self.decay = decay
        self.log_decay = _check_log_decay(log_decay, decay, heads)
        if initial_half_lives is not None:
            if decay != "scalar":
                raise ValueError(f"initial_half_lives: expected only with decay='scalar', got decay={decay!r}")
            initial_half_lives = validation.check_half_lives("initial_half_lives", initial_half_lives, heads)
        self.initial_half_lives = initial_half_lives
        self.qk_norm = attention.check_qk_norm(qk_norm)
        self.output_gate = validation.check_bool("output_gate", output_gate)
        self.output_norm = validation.check_bool("output_norm", output_norm)
        self.kv_shift = validation.check_bool("kv_shift", kv_shift)
        validation.check_window(window_size)
        self.window_size = None if window_size is None else (window_size[0], window_size[1])  # JSON gives a list
        self.sink = validation.check_bool("sink", sink)
        self.rms_norm_eps, self.qk_norm_eps, self.initializer_range = rms_norm_eps, qk_norm_eps, initializer_range
        self.max_position_embeddings, self.use_cache = max_position_embeddings, use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self.backend = registry.check_name(backend)
        super().__init__(**kwargs)


_OWN_OPTIONS = set(inspect.signature(DecayConfig.__init__).parameters) - {"self", "kwargs"}
# the layer's others; device and dtype have another meaning in transformers
_LAYER_OPTIONS = set(inspect.signature(DecayFlashAttention).parameters) - _OWN_OPTIONS - {"device", "dtype"}


def _refuse_other_architectures(options: dict) -> None:
    """Refuse options of another architecture: a reader of the configuration would expect another model."""
    for name, value in sorted(options.items()):
        if name in _LAYER_OPTIONS:
            raise ValueError(f"{name}: expected no such option: DecayFlashAttention has it, this model does not")
        if name in _OF_EVERY_MODEL:
            _refuse_unknown({name: value})
        elif name not in _OF_TRANSFORMERS and not name.startswith("_"):
            if value is not None and (similar := difflib.get_close_matches(name, _OWN_OPTIONS, n=1, cutoff=0.84)):
                raise TypeError(f"{name}: no option of DecayConfig; did you mean {similar[0]}?")
            values = value if isinstance(value, (list, tuple)) else [value]
            for words, remedy in _OTHER_ARCHITECTURES.items():
                if re.search(rf"(^|_)({words})(_|$)", name) and not all(v in _NEUTRAL for v in values):
                    raise ValueError(f"{name}: expected no option of another architecture, got {value!r}; {remedy}")


def _check_log_decay(log_decay: Sequence[float] | Tensor | None, decay: str, heads: int) -> tuple[float, ...] | None:
    """The user's constants, which decay="constant" and "constant-learned" require and no other decay accepts."""
    is_constant, learned = decay.startswith("constant"), decay.endswith("learned")
    if log_decay is None and not is_constant:
        return None
    if not is_constant:
        raise ValueError(f"log_decay: expected only with decay='constant' or 'constant-learned', got decay={decay!r}")
    numbers = None if log_decay is None else validation.check_log_decays("log_decay", log_decay, learned)
    if numbers is None or len(numbers) != heads:
        expected = f"num_attention_heads = {heads} numbers with decay={decay!r}"
        raise ValueError(f"log_decay: expected {expected}, got {numbers and len(numbers)}")
    return numbers


class DecayCacheLayer(DynamicLayer):
    """Cache of an attention layer, for twice its tokens, or for max_length, the expected number, if that is less."""

    def __init__(self, max_length: float = math.inf):
        super().__init__()
        self.max_length = max_length
        self.cache: DecayCache | None = None
        self.columns = 0  # of attention_mask, including tokens that left the cache

    @property
    def batch_size(self) -> int:
        if self.cache is None:
            raise AttributeError("batch_size: expected a filled cache, got an empty one")  # transformers calls hasattr
        return self.cache.batch_size

    max_batch_size = batch_size  # the name in the first releases of transformers 5

    def room_for(self, batch_size: int, tokens: int, attention: DecayFlashAttention) -> DecayCache:
        """Return the cache of that layer, with space for `tokens` more tokens."""
        held = 0 if self.cache is None else self.cache.longest
        needed = max(1, held + tokens)  # a cache needs room for a token; a call may have none
        size = int(min(self.max_length, 2 * needed)) if needed <= self.max_length else 2 * needed
        if self.cache is None:
            self.cache = attention.make_cache(batch_size, size)
            self.is_initialized = True
        elif not self.cache._fits(tokens, self.cache.max_length):
            self.cache.grow(size)
        return self.cache

    def update(self, *args, **kwargs):
        raise NotImplementedError("cache: a DecayCacheLayer takes its tokens from DecayFlashAttention only")

    def get_seq_length(self) -> int:
        """Earlier tokens, padding included."""
        return self.columns

    def reset(self) -> None:
        """Drop tokens and buffers. The next tokens may have another batch size."""
        self.cache, self.is_initialized, self.columns = None, False, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx.to(self.cache.device))

    def crop(self, tokens_to_remove: SupportsIndex | Sequence[int] | Tensor) -> None:
        """Remove the last −tokens_to_remove tokens of every entry; they must not be padding.

        A positive number is the length to keep, as in the first releases of transformers 5. One number for each entry,
        0 or below, a sequence or a tensor (B,), removes tokens and no columns: attention_mask is 0 there. A reset among
        the removed tokens is not undone. A forget gate of this model is a reset only if its logit is below −746.
        """
        if self.cache is None:
            return
        if isinstance(tokens_to_remove, Sequence):
            self.cache.crop([-number for number in tokens_to_remove])
        elif isinstance(tokens_to_remove, Tensor) and tokens_to_remove.ndim:
            self.cache.crop(-tokens_to_remove)
        else:
            number = operator.index(tokens_to_remove)  # some releases of transformers count in tensors
            removed = min(max(self.columns - number if number > 0 else -number, 0), self.columns)
            self.cache.crop(min(removed, self.cache.longest))
            self.columns -= removed

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self.batch_select_indices(torch.arange(self.cache.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self.cache.select(indices.to(self.cache.device))


class DecayModelCache(Cache):
    """Cache of DecayModel for inference: a DecayCacheLayer for each layer. `generate` passes max_length."""

    layers: list[DecayCacheLayer]

    def __init__(self, config: DecayConfig, max_length: float = math.inf):
        self.max_length = max_length
        super().__init__(layers=[DecayCacheLayer(max_length) for _ in range(config.num_hidden_layers)])

    @property
    def lengths(self) -> Tensor | None:
        """Tokens of every row (B,), without padding; None without columns."""
        held = self.layers[0].cache if self.get_seq_length() else None
        return None if held is None else held.lengths + held.dropped

    def fit(self, count: int) -> list[DecayCacheLayer]:
        """Return the caches of the `count` layers that the model runs. An empty cache adopts that number."""
        if len(self.layers) != count and self.lengths is not None:
            raise ValueError(
                f"{_CACHE}: expected one of the {count} layers that the model runs, got one filled by "
                f"{len(self.layers)}; fill a new cache"
            )
        if len(self.layers) != count:
            self.layers = [DecayCacheLayer(self.max_length) for _ in range(count)]
        return self.layers


class DecayMLP(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: DecayConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecayBlock(modeling_layers.GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecayConfig):
        super().__init__()
        decay: Any = config.decay  # a preset
        if config.initial_half_lives is not None:
            heads, half_lives = config.num_attention_heads, config.initial_half_lives
            decay = ScalarDecay(config.hidden_size, heads, initial_half_lives=half_lives)
        elif config.log_decay is not None:
            decay = ConstantDecay(config.log_decay, learned=config.decay.endswith("learned"))
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DecayFlashAttention(
            config.hidden_size, config.num_attention_heads, num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim, decay=decay, qk_norm=config.qk_norm,
            output_gate=config.output_gate, output_norm=config.output_norm, kv_shift=config.kv_shift,
            window_size=config.window_size, sink=config.sink, backend=config.backend,
        )
        eps = {"q_norm": config.qk_norm_eps, "k_norm": config.qk_norm_eps, "output_norm": config.rms_norm_eps}
        for name, norm in self.self_attn.named_children():
            if name in eps:
                norm.eps = eps[name]  # type: ignore[assignment]
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DecayMLP(config)

    def forward(self, x: Tensor, layer_cache: Any = None, new_lengths: Tensor | None = None, **packing: Any) -> Tensor:
        # layer_cache is a DecayCacheLayer: transformers drops an argument named `cache` from recomputed layers
        normed = self.input_layernorm(x)
        if layer_cache is None:
            attended = self.self_attn(normed, **packing)
        else:
            cache = layer_cache.room_for(x.shape[0], x.shape[1], self.self_attn)
            attended = self.self_attn(normed, cache=cache, new_lengths=new_lengths)
            layer_cache.columns += x.shape[1]
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class DecayPreTrainedModel(PreTrainedModel):
    """Base of the models: their conventions with transformers, and initialisation."""

    config_class = DecayConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecayBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    # Decay modules refuse to become narrower anyway; this is for loaders that read it
    _keep_in_fp32_modules_strict = ["self_attn.decay"]  # noqa: RUF012


class DecayModel(DecayPreTrainedModel):
    """Token embedding, DecayBlocks and a final norm. Only the decay gives the order of tokens."""

    def __init__(self, config: DecayConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecayBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DecayModelCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: DecayModelCache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """T new tokens, input_ids (B, T) or inputs_embeds (B, T, hidden_size) → last_hidden_state in that shape.

        Args:
            attention_mask: (B, past + T), True or 1 for tokens and False or 0 for padding: bool, integers, or floating
                numbers with a 1 in every row. Document numbers and values to add to scores raise. Padding may be
                anywhere and hold anything: the result is that of the tokens without it, and its outputs are 0. The
                columns of tokens in the cache are only counted; a row must have as many tokens as its cache.
            position_ids: (B, T) or (1, T). The model has no positions, so they may only count the tokens of a row, each
                the one before plus one. They may start anywhere; after tokens in a cache, at their number or at the
                column. Packed sequences: in a single row without attention_mask and cache, every return to the smallest
                position starts a sequence. Finding these starts synchronises with the device.
            cache: the earlier tokens; the new ones are added. Only under torch.no_grad(). transformers calls it
                past_key_values before 5.24. Both names work; the output has the name of the release.
            use_cache: start a cache if none is given. Default config.use_cache, but False if gradients are recorded,
                for packed sequences, and without rows.
            output_hidden_states: also return hidden_states, (B, T, hidden_size) before the first layer and after every
                layer, the last one after the norm.
            cu_seq_lens_q, max_length_q: packed sequences, in kwargs, as DataCollatorWithFlattening returns them with
                return_flash_attn_kwargs=True: input_ids (1, total), where sequence n is the tokens cu_seq_lens_q[n] ≤ t
                < cu_seq_lens_q[n + 1]. max_length_q is an upper bound on the lengths (default total). If it is a
                tensor, reading it synchronises with its device. Nothing crosses a boundary. cu_seq_lens_k,
                max_length_k, seq_idx and position_ids are not read.
            kwargs: arguments that transformers passes to every model, if they change nothing here; others raise.

        Raises:
            TypeError, ValueError: for every bad argument, by name. Bad values in a tensor on a GPU fail an assertion
                there.
        """
        packing = {name: kwargs.pop(name, None) for name in _PACKING}
        _refuse_unknown({"output_attentions": self.config.output_attentions, **kwargs})
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: expected exactly one of the two")
        if cache is not None and past_key_values is not None:
            raise ValueError("cache, past_key_values: expected one of them, they are the same argument")
        cache = past_key_values if cache is None else cache
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if x.ndim != 3 and input_ids is not None:
            raise ValueError(f"input_ids: expected (B, T), got {tuple(input_ids.shape)}")
        if x.ndim != 3:
            raise ValueError(f"inputs_embeds: expected (B, T, hidden_size), got {tuple(x.shape)}")
        may_pack = len(x) == 1 and attention_mask is None and cache is None and not use_cache
        sequences = _sequences(packing, may_pack, position_ids is not None)
        if cache is not None and not isinstance(cache, DecayModelCache):
            raise TypeError(f"{_CACHE}: expected a DecayModelCache, got a {type(cache).__name__}")
        new_lengths = order = real = None
        if attention_mask is not None:
            real = _new_columns(attention_mask, x, cache)
            # tokens first, in their order, then padding: causality hides the padding, and a cache overwrites it
            new_lengths, order = real.sum(1), (~real).int().argsort(dim=1, stable=True)
            # zeros: rows read padding with probability 0, and 0 · NaN is NaN
            x = x.masked_fill(~real[..., None], 0).take_along_dim(order[..., None], 1)
        if position_ids is not None and not sequences:
            sequences = _read_positions(position_ids, x, may_pack, cache, new_lengths, order)
        if cache is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not torch.is_grad_enabled() and not sequences and len(x) > 0
            cache = DecayModelCache(self.config) if use_cache else None
        blocks = self.layers[: self.config.num_hidden_layers]
        caches = [None] * len(blocks) if cache is None else cache.fit(len(blocks))

        states = []
        for block, layer_cache in zip(blocks, caches, strict=True):
            if output_hidden_states:
                states.append(x)
            x = block(x, layer_cache=layer_cache, new_lengths=new_lengths, **sequences)
        states.append(self.norm(x))
        if real is not None and order is not None:
            back = order.argsort(dim=1)[..., None]
            # zeros, because padding after the tokens has seen all of them: no loss may learn from it
            states = [x.take_along_dim(back, 1).masked_fill(~real[..., None], 0) for x in states]
        hidden_states = tuple(states) if output_hidden_states else None
        return BaseModelOutputWithPast(last_hidden_state=states[-1], hidden_states=hidden_states, **{_CACHE: cache})


class DecayForCausalLM(DecayPreTrainedModel, GenerationMixin):
    """DecayModel with a language-model head, for training and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DecayConfig):
        super().__init__(config)
        self.model = DecayModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DecayModelCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        cache: DecayModelCache | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, vocab_size) and loss; other arguments as in DecayModel.forward.

        Args:
            labels: (B, T), the input tokens themselves (the loss shifts them), and −100 to exclude a token: padding, a
                first token after padding, the first of a packed sequence. loss is the mean cross-entropy in nats.
            logits_to_keep: number of last positions, 0 for all; or the indices of positions.
            kwargs: also num_items_in_batch, ignore_index and shift_labels, for transformers' loss function.

        Raises:
            TypeError, ValueError: for every bad argument, by name.
        """
        of_loss = {name: kwargs.pop(name) for name in _LOSS_ARGUMENTS if name in kwargs}
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, cache=cache,
            output_hidden_states=output_hidden_states, return_dict=True, **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **of_loss)
        cached = {_CACHE: getattr(outputs, _CACHE)}
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.hidden_states, **cached)

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs) -> None:
        """Do nothing; the original counts positions for every model with position_ids in its forward."""

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, max_length):
        """Start `generate` with a DecayModelCache instead of a DynamicCache, if no cache is given."""
        if model_kwargs.get(_CACHE) is not None or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, max_length)
        # "dynamic_full": in the first releases of transformers 5, assisted generation passes it
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                "cache_implementation: expected None or 'dynamic', the cache of this model; "
                f"got {generation_config.cache_implementation!r}"
            )
        model_kwargs[_CACHE] = DecayModelCache(self.config, max_length)


class DecayForSequenceClassification(modeling_layers.GenericForSequenceClassification, DecayPreTrainedModel):
    """DecayModel with a linear classifier of every row's last token, the last one that is not config.pad_token_id."""

    accepts_loss_kwargs = False  # True: Trainer would pass num_items_in_batch, which this loss ignores


class DecayForTokenClassification(modeling_layers.GenericForTokenClassification, DecayPreTrainedModel):
    """DecayModel with a linear classifier of every token."""

    accepts_loss_kwargs = False


_LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
# packed sequences, as transformers passes them to a model
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Arguments that transformers and tools around it pass to any model: the value, besides None, that changes nothing here,
# and the reason why any other raises
_OF_EVERY_MODEL = {
    "output_attentions": (False, "flash attention never has the attention weights"),
    "output_router_logits": (False, "the model has no experts"),
    "is_causal": (True, "the model is causal"),
    "token_type_ids": (None, "the model has no segments; a tokenizer leaves them out with return_token_type_ids=False"),
}


def _refuse_unknown(kwargs: dict) -> None:
    """Refuse unknown arguments, and known ones that would have to change the result."""
    for name, value in kwargs.items():
        if value is None or name == "cache_position":  # a DecayModelCache tracks positions itself
            continue
        if name not in _OF_EVERY_MODEL:
            raise TypeError(f"{name}: unexpected argument of the model, got {value!r} of type {type(value).__name__}")
        harmless, reason = _OF_EVERY_MODEL[name]
        if value is not harmless:
            raise ValueError(f"{name}: {reason}")


def _sequences(packing: dict, may_pack: bool, has_positions: bool) -> dict:
    """cu_seqlens and max_seqlen of DecayFlashAttention from cu_seq_lens_q; {} without it."""
    offsets, longest = packing["cu_seq_lens_q"], packing["max_length_q"]
    for name, value in packing.items():
        if value is not None and not (may_pack and (has_positions or offsets is not None)):
            raise ValueError(
                f"{name}: expected one row, input_ids (1, total), with cu_seq_lens_q or position_ids and "
                f"without attention_mask, {_CACHE} and use_cache; leave {name} out with any other rows"
            )
    if isinstance(longest, Tensor) and longest.ndim == 0 and not longest.is_floating_point():
        longest = None if torch.compiler.is_compiling() else int(longest)  # compiled code cannot read a tensor
    return {} if offsets is None else {"cu_seqlens": offsets, "max_seqlen": longest}


def _read_positions(
    position_ids: Tensor, x: Tensor, may_pack: bool, cache: DecayModelCache | None, new_lengths: Tensor | None,
    order: Tensor | None,
) -> dict:
    """Check that positions only count tokens. Return the sequences that restarts begin, as _sequences does."""
    rows, tokens = x.shape[:2]
    if not isinstance(position_ids, Tensor) or position_ids.is_floating_point():
        raise TypeError(f"position_ids: expected an integer tensor, got {position_ids!r}")
    if position_ids.shape not in ((rows, tokens), (1, tokens)):
        raise ValueError(f"position_ids: expected (B, T) = {(rows, tokens)}, got {tuple(position_ids.shape)}")
    positions = position_ids.to(x.device).expand(rows, tokens)
    if order is not None:
        positions = positions.take_along_dim(order, 1)
    counts, begins = positions[:, 1:] == positions[:, :-1] + 1, None
    if may_pack and tokens > 1:
        begins = positions[0, 1:] == positions.amin()
        counts = counts | begins
    if cache is not None and (lengths := cache.lengths) is not None:
        column = cache.get_seq_length() + (0 if order is None else order[:, :1])
        follows = (positions[:, :1] == lengths.to(x.device)[:, None]) | (positions[:, :1] == column)
        counts = torch.cat([follows, counts], 1)
    if new_lengths is not None:
        index = torch.arange(tokens - counts.shape[1], tokens, device=x.device)
        counts = counts | (index >= new_lengths[:, None])
    refuse_unless(
        counts.all(),
        "position_ids: expected positions that count the tokens of every row up by one, got a jump, which a model "
        "without positions cannot follow; leave position_ids out, or begin each of several sequences with the smallest "
        "position, in one row without attention_mask and cache",
    )
    if begins is None or not (starts := begins.nonzero() + 1).numel():
        return {}
    offsets = torch.cat([starts.new_zeros(1), starts[:, 0], starts.new_tensor([tokens])]).int()
    return {"cu_seqlens": offsets, "max_seqlen": int(offsets.diff().max())}


def _new_columns(attention_mask: Tensor, x: Tensor, cache: DecayModelCache | None) -> Tensor:
    """The columns of the new tokens, (B, T) bool."""
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {attention_mask!r}")
    past = 0 if cache is None else cache.get_seq_length()
    expected = (x.shape[0], past + x.shape[1])
    if attention_mask.shape != expected:
        raise ValueError(f"attention_mask: expected (B, past + T) = {expected}, got {tuple(attention_mask.shape)}")
    attention_mask = attention_mask.to(x.device)
    real = attention_mask == 1
    is_mask = real | (attention_mask == 0)
    if attention_mask.is_floating_point():  # zeros: padding as a mask, tokens as values to add
        is_mask = is_mask & real.any(1, keepdim=True)
        remedy = "instead of numbers to add to scores pass a bool mask, True for tokens"
    else:
        remedy = "documents are kept apart in one row, by position_ids that start again or by cu_seq_lens_q"
    refuse_unless(
        is_mask.all(), f"attention_mask: expected 1 or True for tokens and 0 or False for padding, got others; {remedy}"
    )
    if cache is not None and (lengths := cache.lengths) is not None:
        refuse_unless(
            (real[:, :past].sum(1) == lengths.to(x.device)).all(),
            "attention_mask: expected as many tokens in the columns of the cache as it was filled with, got another "
            "number; tokens in a cache cannot be masked later",
        )
    return real[:, past:]


_parameter_names = Trainer.get_decay_parameter_names


@functools.wraps(_parameter_names)
def _get_decay_parameter_names(self: Trainer, model: nn.Module) -> list[str]:
    """Leave out the parameters of decays, sinks and learned scales."""
    spared, parameters = spared_parameters(model), dict(model.named_parameters(remove_duplicate=False))
    return [name for name in _parameter_names(self, model) if parameters.get(name) not in spared]


transformers.AutoConfig.register(DecayConfig.model_type, DecayConfig, exist_ok=True)
transformers.AutoModel.register(DecayConfig, DecayModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(DecayConfig, DecayForCausalLM, exist_ok=True)
# Trainer shifts the labels for its label smoothing only if the model is listed here
transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DecayConfig.model_type] = "DecayForCausalLM"
transformers.AutoModelForSequenceClassification.register(DecayConfig, DecayForSequenceClassification, exist_ok=True)
transformers.AutoModelForTokenClassification.register(DecayConfig, DecayForTokenClassification, exist_ok=True)
Trainer.get_decay_parameter_names = _get_decay_parameter_names
