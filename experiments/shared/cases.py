"""What is measured: a shape with a decay, its random inputs, and how its work is counted."""

from dataclasses import dataclass

import torch
from torch import Tensor

DECAYS = ("scalar", "constant", "none")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DIRECTIONS = ("forward", "backward")

# a backward has five matrix products per pair of query and key where a forward has two, all alike if D_v = D
BACKWARD_WORK = 2.5


@dataclass(frozen=True)
class Case:
    """One self-attention problem; decay is "scalar", "constant" or "none" as in decay_attention.

    deviation: the standard deviation of the logits, q·k / √D. value_dim: D_v; None for D. row_scales: whether every row
    has a scale of its own, which only ours take.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    decay: str
    mean_log_decay: float
    causal: bool = True
    deviation: float = 1.0
    value_dim: int | None = None
    row_scales: bool = False

    def __str__(self) -> str:
        more = "" if self.value_dim is None else f" D_v{self.value_dim}"
        more += "" if self.causal else ", not causal"
        more += ", a scale per row" if self.row_scales else ""
        more += "" if self.deviation == 1 else f", logits of deviation {self.deviation:g}"
        return f"B{self.batch} H{self.heads} T{self.length} D{self.head_dim} {self.dtype}, decay {self.decay}{more}"

    def flops(self, direction: str) -> float:
        """Useful work: 2·B·H·T²·(D + D_v) forward, 2·B·H·T²·(3 D + 2 D_v) backward; causal half of it, as half of the
        pairs are visible."""
        pairs = self.length**2 / 2 if self.causal else self.length**2
        value_dim = self.value_dim or self.head_dim
        products = 3 * self.head_dim + 2 * value_dim if direction == "backward" else self.head_dim + value_dim
        return 2 * self.batch * self.heads * pairs * products

    def tflops(self, direction: str, milliseconds: float) -> float:
        """TFLOP/s of a call that took that long."""
        return self.flops(direction) / milliseconds / 1e9


def cases(
    head_dims: list[int], lengths: list[int], tokens: int, heads: int, dtype: str, decay: str, mean_log_decay: float,
    causal: bool = True,
) -> list[Case]:
    """Every head dimension at every length, with as many sequences as `tokens` hold (one at least)."""
    return [
        Case(max(1, tokens // length), heads, length, head_dim, dtype, decay, mean_log_decay, causal)
        for head_dim in head_dims
        for length in lengths
    ]


def random_inputs(case: Case, device: str, seed: int) -> dict[str, Tensor]:
    """q, k (B, T, H, D), as large as the logits ask, v, grad_out (B, T, H, D_v), normal, and log_decay in natural log
    unless the case has none.

    Scalar log-decays (B, T, H) are uniform in [2m, 0], m the case's mean log-decay; constant ones (H,) spread evenly
    over that interval. Scales of rows (B, T, H) are uniform in [½, 1½] / √D.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.length, case.heads)
    keys, values = (case.deviation**0.5, case.head_dim), (1.0, case.value_dim or case.head_dim)
    inputs = {
        name: (size * torch.randn(*shape, dim, generator=generator, device=device)).to(DTYPES[case.dtype])
        for name, (size, dim) in {"q": keys, "k": keys, "v": values, "grad_out": values}.items()
    }
    if case.decay == "scalar":
        uniform = torch.rand(shape, generator=generator, device=device)
        inputs["log_decay"] = 2 * case.mean_log_decay * uniform
    elif case.decay == "constant":
        inputs["log_decay"] = 2 * case.mean_log_decay * (torch.arange(case.heads, device=device) + 0.5) / case.heads
    if case.row_scales:
        inputs["scale"] = (torch.rand(shape, generator=generator, device=device) + 0.5) / case.head_dim**0.5
    return inputs
