"""The callbacks in somebody else's LightningModule."""

import json
import os
import signal
import sys
from pathlib import Path

import lightning
import pytest
import torch
from torch import nn

from decayattn import DecayFlashAttention, backends

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
from toy_lm.callbacks import FinishOnInterrupt, GradientValidation


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
    )  # fmt: skip
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
        assert all(row["passed"] for row in rows)


@pytest.mark.parametrize(("dtype", "names"), [(torch.bfloat16, ["triton", "hopper"]), (torch.float32, ["triton"])])
def test_auto_is_every_backend_that_may_train(monkeypatch, tmp_path, dtype, names):
    def refuse_on_hopper(dtype, device):
        return None if dtype == torch.bfloat16 else "16 bits only"

    monkeypatch.setattr(backends.load("triton"), "refusal", lambda dtype, device: None)
    monkeypatch.setattr(backends.load("hopper"), "refusal", refuse_on_hopper)
    device = torch.device("cuda")
    for backend in ("auto", "reference"):
        validation = GradientValidation(squared_error, {}, tmp_path, backend=backend)
        assert validation.backends(dtype, device) == names
    assert GradientValidation(squared_error, {}, tmp_path, backend="hopper").backends(dtype, device) == ["hopper"]
