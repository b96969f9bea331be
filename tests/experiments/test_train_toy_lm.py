"""The training script end to end: artefacts, learning, the gradient check, interruption and resume, two processes."""

import copy
import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import toy_lm.config
import train_toy_lm
import yaml
from language_models.model import next_byte_loss
from language_models.optimisation import parameter_groups
from toy_lm.config import SHARDED, Config, OptionError, load_config, resolve
from toy_lm.run import _open_folder
from toy_lm.statistics import read
from toy_lm.training import TrainByteLM

from decayattn import functional

TINY = [
    "--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch_size", "8", "--validation_crops", "8",
    "--sample_bytes", "10", "--precision", "32-true", "--backend", "reference",
]
SECONDS = 300  # after which a process hangs
UNCHECKED = [*TINY, "--gradient_check", "false", "--accelerator", "cpu"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A few kilobytes in which every byte follows from the two before it."""
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(b"abracadabra, " * 800)
    return str(path)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*arguments: str) -> int:
    return train_toy_lm.main(list(arguments))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-u", train_toy_lm.__file__, *arguments]


def one_line(message: str) -> str:
    assert message.count("\n") == 1, message
    return message


def checkpoint(folder: Path | str) -> dict:
    return torch.load(Path(folder) / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)


def test_a_run_learns_and_leaves_everything_behind(text, capsys):
    assert train(*TINY, "--data", text, "--steps", "20", "--run", "run") == 0
    printed = capsys.readouterr().out
    folder = Path("run")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "config.yaml", "summary.json", "sample.txt", "loss.png",
        "decay.png", "half_lives.json", "attention.json", "half_lives.png", "visited.png",
        "checkpoints/best.ckpt", "checkpoints/last.ckpt", "logs/from_step_0/metrics.csv",
        "gradients/step-0.txt", "gradients/step-0.json", "gradients/step-20.txt", "gradients/step-20.json",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_bits_before"] == pytest.approx(8, abs=0.1)
    assert summary["validation_bits_after"] < summary["validation_bits_before"] - 1
    assert f"validation before training: {summary['validation_bits_before']:.3f} bits per byte" in printed
    assert f"validation after 20 steps: {summary['validation_bits_after']:.3f} bits per byte" in printed
    for name in ("loss.png", "decay.png", "half_lives.png", "visited.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((folder / "config.yaml").read_text())["steps"] == 20

    module = TrainByteLM(load_config(folder))
    trainable = {name for name, p in module.model.named_parameters() if p.requires_grad}
    for step in (0, 20):
        rows = json.loads((folder / "gradients" / f"step-{step}.json").read_text())
        assert {row["parameter"] for row in rows} == trainable
        assert {row["parameter"] for row in rows if row["is_decay"]} == {n for n in trainable if ".decay." in n}
        assert all(row["verdict"] == "ok" and row["error"] <= row["budget"] for row in rows)
        assert (folder / "gradients" / f"step-{step}.txt").read_text(encoding="utf-8") in printed


@pytest.mark.parametrize("decay", ["alibi", "alibi-learned", "retnet", "retnet-learned", "none"])
def test_every_decay_trains(decay, text):
    """Runs with a decay draw it, all of one text, and only learned decays have moved."""
    assert train(*UNCHECKED, "--data", text, "--steps", "3", "--run", "run", "--decay", decay) == 0
    left = [Path("run", name) for name in ("half_lives.json", "attention.json", "decay.png", "half_lives.png")]
    assert [path.exists() for path in left] == [decay != "none"] * 4
    if decay != "none":
        table, log = (json.loads(path.read_text()) for path in left[:2])
        start, now = ([layer["half_lives"] for layer in row["layers"]] for row in (log["rows"][0], log["rows"][-1]))
        assert (start != now) == decay.endswith("learned")
        assert [[head["mean"] for head in layer] for layer in table["layers"]] == now
        assert (table["unit"], table["tokens"], table["step"]) == ("tokens", log["bytes"], 3)


@pytest.mark.parametrize("documents", ["resets", "packed"])
def test_documents_apart_train_and_pass_the_gradient_check(documents, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}").write_text(f"file {number}, " * 2)
    arguments = ["--data", str(folder), "--documents", documents, "--steps", "2", "--run", "run", "--heads", "1"]
    assert train(*TINY, *arguments) == 0
    rows = json.loads(Path("run/gradients/step-2.json").read_text())
    assert all(row["verdict"] == "ok" for row in rows)
    assert 0 in TrainByteLM(load_config(Path("run"))).training_text


class ScaledGradient(torch.autograd.Function):
    """The identity, with a gradient that is 0.1 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001


@pytest.fixture
def wrong_decay_gradient(monkeypatch):
    """Kernels whose gradient of the log-decay is 0.1 % too large."""
    kernels = functional.autograd.attention

    def attention(problem, inputs, *rest):
        return kernels(problem, inputs._replace(log_decay=ScaledGradient.apply(inputs.log_decay)), *rest)

    monkeypatch.setattr(functional.autograd, "attention", attention)


@pytest.mark.usefixtures("wrong_decay_gradient")
def test_a_wrong_decay_gradient_stops_the_run_with_status_1(text, capsys):
    assert train(*TINY, "--data", text, "--steps", "5", "--run", "run") == 1
    printed = capsys.readouterr().out
    assert "stopped: gradients outside the error budget at step 0" in printed
    rows = json.loads(Path("run/gradients/step-0.json").read_text())
    assert {row["parameter"] for row in rows if row["verdict"] == "wrong"} == {
        "blocks.0.attention.decay.weight", "blocks.0.attention.decay.bias",
    }
    assert not Path("run/checkpoints").exists()


def test_a_violation_after_the_last_step_keeps_the_checkpoint(text, monkeypatch, request):
    step = TrainByteLM.training_step

    def break_the_kernels_then_step(module, batch):
        if module.trainer.global_step == 3:
            request.getfixturevalue("wrong_decay_gradient")
        return step(module, batch)

    monkeypatch.setattr(TrainByteLM, "training_step", break_the_kernels_then_step)
    assert train(*TINY, "--data", text, "--steps", "5", "--run", "run") == 1
    assert checkpoint("run")["global_step"] == 5


def test_an_interrupted_run_resumes_where_it_stopped(text, monkeypatch, capsys):
    """Ctrl-C during step 5, then --resume: the same weights, bit by bit, as without an interruption."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background starts with it ignored
    options = [*UNCHECKED, "--data", text, "--steps", "12", "--validate_every", "4"]
    assert train(*options, "--run", "whole") == 0

    step = TrainByteLM.training_step

    def step_and_interrupt(module, batch):
        if module.trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(module, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainByteLM, "training_step", step_and_interrupt)
        assert train(*options) == 130
    folder = next(Path("runs/toy_lm").iterdir())
    assert f"interrupted after step 6\ncontinue with --resume {folder}" in capsys.readouterr().out
    assert checkpoint(folder)["global_step"] == 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert train("--resume", "last") == 0
    whole, resumed = checkpoint("whole"), checkpoint(folder)
    assert whole["global_step"] == resumed["global_step"] == 12
    assert all(torch.equal(whole["state_dict"][name], resumed["state_dict"][name]) for name in whole["state_dict"])
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["from_step_0", "from_step_6"]
    of_whole, of_resumed = ({row["step"]: row["layers"] for row in read(path)} for path in (Path("whole"), folder))
    assert list(of_whole) == [0, 4, 8, 12]
    assert [step for step in of_resumed if step in (0, 4, 6, 12)] == [0, 4, 6, 12]
    assert all(of_resumed[step] == of_whole[step] for step in of_resumed.keys() & of_whole.keys())

    assert train("--resume", str(folder)) == 2
    assert "steps: expected more than the 12 of the run to resume, got 12" in capsys.readouterr().err


def test_the_last_checkpoint_is_of_the_last_step(text, monkeypatch, capsys):
    """Also where no later validation was better than the first, and after Ctrl-C."""
    def log_a_rising_loss(module, batch):
        module.log("val_bits", 1.0 + module.trainer.global_step, on_epoch=True, batch_size=len(batch))

    step = TrainByteLM.training_step

    def step_and_interrupt(module, batch):
        if module.trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return step(module, batch)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(TrainByteLM, "validation_step", log_a_rising_loss)
    options = [*UNCHECKED, "--data", text, "--validate_every", "4", "--run", "run", "--steps", "14"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainByteLM, "training_step", step_and_interrupt)
        assert train(*options) == 130
    assert "interrupted after step 10\ncontinue with --resume run" in capsys.readouterr().out
    assert checkpoint("run")["global_step"] == 10
    assert train("--resume", "run") == 0
    assert checkpoint("run")["global_step"] == 14
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert torch.load("run/checkpoints/best.ckpt", map_location="cpu", weights_only=True)["global_step"] == 4


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_16_bits_train_on_a_cpu(precision, text):
    """The visited tiles are planned in the interpreter, which has no bfloat16: of a float32 copy."""
    options = ["--data", text, "--steps", "2", "--run", "run", "--precision", precision, "--backend", "auto"]
    assert train(*UNCHECKED, *options) == 0
    assert all(0 < fraction <= 1 for layer in read(Path("run"))[-1]["layers"] for fraction in layer["visited"])


def test_options_given_with_resume_go_before_those_of_the_run(text, capsys):
    """And what is no checkpoint of this model is refused."""
    options = ["--decay", "none", "--sample_bytes", "0", "--steps", "2", "--learning_rate", "1e-3", "--run", "run"]
    assert train(*UNCHECKED, "--data", text, *options) == 0
    assert train("--resume", "run", "--steps", "4", "--learning_rate", "1e-4", "--weight_decay", "0.3") == 0
    [optimizer], [schedule] = (checkpoint("run")[name] for name in ("optimizer_states", "lr_schedulers"))
    assert [group["initial_lr"] for group in optimizer["param_groups"]] == schedule["base_lrs"] == [1e-4, 1e-4]
    assert max(group["lr"] for group in optimizer["param_groups"]) <= 1e-4
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.3, 0.0]

    last, config = Path("run/checkpoints/last.ckpt"), Path("run/config.yaml")
    capsys.readouterr()
    config.write_text(config.read_text().replace("layers: 1", "layers: 2"))
    assert train("--resume", "run", "--steps", "6") == 2
    assert "is of another model: model.blocks.1" in one_line(capsys.readouterr().err)
    with last.open("r+b") as file:
        file.truncate(10_000)
    assert train("--resume", "run", "--steps", "6") == 2
    assert "error: resume: run/checkpoints/last.ckpt is not a checkpoint, or only" in one_line(capsys.readouterr().err)


@pytest.mark.slow
def test_ctrl_c_in_a_process_ends_it_cleanly(text):
    arguments = [*UNCHECKED, "--data", text, "--steps", "1000000", "--validate_every", "5", "--run", "run"]
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = threading.Timer(SECONDS, process.kill)
    deadline.start()
    for line in process.stdout:
        if "step 5: validation" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 130
    deadline.cancel()
    assert "Traceback" not in rest
    assert f"interrupted after step {checkpoint('run')['global_step']}\n" in rest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "error: data: expected a file or a folder, got 'nowhere', which does not exist"),
        (["--resume", "nowhere"], "error: resume: expected a run folder or a checkpoint, got 'nowhere'"),
        (["--heads", "3"], "error: heads: must divide the width; got 3 heads, width 32"),
        (["--documents", "resets", "--decay", "none"], "error: documents: resets are for decay scalar, got decay none"),
        (["--backend", "cudnn"], "error: backend: expected one of auto, reference, triton, hopper, got 'cudnn'"),
        (["--backend", "hopper"], "error: backend: 'hopper' cannot take"),
        (["--precision", "8"], "error: precision: expected auto, 32-true,"),
        (["--strategy", "zero"], "error: strategy: expected auto, ddp, fsdp, tensor or context, got zero"),
        (["--strategy", "fsdp"], "error: devices: strategy fsdp expects at least 2, got 1"),
        (["--strategy", "tensor", "--nodes", "2"], "error: devices: strategy tensor expects at least 2, got 1"),
        (
            ["--strategy", "tensor", "--devices", "4"],
            "error: devices: strategy tensor expects a divisor of the 2 heads and of the 96 channels of the SwiGLU",
        ),
        (
            ["--strategy", "context", "--devices", "3"],
            "error: context: strategy context expects a multiple of the 3 devices, got 32",
        ),
        (
            ["--strategy", "context", "--devices", "4", "--context_mode", "heads"],
            "error: devices: context_mode heads expects a divisor of the 2 heads, got 4",
        ),
        (
            ["--strategy", "context", "--devices", "2", "--documents", "packed"],
            "error: documents: expected together or resets with strategy context, got packed",
        ),
        (
            ["--strategy", "fsdp", "--devices", "2", "--compile", "true"],
            "error: compile: expected false with strategy fsdp, got true",
        ),
        (
            ["--strategy", "fsdp", "--devices", "3"],
            "error: batch_size: must be a multiple of the devices; got 8 sequences, 3 devices",
        ),
        (["--context", "1"], "error: context: expected at least 2, got 1"),
        (["--context", "1000"], "has 520 bytes, expected at least 1001 for a context of 1000"),
        (["--run", "file"], "error: run: expected a folder, got file, which is a file"),
        (["--run", "file/run"], "error: run: file/run cannot be written to: Not a directory"),
        (["--run", "full"], "error: run: full already holds a run; name another folder, or use --resume full"),
    ],
)
def test_wrong_options_end_the_script_with_one_line_and_status_2(arguments, message, text, capsys):
    Path("file").touch()
    Path("full").mkdir()
    Path("full/config.yaml").touch()
    assert train(*UNCHECKED, "--data", text, *arguments) == 2
    assert message in one_line(capsys.readouterr().err)


def test_of_runs_that_start_at_once_each_has_a_folder_of_its_own(monkeypatch):
    """Those that name the same one are refused, but for one; a folder without a run is nobody's."""
    Path("run").mkdir()
    # runs are processes, and jsonargparse's parsers are not for threads: only the files are written at once
    lock, yaml_of = threading.Lock(), toy_lm.config.yaml_of

    def one_at_a_time(of: Config) -> str:
        with lock:
            return yaml_of(of)

    monkeypatch.setattr(toy_lm.config, "yaml_of", one_at_a_time)

    def start(folder: str) -> Path | None:
        try:
            return _open_folder(resolve(Config(run=folder), gpus=0))
        except OptionError:
            return None

    with ThreadPoolExecutor(8) as pool:
        named = list(pool.map(start, ["run"] * 8))
        unnamed = list(pool.map(start, ["auto"] * 8))
    assert sorted(map(str, named)) == ["None"] * 7 + ["run"]
    assert len(set(unnamed)) == 8
    assert all(load_config(folder).run == str(folder) for folder in unnamed)


@pytest.mark.parametrize("every", ["1", "9"])
def test_a_training_that_diverges_stops_at_once_with_status_4(every, text, capsys):
    """Without a checkpoint of what it came to."""
    arguments = ["--learning_rate", "1e9", "--steps", "100", "--validate_every", every, "--run", "run"]
    assert train(*UNCHECKED, "--data", text, *arguments) == 4
    said = one_line(capsys.readouterr().err)
    assert re.match(r"error: the gradient of step [1-9] is not finite, .*; try a --learning_rate below 1e\+09", said)
    assert Path("run/not_finite.pt").exists()
    saved = Path("run/checkpoints/last.ckpt").exists()
    assert saved == ("--resume run" in said)
    assert not saved or all(weight.isfinite().all() for weight in checkpoint("run")["state_dict"].values())


def test_a_full_disk_ends_the_run_with_one_line_and_status_3(text, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # less than a checkpoint takes
    try:
        assert train(*UNCHECKED, "--data", text, "--steps", "1", "--run", "run") == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in one_line(capsys.readouterr().err)


def test_an_error_of_the_program_shows_its_traceback(text, monkeypatch, capsys):
    """With a status that is not that of a gradient outside its budget."""
    monkeypatch.setattr(TrainByteLM, "validation_step", lambda module, batch: {}["nothing"])
    monkeypatch.setattr(sys, "argv", ["train_toy_lm.py", *UNCHECKED, "--data", text, "--steps", "1", "--run", "run"])
    with pytest.raises(SystemExit) as stop:
        train_toy_lm.exit_with_main()
    assert stop.value.code == 5
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith("KeyError: 'nothing'\n")


@pytest.mark.usefixtures("processes_that_meet")
def test_distributed_runs_leave_out_the_end_of_the_interpreter():
    """Where threads of gloo abort one process in ten that has used DDP; what is printed before arrives."""
    Path("distributed.py").write_text(f"""
import atexit, sys
sys.path.insert(0, {str(Path(train_toy_lm.__file__).parent)!r})
import torch, train_toy_lm
torch.distributed.init_process_group("gloo", init_method="file://{Path("store").resolve()}", rank=0, world_size=1)
atexit.register(print, "the interpreter ends")
train_toy_lm.main = lambda: print("the run is done") or 0
train_toy_lm.exit_with_main()
""")
    ended = subprocess.run([sys.executable, "distributed.py"], capture_output=True, text=True, timeout=SECONDS)
    # gloo of torch 2.10 prints a line of its own before
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["the run is done"]), ended.stderr


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("training_step", "terminated after step 3\ncontinue with --resume run"),
        ("validation_step", "terminated\nthere is no checkpoint yet"),
    ],
)
def test_a_terminated_run_says_how_to_resume(moment, said, text, monkeypatch, capsys):
    """After the step in progress; in the validation before the first step at once."""
    step = getattr(TrainByteLM, moment)

    def step_and_terminate(module, batch):
        if module.trainer.global_step == (2 if moment == "training_step" else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return step(module, batch)

    monkeypatch.setattr(TrainByteLM, moment, step_and_terminate)
    before = signal.getsignal(signal.SIGTERM)
    assert train(*UNCHECKED, "--data", text, "--steps", "20", "--validate_every", "1", "--run", "run") == 143
    assert said in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is before
    if moment == "training_step":
        assert checkpoint("run")["global_step"] == 3


def run_distributed(arguments: list[str], *, strategy: str = "ddp", **environment: str) -> tuple[int, str]:
    """The exit status of two processes, and all that they print. What hangs is killed, with status -9."""
    # its own session, so that the second process, which the first one starts, can be ended with it
    process = subprocess.Popen(
        [*arguments, "--devices", "2", "--strategy", strategy], env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    deadline = threading.Timer(SECONDS, os.killpg, [process.pid, signal.SIGKILL])
    deadline.start()
    printed = process.communicate()[0]
    deadline.cancel()
    return process.returncode, printed


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=[pytest.mark.slow, pytest.mark.xdist_group("gpu")])])
def two_devices(request) -> str:
    """Lightning's name of them."""
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
        request.getfixturevalue("processes_that_meet")
    elif torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return request.param


