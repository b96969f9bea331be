"""Kernels that are measured. A peer builds, for a case, a call on tensors in the layout that suits it best.

Every preparation that depends on the log-decay (a cumulative sum, say) is part of the call, so that it is timed; what
depends on the shape alone (a compiled kernel, a block mask) is not.
"""

import functools
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import decayattn
from benchmarks.harness import Absent, Case, Prepared, prepare, reason

BASELINE = "cudnn"
Attend = Callable[..., Tensor]
_BEFORE = "decayattn_before"


@dataclass(frozen=True)
class Peer:
    """A kernel to compare: build(case, device) returns attend(q, k, v, log_decay) -> out, or raises Absent.

    layout: "BTHD" as decay_attention's, or "BHTD". decay: "none" (it gets no log_decay), "fixed" (one that wants no
    gradient) or "learned". backend: one of ours. row_scales: attend takes the case's scale per row, too, as `scale`.
    """

    name: str
    layout: str
    decay: str
    build: Callable[[Case, torch.device], Attend]
    backend: str | None = None
    row_scales: bool = False

    def prepare(self, case: Case, inputs: dict[str, Tensor]) -> Prepared:
        """The call on these inputs; raises Absent where the peer cannot be had."""
        if not self.row_scales and self.decay != "none" and not (case.causal and case.decay == "scalar"):
            raise Absent("takes causal cases with a scalar decay only")
        # the graph is kept to time one backward many times, so no buffer of it may be given away
        functorch_config.donated_buffer = False
        attend = self.build(case, inputs["q"].device)
        left = {"log_decay": self.decay == "none", "scale": not self.row_scales}
        own = {name: x for name, x in inputs.items() if not left.get(name)}
        return prepare(attend, own, self.layout, fixed=["log_decay"] * (self.decay == "fixed"))


def ours(backend: str, decay: bool = True, *, version: ModuleType | None = None, **options: object) -> Peer:
    """decay_attention with one of its backends, taken literally, and these options. By default it skips nothing: all
    work that is counted is done. Another version of the package is a peer: its errors are reported, not judged."""
    options = {"skip_tolerance": None} | options
    package = version or decayattn
    return Peer(
        f"decayattn {backend}{' before' if version else ''}", "BTHD", "learned" if decay else "none",
        backend=None if version else backend, row_scales=True,
        build=lambda case, device: lambda q, k, v, log_decay, scale=None: package.decay_attention(
            q, k, v, log_decay, scale=scale, causal=case.causal, backend=backend, **options
        ),
    )


@functools.cache
def other_version(tree: Path) -> ModuleType:
    """The package of `tree`, a checkout of another commit, one per process. A copy with another name in every source:
    two versions may share neither modules nor PyTorch operators."""
    assert _BEFORE not in sys.modules, "another tree is loaded"
    # not removed: Triton reads a kernel's source when it is first launched
    folder = Path(tempfile.mkdtemp(prefix=_BEFORE))
    shutil.copytree(tree / "decayattn", folder / _BEFORE, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / _BEFORE).rglob("*.py"):
        path.write_text(re.sub(r"\bdecayattn\b", _BEFORE, path.read_text()))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(_BEFORE)
    finally:
        sys.path.remove(str(folder))


def cudnn(case: Case, device: torch.device) -> Attend:
    """torch's own attention on cuDNN, or an error if that one cannot take the tensors."""

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: None) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    return attend


def flex(case: Case, device: torch.device) -> Attend:
    """FlexAttention, compiled for the shape, the decay in its score_mod. One captured tensor that is indexed by query
    and by key has no gradient: α is captured twice."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.length, case.length, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, alpha_rows: Tensor, alpha_columns: Tensor) -> Tensor:
        def score_mod(score, b, h, i, j):
            return score + (alpha_rows[b, h, i] - alpha_columns[b, h, j])

        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    compiled = torch.compile(call, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        alpha = log_decay.cumsum(-1)
        return compiled(q, k, v, mask, alpha, alpha.clone())

    return attend


def fla(case: Case, device: torch.device, path: str = "") -> Attend:
    """flash-linear-attention's forgetting attention (github.com/fla-org/flash-linear-attention), by its Triton kernels,
    or by those that the environment variable `path` selects. Where these cannot run, fla takes Triton's silently."""
    kernel = imported("fla.ops.forgetting_attn.parallel").parallel_forgetting_attn
    switches = {name: str(int(name == path)) for name in ("FLA_TILELANG", "FLA_ATTN_GLUON", "FLA_GLUON")}
    os.environ.update(switches)
    chosen = path and imported("fla.backends")._get_operation_registry("attn").get_active()
    if path and (chosen is None or chosen.backend_type.upper() not in path):
        raise Absent(f"fla does not take the kernels of {path} here")

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        os.environ.update(switches)  # read in every forward, and in every backward
        out = kernel(q, k, v, log_decay)
        out.register_hook(lambda _: os.environ.update(switches))
        return out

    return attend


def fox(case: Case, device: torch.device, **options: object) -> Attend:
    """The Forgetting Transformer's own kernel (github.com/zhixuan-lin/forgetting-transformer); it prunes with
    adaptive_threshold="auto", at its own tolerance of e⁻¹⁰."""
    kernel = imported("forgetting_transformer.ops.forgetting_attention").forgetting_attention
    return lambda q, k, v, log_decay: kernel(q, k, v, log_decay, head_first=True, **options)


def flash_attn(case: Case, device: torch.device) -> Attend:
    """FlashAttention-4, the kernels in CuTe (github.com/Dao-AILab/flash-attention, flash_attn.cute)."""
    kernel = imported("flash_attn.cute").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: None) -> Tensor:
        out = kernel(q, k, v, causal=case.causal)
        return out[0] if isinstance(out, tuple) else out  # some releases return the log-sum-exp, too

    return attend


def imported(module: str) -> ModuleType:
    """A peer's module, or Absent with the reason."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that breaks while it is imported is as absent as one that is not installed
        raise Absent(f"cannot be imported: {reason(error)}") from error


OTHERS = {
    peer.name: peer
    for peer in (
        Peer(BASELINE, "BHTD", "none", cudnn), Peer("flash_attn", "BTHD", "none", flash_attn),
        Peer("flex", "BHTD", "fixed", flex), Peer("flex-grad", "BHTD", "learned", flex),
        Peer("fla", "BTHD", "learned", fla), Peer("fox", "BHTD", "learned", fox),
        Peer("fla tilelang", "BTHD", "learned", functools.partial(fla, path="FLA_TILELANG")),
        Peer("fla gluon", "BTHD", "learned", functools.partial(fla, path="FLA_ATTN_GLUON")),
    )
}
PRUNED = Peer("fox pruned", "BHTD", "learned", functools.partial(fox, adaptive_threshold="auto"))
