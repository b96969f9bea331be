"""Benchmarks of training steps (checks that can fail, one set of weights for all, rounds, strategies) and of ranks."""

import itertools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmark_runs import count_milliseconds, hide_gpu, run
from benchmarks import context, harness, training
from benchmarks.context import ALONE, TIMED
from benchmarks.training import BASELINE, IDENTITY, VARIANTS, Models, OtherAttention, Setting

SETTING = Setting(layers=2, width=16, head_dim=8, vocabulary=20, batch=2, length=12)
SMALL = ["--layers", "1", "--width", "16", "--head-dims", "8", "--lengths", "20", "--tokens", "40"]
NAMES = ["ours", "cudnn", IDENTITY]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    hide_gpu(monkeypatch)


@pytest.fixture
def models():
    return Models(SETTING, "reference", "cpu", seed=0)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_wrong_variant_is_named_and_gets_no_speed(is_ours, monkeypatch, capsys):
    """Its values are a hundredth too large, which the loss hardly shows."""

    def attend(q, k, v, log_decay):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, 1.01 * v)), is_causal=True
        ).transpose(1, 2)

    name = "ours wrong" if is_ours else "wrong"
    wrong = VARIANTS["cudnn"]._replace(layer=lambda setting, *_: OtherAttention(setting, attend))
    monkeypatch.setitem(VARIANTS, name, wrong)
    assert harness.main(training, [*SMALL, "--variants", name, "--backend", "reference"]) == int(is_ours)
    assert f"{name}: wrong: loss, in_proj, all outside the error budget" in capsys.readouterr().out


def test_all_variants_have_the_same_weights(models):
    for name in NAMES:
        model = models.decoder(name, SETTING.length)
        shared = dict(models.base.named_parameters())
        assert all(parameter is shared[key] for key, parameter in model.named_parameters())


def test_a_step_leaves_the_weights_as_they_are(models):
    model = models.decoder("ours", SETTING.length)
    before = [p.detach().clone() for p in model.parameters()]
    first, second = (float(models.step(model)) for _ in range(2))
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert models.optimizer.state  # it has stepped


def test_timed_steps_interleave_and_survive_a_failure(models, monkeypatch):
    steps, names, real = [], iter(NAMES), Models.step
    name_of = {}

    def step(self, model):
        steps.append(name_of[model] if model in name_of else name_of.setdefault(model, next(names)))
        if steps[-1] == "cudnn":
            raise torch.OutOfMemoryError("too much")
        return real(self, model)

    options = harness.parse(training, [*SMALL, "--rounds", "2"])
    run = harness.Run("x.py", options, [], {})
    count_milliseconds(monkeypatch)
    monkeypatch.setattr(Models, "step", step)
    timings, first = training.time_rounds(models, NAMES, run)
    assert [entry["reason"] for entry in run.report["missing"]] == ["OutOfMemoryError: too much"]
    assert steps == ["ours", "ours", "cudnn", IDENTITY, IDENTITY, "ours", IDENTITY, IDENTITY, "ours"]
    assert timings == {("ours", "step"): [1.0, 4.0], (IDENTITY, "step"): [2.0, 3.0]}
    assert (first["ours"]["peak_bytes"], first["ours"]["loss"] > 0) == (7, True)


def made_up(length: int = 12) -> list[dict]:
    rounds = {"ours": [4.0, 2.0, 3.0], BASELINE: [6.0, 6.0, 6.0], IDENTITY: [1.0, 1.0, 1.0]}
    timings = {(name, "step"): times for name, times in rounds.items()}
    first = {name: {"peak_bytes": 10**9, "loss": 3.0} for name in rounds}
    return list(training.rows(SETTING._replace(length=length), timings, first))


def test_rows_have_speed_and_the_share_of_attention():
    ours, baseline, identity = made_up()
    assert (ours["ms"], ours["ms_range"], ours["tokens_per_second"]) == (3.0, [2.0, 4.0], 8000.0)
    assert ours["attention_share"] == pytest.approx(2 / 3)  # of 3/4, 1/2, 2/3
    assert (baseline["attention_share"], identity["attention_share"]) == (pytest.approx(5 / 6), 0.0)


def test_known_settings_are_not_measured_again(tmp_path, monkeypatch):
    measured, found = [], {length: made_up(length) for length in (20, 24)}
    count_milliseconds(monkeypatch)
    monkeypatch.setattr(training, "time_rounds", lambda models, *_: (measured.append(models.setting.length), {}))
    monkeypatch.setattr(training, "rows", lambda setting, *_: found[setting.length])
    argv = [*SMALL, "--variants", IDENTITY, "--lengths", "20"]
    for more in ([], ["24"]):
        assert run(training, tmp_path, *argv, *more)[0] == 0
    assert measured == [20, 24]
    with pytest.raises(SystemExit, match="has setup"):
        run(training, tmp_path, *argv, "--seconds", "9")


