"""Calls that a rank makes on its own, once the keys have arrived."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decayattn import autograd, normalize, reference
from decayattn.backends import registry
from decayattn.functional import decay_attention, decay_attention_varlen
from decayattn.problem import (
    AttentionProblem,
    BackendName,
    GradientRequest,
    Gradients,
    Inputs,
    Precomputed,
    Saved,
)


class Packed(NamedTuple):
    """Packed sequences, for a batch of one."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_query: int
    longest_key: int


def attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: Tensor | float, packed: Packed | None,
    return_lse: bool, options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """decay_attention, or decay_attention_varlen, of tensors (B, T, ·)."""
    if packed is None:
        return decay_attention(q, k, v, log_decay, scale=scale, return_lse=return_lse, **options)
    result = decay_attention_varlen(
        q.squeeze(0), k.squeeze(0), v.squeeze(0),
        log_decay.squeeze(0) if log_decay is not None and log_decay.ndim == 3 else log_decay,
        cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_k=packed.cu_seqlens_k, max_seqlen_q=packed.longest_query,
        max_seqlen_k=packed.longest_key, scale=scale.squeeze(0) if isinstance(scale, Tensor) else scale,
        return_lse=return_lse, **options,
    )
    return result[None] if isinstance(result, Tensor) else (result[0][None], result[1][None])


class Call(NamedTuple):
    """decay_attention of causal rows with checked arguments: a forward and a backward for a caller's Function."""

    problem: AttentionProblem
    inputs: Inputs
    backend: BackendName

    @classmethod
    def of(cls, inputs: Inputs, options: dict[str, Any]) -> "Call":
        problem = normalize.problem_of(inputs, True, options["window_size"], options["skip_tolerance"])
        return cls(problem, inputs, registry.select(problem, options["backend"]))

    def forward(self, with_lse: bool, precomputed: Precomputed) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """lse, if requested, and the tensors for the backward. The result is written to precomputed.out."""
        if self.backend == "reference":
            out, of_rows = reference.attention(self.problem, self.inputs)
            precomputed.out.copy_(out)
            return of_rows, ()
        _, lse, saved = autograd.forward(self.problem, self.inputs, self.backend, with_lse, precomputed)
        return lse, saved

    def backward(
        self, out: Tensor, saved: Sequence[Tensor | None], d_out: Tensor, d_lse: Tensor | None, asked: GradientRequest,
        dq: Tensor,
    ) -> Gradients:
        """Gradients of the call. dq: output buffer for that of q."""
        if self.backend == "reference":
            found = self._differentiated(d_out, d_lse)
            dq.copy_(found.dq)
            return found
        of_forward = Saved(*saved)  # type: ignore[arg-type]  # None without a sink
        return autograd.backward(self.problem, self.inputs, self.backend, out, of_forward, d_out, d_lse, asked, dq)

    def _differentiated(self, d_out: Tensor, d_lse: Tensor | None) -> Gradients:
        """Gradients by autograd, through another forward of the reference."""
        with torch.enable_grad():
            leaves = {
                name: x.detach().requires_grad_()
                for name, x in self.inputs._asdict().items() if isinstance(x, Tensor)
            }
            out, lse = reference.attention(self.problem, Inputs(**leaves, scale=self.inputs.scale))
            outputs, grads = ([out], [d_out]) if d_lse is None else ([out, lse], [d_out, d_lse])
            found = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True))
        return Gradients(
            found["q"], found["k"], found["v"], found.get("log_decay"), found.get("row_scale"), None, found.get("sink")
        )
