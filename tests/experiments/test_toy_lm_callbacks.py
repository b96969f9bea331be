"""The callbacks in somebody else's LightningModule."""

import json
import math
import os
import queue
import signal
import subprocess
import threading
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer
from torch import nn
from toy_lm import callbacks
from toy_lm.callbacks import EndTogether, FinishOnInterrupt, FiniteLoss, GradientValidation, NonFiniteLoss

from decayattn import DecayFlashAttention
from decayattn.backends import registry


class Regression(lightning.LightningModule):
    """A model of another shape, under another name, with a batch of another structure."""

    def __init__(self, interrupted: bool):
        super().__init__()
        self.interrupted = interrupted
        self.net = nn.Sequential(nn.Linear(3, 16), DecayFlashAttention(16, 2, output_gate=True), nn.Linear(16, 1))
        self.backends_seen = set()

    def training_step(self, batch):
        self.backends_seen.add(self.net[1].backend)
        if self.interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        return squared_error(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def squared_error(net, batch):
    return (net(batch["x"]) - batch["y"]).square().mean()


@pytest.mark.parametrize("interrupted", [False, True])
def test_it_checks_any_module_and_leaves_it_as_it_was(tmp_path, device, interrupted):
    batch = {"x": torch.randn(2, 20, 3), "y": torch.randn(2, 20, 1)}
    module = Regression(interrupted)
    module.net[1].backend = "reference"
    before = {name: p.clone() for name, p in module.net.named_parameters()}

    validation = GradientValidation(squared_error, batch, tmp_path, model="net")
    trainer = lightning.Trainer(
        max_steps=2, callbacks=[validation, FinishOnInterrupt()], accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader([batch] * 2, batch_size=None))
    assert module.backends_seen == {"reference"}
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert any(not torch.equal(before[name], p) for name, p in module.net.named_parameters())
    found = sorted(path.stem for path in (tmp_path / "gradients").glob("*.json"))
    assert found == (["step-0"] if interrupted else ["step-0", "step-2"])
    for stem in found:
        rows = json.loads((tmp_path / "gradients" / f"{stem}.json").read_text())
        assert [row["parameter"] for row in rows] == list(before)
        assert [row["parameter"] for row in rows if row["is_decay"]] == ["1.decay.weight", "1.decay.bias"]
        assert all(row["verdict"] == "ok" for row in rows)


@pytest.mark.parametrize(("dtype", "names"), [(torch.bfloat16, ["triton", "hopper"]), (torch.float32, ["triton"])])
def test_auto_is_every_backend_that_may_train(monkeypatch, tmp_path, dtype, names):
    def refuse_on_hopper(dtype, device):
        return None if dtype == torch.bfloat16 else "16 bits only"

    monkeypatch.setattr(registry.load("triton"), "unavailable", lambda dtype, device: None)
    monkeypatch.setattr(registry.load("hopper"), "unavailable", refuse_on_hopper)
    device = torch.device("cuda")
    for backend in ("auto", "reference"):
        validation = GradientValidation(squared_error, {}, tmp_path, backend=backend)
        assert validation.backends(dtype, device) == names
    assert GradientValidation(squared_error, {}, tmp_path, backend="hopper").backends(dtype, device) == ["hopper"]


def started(*scripts: str) -> SimpleNamespace:
    """A trainer whose launcher has started these shell scripts as the processes of rank 1, 2, …"""
    processes = [subprocess.Popen(["sh", "-c", script]) for script in scripts]
    strategy = SimpleNamespace(launcher=SimpleNamespace(procs=processes))
    return SimpleNamespace(strategy=strategy, world_size=len(scripts) + 1)


@pytest.mark.parametrize(("fault", "status"), [("exit 5", 5), ("kill -9 $$", 3)])
def test_a_process_that_fails_ends_all(fault, status, monkeypatch, capsys):
    """While the first one waits for something else: os._exit is called in another thread."""
    ended, together = queue.Queue(), EndTogether(killed=3)

    def end(status: int) -> None:
        together._stopped.set()  # the thread would have ended, too
        ended.put(status)

    monkeypatch.setattr(callbacks.os, "_exit", end)
    trainer = started("exec sleep 60", fault)
    together.watch(trainer)
    assert ended.get(timeout=30) == status
    assert trainer.strategy.launcher.procs[0].wait(timeout=30) == -signal.SIGKILL
    assert (capsys.readouterr().err == "error: the process of rank 2 was killed by signal 9\n") == (status == 3)


def test_no_other_watch_is_left():
    """Lightning's kills the first process without a word, where it is the one that sees a failed process first."""
    trainer, together = started("exec sleep 60"), EndTogether(killed=3)
    launcher = trainer.strategy.launcher
    processes = list(launcher.procs)
    _launch_process_observer(launcher.procs)
    [observer] = [thread for thread in threading.enumerate() if thread.name == "child-process-observer"]
    together.watch(trainer)
    observer.join(timeout=30)
    assert not observer.is_alive()
    assert launcher.procs == processes
    assert processes[0].poll() is None
    assert together.end_others(patience=0) is None
    assert processes[0].wait(timeout=30) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("others", "status"), [([], None), (["exec sleep 60"], None), (["exec sleep 60", "exit 5"], 5)]
)
def test_a_first_process_that_fails_ends_the_others_and_asks_whether_they_failed(others, status):
    trainer, together = started(*others), EndTogether(killed=3)
    together.watch(trainer)
    assert together.end_others(patience=0.3 if status is None else 30) == status
    assert all(process.wait(timeout=30) for process in trainer.strategy.launcher.procs)


