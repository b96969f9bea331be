"""The options of train_toy_lm.py: one typed dataclass, from the command line or a YAML file, resolved in one place."""

import argparse
import dataclasses
import math
import os
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, set_parsing_settings
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

set_parsing_settings(docstring_parse_attribute_docstrings=True)

# exit statuses
DONE, VIOLATION, WRONG_OPTION, ENVIRONMENT, NOT_FINITE, BUG, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 4, 5, 130, 143
STATUSES = """
Exit status: 0 done; 1 a gradient left its error budget; 2 a wrong option; 3 the machine: disk, memory, files, another
process of the run; 4 a loss or gradient is not finite; 5 an error of the program, with its traceback; 130 interrupted
and 143 terminated (SIGINT, SIGTERM): the line that says so tells how to resume.
"""

Auto = Literal["auto"]


class OptionError(ValueError):
    """An option that cannot be: its message names the option, what came and what was expected."""


@dataclass
class Config:
    """Train a byte-level language model whose only position information is the decay of its attention."""

    data: str | None = None
    """Text to train on: a file (its last 5 % validate) or a folder (every 20th file validates).
    By default the source files of the Python standard library found on this machine."""

    decay: Literal["scalar", "alibi", "alibi-learned", "retnet", "retnet-learned", "none"] = "scalar"
    """Decay of the attention: a forget gate per token and head (scalar), one fixed or learned rate per head (alibi,
    retnet), or none, which leaves the model without any position information."""
    documents: Literal["together", "resets", "packed"] = "together"
    """Whether a byte sees what stands in the files before its own: yes (together), or no, because the decay is reset at
    the first byte of a file (resets, with decay scalar), or because every file is a packed sequence (packed)."""
    layers: PositiveInt | Auto = "auto"
    """Transformer blocks. auto: 4 on a CPU, 8 on a GPU."""
    width: PositiveInt | Auto = "auto"
    """Channels of the residual stream. auto: 128 on a CPU, 512 on a GPU."""
    heads: PositiveInt | Auto = "auto"
    """Attention heads; they divide the width. auto: 4 on a CPU, 8 on a GPU."""
    context: PositiveInt | Auto = "auto"
    """Bytes that the model sees at once, at least 2. auto: 256 on a CPU, 2048 on a GPU."""

    batch_size: PositiveInt | Auto = "auto"
    """Sequences per step, over all devices together, not per process: each takes its equal share, and any number of
    devices trains on the same sequences. auto: 8 per process on a CPU, 16 per GPU."""
    steps: PositiveInt | Auto = "auto"
    """Optimiser steps in total. auto: 600 on a CPU, 2000 on a GPU."""
    learning_rate: PositiveFloat | Auto = "auto"
    """Peak learning rate, after a linear warm-up over 5 % of the steps and before a cosine to a tenth of it.
    auto: 3e-3 on a CPU, 1e-3 on a GPU, whose model is wider."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of the matrices; norms, biases, embeddings and decay parameters have none."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the gradient; 0 never clips."""
    seed: NonNegativeInt = 0
    """Seed of the weights, of the training crops and of the text sample."""

    validate_every: PositiveInt | Auto = "auto"
    """Steps between validations (and checkpoints). auto: a tenth of the steps."""
    validation_crops: PositiveInt = 64
    """Fixed crops of the validation text, each of one context."""
    gradient_check: bool = True
    """Before the first step and after the last, compare every parameter's gradient through the kernels with the float64
    reference; a violation of the error budget stops the run with exit status 1."""
    check_rows: PositiveInt | Auto = "auto"
    """Sequences of the gradient check. auto: 1 on a CPU, 2 on a GPU."""
    check_context: PositiveInt | Auto = "auto"
    """Bytes per sequence of the gradient check, at most the context. auto: 130 on a CPU, where the kernels are
    interpreted, 512 on a GPU."""
    statistics_context: PositiveInt | Auto = "auto"
    """Bytes of validation text on which half-lives and visited tiles are logged over training; as many as there are, at
    most. auto: 512 on a CPU, where the plan of visited tiles is interpreted, 16384 on a GPU."""
    sample_bytes: NonNegativeInt = 400
    """Bytes of text that the trained model writes at the end."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train. auto: a GPU where there is one."""
    devices: PositiveInt = 1
    """Number of GPUs, or of processes on a CPU, of each machine; the script starts a process for each."""
    nodes: PositiveInt = 1
    """Number of machines, on each of which torchrun starts the script."""
    strategy: Literal["auto", "ddp", "fsdp", "tensor", "context"] = "auto"
    """What several devices share. ddp: the batch. fsdp: the batch, and the parameters with their optimiser (FSDP2).
    tensor: the heads and the channels of the SwiGLU. context: the bytes of every sequence, and parameters as fsdp.
    tensor and context are within a machine, and several machines share the batch. auto: ddp for several devices."""
    context_mode: Literal["halo", "heads"] = "halo"
    """What strategy context sends: of the keys before a device's bytes those that matter under the decay (halo), or
    whole sequences of some heads (heads; the devices divide the heads)."""
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "auto"
    """Lightning's precision. auto: 32-true on a CPU, bf16-mixed on a GPU. The decay stays in float32 in all of them.
    16-mixed is for GPUs."""
    backend: str = "auto"
    """Backend of decay_attention while training. auto: the fastest for the device; on a CPU, the eager reference."""
    compile: bool = False
    """Compile the model with torch.compile."""

    run: str = "auto"
    """Folder of the run; one that already holds a run is refused. auto: runs/toy_lm/DATE-TIME."""
    resume: str | None = None
    """Continue a run: its folder, one of its checkpoints, or "last" for the newest below runs/toy_lm. Its configuration
    is taken over; options given here go before it, but for those of the model."""


