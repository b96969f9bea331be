"""The training script end to end: a run's folder, learning, the gradient check, interruption and resume, processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_toy_lm
from distributed_pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from toy_lm import figures
from toy_lm.callbacks import GradientCheck
from toy_lm.figures import read_log
from toy_lm.model import ByteLM, next_byte_loss
from toy_lm.parallel import Sharded
from train_toy_lm import ToyLM, make_parser

from decayattn import functional

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch_size", "8"]
UNCHECKED = [*TINY, "--gradient_check", "0", "--backend", "reference", "--precision", "32-true"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A few kilobytes in which every byte follows from the two before it."""
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(b"abracadabra, " * 800)
    return str(path)


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # a process in the background starts with Ctrl-C ignored
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def without_report(monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *_: None)
    monkeypatch.setattr(figures, "write_sample", lambda *_: "")


def train(*arguments: str) -> int:
    return train_toy_lm.main(list(arguments))


def one_line(message: str) -> str:
    assert "\n" not in message.strip(), message
    return message


def checkpoint(folder: str | Path, name: str = "last") -> dict:
    return torch.load(Path(folder, "checkpoints", f"{name}.ckpt"), map_location="cpu", weights_only=True)


def attention(folder: str) -> dict[int, list]:
    return {row["step"]: row["layers"] for row in json.loads(Path(folder, "attention.json").read_text())["rows"]}


def test_run_learns_and_leaves_its_results(text, capsys):
    assert train(*TINY, "--data", text, "--steps", "20", "--run", "run", "--gradient_check", "20") == 0
    printed, folder = capsys.readouterr().out, Path("run")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "config.yaml", "summary.json", "sample.txt", "model.pt", "attention.json", "loss.png", "half_lives.png",
        "visited.png", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "logs/from_step_0/metrics.csv",
        "gradients/step-0.txt", "gradients/step-0.json", "gradients/step-20.txt", "gradients/step-20.json",
    }
    summary = json.loads((folder / "summary.json").read_text())
    before, after = (summary[f"validation_bits_{name}"] for name in ("before", "after"))
    assert before == pytest.approx(8, abs=0.1)
    assert after < before - 1
    assert f"validation before training: {before:.3f} bits per byte" in printed
    assert f"{before:.3f} -> {after:.3f} bits per byte" in printed
    steps, bits = read_log(folder, "val_bits")
    assert (steps[0], steps[-1], bits[0], bits[-1]) == (0, 20, pytest.approx(before), pytest.approx(after))
    saved = torch.load(folder / "model.pt", weights_only=True)
    model = ByteLM(**saved["options"])
    model.load_state_dict(saved["weights"])
    loaded = ToyLM.load_from_checkpoint(folder / "checkpoints/last.ckpt", map_location="cpu").model
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), model.parameters(), strict=True))
    for step in (0, 20):
        rows = json.loads((folder / f"gradients/step-{step}.json").read_text())
        assert {row["parameter"] for row in rows} == {name for name, _ in model.named_parameters()}
        assert all(row["verdict"] == "ok" and row["error"] <= row["budget"] for row in rows)
        assert (folder / f"gradients/step-{step}.txt").read_text(encoding="utf-8") in printed


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("options", [
    ["--decay", "alibi-learned", "--documents", "packed"], ["--documents", "resets"],
    *(pytest.param(x, marks=pytest.mark.slow) for x in (
        ["--decay", "none", "--precision", "bf16-mixed"], ["--decay", "constant"], ["--precision", "bf16-true"])),
])
def test_options_train_and_pass_the_gradient_check(options, tmp_path):
    """On a CPU the tiles are planned in float32, because Triton's interpreter has no bfloat16."""
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}").write_text(f"file {number}, " * 4)
    arguments = [*TINY, "--data", str(folder), "--steps", "2", "--run", "run", "--gradient_check", "20"]
    assert train(*arguments, "--backend", "reference", *options) == 0
    assert {row["verdict"] for row in json.loads(Path("run/gradients/step-2.json").read_text())} == {"ok"}
    layers = attention("run")
    for layer in layers[2]:
        assert (layer["half_lives"] is None) == ("none" in options)
        assert (layer["visited"] is None) == ("--documents" in options)
    assert (layers[0][0]["half_lives"] == layers[2][0]["half_lives"]) == bool({"none", "constant"} & set(options))


