"""A ByteLM over several devices: FSDP2, tensor and context parallelism, in one file as a run on one device saves it."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from language_models.model import ByteLM
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from decayattn.nn import fully_shard_attention, tensor_parallel_plan
from decayattn.nn.tensor_parallel import PartwiseParallel
from toy_lm.config import Config

# the axes of Lightning's mesh; the second one is the tensor or the context axis
DATA, SECOND = "data_parallel", "tensor_parallel"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
# the parts of what PartwiseParallel has divided, which follow one another
_PART = re.compile(r"(.*)_(\d+)")


def parallelize(model: ByteLM, config: Config, mesh: DeviceMesh) -> None:
    """Shard the model as config.strategy says."""
    if config.strategy == "tensor":
        parallelize_module(model, mesh[SECOND], plan_of(model))
        if mesh[DATA].size() > 1:
            fully_shard_model(model, mesh[DATA])
        return
    if config.strategy == "context":
        from decayattn.distributed import ContextParallel

        context = ContextParallel(mesh.get_group(SECOND), config.context_mode, None)
        for block in model.blocks:
            block.attention.context = context
    # the parameters over all devices: those of a context group hold the same ones, too
    fully_shard_model(model, init_device_mesh(mesh.device_type, (mesh.size(),)))


def plan_of(model: ByteLM) -> dict:
    """The heads of every attention and the channels of every SwiGLU; embedding, norms and head are on every device."""
    plan = tensor_parallel_plan(model)
    for number, block in enumerate(model.blocks):
        hidden = block.mlp_out.in_features
        plan[f"blocks.{number}.mlp_in"] = PartwiseParallel((hidden, hidden))
        plan[f"blocks.{number}.mlp_out"] = RowwiseParallel()
    return plan


@torch.no_grad()
def average_copies(model: nn.Module, tensor_mesh: DeviceMesh) -> None:
    """Average the gradients of what every rank of the tensor axis has: embedding, norms and head.

    Sums without a fixed order, an embedding's gradient on a GPU for example, are rounded in another way on every rank:
    the copies of a parameter would drift apart.
    """
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None and not _is_divided(p, SECOND)]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(together, group=tensor_mesh.get_group())
    parts = (together / tensor_mesh.size()).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def fully_shard_model(model: ByteLM, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard_attention(block, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model on one device, on the CPU of rank 0; empty elsewhere. Every rank calls it."""
    return get_model_state_dict(model, options=WHOLE)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients under the names and in the shapes of a model on one device. Every rank calls it."""
    return dict(_fused((name, _whole(p.grad)) for name, p in model.named_parameters() if p.grad is not None))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """torch's clip_grad_norm_, which takes no mix of DTensors on different meshes and of plain tensors. The norm.

    On each rank's parts, as plain tensors: PyTorch takes tens of microseconds per operation on a DTensor.
    """
    parts: dict[Any, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        place = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        parts.setdefault(place, []).append(_local(gradient))
    squares = [_summed(nn.utils.get_total_norm(some).square(), place) for place, some in parts.items()]
    norm = torch.stack(squares).sum().sqrt()
    torch._foreach_mul_([part for some in parts.values() for part in some], (largest / (norm + 1e-6)).clamp(max=1))
    return norm


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW on each rank's parts of the parameters, as plain tensors: it updates those in few launches, and
    refuses lists in which some are DTensors."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # collects what a step takes: not public; the same in PyTorch 2.10 to 2.15
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(_local, tensors)
        return has_complex


class ShardedStrategy(ModelParallelStrategy):
    """ModelParallelStrategy whose checkpoints are those of a run on one device: any number of devices resumes them."""

    def __init__(self, config: Config):
        second = config.devices if config.strategy in ("tensor", "context") else 1
        data = config.devices * config.nodes // second
        super().__init__(data_parallel_size=data, tensor_parallel_size=second, save_distributed_checkpoint=False)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Of rank 0, as the optimiser of a model on one device has it; every rank calls it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        names, state = self._names(), optimizer.state_dict()
        order = [names[p] for group in optimizer.param_groups for p in group["params"]]
        by_key: dict[str, dict[str, Tensor]] = {}
        for number, name in enumerate(order):
            for key, value in state["state"].get(number, {}).items():
                by_key.setdefault(key, {})[name] = _whole(value).cpu()
        fused_order = [name for name, _ in _fused((name, torch.empty(0)) for name in order)]
        fused: dict[int, dict[str, Tensor]] = {}
        for key, values in by_key.items():
            for name, value in _fused(values.items()):
                fused.setdefault(fused_order.index(name), {})[key] = value
        groups, first = [], 0
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
            count = len({_base(names[p]) for p in own["params"]})
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        return {"state": fused, "param_groups": groups} if self.global_rank == 0 else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        own = self.lightning_module.state_dict()
        # set_model_state_dict scatters, and refuses FSDP2 around divided heads in torch 2.13
        weights = {name: _as(value, own[name]) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(weights)
        if self.optimizers:
            self.lightning_module.on_load_checkpoint(checkpoint)  # the options given go before those saved
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(self._sharded(optimizer, state))
        return checkpoint

    def _names(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self.lightning_module.named_parameters()}

    def _sharded(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """An optimiser's state on one device as this one's."""
        names, saved = self._names(), state["state"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sharded, number, row, last = {}, -1, 0, None
        for index, parameter in enumerate(parameters):
            base = _base(names[parameter])
            number, row = (number, row) if base == last else (number + 1, 0)
            last, rows = base, parameter.shape[0]
            part = slice(row, row + rows) if base != names[parameter] else slice(None)
            sharded[index] = {
                key: _as(value if value.ndim == 0 else value[part], parameter)
                for key, value in saved.get(number, {}).items()
            }
            row += rows
        groups, first = [], 0
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
            groups.append({**group, "params": list(range(first, first + len(own["params"])))})
            first += len(own["params"])
        return {"state": {index: values for index, values in sharded.items() if values}, "param_groups": groups}


def _base(name: str) -> str:
    part = _PART.fullmatch(name)
    return name if part is None else part[1]


def _fused(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Parts joined by rows under the name of the whole; what an optimiser has one number of, once."""
    last, parts = None, []
    for name, value in chain(named, [(None, None)]):
        base = None if name is None else _base(name)
        if parts and base != last:
            yield last, parts[0] if parts[0].ndim == 0 else torch.cat(parts) if len(parts) > 1 else parts[0]
            parts = []
        last = base
        parts.append(value)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_divided(tensor: Tensor, axis: str) -> bool:
    """Whether every rank of that axis of a mesh has a part of its own."""
    names = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
    return axis in names and not tensor.placements[names.index(axis)].is_replicate()


def _summed(part: Tensor, place: tuple[DeviceMesh, tuple[Placement, ...]] | None) -> Tensor:
    """What ranks have of a number, summed over the axes of their mesh that divide the tensors it is of."""
    if place is None:
        return part
    mesh, placements = place
    return DTensor.from_local(part, mesh, [p if p.is_replicate() else Partial() for p in placements]).full_tensor()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(value: Tensor, parameter: Tensor) -> Tensor:
    """A parameter, or what an optimiser holds for one, sharded as it is; a number as it is."""
    if value.ndim == 0 or not isinstance(parameter, DTensor):
        return value.clone()  # parts count their steps apart, in place
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
