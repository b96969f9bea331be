"""The options of the training script: resolution of "auto", files, and an error for every wrong combination."""

import dataclasses
import os
from pathlib import Path

import pytest
import train_toy_lm
from toy_lm.config import (
    STATUSES,
    Config,
    OptionError,
    find_checkpoint,
    load_config,
    make_parser,
    read_config,
    resolve,
    save_config,
)


def test_every_option_has_help():
    help_text = make_parser().format_help()
    undocumented = [
        action.dest
        for action in make_parser()._actions
        if action.dest in {field.name for field in dataclasses.fields(Config)} and len(action.help or "") < 10
    ]
    assert not undocumented
    assert all(f"--{field.name}" in help_text for field in dataclasses.fields(Config))


def test_help_and_the_script_document_the_same_exit_statuses():
    statuses = " ".join(STATUSES.split())
    assert statuses.startswith("Exit status: 0 done;")
    assert statuses in " ".join(make_parser().format_help().split())
    assert statuses in " ".join(train_toy_lm.__doc__.split())


def test_options_are_plain_python_values(monkeypatch):
    """Lightning takes no subclass of int for a number of GPUs, and no checkpoint may hold classes of jsonargparse."""
    given = {
        "devices": 2, "layers": 2, "steps": 3, "validation_crops": 4, "seed": 5, "sample_bytes": 6,
        "learning_rate": 1e-3, "weight_decay": 0.2, "clip": 0.5, "compile": "true", "run": "7",
    }
    config = read_config([f"--{name}={value}" for name, value in given.items()])
    assert {type(value) for value in dataclasses.asdict(config).values()} <= {bool, int, float, str, type(None)}
    assert (config.devices, config.learning_rate, config.compile, config.run) == (2, 1e-3, True, "7")

    from lightning.pytorch.accelerators import CUDAAccelerator

    parser = "lightning.fabric.utilities.device_parser"
    monkeypatch.setattr(f"{parser}._get_all_available_gpus", lambda **_: [0, 1])
    assert CUDAAccelerator.parse_devices(config.devices) == [0, 1]


@pytest.mark.parametrize("gpus", [0, 1])
def test_resolve_leaves_no_auto_in_what_shapes_the_run(gpus):
    config = dataclasses.asdict(resolve(Config(), gpus))
    # these three are resolved by Lightning, by decayattn and by the clock
    assert {name for name, value in config.items() if value == "auto"} == {"strategy", "backend", "run"}


def test_defaults_grow_on_a_gpu_and_given_values_stay():
    cpu, gpu = resolve(Config(layers=3), 0), resolve(Config(layers=3), 1)
    assert gpu.width > cpu.width
    assert gpu.context > cpu.context
    assert (cpu.precision, gpu.precision) == ("32-true", "bf16-mixed")
    assert cpu.layers == gpu.layers == 3


def test_automatic_batch_size_is_per_device():
    assert resolve(Config(devices=2), 0).batch_size == 2 * resolve(Config(), 0).batch_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 30, "heads": 4}, "heads: must divide the width; got 4 heads, width 30"),
        ({"batch_size": 3, "devices": 2}, "batch_size: must be a multiple of the devices; got 3 sequences, 2 devices"),
        ({"validation_crops": 5, "devices": 2}, "validation_crops: must be a multiple of the devices; got 5 crops"),
        ({"accelerator": "gpu"}, "accelerator: this machine has no CUDA device"),
        ({"context": 1}, "context: expected at least 2, got 1"),
        ({"width": 512, "heads": 1}, "heads: a head has at most 256 channels of the width; got 1 heads, width 512"),
        ({"precision": "16-mixed"}, "precision: 16-mixed is for GPUs"),
        ({"learning_rate": float("inf")}, "learning_rate: expected a finite number, got inf"),
    ],
)
def test_wrong_combinations_are_refused_by_name(options, message):
    with pytest.raises(OptionError, match=message):
        resolve(Config(**options), gpus=0)


def test_more_devices_than_gpus_are_refused_and_any_number_of_processes_is_not():
    assert resolve(Config(devices=2), gpus=2).devices == resolve(Config(devices=2), gpus=0).devices == 2
    with pytest.raises(OptionError, match=r"devices: expected at most 1, the GPUs of this machine, or .*, got 2"):
        resolve(Config(devices=2), gpus=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "layers: expected an integer of at least 1 or auto, got 0"),
        (["--devices", "0"], "devices: expected an integer of at least 1, got 0"),
        (["--decay", "linear"], "decay: expected scalar, .* or none, got linear"),
        (["--learning_rate", "-1"], "learning_rate: expected a number above 0 or auto, got -1"),
        (["--compile", "perhaps"], "compile: expected true or false, got perhaps"),
        (["--precision", "fp8"], "precision: expected auto, .*, got fp8"),
        (["--strategy", "zero"], "strategy: expected auto, ddp, fsdp, tensor or context, got zero"),
        (["--wdith", "4"], "wdith"),
        (["--steps"], "steps"),
        (["--config", "nowhere.yaml"], "config.*nowhere.yaml"),
    ],
)
def test_wrong_values_are_refused_in_one_line_that_names_the_option(arguments, message):
    with pytest.raises(OptionError, match=f"^.*{message}.*$") as refused:
        read_config(arguments)
    assert "\n" not in str(refused.value)


def test_a_saved_configuration_reads_back(tmp_path):
    config = resolve(Config(decay="alibi-learned", learning_rate=1e-3, seed=7), gpus=0)
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    changed = read_config(["--config", str(tmp_path / "config.yaml"), "--seed", "8"])
    assert changed == dataclasses.replace(config, seed=8)


def test_resume_takes_the_runs_configuration_under_the_options_given(tmp_path):
    saved = resolve(Config(width=64, steps=10, run=str(tmp_path)), gpus=0)
    save_config(saved, tmp_path)
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    config = read_config(["--resume", str(tmp_path), "--steps", "20"])
    assert config == dataclasses.replace(saved, steps=20, resume=str(checkpoint))
    with pytest.raises(ValueError, match="width: the run to resume has 64, got 128"):
        read_config(["--resume", str(tmp_path), "--width", "128"])


def test_resume_without_a_checkpoint_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="resume: there is no run with a checkpoint below"):
        find_checkpoint("last")
    with pytest.raises(ValueError, match=r"resume: expected a run folder or a checkpoint, got 'nowhere'"):
        find_checkpoint("nowhere")
    (tmp_path / "a.ckpt").touch()
    with pytest.raises(ValueError, match="is not a run folder, it has no config"):
        read_config(["--resume", "a.ckpt"])


def test_last_is_the_run_with_the_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("b", "a")):
        checkpoint = Path("runs/toy_lm", name, "checkpoints", "last.ckpt")
        checkpoint.parent.mkdir(parents=True)
        checkpoint.touch()
        os.utime(checkpoint, (number, number))
    assert find_checkpoint("last")[0] == Path("runs/toy_lm/a")


def test_every_process_of_a_run_resumes_the_checkpoint_that_the_first_one_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("TOY_LM_LAST_FOUND", "set here, so that the test's end takes it away")

    def write(name: str, time: int) -> Path:
        checkpoint = Path("runs/toy_lm", name, "checkpoints", "last.ckpt")
        checkpoint.parent.mkdir(parents=True)
        checkpoint.touch()
        os.utime(checkpoint, (time, time))
        return checkpoint

    found = write("a", 1)
    assert find_checkpoint("last")[1] == found
    newer = write("b", 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_checkpoint("last")[1] == found
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert find_checkpoint("last")[1] == newer