@pytest.mark.parametrize("broken_from", [0, 3])
def test_wrong_decay_gradient_ends_the_run(broken_from, text, monkeypatch, capsys):
    """Before the first step; or after the last one, with the checkpoint kept."""
    kernels, step, steps = functional.autograd.attention, ToyLM.training_step, 2 if broken_from else 0

    def attention(problem, inputs, *rest):
        if inputs.log_decay.requires_grad:
            inputs.log_decay.register_hook(lambda gradient: gradient * 1.001)
        return kernels(problem, inputs, *rest)

    def break_then_step(module, batch):
        monkeypatch.setattr(functional.autograd, "attention", attention)
        return step(module, batch)

    if not broken_from:
        monkeypatch.setattr(functional.autograd, "attention", attention)
    monkeypatch.setattr(ToyLM, "training_step", break_then_step)
    assert train(*TINY, "--data", text, "--steps", "2", "--run", "run", "--gradient_check", "20") == 1
    said = one_line(capsys.readouterr().err)
    assert f"gradients outside the error budget at step {steps}" in said
    rows = json.loads(Path(f"run/gradients/step-{steps}.json").read_text())
    assert {row["parameter"] for row in rows if row["verdict"] == "wrong"} == {
        "blocks.0.attention.decay.weight", "blocks.0.attention.decay.bias",
    }
    assert Path("run/checkpoints").exists() == bool(steps)
    assert not steps or checkpoint("run")["global_step"] == 2


def test_check_skips_a_backend_that_refuses_unless_named(tmp_path):
    model, batch = ByteLM(1, 32, 2), torch.zeros(1, 9, dtype=torch.uint8)
    every, named = (GradientCheck(next_byte_loss, batch, 1, tmp_path, backend) for backend in ("auto", "hopper"))
    text, rows = every.compare(model, batch, "hopper")
    assert text.startswith("hopper: not checked, ")
    assert not rows
    with pytest.raises(ValueError, match="hopper"):
        named.compare(model, batch, "hopper")


def interrupt_at(monkeypatch, moment: str, step: int, number: signal.Signals = signal.SIGINT, times: int = 1) -> None:
    hook = getattr(ToyLM, moment)

    def interrupt(module, batch):
        if module.trainer.global_step == step:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return hook(module, batch)

    monkeypatch.setattr(ToyLM, moment, interrupt)


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_run_resumes_bit_equal(number, text, monkeypatch, capsys):
    handler = signal.getsignal(number)
    options = [*UNCHECKED, "--data", text, "--steps", "12", "--validate_every", "4"]
    assert train(*options, "--run", "whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, "training_step", 5, number)
        assert train(*options) == 130
    [folder] = map(str, Path("runs/toy_lm").iterdir())
    said = capsys.readouterr().err
    assert f"interrupted after step 6; continue from step 6 with --resume {folder}" in one_line(said)
    assert checkpoint(folder)["global_step"] == 6
    assert signal.getsignal(number) is handler

    assert train("--resume", "last") == 0
    whole, resumed = checkpoint("whole"), checkpoint(folder)
    assert whole["global_step"] == resumed["global_step"] == 12
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)
    assert read_log(Path("whole"), "train_bits") == read_log(Path(folder), "train_bits")
    of_whole, of_resumed = attention("whole"), attention(folder)
    assert [step for step in of_resumed if step in (0, 4, 6, 12)] == [0, 4, 6, 12]
    assert all(of_resumed[step] == of_whole[step] for step in of_resumed.keys() & of_whole.keys())
    assert train("--resume", folder) == 2
    assert "steps: expected more than 12, those of the run to resume, got 12" in one_line(capsys.readouterr().err)


