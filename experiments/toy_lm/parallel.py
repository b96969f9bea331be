"""The model over several devices: --strategy fsdp, tensor and context. One device and ddp use little of this file."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from decayattn.distributed import ContextParallel
from decayattn.nn import fully_shard_attention, tensor_parallel_plan
from decayattn.nn.tensor_parallel import PartwiseParallel
from toy_lm.model import ByteLM

DATA, WITHIN = "data_parallel", "tensor_parallel"  # Lightning's names of the axes of its mesh


class Sharded(ModelParallelStrategy):
    """Every device holds a part of the model. A checkpoint is a folder with a file per device.

    fsdp: all devices share parameters, optimiser (FSDP2) and batch.
    tensor: the devices of a machine share the heads and the channels of the SwiGLU; machines share the batch.
    context: the devices of a machine share the bytes of each sequence (context_mode: ContextParallel's), and all
        devices share the parameters as in fsdp; machines share the batch.
    """

    def __init__(self, kind: str, devices: int, nodes: int, context_mode: str = "halo"):
        within = 1 if kind == "fsdp" else devices
        super().__init__(data_parallel_size=devices * nodes // within, tensor_parallel_size=within)
        self.kind, self.context_mode = kind, context_mode

    def parallelize(self, model: ByteLM) -> None:
        """Shard the model, once; Lightning's hook comes before each validation and before the training."""
        if is_sharded(model):
            return
        model.to(self.root_device)
        mesh = self.device_mesh
        if self.kind == "tensor":
            shards = mesh[DATA]
            parallelize_module(model, mesh[WITHIN], tensor_plan(model))
        else:
            shards = init_device_mesh(mesh.device_type, (mesh.size(),))
        if self.kind == "context":
            for block in model.blocks:
                block.attention.context = ContextParallel(mesh.get_group(WITHIN), self.context_mode, None)
        if shards.size() > 1:
            for block in model.blocks:
                fully_shard_attention(block, mesh=shards)  # leaves the decay in float32
                fully_shard(block, mesh=shards)
            fully_shard(model, mesh=shards)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients of embedding, norms and head, which every tensor-parallel device holds whole: on a GPU
        an embedding's gradient is a sum without a fixed order, and the copies would drift apart."""
        if self.kind != "tensor":
            return
        gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None and not is_divided(p)]
        joined = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(joined, group=self.device_mesh[WITHIN].get_group())
        joined /= self.device_mesh[WITHIN].size()
        for gradient, mean in zip(gradients, joined.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def gradients(
        self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], batch: Tensor, autocast: torch.dtype | None
    ) -> dict[str, Tensor]:
        """Every parameter's gradient from the devices' shares of a batch, whole and named as on one device."""
        model.zero_grad()
        with torch.enable_grad(), torch.autocast(self.root_device.type, autocast, autocast is not None):
            value = loss(model, batch)
        value.backward()
        self.post_backward(value)
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            stem, _, part = name.rpartition("_")  # PartwiseParallel: weight_0, weight_1, … are the rows of a weight
            gradient = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
            parts.setdefault(stem if part.isdigit() else name, []).append(gradient)
        model.zero_grad()
        return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in parts.items()}


def place(strategy: Strategy) -> tuple[int, int, int, int]:
    """This device's share of the sequences and their number of shares, then the same of the bytes of a sequence."""
    data = getattr(strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})  # of a ParallelStrategy
    if not isinstance(strategy, Sharded) or strategy.kind != "context":
        return data["rank"], data["num_replicas"], 0, 1
    mesh = strategy.device_mesh[WITHIN]
    return data["rank"], data["num_replicas"], mesh.get_local_rank(), mesh.size()


def share(batch: Tensor, strategy: Strategy) -> Tensor:
    """This device's part of a batch (B, T + 1): its sequences, and of them its bytes with the one after."""
    row, rows, part, parts = place(strategy)
    count, length = len(batch) // rows, (batch.shape[1] - 1) // parts
    return batch[row * count : (row + 1) * count, part * length : (part + 1) * length + 1]


def tensor_plan(model: ByteLM) -> dict:
    """Shard the heads of every attention and the channels of every SwiGLU; embedding, norms and head stay whole."""
    plan = tensor_parallel_plan(model)
    for number, block in enumerate(model.blocks):
        hidden = block.mlp_out.in_features
        plan[f"blocks.{number}.mlp_in"] = PartwiseParallel((hidden, hidden))
        plan[f"blocks.{number}.mlp_out"] = RowwiseParallel()
    return plan


def plain_copy(model: ByteLM) -> ByteLM | None:
    """A copy on one device. Every rank calls it for a sharded model, and rank 0 alone gets the copy."""
    if not is_sharded(model):
        return copy.deepcopy(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not state:
        return None
    with torch.random.fork_rng(devices=[]):
        plain = ByteLM(**model.options)
    plain.load_state_dict(state, assign=True)
    return plain.requires_grad_()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for any mix of plain and sharded parameters. Return the norm."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_place: dict[Any, list[Tensor]] = {}
    for x in gradients:
        by_place.setdefault((x.device_mesh, x.placements) if isinstance(x, DTensor) else None, []).append(local(x))
    squares = []
    for where, parts in by_place.items():
        square = nn.utils.get_total_norm(parts).square()
        if where is not None:  # a sum over the axes of the mesh that divide the tensors
            placements = [p if p.is_replicate() else Partial() for p in where[1]]
            square = DTensor.from_local(square, where[0], placements).full_tensor()
        squares.append(square)
    norm = torch.stack(squares).sum().sqrt()
    torch._foreach_mul_([local(x) for x in gradients], (largest / (norm + 1e-6)).clamp(max=1))
    return norm


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def is_divided(tensor: Tensor) -> bool:
    """True if every tensor-parallel device has a part of its own."""
    names = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
    return WITHIN in names and not tensor.placements[names.index(WITHIN)].is_replicate()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
