"""A peer's call, set up with its tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.cases import Case
from shared.peers import Attend, Peer


@dataclass
class Prepared:
    """A peer's call for one case, with its tensors in its own layout; those in `wanted` require a gradient."""

    attend: Attend
    tensors: dict[str, Tensor]
    wanted: dict[str, Tensor]
    grad_out: Tensor
    layout: str

    def forward(self) -> Tensor:
        """One forward call as in training: the graph is built, outputs are allocated."""
        scale = {"scale": self.tensors["scale"]} if "scale" in self.tensors else {}
        return self.attend(*(self.tensors.get(name) for name in ("q", "k", "v", "log_decay")), **scale)

    def backward(self, out: Tensor, grad_out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Every gradient of that call, fresh tensors; the graph stays for the next one."""
        grad_out = self.grad_out if grad_out is None else grad_out
        return torch.autograd.grad(out, list(self.wanted.values()), grad_out, retain_graph=True)


def prepare(peer: Peer, case: Case, inputs: dict[str, Tensor]) -> Prepared:
    """The peer's call on these inputs; raises Absent where the peer cannot be had."""
    attend = peer.build(case, inputs["q"].device)
    tensors = {name: in_layout(x, peer.layout).contiguous() for name, x in inputs.items()}
    grad_out = tensors.pop("grad_out")
    if peer.decay == "none":
        tensors.pop("log_decay", None)
    if not peer.row_scales:
        tensors.pop("scale", None)
    tensors = {name: x.detach() for name, x in tensors.items()}
    wanted = {name: x for name, x in tensors.items() if name != "log_decay" or peer.decay == "learned"}
    for x in wanted.values():
        x.requires_grad_()
    return Prepared(attend, tensors, wanted, grad_out, peer.layout)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """A tensor of the contract's layout (B, T, H, …) as a view in `layout`, and back: the two are their own inverse."""
    return x.transpose(1, 2) if layout == "BHTD" and x.ndim > 1 else x