@pytest.mark.usefixtures("without_report")
def test_last_checkpoint_is_of_the_last_step(text, monkeypatch):
    """Also if the validation loss rises, which save_last of Lightning's ModelCheckpoint does not save."""
    monkeypatch.setattr(ToyLM, "validation_step", lambda module, batch: module.log_dict(
        {"val_bits": 1.0 + module.trainer.global_step, "step": float(module.trainer.global_step)}, batch_size=8,
    ))
    assert train(*UNCHECKED, "--data", text, "--validate_every", "2", "--run", "run", "--steps", "5") == 0
    assert (checkpoint("run")["global_step"], checkpoint("run", "best")["global_step"]) == (5, 2)


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize(
    ("moment", "step", "number", "times"),
    [("validation_step", 0, signal.SIGINT, 1), ("validation_step", 0, signal.SIGTERM, 1),
     ("training_step", 2, signal.SIGINT, 2)],
)
def test_interruption_outside_of_steps_ends_at_once(moment, step, number, times, text, monkeypatch, capsys):
    interrupt_at(monkeypatch, moment, step, number, times)
    assert train(*UNCHECKED, "--data", text, "--steps", "20", "--run", "run", "--validate_every", "9") == 130
    assert f"interrupted after step {step}; there is no checkpoint yet" in one_line(capsys.readouterr().err)


@pytest.mark.usefixtures("without_report")
def test_options_of_a_resume_replace_those_of_the_run(text, capsys):
    assert train(*UNCHECKED, "--data", text, "--decay", "none", "--steps", "2", "--run", "run") == 0
    assert train("--resume", "run", "--steps", "4", "--learning_rate", "1e-4", "--weight_decay", "0.3") == 0
    [optimizer], [schedule] = (checkpoint("run")[name] for name in ("optimizer_states", "lr_schedulers"))
    assert schedule["base_lrs"] == [1e-4, 1e-4]
    assert max(group["lr"] for group in optimizer["param_groups"]) <= 1e-4
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.3, 0.0]
    capsys.readouterr()
    for options, message in (
        (["--steps", "6", "--width", "64"], "width: expected 32, which the run to resume has, got 64"),
        (["--steps", "6", "--decay", "alibi"], "decay: expected none, which the run to resume has, got alibi"),
    ):
        assert train("--resume", "run", *options) == 2
        assert message in one_line(capsys.readouterr().err)
    with Path("run/checkpoints/last.ckpt").open("r+b") as file:
        file.truncate(10_000)
    assert train("--resume", "run", "--steps", "6") == 2
    assert "resume: run/checkpoints/last.ckpt is not a whole checkpoint" in one_line(capsys.readouterr().err)


@pytest.mark.usefixtures("without_report")
def test_resume_replaces_the_config_at_once(text, monkeypatch):
    """Other ranks that torchrun started may be reading it."""
    assert train(*UNCHECKED, "--data", text, "--steps", "1", "--run", "run") == 0
    with Path("run/config.yaml").open() as file:
        assert train("--resume", "run", "--steps", "2") == 0
        assert "steps: 1" in file.read()
    assert "steps: 2" in Path("run/config.yaml").read_text()


def test_last_is_the_newest_run_in_every_process(monkeypatch):
    """Processes that Lightning starts read the command line again; a newer run may have begun by then."""
    for age, name in enumerate(("b", "a")):
        path = Path("runs/toy_lm", name, "checkpoints/last.ckpt")
        path.parent.mkdir(parents=True)
        torch.save({"global_step": 3}, path)
        os.utime(path, (age, age))
    monkeypatch.setattr(sys, "argv", ["train_toy_lm.py", "--resume", "last"])
    assert train_toy_lm.find_run("last") == (Path("runs/toy_lm/a"), 3)
    assert sys.argv == ["train_toy_lm.py", "--resume", "runs/toy_lm/a"]


