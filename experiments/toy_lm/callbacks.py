"""Lightning callbacks: gradient validation for any LightningModule, a Ctrl-C that ends on a whole step, progress."""

import copy
import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn

from decayattn import backends
from decayattn.testing import GradientRow, compare_model_gradients, format_table

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16}


class GradientViolation(RuntimeError):
    """A gradient through the kernels left the error budget."""


class GradientValidation(lightning.Callback):
    """Compares every parameter's gradient through the kernels with the float64 reference, before and after training.

    On rank 0, before the first step and after the last, `decayattn.testing.compare_model_gradients` runs in float32,
    with Triton's kernels, and, on a GPU whose training precision is 16-bit, in that precision too, with those that may
    train. On a CPU the kernels need Triton's interpreter (TRITON_INTERPRET=1 before Triton is imported), which gets
    bfloat16 products wrong. The tables are printed and saved as gradients/step-N.txt and .json in `folder`. A violation
    of the error budget raises GradientViolation on every rank. An interrupted training ends without the second check.

    Args:
        loss: called as loss(model, batch); a scalar, deterministic.
        batch: what the loss takes, on any device; small, because the reference holds every score in float64.
        folder: of the run.
        model: attribute of the LightningModule that holds the model with the DecayFlashAttention layers.
        backend: the kernel backend to check in 16 bits; "auto", or "reference", every one that takes the model.
    """

    def __init__(
        self, loss: Callable[[nn.Module, Any], Tensor], batch: Any, folder: Path, *, model: str = "model",
        backend: str = "auto",
    ):  # fmt: skip
        self.loss, self.batch, self.folder = loss, batch, Path(folder) / "gradients"
        self.model, self.backend = model, backend

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._check_on_rank_zero(trainer, pl_module)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # after on_train_end, so that a violation finds the last checkpoint written
        if not any(isinstance(c, FinishOnInterrupt) and c.interrupted for c in trainer.callbacks):
            self._check_on_rank_zero(trainer, pl_module)

    def check(
        self, model: nn.Module, step: int, precision: str, device: torch.device | None = None
    ) -> list[GradientRow]:
        """Compare, print and save; returns the rows. On the model's device unless another one is given."""
        device = next(model.parameters()).device if device is None else device
        batch = move_data_to_device(self.batch, device)
        model = copy.deepcopy(model).to(device)  # a copy is not compiled
        # float32 shows errors of the formulas
        runs = [(copy.deepcopy(model).float(), None, "triton")]
        if device.type == "cuda" and precision.endswith("-mixed"):
            autocast = _DTYPES[precision.removesuffix("-mixed")]
            runs += [(model, autocast, backend) for backend in self.backends(autocast, device)]
        elif device.type == "cuda" and precision in ("bf16-true", "16-true"):
            dtype = _DTYPES[precision.removesuffix("-true")]
            runs += [(model, None, backend) for backend in self.backends(dtype, device)]
        rows, tables = [], []
        for tested, autocast, backend in runs:
            try:
                found = compare_model_gradients(tested, self.loss, batch, backend=backend, autocast=autocast)
            except ValueError as refusal:
                if backend in ("triton", self.backend):
                    raise
                # "auto" does not train with it either
                tables.append(f"gradients at step {step}, backend {backend!r}: none, {refusal}")
                continue
            rows += found
            title = f"gradients at step {step}, backend {backend!r}, {found[0].precision}"
            tables.append(f"{title}\n{format_table(found)}")
        text = "\n\n".join(tables) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"step-{step}.txt").write_text(text, encoding="utf-8")
        (self.folder / f"step-{step}.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        print("\n" + text, flush=True)
        return rows

    def backends(self, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Those that are checked in 16 bits."""
        if self.backend not in ("auto", "reference"):
            return [self.backend]
        # of one that cannot be imported, the reason in words
        loaded = {name: backends.load(name) for name in backends.KERNELS}
        return [name for name, x in loaded.items() if not isinstance(x, str) and x.refusal(dtype, device) is None]

    def _check_on_rank_zero(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        violated = None
        if trainer.is_global_zero:
            # when the fit has ended, Lightning has moved the model to the CPU
            device = trainer.strategy.root_device
            rows = self.check(getattr(pl_module, self.model), trainer.global_step, trainer.precision, device)
            violated = [f"{row.parameter} ({row.precision})" for row in rows if not row.passed]
        # the others wait here, and stop with rank 0 instead of waiting for it in the next step
        violated = trainer.strategy.broadcast(violated)
        if violated:
            step, names = trainer.global_step, ", ".join(violated)
            raise GradientViolation(f"gradients outside the error budget at step {step}: {names}")


class FinishOnInterrupt(lightning.Callback):
    """Ctrl-C ends the training after the step in progress, with a validation and a checkpoint; a second one at once.

    The last step ends in the same way, so that the last checkpoint is the trained model at any validation interval.
    """

    def __init__(self):
        self.interrupted = False
        self._requested = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._previous = signal.signal(signal.SIGINT, self._request)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        # several processes hear of it at different steps, and have to stop after the same one
        requested = trainer.strategy.reduce_boolean_decision(self._requested, all=False)
        finished = 0 < trainer.max_steps <= trainer.global_step
        self.interrupted = requested and not finished
        if requested or finished:
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def on_exception(self, *_: Any) -> None:
        if hasattr(self, "_previous"):
            signal.signal(signal.SIGINT, self._previous)

    def _request(self, signum: int, frame: object) -> None:
        self._requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Progress(TQDMProgressBar):
    """One bar over all steps, and a line of its own for every validation."""

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(disable=True)

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        self._name_bar(trainer)  # a resumed training starts within an epoch

    def on_train_epoch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self._name_bar(trainer)

    def _name_bar(self, trainer: lightning.Trainer) -> None:
        self.train_progress_bar.total = trainer.max_steps
        self.train_progress_bar.set_description("training")

    def get_metrics(self, *arguments: Any) -> dict[str, Any]:
        return {name: value for name, value in super().get_metrics(*arguments).items() if name != "v_num"}

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == "fit":
            bits = trainer.callback_metrics["val_bits"]
            pl_module.print(f"step {trainer.global_step}: validation {bits:.3f} bits per byte")
