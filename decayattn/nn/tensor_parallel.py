"""Styles of the tensor-parallel plan (decayattn.nn.tensor_parallel_plan), which shards heads over the ranks.

Every rank computes with plain tensors, its part of each parameter. Optimisers, checkpoints and gradient clipping see
the parameters as DTensors. This module imports torch.distributed.tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from decayattn.nn.attention import DecayFlashAttention
from decayattn.nn.decay import ConstantDecay, ScalarDecay
from decayattn.nn.sharded_parameters import Linear, local_part, replicated, reset_whole, whole


class PartwiseParallel(ParallelStyle):
    """ColwiseParallel part by part, for a Linear that computes several parts: each is split over the ranks.

    A product of several matrices (q, k, v and an output gate; the two of a SwiGLU) has consecutive parts.
    ColwiseParallel would split it into ranges of rows that mix matrices. This style gives rank r the r-th share of
    every part, again consecutive. It takes x plain and whole on every rank, and returns a plain tensor. The parameters
    are weight_0, weight_1, … (bias_0, …), one for each part; `weight` and `bias` are read-only copies. The state dict
    has these two, whole: `state_dict()` is a collective that every rank calls.

    Args:
        sizes: output features of the parts; parts of size 0 are left out.
        sum_gradient: sum x's gradient over the ranks. False if the module before does it.
    """

    def __init__(self, sizes: Sequence[int], *, sum_gradient: bool = True):
        super().__init__()
        self.sizes = tuple(size for size in sizes if size)
        self.sum_gradient = sum_gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear) or sum(self.sizes) != module.out_features:
            raise ValueError(f"sizes: expected a Linear with out_features = the sum of {self.sizes}, got {module}")
        for size in self.sizes:
            if size % device_mesh.size():
                raise ValueError(f"sizes: expected multiples of the {device_mesh.size()} ranks, got {self.sizes}")
        zero_bias = isinstance(module, Linear)
        module.__class__ = PartwiseLinear
        assert isinstance(module, PartwiseLinear)
        module.sizes, module.mesh, module.sum_gradient = self.sizes, device_mesh, self.sum_gradient
        module.zero_bias = zero_bias
        for name, parameter in [*module.named_parameters()]:
            del module._parameters[name]
            for index, value in enumerate(parameter.detach().split([*self.sizes])):
                part = _distribute(value, device_mesh, Shard(0))
                module.register_parameter(f"{name}_{index}", nn.Parameter(part, parameter.requires_grad))
        return module


class JoinedParts(Tensor):
    """Read-only copy of parameters as one tensor. Writes to it or its views raise, because they would be lost."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first, name = next(iter((*args, *kwargs.values()))), function.__name__
        is_change = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
        with torch._C.DisableTorchFunctionSubclass():
            if not isinstance(first, cls):
                return function(*args, **kwargs)
            if is_change:
                raise RuntimeError(
                    f"{name}: expected no change of a PartwiseLinear's weight or bias, which are copies; change its "
                    "parameters weight_0, weight_1, … (bias_0, …), one for each part"
                )
            result = function(*args, **kwargs)
            storage = first.untyped_storage().data_ptr()

            def guarded(x: Any) -> Any:
                is_view = isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage
                return x.as_subclass(cls) if is_view else x

            return type(result)(map(guarded, result)) if type(result) in (list, tuple) else guarded(result)


