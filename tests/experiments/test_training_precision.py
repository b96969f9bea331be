"""Trainings with one rounding or the other: the same start, comparisons that can fail, resuming."""

import json
import math
from pathlib import Path

import pytest
import torch
import training_precision
from training_benchmark import precision
from training_benchmark.precision import RUNS, Setup

RUN = {run.name: run for run in RUNS}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """A training of numbers that a GPU would round otherwise, and no peer that has to be installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(b"abracadabra, " * 200)
    return str(path)


@pytest.fixture
def setup(text) -> Setup:
    return Setup(1, 16, 8, 12, 2, 6, 1e-2, (0.25, 4.0), 10, text, "reference", 0)


def arguments(text: str, *more: str) -> list[str]:
    sizes = {"layers": 1, "width": 16, "head-dim": 8, "context": 12, "batch": 2, "steps": 6, "window": 3,
             "check-length": 10, "learning-rate": 0.01, "data": text, "commit": "abc"}
    return [f"--{name}={value}" for name, value in sizes.items()] + list(more)


def test_all_runs_start_alike_but_for_the_perturbed_one(setup):
    models = {name: precision.decoder(RUN[name], setup, "cpu") for name in ("float32", "bfloat16", "perturbed")}
    for own, base in zip(models["bfloat16"].parameters(), models["float32"].parameters(), strict=True):
        assert torch.equal(own, base)
    off = [
        ((own - base) / base.norm()).norm()
        for own, base in zip(models["perturbed"].parameters(), models["float32"].parameters(), strict=True)
        if base.any()
    ]
    assert 1e-3 < torch.stack(off).mean() < 4e-3
    decay = models["float32"].blocks[0].attention.decay
    lives = decay.half_lives(torch.randn(1, 1, decay.embed_dim))
    torch.testing.assert_close(lives, torch.tensor([[[0.25, 4.0]]]), rtol=1e-4, atol=0)


def test_gradients_tell_the_precision(setup, text):
    bytes_of = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8)
    found = precision.gradient_errors(precision.decoder(RUN["float32"], setup, "cpu"), bytes_of, setup, "cpu")
    for group in ("in_proj", "decay", "all"):
        assert found["float32"][group] < 1e-5 < 1e-3 < found["bfloat16"][group] < 0.1
    assert "perturbed" not in found
    assert found["fla"] == "Absent: needs a GPU"


def test_a_training_is_kept_run_by_run(text, tmp_path, capsys):
    output = tmp_path / "precision.json"
    options = arguments(text, "--output", str(output))
    assert training_precision.main([*options, "--runs", "bfloat16", "float32"]) == 0
    first = json.loads(output.read_text())
    assert [row["run"] for row in first["rows"]] == ["float32", "bfloat16"]
    base, other = first["rows"]
    assert base["losses"][0] == pytest.approx(other["losses"][0], rel=1e-2)
    assert base["losses"] != other["losses"]
    assert base["losses"][-1] < base["losses"][0]
    assert [check["step"] for check in base["gradients"]] == [0, 3, 6]
    assert first["setup"]["data"] == "text"
    apart = first["summary"][1]
    expected = sum(other["losses"][-3:]) / 3 - sum(base["losses"][-3:]) / 3
    assert apart["difference"] == pytest.approx(expected, abs=1e-5)
    assert apart["largest_difference"] >= abs(apart["difference"])
    assert (tmp_path / "precision.png").stat().st_size > 10_000
    assert training_precision.main([*options, "--runs", "float32", "bfloat16", "fla", "perturbed"]) == 0
    second = json.loads(output.read_text())
    assert second["rows"][:2] == first["rows"]
    assert [row["run"] for row in second["rows"]] == ["float32", "bfloat16", "perturbed"]
    assert second["missing"] == [{"run": "fla", "kind": "absent", "reason": "Absent: needs a GPU"}]
    assert training_precision.main([*options, "--minutes", "1e-9"]) == 0
    assert "3 runs left" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has setup"):
        training_precision.main([*options, "--seed", "1"])


@pytest.mark.parametrize(("name", "status"), [("bfloat16", 1), ("fla", 0)])
def test_a_loss_that_is_not_finite_is_ours_to_answer_for(name, status, text, monkeypatch, capsys):
    def train(run, setup, device, progress):
        return {"run": run.name, "losses": [1.0, 2.0, math.nan, 1.0, 1.0, 1.0], "seconds": 0.0}

    monkeypatch.setattr(training_precision, "train", train)
    assert training_precision.main(arguments(text, "--runs", name)) == status
    assert f"{name}: NOT FINITE" in capsys.readouterr().out


def test_a_run_of_ours_that_fails_fails_all(text, monkeypatch):
    def train(run, setup, device, progress):
        raise RuntimeError("no")

    monkeypatch.setattr(training_precision, "train", train)
    assert training_precision.main(arguments(text, "--runs", "float32")) == 1
    assert training_precision.main(arguments(text, "--runs", "fox")) == 0


def test_options_that_cannot_be_are_refused(text, capsys):
    for name, wrong in (("--head-dim", ["5"]), ("--window", ["7"]), ("--half-lives", ["4", "1"]), ("--minutes", ["0"])):
        with pytest.raises(SystemExit):
            training_precision.parse([*arguments(text), name, *wrong], cuda=False)
        assert f"error: {name}" in capsys.readouterr().err
