"""The benchmark of sustained speed: its clock, its report and its refusals on any machine; a real run on a GPU."""

import contextlib
import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import types
from pathlib import Path

import benchmark_sustained
import pytest
import torch
from repository_files import EXPERIMENTS, ROOT
from shared import checks, peers, timing
from shared.calls import prepare
from shared.cases import Case, random_inputs
from shared.progress import Progress
from torch.nn.attention import SDPBackend

from decayattn.testing import Comparison

SMALL = Case(batch=2, heads=3, length=40, head_dim=8, dtype="float32", decay="scalar", mean_log_decay=-0.01)
ARGUMENTS = ["--shapes", "2,20,2,8", "1,40,2,8", "--dtype", "float32", "--backends", "reference", "--rounds", "2"]


class Device:
    """As much of torch.cuda as timing needs; a call lasts as long as the clock says."""

    def __init__(self):
        self.clock, self.series = 0.0, []

    def Event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                self.at = device.clock
                device.series.append(0)

            def elapsed_time(self, later):
                return later.at - self.at

        return Event()

    def synchronize(self):
        pass


def test_calls_follow_one_another_for_as_long_as_asked(monkeypatch):
    """0.06 s of calls of 2 ms: 3 to see how long one takes, 7 to warm up, 30 that count, nothing between them."""
    device = Device()
    monkeypatch.setattr(timing.torch, "cuda", device)
    took = itertools.chain([2.0] * 3, [9.0] * 7, [2.5] * 15, [1.5] * 15)

    def call():
        device.series[-1] += 1
        device.clock += next(took)

    assert timing.sustained_timer(0.06)(call) == 2.0
    assert device.series == [3, 0, 7, 0, 30, 0]


def test_graphs_replay_several_calls(monkeypatch):
    """Which the host makes once for all: 1 before the capture, 8 in it; a call's time is an eighth of the graph's."""
    device, made = Device(), []

    class Graph:
        def replay(self):
            device.clock += 2.0 * self.calls

    @contextlib.contextmanager
    def capture(graph, stream):
        assert stream == "current"
        before = len(made)
        yield
        graph.calls = len(made) - before

    device.CUDAGraph, device.graph, device.current_stream = Graph, capture, lambda: "current"
    monkeypatch.setattr(timing.torch, "cuda", device)
    assert timing.captured_timer(0.06)(lambda: made.append(None)) == 2.0
    assert len(made) == 9


def test_rows_hold_every_kernel_of_a_shape():
    rounds = {"cudnn": [4.0, 2.0, 3.0], "ours": [2.0, 2.0, 1.0], "ours, no decay": [1.0, 1.0, 1.0]}
    timings = {(name, way): timing.Timing(times) for name, times in rounds.items() for way in ("forward", "backward")}
    errors = {name: {"out": 1e-3} for name in rounds}
    forward, backward = benchmark_sustained.rows(SMALL, timings, errors)
    shape = {"batch": 2, "length": 40, "heads": 3, "head_dim": 8, "causal": True}
    assert shape.items() <= forward.items()
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    ours = forward["kernels"]["ours"]
    assert (ours["ms"], ours["ms_range"], ours["ratio_to_cudnn"]) == (2.0, [1.0, 2.0], 2.0)  # of 2, 1, 3
    assert backward["kernels"]["ours"]["tflops"] == pytest.approx(SMALL.tflops("backward", 2.0))
    without = {key: timing for key, timing in timings.items() if key[0] != "cudnn"}
    assert next(benchmark_sustained.rows(SMALL, without, errors))["kernels"]["ours"]["ratio_to_cudnn"] is None
    lines = benchmark_sustained.table([forward, backward]).splitlines()
    assert [line[2:20].strip() for line in lines[-3:]] == list(rounds)
    assert len({len(line) for line in lines[-3:]}) == 1


def test_names_tell_backend_and_decay():
    options = benchmark_sustained.parse(
        ["--peers", "fox", "cudnn", "--backends", "auto", "triton", "--decays", "scalar", "none", "constant"], cuda=True
    )
    kernels = benchmark_sustained.kernels_of((1, 2, 3, 4), options)
    assert [kernel.name for kernel in kernels] == [
        "cudnn", "fox", "ours", "ours, no decay", "ours, constant", "triton", "triton, no decay", "triton, constant",
    ]
    assert [kernel.case.decay for kernel in kernels][2:] == ["scalar", "none", "constant"] * 2
    case = kernels[0].case
    assert (case.batch, case.length, case.heads, case.head_dim) == (1, 2, 3, 4)


# ------------------------------------------------------------------------------------------------------------- the runs


