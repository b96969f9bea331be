"""Train a small byte-level language model. The decay of its attention is its only position information.

    python experiments/train_toy_lm.py                         # no GPU: 4 minutes on 2 cores, 8.06 → 2.15 bits per byte
    python experiments/train_toy_lm.py --decay alibi-learned --data my_texts/
    python experiments/train_toy_lm.py --resume last           # after Ctrl-C; with --steps 1200, to train on
    python experiments/train_toy_lm.py --devices 2             # two GPUs share the batch; see --strategy
    CUDA_VISIBLE_DEVICES= python experiments/train_toy_lm.py   # on the CPU despite GPUs

Every gradient through the kernels is compared with float64 before the first step and after the last. The
run folder gets checkpoints, config.yaml, the gradient tables, figures, a text sample, model.pt and summary.json.

Exit status: 0 done; 1 an error, a gradient outside its error budget, or one that is not finite; 2 a bad option; 130
interrupted (Ctrl-C), with a line that says how to resume.
"""

import inspect
import itertools
import json
import logging
import math
import os
import re
import sys
import sysconfig
import time
import warnings
from argparse import ArgumentError
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

# before torch is imported: OpenMP threads that spin while they wait are 5 times slower on a busy CPU
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import numpy as np
import torch

if not torch.cuda.is_available():  # before Lightning imports Triton: the gradient check interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")
import lightning.pytorch as L
from jsonargparse import ArgumentParser, Namespace
from language_models.corpus import crops
from lightning.pytorch.callbacks import ModelCheckpoint
from shared.provenance import provenance
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from toy_lm import figures
from toy_lm.callbacks import AttentionStatistics, FinishStep, GradientCheck, GradientViolation, ProgressBar
from toy_lm.model import DOCUMENT, ByteLM, learning_rate_factor, mlp_width, next_byte_loss, parameter_groups
from toy_lm.parallel import Sharded, clip_gradients, place, plain_copy, share

from decayattn import decay_attention
from decayattn.backends.registry import BackendName
from decayattn.nn.attention import DecayPreset

GPU = torch.cuda.is_available()
RUNS = Path("runs/toy_lm")


