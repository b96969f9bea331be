"""Parameters that tensor parallelism or FSDP2 shards: whole, or a rank's part of them. Imports as in dtensor.py."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decayattn.dtensor import check_dtensor, is_dtensor, to_local

if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.device_mesh import DeviceMesh


def local_part(tensor: Tensor, mesh: "DeviceMesh | None") -> Tensor:
    """This rank's part of a parameter distributed on a mesh (None: unchanged); a replicated gradient is a sum."""
    if mesh is None:
        return tensor
    dtensor = check_dtensor("parameter", tensor, mesh)  # outside of the layer's forward, FSDP2 may shard it: raises
    partial = torch.distributed.tensor.Partial()
    gradient = [partial if placement.is_replicate() else placement for placement in dtensor.placements]
    return to_local(dtensor, dtensor.placements, gradient)


def own_heads(tensor: Tensor, mesh: "DeviceMesh | None") -> Tensor:
    """local_part of a parameter (H,) or (H, ·) outside of the layer's forward, without a gradient, which FSDP2 would
    not average. A collective if FSDP2 has sharded it."""
    tensor = tensor.detach()
    if mesh is None or not is_dtensor(tensor):
        return whole(tensor)
    if tensor.device_mesh == mesh:
        return tensor.to_local()
    return whole(tensor).chunk(mesh.size())[mesh.get_local_rank()]


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; a collective for a DTensor."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def fill(destination: Tensor, source: Tensor | Sequence[float]) -> None:
    """Write whole values into a parameter or buffer. For a DTensor this is a collective, with rank 0's values."""
    source = torch.as_tensor(source, dtype=destination.dtype, device=destination.device)
    if is_dtensor(destination):
        mesh, placements = destination.device_mesh, destination.placements
        source = torch.distributed.tensor.distribute_tensor(source, mesh, placements)
    destination.copy_(source)


def replicated(x: Tensor, mesh: "DeviceMesh") -> Tensor:
    """x whole on every rank of the mesh: x itself, or all of a DTensor. Its gradient is summed over the ranks.

    One sum covers everything computed from x, as the f of Megatron-LM does (Shoeybi et al., arXiv 1909.08053).
    """
    whole_of = [torch.distributed.tensor.Replicate()]
    dtensor = x if is_dtensor(x) else torch.distributed.tensor.DTensor.from_local(x, mesh, whole_of, run_check=False)
    return local_part(dtensor.redistribute(placements=whole_of), mesh)


class Linear(nn.Linear):
    """nn.Linear with an initial bias of 0, also if sharded. It has torch's name, as users and tools match names."""

    def reset_parameters(self) -> None:
        if is_dtensor(self.weight):
            reset_whole(self, {name: [value] for name, value in self.named_parameters()}, zero_bias=True)
            return
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class HeadRMSNorm(nn.RMSNorm):
    """RMSNorm of every head of x (…, heads, dim), in the dtype of its gain, which autocast leaves in float32.

    With `heads`, every head has a gain per channel. `weight` is flat, (heads · dim,): optimisers see a vector, and
    tensor parallelism shards it by heads.
    """

    tensor_mesh: "DeviceMesh | None" = None

    def __init__(self, dim: int, heads: int | None = None, **options: Any):
        # an explicit eps, because torch's default depends on the dtype (and on its version)
        super().__init__(dim, eps=1e-6, **options)
        self.is_shared = heads is None
        if heads is not None:
            self.weight = nn.Parameter(torch.ones(heads * dim, **options))

    def forward(self, x: Tensor) -> Tensor:
        gain = local_part(self.weight, self.tensor_mesh)
        if self.is_shared:
            return F.rms_norm(x.to(gain.dtype), self.normalized_shape, gain, self.eps).to(x.dtype)
        wide = torch.promote_types(gain.dtype, torch.float32)  # one rounding, as with a shared gain
        return (F.rms_norm(x.to(wide), self.normalized_shape, None, self.eps) * gain.view(x.shape[-2:])).to(x.dtype)


@torch.no_grad()
def reset_whole(linear: nn.Linear, parts: Mapping[str, Sequence[Tensor]], *, zero_bias: bool) -> None:
    """Initialise a Linear whole, then divide it: ranks that draw their own part may draw equal values, as on CPUs."""
    given = parts["weight"][0]
    kind = Linear if zero_bias else nn.Linear
    drawn = kind(linear.in_features, linear.out_features, bias="bias" in parts, device=given.device, dtype=given.dtype)
    for name, divided in parts.items():
        for part, value in zip(divided, getattr(drawn, name).split([len(part) for part in divided]), strict=True):
            fill(part, value)