@pytest.mark.parametrize(("options", "message"), [
    ("--data nowhere", "data: expected a file or a folder, got 'nowhere', which does not exist"),
    ("--data empty", "data: expected text files, got none in 'empty', and 0 binary ones"),
    ("--context 1000", "data: expected over 1000 bytes, the context, in either part, got 520"),
    ("--context 1", "context: expected at least 2, got 1"),
    ("--resume nowhere", "resume: expected the folder of a run, or last, got 'nowhere'"),
    ("--resume last", "resume: expected the folder of a run, or last, got 'last'"),
    ("--heads 3", "width: expected a multiple of the heads, 3, got 32"),
    ("--width 512 --heads 1", "head_dim"),
    ("--layers 0", "layers: expected a finite number above 0, got 0"),
    ("--learning_rate .inf", "learning_rate: expected a finite number above 0, got inf"),
    ("--weight_decay -1", "weight_decay: expected a finite number at least 0, got -1.0"),
    ("--steps few", "steps: Expected a int. Got value: few"),
    ("--wdith 4", "wdith"),
    ("--config nowhere.yaml", "nowhere.yaml"),
    ("--decay fox", "decay: Expected a ['scalar', 'alibi', 'alibi-learned'"),
    ("--documents resets --decay none", "documents: expected together or packed with decay none, got resets"),
    ("--backend cudnn", "backend: Expected a ['auto', 'reference', 'triton', 'hopper']. Got value: cudnn"),
    ("--backend hopper", "backend: 'hopper' cannot take"),
    ("--strategy zero", "strategy: Expected a ['ddp', 'fsdp', 'tensor', 'context']. Got value: zero"),
    ("--strategy fsdp", "devices: expected at least 2 with strategy fsdp, got 1"),
    ("--strategy tensor --nodes 2", "devices: expected at least 2 with strategy tensor, got 1"),
    ("--strategy tensor --devices 4", "heads: expected a multiple of the devices, 4, got 2"),
    ("--strategy tensor --devices 5 --heads 5 --width 80", "channels of the SwiGLU: expected a multiple of the"),
    ("--strategy context --devices 3", "context: expected a multiple of the devices, 3, got 32"),
    ("--strategy context --devices 2 --nodes 3", "batch_size: expected a multiple of the devices, 3, got 8"),
    ("--strategy context --devices 4 --context_mode heads", "heads: expected a multiple of the devices, 4, got 2"),
    ("--strategy context --devices 2 --documents packed", "documents: expected together or resets with strategy"),
    ("--strategy fsdp --devices 2 --compile true", "compile: expected false with strategy fsdp, got true"),
    ("--devices 3", "batch_size: expected a multiple of the devices, 3, got 8"),
    ("--run file", "run: expected a new folder, got file: File exists"),
    ("--run file/run", "run: expected a new folder, got file/run: Not a directory"),
    ("--run full", "run: expected a new folder, got full: File exists; name another one, or continue a run with"),
])
def test_bad_options_end_with_one_line(options, message, text, capsys, monkeypatch):
    monkeypatch.setattr(train_toy_lm, "GPU", False)
    Path("file").touch()
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/config.yaml").touch()
    assert train(*UNCHECKED, "--data", text, *options.split()) == 2
    said = one_line(capsys.readouterr().err)
    assert said.startswith("error: ")
    assert message in said


def test_every_option_has_help():
    assert not [action.dest for action in make_parser()._actions if len(action.help or "") < 10]


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("every", ["1", "9"])
def test_diverged_training_ends_with_finite_weights(every, text, capsys):
    arguments = ["--learning_rate", "1e9", "--steps", "100", "--validate_every", every, "--run", "run"]
    assert train(*UNCHECKED, "--data", text, *arguments) == 1
    said, saved = one_line(capsys.readouterr().err), Path("run/checkpoints/last.ckpt").exists()
    assert "is not finite: try a --learning_rate below 1e+09; " in said
    assert ("--resume run" in said) == saved
    assert not saved or all(weight.isfinite().all() for weight in checkpoint("run")["state_dict"].values())


