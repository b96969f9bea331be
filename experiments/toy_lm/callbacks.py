"""Lightning callbacks: gradient validation for any LightningModule, losses that must be finite, signals that end a
run on a whole step, processes that end together, progress."""

import copy
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from decayattn.backends import registry
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

    Of a sharded model, rank 0 checks a whole copy, and holds the gradients that all ranks together give, each with its
    share of the batch, against those of the copy: in float32, and in the training precision where that is mixed.

    Args:
        loss: called as loss(model, batch); a scalar, deterministic.
        batch: what the loss takes, on any device; small, because the reference holds every score in float64.
        folder: of the run.
        model: attribute of the LightningModule that holds the model with the DecayFlashAttention layers.
        backend: the kernel backend to check in 16 bits; "auto", or "reference", every one that takes the model.
        sharded: whether every rank has a part of the model. The LightningModule has whole_model() and
            sharded_gradients(batch, autocast) then, which every rank calls.
    """

    def __init__(
        self, loss: Callable[[nn.Module, Any], Tensor], batch: Any, folder: Path, *, model: str = "model",
        backend: str = "auto", sharded: bool = False,
    ):
        self.loss, self.batch, self.folder = loss, batch, Path(folder) / "gradients"
        self.model, self.backend, self.sharded = model, backend, sharded

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._gather(trainer, pl_module)
        self._check_on_rank_zero(trainer, pl_module)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # a sharded model leaves its devices before the fit has ended
        self._gather(trainer, pl_module)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # after on_train_end, so that a violation finds the last checkpoint written
        if not any(isinstance(c, FinishOnInterrupt) and c.interrupted for c in trainer.callbacks):
            self._check_on_rank_zero(trainer, pl_module)

    def check(
        self, model: nn.Module, step: int, precision: str, device: torch.device | None = None,
        gathered: Sequence[tuple[torch.dtype | None, Mapping[str, Tensor]]] = (),
    ) -> list[GradientRow]:
        """Compare, print and save; returns the rows. On the model's device unless another one is given.

        gathered: (autocast, gradients) of the same model on several devices.
        """
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
        for autocast, gradients in gathered:
            gradients = {name: gradient.to(device) for name, gradient in gradients.items()}
            found = compare_model_gradients(model, self.loss, batch, autocast=autocast, tested=gradients)
            rows += found
            title = f"gradients at step {step}, sharded beside one process, {found[0].precision}"
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
        loaded = {name: registry.load(name) for name in registry.KERNELS}
        return [name for name, x in loaded.items() if not isinstance(x, str) and x.unavailable(dtype, device) is None]

    def _gather(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """What a sharded model's check needs of all ranks."""
        self._whole, self._gathered = None, []
        if self.sharded:
            self._whole = pl_module.whole_model()
            mixed = trainer.precision.endswith("-mixed")
            for autocast in (None, *([_DTYPES[trainer.precision.removesuffix("-mixed")]] if mixed else [])):
                self._gathered.append((autocast, pl_module.sharded_gradients(self.batch, autocast)))

    def _check_on_rank_zero(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        violated = None
        if trainer.is_global_zero:
            # when the fit has ended, Lightning has moved the model to the CPU
            device = trainer.strategy.root_device
            model = self._whole if self.sharded else getattr(pl_module, self.model)
            rows = self.check(model, trainer.global_step, trainer.precision, device, self._gathered)
            violated = [f"{row.parameter} ({row.precision})" for row in rows if row.verdict == "wrong"]
        # the others wait here, and stop with rank 0 instead of waiting for it in the next step
        violated = trainer.strategy.broadcast(violated)
        if violated:
            step, names = trainer.global_step, ", ".join(violated)
            raise GradientViolation(f"gradients outside the error budget at step {step}: {names}")


class NonFiniteLoss(RuntimeError):
    """A loss is NaN or infinite: no later step can mend the model."""


class FiniteLoss(lightning.Callback):
    """Stops a training that diverged: raises NonFiniteLoss, on every rank, at the first loss that is NaN or infinite.

    A gradient that is not finite would make the next loss so. It stops the training before the model is changed by it,
    and the model and the batch that gave it are kept, so that the step can be looked at. With a GradScaler, which
    leaves out such steps, gradients are not looked at.

    The losses of the steps are looked at where the GPU is waited for anyway, once in `log_every_n_steps`, and before a
    validation, so that no checkpoint is written of a diverged model.

    Args:
        monitor: the logged validation loss.
        every: steps after which a validation follows.
        folder: where not_finite.pt is written: step, batch and state_dict; None: nowhere.
    """

    def __init__(self, monitor: str, every: int, folder: Path | None = None):
        self.monitor, self.every, self.folder = monitor, every, folder
        self._losses: list[Tensor] = []
        self._batch = self._loss = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any,
                             *_: Any) -> None:
        self._batch = batch

    def on_before_backward(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule,
                           loss: Tensor) -> None:
        self._loss = loss.detach()

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule,
                                 *_: Any) -> None:
        if trainer.precision.startswith("16"):
            return
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        parts = {name: x.to_local() if hasattr(x, "to_local") else x for name, x in gradients.items()}
        finite = bool(torch.stack([part.isfinite().all() for part in parts.values()]).all())
        is_sharded = any(parts[name] is not gradients[name] for name in parts)
        if is_sharded:  # the others may have what is not finite
            finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
        if finite:
            return
        step, loss = trainer.global_step + 1, float(trainer.strategy.reduce(self._loss, reduce_op="mean"))
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the training loss of step {step} is {loss}")
        if is_sharded:
            parts = pl_module.whole_gradients()
        names = [name for name, gradient in parts.items() if not bool(gradient.isfinite().all())]
        kept = ""
        weights = trainer.strategy.lightning_module_state_dict() if is_sharded else pl_module.state_dict()
        if self.folder is not None and trainer.is_global_zero:
            kept = f" ({self.folder / 'not_finite.pt'} has the model and the batch)"
            torch.save({"step": step, "batch": self._batch, "state_dict": weights}, self.folder / "not_finite.pt")
        raise NonFiniteLoss(
            f"the gradient of step {step} is not finite, its loss is {loss:.4g}: {len(names)} of {len(parts)} "
            f"parameters, the last of them {names[-1]}{kept}"
        )

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any,
                           *_: Any) -> None:
        self._losses.append(outputs["loss"])
        step = trainer.global_step
        if step % trainer.log_every_n_steps and step % self.every and step != trainer.max_steps:
            return
        # a step's loss is the mean over the devices; that of one which is not finite is not
        losses = trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean").tolist()
        first = step - len(losses) + 1
        self._losses.clear()
        for number, loss in enumerate(losses, start=first):
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"the training loss of step {number} is {loss}")

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        loss = float(trainer.callback_metrics[self.monitor])
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the validation loss after step {trainer.global_step} is {loss}")


