"""Lightning callbacks: the gradient check, statistics of the attention, Ctrl-C that ends on a whole step, the bar."""

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from shared.report import write
from torch import Tensor, nn

from decayattn.backends import registry
from decayattn.testing import GradientRow, compare_model_gradients, format_table
from toy_lm.model import attention_statistics
from toy_lm.parallel import Sharded, place, plain_copy, share


class GradientViolation(RuntimeError):
    """A gradient through the kernels exceeds its error budget."""


class GradientCheck(Callback):
    """Compares every parameter's gradient through the kernels with a float64 reference, before and after training.

    Rank 0 runs `decayattn.testing.compare_model_gradients`: in float32 through Triton's kernels, which shows errors of
    the formulas, and on a GPU in the 16-bit training precision too, through every backend that may train. Gradients
    that the devices of a sharded model compute together are compared as well. Tables are printed, and saved as
    gradients/step-N.txt and .json. A violation raises GradientViolation on every rank.

    Args:
        loss: called as loss(model, batch); a deterministic scalar.
        batch: (B, T + 1), short: the reference holds every score in float64.
        rows: number of sequences that one device checks; a sharded model's devices check at least one each.
        folder: of the run.
        backend: of the training; "auto" checks every kernel backend.
    """

    def __init__(
        self, loss: Callable[[nn.Module, Tensor], Tensor], batch: Tensor, rows: int, folder: Path, backend: str = "auto"
    ):
        self.loss, self.batch, self.rows, self.folder = loss, batch, rows, folder / "gradients"
        self.backends = registry.KERNELS if backend in ("auto", "reference") else (backend,)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step >= trainer.max_steps:  # not interrupted
            self.check(trainer, pl_module)

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        device, step, together = trainer.strategy.root_device, trainer.global_step, {}
        dtype = torch.bfloat16 if trainer.precision.startswith("bf16") else None
        autocast = dtype if trainer.precision.endswith("-mixed") else None
        batch = self.batch[: self.rows].to(device)
        if isinstance(trainer.strategy, Sharded):
            _, replicas, _, parts = place(trainer.strategy)
            rows, length = -(-self.rows // replicas) * replicas, (self.batch.shape[1] - 1) // parts * parts
            batch = self.batch[:rows, : length + 1].to(device)
            own = share(batch, trainer.strategy)
            for cast in dict.fromkeys((None, autocast)):
                together[cast] = trainer.strategy.gradients(module.model, self.loss, own, cast)
        model, violated = plain_copy(module.model), None
        if trainer.is_global_zero:
            model = model.to(device)
            tables = [self.compare(plain_copy(model).float(), batch, "triton")]
            if dtype is not None and device.type == "cuda":
                tables += [self.compare(model, batch, name, autocast=autocast) for name in self.backends]
            for cast, gradients in together.items():
                tables.append(self.compare(model, batch, "sharded", autocast=cast, tested=gradients))
            text = "\n\n".join(f"gradients at step {step}, {table}" for table, _ in tables) + "\n"
            rows = [row for _, of_table in tables for row in of_table]
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"step-{step}.txt").write_text(text, encoding="utf-8")
            (self.folder / f"step-{step}.json").write_text(json.dumps(list(map(dataclasses.asdict, rows)), indent=1))
            print(f"\n{text}", flush=True)  # module.print is silent without a progress bar: before the first step
            violated = ", ".join(f"{row.parameter} ({row.precision})" for row in rows if row.verdict == "wrong")
        violated = trainer.strategy.broadcast(violated)  # every rank stops, or none
        if violated:
            raise GradientViolation(f"gradients outside the error budget at step {step}, see {self.folder}: {violated}")

    on_train_start = check

    def compare(self, model: nn.Module, batch: Tensor, name: str, **more: Any) -> tuple[str, list[GradientRow]]:
        """A table under its title, and its rows; none where one of several backends does not take the model."""
        try:
            rows = compare_model_gradients(model, self.loss, batch, backend=name.replace("sharded", "triton"), **more)
        except ValueError as reason:
            if name != "hopper" or len(self.backends) == 1:
                raise
            return f"{name}: not checked, {reason}", []
        return f"{name}, {rows[0].precision}\n{format_table(rows)}", rows


class AttentionStatistics(Callback):
    """Writes attention.json: toy_lm.model.attention_statistics over a text, at the start and at every validation.

    Visited tiles are null where documents are kept apart, and without a GPU or Triton. On a CPU, which interprets their
    plan, the first and the last step alone have them.
    """

    def __init__(self, text: Tensor, folder: Path, first_step: int):
        self.text, self.path = text[None], folder / "attention.json"
        rows = json.loads(self.path.read_text())["rows"] if first_step and self.path.exists() else []
        self.rows = [row for row in rows if row["step"] < first_step]  # a resume repeats the rows after its checkpoint

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.record(trainer, pl_module)

    def record(self, trainer: Trainer, module: LightningModule) -> None:
        model = plain_copy(module.model)  # every rank joins the copy of a sharded model
        if not trainer.is_global_zero:
            return
        device, step, kernels = trainer.strategy.root_device, trainer.global_step, registry.load("triton")
        planned = not isinstance(kernels, str) and kernels.unavailable(torch.float32, device) is None
        planned = planned and (device.type == "cuda" or step == 0 or step >= trainer.max_steps)
        for block in model.float().to(device).blocks:
            block.attention.backend = "auto"  # that of the training may not take float32
        # not on a CPU: Triton's interpreter has no bfloat16
        with torch.autocast("cuda", torch.bfloat16, device.type == "cuda" and trainer.precision.startswith("bf16")):
            visited = planned and model.options["documents"] == "together"
            layers = attention_statistics(model, self.text.to(device), visited=visited)
        self.rows.append({"step": step, "layers": layers})
        write({"bytes": self.text.shape[1], "rows": self.rows}, self.path)

    on_train_start = record


class FinishStep(Callback):
    """Ctrl-C and SIGTERM end the training after the current step, with a validation and a checkpoint; a second one at
    once. Lightning alone may save in the middle of a step. The last step ends in the same way, with a checkpoint."""

    def __init__(self):
        self.received, self.handlers = False, {}

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.handlers:  # not in on_train_start: Ctrl-C ends a gradient check at once
            self.handlers = {s: signal.signal(s, self.receive) for s in (signal.SIGINT, signal.SIGTERM)}

    def receive(self, number: int, frame: Any) -> None:
        self.received = True
        self.restore()

    def restore(self, *_: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    on_train_end = on_exception = restore

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # a signal may reach one rank alone, or ranks at different steps: they stop after the same one
        stop = trainer.strategy.reduce_boolean_decision(self.received, all=False)
        trainer.should_stop |= stop or trainer.global_step >= trainer.max_steps


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, which does not know the number of steps after a resume."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        self.train_progress_bar.total = trainer.max_steps