@pytest.fixture
def a_clock(monkeypatch):
    """A counting clock for the timer, cuDNN's place taken by what runs on a CPU, and runs as on a GPU."""
    clock = itertools.count(1)

    def timer(call):
        call()
        return float(next(clock))

    monkeypatch.setattr(benchmark_sustained, "sustained_timer", lambda seconds: timer)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    build = benchmark_sustained.random_inputs
    monkeypatch.setattr(benchmark_sustained, "random_inputs", lambda case, device, seed: build(case, "cpu", seed))
    cudnn = peers.Peer("cudnn", "stand-in", "BHTD", "none", peers.sdpa(SDPBackend.MATH))
    monkeypatch.setitem(peers.OTHERS, "cudnn", cudnn)


def run(tmp_path: Path, *more: str) -> tuple[int, dict]:
    output = tmp_path / "new" / "results.json"
    argv = [*ARGUMENTS, *more, "--output", str(output)]
    status = benchmark_sustained.run(benchmark_sustained.parse(argv, cuda=True), argv, "cuda")
    return status, json.loads(output.read_text())


@pytest.mark.usefixtures("a_clock")
def test_a_run_leaves_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "forgetting_transformer", None)  # absent, whatever is installed
    status, read = run(tmp_path, "--peers", "cudnn", "fox", "--decays", "scalar", "none", "constant")
    assert status == 0
    keys = {"gpu", "driver", "torch", "triton", "cudnn", "python", "commit", "dirty", "command", "date"}
    assert keys <= set(read)
    assert str(tmp_path) not in json.dumps(read)
    assert read["method"]["regime"] == "sustained"
    assert [(row["batch"], row["length"], row["direction"]) for row in read["rows"]] == [
        (2, 20, "forward"), (2, 20, "backward"), (1, 40, "forward"), (1, 40, "backward"),
    ]
    names = ["cudnn", "reference", "reference, no decay", "reference, constant"]
    for row in read["rows"]:
        assert list(row["kernels"]) == names
        for figures in row["kernels"].values():
            assert {"ms", "ms_range", "tflops", "ratio_to_cudnn"} <= set(figures)
            assert max(figures["relative_error"].values()) < 1e-5
    assert set(read["rows"][0]["kernels"]["reference"]["relative_error"]) == {"out", "dq", "dk", "dv", "dlog_decay"}
    assert {(entry["kernel"], entry["kind"], entry["ours"]) for entry in read["missing"]} == {("fox", "absent", False)}
    assert len(read["checks"]) == 2 * 3
    assert "/cuDNN" in capsys.readouterr().out


@pytest.mark.usefixtures("a_clock")
def test_a_wrong_kernel_of_ours_gets_no_speed(tmp_path, monkeypatch, capsys):
    verify = checks.verify_ours

    def plant(case, inputs, backend, heads):
        if case.decay == "none":
            return [Comparison("dk", (0, 0), 1.0, 0.1, 0.5, "frobenius", "wrong")]
        return verify(case, inputs, backend, heads)

    monkeypatch.setattr(checks, "verify_ours", plant)
    status, read = run(tmp_path, "--peers", "cudnn")
    assert status == 1
    assert {(entry["kernel"], entry["kind"]) for entry in read["missing"]} == {("reference, no decay", "wrong")}
    assert all(list(row["kernels"]) == ["cudnn", "reference"] for row in read["rows"])
    assert "VIOLATED" in capsys.readouterr().out


@pytest.mark.usefixtures("a_clock")
def test_a_peer_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    def build(case, device):
        raise torch.OutOfMemoryError("too big")

    monkeypatch.setitem(peers.OTHERS, "fla", peers.Peer("fla", "", "BTHD", "learned", build))
    status, read = run(tmp_path, "--peers", "cudnn", "fla", "--decays", "scalar")
    assert status == 0
    assert {entry["reason"] for entry in read["missing"]} == {"OutOfMemoryError: too big"}
    assert all(list(row["kernels"]) == ["cudnn", "reference"] for row in read["rows"])


@pytest.mark.usefixtures("a_clock")
def test_long_heads_are_judged_one_at_a_time(tmp_path, monkeypatch):
    judged = []

    def note(case, inputs, backend, heads):
        judged.append(heads)
        return []

    monkeypatch.setattr(checks, "verify_ours", note)
    monkeypatch.setattr(benchmark_sustained, "_TWO_HEADS_UP_TO", 20)
    run(tmp_path, "--peers", "--decays", "scalar")
    assert judged == [[(0, 0), (1, 1)], [(0, 1)]]


