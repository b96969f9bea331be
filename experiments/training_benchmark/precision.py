"""The same training with one rounding or the other: losses step by step, and the gradients on the way of one run."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from toy_lm.data import TrainingBatches, load_text

from training_benchmark.measure import first_step, relative_errors
from training_benchmark.model import Decoder, Size
from training_benchmark.variants import VARIANTS, reference, set_half_lives

CLIP = 1.0
BYTES = 256


@dataclass(frozen=True)
class Run:
    """A training: the attention by its name in VARIANTS, bfloat16 autocast or float32 all through, and the relative
    size of a random change to the first weights."""

    name: str
    label: str
    variant: str
    bfloat16: bool
    perturbation: float = 0.0


# the first is what the others are compared with; a perturbed one shows how far two right trainings part by themselves
RUNS = (
    Run("float32", "decayattn, float32", "ours", False),
    Run("perturbed", "decayattn, float32, first weights off by 2⁻⁹", "ours", False, 2**-9),
    Run("bfloat16", "decayattn, bfloat16", "ours", True),
    Run("bfloat16-whole", "decayattn, bfloat16, nothing skipped", "ours-whole", True),
    Run("fla", "flash-linear-attention, bfloat16", "fla", True),
    Run("fox", "Forgetting Transformer, bfloat16", "fox", True),
)
BASE = RUNS[0].name


@dataclass(frozen=True)
class Setup:
    """What all runs have in common; half_lives (shortest, longest) in tokens, at first, over the heads of a layer."""

    layers: int
    width: int
    head_dim: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    half_lives: tuple[float, float]
    check_length: int
    data: str | None
    backend: str
    seed: int

    @property
    def size(self) -> Size:
        return Size(self.layers, self.width, self.head_dim, BYTES)


def train(run: Run, setup: Setup, device: str, progress: Callable[[int], None]) -> dict[str, Any]:
    """Losses of every step, in nats per byte; of the base run, too, the errors of everybody's gradients on its way.

    Raises Absent where the run's attention cannot be had.
    """
    start = time.perf_counter()
    training, validation = load_text(setup.data, setup.context)
    batches = TrainingBatches(training, setup.context, setup.batch, setup.seed)
    model = decoder(run, setup, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = max(1, setup.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    losses = torch.zeros(setup.steps, device=device)
    gradients = []
    for step in range(setup.steps):
        if run.name == BASE and step in (0, setup.steps // 2):
            gradients.append({"step": step, "runs": gradient_errors(model, validation, setup, device)})
        with autocast(run, device):
            loss = model(batches.batch(step).to(device).long())
        losses[step] = loss.detach()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            losses[step].item()  # the host does not run away from the device
            progress(100)
    found: dict[str, Any] = {"run": run.name, "losses": [round(x, 6) for x in losses.tolist()]}
    with autocast(run, device):
        found["log_decay"] = mean_log_decays(model, validation, setup, device)
    if run.name == BASE:
        gradients.append({"step": setup.steps, "runs": gradient_errors(model, validation, setup, device)})
        found["gradients"] = gradients
    return found | {"seconds": time.perf_counter() - start}


def decoder(run: Run, setup: Setup, device: str, weights: Decoder | None = None) -> Decoder:
    """The run's model: the same first weights and strong gates for every run, or those given."""
    torch.manual_seed(setup.seed)
    base = Decoder(setup.size, lambda size: reference("decay", size))
    shortest, longest = setup.half_lives
    heads = setup.size.heads
    for block in base.blocks:
        ratio = longest / shortest
        set_half_lives(block.attention, [shortest * ratio ** (h / max(1, heads - 1)) for h in range(heads)])
    layer = VARIANTS[run.variant].layer
    model = Decoder(setup.size, lambda size: layer(size, setup.backend, setup.context))
    model.load_state_dict((base if weights is None else weights).state_dict())
    generator = torch.Generator().manual_seed(setup.seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + run.perturbation * noise)
    return model.to(device)


def autocast(run: Run, device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if run.bfloat16 else contextlib.nullcontext()


def gradient_errors(model: Decoder, text: Tensor, setup: Setup, device: str) -> dict[str, Any]:
    """Of every run's precision and kernel, on these weights and the same bytes: the relative error of the loss and of
    gradients beside float64, or why there is none."""
    tokens = text[: setup.check_length + 1][None].to(device).long()
    oracle = Decoder(setup.size, lambda size: reference("decay", size)).double().to(device)
    oracle.load_state_dict(model.state_dict())
    exact = first_step(oracle, tokens, contextlib.nullcontext())
    found: dict[str, Any] = {}
    for run in RUNS:
        if run.perturbation:
            continue
        try:
            own = decoder(run, setup, device, model)
            found[run.name] = relative_errors(first_step(own, tokens, autocast(run, device)), exact)
        except Exception as error:  # an absent one, or one that fails, says so in its own run
            found[run.name] = f"{type(error).__name__}: {error}"
    return found


@torch.no_grad()
def mean_log_decays(model: Decoder, text: Tensor, setup: Setup, device: str) -> list[list[float]]:
    """Mean λ [layer][head] on the bytes of the gradient check, at the end of the training."""
    found: list[list[float]] = []
    hooks = [
        block.attention.decay.register_forward_hook(lambda _, __, out: found.append(out.mean((0, 1)).tolist()))
        for block in model.blocks
    ]
    try:
        model(text[: setup.check_length + 1][None].to(device).long())
    finally:
        for hook in hooks:
            hook.remove()
    return found


def summary(rows: Sequence[dict[str, Any]], window: int) -> list[dict[str, Any]]:
    """Of every run the mean loss of the last `window` steps, its difference to the base run's, and the largest
    difference between the two means over any such stretch."""
    base = next((losses_of(row) for row in rows if row["run"] == BASE), None)
    found = []
    for row in rows:
        losses = losses_of(row)
        entry: dict[str, Any] = {"run": row["run"], "loss": float(losses[-window:].mean())}
        if base is not None:
            apart = smooth(losses - base, window)
            entry |= {"difference": float(apart[-1]), "largest_difference": float(apart.abs().max())}
        found.append(entry)
    return found


def losses_of(row: dict[str, Any]) -> Tensor:
    """The losses of a row, which names those that are not finite where it was read from JSON."""
    return torch.tensor([float(x) for x in row["losses"]])


def smooth(losses: Tensor, window: int) -> Tensor:
    """Means over stretches of `window` steps, one per step at which a stretch ends."""
    return losses.unfold(0, window, 1).mean(-1)