def test_two_processes_give_every_parameter_the_gradient_of_the_whole_batch(text, two_devices):
    """One step of DDP. AdamW's first moment is then a tenth of the gradient, held to the error budget."""
    arguments = [*TINY, "--data", text, "--steps", "1", "--clip", "0", "--accelerator", two_devices]
    interpreted = {"TRITON_INTERPRET": "1"} if two_devices == "cpu" else {}
    status, printed = run_distributed(command(*arguments), **interpreted)
    assert status == 0, printed
    assert printed.count("validation after 1 steps") == 1, printed

    [folder] = Path("runs/toy_lm").iterdir()  # whatever the clocks of both say
    config = load_config(folder)
    torch.manual_seed(config.seed)
    module = TrainByteLM(config)  # the weights that the run started with
    batch = module.training_batches().batch(0)
    if two_devices == "gpu":  # where what eager code rounds is what the run rounds
        module.model.cuda()
        batch = batch.cuda()
    names = [name for name, _ in module.model.named_parameters()]

    def gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(module.model).to(dtype)
        return dict(zip(names, torch.autograd.grad(next_byte_loss(model, batch), model.parameters()), strict=True))

    exact, eager = gradients(torch.float64), gradients(torch.float32)
    name_of = {id(p): name for name, p in module.model.named_parameters()}
    order = [name_of[id(p)] for group in parameter_groups(module.model, 0.1) for p in group["params"]]
    moments = checkpoint(folder)["optimizer_states"][0]["state"]
    assert sorted(order) == sorted(names)
    assert len(moments) == len(names)
    for index, name in enumerate(order):
        distributed = moments[index]["exp_avg"].to(batch.device).double() / (1 - 0.9)
        budget = 2 * (eager[name] - exact[name]).norm() + torch.finfo(torch.float32).eps * exact[name].norm()
        assert (distributed - exact[name]).norm() <= budget, name
        assert exact[name].norm() > 0, name


