"""What is measured: shapes with a decay, and their random inputs."""

from dataclasses import dataclass

import torch
from shared.cases import DTYPES
from torch import Tensor

from decayattn.nn.decay import alibi_log_decay

RATES = ("none", "alibi")


@dataclass(frozen=True)
class Workload:
    """One causal sequence; decay is "none", "alibi" (constant slopes) or a mean log-decay per token, as text."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    decay: str

    def __str__(self) -> str:
        decay = self.decay if self.decay in RATES else f"λ̄ {self.decay}"
        return f"T{self.length} H{self.heads}/{self.kv_heads} D{self.head_dim} {self.dtype}, decay {decay}"

    @property
    def kv_row_bytes(self) -> int:
        """A token's keys, values and log-decays of all key heads, which a halo is made of."""
        decays = 4 * self.heads if self.decay not in RATES else 0
        return 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize + decays

    def everything(self, ranks: int) -> int:
        """Bytes that the last rank receives in a forward if it fetches all keys before its slice."""
        return self.length // ranks * (ranks - 1) * self.kv_row_bytes

    def inputs(self, device: torch.device, seed: int) -> dict[str, Tensor]:
        """q, k, v, grad_out (1, T, heads, D), normal, and log_decay, uniform in [2m, 0] around a mean m; the same on
        every rank."""
        generator = torch.Generator(device).manual_seed(seed)
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "grad_out": self.heads}
        found = {
            name: torch.randn(1, self.length, number, self.head_dim, generator=generator, device=device).to(
                DTYPES[self.dtype]
            )
            for name, number in heads.items()
        }
        if self.decay == "alibi":
            found["log_decay"] = torch.tensor(alibi_log_decay(self.heads), device=device)
        elif self.decay != "none":
            uniform = torch.rand(1, self.length, self.heads, generator=generator, device=device)
            found["log_decay"] = 2 * float(self.decay) * uniform
        return found


def workloads(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: str, decays: list[str]
) -> list[Workload]:
    return [Workload(length, heads, kv_heads, head_dim, dtype, decay) for length in lengths for decay in decays]
