"""experiments/benchmark_skipping.py: right before fast, honest ratios, what is written down."""

import json
import os
import subprocess
import sys

import benchmark_skipping
import pytest
import torch
from repository_files import EXPERIMENTS
from shared import timing
from shared.cases import DIRECTIONS, Case
from skipping_benchmark import checks, figure, planning, report
from skipping_benchmark.workloads import PRUNED, SKIPPING, WHOLE, Workload, peers_of, studies

from decayattn import decay_attention

SMALL = Workload("pruning", Case(1, 2, 300, 16, "float32", "scalar", -0.5))


def test_the_script_runs_where_there_is_no_gpu(interpreter):
    """As a user runs it, on a machine whose GPU is hidden; it sets TRITON_INTERPRET itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv = ["--studies", "pruning", "--pruning", "700", "--heads", "1"]
    run = subprocess.run(
        [sys.executable, str(EXPERIMENTS / "benchmark_skipping.py"), *argv],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300, check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "visits 0." in run.stdout
    assert "right" in run.stdout


def test_every_study_has_its_workloads():
    found = studies([128, 64], 16, "bfloat16", -0.01, 8192, 32768, 131072, [2048, 4096], 32768)
    assert [w.study for w in found].count("lengths") == 2
    assert {(w.case.head_dim, w.rates) for w in found if w.study == "constant"} == {
        (128, "alibi"), (128, "retnet"), (64, "alibi"), (64, "retnet"),
    }
    assert {w.case.batch for w in found if w.study == "planning"} == {4}
    assert len({str(w) for w in found}) == len(found)


@pytest.mark.parametrize(
    ("rates", "decay"), [("none to speak of", "scalar"), ("alibi", "constant"), ("uniform", "scalar")]
)
def test_inputs_are_what_the_workload_says(rates, decay):
    case = Case(1, 4, 30, 8, "float32", decay, -0.5)
    plain = Workload("x", case, rates).inputs("cpu", 0)
    loud = Workload("x", case, rates, gain=4.0).inputs("cpu", 0)
    assert torch.equal(loud["q"], 4 * plain["q"])
    assert torch.equal(loud["k"], 4 * plain["k"])
    assert torch.equal(loud["v"], plain["v"])
    log_decay = plain["log_decay"]
    assert log_decay.shape == ((4,) if decay == "constant" else (1, 30, 4))
    if rates == "alibi":
        assert log_decay.tolist() == [-0.25, -(0.25**2), -(0.25**3), -(0.25**4)]
    if rates == "none to speak of":
        assert -1e-5 < float(log_decay.min()) <= float(log_decay.max()) < 0


def test_only_the_pruning_study_has_competitors():
    assert [peer.name for peer in peers_of("lengths", "auto")] == [WHOLE, SKIPPING]
    assert [peer.name for peer in peers_of("pruning", "auto")] == ["cudnn", PRUNED, WHOLE, SKIPPING]


PLANNED = Workload("planning", Case(1, 2, 640, 16, "float32", "scalar", -0.5))


def test_what_is_timed_is_the_plan_and_its_mirror(device):
    inputs = PLANNED.inputs(device, 0)
    calls = planning.launches(PLANNED, inputs)
    first_block, last_granule = calls["forward"](), calls["backward"]()
    assert first_block.shape[:2] == last_granule.shape[:2] == (1, 2)
    assert (first_block[..., :10] > 0).any()
    assert last_granule.shape[2] == 5
    assert (last_granule < 9).any()
    assert planning.launches(SMALL, SMALL.inputs(device, 0)) == {}  # too short to be planned


def test_the_time_of_a_plan_is_that_of_one_copy(monkeypatch):
    class Graph:
        def replay(self):
            return "replayed"

    monkeypatch.setattr(planning, "launches", lambda *_: {"forward": "plan", "backward": "mirror"})
    monkeypatch.setattr(planning, "_captured", lambda call: Graph())
    milliseconds = iter([0.5, 0.3, 0.4, 0.1, 0.2, 9.0])

    def timer(call):
        assert call() == "replayed"
        return next(milliseconds)

    found = planning.times(PLANNED, {}, 3, timer)
    assert found == {"forward": pytest.approx(400 / planning.COPIES), "backward": pytest.approx(200 / planning.COPIES)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_plan_is_captured_in_a_graph():
    found = planning.times(PLANNED, PLANNED.inputs("cuda", 0), 1, timing.cuda_timer(warmup=1, duration=2))
    assert 0 < found["backward"] < found["forward"] < 1000


def test_the_share_of_the_plan_is_of_its_direction():
    timings = {
        (peer, direction): timing.Timing([2.0 if direction == "forward" else 4.0])
        for peer in (WHOLE, SKIPPING)
        for direction in DIRECTIONS
    }
    found = report.rows(PLANNED, timings, torch.ones(1, 2), {"forward": 20.0, "backward": 4.0})
    own = {row["direction"]: (row["plan_us"], row["plan_share"]) for row in found if row["peer"] == SKIPPING}
    assert own == {"forward": (20.0, 0.01), "backward": (4.0, 0.001)}
    assert all(row["plan_us"] is row["plan_share"] is None for row in found if row["peer"] == WHOLE)
    assert "20.0 (1.0%)" in report.table(found)
    assert "4.0 (0.1%)" in report.table(found)
    assert "plan_us" in report.METHOD
    assert all(row["plan_us"] is None for row in report.rows(PLANNED, timings, torch.ones(1, 2), {}))


def options(tmp_path, *argv: str):
    argv = ["--dtype", "float32", "--backend", "reference", "--output", str(tmp_path / "skipping.json"), *argv]
    return benchmark_skipping.parse(argv, cuda=True), argv


def test_a_run_leaves_rows_json_and_a_plot(tmp_path, capsys, monkeypatch):
    """The eager reference in place of the kernels: it takes part in everything but skips nothing."""
    monkeypatch.setattr(benchmark_skipping, "visited_fraction", lambda q, *_: torch.full((1, 2), 0.25))
    small = [
        "--heads",
        "2",
        "--head-dims",
        "8",
        "--planning",
        "20",
        "--tokens",
        "40",
        "--pruning",
        "30",
        "--constant",
        "30",
    ]
    chosen, argv = options(tmp_path, *small, "--lengths", "16", "32", "--whole-up-to", "30", "--rounds", "2")
    seconds = iter(range(1, 1000))
    assert benchmark_skipping.run(chosen, argv, "cpu", lambda call: (call(), float(next(seconds)))[1]) == 0
    read = json.loads((tmp_path / "skipping.json").read_text())
    assert (tmp_path / "skipping.png").stat().st_size > 10_000
    assert {row["study"] for row in read["rows"]} == set(benchmark_skipping.STUDIES)
    assert {row["peer"] for row in read["rows"] if row["length"] == 32} == {SKIPPING}
    skipping = [row for row in read["rows"] if row["peer"] == SKIPPING]
    assert all(row["visited"] == [0.25, 0.25] and row["ideal"] == 4.0 for row in skipping)
    for row in skipping:
        alike = ("study", "rates", "gain", "length", "direction")
        whole = [r for r in read["rows"] if r["peer"] == WHOLE and all(r[key] == row[key] for key in alike)]
        assert row["speed_over_whole"] == (whole[0]["ms"] / row["ms"] if whole else None)
    # cuDNN and the official kernel do not run on a CPU; that is told, and fails nothing of ours
    assert {entry["peer"] for entry in read["missing"]} == {"cudnn", PRUNED}
    assert "/fox pruned" in capsys.readouterr().out
    assert len(figure.draw(read).axes) == 2
    assert len(figure.draw(read | {"rows": [row for row in read["rows"] if row["study"] != "lengths"]}).axes) == 1
    with pytest.raises(ValueError, match="no rows"):
        figure.draw(read | {"rows": []})


def test_wrong_results_get_no_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_skipping, "visited_fraction", lambda q, *_: torch.ones(1, 2))
    monkeypatch.setattr(checks, "objection", lambda *_: ("dk outside the error budget", ["a table"]))
    chosen, argv = options(tmp_path, "--studies", "lengths", "--lengths", "16", "--heads", "2")
    assert benchmark_skipping.run(chosen, argv, "cpu", lambda call: 1.0) == 1
    read = json.loads((tmp_path / "skipping.json").read_text())
    assert read["rows"] == []
    assert read["missing"][0]["reason"] == "dk outside the error budget: no speed is reported"


@pytest.mark.parametrize("whole_heads", [10**6, 0])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_skipping_too_much_is_seen(factor, whole_heads, monkeypatch):
    """Of whole heads, and of the last rows alone."""

    def planted(*tensors, skip_tolerance=None, **rest):
        result = decay_attention(*tensors, skip_tolerance=None, **rest)
        if skip_tolerance is None:
            return result
        return (result[0] * factor, result[1]) if isinstance(result, tuple) else result * factor

    monkeypatch.setattr(checks, "WHOLE_HEADS", whole_heads)
    monkeypatch.setattr(checks, "decay_attention", planted)
    monkeypatch.setattr("decayattn.testing.call.decay_attention", planted)
    why, compared = checks.objection(SMALL, SMALL.inputs("cpu", 0), "reference")
    assert (why is None) == (factor == 1.0)
    assert any("out" in line for line in compared)


@pytest.mark.parametrize(
    ("argv", "cuda", "message"),
    [
        (["--studies", "nothing"], True, "invalid choice: 'nothing'"),
        (["--lengths", "0"], True, "positive integer, got 0"),
        (["--dtype", "bfloat16"], False, "expected float16 or float32, got bfloat16"),
        (["--output", "x.json"], False, "no GPU here"),
    ],
)
def test_bad_options_are_refused(argv, cuda, message, capsys):
    with pytest.raises(SystemExit):
        benchmark_skipping.parse(argv, cuda)
    assert message in capsys.readouterr().err


def test_the_method_is_told():
    assert {"ms", "visited", "studies", "checks"} <= set(report.METHOD)
