"""The benchmark of several ranks: right before fast, bytes, reports that go on."""

import json

import pytest
import torch
from benchmark_runs import hide_gpu
from benchmarks import context
from benchmarks.context import ALONE, TIMED


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter", "processes_that_meet")
def test_context_script_runs_without_a_gpu(tmp_path, monkeypatch, capfd):
    """But for the kernels, which tests/distributed interprets. A second call does what the first one lacks."""
    hide_gpu(monkeypatch)
    argv = ["--check-length", "24", "--decays", "-1", "--backend", "reference"]
    argv += ["--output", str(tmp_path / "context.json"), "--lengths", "40"]
    assert context.main(argv) == 0
    read = json.loads((tmp_path / "context.json").read_text())
    modes = {(row["mode"], row["direction"]) for row in read["rows"]}
    assert modes == {(mode, direction) for mode in context.MODES for direction in TIMED}
    # 20 tokens of one key head: k, v and the log-decays of two heads, forward
    assert read["rows"][0]["received"] == [0, 20 * 4 * (2 * 16 + 2)]
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
