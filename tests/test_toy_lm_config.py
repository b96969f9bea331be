"""The options of the training script: resolution of "auto", files, and an error for every wrong combination."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
from toy_lm.config import Config, find_checkpoint, load_config, make_parser, read_config, resolve, save_config


def test_every_option_has_help():
    help_text = make_parser().format_help()
    undocumented = [
        action.dest
        for action in make_parser()._actions
        if action.dest in {field.name for field in dataclasses.fields(Config)} and len(action.help or "") < 10
    ]
    assert not undocumented
    assert all(f"--{field.name}" in help_text for field in dataclasses.fields(Config))


def test_options_are_plain_python_values(monkeypatch):
    """Lightning takes no subclass of int for a number of GPUs, and no checkpoint may hold classes of jsonargparse."""
    given = {
        "devices": 2, "layers": 2, "steps": 3, "validation_crops": 4, "seed": 5, "sample_bytes": 6,
        "learning_rate": 1e-3, "weight_decay": 0.2, "clip": 0.5, "compile": "true", "run": "7",
    }  # fmt: skip
    config = read_config([f"--{name}={value}" for name, value in given.items()])
    assert {type(value) for value in dataclasses.asdict(config).values()} <= {bool, int, float, str, type(None)}
    assert (config.devices, config.learning_rate, config.compile, config.run) == (2, 1e-3, True, "7")

    from lightning.pytorch.accelerators import CUDAAccelerator

    parser = "lightning.fabric.utilities.device_parser"
    monkeypatch.setattr(f"{parser}._get_all_available_gpus", lambda **_: [0, 1])
    assert CUDAAccelerator.parse_devices(config.devices) == [0, 1]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_resolve_leaves_no_auto_in_what_shapes_the_run(on_gpu):
    config = dataclasses.asdict(resolve(Config(), on_gpu))
    # these three are resolved by Lightning, by decayattn and by the clock
    assert {name for name, value in config.items() if value == "auto"} == {"strategy", "backend", "run"}


def test_defaults_grow_on_a_gpu_and_given_values_stay():
    cpu, gpu = resolve(Config(layers=3), False), resolve(Config(layers=3), True)
    assert gpu.width > cpu.width
    assert gpu.context > cpu.context
    assert (cpu.precision, gpu.precision) == ("32-true", "bf16-mixed")
    assert cpu.layers == gpu.layers == 3


def test_automatic_batch_size_is_per_device():
    assert resolve(Config(devices=2), False).batch_size == 2 * resolve(Config(), False).batch_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 30, "heads": 4}, "heads: must divide the width; got 4 heads, width 30"),
        ({"batch_size": 3, "devices": 2}, "batch_size: must be a multiple of the devices; got 3 sequences, 2 devices"),
        ({"validation_crops": 5, "devices": 2}, "validation_crops: must be a multiple of the devices; got 5 crops"),
        ({"accelerator": "gpu"}, "accelerator: this machine has no CUDA device"),
    ],
)
def test_wrong_combinations_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        resolve(Config(**options), on_gpu=False)


@pytest.mark.parametrize(
    "arguments", [["--layers", "0"], ["--decay", "linear"], ["--learning_rate", "-1"], ["--wdith", "4"]]
)
def test_wrong_values_end_the_script_with_the_option_named(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        read_config(arguments)
    assert stop.value.code == 2
    assert arguments[0].removeprefix("--") in capsys.readouterr().err


def test_a_saved_configuration_reads_back(tmp_path):
    config = resolve(Config(decay="alibi-learned", learning_rate=1e-3, seed=7), on_gpu=False)
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    changed = read_config(["--config", str(tmp_path / "config.yaml"), "--seed", "8"])
    assert changed == dataclasses.replace(config, seed=8)


def test_resume_takes_the_runs_configuration_under_the_options_given(tmp_path):
    saved = resolve(Config(width=64, steps=10, run=str(tmp_path)), on_gpu=False)
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
