"""DecayFlashAttention: attention with decaying scores, as a layer."""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from decayattn import validation
from decayattn.backends import registry
from decayattn.compatibility import refuse_unless
from decayattn.functional import decay_attention, decay_attention_varlen
from decayattn.nn.cache import DecayCache
from decayattn.nn.decay import ConstantDecay, Decay, ScalarDecay, Spared
from decayattn.nn.sharded_parameters import HeadRMSNorm, Linear, local_part, own_heads, replicated, whole
from decayattn.normalize import autocast, roll_left
from decayattn.problem import BackendName, SkipTolerance, is_reset
from decayattn.validation import REQUIRED, check_bool, check_head_dim, check_positive_int, check_tensor, wrong_type

if TYPE_CHECKING:
    from decayattn.distributed import ContextParallel
    from decayattn.distributed.option_check import OptionCheck

DecayPreset = Literal["scalar", "alibi", "alibi-learned", "retnet", "retnet-learned", "constant", "none"]
DECAYS = get_args(DecayPreset)
_numbers = itertools.count()  # of layers, by which caches know theirs; copies keep their original's


class _CallArguments(NamedTuple):
    """Arguments of the layer's forward besides x."""

    padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    resets: Tensor | None
    cache: DecayCache | None
    new_lengths: Tensor | None
    log_decay: Tensor | None
    memory: Tensor | None
    memory_padding_mask: Tensor | None


# arguments that need, or exclude, another one
_NEEDS = (
    ("new_lengths", "cache", "a cache"), ("memory_padding_mask", "memory", "memory"),
    ("max_seqlen", "cu_seqlens", "cu_seqlens"),
)
_EXCLUDES = (
    ("cu_seqlens", "padding_mask", "sequences are packed or padded"),
    ("cu_seqlens", "cache", "pad the sequences, and pass padding_mask"),
    ("new_lengths", "padding_mask", "a mask gives the lengths"),
    ("cache", "memory", "every call reads memory whole"),
    ("cu_seqlens", "memory", "pad both sequences, and pass padding_mask and memory_padding_mask"),
    ("resets", "memory", "pass a log_decay that is -inf at the first token of a document"),
)


