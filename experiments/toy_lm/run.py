"""One run from its configuration to its folder: validate, train with Lightning, report."""

import dataclasses
import errno
import itertools
import json
import logging
import platform
import signal
import sys
import time
import warnings
from datetime import datetime
from pathlib import Path

import lightning
import torch
from language_models.model import next_byte_loss
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from shared.provenance import provenance

from decayattn import decay_attention
from decayattn.backends.registry import NAMES as BACKENDS
from toy_lm.callbacks import (
    EndTogether,
    FinishOnInterrupt,
    FiniteLoss,
    GradientValidation,
    GradientViolation,
    NonFiniteLoss,
    Progress,
)
from toy_lm.config import (
    DONE,
    ENVIRONMENT,
    INTERRUPTED,
    NOT_FINITE,
    RUNS,
    SHARDED,
    TERMINATED,
    VIOLATION,
    Config,
    OptionError,
    save_config,
)
from toy_lm.report import describe, device_of, report
from toy_lm.statistics import AttentionStatistics
from toy_lm.training import TrainByteLM


def run(config: Config) -> int:
    """Train as a resolved configuration says; the exit status.

    The processes of a distributed run all pass here. Only rank 0 writes files, and where all stop together it alone has
    a status other than 0; a process that fails by itself ends the others with its own (EndTogether).
    """
    started = time.monotonic()
    if config.backend not in BACKENDS:
        raise OptionError(f"backend: expected one of {', '.join(BACKENDS)}, got {config.backend!r}")
    _quiet()
    lightning.seed_everything(config.seed, verbose=False)
    module = TrainByteLM(config)
    first_step = 0 if config.resume is None else _step_of(config.resume, module)
    if first_step >= config.steps:
        raise OptionError(f"steps: expected more than the {first_step} of the run to resume, got {config.steps}")
    if rank_zero_only.rank == 0:  # Lightning starts the other processes later
        _check_backend(config)
        folder = _open_folder(config)
    else:
        folder = Path(config.run)  # not used: rank 0 tells the others where checkpoints lie
    trainer, interrupt, together = make_trainer(config, module, folder, first_step)
    if trainer.is_global_zero:
        together.watch(trainer)
    try:
        status = _train(config, module, folder, first_step, trainer, interrupt, started)
    except Exception:
        status = together.end_others()
        if status is None:
            raise
        return status
    if status != DONE:
        together.end_others()
    return status


