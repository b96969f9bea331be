"""Attention of other libraries, as plain formulas under their own names and signatures.

Each was written from the signature and documentation of the version named here, and none of their code is in it:

* flash-attn 2.8.4, flash_attn/flash_attn_interface.py: flash_attn_func, flash_attn_varlen_func. The score of causal
  ALiBi: csrc/flash_attn/src/mask.h
* flash-linear-attention 0.5.2 and 0.6.0: fla/ops/forgetting_attn/parallel.py, fla/ops/attn/parallel.py and
  fla/layers/forgetting_attn.py.
* the official Forgetting Transformer at commit 883f260: src/forgetting_transformer/ops/forgetting_attention.py and
  .../model/forgetting_transformer/modeling_forgetting_transformer.py.
* x-transformers 2.26.4, x_transformers/x_transformers.py: AlibiPositionalBias, DataDependentAlibi

`modules()` holds them as the modules that a program would import.
"""

import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, visible: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ + bias) v over the visible pairs, and the log-sum-exp (B, H, i) of rows that see a key. q,
    k, v (B, T, heads, ·), the rest (B, H, i, j)."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale + bias
    sees_a_key = visible.any(-1, keepdim=True)  # a row that does not gives 0
    scores = scores.masked_fill(~visible & sees_a_key, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1) * sees_a_key, v)
    return out, scores.logsumexp(-1)


def distances(rows: int, keys: int) -> Tensor:
    """i − j, the last row standing at the last key."""
    return torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)


def decay_between(log_decay: Tensor, rows: int) -> Tensor:
    """(B, H, i, j): the sum of the log-decays (B, T, H) after j and up to i."""
    alpha = log_decay.cumsum(1).transpose(1, 2)
    return alpha[:, :, alpha.shape[2] - rows :, None] - alpha[:, :, None]


def per_sequence(cu_seqlens: Tensor, function, *tensors: Tensor, queries: Tensor | None = None) -> Tensor:
    """function of every sequence alone, one behind the other; `queries` are the offsets of the first tensor."""
    queries = cu_seqlens if queries is None else queries
    results = []
    for n in range(len(cu_seqlens) - 1):
        offsets = [queries] + [cu_seqlens] * (len(tensors) - 1)
        results.append(function(*(x[:, o[n] : o[n + 1]] for x, o in zip(tensors, offsets, strict=True))))
    return torch.cat(results, 1)


# flash_attn


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):
    distance = distances(q.shape[1], k.shape[1])
    left, right = window_size
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    visible = visible & (distance <= left) if left >= 0 else visible
    visible = visible & (distance >= -right) if right >= 0 else visible
    bias = 0.0
    if alibi_slopes is not None:
        of_keys = causal and left < 0  # the same weights, and another log-sum-exp
        bias = alibi_slopes[..., None, None] * (torch.arange(k.shape[1]) if of_keys else -distance.abs())
    out, softmax_lse = attend(q, k, v, bias, visible, softmax_scale)
    return (out, softmax_lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):
    def one(q, k, v):
        return flash_attn_func(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, alibi_slopes=alibi_slopes
        )

    return per_sequence(cu_seqlens_k, one, q[None], k[None], v[None], queries=cu_seqlens_q)[0]


# fla


def parallel_attn(
    q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, chunk_indices=None, *, sink_bias=None
):
    if cu_seqlens is not None:
        g = q.new_zeros(q.shape[:3]) if g is None else g

        def one(q, k, v, g):
            return parallel_attn(q, k, v, g, scale, window_size, sink_bias=sink_bias)

        return per_sequence(cu_seqlens, one, q, k, v, g)
    distance = distances(q.shape[1], k.shape[1])
    visible = (distance >= 0) & (distance < (q.shape[1] if window_size is None else window_size))
    bias = torch.zeros(1, q.shape[2], *distance.shape) if g is None else decay_between(g, q.shape[1])
    if sink_bias is not None:  # one more key: its score is the sink, its value 0
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        sink = sink_bias[:, None, None].expand(len(bias), -1, q.shape[1], 1)
        bias, visible = torch.cat([bias, sink], -1), F.pad(visible, (0, 1), value=True)
    return attend(q, k, v, bias, visible, scale)[0]


def parallel_forgetting_attn(q, k, v, g, scale=None, window_size=None, cu_seqlens=None):
    return parallel_attn(q, k, v, g, scale, window_size, cu_seqlens)