class DecayFlashAttention(Spared):
    r"""Multi-head attention with scores that decay with distance: projections around decay_attention.

    With x (B, T, embed_dim)::

        q, k, v, g = x · in_proj                           H heads of q and g, H_kv of k and v
        k, v       = shift(k), shift(v)                    if kv_shift
        q, k       = position(norm(q), norm(k))            norm if qk_norm
        out        = decay_attention(q, k, v, decay(x))
        y          = (norm(out) · sigmoid(g)) · out_proj   norm if output_norm, sigmoid(g) if output_gate

    RECIPES.md has a transformer block around it, generation with a cache, and cross-attention.

    Args:
        embed_dim: width of input and output.
        num_heads: query heads H.
        num_kv_heads: key and value heads H_kv, a divisor of H (grouped-query attention); default H.
        head_dim: D of queries and keys, up to 256; default embed_dim / num_heads.
        value_dim: D_v of a value head, up to 256; default head_dim.
        decay: where the log-decay comes from.
            "scalar": ScalarDecay, a forget gate per token and head (the Forgetting Transformer, arXiv 2503.02130).
            "alibi" or "constant": ConstantDecay.alibi, frozen; "retnet": ConstantDecay.retnet, frozen; "alibi-learned",
            "retnet-learned": learned, from the same values. "none": no decay.
            A module: a configured ScalarDecay or ConstantDecay, or any module of your own that maps x to a float32
            log_decay of shape (H,) or (B, T, H).
        causal: a token sees itself and the past; otherwise everything, with the decay in both directions.
            decay=ScalarDecay(embed_dim, num_heads, directions=2) gives each direction its own gate, (B, T, H, 2).
        bias: biases in both projections.
        qk_norm: RMSNorm over head_dim of every query and key head, with learned gains. True: one gain for all query
            heads, one for all key heads; "per_head": a gain for each. `layer.q_norm.eps` and `.k_norm.eps` are 1e-6.
        output_gate: multiply the output by sigmoid(g) before the output projection.
        output_norm: RMSNorm over value_dim of every head's output, with a gain for each head, before the output gate.
        kv_shift: mix the keys and values of a token with those of the token before, per key head, with two more rows of
            in_proj for each: x_t becomes a_t·x_{t−1} + (1 − a_t)·x_t with a = sigmoid(row · input), before norms and
            positions. It restarts with every sequence and at a reset (of any query head of the key head): x_{−1} = 0.
            With qk_norm="per_head", output_gate and output_norm, this is the Pro block of the Forgetting Transformer
            (arXiv 2503.02130, FoX (Pro)).
        position: a module called as position(q, k), q (B, T, H, D) and k (B, T, H_kv, D), that returns both in the same
            shapes and dtype: rotary embeddings, for example. With a cache or a context it is called as
            position(q, k, start=start), start (B,) int32 being the positions of the first new tokens; a module that
            does not take start raises there. Without a cache, positions of left-padded rows count the padding: rotary
            embeddings are the same, absolute ones are not.
        window_size: as in decay_attention, (left, right) in tokens. It bounds a cache, too.
        sink: add a learned logit per head to every softmax, with a zero value vector; initially 0.
        scale: of the scores: a number, default 1/√D; "learned": exp(log_scale_h)/√D, a parameter per head, initially 0.
        skip_tolerance: as in decay_attention. A cache reads all that it holds, and has `evict`.
        backend: as in decay_attention; a plain attribute that may be changed at any time. "hopper" raises after the
            first tokens of a cache, because it has no kernels for them.
        device, dtype: of the parameters, as in torch.nn; those of the decay stay at least float32.

    The projections start as nn.Linear does (standard deviation 1/√(3·fan_in), 0.02 at width 768) with zero biases.
    decayattn.nn.parameter_groups spares decays from weight decay. After `.bfloat16()` or `.half()`, and under autocast,
    a `Decay` stays float32 and everything else follows. Sequences over several GPUs: `layer.context =
    decayattn.distributed.ContextParallel(group)`, and x is a slice.

    Raises:
        TypeError, ValueError: for every bad argument, by name.
    """

    @validation.hide_unknown
    def __init__(
        self,
        embed_dim: int = REQUIRED,
        num_heads: int = REQUIRED,
        *others: object,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        decay: DecayPreset | nn.Module = "scalar",
        causal: bool = True,
        bias: bool = False,
        qk_norm: bool | Literal["per_head"] = False,
        output_gate: bool = False,
        output_norm: bool = False,
        kv_shift: bool = False,
        position: nn.Module | None = None,
        window_size: tuple[int, int] | None = None,
        sink: bool = False,
        scale: float | str | None = None,
        skip_tolerance: SkipTolerance = "auto",
        backend: BackendName = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: object,
    ):
        if others or unknown:
            validation.refuse_unknown(DecayFlashAttention, unknown, others)
        super().__init__()
        self._number = next(_numbers)
        self.embed_dim = check_positive_int("embed_dim", embed_dim)
        self.num_heads = num_heads = check_positive_int("num_heads", num_heads)
        self.num_kv_heads = validation.check_kv_heads("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        self.head_dim = check_head_dim("head_dim", head_dim, "embed_dim", self.embed_dim, "num_heads", num_heads)
        self.value_dim = check_head_dim("value_dim", self.head_dim if value_dim is None else value_dim)
        self.causal = check_bool("causal", causal)
        self.qk_norm = check_qk_norm(qk_norm)
        self.output_gate = check_bool("output_gate", output_gate)
        self.kv_shift = check_bool("kv_shift", kv_shift)
        if position is not None and not isinstance(position, nn.Module):
            raise wrong_type("position", "a torch.nn.Module", position)
        self.position = position
        validation.check_window(window_size)
        self.window_size = window_size
        if isinstance(scale, str):
            if scale != "learned":
                raise ValueError(f"scale: expected a number, 'learned' or None, got {scale!r}")
        elif scale is not None:
            scale = validation.check_number("scale", scale, "a finite number, 'learned' or None", validation.is_finite)
        self.scale = scale
        validation.check_skip_tolerance(skip_tolerance)
        self.skip_tolerance = skip_tolerance
        self.backend = registry.check_name(backend)
        self.context: ContextParallel | None = None

        options: dict[str, Any] = {"device": device, "dtype": dtype}
        q_width, k_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        v_width, out_width = self.num_kv_heads * self.value_dim, num_heads * self.value_dim
        # one matrix product; q, k, v and g are slices of its rows, and the kernels read them in place
        self.split_sizes: tuple[int, ...] = (q_width, k_width, v_width, out_width if output_gate else 0)
        self.split_sizes += (self.num_kv_heads,) * 2 if kv_shift else ()
        self.in_proj = Linear(self.embed_dim, sum(self.split_sizes), bias=check_bool("bias", bias), **options)
        self.out_proj = Linear(out_width, self.embed_dim, bias=bias, **options)
        self.q_norm, self.k_norm = (
            HeadRMSNorm(self.head_dim, heads if qk_norm == "per_head" else None, **options) if qk_norm else None
            for heads in (num_heads, self.num_kv_heads)
        )
        has_norm = check_bool("output_norm", output_norm)
        self.output_norm = HeadRMSNorm(self.value_dim, num_heads, **options) if has_norm else None
        self.sink = nn.Parameter(torch.zeros(num_heads, **options)) if check_bool("sink", sink) else None
        self.log_scale = nn.Parameter(torch.zeros(num_heads, **options)) if scale == "learned" else None
        self.decay = _build_decay(decay, self.embed_dim, num_heads, options)
        if causal and getattr(self.decay, "directions", 1) > 1:
            raise ValueError("causal: expected False with a gate per direction, got True; use directions=1")
        self.tensor_mesh: Any = None  # the DeviceMesh of tensor parallelism; see decayattn.nn.tensor_parallel_plan

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset all parameters except those of `decay` and `position`, which reset themselves.

        Under tensor parallelism every rank calls it. With the same seed on all of them, the weights are those of a
        layer on one device; otherwise the first rank's.
        """
        for module in (self.in_proj, self.out_proj, self.q_norm, self.k_norm, self.output_norm):
            if module is not None:
                module.reset_parameters()
        for parameter in self._spared():
            parameter.zero_()

    def _spared(self) -> Iterator[nn.Parameter]:
        parameters = (self._parameters.get(name) for name in ("sink", "log_scale"))
        return (parameter for parameter in parameters if parameter is not None)

    @validation.hide_unknown
    def forward(
        self,
        x: Tensor = REQUIRED,
        *others: object,
        padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        resets: Tensor | None = None,
        cache: DecayCache | None = None,
        new_lengths: Tensor | None = None,
        log_decay: Tensor | None = None,
        memory: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        **unknown: object,
    ) -> Tensor:
        """x (B, T, embed_dim) → (B, T, embed_dim), in the dtype of the projections (autocast's where it is on).

        Args:
            x: the tokens; with a cache, the tokens after those in it.
            padding_mask: (B, T) bool or integers, True or 1 for tokens and False or 0 for padding. The tokens of a row
                are consecutive, with padding on the left, on the right, or both. Padding attends to nothing, is visible
                to nothing, and may hold any values, NaN included. Its outputs are 0, or the bias of out_proj. With a
                cache, the mask covers only the new tokens: the cache stores tokens, not padding.
            cu_seqlens, max_seqlen: packed sequences, x (1, total, embed_dim): offsets (sequences + 1,) of int32 or
                int64, which start with 0 and never fall. Sequence n is the tokens cu_seqlens[n] ≤ t < cu_seqlens[n +
                1]; tokens after the last sequence are padding. max_seqlen is an upper bound on the lengths, by default
                total; a lower one saves programs without work.
            resets: (B, T) bool or integers, True or 1 for the first token of a document. Nothing before that token is
                visible to it or to later tokens. A reset is a log-decay of −inf, so it needs a decay per token.
            cache: this layer's own, from make_cache; the tokens of x are appended to it. Inference only.
            new_lengths: (B,) int32 or int64, with a cache and instead of a padding_mask: number of valid tokens in each
                entry of x. The rest is padding: it may hold any values, and its outputs are undefined.
            log_decay: (B, T, H), or (H,) for a constant one, or (B, T, H, 2) with causal=False, float32 (float64 with
                float64 tokens): the decay of this call, instead of the layer's own module. The module is not called and
                gets no gradient, so build the layer with decay="none" if no call needs it. Under tensor parallelism
                every rank passes all heads. With a context it covers the tokens of the slice, with memory those of
                memory. RECIPES.md has an example with irregular time steps.
            memory: (B, T_k, embed_dim), for cross-attention. Keys, values and decay come from it, queries and the
                output gate from x. Both sequences end at the same position: token i of x is at position i + T_k − T of
                memory. This has a meaning if both share one clock. Otherwise build the layer with causal=False and
                decay="none". With causal=True, tokens of x before the first token of memory see nothing. With
                causal=False, a decay per token needs T ≤ T_k in every entry. A memory excludes cache, cu_seqlens,
                resets, a context and a position module.
            memory_padding_mask: (B, T_k), the padding_mask of memory.

        Raises:
            TypeError, ValueError: for every bad argument, by name, and if the tokens do not fit in the cache. Bad
                values in masks, cu_seqlens and resets raise on a CPU. On a GPU, and in compiled code, they fail an
                assertion on the device, without a synchronisation.
            RuntimeError: with a cache, if a gradient would be needed.
        """
        given = _CallArguments(
            padding_mask, cu_seqlens, max_seqlen, resets, cache, new_lengths, log_decay, memory, memory_padding_mask
        )
        with contextlib.nullcontext() if self.context is None else self.context.reporting(x) as check:
            q, k, v, gate, unshifted, given, options = self._prepare(x, given, others, unknown, check)
        log_decay = given.log_decay
        if cache is not None:
            q, k, v = autocast(q, k, v)  # a position module may return float32
            out = cache.attend(q, k, v, log_decay, new_lengths=given.new_lengths, unshifted=unshifted, **options)
            if not torch.compiler.is_compiling():
                cache._layer = self._number
        elif self.context is not None:
            options |= dict(causal=self.causal, cu_seqlens=given.cu_seqlens, max_seqlen=max_seqlen)
            out = self.context.attend(q, k, v, log_decay, **options)
        elif given.cu_seqlens is not None:
            longest = x.shape[1] if max_seqlen is None else max_seqlen
            per_token = isinstance(log_decay, Tensor) and log_decay.ndim > 1
            # not indexed: the backward of an index copies the gradient into zeros
            out = decay_attention_varlen(
                q.squeeze(0), k.squeeze(0), v.squeeze(0), log_decay.squeeze(0) if per_token else log_decay,  # type: ignore[union-attr]
                cu_seqlens_q=given.cu_seqlens, cu_seqlens_k=given.cu_seqlens, max_seqlen_q=longest,
                max_seqlen_k=longest, causal=self.causal, **options,
            )[None]
        else:
            out = decay_attention(q, k, v, log_decay, causal=self.causal, **options)
        if self.output_norm is not None:
            out = self.output_norm(out)
        out = out.flatten(-2)
        if self.output_gate:
            out = out * gate.sigmoid()
        if cache is not None and padding_mask is not None:
            out = roll_left(out, -_left_padding(padding_mask)).masked_fill(padding_mask[..., None] == 0, 0)
        return self.out_proj(out)

    def _prepare(
        self, x: Tensor, given: _CallArguments, others: tuple, unknown: dict, check: "OptionCheck | None"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None, _CallArguments, dict[str, Any]]:
        """Return q, k, v, the gate, k and v before a shift, and the attention's arguments and options."""
        begin = self._check_arguments(x, given, others, unknown)
        cache, resets, log_decay, memory = given.cache, given.resets, given.log_decay, given.memory
        if (mesh := self.tensor_mesh) is not None:
            x = replicated(x, mesh)
            memory, log_decay = (None if t is None else replicated(t, mesh) for t in (memory, log_decay))
            if log_decay is not None:
                log_decay = log_decay.chunk(mesh.size(), min(log_decay.ndim - 1, 2))[mesh.get_local_rank()]
        padding: Tensor | None = None
        bounds: dict[str, Any] = {}
        if given.padding_mask is not None:
            padding, (first, end) = given.padding_mask == 0, mask_bounds("padding_mask", given.padding_mask)
            bounds = {"leftpad_q": first, "seqused_q": end}
            bounds |= {"leftpad_k": first, "seqused_k": end} if memory is None else {}
        elif given.cu_seqlens is not None:
            given = given._replace(cu_seqlens=given.cu_seqlens.to(torch.int32))
            token = torch.arange(x.shape[1], device=x.device) + begin
            padding = (token >= given.cu_seqlens[-1])[None]  # type: ignore[index]
        if padding is not None:
            # for any contents: the gradients of the weights are sums over all tokens, and 0 · NaN is NaN
            x = x.masked_fill(padding[..., None], 0)
        if cache is not None and padding is not None:  # a cache needs an entry's tokens before its padding
            x, resets = roll_left(x, first), None if resets is None else roll_left(resets, first)
            if log_decay is not None and log_decay.ndim == 3:
                log_decay = roll_left(log_decay, first)
            given, bounds = given._replace(new_lengths=end - first), {}
        tokens, rows = x, x.shape[1]
        if memory is not None:
            if given.memory_padding_mask is not None:
                memory = memory.masked_fill(given.memory_padding_mask[..., None] == 0, 0)
                first, end = mask_bounds("memory_padding_mask", given.memory_padding_mask)
                bounds |= {"leftpad_k": first, "seqused_k": end}
            # one call of in_proj, which may be quantised, adapted or sharded
            tokens, x = torch.cat([x, memory], 1), memory
        q, k, v, gate, *mixing = self.in_proj(tokens).split(self.split_sizes, dim=-1)
        if memory is not None:
            q, gate = q[:, :rows], gate[:, :rows]
            k, v, *mixing = (part[:, rows:] for part in (k, v, *mixing))
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.value_dim))
        if log_decay is None and self.decay is not None:
            if (log_decay := self.decay(x)) is None:
                raise TypeError(f"decay: expected a log_decay, got None; return one from {type(self.decay).__name__}")
            if isinstance(log_decay, Tensor) and log_decay.ndim > 2 and log_decay.shape[1] != x.shape[1]:
                shape = tuple(log_decay.shape)  # resets would broadcast one of a single token
                raise ValueError(f"decay: expected log_decay (B, T, H) with T = {x.shape[1]}, got {shape}")
        if resets is not None:
            if not isinstance(log_decay, Tensor) or log_decay.ndim < 3:
                raise ValueError("resets: expected a decay per token; with a constant decay use cu_seqlens")
            resets = resets.bool().view(*resets.shape, *(1,) * (log_decay.ndim - 2))
            log_decay = log_decay.masked_fill(resets, -math.inf)
        unshifted = None
        if mixing:
            unshifted, starts = (k, v), self._starts(k, log_decay, bounds.get("leftpad_k"), given.cu_seqlens, begin)
            before: tuple[Tensor, ...] = () if cache is None else cache.last_unshifted()
            if self.context is not None and check is not None:
                before = self.context.token_before(k, v, check)
            k, v = (_shift(*of_one, starts) for of_one in zip(unshifted, mixing, before or (None, None), strict=True))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.position is not None:
            start = {}
            if cache is not None and cache.longest > 0:  # an empty cache may have no device yet
                start = {"start": cache.lengths + cache.dropped}
            elif cache is not None or self.context is not None:
                start = {"start": torch.full(x.shape[:1], begin, dtype=torch.int32, device=x.device)}
            q, k = _check_positioned(self.position(q, k, **start), q, k)
        if memory is not None and not self.causal and isinstance(log_decay, Tensor) and log_decay.ndim == 3:
            _check_aligned(bounds, rows, memory.shape[1])
        options: dict[str, Any] = dict(
            scale=self._score_scale(local_part), window_size=self.window_size,
            sink=None if self.sink is None else local_part(self.sink, self.tensor_mesh),
            skip_tolerance=self.skip_tolerance, backend=self.backend, **bounds,
        )
        return q, k, v, gate, unshifted, given._replace(log_decay=log_decay), options

    def _starts(
        self, k: Tensor, log_decay: Tensor | float | None, first: Tensor | None, cu_seqlens: Tensor | None, begin: int
    ) -> Tensor | None:
        """True at keys that a shift must not mix with the key before, (B or 1, T or 1, H_kv or 1); None without any."""
        found = []
        if log_decay is not None:
            resets = is_reset(torch.as_tensor(log_decay, device=k.device))
            resets = resets.any(-1) if resets.ndim == 4 else resets  # in either direction
            if resets.shape[-1:] in ((), (1,), (self.num_heads,)):  # decay_attention refuses other shapes
                heads = resets.expand(*resets.shape[:-1], self.num_heads)
                found.append(heads.unflatten(-1, (self.num_kv_heads, -1)).any(-1))
        if first is not None:
            found.append((torch.arange(k.shape[1], device=k.device) == first[:, None])[..., None])
        if cu_seqlens is not None:
            token = torch.arange(begin - 1, begin + k.shape[1], dtype=torch.int32, device=k.device)
            found.append((torch.searchsorted(cu_seqlens, token, right=True).diff() > 0)[:, None])
        return functools.reduce(torch.logical_or, found) if found else None

    def make_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> DecayCache:
        """Return an empty cache for this layer, with room for max_length tokens in each of batch_size entries.

        A window needs at most left + 256 tokens, and then the cache takes sequences of any length.

        Args:
            device, dtype: of the buffers; by default those of the first keys. Under autocast, FSDP, quantisation and
                offloading, the parameters do not determine them.
        """
        self._check_cacheable()
        return DecayCache(
            batch_size, max_length, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            value_dim=self.value_dim, window_size=self.window_size, device=device, dtype=dtype,
        )

    @torch.no_grad()
    def score_bound(self) -> Tensor:
        """Upper bound (H,) on |scale · q·k| for any input, from qk_norm's gains. float64; DecayCache.evict takes it.

        A head of norm(x) is no longer than √D·max |gain|, up to rounding in the dtype of the layer. A position module
        must not lengthen it. Under tensor parallelism the heads are those of the rank, as in its cache. With FSDP2 this
        is a collective: every rank calls it.

        Raises:
            ValueError: without qk_norm, because scores then have no bound, and while parameters are offloaded.
        """
        if self.q_norm is None or self.k_norm is None:
            raise ValueError("qk_norm: expected True, because without it nothing bounds a score")
        if any(x is not None and x.is_meta for x in (self.q_norm.weight, self.k_norm.weight, self.log_scale)):
            raise ValueError("qk_norm: expected gains with values, got meta ones; call score_bound before offloading")
        q_gain, k_gain = (
            (whole(norm.weight) if norm.is_shared else own_heads(norm.weight, self.tensor_mesh).view(-1, self.head_dim))
            .double().abs().amax(-1) for norm in (self.q_norm, self.k_norm)
        )
        if k_gain.ndim:
            k_gain = k_gain.repeat_interleave(self.num_heads // self.num_kv_heads)
        scale = self._score_scale(own_heads)
        scale = self.head_dim**-0.5 if scale is None else scale
        scale = torch.as_tensor(scale, dtype=torch.float64, device=q_gain.device)
        # roundings of the norm, its output and a cast under autocast, each at most eps of bfloat16, for both q and k
        slack = (1 + 3 * torch.finfo(torch.bfloat16).eps) ** 2
        return (scale.abs() * self.head_dim * q_gain * k_gain * slack).expand(self.num_heads)

    def extra_repr(self) -> str:
        names = ["embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "causal", "qk_norm", "output_gate"]
        names += [name for name in ("kv_shift", "window_size") if getattr(self, name)]
        options = [f"{name}={getattr(self, name)}" for name in names]
        return ", ".join([*options, f"scale={self.scale!r}", f"backend={self.backend!r}"])

    def _score_scale(self, part: Callable[[Tensor, Any], Tensor]) -> Tensor | float | None:
        if self.log_scale is None:
            return self.scale  # type: ignore[return-value]  # "learned" has a log_scale
        wide = torch.promote_types(self.log_scale.dtype, torch.float32)
        return part(self.log_scale, self.tensor_mesh).to(wide).exp() / math.sqrt(self.head_dim)

    def _check_input(self, name: str, x: Tensor, device: torch.device | None = None) -> None:
        check_tensor(name, x, device, "x")
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"{name}: expected shape (B, T, embed_dim = {self.embed_dim}), got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")

    def _check_arguments(self, x: Tensor, given: _CallArguments, others: tuple, unknown: dict) -> int:
        """Check the arguments that decay_attention cannot. Return the position of x's first token; 0 with a cache."""
        if others or unknown:
            validation.refuse_unknown(DecayFlashAttention.forward, unknown, others)
        self._check_input("x", x)
        if (cache := given.cache) is not None:
            if not isinstance(cache, DecayCache):
                raise wrong_type("cache", "a DecayCache", cache)
            self._check_cacheable()
            expected = (x.shape[0], self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)
            got = (cache.batch_size, cache.num_heads, cache.num_kv_heads, cache.head_dim, cache.value_dim)
            validation.check_same("cache", "(B, H, H_kv, D, D_v) of the layer and x", expected, got)
            # not compiled, which would compile again for every layer
            if not torch.compiler.is_compiling() and cache.longest > 0 and cache._layer not in (None, self._number):
                raise ValueError("cache: expected one without tokens of another layer; give every layer its own")
        if (memory := given.memory) is not None:
            self._check_input("memory", memory, x.device)
            validation.check_same("memory", "batch size of x", x.shape[0], memory.shape[0])
            if memory.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(f"memory: expected the dtype of x, {x.dtype}, got {memory.dtype}")
            for name in ("position", "context"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: expected None with memory; use a layer without one for cross-attention")
        self._check_sequences(x, given)
        if given.log_decay is not None:
            self._check_log_decay(x if memory is None else memory, given.log_decay)
        begin, end = 0, x.shape[1]
        if self.context is not None:
            self._check_position("context")
            begin, lengths = self.context.first_token(end), self.context.lengths
            end = end * torch.distributed.get_world_size(self.context.group) if lengths is None else sum(lengths)
        if given.cu_seqlens is not None:
            offsets = given.cu_seqlens.long()  # unsigned differences are never below 0
            refuse_unless(
                (offsets[0] == 0) & (offsets.diff() >= 0).all() & (offsets[-1] <= end),
                "cu_seqlens: expected offsets that start with 0, never fall and end within the tokens, got others; "
                "from lengths, compute F.pad(lengths.cumsum(0), (1, 0))",
            )
        return begin

    def _check_sequences(self, x: Tensor, given: _CallArguments) -> None:
        for name, mask, tokens in (
            ("padding_mask", given.padding_mask, x), ("resets", given.resets, x),
            ("memory_padding_mask", given.memory_padding_mask, given.memory),
        ):
            if mask is None or tokens is None:
                continue
            _check_integers(name, mask, tokens, or_bool=True)
            if mask.shape != tokens.shape[:2]:
                raise ValueError(f"{name}: expected shape (B, T) = {tuple(tokens.shape[:2])}, got {tuple(mask.shape)}")
        if given.resets is not None and given.resets.dtype != torch.bool:
            refuse_unless(
                ((given.resets == 0) | (given.resets == 1)).all(),
                "resets: expected 0, or 1 for the first token of a document, got other numbers; from document "
                "numbers, compute F.pad(numbers.diff() != 0, (1, 0))",
            )
        for name, other, noun in _NEEDS:
            if getattr(given, name) is not None and getattr(given, other) is None:
                raise ValueError(f"{name}: expected only with {noun}")
        for one, other, remedy in _EXCLUDES:
            if getattr(given, one) is not None and getattr(given, other) is not None:
                raise ValueError(f"{one}, {other}: expected at most one of them; {remedy}")
        if self.context is not None and (given.padding_mask is not None or given.cache is not None):
            name = "cache" if given.padding_mask is None else "padding_mask"
            raise ValueError(f"{name}: expected None where the layer has a context; cu_seqlens keeps sequences apart")
        if given.cu_seqlens is not None:
            _check_integers("cu_seqlens", given.cu_seqlens, x)
            if given.cu_seqlens.ndim != 1 or not given.cu_seqlens.numel():
                raise ValueError(f"cu_seqlens: expected shape (sequences + 1,), got {tuple(given.cu_seqlens.shape)}")
            if x.shape[0] != 1:
                raise ValueError(f"x: expected shape (1, total, embed_dim) with cu_seqlens, got {tuple(x.shape)}")

    def _check_log_decay(self, tokens: Tensor, log_decay: Tensor) -> None:
        check_tensor("log_decay", log_decay, tokens.device, "x")
        if log_decay.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"log_decay: expected float32, got {log_decay.dtype}; compute it in float32, because its rounding "
                "errors add up over tokens; FSDP2 casts inputs unless its policy has cast_forward_inputs=False"
            )
        heads = self.num_heads * (1 if self.tensor_mesh is None else self.tensor_mesh.size())
        expected = (heads,) if log_decay.ndim == 1 else (*tokens.shape[:2], heads, *(2,) * (log_decay.ndim == 4))
        if log_decay.shape != expected:
            raise ValueError(
                f"log_decay: expected (H,) = ({heads},) or (B, T, H) = {(*tokens.shape[:2], heads)}, got "
                f"{tuple(log_decay.shape)}"
            )

    def _check_cacheable(self) -> None:
        if not self.causal:
            raise ValueError("cache: expected a layer with causal=True, got causal=False, where tokens see later ones")
        self._check_position("cache")

    def _check_position(self, needed_by: str) -> None:
        if self.position is not None:
            parameters = inspect.signature(self.position.forward).parameters
            if "start" not in parameters and all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
                raise ValueError(
                    f"{needed_by}: expected a position module that takes the keyword start, the positions (B,) of the "
                    f"first new tokens; {type(self.position).__name__} does not"
                )


def _shift(x: Tensor, mixing: Tensor, before: Tensor | None, starts: Tensor | None) -> Tensor:
    """a_t·x_{t−1} + (1 − a_t)·x_t for x (B, T, H_kv, D) with a = sigmoid(mixing), in float32 or wider.

    before (B, 1, H_kv, D) is x_{−1}, None for 0. At a start, x_{t−1} counts as 0.
    """
    before = x.new_zeros(x.shape[0], 1, *x.shape[2:]) if before is None else before.to(x.dtype)
    previous = torch.cat([before, x], 1)[:, :-1]
    if starts is not None:
        previous = previous.masked_fill(starts[..., None], 0)  # also NaN of another sequence
    a = mixing.to(torch.promote_types(x.dtype, torch.float32)).sigmoid()[..., None]
    return (a * previous + (1 - a) * x).to(x.dtype)


def _left_padding(padding_mask: Tensor) -> Tensor:
    """Number of padding tokens on the left of the rows, (B,) int32."""
    return ((padding_mask != 0).cumsum(1) == 0).sum(1, dtype=torch.int32)


def mask_bounds(
    name: str, mask: Tensor, remedy: str = "`resets` or cu_seqlens keep documents apart"
) -> tuple[Tensor, Tensor]:
    """First tokens (B,) int32 of the rows of a mask, and their ends. For an empty row both are equal."""
    begin = _left_padding(mask)
    end = begin + (mask != 0).sum(1, dtype=torch.int32)
    index = torch.arange(mask.shape[1], device=mask.device)
    refuse_unless(
        (((index >= begin[:, None]) & (index < end[:, None])) == mask).all(),
        f"{name}: expected in every row one stretch of tokens (True or 1) and padding (False or 0) around it, got "
        f"a row with a gap or with other numbers; {remedy}",
    )
    return begin, end


def _check_aligned(bounds: dict[str, Tensor], rows: int, keys: int) -> None:
    """Refuse an entry with more tokens of x than of memory, as decay_attention does for a whole batch."""
    if not bounds:
        return
    queries = bounds.get("seqused_q", rows) - bounds.get("leftpad_q", 0)
    refuse_unless(
        (queries <= bounds.get("seqused_k", keys) - bounds.get("leftpad_k", 0)).all(),  # type: ignore[union-attr]
        "padding_mask, memory_padding_mask: expected at most as many tokens of x as of memory in every entry, because "
        "causal=False with a decay per token has no distance before the first token of memory",
    )


def _check_integers(name: str, numbers: Tensor, x: Tensor, or_bool: bool = False) -> None:
    expected = "a bool or an integer tensor" if or_bool else "an integer tensor"
    check_tensor(name, numbers, x.device, "x", expected)
    if numbers.is_floating_point() or numbers.is_complex() or (numbers.dtype == torch.bool and not or_bool):
        raise TypeError(f"{name}: expected {expected}, got {numbers.dtype}")


def _check_positioned(positioned: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Check that a position module returned q and k in their shapes and dtypes, and return them."""
    if not isinstance(positioned, (tuple, list)) or len(positioned) != 2:
        raise TypeError(f"position: expected a module that returns (q, k), got a {type(positioned).__name__}")
    for name, got, given in zip("qk", positioned, (q, k), strict=True):
        # autocast casts them later
        wrong_dtype = got.dtype != given.dtype and not torch.is_autocast_enabled(q.device.type)
        if got.shape != given.shape or wrong_dtype:
            raise ValueError(
                f"position: expected {name} back as {tuple(given.shape)} in {given.dtype}, "
                f"got {tuple(got.shape)} in {got.dtype}"
            )
    return positioned


def _build_decay(decay: DecayPreset | nn.Module, embed_dim: int, num_heads: int, options: dict) -> nn.Module | None:
    if isinstance(decay, nn.Module):
        if isinstance(decay, Decay) and decay.num_heads != num_heads:
            raise ValueError(f"decay: expected a module for {num_heads} heads, got one for {decay.num_heads}")
        if isinstance(decay, ScalarDecay) and decay.embed_dim != embed_dim:
            raise ValueError(f"decay: expected a module for embed_dim = {embed_dim}, got one for {decay.embed_dim}")
        return decay
    expected = f"{', '.join(map(repr, DECAYS))} or a module"
    if not isinstance(decay, str):
        raise wrong_type("decay", expected, decay)
    if decay not in DECAYS:
        raise ValueError(f"decay: expected {expected}, got {decay!r}")
    if decay in ("scalar", "none"):
        return ScalarDecay(embed_dim, num_heads, **options) if decay == "scalar" else None
    build = ConstantDecay.retnet if decay.startswith("retnet") else ConstantDecay.alibi
    return build(num_heads, learned=decay.endswith("learned"), **options)


def check_qk_norm(qk_norm: object) -> Any:
    """Return qk_norm, a bool or "per_head"."""
    if qk_norm != "per_head" and not isinstance(qk_norm, bool):
        raise wrong_type("qk_norm", "a bool or 'per_head'", qk_norm)
    return qk_norm