def curve(folder: str) -> dict[tuple[str, str], float]:
    """(step, metric) → bits per byte."""
    rows = [row for path in Path(folder, "logs").rglob("metrics.csv") for row in csv.DictReader(path.open())]
    return {(row["step"], key): float(row[key]) for row in rows for key in ("train_bits", "val_bits") if row.get(key)}


def assert_same_model(found: str, expected: str) -> None:
    """Weights and optimiser, in the same layout."""
    one, other = checkpoint(found), checkpoint(expected)
    assert list(one["state_dict"]) == list(other["state_dict"])
    for name, weight in other["state_dict"].items():
        assert torch.allclose(one["state_dict"][name], weight, rtol=1e-4, atol=1e-5), name
    [one], [other] = one["optimizer_states"], other["optimizer_states"]
    assert [group["params"] for group in one["param_groups"]] == [group["params"] for group in other["param_groups"]]
    assert one["state"].keys() == other["state"].keys()
    for number, values in other["state"].items():
        assert all(torch.allclose(one["state"][number][key], x, rtol=1e-3, atol=1e-6) for key, x in values.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARDED)
def test_several_devices_learn_what_one_does_and_resume_what_the_other_left(strategy, text, two_devices):
    """The same loss curve at the same total batch; the gradient of the sharded model within its budget; checkpoints in
    both directions."""
    if strategy == "context":
        pytest.importorskip("decayattn.distributed")
    arguments = [*TINY, "--data", text, "--layers", "2", "--accelerator", two_devices]
    unchecked = [*arguments, "--gradient_check", "false", "--steps", "6"]
    assert train(*unchecked, "--run", "single") == 0
    interpreted = {"TRITON_INTERPRET": "1"} if two_devices == "cpu" else {}
    several = [*arguments, "--run", "several", "--steps", "6"]
    status, printed = run_distributed(command(*several), strategy=strategy, **interpreted)
    assert status == 0, printed
    assert printed.count("sharded beside one process, float32") == 2, printed
    rows = json.loads(Path("several/gradients/step-6.json").read_text())
    parameters = len(list(TrainByteLM(load_config(Path("several"))).model.parameters()))
    assert len(rows) == 2 * parameters
    assert all(row["verdict"] == "ok" for row in rows)
    single, several = curve("single"), curve("several")
    assert single.keys() == several.keys()
    assert single == pytest.approx(several, abs=1e-4)
    assert_same_model("several", "single")

    for name in ("whole", "into several", "into one"):
        shutil.copytree("several" if name == "into one" else "single", name)
    resume = ["--gradient_check", "false", "--steps", "9", "--accelerator", two_devices]
    assert train("--resume", "whole", *resume) == 0
    assert train("--resume", "into one", *resume, "--devices", "1", "--strategy", "auto") == 0
    status, printed = run_distributed(command("--resume", "into several", *resume), strategy=strategy, **interpreted)
    assert status == 0, printed
    for name in ("into one", "into several"):
        assert checkpoint(name)["global_step"] == 9
        assert_same_model(name, "whole")


