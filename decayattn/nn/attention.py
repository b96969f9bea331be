"""DecayFlashAttention: self-attention with decaying scores, as a layer."""

import math
from numbers import Real

import torch
from torch import Tensor, nn

from decayattn.functional import decay_attention
from decayattn.nn.decay import ConstantDecay, Decay, ScalarDecay, check_bool, check_positive_int
from decayattn.problem import MAX_HEAD_DIM


class DecayFlashAttention(nn.Module):
    r"""Multi-head self-attention whose scores decay with distance: projections around decay_attention.

    With x (B, T, embed_dim)::

        q, k, v, g = x · in_proj                  H heads of q and g, H_kv of k and v
        q, k       = position(norm(q), norm(k))   where asked for
        out        = decay_attention(q, k, v, decay(x))
        y          = (out · sigmoid(g)) · out_proj

    A pre-norm transformer block around it::

        class Block(nn.Module):
            def __init__(self, width, num_heads):
                super().__init__()
                self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
                self.attention = DecayFlashAttention(width, num_heads, decay="scalar")
                self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

            def forward(self, x):
                x = x + self.attention(self.attention_norm(x))
                return x + self.mlp(self.mlp_norm(x))

    Args:
        embed_dim: width of input and output.
        num_heads: query heads H.
        num_kv_heads: key and value heads H_kv, a divisor of H (grouped-query attention); default H.
        head_dim: D of queries and keys, up to 256; default embed_dim / num_heads.
        value_dim: D_v of a value head, up to 256; default head_dim.
        decay: where the log-decay comes from.
            "scalar": ScalarDecay, a forget gate per token and head (the Forgetting Transformer, arXiv 2503.02130).
            "constant": ConstantDecay.alibi, frozen. "none": no decay.
            A module: a configured ScalarDecay or ConstantDecay, or any module of your own that maps x to a float32
            log_decay of shape (H,) or (B, T, H).
        causal: a token sees itself and the past; otherwise everything, with the decay in both directions.
        bias: biases in both projections.
        qk_norm: RMSNorm over head_dim of every query and key head; one learned gain for the queries, one for the keys.
        output_gate: multiply the output by sigmoid(g) before the output projection.
        position: a module called as position(q, k), q (B, T, H, D) and k (B, T, H_kv, D), that returns both in the same
            shapes and dtype: rotary embeddings, for example.
        scale: of the scores: a number, default 1/√D; "learned": exp(log_scale_h)/√D, a parameter per head, 0 at first.
        backend: as in decay_attention; a plain attribute that may be changed at any time.
        device, dtype: of the parameters, as in torch.nn; those of the decay stay at least float32.

    The projections start as nn.Linear does (variance 1/(3·fan_in), at width 768 the 0.02 of GPT-2) with zero biases;
    shrinking out_proj with the depth is the business of the model, which knows the depth.

    After `.bfloat16()` or `.half()`, and under autocast, the decay stays float32 and everything else follows.

    Raises:
        TypeError, ValueError: for every bad argument, by name.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        decay: str | nn.Module = "scalar",
        causal: bool = True,
        bias: bool = False,
        qk_norm: bool = False,
        output_gate: bool = False,
        position: nn.Module | None = None,
        scale: float | str | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.embed_dim = check_positive_int("embed_dim", embed_dim)
        self.num_heads = check_positive_int("num_heads", num_heads)
        self.num_kv_heads = _check_kv_heads(num_kv_heads, num_heads)
        head_dim = _default_head_dim(embed_dim, num_heads) if head_dim is None else head_dim
        self.head_dim = _check_head_dim("head_dim", head_dim)
        self.value_dim = _check_head_dim("value_dim", self.head_dim if value_dim is None else value_dim)
        self.causal = check_bool("causal", causal)
        self.qk_norm = check_bool("qk_norm", qk_norm)
        self.output_gate = check_bool("output_gate", output_gate)
        self.position = _check_position(position)
        self.scale = _check_scale(scale)
        self.backend = backend

        options = {"device": device, "dtype": dtype}
        q_width, k_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        v_width, out_width = self.num_kv_heads * self.value_dim, num_heads * self.value_dim
        # one product; q, k, v and g are slices of its rows, which the kernels read in place
        self.split_sizes = (q_width, k_width, v_width, out_width if output_gate else 0)
        self.in_proj = nn.Linear(embed_dim, sum(self.split_sizes), bias=check_bool("bias", bias), **options)
        self.out_proj = nn.Linear(out_width, embed_dim, bias=bias, **options)
        # an explicit eps, because torch's default depends on the dtype (and on its version)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **options) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **options) if qk_norm else None
        self.log_scale = nn.Parameter(torch.empty(num_heads, **options)) if scale == "learned" else None
        self.decay = _build_decay(decay, embed_dim, num_heads, options)
        self._zero_start()

    def reset_parameters(self) -> None:
        """Initialise all but decay and position, which are modules with an initialisation of their own."""
        for module in (self.in_proj, self.out_proj, self.q_norm, self.k_norm):
            if module is not None:
                module.reset_parameters()
        self._zero_start()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, embed_dim) → (B, T, embed_dim), in the dtype of the projections (autocast's where it is on)."""
        self._check_input(x)
        q, k, v, gate = self.in_proj(x).split(self.split_sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.value_dim))
        if self.qk_norm:
            q, k = _normalise(q, self.q_norm), _normalise(k, self.k_norm)
        if self.position is not None:
            q, k = self.position(q, k)
        log_decay = None if self.decay is None else self.decay(x)
        scale = self._score_scale()
        out = decay_attention(q, k, v, log_decay, scale=scale, causal=self.causal, backend=self.backend).flatten(-2)
        if self.output_gate:
            out = out * gate.sigmoid()
        return self.out_proj(out)

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "causal", "qk_norm", "output_gate")
        options = [f"{name}={getattr(self, name)}" for name in names]
        return ", ".join([*options, f"scale={self.scale!r}", f"backend={self.backend!r}"])

    @torch.no_grad()
    def _zero_start(self) -> None:
        for parameter in (self.in_proj.bias, self.out_proj.bias, self.log_scale):
            if parameter is not None:
                parameter.zero_()

    def _score_scale(self) -> Tensor | float | None:
        if self.log_scale is None:
            return self.scale
        wide = torch.promote_types(self.log_scale.dtype, torch.float32)
        return self.log_scale.to(wide).exp() / math.sqrt(self.head_dim)

    def _check_input(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {x!r} of type {type(x).__name__}")
        if x.ndim != 3 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x: expected shape (B, T, embed_dim = {self.embed_dim}), got {tuple(x.shape)}")


def _normalise(heads: Tensor, norm: nn.RMSNorm) -> Tensor:
    """The norm in its own dtype: under autocast that is float32, in which autocast runs LayerNorm too."""
    return norm(heads.to(norm.weight.dtype)).to(heads.dtype)


def _build_decay(decay: str | nn.Module, embed_dim: int, num_heads: int, options: dict) -> nn.Module | None:
    if isinstance(decay, nn.Module):
        if isinstance(decay, Decay) and decay.num_heads != num_heads:
            raise ValueError(f"decay: expected a module for {num_heads} heads, got one for {decay.num_heads}")
        return decay
    if not isinstance(decay, str):
        raise TypeError(
            f"decay: expected 'scalar', 'constant', 'none' or a module, got {decay!r} of type {type(decay).__name__}"
        )
    if decay == "scalar":
        return ScalarDecay(embed_dim, num_heads, **options)
    if decay == "constant":
        return ConstantDecay.alibi(num_heads, **options)
    if decay == "none":
        return None
    raise ValueError(f"decay: expected 'scalar', 'constant', 'none' or a module, got {decay!r}")


def _check_kv_heads(num_kv_heads: int | None, num_heads: int) -> int:
    if num_kv_heads is None:
        return num_heads
    if num_heads % check_positive_int("num_kv_heads", num_kv_heads) != 0:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {num_heads}, got {num_kv_heads}")
    return num_kv_heads


def _default_head_dim(embed_dim: int, num_heads: int) -> int:
    if embed_dim % num_heads != 0:
        raise ValueError(f"embed_dim: expected a multiple of num_heads = {num_heads} without head_dim, got {embed_dim}")
    return embed_dim // num_heads


def _check_head_dim(name: str, value: int) -> int:
    if check_positive_int(name, value) > MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected at most {MAX_HEAD_DIM}, got {value}")
    return value


def _check_position(position: nn.Module | None) -> nn.Module | None:
    if position is not None and not isinstance(position, nn.Module):
        raise TypeError(f"position: expected a torch.nn.Module, got {position!r} of type {type(position).__name__}")
    return position


def _check_scale(scale: float | str | None) -> float | str | None:
    if scale is None or scale == "learned":
        return scale
    if isinstance(scale, str):
        raise ValueError(f"scale: expected a number, 'learned' or None, got {scale!r}")
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale: expected a number, 'learned' or None, got {scale!r} of type {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return float(scale)
