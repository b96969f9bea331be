"""Multi-query associative recall: does attention with a decay find values, and prefer the later value of a key. Usage::

    python experiments/studies/recall.py                          # the whole grid on a GPU; on a CPU a small one
    python experiments/studies/recall.py --minutes 9              # as much as fits; the next call goes on from there
    python experiments/studies/recall.py --devices 2              # on two GPUs

The task is Zoology's (arXiv 2312.04927, two layers without an MLP), and a variant in which every key is assigned twice
and the later value counts. A model is trained on sequences of all shapes (tokens, pairs) at once, most of them short,
and tested on each. A cell of the grid (task, mode, width) trains one model per learning rate and seed. Its reported
learning rate is the one with the best accuracy on validation sequences, over all seeds. Accuracies are
[learning rate][seed][shape]. Training has new sequences in every step, AdamW with a warm-up over 10 % and a linear
decay to 0, and bfloat16 autocast on a GPU. Data, steps, initial projections and rates are the same for every mode.
"""

import itertools
import math
import os
import statistics
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import harness
from language_models.schemes import SCHEMES, attention_layer
from shared.options import positive
from shared.provenance import ROOT

from decayattn.backends import registry
from decayattn.nn import parameter_groups
from studies import grid


class Shape(NamedTuple):
    """Sequences of `length` tokens with `pairs` pairs; a step has `sequences` of them."""

    length: int
    pairs: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.length},{self.pairs},{self.sequences}"


TASKS = ("recall", "forgetting")
# options that all cells share
SETUP = ("shapes", "heads", "vocabulary", "learning_rates", "seeds", "steps", "queries", "weight_decay", "backend",
         "graph")


def shape(text: str) -> Shape:
    """Type of --shapes."""
    try:
        length, pairs, sequences = map(positive, text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"expected tokens,pairs,sequences, got {text!r}") from None
    if not 2 <= pairs <= length / 4 or pairs % 2:
        raise ArgumentTypeError(f"expected an even number of pairs, 4 tokens or more for each, got {text!r}")
    return Shape(length, pairs, sequences)


DEFAULT_MODES = [mode for mode in SCHEMES if mode not in ("alibi", "pro")]
OPTIONS = {
    "tasks": (list(TASKS), list(TASKS), "what to learn", TASKS),
    "modes": (DEFAULT_MODES, DEFAULT_MODES, "how the model knows order", SCHEMES),
    # most of the sequences are of the easier kinds, in which models find what they need; a step has 19,584 tokens
    "shapes": ([Shape(64, 4, 36), Shape(64, 8, 36), Shape(64, 16, 18), Shape(256, 64, 18), Shape(1024, 256, 9)],
               [Shape(16, 2, 20), Shape(16, 4, 12)],
               "tokens,pairs of a sequence, and how many sequences of those a step has", shape),
    "widths": ([64, 128], [32], "widths of the models"),
    "heads": (2, 2, "heads of each layer"),
    "vocabulary": (1024, 32, "tokens, half of them keys, half values"),
    "learning_rates": ([5e-4, 2e-3, 8e-3], [3e-3, 1e-2], "swept for every mode alike"),
    "seeds": (3, 1, "how many seeds of weights and data"),
    "steps": (8000, 100, "optimiser steps"),
    "queries": (2048, 256, "test queries per shape, at least"),
    "weight_decay": (0.1, 0.1, "of the projections"),
    "backend": ("auto", "reference", "of decay_attention", registry.NAMES),
    "output": (ROOT / "results/recall.json", None, "JSON file that cells are kept in; None: printed only", Path),
} | grid.OPTIONS


def check_options(options: Namespace, cuda: bool) -> Iterator[str]:
    if any(width % (2 * options.heads) for width in options.widths):
        yield f"--widths: expected multiples of 2 · heads = {2 * options.heads}, got {options.widths}"
    least = 2 * max((shape.pairs for shape in options.shapes), default=0) + 2
    if options.vocabulary < least:
        yield f"--vocabulary: expected at least 2 · pairs + 2 = {least}, got {options.vocabulary}"


def measure(run: harness.Run) -> None:
    """All modes of a setting are consecutive: a grid that is cut off compares what it has."""
    options = run.options
    # a step is a CUDA graph on a GPU, where launching its kernels takes longer than they do
    given = vars(options) | {"seeds": list(range(options.seeds)), "graph": run.device == "cuda"}
    setup = Namespace(**{name: given[name] for name in SETUP})
    run.resume(**vars(setup))
    cells = [(task, mode, width) for width, task, mode in
             itertools.product(options.widths, options.tasks, options.modes)]
    grid.fill(run, ("task", "mode", "width"), cells, train, (setup,), said)


FILLER = 0
# exponent of the law by which gaps between a pair and its query are drawn: p(gap n) ∝ n^(a − 1)
POWER = 0.01


