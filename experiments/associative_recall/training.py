"""Train all models of a cell at once, and count what they answer rightly."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from associative_recall.model import SideBySide
from associative_recall.task import Batch, Task

# what a graph may not see for the first time: compilers, allocations, cuBLAS
_WARM_UP_STEPS = 3
_CURVE_POINTS = 16
VALIDATION, TEST = 1_000_003, 2_000_003  # seeds of the sequences, the same for all models


@dataclass(frozen=True)
class Cell:
    """What is trained together: one model per learning rate and seed."""

    task: str
    mode: str
    width: int

    def __str__(self) -> str:
        return f"{self.task} d{self.width} {self.mode}"


class Shape(NamedTuple):
    """Sequences of so many tokens with so many pairs, and how many of those a step has."""

    length: int
    pairs: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.length},{self.pairs},{self.sequences}"


@dataclass(frozen=True)
class Setup:
    """What all cells have in common."""

    shapes: tuple[Shape, ...]
    heads: int
    vocabulary: int
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int
    queries: int
    weight_decay: float
    backend: str
    graph: bool


def train(cell: Cell, setup: Setup, device: str) -> dict[str, Any]:
    """The cell's row of the report: accuracies [learning rate][seed][shape] in (0, 1), the loss over the steps."""
    start = time.perf_counter()
    run = Run(cell, setup, device)
    run.steps(setup.steps)
    losses = run.losses.cpu()
    shape = (len(setup.learning_rates), len(setup.seeds))
    at = torch.linspace(0, setup.steps, _CURVE_POINTS + 1).long().tolist()
    curve = torch.stack([losses[a:b].mean(0) for a, b in itertools.pairwise(at) if b > a], dim=-1)
    found = {
        "shapes": list(map(list, setup.shapes)), "learning_rates": list(setup.learning_rates),
        "parameters": run.flat.shape[1], "loss": curve.view(*shape, -1).tolist(),
    }
    for name, seed, share in (("validation", VALIDATION, 0.5), ("test", TEST, 1.0)):
        right, stale = run.accuracies(math.ceil(share * setup.queries), seed)
        found[name] = right.view(*shape, -1).tolist()
        if cell.task == "forgetting":
            found[f"{name}_overwritten"] = stale.view(*shape, -1).tolist()
    return found | {"seconds": time.perf_counter() - start}


class Run:
    """Models, optimiser and data of a cell on a device. A step is tensors only, and can be a CUDA graph."""

    def __init__(self, cell: Cell, setup: Setup, device: str):
        self.cell, self.setup, self.device = cell, setup, torch.device(device)
        count = len(setup.learning_rates)
        self.model = SideBySide(
            list(setup.seeds) * count, mode=cell.mode, width=cell.width, heads=setup.heads,
            vocabulary=setup.vocabulary, backend=setup.backend,
        ).to(device)
        self.tasks = [
            Task(cell.task, shape.length, shape.pairs, shape.sequences, setup.vocabulary, device)
            for shape in setup.shapes
        ]
        self.generator = torch.Generator(device).manual_seed(sum(1000**n * seed for n, seed in enumerate(setup.seeds)))
        self.draw_of = torch.arange(len(setup.seeds), device=device).repeat(count)
        rates = torch.tensor(setup.learning_rates, device=device).repeat_interleave(len(setup.seeds))
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.flat = self._rows(self.parameters)  # (M, parameters of a model)
        self.optimizer = AdamW(self.flat, rates, setup.steps, self._decayed(setup.weight_decay))
        self.losses = torch.zeros(setup.steps, len(rates), device=device)

    def steps(self, count: int) -> None:
        """So many optimiser steps."""
        if not self.setup.graph or count <= _WARM_UP_STEPS:
            for _ in range(count):
                self.step()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self.step()
        for _ in range(count - _WARM_UP_STEPS):
            graph.replay()
        torch.cuda.synchronize()

    def step(self) -> None:
        """One step of all models; nothing waits for the device. Every sequence counts the same."""
        sequences = sum(task.rows for task in self.tasks)
        loss: Tensor | float = 0.0
        for task in self.tasks:
            loss = loss + task.rows / sequences * self._losses(task.draw(len(self.setup.seeds), self.generator))
        self.losses.index_copy_(0, self.optimizer.taken, loss.detach()[None])
        self.optimizer.step(self._rows(torch.autograd.grad(loss.sum(), self.parameters)))
        with torch.no_grad():
            new = self.flat.split([p.numel() // len(self.flat) for p in self.parameters], dim=1)
            torch._foreach_copy_([p.view(len(self.flat), -1) for p in self.parameters], list(new))

    @torch.no_grad()
    def accuracies(self, queries: int, seed: int) -> tuple[Tensor, Tensor]:
        """(M, len(shapes)) of either: the share of queries that are answered rightly, and with what was overwritten."""
        found = []
        for number, task in enumerate(self.tasks):
            generator = torch.Generator(self.device).manual_seed(seed + number)
            sums, asked = torch.zeros(2, len(self.flat), device=self.device), 0
            while asked < queries:
                batch = task.draw(1, generator)
                answer = self._logits(batch.tokens, batch.positions, torch.zeros_like(self.draw_of)).argmax(-1)
                right, stale = answer == batch.answers, answer == batch.stale
                sums += torch.stack([right, stale & ~right]).sum(-1)
                asked += task.queries
            found.append(sums / asked)
        return tuple(torch.stack(found, dim=-1).cpu())

    def _logits(self, tokens: Tensor, positions: Tensor, draw_of: Tensor) -> Tensor:
        # weights in bfloat16 are not kept: a graph would keep those of its capture
        mixed = torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False)
        with mixed:
            return self.model(tokens, positions, draw_of)

    def _losses(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of every model (M,), in nats."""
        logits = self._logits(batch.tokens, batch.positions, self.draw_of).float()
        answers = batch.answers.index_select(0, self.draw_of)
        return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view(answers.shape).mean(1)

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """(M, …): everything that belongs to a model in its row."""
        return torch.cat([x.detach().reshape(self.model.models, -1) for x in tensors], dim=1)

    def _decayed(self, weight_decay: float) -> Tensor:
        """Weight decay (parameters,): of projections only."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        parts = [
            torch.full((p.numel() // self.model.models,), weight_decay * ("_proj." in names[id(p)]))
            for p in self.parameters
        ]
        return torch.cat(parts).to(self.device)


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) on rows (M, n), each with its own rate and its gradient clipped to
    norm 1; linear warm-up over 10 % of the steps, then a line to 0. All state is on the device."""

    def __init__(self, values: Tensor, rates: Tensor, steps: int, weight_decay: Tensor):
        self.values, self.rates, self.total, self.weight_decay = values, rates[:, None], steps, weight_decay
        self.mean, self.square = torch.zeros_like(values), torch.zeros_like(values)
        self.taken = torch.zeros(1, dtype=torch.int64, device=values.device)

    def step(self, gradient: Tensor, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8) -> None:
        done = self.taken.float()
        self.taken += 1
        warm_up = max(1, self.total // 10)
        rate = self.rates * torch.minimum((done + 1) / warm_up, (self.total - done) / (self.total - warm_up + 1))
        gradient = gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1.0)
        self.mean.lerp_(gradient, 1 - betas[0])
        self.square.lerp_(gradient.square(), 1 - betas[1])
        mean = self.mean / (1 - betas[0] ** (done + 1))
        square = self.square / (1 - betas[1] ** (done + 1))
        self.values -= rate * (mean / (square.sqrt() + eps) + self.weight_decay * self.values)
