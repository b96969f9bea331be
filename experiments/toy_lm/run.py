"""One run from its configuration to its folder: validate, train with Lightning, report."""

import dataclasses
import json
import logging
import platform
import sys
import time
import warnings
from datetime import datetime
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from provenance import provenance

from decayattn.backends import NAMES as BACKENDS
from toy_lm.callbacks import FinishOnInterrupt, GradientValidation, GradientViolation, Progress
from toy_lm.config import RUNS, Config, OptionError, save_config
from toy_lm.model import next_byte_loss
from toy_lm.report import describe, report, save_half_lives
from toy_lm.training import TrainByteLM

DONE, VIOLATION, INTERRUPTED = 0, 1, 130  # exit statuses; 2 is a wrong option


def run(config: Config) -> int:
    """Train as a resolved configuration says; the exit status.

    The processes of a distributed run all pass here. Only rank 0 writes files (each rank may think of another folder
    name, its clock being its own) and has a status other than 0: Lightning kills everything when another rank fails.
    """
    started = time.monotonic()
    if config.backend not in BACKENDS:
        raise OptionError(f"backend: expected one of {', '.join(BACKENDS)}, got {config.backend!r}")
    _quiet()
    lightning.seed_everything(config.seed, verbose=False)
    folder = Path(config.run) if config.run != "auto" else RUNS / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    first_step = _step_of(config.resume)
    if first_step >= config.steps:
        raise OptionError(f"steps: expected more than the {first_step} of the run to resume, got {config.steps}")
    module = TrainByteLM(config)
    trainer, interrupt = make_trainer(config, module, folder, first_step)
    if trainer.is_global_zero:
        if config.resume is None and (folder / "config.yaml").exists():
            raise OptionError(f"run: {folder} already holds a run; name another folder, or use --resume {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        data = config.data and str(Path(config.data).resolve())  # a resume may start elsewhere
        save_config(dataclasses.replace(config, data=data, run=str(folder), resume=None), folder)
        print(f"run folder: {folder}\n{describe(module)}", flush=True)
        if config.resume is None:
            save_half_lives(module, folder / "half_lives_start.json", 0)
    try:
        [before] = trainer.validate(module, ckpt_path=config.resume, verbose=False)
        if trainer.is_global_zero:
            print(f"validation before training: {before['val_bits']:.3f} bits per byte", flush=True)
        trainer.fit(module, ckpt_path=config.resume)
    except GradientViolation as violation:
        return _status(trainer, VIOLATION, f"stopped: {violation}\ntables: {folder / 'gradients'}")
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning answers a KeyboardInterrupt with sys.exit
        if isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt):
            return _status(trainer, INTERRUPTED, f"interrupted\n{_how_to_resume(folder)}")
        raise
    step = trainer.global_step
    if interrupt.interrupted:
        return _status(trainer, INTERRUPTED, f"interrupted after step {step}\n{_how_to_resume(folder)}")
    if trainer.is_global_zero:
        first, last = before["val_bits"], float(trainer.callback_metrics["val_bits"])
        print(f"validation after {step} steps: {last:.3f} bits per byte (before: {first:.3f})", flush=True)
        summary = {
            "validation_bits_before": first, "validation_bits_after": last, "first_step": first_step,
            "steps": step, "seconds": round(time.monotonic() - started, 1), "device": _device_name(config),
            "parameters": sum(p.numel() for p in module.model.parameters()), "lightning": lightning.__version__,
            **provenance("experiments/train_toy_lm.py", sys.argv[1:]),
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        report(module, folder, step)
        print(f"finished in {time.monotonic() - started:.0f} s; everything lies in {folder}", flush=True)
    return DONE


def make_trainer(
    config: Config, module: TrainByteLM, folder: Path, first_step: int
) -> tuple[lightning.Trainer, FinishOnInterrupt]:
    """The Trainer of a resolved configuration, and the callback that knows whether it was interrupted."""
    interrupt = FinishOnInterrupt()
    callbacks = [
        interrupt,
        Progress(refresh_rate=10),
        ModelCheckpoint(
            folder / "checkpoints", filename="best", monitor="val_bits", save_last=True, enable_version_counter=False
        ),
    ]
    if config.gradient_check:
        batch = module.training_batches().batch(first_step)[: config.check_rows, : config.check_context + 1]
        # training on a CPU uses the reference; the check is of the kernels in any case
        callbacks.insert(0, GradientValidation(next_byte_loss, batch, folder, backend=config.backend))
    trainer = lightning.Trainer(
        accelerator=config.accelerator, devices=config.devices, strategy=config.strategy, precision=config.precision,
        max_steps=config.steps, max_epochs=-1, val_check_interval=config.validate_every, check_val_every_n_epoch=None,
        gradient_clip_val=config.clip or None, num_sanity_val_steps=0, use_distributed_sampler=False,
        log_every_n_steps=max(1, min(10, config.steps // 20)), enable_model_summary=False, default_root_dir=folder,
        logger=CSVLogger(folder / "logs", name="", version=f"from_step_{first_step}"), callbacks=callbacks,
    )  # fmt: skip
    return trainer, interrupt


def _step_of(checkpoint: str | None) -> int:
    if checkpoint is None:
        return 0
    return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"]


def _quiet() -> None:
    """Leave Lightning's warnings, drop its announcements."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # of Lightning's own code, about a type of torch that it uses
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    # a resumed run's is not
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")


def _status(trainer: lightning.Trainer, status: int, message: str) -> int:
    if not trainer.is_global_zero:
        return DONE
    print(f"\n{message}", flush=True)
    return status


def _how_to_resume(folder: Path) -> str:
    if (folder / "checkpoints" / "last.ckpt").exists():
        return f"continue with --resume {folder}"
    return "there is no checkpoint yet"


def _device_name(config: Config) -> str:
    return torch.cuda.get_device_name() if config.accelerator == "gpu" else platform.processor() or platform.machine()