# what "auto" means for the model and its training
CPU_DEFAULTS = {
    "layers": 4, "width": 128, "heads": 4, "context": 256, "batch_size": 8, "steps": 600, "learning_rate": 3e-3,
    "check_rows": 1, "check_context": 130, "statistics_context": 512, "precision": "32-true",
}
GPU_DEFAULTS = {
    "layers": 8, "width": 512, "heads": 8, "context": 2048, "batch_size": 16, "steps": 2000, "learning_rate": 1e-3,
    "check_rows": 2, "check_context": 512, "statistics_context": 16384, "precision": "bf16-mixed",
}

RUNS = Path("runs/toy_lm")
# strategies whose devices each hold a part of the model
SHARDED = ("fsdp", "tensor", "context")
MODEL_OPTIONS = ("decay", "documents", "layers", "width", "heads")
# the checkpoint that --resume last found, for the processes that this one starts
LAST_FOUND = "TOY_LM_LAST_FOUND"


def make_parser() -> ArgumentParser:
    """The command line: every field of Config is an option, and --config reads them from a YAML file."""
    parser = ArgumentParser(description=Config.__doc__, epilog=STATUSES, exit_on_error=False)
    parser.add_argument("--config", action="config", help="Read options from a YAML file.")
    parser.add_class_arguments(Config)
    return parser


def read_config(arguments: list[str] | None = None) -> Config:
    """The configuration that the command line asks for; with --resume, the run's own under the options given."""
    options = _parse(make_parser(), arguments)
    if options["resume"] is None:
        return Config(**options)
    folder, checkpoint = find_checkpoint(options["resume"])
    saved = load_config(folder)
    parser = make_parser()
    parser.set_defaults(dataclasses.asdict(saved))
    config = Config(**{**_parse(parser, arguments), "run": str(folder), "resume": str(checkpoint)})
    for name in MODEL_OPTIONS:
        if getattr(config, name) != getattr(saved, name):
            raise OptionError(f"{name}: the run to resume has {getattr(saved, name)}, got {getattr(config, name)}")
    return config


