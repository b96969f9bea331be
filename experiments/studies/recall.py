"""Multi-query associative recall: does attention with a decay find values, and prefer the later value of a key. Usage::

    python experiments/studies/recall.py                          # the whole grid on a GPU; on a CPU a small one
    python experiments/studies/recall.py --minutes 9              # as much as fits; the next call goes on from there
    python experiments/studies/recall.py --devices 2              # on two GPUs
    python experiments/studies/recall.py --tasks forgetting --modes scalar rotary --output forgetting.json

The task is Zoology's (arXiv 2312.04927, two layers without an MLP), and a variant in which every key is assigned twice
and the later value counts. A model is trained on sequences of all shapes (tokens, pairs) at once, most of them short,
and tested on each. A cell of the grid (task, mode, width) trains one model per learning rate and seed, side by side,
and is done or not: --output keeps those that are, and a later call with the same options and commit goes on. The
reported learning rate of a cell is the one with the best accuracy on validation sequences, over all seeds. Accuracies
are [learning rate][seed][shape]. Training has new sequences in every step, each of which counts the same. It uses AdamW
with a warm-up over 10 % and a linear decay to 0, and bfloat16 autocast on a GPU. Data, steps, initial projections and
rates are the same for every mode, and decays start as the library's do.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared.options import positive
from shared.plots import frame, legend_entries
from shared.provenance import ROOT

from decayattn import DecayFlashAttention
from decayattn.backends import registry
from decayattn.nn import ConstantDecay, Rotary, ScalarDecay, alibi_log_decay, retnet_log_decay
from decayattn.nn.decay import Decay
from studies import grid


class Shape(NamedTuple):
    """Numbers of tokens and of pairs of a sequence, and of sequences of a step."""

    length: int
    pairs: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.length},{self.pairs},{self.sequences}"


CELL = ("task", "mode", "width")
TASKS = ("recall", "forgetting")
# names of the modes in figures
MODES = {
    "scalar": "scalar decay (forget gate)",
    "alibi-learned": "constant decay, learned (ALiBi at first)",
    "alibi": "constant decay, ALiBi, fixed",
    "retnet": "constant decay, RetNet's rates, fixed",
    "rotary": "rotary, no decay",
    "rotary-scalar": "rotary and scalar decay",
    "none": "no position, no decay",
}


class Setup(NamedTuple):
    """Options that all cells share."""

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


def shape(text: str) -> Shape:
    """Type of --shapes."""
    try:
        length, pairs, sequences = map(positive, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected tokens,pairs,sequences, got {text!r}") from None
    if not 2 <= pairs <= length / 4 or pairs % 2:
        raise argparse.ArgumentTypeError(f"expected an even number of pairs, 4 tokens or more for each, got {text!r}")
    return Shape(length, pairs, sequences)


DEFAULT_MODES = [mode for mode in MODES if mode != "alibi"]
OPTIONS = {
    "tasks": (list(TASKS), list(TASKS), "what to learn", TASKS),
    "modes": (DEFAULT_MODES, DEFAULT_MODES, "how the model knows order", MODES),
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
}


def check_options(options: argparse.Namespace) -> Iterator[str]:
    if any(width % (2 * options.heads) for width in options.widths):
        yield f"--widths: expected multiples of 2 · heads = {2 * options.heads}, got {options.widths}"


def begin(options: argparse.Namespace) -> tuple[dict[str, Any], list[tuple[str, str, int]], tuple]:
    """All modes of a setting are consecutive: a grid that is cut off compares what it has."""
    # a step is a CUDA graph on a GPU, where launching its kernels takes longer than they do
    given = vars(options) | {"seeds": range(options.seeds), "graph": torch.cuda.is_available()}
    setup = Setup(**{name: tuple(x) if isinstance(x := given[name], list | range) else x for name in Setup._fields})
    grid_of = itertools.product(options.widths, options.tasks, options.modes)
    return {"setup": setup._asdict()}, [(task, mode, width) for width, task, mode in grid_of], (setup,)


# ----------------------------------------------------------------------------------------------------------------- task

FILLER = 0
# exponent of the law by which gaps between a pair and its query are drawn: p(gap n) ∝ n^(a − 1)
POWER = 0.01


class Batch(NamedTuple):
    """S independent draws of B sequences; Q queries in each draw.

    tokens (S, B, T) · positions (S, Q) of the queries in the draw's B·T tokens · answers (S, Q).
    """

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
    its later pair. There are pairs / 2 queries, and a model that ignores the order gets half of them right.

    Shapes are the same in every batch: a training step can be a CUDA graph.
    """

    def __init__(self, name: str, length: int, pairs: int, rows: int, vocabulary: int, device: torch.device | str):
        if name not in TASKS:
            raise ValueError(f"name: expected one of {TASKS}, got {name!r}")
        self.repeats = 2 if name == "forgetting" else 1
        if pairs < 2 or pairs % self.repeats or 4 * pairs > length:
            raise ValueError(f"pairs: expected an even number from 2 to length / 4 = {length // 4}, got {pairs}")
        if vocabulary < 2 * pairs + 2:
            raise ValueError(f"vocabulary: expected at least 2 · pairs + 2 = {2 * pairs + 2}, got {vocabulary}")
        self.length, self.pairs, self.rows, self.vocabulary = length, pairs, rows, vocabulary
        self.keys, self.device = pairs // self.repeats, torch.device(device)
        self.queries = rows * self.keys
        gap = torch.arange((length - 2 * pairs) // 2, device=device)
        self.gap_logits = (POWER - 1) * torch.log1p(gap)

    def draw(self, draws: int, generator: torch.Generator) -> Batch:
        """`draws` independent draws, without a synchronisation."""
        half, shape = self.vocabulary // 2, (draws, self.rows)
        key = 1 + self._distinct(half - 1, self.keys, shape, generator)  # (S, B, keys)
        value = half + self._distinct(self.vocabulary - half, self.pairs, shape, generator)  # (S, B, pairs)
        # the pair of the n-th one, in an order that is drawn
        order = self._uniform((*shape, self.pairs), generator).argsort(-1)
        whose = order // self.repeats
        times = order.argsort(-1).unflatten(-1, (-1, self.repeats))  # (S, B, keys, repeats): when a key has its pairs
        tokens = torch.full((*shape, self.length), FILLER, device=self.device)
        tokens[..., : 2 * self.pairs] = torch.stack([key.gather(-1, whose), value], dim=-1).flatten(-2)
        uniform = self._uniform((*shape, len(self.gap_logits)), generator)
        gumbel = self.gap_logits - (-uniform.log()).log()  # its largest are draws without replacement
        position = 2 * self.pairs + 2 * gumbel.topk(self.keys).indices
        tokens.scatter_(-1, position, key)
        row = self.length * torch.arange(self.rows, device=self.device)[:, None]
        found = (position + row, value.gather(-1, times.amax(-1)))
        return Batch(tokens, *(x.flatten(1) for x in found))

    def _uniform(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, device=self.device)

    def _distinct(self, choices: int, count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """`count` different numbers below `choices`, in random order."""
        return self._uniform((*shape, choices), generator).topk(count).indices

# --------------------------------------------------------------------------------------------------------------- models

LAYERS = 2


class SideBySide(nn.Module):
    """M models of two attention layers, no MLP, tied embeddings: Zoology's, with a decay instead of positions.

    They are computed as one model of M times the heads, because one small model leaves a GPU waiting for launches. Each
    parameter has M as its first dimension, or M·H for what heads have. Models with the same of `seeds` start alike.

    tokens (S, B, T), positions (S, Q), `draw_of` (M,) which of the S draws a model sees -> logits (M, Q, vocabulary).
    """

    def __init__(
        self, seeds: Sequence[int], *, mode: str, width: int, heads: int, vocabulary: int, backend: str = "auto"
    ):
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        self.models, self.width, self.vocabulary = len(seeds), width, vocabulary
        self.embedding = nn.Parameter(torch.empty(self.models, vocabulary, width))
        self.layers = nn.ModuleList(
            attention(self.models, width, heads, mode=mode, backend=backend) for _ in range(LAYERS)
        )
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(self.models, width)) for _ in range(LAYERS + 1))
        self.reset_parameters(seeds)

    @torch.no_grad()
    def reset_parameters(self, seeds: Sequence[int]) -> None:
        """Normal, with the variance of nn.Linear, 1 / (3·width); decays and norms keep theirs.

        With GPT-2's 0.02, which Zoology has, models of this width need many times the steps to find what they need.
        """
        std = 1 / math.sqrt(3 * self.width)
        for model, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(seed)
            self.embedding[model].normal_(0, std, generator=generator)
            for layer in self.layers:
                layer.in_proj.weight[model].normal_(0, std, generator=generator)
                layer.out_proj.weight[model].normal_(0, std / math.sqrt(2 * LAYERS), generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, draw_of: Tensor) -> Tensor:
        model = torch.arange(self.models, device=tokens.device)
        tokens = tokens.index_select(0, draw_of).permute(1, 2, 0) + model * self.vocabulary  # (B, T, M)
        # the gradient of index_select is added in place; that of an embedding may wait for the device
        x = self.embedding.flatten(0, 1).index_select(0, tokens.flatten())
        x = x.view(*tokens.shape[:2], self.models * self.width)
        for gain, layer in zip(self.gains, self.layers, strict=False):
            x = x + layer(self._normalised(x, gain))
        asked = positions.index_select(0, draw_of).T * self.models + model  # (Q, M)
        x = x.view(-1, self.width).index_select(0, asked.flatten())
        x = self._normalised(x.view(1, -1, self.models * self.width), self.gains[-1])
        return x.view(-1, self.models, self.width).transpose(0, 1) @ self.embedding.mT

    def _normalised(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm of every model's channels."""
        return (F.rms_norm(x.unflatten(-1, gain.shape), (self.width,), eps=1e-6) * gain).flatten(-2)


def attention(models: int, width: int, heads: int, *, mode: str, backend: str) -> DecayFlashAttention:
    """The library's layer for M·d channels and M·H heads, its projections a matrix per model."""
    total = models * heads
    decay: str | nn.Module = "none"
    if mode in ("scalar", "rotary-scalar"):
        decay = Gates(models, width, heads)
    elif mode in ("alibi", "alibi-learned"):
        decay = ConstantDecay.from_values(alibi_log_decay(heads) * models, learned=mode == "alibi-learned")
    elif mode == "retnet":
        decay = ConstantDecay.from_values(retnet_log_decay(heads) * models)
    position = Rotary() if mode.startswith("rotary") else None
    layer = DecayFlashAttention(models * width, total, decay=decay, position=position, backend=backend)
    layer.in_proj = GroupedLinear(models, width, width, parts=3)
    layer.out_proj = GroupedLinear(models, width, width)
    return layer


class GroupedLinear(nn.Module):
    """A matrix per model: x (…, M·d_in) -> (…, parts·M·d_out), the parts (q, k, v) one behind the other."""

    def __init__(self, models: int, width_in: int, width_out: int, parts: int = 1):
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(models, width_in, parts * width_out))

    def forward(self, x: Tensor) -> Tensor:
        models, width_in, _ = self.weight.shape
        y = x.reshape(-1, models, width_in).transpose(0, 1) @ self.weight  # (M, B·T, parts·d_out)
        return y.unflatten(-1, (self.parts, -1)).permute(1, 2, 0, 3).reshape(*x.shape[:-1], -1)


