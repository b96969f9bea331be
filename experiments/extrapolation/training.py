"""One model from its seed to its last step, in a form that can stop after any step and go on later."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from language_models.corpus import Corpus, TrainingCrops
from language_models.model import ByteLM, next_byte_loss
from language_models.optimisation import learning_rate_factor, parameter_groups
from torch import Tensor

from extrapolation.settings import Run, Settings

# steps whose losses are looked at together: each look waits for the GPU
LOOK = 10
# the first looks are slower: kernels are compiled, memory is taken
_WARM = 2


class Stopped(Exception):
    """The training was asked to stop; its checkpoint says where it goes on."""


class Diverged(Exception):
    """A loss that is not finite; `step` is the first one after which it was seen."""

    def __init__(self, step: int):
        super().__init__(f"the loss was not finite by step {step}")
        self.step = step


def build_model(settings: Settings, run: Run, device: torch.device | str) -> ByteLM:
    """The model with its initial weights: those of a seed are the same in every scheme, and on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = ByteLM(
            layers=settings.layers, width=settings.width, heads=settings.heads, decay=run.scheme,
            context=settings.context,
        )
    return model.to(device)


def train(
    settings: Settings, run: Run, corpus: Corpus, text: Tensor, checkpoint: Path, *, compiled: bool = False,
    on_look: Callable[[int, float | None], None] = lambda steps, seconds_per_step: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[ByteLM, dict[str, Any]]:
    """The trained model, and what there is to say of its training. `text` is the corpus's, on the device to train on.

    on_look(steps, seconds_per_step) is called with the steps since the last call; the seconds are None at first.
    Raises Stopped, with a checkpoint written, and Diverged.
    """
    device = text.device
    model = build_model(settings, run, device)
    crops = TrainingCrops(corpus, text, settings.context, settings.batch_size, run.seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay), lr=settings.learning_rate, betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    step, seconds, history = 0, 0.0, []
    if checkpoint.exists():
        step, seconds, history = _restore(checkpoint, settings, corpus, model, optimizer)
        on_look(step, None)
    if compiled:
        for block in model.blocks:
            block.feed_forward = torch.compile(block.feed_forward)
    waiting: list[Tensor] = []
    begun, looks = time.monotonic(), 0
    while step < settings.steps:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_factor(step, settings.steps)
        with autocast(settings, device):
            loss = next_byte_loss(model, crops.batch(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        waiting.append(loss.detach())
        step += 1
        if step % LOOK and step != settings.steps:
            continue
        mean = float(torch.stack(waiting).mean())
        now = time.monotonic()
        looks += 1
        on_look(len(waiting), (now - begun) / len(waiting) if looks > _WARM else None)
        seconds, begun = seconds + now - begun, now
        if not mean < float("inf"):
            raise Diverged(step)
        history.append([step, mean / torch.log(torch.tensor(2.0)).item()])
        waiting.clear()
        if step < settings.steps and should_stop():
            _save(checkpoint, settings, corpus, model, optimizer, step, seconds, history)
            raise Stopped
    for block in model.blocks:
        block.__dict__.pop("feed_forward", None)
    rate = settings.steps * settings.batch_size * settings.context / seconds
    said = {"seconds": round(seconds, 2), "bytes_per_second": round(rate), "bits": _thinned(history)}
    return model, said


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    bfloat16 = settings.precision == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16)


def _thinned(history: list[list[float]], most: int = 100) -> list[list[float]]:
    """[step, mean bits per byte since the last one], at most `most` of them."""
    every = -(-len(history) // most)
    groups = [history[at : at + every] for at in range(0, len(history), every)]
    return [[group[-1][0], round(sum(bits for _, bits in group) / len(group), 5)] for group in groups]


def _save(
    path: Path, settings: Settings, corpus: Corpus, model: ByteLM, optimizer: torch.optim.Optimizer, step: int,
    seconds: float, history: list,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "settings": settings.as_json(), "corpus": corpus.description["sha256"], "step": step, "seconds": seconds,
        "history": history, "optimizer": optimizer.state_dict(),
        # a compiled method is no part of it
        "model": model.state_dict(),
    }
    unfinished = path.with_suffix(".part")
    torch.save(state, unfinished)
    unfinished.replace(path)  # whoever stops us now leaves the one before


def _restore(
    path: Path, settings: Settings, corpus: Corpus, model: ByteLM, optimizer: torch.optim.Optimizer
) -> tuple[int, float, list]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    if (state["settings"], state["corpus"]) != (settings.as_json(), corpus.description["sha256"]):
        raise ValueError(f"folder: {path} is of other settings or texts; give another --folder, or delete it")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["seconds"], state["history"]