def resolve(config: Config, gpus: int) -> Config:
    """The configuration with every "auto" of model, training and precision replaced by what it means here.

    `gpus`: how many this machine has; 0 where they are not to be used.
    """
    if config.accelerator == "gpu" and not gpus:
        raise OptionError("accelerator: this machine has no CUDA device; expected auto or cpu, got gpu")
    if 0 < gpus < config.devices:
        raise OptionError(
            f"devices: expected at most {gpus}, the GPUs of this machine, or --accelerator cpu, got {config.devices}"
        )
    defaults = dict(GPU_DEFAULTS if gpus else CPU_DEFAULTS)
    defaults["batch_size"] *= config.devices * config.nodes
    auto = {name: value for name, value in defaults.items() if getattr(config, name) == "auto"}
    config = dataclasses.replace(config, **auto, accelerator="gpu" if gpus else "cpu")
    if config.validate_every == "auto":
        config = dataclasses.replace(config, validate_every=max(1, config.steps // 10))
    if config.precision == "16-mixed" and not gpus:
        raise OptionError("precision: 16-mixed is for GPUs; expected bf16-mixed or a -true one on a CPU, got 16-mixed")
    for name in ("learning_rate", "weight_decay"):
        if not math.isfinite(getattr(config, name)):
            raise OptionError(f"{name}: expected a finite number, got {getattr(config, name)}")
    if config.documents == "resets" and config.decay != "scalar":
        raise OptionError(f"documents: resets are for decay scalar, got decay {config.decay}; packed is for all")
    if config.context < 2:
        # between one byte and itself there is no decay
        raise OptionError(f"context: expected at least 2, got {config.context}")
    config = dataclasses.replace(config, check_context=min(config.check_context, config.context))
    if config.strategy in SHARDED:
        _check_sharded(config)
    shares = data_shares(config)
    if config.strategy in SHARDED:
        # the check is divided as a batch is
        rows, parts = -(-config.check_rows // shares) * shares, context_shares(config)
        config = dataclasses.replace(
            config, check_rows=rows, check_context=max(1, config.check_context // parts) * parts
        )
    if config.width % config.heads:
        raise OptionError(f"heads: must divide the width; got {config.heads} heads, width {config.width}")
    if config.width // config.heads > 256:
        raise OptionError(
            f"heads: a head has at most 256 channels of the width; got {config.heads} heads, width {config.width}"
        )
    if config.batch_size % shares:
        raise OptionError(
            f"batch_size: must be a multiple of the devices; got {config.batch_size} sequences, "
            f"{shares} devices"
        )
    if config.validation_crops % shares:
        raise OptionError(
            f"validation_crops: must be a multiple of the devices; got {config.validation_crops} crops, "
            f"{shares} devices"
        )
    return config


def data_shares(config: Config) -> int:
    """Into how many parts the sequences of a batch are divided."""
    return config.nodes * (1 if config.strategy in ("tensor", "context") else config.devices)


def context_shares(config: Config) -> int:
    """Into how many parts the bytes of a sequence are divided."""
    return config.devices if config.strategy == "context" else 1


def _check_sharded(config: Config) -> None:
    """Refuse what several devices cannot share."""
    from language_models.model import mlp_width  # not at the top: --help needs no model

    strategy, devices = config.strategy, config.devices
    if devices * config.nodes == 1 or (strategy in ("tensor", "context") and devices == 1):
        raise OptionError(f"devices: strategy {strategy} expects at least 2, got {devices}")
    if config.compile:
        raise OptionError(f"compile: expected false with strategy {strategy}, got true")
    if config.precision == "16-mixed":
        raise OptionError(f"precision: expected another one with strategy {strategy}, got 16-mixed")
    if strategy == "tensor" and (config.heads % devices or mlp_width(config.width) % devices):
        raise OptionError(
            f"devices: strategy tensor expects a divisor of the {config.heads} heads and of the "
            f"{mlp_width(config.width)} channels of the SwiGLU, got {devices}"
        )
    if strategy == "context":
        if config.context % devices:
            raise OptionError(
                f"context: strategy context expects a multiple of the {devices} devices, got {config.context}"
            )
        if config.context_mode == "heads" and config.heads % devices:
            raise OptionError(
                f"devices: context_mode heads expects a divisor of the {config.heads} heads, got {devices}"
            )
        if config.documents == "packed":
            raise OptionError("documents: expected together or resets with strategy context, got packed")


def find_checkpoint(resume: str) -> tuple[Path, Path]:
    """(run folder, checkpoint) of --resume: "last", a run folder or a checkpoint file."""
    if resume == "last" and LAST_FOUND in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        # this process starts after the first one; another run may have written a newer checkpoint since
        checkpoint = Path(os.environ[LAST_FOUND])
    elif resume == "last":
        checkpoints = sorted(RUNS.glob("*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
        if not checkpoints:
            raise OptionError(f"resume: there is no run with a checkpoint below {RUNS.resolve()}")
        checkpoint = checkpoints[-1]
        os.environ[LAST_FOUND] = str(checkpoint)
    else:
        path = Path(resume)
        checkpoint = path / "checkpoints" / "last.ckpt" if path.is_dir() else path
        if not checkpoint.is_file():
            raise OptionError(f"resume: expected a run folder or a checkpoint, got {resume!r}; {checkpoint} is missing")
    return checkpoint.parent.parent, checkpoint


def save_config(config: Config, folder: Path, *, new: bool = False) -> None:
    """Write config.yaml, which --config and --resume read. If it has to be new: FileExistsError where there is one."""
    text = yaml_of(config)
    with (folder / "config.yaml").open("x" if new else "w", encoding="utf-8") as file:
        file.write(text)


def yaml_of(config: Config) -> str:
    """What --config reads."""
    parser = make_parser()
    return parser.dump(parser.parse_object(dataclasses.asdict(config)))


def load_config(folder: Path) -> Config:
    """The configuration of a run folder."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise OptionError(f"resume: {folder} is not a run folder, it has no config.yaml")
    return Config(**_parse(make_parser(), ["--config", str(path)]))


def _parse(parser: ArgumentParser, arguments: list[str] | None) -> dict:
    try:
        options = parser.parse_args(arguments).as_dict()
    except argparse.ArgumentError as error:
        raise OptionError(_in_one_line(str(error))) from None
    options.pop("config")
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    """Without jsonargparse's number types, which Lightning takes for no int, and which no checkpoint may hold."""
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return value if kind is None else kind(value)


def _in_one_line(message: str) -> str:
    """jsonargparse's message as "option: expected …, got …"; as it is, in one line, where it is of another form."""
    name = re.match(r'Parser key "(\w+)"', message)
    hint = typing.get_type_hints(Config).get(name and name[1])
    got = re.search(r"(?:Given value: |Got value: |Not of type \w+: )(\S*)(?: does not conform.*)?$", message)
    if hint is None or got is None:
        return " ".join(message.split())
    return f"{name[1]}: expected {_in_words(hint)}, got {got[1]}"


def _in_words(hint: Any) -> str:
    """What an option takes."""
    words = {
        bool: "true or false", str: "a text", PositiveInt: "an integer of at least 1",
        NonNegativeInt: "an integer of at least 0", PositiveFloat: "a number above 0",
        NonNegativeFloat: "a number of at least 0",
    }
    if hint in words:
        return words[hint]
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
    return " or ".join(_in_words(choice) for choice in choices if choice is not type(None))