class Gates(Decay):
    """ScalarDecay for models side by side: the gates of a model see its own channels. log_decay (B, T, M·H)."""

    def __init__(self, models: int, width: int, heads: int):
        super().__init__(models * heads)
        one = ScalarDecay(width, heads)
        self.weight = nn.Parameter(one.weight.detach().repeat(models, 1, 1))  # (M, H, d)
        self.bias = nn.Parameter(one.bias.detach().repeat(models, 1))  # (M, H)

    def forward(self, x: Tensor) -> Tensor:
        models, heads, width = self.weight.shape
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, models, width)
            logits = torch.einsum("nmd,mhd->nmh", wide, self.weight) + self.bias
            return F.logsigmoid(logits).reshape(*x.shape[:-1], models * heads)  # einsum chooses the strides

# ------------------------------------------------------------------------------------------------------------- training

# what a graph may not see for the first time: compilers, allocations, cuBLAS
_WARM_UP_STEPS = 3
_CURVE_POINTS = 16
VALIDATION, TEST = 1_000_003, 2_000_003  # seeds of the sequences, the same for all models


def train(cell: tuple[str, str, int], setup: Setup, device: str) -> dict[str, Any]:
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
        found[name] = run.accuracies(math.ceil(share * setup.queries), seed).view(*shape, -1).tolist()
    return found | {"seconds": time.perf_counter() - start}