class FinishOnInterrupt(lightning.Callback):
    """Ctrl-C or SIGTERM ends the training after the step in progress, with a validation and a checkpoint.

    A second one ends it at once. The last step ends in the same way, so that the last checkpoint is the trained model
    at any validation interval. Before the first step and after the last one SIGTERM ends the run at once. Lightning's
    own handler of it calls a collective, wherever the process stands: with several processes that hangs, for the others
    may be in another one.

    Attributes:
        interrupted: the signal that ended the training, None where nothing did
    """

    def __init__(self):
        self.interrupted: signal.Signals | None = None
        self._requested, self._training = 0, False

    def on_validation_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.state.fn == "validate":
            signal.signal(signal.SIGTERM, self._end)

    def on_train_start(self, *_: Any) -> None:
        self._previous = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGTERM, self._end)

    def on_train_batch_start(self, *_: Any) -> None:
        if not self._training:
            self._training = True
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._request)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        # several processes hear of it at different steps, or one alone, and all have to stop after the same one
        requested = torch.tensor(self._requested, device=pl_module.device)
        requested = int(trainer.strategy.reduce(requested, reduce_op="max"))
        finished = 0 < trainer.max_steps <= trainer.global_step
        if requested and not finished:
            self.interrupted = signal.Signals(requested)
        if requested or finished:
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._previous)
        signal.signal(signal.SIGTERM, self._end)

    def on_exception(self, *_: Any) -> None:
        if hasattr(self, "_previous"):
            signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: object) -> None:
        self._requested = max(self._requested, number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else self._end)

    def _end(self, number: int, frame: object) -> None:
        raise SIGTERMException


class EndTogether(lightning.Callback):
    """When a process of a distributed run fails, all end, with its exit status.

    Lightning's own watch over the processes that rank 0 has started kills rank 0 too, without a word, so this one takes
    its place. Rank 0 may be waiting for the failed one in a collective, which no exception ends; os._exit does, from
    another thread.

    Args:
        killed: the exit status where a process was killed, as the system does when memory runs out.
    """

    def __init__(self, killed: int):
        self.killed = killed
        self._launcher = None
        self._stopped = threading.Event()

    def watch(self, trainer: lightning.Trainer) -> None:
        """On rank 0, before Lightning starts the other processes: one may fail before any callback is called."""
        self._launcher = trainer.strategy.launcher
        if trainer.world_size > 1:
            threading.Thread(target=self._watch, daemon=True).start()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, error: BaseException
    ) -> None:
        if not isinstance(error, Exception):
            self._stopped.set()  # a signal that every process gets: Lightning ends them

    def end_others(self, patience: float = 5) -> int | None:
        """On rank 0, which failed or stopped: the status of another process that failed, perhaps the cause; else None.

        Those that have not ended after `patience` seconds are killed.
        """
        self._stopped.set()
        deadline = time.monotonic() + patience
        while (failed := self._failure()) is None and time.monotonic() < deadline:
            if all(process.poll() is not None for process in self._processes()):
                break
            time.sleep(0.1)
        for process in self._processes():
            process.kill()
        return failed

    def _processes(self) -> list[subprocess.Popen]:
        # of the launcher that starts the script again for every other rank; nobody else's is known here
        return list(getattr(self._launcher, "procs", []))

    def _end_the_watch_of_lightning(self) -> bool:
        """Where it has begun: a list without processes is all that it waits for. It looks every 5 seconds."""
        if all(thread.name != "child-process-observer" for thread in threading.enumerate()):
            return False
        watched, self._launcher.procs = self._launcher.procs, self._processes()
        watched.clear()
        return True

    def _watch(self) -> None:
        alone = False
        while not self._stopped.wait(0.2):
            alone = alone or self._end_the_watch_of_lightning()
            failed = self._failure()
            if failed is not None:
                for process in self._processes():
                    process.kill()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failed)

    def _failure(self) -> int | None:
        for rank, process in enumerate(self._processes(), start=1):
            status = process.poll()
            if status is not None and status < 0:  # it could say nothing itself
                print(f"error: the process of rank {rank} was killed by signal {-status}", file=sys.stderr)
                return self.killed
            if status:
                return status
        return None


class Progress(TQDMProgressBar):
    """One bar over all steps, and a line of its own for every validation."""

    def on_exception(self, *_: Any) -> None:
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()  # what is printed next begins a line

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
