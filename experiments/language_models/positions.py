"""Decay per channel, as a position module for DecayFlashAttention."""

import math

import torch
from torch import Tensor, nn

from decayattn import DecayFlashAttention
from decayattn.problem import without_autocast

# e^140 = e^70 · e^70: a query and a key each keep half of it, and float32 and bfloat16 end at e^88
LARGEST_TOTAL = 140.0


class PerChannelDecay(nn.Module):
    r"""A decay per channel of every head.

    The definition is that of Wall Attention (blog.tilderesearch.com/blog/wall-attn)::

        λ_c[b, t]  = −r · sigmoid(x[b, t] · W_c + b_c)              (B, T, H, D), natural log, never below −r
        S_ij       = s Σ_c q_ic k_jc exp(P_ic − P_jc)               P: the prefix sum of λ over t, float32

    It is computed from q · exp(P − P_mid) and k · exp(P_mid − P). That is exact if r · T ≤ 140: both then stay in the
    range of bfloat16. P_mid is the middle of a channel's range; it cancels, and gets no gradient. A text longer than
    `context` raises. The authors' kernels rescale in their loops instead.

    W starts as 0. b gives the channels of every head half-lives that are spaced evenly in the logarithm, as ScalarDecay
    does for heads. A position module does not receive x: `attach` it to its layer, which then passes x on.

    Args:
        embed_dim, num_heads, head_dim: of the layer, which has as many key heads.
        context: the longest T; r = 140 / context.
        longest_half_life: of the slowest channel at the start, in tokens.

    Raises:
        ValueError: for a longer text.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, head_dim: int, *, context: int, longest_half_life: float = 1024.0
    ):
        super().__init__()
        self.context, self.num_heads = context, num_heads
        self.fastest = LARGEST_TOTAL / context
        self.longest_half_life = longest_half_life
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim, embed_dim))
        self.bias = nn.Parameter(torch.empty(num_heads * head_dim))
        self.weight._no_weight_decay = True  # decayattn.nn.parameter_groups spares it
        self.reset_parameters()
        self._x: Tensor | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero weight; biases with half-lives spaced evenly in the logarithm, from that of 0.9 r to the longest."""
        shortest = math.log(2) / (0.9 * self.fastest)
        longest = max(self.longest_half_life, 2 * shortest)
        spread = torch.linspace(0, 1, len(self.bias) // self.num_heads, device=self.bias.device)
        half_lives = shortest * (longest / shortest) ** spread
        self.weight.zero_()
        self.bias.copy_(torch.logit(math.log(2) / half_lives / self.fastest).repeat(self.num_heads))

    def attach(self, layer: DecayFlashAttention) -> None:
        """Receive the input of this layer at each of its calls; this module is its position."""
        layer.register_forward_pre_hook(_hand_over_input)

    def log_decay(self, x: Tensor) -> Tensor:
        """λ of every channel, (B, T, H, D), for x (B, T, embed_dim); float32, or float64 for a float64 x."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device):
            logits = nn.functional.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
            return -self.fastest * logits.sigmoid().unflatten(-1, (self.num_heads, -1))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        x, self._x = self._x, None
        if x is None:
            raise RuntimeError("PerChannelDecay: expected to be attached to the layer that calls it")
        if x.shape[1] > self.context:
            raise ValueError(f"x: expected at most {self.context} tokens with a decay per channel, got {x.shape[1]}")
        prefix = self.log_decay(x).cumsum(1)
        middle = (prefix[:, :1] + prefix[:, -1:]).detach() / 2
        # two exponentials: the gradient of a quotient has the square of e^70 in it, which float32 has not
        return (q * (prefix - middle).exp()).to(q.dtype), (k * (middle - prefix).exp()).to(k.dtype)


def _hand_over_input(layer: nn.Module, arguments: tuple) -> None:
    # looked up at the call: a copy of the layer has a copy of the module
    layer.position._x = arguments[0]