def run_folder(folder: Path, bits: list[float], milliseconds: list[float]) -> Path:
    """Folder that train_toy_lm.py leaves, with made-up figures and a validation of 5 s after the second step."""
    (folder / "logs/from_step_0").mkdir(parents=True)
    seconds = [0.0, *itertools.accumulate([x / 1e3 for x in milliseconds])]
    lines = [f"{n},{x},,{seconds[n - 1] + 5 * (n > 2)}" for n, x in enumerate(bits, start=1)]
    lines = ["step,train_bits,val_bits,seconds", *lines, f"2,,{bits[1]},", f"{len(bits)},,{bits[-1]},"]
    (folder / "logs/from_step_0/metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text(json.dumps({"parameters": 1000, "strategy": "ddp", "devices": 2}))
    return folder


def test_strategies_are_compared_step_by_step(tmp_path):
    setup = {"devices": 2, "layers": 1, "width": 8, "context": 10, "batch_size": 4, "steps": 3}
    folders = {"one": run_folder(tmp_path / "one", [8.0, 4.0, 4.0, 4.0, 2.0], [900.0, 10.0, 11.0, 11.0]),
               "ddp": run_folder(tmp_path / "two", [8.0, 4.3, 4.2, 4.0, 2.0], [900.0, 5.0, 5.5, 5.5])}
    result = {"setup": setup, "gpu": "X", "torch": "2",
              "rows": [{"run": name} | training.read_run(at) for name, at in folders.items()]}
    training.compare(result)
    one, two = result["rows"]
    assert one["milliseconds_per_step"] == 11.0  # the first stretch left out
    assert one["tokens_per_second"] == pytest.approx(40 / 0.011)
    assert (two["speed_over_one"], two["difference"]) == (2.0, pytest.approx(0.1))
    assert two["largest_difference"] == pytest.approx(0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter", "cpu_ranks")
def test_strategies_are_run_once(tmp_path):
    (tmp_path / "text").write_bytes(b"abracadabra, " * 200)
    argv = ["--output", str(tmp_path / "found.json"), "--strategies", "one", "context, heads",
            f"--more=--data {tmp_path / 'text'} --gradient_check 0"]
    assert harness.main(training, argv) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["run"], row["devices"]) for row in rows] == [("one", 1), ("context, heads", 2)]
    assert abs(rows[1]["difference"]) < 1e-4
    assert harness.main(training, argv) == 0
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == rows


def test_a_failed_strategy_is_reported_and_not_kept(tmp_path, monkeypatch, capsys):
    commands = []
    done = SimpleNamespace(returncode=2, stdout="heads: expected a divisor")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: (commands.append(command), done)[1])
    monkeypatch.setattr(harness, "provenance", lambda *_: dict.fromkeys(("gpu", "driver", "torch", "triton", "commit")))
    status, read = run(training, tmp_path, "--strategies", "ddp", "--more=--heads 3")
    assert (status, read["rows"]) == (1, [])
    assert commands[0][-2:] == ["--heads", "3"]
    assert {"--strategy", "ddp", "--devices", "2", "--steps"} <= set(commands[0])
    assert "ddp: failed: RuntimeError: train_toy_lm.py ended with status 2" in capsys.readouterr().out


# Context parallelism


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter", "cpu_ranks")
def test_context_script_runs_without_a_gpu(tmp_path, capfd):
    """But for the kernels, which tests/distributed interprets. A second call does what the first one lacks."""
    argv = ["--check-length", "24", "--decays", "-1", "--backend", "reference"]
    argv += ["--output", str(tmp_path / "context.json"), "--lengths", "40"]
    assert context.main(argv) == 0
    read = json.loads((tmp_path / "context.json").read_text())
    modes = {(row["mode"], row["direction"]) for row in read["rows"]}
    assert modes == {(mode, direction) for mode in context.MODES for direction in TIMED}
    # 20 tokens of one key head: k, v and the log-decays of two heads, filled up to 16 bytes, forward
    assert read["rows"][0]["received"] == [0, 20 * (2 * 16 * 4 + 16)]
    assert all(row["ms"] is None for row in read["rows"])
    assert [(check["mode"], check["dtype"]) for check in read["checks"]] == [("halo", "float32"), ("heads", "float32")]
    capfd.readouterr()
    assert context.main([*argv, "24"]) == 0
    longer = json.loads((tmp_path / "context.json").read_text())
    assert longer["checks"] == read["checks"]
    assert longer["rows"][: len(read["rows"])] == read["rows"]
    assert [row["length"] for row in longer["rows"]] == [40] * len(read["rows"]) + [24] * len(read["rows"])
    assert "within the error budget" not in capfd.readouterr().out


def test_speeds_are_over_one_gpu():
    timings = {(name, way): [ms, ms] for name, ms in (("halo", 2.0), (ALONE, 3.6)) for way in TIMED}
    received = {"halo": {"forward": [0, 5], "backward": [5, 0]}}
    found = list(context.rows(2, received, {"halo": {"out": 1e-3}}, timings))
    assert [(row["mode"], row["ranks"], row["speed_over_alone"]) for row in found] == [
        *[("halo", 2, 1.8)] * 3, *[(ALONE, 1, 1.0)] * 3,
    ]


def test_wrong_results_are_objected_to():
    eps = torch.finfo(torch.bfloat16).eps
    assert context.objection({"out": eps, "dq": 0.0}, "bfloat16") == ""
    assert "dq by" in context.objection({"out": eps, "dq": 3 * eps}, "bfloat16")
    assert "dk by nan" in context.objection({"dk": float("nan")}, "float32")