class Batch(NamedTuple):
    """tokens (B, T) · positions (Q,) of the queries in the B·T tokens · answers (Q,)."""

    tokens: Tensor
    positions: Tensor
    answers: Tensor


class Task:
    """Batches of one task, with sequences of `length` tokens.

    As in Zoology (Arora et al., arXiv 2312.04927)::

        k3 v1 k1 v7 k2 v4 … 0 k1 0 0 0 k3 …
                               v7       v1      to be predicted at the queries, and nothing elsewhere

    `pairs` key-value pairs, then one query per key, with fillers in between. The even distances of queries after the
    pairs follow a power law. Keys are distinct tokens of the first half of the vocabulary, values of the second.
    "recall": every key has one pair. "forgetting": every key has two, in a random order, and the answer is the value of
    its later pair; a model that ignores the order answers half of them rightly.
    """

    def __init__(self, name: str, length: int, pairs: int, rows: int, vocabulary: int, device: torch.device | str):
        self.repeats = 2 if name == "forgetting" else 1
        self.length, self.pairs, self.rows, self.vocabulary = length, pairs, rows, vocabulary
        self.keys, self.device = pairs // self.repeats, torch.device(device)
        gap = torch.arange((length - 2 * pairs) // 2, device=device)
        self.gap_logits = (POWER - 1) * torch.log1p(gap)

    def draw(self, generator: torch.Generator) -> Batch:
        """New sequences, without a synchronisation."""
        half = self.vocabulary // 2
        key = 1 + self._uniform(half - 1, generator).topk(self.keys).indices  # (B, keys): distinct, in random order
        value = half + self._uniform(self.vocabulary - half, generator).topk(self.pairs).indices  # (B, pairs)
        order = self._uniform(self.pairs, generator).argsort(-1)  # of the pairs, key by key
        times = order.argsort(-1).unflatten(-1, (-1, self.repeats))  # (B, keys, repeats): when a key has its pairs
        tokens = torch.full((self.rows, self.length), FILLER, device=self.device)
        pairs = torch.stack([key.gather(-1, order // self.repeats), value], dim=-1)
        tokens[:, : 2 * self.pairs] = pairs.flatten(-2)
        # the largest of Gumbel noise are draws without replacement
        gumbel = self.gap_logits - (-self._uniform(len(self.gap_logits), generator).log()).log()
        position = 2 * self.pairs + 2 * gumbel.topk(self.keys).indices
        tokens.scatter_(-1, position, key)
        row = self.length * torch.arange(self.rows, device=self.device)[:, None]
        return Batch(tokens, (position + row).flatten(), value.gather(-1, times.amax(-1)).flatten())

    def _uniform(self, columns: int, generator: torch.Generator) -> Tensor:
        return torch.rand(self.rows, columns, generator=generator, device=self.device)


LAYERS = 2
# what a graph may not see for the first time: compilers, allocations, cuBLAS
_WARM_UP_STEPS = 3
_CURVE_POINTS = 16
VALIDATION, TEST = 1_000_003, 2_000_003  # seeds of the sequences, the same for all models


class Model(nn.Module):
    """Two attention layers, no MLP, tied embeddings: Zoology's, with a decay instead of positions.

    tokens (B, T), positions (Q,) in the B·T tokens -> logits (Q, vocabulary). Models of a seed start alike: normal,
    with the variance of nn.Linear, 1 / (3·width). With Zoology's 0.02 they need many times the steps to find the pairs.
    """

    def __init__(self, mode: str, width: int, heads: int, vocabulary: int, backend: str = "auto", seed: int = 0):
        super().__init__()
        self.layers = nn.ModuleList(attention_layer(mode, width, heads, backend=backend) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(LAYERS + 1))
        generator, std = torch.Generator().manual_seed(seed), 1 / math.sqrt(3 * width)
        self.embedding = nn.Parameter(std * torch.randn(vocabulary, width, generator=generator))
        for layer in self.layers:
            nn.init.normal_(layer.in_proj.weight, 0, std, generator=generator)
            nn.init.normal_(layer.out_proj.weight, 0, std / math.sqrt(2 * LAYERS), generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        # the gradient of index_select is added in place; that of an embedding may wait for the device
        x = self.embedding.index_select(0, tokens.flatten()).view(*tokens.shape, -1)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.norms[-1](x.flatten(0, 1).index_select(0, positions)) @ self.embedding.T


def train(cell: tuple[str, str, int], setup: Namespace, device: str) -> dict[str, Any]:
    """The cell's row of the report: accuracies [learning rate][seed][shape] in (0, 1), the loss over the steps."""
    start, found = time.perf_counter(), []
    for rate, seed in itertools.product(setup.learning_rates, setup.seeds):
        run = Run(cell, setup, rate, seed, device)
        run.steps(setup.steps)
        found.append(run.figures())
    count = len(setup.seeds)
    grouped = {key: [[own[key] for own in found[at : at + count]] for at in range(0, len(found), count)]
               for key in found[0]}
    return grouped | {
        "shapes": list(map(list, setup.shapes)), "learning_rates": list(setup.learning_rates),
        "parameters": sum(p.numel() for p in run.parameters), "seconds": time.perf_counter() - start,
    }


class Run:
    """Model, optimiser and data of one training. A step is tensors only, and can be a CUDA graph."""

    def __init__(self, cell: tuple[str, str, int], setup: Namespace, rate: float, seed: int, device: str):
        (task, mode, width), self.setup, self.device, self.rate = cell, setup, torch.device(device), rate
        self.model = Model(mode, width, setup.heads, setup.vocabulary, setup.backend, seed).to(device)
        self.tasks = [Task(task, *shape, setup.vocabulary, device) for shape in setup.shapes]
        self.generator = torch.Generator(device).manual_seed(seed)
        self.model.embedding._no_weight_decay = True
        groups = parameter_groups(self.model, setup.weight_decay)
        self.parameters = [p for group in groups for p in group["params"]]
        rate_now = torch.tensor(rate, device=device) if setup.graph else rate
        self.optimizer = torch.optim.AdamW(groups, lr=rate_now, betas=(0.9, 0.98), capturable=setup.graph)
        self.taken = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(setup.steps, device=device)

    def steps(self, count: int) -> None:
        """Take `count` optimiser steps."""
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
        """One step; with a graph nothing waits for the device. Every sequence counts the same."""
        sequences = sum(task.rows for task in self.tasks)
        self.optimizer.zero_grad()
        loss = sum(task.rows / sequences * self._loss(task.draw(self.generator)) for task in self.tasks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        # warm-up over 10 % of the steps, then a line to 0
        done, total, warm_up = self.taken.float(), self.setup.steps, max(1, self.setup.steps // 10)
        factor = torch.minimum((done + 1) / warm_up, (total - done) / (total - warm_up + 1))
        for group in self.optimizer.param_groups:
            if self.setup.graph:
                group["lr"].copy_(self.rate * factor[0])
            else:
                group["lr"] = self.rate * float(factor)
        self.optimizer.step()
        self.losses.index_copy_(0, self.taken, loss.detach()[None])
        self.taken += 1

    def figures(self) -> dict[str, list[float]]:
        """The loss over the steps, and accuracies by shape."""
        at = torch.linspace(0, self.setup.steps, _CURVE_POINTS + 1).long().tolist()
        losses = self.losses.cpu()
        return {
            "loss": [float(losses[a:b].mean()) for a, b in itertools.pairwise(at) if b > a],
            "validation": self.accuracies(math.ceil(0.5 * self.setup.queries), VALIDATION),
            "test": self.accuracies(self.setup.queries, TEST),
        }

    @torch.no_grad()
    def accuracies(self, queries: int, seed: int) -> list[float]:
        """By shape, the share of queries that are answered rightly."""
        found = []
        for number, task in enumerate(self.tasks):
            generator = torch.Generator(self.device).manual_seed(seed + number)
            batches = [task.draw(generator) for _ in range(math.ceil(queries / (task.rows * task.keys)))]
            right = [self._logits(batch).argmax(-1) == batch.answers for batch in batches]
            found.append(float(torch.cat(right).float().mean()))
        return found

    def _logits(self, batch: Batch) -> Tensor:
        # weights in bfloat16 are not kept: a graph would keep those of its capture
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False):
            return self.model(batch.tokens, batch.positions)

    def _loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy, in nats."""
        return F.cross_entropy(self._logits(batch).float(), batch.answers)


class Selected(NamedTuple):
    """A cell at its chosen learning rate: per shape the mean over the seeds, the least and the most."""

    rate: float
    shapes: list[Shape]
    mean: list[float]
    least: list[float]
    most: list[float]


def selected(row: dict[str, Any], key: str = "test") -> Selected:
    """The learning rate by validation, the figures of `key`."""
    scores = [statistics.fmean(map(statistics.fmean, seeds)) for seeds in row["validation"]]
    best = scores.index(max(scores))
    columns = list(zip(*row[key][best], strict=True))  # per shape, one figure per seed
    mean, least, most = ([f(column) for column in columns] for f in (statistics.fmean, min, max))
    return Selected(row["learning_rates"][best], [Shape(*x) for x in row["shapes"]], mean, least, most)


def said(row: dict[str, Any]) -> str:
    chosen = selected(row)
    pairs = zip(chosen.shapes, chosen.mean, strict=True)
    cells = ", ".join(f"{x:.2f} of {shape.length}, {shape.pairs}" for shape, x in pairs)
    return f"right at rate {chosen.rate:g}: {cells}, {row['seconds']:.1f} s"


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By task, width and mode."""
    modes = list(SCHEMES)
    return sorted(rows, key=lambda row: (TASKS.index(row["task"]), row["width"], modes.index(row["mode"])))


if __name__ == "__main__":
    # processes that wait for a GPU do not spin; before they start
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(harness.main(sys.modules[__name__]))