def _train(
    config: Config, module: TrainByteLM, folder: Path, first_step: int, trainer: lightning.Trainer,
    interrupt: FinishOnInterrupt, started: float,
) -> int:
    if trainer.is_global_zero:
        print(f"run folder: {folder}\n{describe(module)}", flush=True)
    try:
        [before] = trainer.validate(module, ckpt_path=config.resume, verbose=False)
        if trainer.is_global_zero:
            print(f"validation before training: {before['val_bits']:.3f} bits per byte", flush=True)
        trainer.fit(module, ckpt_path=config.resume)
    except GradientViolation as violation:
        return _status(trainer, VIOLATION, f"stopped: {violation}\ntables: {folder / 'gradients'}")
    except NonFiniteLoss as diverged:
        if not trainer.is_global_zero:
            return DONE
        advice = "no step was trained: --precision or the checkpoint is at fault"
        if trainer.state.fn == "fit":
            advice = f"try a --learning_rate below {config.learning_rate:g}"
            if (folder / "checkpoints" / "last.ckpt").exists():
                advice += f", from the start or with --resume {folder}"
        print(f"error: {diverged}; {advice}", file=sys.stderr)
        return NOT_FINITE
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning answers a KeyboardInterrupt with sys.exit
        if isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt):
            return _status(trainer, INTERRUPTED, f"interrupted\n{_how_to_resume(folder)}")
        if isinstance(stop, SIGTERMException):
            return _status(trainer, TERMINATED, f"terminated\n{_how_to_resume(folder)}")
        raise
    step = trainer.global_step
    if interrupt.interrupted is not None:
        terminated = interrupt.interrupted == signal.SIGTERM
        status, word = (TERMINATED, "terminated") if terminated else (INTERRUPTED, "interrupted")
        return _status(trainer, status, f"{word} after step {step}\n{_how_to_resume(folder)}")
    if trainer.is_global_zero:
        first, last = before["val_bits"], float(trainer.callback_metrics["val_bits"])
        print(f"validation after {step} steps: {last:.3f} bits per byte (before: {first:.3f})", flush=True)
        summary = {
            "validation_bits_before": first, "validation_bits_after": last, "first_step": first_step,
            "steps": step, "batch_size": config.batch_size, "devices": config.devices, "nodes": config.nodes,
            "strategy": config.strategy, "device": _device_name(config),
            "seconds": round(time.monotonic() - started, 1),
            "parameters": sum(p.numel() for p in module.model.parameters()), "lightning": lightning.__version__,
            **provenance("experiments/train_toy_lm.py", sys.argv[1:]),
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        report(module, folder, step)
        print(f"finished in {time.monotonic() - started:.0f} s; everything lies in {folder}", flush=True)
    return DONE


def make_trainer(
    config: Config, module: TrainByteLM, folder: Path, first_step: int
) -> tuple[lightning.Trainer, FinishOnInterrupt, EndTogether]:
    """The Trainer of a resolved configuration, and the callbacks for what ends a run early."""
    interrupt, together = FinishOnInterrupt(), EndTogether(ENVIRONMENT)
    callbacks = [
        interrupt,
        together,
        FiniteLoss("val_bits", config.validate_every, folder),
        Progress(refresh_rate=10),
        ModelCheckpoint(
            folder / "checkpoints", filename="best", monitor="val_bits", enable_version_counter=False
        ),
        # save_last of the one above saves only where the loss is the best so far (Lightning 2.6)
        ModelCheckpoint(folder / "checkpoints", filename="last", enable_version_counter=False),
    ]
    if config.decay != "none":
        callbacks.append(AttentionStatistics(folder, first_step))
    if config.gradient_check:
        batch = module.training_batches().batch(first_step)[: config.check_rows, : config.check_context + 1]
        # training on a CPU uses the reference; the check is of the kernels in any case
        validation = GradientValidation(
            next_byte_loss, batch, folder, backend=config.backend, sharded=config.strategy in SHARDED
        )
        callbacks.insert(1, validation)
    strategy = config.strategy
    if strategy in SHARDED:
        from toy_lm.sharded import ShardedStrategy

        strategy = ShardedStrategy(config)
    trainer = lightning.Trainer(
        accelerator=config.accelerator, devices=config.devices, num_nodes=config.nodes, strategy=strategy,
        precision=config.precision,
        # weights that a sharded model gathers before training would be inference tensors in training, too
        inference_mode=config.strategy not in SHARDED,
        max_steps=config.steps, max_epochs=-1, val_check_interval=config.validate_every, check_val_every_n_epoch=None,
        gradient_clip_val=config.clip or None, num_sanity_val_steps=0, use_distributed_sampler=False,
        log_every_n_steps=max(1, min(10, config.steps // 20)), enable_model_summary=False, default_root_dir=folder,
        logger=CSVLogger(folder / "logs", name="", version=f"from_step_{first_step}"), callbacks=callbacks,
    )
    return trainer, interrupt, together


def _check_backend(config: Config) -> None:
    """Refuse a kernel backend that does not take this model, by what it says of a call on two tokens."""
    if config.backend in ("auto", "reference"):
        return
    dtypes = {"32": torch.float32, "64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16}
    dtype = dtypes[config.precision.partition("-")[0]]
    x = torch.zeros(1, 2, config.heads, config.width // config.heads, dtype=dtype, device=device_of(config))
    try:
        decay_attention(x, x, x, backend=config.backend)
    except ValueError as refusal:
        raise OptionError(str(refusal)) from None


def _open_folder(config: Config) -> Path:
    """The run's folder with its config.yaml; a new run's is its alone, though two may start at once."""
    data = config.data and str(Path(config.data).resolve())  # a resume may start elsewhere
    new = config.resume is None
    folders = [Path(config.run)]
    if config.run == "auto":
        started = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        folders = (RUNS / (started if n == 1 else f"{started}_{n}") for n in itertools.count(1))
    for folder in folders:
        saved = dataclasses.replace(config, data=data, run=str(folder), resume=None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_config(saved, folder, new=new)
            return folder
        except FileExistsError:
            if not folder.is_dir():
                raise OptionError(f"run: expected a folder, got {folder}, which is a file") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OptionError(f"run: {folder} cannot be written to: {error.strerror}") from None
    raise OptionError(f"run: {folder} already holds a run; name another folder, or use --resume {folder}")


def _step_of(checkpoint: str, module: TrainByteLM) -> int:
    """The step of a checkpoint of this model."""
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        step, weights = saved["global_step"], saved["state_dict"]
    except Exception as error:
        # a truncated file is any of OSError, RuntimeError, EOFError, UnpicklingError and more
        reason = str(error).split("\n")[0]
        raise OptionError(f"resume: {checkpoint} is not a checkpoint, or only a part of one: {reason}") from None
    expected = module.state_dict()
    for name in sorted({*expected, *weights}):
        here, there = (x[name].shape if name in x else None for x in (expected, weights))
        if here != there:
            raise OptionError(f"resume: {checkpoint} is of another model: {name} is {there}, expected {here}")
    return step


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