class ByteData(L.LightningDataModule):
    """Random crops of a text, as bytes.

    Args:
        data: Text to train on: a file (its last 5 % validate), or a folder, of which every 20th file validates and
            binary files are skipped. By default the source files of Python's standard library.
        context: Bytes that the model sees at once.
        batch_size: Sequences per step, of all devices together.
        seed: Seed of the weights, the crops and the text sample.
    """

    def __init__(
        self, data: str | None = None, documents: str = "together", context: int = 2048 if GPU else 256,
        batch_size: int = 16 if GPU else 8, seed: int = 0,
    ):
        super().__init__()
        self.context, self.batch_size, self.seed = context, batch_size, seed
        texts, self.skipped = read_texts(data)
        self.training, self.validation = split(texts, b"\n" if documents == "together" else bytes([DOCUMENT]))
        shortest = min(len(self.training), len(self.validation))
        if shortest <= context:
            raise ValueError(f"data: expected over {context} bytes, the context, in either part, got {shortest}")

    def train_dataloader(self) -> Iterator[Tensor]:
        return (share(self.batch(step), self.trainer.strategy) for step in itertools.count(self.trainer.global_step))

    def batch(self, step: int) -> Tensor:
        """(batch_size, context + 1) bytes. They depend on the seed and the step alone, not on resumes or devices."""
        last = len(self.training) - self.context
        starts = np.random.default_rng([self.seed, step]).integers(last, size=self.batch_size)
        return crops(self.training, starts, self.context + 1)

    def val_dataloader(self) -> DataLoader:
        """64 fixed crops, spread evenly over the text."""
        _, replicas, _, _ = place(self.trainer.strategy)
        starts = np.linspace(0, len(self.validation) - self.context - 1, -(-64 // replicas) * replicas)
        fixed = crops(self.validation, starts.astype(np.int64), self.context + 1)
        return DataLoader(share(fixed, self.trainer.strategy), batch_size=self.batch_size // replicas)


def read_texts(data: str | None) -> tuple[list[bytes], int]:
    """The text files, and the number of binary files that were skipped."""
    root = Path(data or sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root.read_bytes()], 0
    if not root.is_dir():
        raise ValueError(f"data: expected a file or a folder, got {data!r}, which does not exist")
    left_out = re.compile(r"(^|/)\." if data else r"(^|/)((site|dist)-packages|tests?|idle_test)/")
    files = [path for path in root.rglob("*" if data else "*.py") if path.is_file()]
    files = [path for path in files if not left_out.search(path.relative_to(root).as_posix())]
    contents = [path.read_bytes() for path in sorted(files, key=lambda path: path.relative_to(root).parts)]
    texts = [content for content in contents if b"\0" not in content[:8192]]  # git's rule
    if not texts:
        raise ValueError(f"data: expected text files, got none in {str(root)!r}, and {len(contents)} binary ones")
    return texts, len(contents) - len(texts)


def split(texts: list[bytes], separator: bytes) -> list[Tensor]:
    """[training, validation], uint8: every 20th text validates, or the last 20th of a single one."""
    every, cut = min(20, len(texts)), len(texts[0]) - len(texts[0]) // 20
    training = separator.join(text for number, text in enumerate(texts, start=1) if number % every)
    parts = (training, separator.join(texts[every - 1 :: every])) if every > 1 else (texts[0][:cut], texts[0][cut:])
    return [torch.from_numpy(np.frombuffer(bytearray(part), dtype=np.uint8)) for part in parts]


class ToyLM(L.LightningModule):
    """ByteLM, its loss and its optimiser. Logs train_bits and val_bits, in bits per byte.

    Args:
        decay: Decay of the attention: a forget gate per token and head (scalar), a fixed or learned rate per head
            (alibi, retnet), or none, which leaves the model without any position information.
        documents: Attention within a file only, by resets of the decay (with a scalar one) or by packed sequences;
            together: across files.
        layers: Transformer blocks.
        width: Channels of the residual stream.
        heads: Attention heads; they divide the width.
        learning_rate: Peak learning rate, after a linear warm-up over 5 % of the steps and before a cosine to a tenth.
        weight_decay: Weight decay of the matrices; norms, biases, the embedding and the decay have none.
        clip: Largest norm of the gradient.
        backend: Backend of decay_attention in training. auto: the fastest for the device, on a CPU the eager reference.
        compile: Compile the model with torch.compile.
    """

    def __init__(
        self, decay: DecayPreset = "scalar", documents: Literal["together", "resets", "packed"] = "together",
        layers: int = 8 if GPU else 4, width: int = 512 if GPU else 128, heads: int = 8 if GPU else 4,
        learning_rate: float = 1e-3 if GPU else 3e-3, weight_decay: float = 0.1, clip: float = 1.0,
        backend: BackendName = "auto", compile: bool = False,
    ):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.model = ByteLM(layers, width, heads, decay, documents, backend)
        if compile:
            self.model.compile()

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # a Sharded strategy's
            self.trainer.strategy.parallelize(self.model)

    def on_train_start(self) -> None:
        """Replace the optimiser's options, which a checkpoint brings, by those given with --resume."""
        self.started, schedule, rate = time.perf_counter(), self.lr_schedulers(), self.hparams.learning_rate
        schedule.base_lrs = [rate] * len(schedule.base_lrs)
        for group in schedule.optimizer.param_groups:
            group["lr"] = rate * learning_rate_factor(schedule.last_epoch, self.trainer.max_steps)
            group["weight_decay"] = self.hparams.weight_decay * group["matrices"]

    def training_step(self, batch: Tensor) -> Tensor:
        loss = next_byte_loss(self.model, batch)
        self.log("train_bits", loss.detach() / math.log(2), prog_bar=True, sync_dist=True)
        # x axis of the log, and seconds before this step
        self.log_dict({"step": self.trainer.global_step + 1.0, "seconds": time.perf_counter() - self.started})
        return loss

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        if not clip_gradients(self.parameters(), self.hparams.clip).isfinite():  # before the step: the weights are good
            step, rate = self.trainer.global_step + 1, self.hparams.learning_rate
            raise FloatingPointError(f"the gradient of step {step} is not finite: try a --learning_rate below {rate:g}")

    def configure_optimizers(self) -> dict[str, Any]:
        groups: dict[Any, dict[str, Any]] = {}  # a group has one mesh: torch updates no list of tensors on several
        for matrices, group in zip((True, False), parameter_groups(self.model, self.hparams.weight_decay), strict=True):
            for p in group["params"]:
                key = matrices, getattr(p, "device_mesh", None)
                groups.setdefault(key, {**group, "params": [], "matrices": matrices})["params"].append(p)
        # fused: by itself, torch updates the tensors of a sharded model one by one
        optimizer = torch.optim.AdamW(groups.values(), self.hparams.learning_rate, (0.9, 0.95), fused=GPU or None)
        schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, self.trainer.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def validation_step(self, batch: Tensor) -> None:
        values = {"val_bits": next_byte_loss(self.model, batch) / math.log(2), "step": float(self.trainer.global_step)}
        self.log_dict(values, sync_dist=True, batch_size=len(batch))

    def on_validation_end(self) -> None:
        if self.trainer.state.fn == "fit":
            bits = self.trainer.callback_metrics["val_bits"]
            self.print(f"step {self.trainer.global_step}: validation {bits:.3f} bits per byte")

    def on_train_end(self) -> None:
        self.trained = plain_copy(self.model)  # a sharded model leaves its devices when the fit ends


def train(
    model: ToyLM, texts: ByteData, folder: Path, first_step: int, steps: int = 2000 if GPU else 600,
    validate_every: int | None = None, gradient_check: int = 512 if GPU else 130,
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "64-true"] = "bf16-mixed" if GPU else "32-true",
    devices: int = 1, nodes: int = 1, strategy: Literal["ddp", "fsdp", "tensor", "context"] = "ddp",
    context_mode: Literal["halo", "heads"] = "halo",
) -> int:
    """Train from the first step, with everything in the folder. Return the exit status.

    Args:
        steps: Optimiser steps in total.
        validate_every: Steps between validations and checkpoints. By default a tenth of the steps.
        gradient_check: Bytes of each sequence in the check of all gradients before the first step and after the last; a
            violation ends the run. 0: no check.
        precision: Precision of the training, by Lightning's name. The decay stays in float32 in all of them.
        devices: GPUs, or processes on a CPU, of each machine.
        nodes: Machines; torchrun starts the script on each.
        strategy: Work that several devices share. ddp: the batch. fsdp: the batch, the parameters and the optimiser.
            tensor: heads and channels. context: the bytes of each sequence. tensor and context are within a machine.
        context_mode: Exchange of strategy context: the keys that matter under the decay (halo), or heads.
    """
    started, last = time.monotonic(), folder / "checkpoints" / "last.ckpt"
    rows, check = 2 if GPU else 1, texts.batch(first_step)[:, : gradient_check + 1]
    trainer = L.Trainer(
        accelerator="gpu" if GPU else "cpu", devices=devices, num_nodes=nodes, precision=precision,
        strategy="auto" if strategy == "ddp" else Sharded(strategy, devices, nodes, context_mode),
        max_steps=steps, val_check_interval=validate_every, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        callbacks=[
            *([GradientCheck(next_byte_loss, check, rows, folder, model.hparams.backend)] if gradient_check else []),
            AttentionStatistics(texts.validation[: 16384 if GPU else 512], folder, first_step),
            FinishStep(),
            # two, because save_last=True saves only where the validation loss is the best so far (Lightning 2.6)
            ModelCheckpoint(last.parent, "best", monitor="val_bits", enable_version_counter=False),
            ModelCheckpoint(last.parent, "last", enable_version_counter=False),
            ProgressBar(refresh_rate=10),
        ],
        logger=L.loggers.CSVLogger(folder, f"logs/from_step_{first_step}", version=""), default_root_dir=folder,
        log_every_n_steps=max(1, min(10, steps // 20)), enable_model_summary=False,
        use_distributed_sampler=False, inference_mode=False,  # ByteData shares; a sharded model trains after validation
    )
    parameters, say = sum(p.numel() for p in model.parameters()), L.utilities.rank_zero_only(print)
    say(f"run folder: {folder}\n{parameters:,} parameters; {len(texts.training):,} bytes to train, "
        f"{len(texts.validation):,} to validate, {texts.skipped} binary files skipped", flush=True)

    def how_to_resume() -> str:
        found = last.exists() and find_run(str(folder))[1]
        return f"continue from step {found} with --resume {folder}" if found else "there is no checkpoint yet"

    try:
        resume = last if first_step else None
        [before] = trainer.validate(model, texts, ckpt_path=resume, verbose=False)
        say(f"validation before training: {before['val_bits']:.3f} bits per byte", flush=True)
        trainer.fit(model, texts, ckpt_path=resume)
    except (GradientViolation, FloatingPointError) as error:
        say(f"\nerror: {error}; {how_to_resume()}", file=sys.stderr)
        return 1
    except SystemExit:  # Lightning's answer to a signal outside of a step
        pass
    if trainer.interrupted or trainer.global_step < steps:
        say(f"\ninterrupted after step {trainer.global_step}; {how_to_resume()}", file=sys.stderr)
        return 130
    if trainer.is_global_zero:
        after = float(trainer.callback_metrics["val_bits"])
        torch.save({"options": model.trained.options, "weights": model.trained.cpu().state_dict()}, folder / "model.pt")
        figures.draw(folder, f"{model.hparams.decay} decay, {steps} steps", texts.context)
        print(figures.write_sample(model.trained, texts.validation, folder, "cuda" if GPU else "cpu", texts.seed))
        summary = {
            "validation_bits_before": before["val_bits"], "validation_bits_after": after, "first_step": first_step,
            "steps": steps, "batch_size": texts.batch_size, "strategy": strategy, "devices": devices * nodes,
            "parameters": parameters, "seconds": round(time.monotonic() - started, 1), "lightning": L.__version__,
            **provenance("experiments/train_toy_lm.py", sys.argv[1:]),
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(f"{before['val_bits']:.3f} -> {after:.3f} bits per byte in {summary['seconds']:.0f} s; see {folder}")
    return 0


def make_parser(**settings: Any) -> ArgumentParser:
    """The parameters of ByteData, ToyLM and train are the options; --config reads them from a YAML file."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0], exit_on_error=False, **settings)
    parser.add_argument("--config", action="config", help="Read options from a YAML file.")
    now = RUNS / time.strftime("%Y-%m-%d_%H-%M-%S")
    parser.add_argument("--run", type=str, default=str(now), help="Folder of a new run.")
    parser.add_argument("--resume", type=str, help='Continue a run: its folder, or "last" for the newest below '
                        "runs/toy_lm. Options that are not given are those of that run.")
    parser.add_class_arguments(ByteData, skip={"documents"})  # ToyLM has it
    parser.add_class_arguments(ToyLM)
    parser.add_function_arguments(train, skip={"model", "texts", "folder", "first_step"})
    return parser


def read_options(argv: list[str] | None) -> Namespace:
    """The options given, over those of the run to resume, and first_step. ValueError if one cannot be used."""
    try:
        o, first_step = make_parser().parse_args(argv), 0
        if o.resume is not None:
            folder, first_step = find_run(o.resume)
            parser = make_parser(default_config_files=[folder / "config.yaml"])
            o, saved = parser.parse_args(argv), parser.get_defaults()
            o.resume = o.run = str(folder)
            for name in ("decay", "documents", "layers", "width", "heads", "strategy"):
                if o[name] != saved[name]:
                    raise ValueError(f"{name}: expected {saved[name]}, which the run to resume has, got {o[name]}")
    except ArgumentError as error:
        message = re.sub(r"""^Parser key "(\w+)"|<class '(\w+)'>|typing.Literal""", r"\1\2", str(error))
        raise ValueError(" ".join(message.split())) from None
    o.validate_every = max(1, o.steps // 10) if o.validate_every is None else o.validate_every
    for name, value in o.items():
        least = "at least" if name in ("seed", "weight_decay", "gradient_check") else "above"
        if type(value) in (int, float) and not (0 < value < math.inf or (least == "at least" and value == 0)):
            raise ValueError(f"{name}: expected a finite number {least} 0, got {value}")
    gpus, sharded = torch.cuda.device_count(), o.strategy != "ddp"
    within = {"tensor": ["heads", "channels of the SwiGLU"],
              "context": ["context", "heads"] if o.context_mode == "heads" else ["context"]}.get(o.strategy, [])
    multiples = [(name, o.get(name, mlp_width(o.width)), o.devices, "devices") for name in within]
    multiples.append(("batch_size", o.batch_size, o.nodes * (1 if within else o.devices), "devices"))
    for is_bad, message in (
        (o.steps <= first_step, f"steps: expected more than {first_step}, those of the run to resume, got {o.steps}"),
        (o.context < 2, f"context: expected at least 2, got {o.context}"),
        (o.documents == "resets" and o.decay != "scalar",
         f"documents: expected together or packed with decay {o.decay}, got resets"),
        (o.documents == "packed" and o.strategy == "context",
         "documents: expected together or resets with strategy context, got packed"),
        (GPU and o.devices > gpus, f"devices: expected at most {gpus}, the GPUs of this machine, got {o.devices}"),
        (sharded and o.devices * (1 if within else o.nodes) == 1,
         f"devices: expected at least 2 with strategy {o.strategy}, got 1"),
        (sharded and o.compile, f"compile: expected false with strategy {o.strategy}, got true"),
    ):
        if is_bad:
            raise ValueError(message)
    for name, value, divisor, of in (("width", o.width, o.heads, "heads"), *multiples):
        if value % divisor:
            raise ValueError(f"{name}: expected a multiple of the {of}, {divisor}, got {value}")
    if o.backend not in ("auto", "reference"):  # raises the reason why it cannot run
        dtype = {"32": torch.float32, "64": torch.float64}.get(o.precision[:2], torch.bfloat16)
        x = torch.zeros(1, 2, o.heads, o.width // o.heads, device="cuda" if GPU else "cpu", dtype=dtype)
        decay_attention(x, x, x, backend=o.backend)
    return Namespace(**o, first_step=first_step)


def find_run(resume: str) -> tuple[Path, int]:
    """(folder, step of its last checkpoint); resume is a folder or "last"."""
    last = Path(resume, "checkpoints", "last.ckpt")
    if resume == "last":
        last = max(RUNS.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime, default=last)
        sys.argv = [str(last.parents[1]) if word == "last" else word for word in sys.argv]  # for further processes
    if not last.exists():
        raise ValueError(f"resume: expected the folder of a run, or last, got {resume!r}; there is no {last}")
    try:  # a sharded model's checkpoint is a folder
        saved = torch.load(last / "meta.pt" if last.is_dir() else last, "cpu", weights_only=True, mmap=True)
        return last.parents[1], saved["global_step"]
    except Exception as error:  # a truncated file: RuntimeError, EOFError, UnpicklingError and more
        raise ValueError(f"resume: {last} is not a whole checkpoint: {str(error).splitlines()[0]}") from None


@L.utilities.rank_zero_only
def open_folder(options: Namespace) -> None:
    """Make the run's folder with its config.yaml."""
    folder, saved = Path(options.run), options.clone()
    saved.data = options.data and str(Path(options.data).resolve())  # a resume may start elsewhere
    del saved.first_step, saved.resume
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").touch(exist_ok=options.resume is not None)
        part = folder / "config.yaml.part"
        part.write_text(make_parser().dump(saved), encoding="utf-8")
        part.replace(folder / "config.yaml")  # at once: other processes may be reading it
    except OSError as error:
        reason = f"{error.strerror}; name another one, or continue a run with --resume {folder}"
        raise ValueError(f"run: expected a new folder, got {folder}: {reason}") from None


def main(argv: list[str] | None = None) -> int:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no announcements
    warnings.filterwarnings("ignore", ".*LeafSpec|.*many workers|You're resuming|Checkpoint dir|Detected an existing")
    try:
        options = read_options(argv)
        L.seed_everything(options.seed, verbose=False)
        named = [inspect.signature(takes).parameters for takes in (ByteData, ToyLM, train)]
        of_data, of_model, of_train = ({name: options[name] for name in names if name in options} for names in named)
        texts, model = ByteData(**of_data), ToyLM(**of_model)
        open_folder(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    status = train(model, texts, Path(options.run), **of_train)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # threads of gloo may abort the end of the interpreter
    return status


if __name__ == "__main__":
    sys.exit(main())