class Run:
    """Models, optimiser and data of a cell on a device. A step is tensors only, and can be a CUDA graph."""

    def __init__(self, cell: tuple[str, str, int], setup: Setup, device: str):
        (task, mode, width), self.setup, self.device = cell, setup, torch.device(device)
        count = len(setup.learning_rates)
        self.model = SideBySide(
            list(setup.seeds) * count, mode=mode, width=width, heads=setup.heads,
            vocabulary=setup.vocabulary, backend=setup.backend,
        ).to(device)
        self.tasks = [
            Task(task, shape.length, shape.pairs, shape.sequences, setup.vocabulary, device)
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
    def accuracies(self, queries: int, seed: int) -> Tensor:
        """(M, len(shapes)): the share of queries that are answered rightly."""
        found = []
        for number, task in enumerate(self.tasks):
            generator = torch.Generator(self.device).manual_seed(seed + number)
            right, asked = torch.zeros(len(self.flat), device=self.device), 0
            while asked < queries:
                batch = task.draw(1, generator)
                answer = self._logits(batch.tokens, batch.positions, torch.zeros_like(self.draw_of)).argmax(-1)
                right += (answer == batch.answers).sum(-1)
                asked += task.queries
            found.append(right / asked)
        return torch.stack(found, dim=-1).cpu()

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

# ---------------------------------------------------------------------------------------------------- table and figure

# colour-blind safe (Okabe and Ito)
_COLOURS = {
    "scalar": "#d55e00", "alibi-learned": "#e69f00", "alibi": "#f0e442", "retnet": "#56b4e9", "rotary": "#000000",
    "rotary-scalar": "#cc79a7", "none": "#7f7f7f",
}
_MARKERS = dict(zip(MODES, "os^vDP*", strict=True))


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
    cells = ", ".join(f"{x:.2f} of {shape.length}, {shape.pairs}" for shape, x in zip(chosen.shapes, chosen.mean,
                                                                                   strict=True))
    return f"right at rate {chosen.rate:g}: {cells}, {row['seconds']:.1f} s"


def table(report: dict[str, Any]) -> str:
    """A line per cell: accuracy by shape, mean over seeds."""
    return "\n".join(f"{row['task']:10} d{row['width']:<4} {row['mode']:14} {said(row)}" for row in
                     in_order(report["rows"]))


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By task, width and mode."""
    modes = list(MODES)
    return sorted(rows, key=lambda row: (TASKS.index(row["task"]), row["width"], modes.index(row["mode"])))


def draw(result: dict[str, Any]) -> Figure:
    """Accuracy by shape: a row of panels per task, a column per width; shaded from the least seed to the most."""
    rows = result["rows"]
    tasks = [task for task in TASKS if any(row["task"] == task for row in rows)]
    columns = sorted({row["width"] for row in rows})
    figure = Figure(figsize=(max(9.0, 1.0 + 4.5 * len(columns)), 1.6 + 2.7 * len(tasks)), dpi=150, layout="constrained")
    panels = figure.subplots(len(tasks), len(columns), squeeze=False, sharey=True)
    for at, task in enumerate(tasks):
        for panel, width in zip(panels[at], columns, strict=True):
            _draw_panel(panel, [row for row in rows if (row["task"], row["width"]) == (task, width)])
            if task == "forgetting":  # one of the two values of a key, whichever
                panel.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
            panel.set_title(f"{task}, width {width}", fontsize="small")
        panels[at][0].set_ylabel("queries answered rightly")
    for panel in panels[-1]:
        panel.set_xlabel("tokens, key-value pairs")
    handles = legend_entries(panels.flat)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    where = f"{result['gpu'] or 'CPU'}, torch {result['torch']}"
    figure.suptitle(f"Associative recall, seeds: {len(result['setup']['seeds'])}, {where}", fontsize="medium")
    return figure


def _draw_panel(panel: Any, rows: list[dict[str, Any]]) -> None:
    for mode in MODES:
        for row in rows:
            if row["mode"] != mode:
                continue
            chosen = selected(row)
            places = range(len(chosen.shapes))
            panel.plot(places, chosen.mean, color=_COLOURS[mode], marker=_MARKERS[mode], markersize=4,
                       linewidth=1.5, label=MODES[mode])
            panel.fill_between(places, chosen.least, chosen.most, color=_COLOURS[mode], alpha=0.18, linewidth=0)
    shapes = next((selected(row).shapes for row in rows), [])
    panel.set_xticks(range(len(shapes)), [f"{shape.length}, {shape.pairs}" for shape in shapes], fontsize="small")
    panel.set_ylim(-0.03, 1.03)
    frame(panel)


if __name__ == "__main__":
    # processes that wait for a GPU do not spin; before they start
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(grid.main(sys.modules[__name__]))
