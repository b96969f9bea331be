"""experiments/benchmark_context.py: right before fast, honest bytes, what is written down."""

import json
import os
import subprocess
import sys

import benchmark_context
import pytest
import torch
from context_benchmark import checks, figure, report
from context_benchmark.measure import ALONE, DIRECTIONS
from context_benchmark.workloads import Workload
from repository_files import EXPERIMENTS

SCRIPT = EXPERIMENTS / "benchmark_context.py"
WORKLOAD = Workload(1024, 4, 2, 64, "bfloat16", "-0.1")


@pytest.mark.slow
def test_the_script_runs_where_there_is_no_gpu(interpreter, tmp_path):
    """As a user runs it, on a machine whose GPU is hidden, but for the kernels, which tests/distributed interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv = ["--check-length", "24", "--lengths", "40", "--decays", "-1", "--backend", "reference"]
    argv += ["--output", str(tmp_path / "context.json")]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *argv], env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
        text=True, timeout=300, check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    read = json.loads((tmp_path / "context.json").read_text())
    assert {(row["mode"], row["direction"]) for row in read["rows"]} == {
        (mode, direction) for mode in checks.MODES for direction in DIRECTIONS
    }
    # 20 tokens of one key head: k, v and the log-decays of two heads, forward
    assert read["rows"][0]["received"] == [0, 20 * 4 * (2 * 16 + 2)] == [0, read["rows"][0]["everything"]]
    assert all(row["ms"] is None for row in read["rows"])
    assert len(read["checks"]) == len(checks.CASES) * len(checks.MODES)
    assert (tmp_path / "context.png").stat().st_size > 5000

    # one more length is all that is left to do
    argv.insert(argv.index("40") + 1, "24")
    again = subprocess.run(
        [sys.executable, str(SCRIPT), *argv, "--resume"], env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    longer = json.loads((tmp_path / "context.json").read_text())
    assert longer["checks"] == read["checks"]
    assert longer["rows"][: len(read["rows"])] == read["rows"]
    assert [row["length"] for row in longer["rows"]] == [40] * len(read["rows"]) + [24] * len(read["rows"])
    assert "one process, T24" not in again.stdout


def test_reports_that_were_measured_side_by_side_are_joined():
    """A length and decay that two have is the first one's."""
    def measured(command, ms, *cells):
        rows = [{"length": length, "decay": decay, "ms": ms} for length, decay in cells]
        return {"command": command, "rows": rows, "wrong": [], "checks": [command]}

    reports = measured("a", 1, (2, "none"), (4, "none")), measured("b", 2, (4, "none"), (4, "-1"))
    found = benchmark_context.joined(reports, "c")
    assert found["command"] == "a; b; c"
    assert found["checks"] == ["a"]
    assert [(row["length"], row["decay"], row["ms"]) for row in found["rows"]] == [
        (2, "none", 1), (4, "none", 1), (4, "-1", 2),
    ]


def test_bytes_of_everything():
    assert WORKLOAD.everything(4) == 768 * (2 * 2 * 64 * 2 + 4 * 4)
    assert Workload(1024, 4, 2, 64, "bfloat16", "alibi").everything(2) == 512 * 2 * 2 * 64 * 2


def test_speeds_are_over_one_gpu():
    timings = {(name, way): [ms, ms] for name, ms in (("halo", 2.0), (ALONE, 3.6)) for way in DIRECTIONS}
    received = {"halo": {"forward": [0, 5], "backward": [5, 0]}}
    found = report.rows(WORKLOAD, 2, received, {"halo": {"out": 1e-3}}, timings)
    assert [(row["mode"], row["ranks"], row["speed_over_alone"]) for row in found] == [
        *[("halo", 2, 1.8)] * 3, *[(ALONE, 1, 1.0)] * 3,
    ]
    assert "1.80" in report.table(found)
    drawn = figure.draw({"rows": found, "gpu": "X", "torch": "1", "triton": "2"})
    assert len(drawn.axes) == 2
    with pytest.raises(ValueError, match="no rows"):
        figure.draw({"rows": []})


def test_wrong_results_are_objected_to():
    eps = torch.finfo(torch.bfloat16).eps
    assert checks.objection({"out": eps, "dq": 0.0}, "bfloat16") is None
    assert "dq by" in checks.objection({"out": eps, "dq": 3 * eps}, "bfloat16")
    assert "dk by nan" in checks.objection({"dk": float("nan")}, "float32")


@pytest.mark.parametrize(
    ("argv", "cuda", "message"),
    [
        (["--decays", "fast"], True, "expected none, alibi or a number, got 'fast'"),
        (["--lengths", "0"], True, "positive integer, got 0"),
        (["--dtype", "bfloat16"], False, "expected float16 or float32, got bfloat16"),
        (["--modes", "ring"], False, "invalid choice: 'ring'"),
        (["--resume", "--output", "nowhere.json"], True, "there is no report in nowhere.json"),
    ],
)
def test_bad_options_are_refused(argv, cuda, message, capsys):
    with pytest.raises(SystemExit):
        benchmark_context.parse(argv, cuda)
    assert message in capsys.readouterr().err