@pytest.mark.slow
@pytest.mark.xdist_group("gpu")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", SHARDED)
def test_a_sharded_model_trains_in_bfloat16_after_a_validation(strategy, text):
    """What FSDP gathers in bfloat16 for a validation is there in the first step, too."""
    mixed = ["--data", text, "--precision", "bf16-mixed", "--backend", "auto", "--steps", "2", "--run", "mixed"]
    status, printed = run_distributed(command(*TINY, *mixed), strategy=strategy)
    assert status == 0, printed
    assert printed.count("sharded beside one process") == 4, printed


@pytest.mark.slow
@pytest.mark.usefixtures("processes_that_meet")
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 3, "error: the process of rank 1 was killed by signal 9\n"),
        ("raise OSError(5, 'Input/output error')", 3, "error: [Errno 5] Input/output error\n"),
        ("raise KeyError('nothing')", 5, "KeyError: 'nothing'\n"),
        ("return step(module, batch) * float('nan')", 4, "error: the training loss of step 3 is nan; try"),
    ],
)
def test_a_fault_of_the_second_process_ends_both_with_its_status(fault, status, message, text):
    Path("faulty.py").write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(Path(train_toy_lm.__file__).parent)!r})
import train_toy_lm
from toy_lm.training import TrainByteLM
step = TrainByteLM.training_step
def faulty(module, batch):
    if module.trainer.global_step == 2 and module.trainer.global_rank == 1:
        {fault}
    return step(module, batch)