def train_on_rank(device: str, arguments: list[str], nodes: int = 1, stop_in: int | None = None) -> int:
    """Exit status of the script as a rank that torchrun started; Ctrl-C reaches rank 0 in a step."""
    rank, devices = torch.distributed.get_rank(), torch.distributed.get_world_size() // nodes
    train_toy_lm.GPU = device == "cuda"
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(torchrun, GROUP_RANK=str(rank // devices), LOCAL_RANK=str(rank % devices))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", lambda: None)  # the pool's
        if rank == 0 and stop_in is not None:
            interrupt_at(patch, "training_step", stop_in)
        return train_toy_lm.main(arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("without_report", "interpreter")
@pytest.mark.parametrize("options", [
    "", "--strategy fsdp", "--strategy tensor", "--strategy context", "--strategy context --context_mode heads",
    "--strategy tensor --nodes 2", "--strategy context --nodes 2",
])
def test_devices_learn_as_one_and_resume(options, text, ranks, monkeypatch):
    """The loss curve of one device at the same total batch, and gradients within its budget; after Ctrl-C, too."""
    nodes = 2 if "--nodes" in options else 1
    if nodes == 2 and ranks.device == "cuda":
        pytest.skip("needs four processes on a CPU")
    monkeypatch.setattr(train_toy_lm, "GPU", ranks.device == "cuda")
    run, whole = Path("several").resolve(), Path("whole").resolve()
    common = [*UNCHECKED, "--data", text, "--layers", "2", "--steps", "6", "--validate_every", "2", "--clip", "0.5"]
    several = [*common, "--devices", "2", *options.split(), "--run", str(run), "--gradient_check", "20"]
    with Pool(4) if nodes == 2 else contextlib.nullcontext(ranks) as pool:
        assert pool(train_on_rank, pool.device, several, nodes, 2) == [130] * pool.ranks
        assert pool(train_on_rank, pool.device, ["--resume", str(run)], nodes) == [0] * pool.ranks
    assert train(*common, "--run", str(whole)) == 0
    for step in (0, 6):
        rows = json.loads((run / f"gradients/step-{step}.json").read_text())
        assert {row["verdict"] for row in rows} == {"ok"}
        assert len(rows) == (2 if options else 1) * len(list(ByteLM(2, 32, 2).parameters()))
    for metric, count in (("train_bits", 6), ("val_bits", 4)):
        found, expected = (dict(zip(*read_log(at, metric), strict=True)) for at in (run, whole))
        assert len(expected) == count
        assert {step: found[step] for step in expected} == pytest.approx(expected, abs=1e-4)
    saved, expected = (torch.load(at / "model.pt", weights_only=True)["weights"] for at in (run, whole))
    torch.testing.assert_close(saved, dict(expected), rtol=1e-4, atol=1e-5)


def gradients_before_and_after(device: str) -> list[tuple[bool, torch.Tensor, torch.Tensor]]:
    """For every parameter: True if each rank holds it whole; its gradient, off by the rank, and after post_backward."""
    rank, strategy, model = torch.distributed.get_rank(), Sharded("tensor", 2, 1), ByteLM(1, 32, 2).to(device)
    strategy._device_mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    strategy.parallel_devices, strategy._model = [torch.device(device, rank)] * 2, model
    strategy.parallelize(model)
    next_byte_loss(model, torch.arange(50).view(2, 25).to(device)).backward()
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
        gradient += rank * 2.0**-20
        found.append((gradient is parameter.grad, gradient.clone(), gradient))
    strategy.post_backward(torch.tensor(0.0))
    return [(is_copy, before.cpu(), after.cpu()) for is_copy, before, after in found]


@pytest.mark.slow
def test_tensor_parallel_copies_get_one_gradient(ranks):
    of_ranks = list(zip(*ranks(gradients_before_and_after, ranks.device), strict=True))
    assert sum(is_copy for (is_copy, _, _), _ in of_ranks) == 5 < len(of_ranks)  # embedding, three norms, head
    for (is_copy, before, after), (_, others_before, others_after) in of_ranks:
        mean = (before + others_before) / 2
        assert after.equal(mean if is_copy else before)
        assert others_after.equal(mean if is_copy else others_before)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_ranks")
@pytest.mark.parametrize(("fault", "message"), [
    ("rank == 0: os.kill(os.getpid(), signal.SIGTERM)", "interrupted after step 3; continue from step 3"),
    ("rank == 1: os.kill(os.getpid(), signal.SIGKILL)", ""),
    ("rank == 1: raise KeyError('nothing')", "KeyError: 'nothing'\n"),
    ("rank == 1: return step(module, batch) * float('nan')", "the gradient of step 3 is not finite"),
])
def test_processes_end_together(fault, message, text):
    """Two that the script starts by itself."""
    Path("faulty.py").write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(Path(train_toy_lm.__file__).parent)!r})
import train_toy_lm
step = train_toy_lm.ToyLM.training_step
def faulty(module, batch):
    rank = module.trainer.global_rank
    if module.trainer.global_step == 2 and {fault}
    return step(module, batch)
train_toy_lm.ToyLM.training_step = faulty
sys.exit(train_toy_lm.main())
""")
    # a session of its own, so that the second process, which the first one starts, can be killed with it
    process = subprocess.Popen(
        [sys.executable, "-u", "faulty.py", *UNCHECKED, "--data", text, "--steps", "50", "--devices", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert message in printed, printed
    assert process.returncode == 130 if "interrupted" in message else process.returncode > 0, printed
    assert "interrupted" not in message or checkpoint(*Path("runs/toy_lm").iterdir())["global_step"] == 3