def test_a_gradient_that_is_not_finite_stops_before_the_step_and_is_kept(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    callback = FiniteLoss("val_bits", every=7, folder=tmp_path)
    strategy = SimpleNamespace(reduce=lambda loss, reduce_op: loss)
    trainer = SimpleNamespace(global_step=4, precision="bf16-mixed", strategy=strategy, is_global_zero=True)
    batch = torch.ones(5, 2)
    callback.on_train_batch_start(trainer, model, batch, 0)
    loss = model(batch).sum()
    callback.on_before_backward(trainer, model, loss)
    loss.backward()
    callback.on_before_optimizer_step(trainer, model, None)
    model[1].weight.grad[0, 1] = math.nan
    with pytest.raises(NonFiniteLoss, match=r"the gradient of step 5 is not finite.*: 1 of 4 .* 1\.weight \("):
        callback.on_before_optimizer_step(trainer, model, None)
    kept = torch.load(tmp_path / "not_finite.pt")
    assert kept["step"] == 5
    assert torch.equal(kept["batch"], batch)
    assert kept["state_dict"].keys() == model.state_dict().keys()
    callback.on_before_backward(trainer, model, torch.tensor(math.inf))
    with pytest.raises(NonFiniteLoss, match="the training loss of step 5 is inf"):
        callback.on_before_optimizer_step(trainer, model, None)
    trainer.precision = "16-mixed"  # a GradScaler sees to it
    callback.on_before_optimizer_step(trainer, model, None)


def test_losses_are_looked_at_when_they_are_logged_and_the_first_bad_one_is_named():
    strategy = SimpleNamespace(reduce=lambda losses, reduce_op: losses)
    callback = FiniteLoss("val_bits", every=7)
    losses = [1.0, 2.0, 3.0, math.nan, 5.0, math.inf]

    def step(number: int) -> None:
        trainer = SimpleNamespace(global_step=number, log_every_n_steps=3, max_steps=100, strategy=strategy)
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(losses[number - 1])})

    for number in range(1, 6):
        step(number)
    with pytest.raises(NonFiniteLoss, match="the training loss of step 4 is nan"):
        step(6)
    trainer = SimpleNamespace(global_step=7, callback_metrics={"val_bits": torch.tensor(-math.inf)})
    with pytest.raises(NonFiniteLoss, match="the validation loss after step 7 is -inf"):
        callback.on_validation_end(trainer)