class PartwiseLinear(nn.Linear):
    """Linear after PartwiseParallel. state_dict() and reset_parameters() are collectives."""

    sizes: tuple[int, ...]
    mesh: DeviceMesh
    sum_gradient: bool
    zero_bias: bool

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Copy of this rank's rows of every part, without a gradient; read-only, see JoinedParts."""
        return self._copy("weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self._copy("bias") if "bias_0" in self._parameters else None

    def reset_parameters(self) -> None:
        """Reset to the initial values of the whole Linear. Without the same seed on all ranks: those of rank 0."""
        reset_whole(self, self._parts(), zero_bias=self.zero_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.sum_gradient:
            x = replicated(x, self.mesh)
        # joined for one product, with its parts as slices of the result; the copy is small compared with x · weight
        own = {name: [local_part(part, self.mesh) for part in parts] for name, parts in self._parts().items()}
        return F.linear(x, **{name: torch.cat(parts) for name, parts in own.items()})

    def _parts(self) -> dict[str, list[Any]]:
        """The parts of "weight", and those of "bias" if the Linear has one."""
        names = [name for name in ("weight", "bias") if f"{name}_0" in self._parameters]
        return {name: [self._parameters[f"{name}_{index}"] for index in range(len(self.sizes))] for name in names}

    def _copy(self, name: str) -> Tensor:
        return torch.cat([part.detach().to_local() for part in self._parts()[name]]).as_subclass(JoinedParts)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for name, parts in self._parts().items():
            destination[prefix + name] = torch.cat([whole(part.detach()) for part in parts])

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:
        own = self._parts()
        given = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        given -= self._parameters.keys()  # torch.distributed.checkpoint adds the module's own parameters
        if strict:
            missing_keys += [prefix + name for name in sorted(own.keys() - given)]
            unexpected_keys += [prefix + name for name in sorted(given - own.keys())]
        for name in sorted(own.keys() & given):  # whole() needs the same order on every rank
            value = whole(state_dict[prefix + name])
            shape = (sum(self.sizes), *own[name][0].shape[1:])
            if value.shape != shape:
                error_msgs.append(f"size mismatch for {prefix}{name}: {tuple(value.shape)} here, expected {shape}")
                continue
            with torch.no_grad():
                for parameter, part in zip(own[name], value.split([*self.sizes]), strict=True):
                    parameter.copy_(_distribute(part, parameter.device_mesh, *parameter.placements))


class HeadwiseParallel(ParallelStyle):
    """Style that gives every rank some heads of a DecayFlashAttention; out_proj uses RowwiseParallel."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, DecayFlashAttention):
            raise ValueError(f"HeadwiseParallel: expected a DecayFlashAttention, got {type(module).__name__}")
        ranks = device_mesh.size()
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh: expected one dimension of a mesh, got {device_mesh}")
        for name in ("num_heads", "num_kv_heads"):
            if getattr(module, name) % ranks:
                raise ValueError(f"{name}: expected a multiple of the {ranks} ranks, got {getattr(module, name)}")
        if not isinstance(module.decay, ScalarDecay | ConstantDecay | None):
            raise ValueError(f"decay: expected ScalarDecay, ConstantDecay or none, got {type(module.decay).__name__}")
        PartwiseParallel(module.split_sizes, sum_gradient=False)._apply(module.in_proj, device_mesh)
        of_heads: list[tuple[nn.Module, str]] = [(module, "sink"), (module, "log_scale")]
        if (decay := module.decay) is not None:
            of_heads += [(decay, name) for name in (*decay._parameters, *decay._buffers)]
            decay.tensor_mesh = device_mesh
        for owner, name in of_heads:
            _replace(owner, name, device_mesh, Shard(0))
        for norm in (module.q_norm, module.k_norm, module.output_norm):
            if norm is not None:
                _replace(norm, "weight", device_mesh, Replicate() if norm.is_shared else Shard(0))
                norm.tensor_mesh = device_mesh
        module.num_heads //= ranks
        module.num_kv_heads //= ranks
        module.split_sizes = tuple(size // ranks for size in module.split_sizes)
        module.tensor_mesh = device_mesh
        return module


def _replace(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter or buffer a DTensor; None stays None."""
    value = getattr(owner, name)
    if value is None:
        return
    dtensor = _distribute(value.detach(), mesh, placement)
    setattr(owner, name, nn.Parameter(dtensor, value.requires_grad) if isinstance(value, nn.Parameter) else dtensor)


def _distribute(value: Tensor, mesh: DeviceMesh, *placements: Placement) -> Any:
    # every rank has the whole tensor, so nothing is sent; a meta tensor has no data to move
    value = value if value.is_meta else value.to(mesh.device_type)
    return distribute_tensor(value, mesh, list(placements), src_data_rank=None)