class ForgettingAttention(nn.Module):
    """fla.layers.ForgettingAttention, all that shapes its output and its state dict."""

    def __init__(
        self, hidden_size=2048, num_heads=32, num_kv_heads=None, qkv_bias=False, qk_norm=False, window_size=None,
        use_output_gate=False, layer_idx=None,
    ):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.head_dim, bias=qkv_bias)
        self.f_proj = nn.Linear(hidden_size, num_heads, bias=True)
        self.g_proj = nn.Linear(hidden_size, hidden_size, bias=False) if use_output_gate else None
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.q_norm = GroupNorm(num_heads, self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = GroupNorm(kv_heads, self.head_dim) if qk_norm else nn.Identity()

    def forward(self, hidden_states):
        q, k = self.q_norm(self.q_proj(hidden_states)), self.k_norm(self.k_proj(hidden_states))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, self.v_proj(hidden_states)))
        out = parallel_forgetting_attn(q, k, v, F.logsigmoid(self.f_proj(hidden_states))).flatten(-2)
        if self.g_proj is not None:
            out = self.g_proj(hidden_states).sigmoid() * out
        return self.o_proj(out), None, None


class GroupNorm(nn.Module):
    """An RMSNorm of every head of (…, heads · head_dim), with a gain for each, or for all of them (heads = 1)."""

    def __init__(self, heads: int, head_dim: int, eps: float = 1e-5):
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.weight = nn.Parameter(torch.ones(heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.unflatten(-1, (-1, self.head_dim)), (self.head_dim,), eps=self.eps)
        return (normed * self.weight.view(-1, self.head_dim)).flatten(-2)


# forgetting_transformer


def forgetting_attention(
    q, k, v, log_fgate, *, head_first=False, seq_start=None, sm_scale=None, adaptive_threshold=None
):
    if head_first:
        q, k, v, log_fgate = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    bias = decay_between(log_fgate, q.shape[1])
    visible = (distances(q.shape[1], k.shape[1]) >= 0).expand_as(bias)
    if seq_start is not None:
        visible = visible & (torch.arange(k.shape[1]) >= seq_start[:, None, None, None])
    if adaptive_threshold is not None:
        visible = visible & ~pruned(q, k, bias, sm_scale, adaptive_threshold)
    out, _ = attend(q, k, v, bias, visible, sm_scale)
    return out.transpose(1, 2) if head_first else out


def pruned(q: Tensor, k: Tensor, bias: Tensor, sm_scale: float | None, adaptive_threshold) -> Tensor:
    """The pairs that may be left out: the kernel leaves out tiles that have no others."""
    if isinstance(adaptive_threshold, str):
        longest = [x.norm(dim=-1).amax(1) for x in (q, k)]
        bound = longest[0] * longest[1] * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
        adaptive_threshold = -(2 * bound + math.log(k.shape[1])) - 10
    threshold = torch.as_tensor(adaptive_threshold).broadcast_to(bias.shape[:2])
    return bias < threshold[..., None, None]


class ForgettingAttentionLayer(nn.Module):
    """forgetting_transformer.model.ForgettingAttentionLayer, all that shapes its output and its state dict."""

    def __init__(
        self, hidden_size=2048, num_heads=32, use_output_gate=False, ogate_act="sigmoid", fgate_type="full",
        fgate_bias_init=False, decay_time_min=None, decay_time_max=None, use_output_norm=False, qk_norm=False,
        qk_norm_share_param_across_head=False, use_k_shift=False, use_v_shift=False, norm_eps=1e-6,
    ):
        super().__init__()
        self.num_heads, self.head_dim, self.ogate_act = num_heads, hidden_size // num_heads, ogate_act

        def linear(shifted: bool) -> nn.Module:
            if not shifted:
                return nn.Linear(hidden_size, hidden_size, bias=False)
            parts = {"linear": linear(False), "shift_proj": nn.Linear(hidden_size, num_heads, bias=False)}
            return nn.ModuleDict(parts)  # for its names

        self.q_proj, self.k_proj, self.v_proj = linear(False), linear(use_k_shift), linear(use_v_shift)
        self.o_proj = linear(False)
        self.fgate_proj = nn.Linear(hidden_size, num_heads, bias=True) if fgate_type == "full" else None
        if fgate_type in ("bias_only", "fixed"):
            bias = torch.zeros(num_heads)
            if fgate_bias_init:  # e-folding times spaced evenly in the logarithm
                times = torch.linspace(math.log(decay_time_min), math.log(decay_time_max), num_heads).exp()
                bias = -torch.expm1(1 / times).log()
            self.fgate_bias = nn.Parameter(bias, requires_grad=fgate_type == "bias_only")
        self.ogate_proj = linear(False) if use_output_gate else None
        self.output_norm = GroupNorm(num_heads, self.head_dim, norm_eps) if use_output_norm else None
        self.q_norm = self.k_norm = None
        if qk_norm:
            of_all = qk_norm_share_param_across_head
            self.q_norm = GroupNorm(1 if of_all else num_heads, self.head_dim)
            self.k_norm = GroupNorm(1 if of_all else num_heads, self.head_dim)
        self.fgate_type = fgate_type

    def forward(self, hidden_states):
        q, k, v = (self.project(x, hidden_states) for x in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = (norm(x.flatten(-2)).view_as(x) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if self.fgate_type == "full":
            log_fgate = F.logsigmoid(self.fgate_proj(hidden_states))
        elif self.fgate_type == "none":
            log_fgate = q.new_zeros(q.shape[:3])
        else:
            log_fgate = F.logsigmoid(self.fgate_bias).expand(q.shape[:3])
        out = forgetting_attention(q, k, v, log_fgate).flatten(-2)
        if self.output_norm is not None:
            out = self.output_norm(out)
        if self.ogate_proj is not None:
            gate = self.ogate_proj(hidden_states)
            out = out * (gate.sigmoid() if self.ogate_act == "sigmoid" else F.silu(gate))
        return self.o_proj(out), None, None

    def project(self, projection, hidden_states):
        """(B, T, heads, ·), mixed with the token before if the projection has a shift_proj."""
        if isinstance(projection, nn.Linear):
            return projection(hidden_states).unflatten(-1, (self.num_heads, -1))
        x = projection["linear"](hidden_states).unflatten(-1, (self.num_heads, -1))
        alpha = projection["shift_proj"](hidden_states).sigmoid()[..., None]
        previous = x.roll(1, 1)
        previous[:, 0] = 0
        return alpha * previous + (1 - alpha) * x


# x_transformers


class AlibiPositionalBias(nn.Module):
    def __init__(self, heads, total_heads=None, slopes=None):
        super().__init__()
        self.heads, self.total_heads = heads, heads if total_heads is None else total_heads
        power = 2 ** math.floor(math.log2(heads))
        geometric = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
        between = [2.0 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
        self.slopes = (geometric + between)[:heads] if slopes is None else slopes

    def forward(self, i, j):
        slopes = torch.tensor([*self.slopes, *[0.0] * (self.total_heads - self.heads)])
        return -slopes[:, None, None] * distances(i, j).abs()


class DataDependentAlibi(nn.Module):
    def __init__(self, dim, heads, causal=True, bias_init=5.0, post_log_scale=1.0):
        super().__init__()
        self.to_forget_gates = nn.Sequential(nn.Linear(dim, heads), nn.LogSigmoid())
        nn.init.constant_(self.to_forget_gates[0].bias, bias_init)
        self.post_log_scale = post_log_scale

    def forward(self, x):
        return decay_between(self.to_forget_gates(x) * self.post_log_scale, x.shape[1])


# torch.nn.attention.flex_attention, which has no backward on a CPU


def create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device="cuda"):
    return mask_mod(*pairs(B or 1, H or 1, Q_LEN, KV_LEN))


def flex_attention(query, key, value, score_mod, block_mask, scale=None, enable_gqa=False):
    index = pairs(*query.shape[:3], key.shape[2])
    bias = score_mod(torch.zeros(1), *index)  # as far as it only adds
    visible = block_mask.expand(1, 1, query.shape[2], key.shape[2])
    heads_last = (x.transpose(1, 2) for x in (query, key, value))
    return attend(*heads_last, bias, visible, scale)[0].transpose(1, 2)


def pairs(*sizes: int) -> list[Tensor]:
    """b, h, i, j as tensors that broadcast against one another."""
    return [torch.arange(size).reshape(-1, *[1] * (3 - axis)) for axis, size in enumerate(sizes)]


def modules() -> dict[str, ModuleType]:
    """Name → module, for sys.modules."""
    contents = {
        "flash_attn": [flash_attn_func, flash_attn_varlen_func],
        "torch.nn.attention.flex_attention": [create_block_mask, flex_attention],
        "fla": [],
        "fla.ops": [],
        "fla.ops.attn": [parallel_attn],
        "fla.ops.forgetting_attn": [parallel_forgetting_attn],
        "fla.layers": [ForgettingAttention],
        "forgetting_transformer": [forgetting_attention],
        "forgetting_transformer.model": [ForgettingAttentionLayer],
        "x_transformers": [],
        "x_transformers.x_transformers": [AlibiPositionalBias, DataDependentAlibi],
    }
    found = {}
    for name, objects in contents.items():
        found[name] = ModuleType(name)
        vars(found[name]).update({x.__name__: x for x in objects})
    return found