def test_flash_attention_gets_its_own_layout(monkeypatch):
    """flash_attn.cute takes (B, T, H, D); some of its releases return the log-sum-exp, too."""
    for returned in (lambda out: out, lambda out: (out, None)):

        def stand_in(q, k, v, causal=False, returned=returned):
            tensors = (x.transpose(1, 2) for x in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
            return returned(out.transpose(1, 2))

        cute = types.ModuleType("flash_attn.cute")
        cute.flash_attn_func = stand_in
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
        inputs = random_inputs(SMALL, "cpu", seed=0)
        call = prepare(peers.OTHERS["flash_attn"], SMALL, inputs)
        errors = checks.relative_errors(SMALL, call, checks.oracle(SMALL, inputs, decay=False))
        assert set(errors) == {"out", "dq", "dk", "dv"}
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("argv", "cuda", "message"),
    [
        (["--shapes", "1,2,3"], True, "expected B,T,H,D or B,T,H,D,D_v, got 1,2,3"),
        (["--shapes", "1,2,0,3"], True, "positive integer, got 0"),
        (["--decays", "linear"], True, "invalid choice: 'linear'"),
        (["--seconds", "0"], True, "--seconds: expected a positive number, got 0.0"),
        (["--deviation", "-1"], True, "--deviation: expected a positive number, got -1.0"),
        (["--dtype", "bfloat16"], False, "expected float16 or float32, got bfloat16"),
        (["--output", "x.json"], False, "no GPU here"),
    ],
)
def test_bad_options_are_refused(argv, cuda, message, capsys):
    with pytest.raises(SystemExit):
        benchmark_sustained.parse(argv, cuda)
    assert message in capsys.readouterr().err


def test_the_bar_is_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        progress = Progress(4, stream)
        progress.step("forward")
        progress.step("", 9)
        progress.close()
        assert ("1/4" in stream.getvalue()) == ("4/4" in stream.getvalue()) == shown


def test_the_script_checks_the_interpreted_kernels_where_there_is_no_gpu(interpreter):
    """As a user runs it, on a machine whose GPU is hidden; it sets TRITON_INTERPRET itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(EXPERIMENTS / "benchmark_sustained.py"), "--shapes", "1,33,1,16"]
    run = subprocess.run(
        script, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "triton, no decay: out, lse, dq, dk, dv within the error budget" in run.stdout
    assert "all within the error budget" in run.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels with CUDA events: needs a GPU")
@pytest.mark.parametrize("captured", [False, True])
def test_a_small_run_on_the_gpu(captured, tmp_path, monkeypatch):
    monkeypatch.undo()  # filling fresh memory with NaN is the suite's, and would be timed
    output = tmp_path / "results.json"
    argv = ["--shapes", "2,512,4,64", "--rounds", "2", "--seconds", "0.02", "--backends", "triton", "--peers", "cudnn"]
    status = benchmark_sustained.main([*argv, *["--captured"] * captured, "--output", str(output)])
    read = json.loads(output.read_text())
    assert status == 0, read["missing"]
    assert read["captured"] == captured
    for row in read["rows"]:
        figures = row["kernels"]
        assert set(figures) == {"cudnn", "triton", "triton, no decay"}
        assert statistics.median(figures["triton"]["ms_range"]) > 0


def test_another_version_of_the_package_is_measured_beside_this_one(tmp_path):
    """A copy that gives twice what it should: an error of 1, reported and not judged, and nothing of it is ours."""
    shutil.copytree(ROOT / "decayattn", tmp_path / "decayattn", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "decayattn/__init__.py").open("a") as file:
        file.write("\n_ours = decay_attention\ndef decay_attention(*a, **b): return 2 * _ours(*a, **b)\n")
    options = benchmark_sustained.parse([*ARGUMENTS, "--before", str(tmp_path), "--decays", "scalar"], cuda=False)
    kernels = benchmark_sustained.kernels_of((2, 20, 2, 8), options)
    assert [kernel.name for kernel in kernels] == ["reference", "reference before"]
    result = {"kernels": {}, "missing": [], "checks": []}
    prepared, errors = benchmark_sustained.check(kernels, options, result, Progress(2), "cpu")
    assert set(prepared) == {"reference", "reference before"}
    assert errors["reference"]["out"] < 1e-5 < 0.9 < errors["reference before"]["out"]
    assert [entry["kernel"] for entry in result["checks"]] == ["reference"]
    assert not result["missing"]


def test_before_wants_a_tree(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark_sustained.parse([*ARGUMENTS, "--before", str(tmp_path)], cuda=False)
    assert "--before" in capsys.readouterr().err