TrainByteLM.training_step = faulty
train_toy_lm.exit_with_main()
""")
    arguments = [sys.executable, "-u", "faulty.py", *UNCHECKED, "--data", text, "--steps", "50", "--run", "run"]
    found, printed = run_distributed(arguments)
    assert (found, printed.count(message)) == (status, 1), printed


@pytest.mark.slow
@pytest.mark.usefixtures("processes_that_meet")
@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_two_terminated_processes_end_after_the_same_step(ranks, text):
    """A batch system tells every process or the first one alone: in a backward, where the other waits for this one."""
    Path("terminated.py").write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(Path(train_toy_lm.__file__).parent)!r})
import train_toy_lm
from toy_lm.training import TrainByteLM
step = TrainByteLM.training_step
def terminated(module, batch):
    if module.trainer.global_step == 2 + module.trainer.global_rank and module.trainer.global_rank in {ranks}:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(module, batch)
TrainByteLM.training_step = terminated
train_toy_lm.exit_with_main()
""")
    arguments = [sys.executable, "-u", "terminated.py", *UNCHECKED, "--data", text, "--steps", "50", "--run", "run"]
    status, printed = run_distributed(arguments)
    last = 3 + min(ranks)
    assert status == 143, printed
    assert f"terminated after step {last}\ncontinue with --resume run" in printed
    assert checkpoint("run")["global_step"] == last
