"""What is measured: shapes with a decay, and the calls that are compared on them."""

from dataclasses import dataclass, replace

import torch
from shared import peers
from shared.cases import Case, random_inputs
from shared.peers import BASELINE, Attend, Peer
from torch import Tensor

from decayattn import decay_attention
from decayattn.nn.decay import alibi_log_decay, retnet_log_decay

SKIPPING, WHOLE, PRUNED = "skipping", "whole", "fox pruned"
# λ that decays nothing within any length: no tile can be skipped, and α alone says so
_NO_DECAY = -1e-6


@dataclass(frozen=True)
class Workload:
    """One causal problem under the name of its study; `rates` says which log-decays it has, and `gain` multiplies q and
    k, so that scores grow by its square.

    rates: "uniform" (per token, as shared.cases draws them), "none to speak of" (per token, −10⁻⁶), "alibi" or
    "retnet" (constant, one per head).
    """

    study: str
    case: Case
    rates: str = "uniform"
    gain: float = 1.0

    def __str__(self) -> str:
        case, gain = self.case, "" if self.gain == 1.0 else f", q and k times {self.gain:g}"
        return f"{self.study}: B{case.batch} H{case.heads} T{case.length} D{case.head_dim}, decay {self.rates}{gain}"

    def inputs(self, device: str, seed: int) -> dict[str, Tensor]:
        """q, k, v, grad_out (B, T, H, D), and log_decay in natural log."""
        inputs = random_inputs(self.case, device, seed)
        if self.rates == "none to speak of":
            inputs["log_decay"] = torch.full_like(inputs["log_decay"], _NO_DECAY)
        elif self.rates != "uniform":
            rates = alibi_log_decay if self.rates == "alibi" else retnet_log_decay
            inputs["log_decay"] = torch.tensor(rates(self.case.heads), device=device)
        for name in ("q", "k"):
            inputs[name] = inputs[name] * self.gain
        return inputs


def ours(name: str, skip_tolerance: float | str | None, backend: str) -> Peer:
    """decay_attention with a tolerance."""

    def build(case: Case, device: torch.device) -> Attend:
        return lambda q, k, v, log_decay: decay_attention(
            q, k, v, log_decay, skip_tolerance=skip_tolerance, backend=backend
        )

    label = f"decayattn, skip_tolerance={skip_tolerance!r}, decay and its gradient"
    return Peer(name, label, "BTHD", "learned", build, backend)


def _pruned(case: Case, device: torch.device) -> Attend:
    """The official Forgetting Transformer kernel that prunes by its own rule, at its own tolerance of e⁻¹⁰."""
    kernel = peers.per_token(case, "forgetting_transformer.ops.forgetting_attention").forgetting_attention
    return lambda q, k, v, log_decay: kernel(q, k, v, log_decay, head_first=True, adaptive_threshold="auto")


def peers_of(study: str, backend: str) -> list[Peer]:
    """Who runs in a study: without and with skipping, and in "pruning" those who compete."""
    chosen = [ours(WHOLE, None, backend), ours(SKIPPING, "auto", backend)]
    if study != "pruning":
        return chosen
    label = "official Forgetting Transformer, pruned, decay and its gradient"
    others = [peers.OTHERS[BASELINE], replace(peers.OTHERS["fox"], name=PRUNED, label=label, build=_pruned)]
    return [*others, *chosen]


def studies(
    head_dims: list[int], heads: int, dtype: str, mean_log_decay: float, planning: int, pruning: int, constant: int,
    lengths: list[int], tokens: int,
) -> list[Workload]:
    """The workloads of the four studies; planning, pruning and constant are their sequence lengths."""

    def case(length: int, head_dim: int, decay: str = "scalar", batch: int = 1) -> Case:
        return Case(batch, heads, length, head_dim, dtype, decay, mean_log_decay)

    found = []
    for dim in head_dims:
        batch = max(1, tokens // planning)
        found += [
            Workload("planning", case(planning, dim, batch=batch), "none to speak of"),
            Workload("planning", case(planning, dim, batch=batch), gain=4.0),
            Workload("pruning", case(pruning, dim)),
            *(Workload("constant", case(constant, dim, "constant"), rates) for rates in ("alibi", "retnet")),
        ]
    return found + [Workload("lengths", case(length, max(head_dims))) for length in lengths]
