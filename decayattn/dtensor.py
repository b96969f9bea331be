"""decay_attention of DTensors that are sharded by batch or by heads.

Attention does not mix batch entries or heads, so every rank attends to its own, and nothing is communicated. A tensor
that all ranks hold (a sink with a sharded batch) has a gradient that is a sum over the ranks. For sharded sequences
there is context parallelism.

torch.distributed.tensor takes half a second to import, so nothing here does: a DTensor exists only where it is loaded.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN = {Tensor, nn.Parameter, type(None), float, int, bool, str}
_SEQUENCE = "sequence"
# axes of the arguments and results, which broadcast from the right
_DENSE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "k", "v", "out"), ("batch", _SEQUENCE, "heads", "channels")),
    **dict.fromkeys(("log_decay", "scale"), ("batch", _SEQUENCE, "heads")), "lse": ("batch", "heads", _SEQUENCE),
    **dict.fromkeys(("seqused_q", "seqused_k", "leftpad_q", "leftpad_k"), ("batch",)), "sink": ("heads",),
    "bias": ("batch", "heads", _SEQUENCE, "keys"),
}
_PACKED = {name: tuple(axis for axis in axes if axis != "batch") for name, axes in _DENSE.items()}
_PACKED |= {"cu_seqlens_q": ("offsets",), "cu_seqlens_k": ("offsets",)}


def any_dtensor(*values: object) -> bool:
    if not torch.compiler.is_compiling() and _PLAIN.issuperset(map(type, values)):
        return False
    return any(is_dtensor(value) for value in values)


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """True for a DTensor; imports nothing."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def refuse(**values: object) -> None:
    """Refuse DTensors by name where every rank passes its own tensors."""
    if any_dtensor(*values.values()):
        name, value = next((name, value) for name, value in values.items() if is_dtensor(value))
        message = f"{name}: expected this rank's own tensor, got a DTensor; pass {name}.to_local()"
        if any(placement.is_replicate() for placement in value.placements):
            # otherwise each rank would keep its share as if it were the whole gradient
            message += ", with grad_placements=[Partial()] where the ranks share it: its gradient is the sum of theirs"
        raise TypeError(message)


def attention(
    function: Callable, check: Callable, tensors: dict[str, Any], options: dict[str, Any], unchecked: dict[str, Any]
) -> Any:
    """Call function(**tensors, **options, **unchecked) on every rank's batch entries or heads; return DTensors.

    check(**tensors, **options) raises as the function does, for the global shapes. It comes first, because the parts of
    a tensor that does not fit as a whole may fit one another, or broadcast. Then TypeError or ValueError, by name, for
    arguments that the ranks cannot compute independently.
    """
    axes = _DENSE if "cu_seqlens_q" not in tensors else _PACKED
    mesh = check_dtensor("q", tensors["q"], None).device_mesh
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            check_dtensor(name, tensor, mesh)
    check(**tensors, **options)
    splits = [_split_of(placement, axes["q"]) for placement in tensors["q"].placements]
    for axis, name, number in (("batch", "q", "a batch size"), ("heads", "k", "a number of heads (H_kv)")):
        ranks = math.prod(mesh.size(dim) for dim, split in enumerate(splits) if split == axis)
        if axis in splits and (size := tensors[name].shape[axes[name].index(axis)]) % ranks:
            raise ValueError(f"{name}: expected {number} that is a multiple of its {ranks} ranks, got {size}")
    local = {name: _local(name, tensor, axes[name], splits) for name, tensor in tensors.items()}
    results = function(**local, **options, **unchecked)
    found = [
        torch.distributed.tensor.DTensor.from_local(x, mesh, _placements(axes[name], splits, mesh), run_check=False)
        for name, x in zip(("out", "lse"), results if isinstance(results, tuple) else (results,), strict=False)
    ]
    return tuple(found) if isinstance(results, tuple) else found[0]


def _split_of(placement: Any, axes: Sequence[str]) -> str | None:
    """Axis of q that one dimension of the mesh shards; None if it replicates."""
    if placement.is_replicate():
        return None
    axis = axes[placement.dim] if type(placement) is torch.distributed.tensor.Shard else None
    if axis == _SEQUENCE:
        raise ValueError(
            f"q: expected shards of the batch or the heads, got shards of the sequence ({placement}); for those pass "
            "each rank's own tensors to decayattn.distributed.context_parallel_attention"
        )
    if axis not in ("batch", "heads"):
        raise ValueError(f"q: expected a DTensor replicated or sharded by batch or heads, got {placement}")
    return axis


def check_dtensor(name: str, tensor: object, mesh: "DeviceMesh | None") -> "DTensor":
    """The tensor, checked to be a DTensor on that mesh."""
    if not is_dtensor(tensor):
        raise TypeError(
            f"{name}: expected a DTensor like the other arguments, got a {type(tensor).__name__}; if it is equal on "
            "every rank, pass DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)"
        )
    if mesh is not None and tensor.device_mesh != mesh:
        raise ValueError(f"{name}: expected a DTensor on the mesh {mesh}, got one on {tensor.device_mesh}")
    return tensor


def _local(name: str, tensor: Any, axes: Sequence[str], splits: Sequence[str | None]) -> Any:
    """This rank's part of a checked argument."""
    if not is_dtensor(tensor):
        return tensor
    wanted = _placements(axes[max(0, len(axes) - tensor.ndim) :], splits, tensor.device_mesh, tensor.shape)
    for have, want in zip(tensor.placements, wanted, strict=True):
        if not have.is_replicate() and have != want:
            raise ValueError(f"{name}: expected {want} or Replicate(), to match q, got {have}")
    gradient = [
        torch.distributed.tensor.Partial() if split is not None and placement.is_replicate() else placement
        for split, placement in zip(splits, wanted, strict=True)
    ]
    return to_local(tensor, wanted, gradient)


def _placements(
    axes: Sequence[str], splits: Sequence[str | None], mesh: "DeviceMesh", shape: Sequence[int] | None = None
) -> list:
    """Placements of a tensor with these axes if q is split so. An axis of size 1 is broadcast to several ranks, so it
    is replicated; a single rank may have it sharded, as q is."""
    def of(dim: int, split: str | None) -> Any:
        if split not in axes or (shape is not None and shape[axes.index(split)] == 1 and mesh.size(dim) > 1):
            return torch.distributed.tensor.Replicate()
        return torch.distributed.tensor.Shard(axes.index(split))

    return [of(dim, split) for dim, split in enumerate(splits)]


def to_local(tensor: "DTensor", placements: Sequence, gradient: Sequence) -> Tensor:
    """This rank's part under these placements; `gradient` has those of its gradient."""
    # redistribute even if nothing moves: its backward sums partial gradients, which a leaf would keep
    return tensor.redistribute(placements=placements).to_local(grad_placements=gradient)
