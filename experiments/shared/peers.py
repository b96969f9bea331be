"""Who is measured. A peer builds, for a case, a call on tensors in the layout that suits it best.

Every preparation that depends on the log-decay (a cumulative sum, say) is part of the call, so that it is timed; what
depends on the shape alone (a compiled kernel, a block mask) is not.
"""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from decayattn import decay_attention
from shared import other_versions
from shared.cases import Case

BASELINE = "cudnn"

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
Build = Callable[[Case, torch.device], Attend]


class Absent(Exception):
    """This peer cannot run this case here; the message says why."""


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@dataclass(frozen=True)
class Peer:
    """A kernel to compare.

    build(case, device) returns attend(q, k, v, log_decay) -> out, or raises Absent. `layout` says how its tensors lie
    in memory: "BTHD" as decay_attention's, "BHTD" with heads before time (log_decay then is (B, H, T)). `decay` is
    "none" (it gets no log_decay), "fixed" (one that wants no gradient) or "learned". `backend` names one of ours.
    With row_scales, attend takes the case's scale per row, too, as `scale`.
    """

    name: str
    label: str
    layout: str
    decay: str
    build: Build
    backend: str | None = None
    row_scales: bool = False


def ours(backend: str, decay: bool = True) -> Peer:
    """decay_attention with one of its backends, taken literally. It skips nothing: all work that is counted is done."""
    return _ours(decay_attention, backend, decay)


def before(tree: Path, backend: str, decay: bool = True) -> Peer:
    """The same of another version of the package, in `tree`; as a peer: its errors are reported, not judged."""
    peer = _ours(other_versions.load(tree).decay_attention, backend, decay)
    return dataclasses.replace(peer, name=f"{peer.name} before", label=f"{peer.label}, before", backend=None)


def _ours(decay_attention: Callable[..., Tensor], backend: str, decay: bool) -> Peer:
    name, what, kind = f"decayattn {backend}", "decay and its gradient", "learned"
    if not decay:
        name, what, kind = without_decay(name), "no decay", "none"
    return Peer(
        name, f"decayattn ({backend}), {what}", "BTHD", kind, backend=backend,
        row_scales=True,
        build=lambda case, device: lambda q, k, v, log_decay, scale=None: decay_attention(
            q, k, v, log_decay, scale=scale, causal=case.causal, skip_tolerance=None, backend=backend
        ),
    )


def without_decay(name: str) -> str:
    """What a peer of ours is called that gets no decay."""
    return f"{name} none"


def sdpa(backend: SDPBackend) -> Build:
    """torch's own attention on one backend, or an error if that one cannot take the tensors."""

    def build(case: Case, device: torch.device) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: None) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=case.causal)

        return attend

    return build


def _flex(case: Case, device: torch.device) -> Attend:
    """FlexAttention, compiled for the shape, the decay in its score_mod.

    It has no gradient for one captured tensor that is indexed both by query and by key: α is captured twice, as two
    tensors, each indexed once.
    """
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    if not case.causal:
        raise Absent("written here for causal cases only")
    # the graph is kept to time one backward many times, so no buffer of it may be given away
    functorch_config.donated_buffer = False
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.length, case.length, device=device)

    def scalar(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, alpha_rows: Tensor, alpha_columns: Tensor):
        def score_mod(score, b, h, i, j):
            return score + (alpha_rows[b, h, i] - alpha_columns[b, h, j])

        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    def constant(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, log_decay: Tensor):
        def score_mod(score, b, h, i, j):
            return score + log_decay[h] * (i - j)

        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask):
        return flex_attention(q, k, v, block_mask=mask)

    function = {"scalar": scalar, "constant": constant, "none": plain}[case.decay]
    compiled = torch.compile(function, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Tensor:
        if case.decay == "scalar":
            alpha = log_decay.cumsum(-1)
            return compiled(q, k, v, mask, alpha, alpha.clone())
        return compiled(q, k, v, mask) if case.decay == "none" else compiled(q, k, v, mask, log_decay)

    return attend


def _flex_with_gradient(case: Case, device: torch.device) -> Attend:
    if case.decay == "none":
        raise Absent("without a decay it is the same as flex")
    return _flex(case, device)


def _fla(case: Case, device: torch.device) -> Attend:
    """flash-linear-attention's forgetting attention (github.com/fla-org/flash-linear-attention)."""
    kernel = per_token(case, "fla.ops.forgetting_attn.parallel").parallel_forgetting_attn
    return lambda q, k, v, log_decay: kernel(q, k, v, log_decay)


def _fox(case: Case, device: torch.device) -> Attend:
    """The Forgetting Transformer's own kernel, without pruning (github.com/zhixuan-lin/forgetting-transformer)."""
    kernel = per_token(case, "forgetting_transformer.ops.forgetting_attention").forgetting_attention
    return lambda q, k, v, log_decay: kernel(q, k, v, log_decay, head_first=True)


def _flash_attn(case: Case, device: torch.device) -> Attend:
    """FlashAttention-4, the kernels in CuTe (github.com/Dao-AILab/flash-attention, flash_attn.cute)."""
    kernel = imported("flash_attn.cute").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: None) -> Tensor:
        out = kernel(q, k, v, causal=case.causal)
        return out[0] if isinstance(out, tuple) else out  # some releases return the log-sum-exp beside it

    return attend


def per_token(case: Case, module: str) -> ModuleType:
    """The module of a peer that takes one decay per token and nothing else."""
    if case.decay != "scalar":
        raise Absent(f"takes a scalar decay only, not {case.decay}")
    if not case.causal:
        raise Absent("takes causal cases only")
    return imported(module)


def imported(module: str) -> ModuleType:
    """A peer's module, or Absent with the reason."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that breaks while it is imported is as absent as one that is not installed
        raise Absent(f"cannot be imported: {reason(error)}") from error


OTHERS = {
    peer.name: peer
    for peer in (
        Peer(BASELINE, "SDPA cuDNN, no decay", "BHTD", "none", sdpa(SDPBackend.CUDNN_ATTENTION)),
        Peer("flash", "SDPA FlashAttention, no decay", "BHTD", "none", sdpa(SDPBackend.FLASH_ATTENTION)),
        Peer("flash_attn", "FlashAttention-4, no decay", "BTHD", "none", _flash_attn),
        Peer("flex", "FlexAttention, decay without its gradient", "BHTD", "fixed", _flex),
        Peer("flex-grad", "FlexAttention, decay and its gradient", "BHTD", "learned", _flex_with_gradient),
        Peer("fla", "flash-linear-attention, decay and its gradient", "BTHD", "learned", _fla),
        Peer("fox", "official Forgetting Transformer, decay and its gradient", "BHTD", "learned", _fox),
    )
}
