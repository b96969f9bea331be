"""Base of the benchmarks, peers, and the benchmark of attention: arithmetic, layouts, refusals, reports, clocks."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import types

import pytest
import torch
from benchmarks import attention, harness, peers
from benchmarks.harness import Case, Prepared
from repository_files import EXPERIMENTS, ROOT
from torch.nn.attention import SDPBackend

from decayattn import decay_attention
from decayattn.testing import Comparison, call

CPU = torch.device("cpu")
SMALL = Case(batch=2, heads=3, length=40, head_dim=8, dtype="float32", decay="scalar", mean_log_decay=-0.1)
# rounding of a float32 evaluation against float64, relative: far below any mistake, far above eps of 40 tokens
FLOAT32_ERROR = 40 * torch.finfo(torch.float32).eps
ARGUMENTS = ["--shapes", "2,20,2,8", "1,40,2,8", "--dtype", "float32", "--backends", "reference", "--rounds", "2"]


def with_decay(decay: str) -> Case:
    return dataclasses.replace(SMALL, decay=decay)


def errors_of(peer: peers.Peer, case: Case) -> dict[str, float]:
    inputs = case.inputs("cpu", seed=0)
    expected = harness.oracle(case, inputs, peer.decay != "none")
    return harness.relative_errors(case, peer.prepare(case, inputs), expected)


def test_work_is_that_of_the_products_over_visible_pairs():
    pairs = SMALL.batch * SMALL.heads * SMALL.length**2 / 2
    # two products forward, five backward, 2·D operations each per visible pair
    assert SMALL.tflops("forward", 1.0) == pytest.approx(2 * 2 * 8 * pairs / 1e9)
    assert SMALL.tflops("backward", 2.0) == pytest.approx(5 * 2 * 8 * pairs / 2e9)
    assert dataclasses.replace(SMALL, causal=False).tflops("backward", 1.0) == 2 * SMALL.tflops("backward", 1.0)
    wide = dataclasses.replace(SMALL, head_dim=192, value_dim=128)
    assert wide.tflops("backward", 1.0) == pytest.approx(2 * (3 * 192 + 2 * 128) * pairs / 1e9)


@pytest.mark.parametrize("decay", ["scalar", "constant", "none"])
def test_inputs_fit_decay_attention(decay):
    case = with_decay(decay)
    inputs, again = case.inputs("cpu", seed=1), case.inputs("cpu", seed=1)
    assert all(torch.equal(inputs[name], again[name]) for name in inputs)
    assert {x.shape for name, x in inputs.items() if name != "log_decay"} == {(2, 40, 3, 8)}
    assert ("log_decay" in inputs) == (decay != "none")
    if decay != "none":
        assert inputs["log_decay"].shape == ((2, 40, 3) if decay == "scalar" else (3,))
        assert 2 * case.mean_log_decay < inputs["log_decay"].min() <= inputs["log_decay"].max() < 0
    loud = dataclasses.replace(case, deviation=16.0).inputs("cpu", seed=1)
    assert torch.equal(loud["q"], 4 * inputs["q"])
    assert torch.equal(loud["v"], inputs["v"])


@pytest.mark.parametrize("decay", ["scalar", "constant", "none"])
@pytest.mark.parametrize("oracle_scores", [harness.ORACLE_SCORES, 7 * SMALL.length])
def test_errors_of_the_reference_are_rounding(decay, oracle_scores, monkeypatch):
    monkeypatch.setattr(harness, "ORACLE_SCORES", oracle_scores)
    errors = errors_of(peers.ours("reference"), with_decay(decay))
    assert set(errors) == {"out", "dq", "dk", "dv"} | ({"dlog_decay"} if decay != "none" else set())
    assert max(errors.values()) < FLOAT32_ERROR


@pytest.mark.parametrize("spoilt", ["out", "dq", "dk", "dv", "dlog_decay"])
def test_an_error_of_one_percent_shows(spoilt):
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.01 if spoilt == "out" else x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient if spoilt == "out" else gradient * 1.01

    def attend(*tensors):
        names = ("dq", "dk", "dv", "dlog_decay")
        tensors = [Spoil.apply(x) if name == spoilt else x for name, x in zip(names, tensors, strict=True)]
        out = decay_attention(*tensors, backend="reference")
        return Spoil.apply(out) if spoilt == "out" else out

    errors = errors_of(dataclasses.replace(peers.ours("reference"), build=lambda case, device: attend), SMALL)
    assert errors.pop(spoilt) == pytest.approx(0.01, abs=FLOAT32_ERROR)
    assert max(errors.values()) < FLOAT32_ERROR


@pytest.mark.parametrize("decay", ["scalar", "constant", "none"])
@pytest.mark.parametrize("name", ["flex", "flex-grad"])
def test_flex_computes_the_same_attention(name, decay, monkeypatch):
    from torch.nn.attention import flex_attention

    # traced as on a GPU, but evaluated densely; the refusal of gradients on a CPU is about the compiled kernel
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="aot_eager", **options))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    peer, case = peers.OTHERS[name], with_decay(decay)
    if (name, decay) == ("flex-grad", "none"):
        with pytest.raises(harness.Absent, match="same as flex"):
            peer.build(case, CPU)
        return
    errors = errors_of(peer, case)
    torch._dynamo.reset()
    assert ("dlog_decay" in errors) == (name == "flex-grad")
    if (name, decay) == ("flex-grad", "constant"):
        # through a captured prefix the rate's gradient is Σ t·dα_t, whose terms are up to T times what is left of them
        assert errors.pop("dlog_decay") < case.length * FLOAT32_ERROR
    assert max(errors.values()) < FLOAT32_ERROR


def fla_stand_in(q, k, v, g, scale=None, cu_seqlens=None, head_first=False):
    """flash-linear-attention's signature: everything (B, T, H, ·)."""
    assert (scale, cu_seqlens, head_first) == (None, None, False)
    assert all(x.is_contiguous() for x in (q, k, v, g))
    return decay_attention(q, k, v, g, backend="reference")


def fox_stand_in(q, k, v, log_fgate, *, head_first=False, seq_start=None, sm_scale=None, adaptive_threshold=None):
    """The official kernel's signature, called with heads first and without pruning."""
    assert (head_first, seq_start, sm_scale, adaptive_threshold) == (True, None, None, None)
    assert all(x.is_contiguous() for x in (q, k, v, log_fgate))
    tensors = (x.transpose(1, 2) for x in (q, k, v, log_fgate))
    return decay_attention(*tensors, backend="reference").transpose(1, 2)


def flash_stand_in(q, k, v, causal=False):
    """FlashAttention-4's signature, in a release that returns the log-sum-exp, too."""
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal).transpose(1, 2), None


@pytest.mark.parametrize(("name", "module", "function", "stand_in"), [
    ("fla", "fla.ops.forgetting_attn.parallel", "parallel_forgetting_attn", fla_stand_in),
    ("fox", "forgetting_transformer.ops.forgetting_attention", "forgetting_attention", fox_stand_in),
    ("flash_attn", "flash_attn.cute", "flash_attn_func", flash_stand_in),
])
def test_external_peers_get_their_own_layout(name, module, function, stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)  # makes the import fail also where it is installed
    with pytest.raises(harness.Absent, match="cannot be imported: ModuleNotFoundError"):
        peers.OTHERS[name].build(SMALL, CPU)
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[module], function, stand_in)
    errors = errors_of(peers.OTHERS[name], SMALL)
    assert ("dlog_decay" in errors) == (name != "flash_attn")
    assert max(errors.values()) < FLOAT32_ERROR
    if name != "flash_attn":
        with pytest.raises(harness.Absent, match="scalar decay only, not constant"):
            peers.OTHERS[name].build(with_decay("constant"), CPU)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_ours_is_held_to_the_error_budget(factor, monkeypatch):
    def planted(*tensors, backend, **options):
        out, lse = decay_attention(*tensors, backend="reference", **options)
        return (out * factor, lse) if backend == "triton" else (out, lse)

    monkeypatch.setattr(call, "decay_attention", planted)
    comparisons = harness.verify_ours(SMALL, SMALL.inputs("cpu", seed=0), "triton")
    assert {c.name for c in comparisons} == {"out", "lse", "dq", "dk", "dv", "dlog_decay"}
    assert all(c.passed for c in comparisons) == (factor == 1.0)


# --------------------------------------------------------------------------------------------------------------- clocks


def test_rounds_interleave_the_peers_and_survive_one_that_fails():
    inputs = SMALL.inputs("cpu", seed=0)
    called = []

    def spy(name: str, fails_at: int = 10**9) -> Prepared:
        calls = itertools.count()

        def attend(*tensors):
            called.append(name)
            if next(calls) == fails_at:
                raise RuntimeError("out of memory\nand a long story")
            return decay_attention(*tensors, backend="reference")

        own = dataclasses.replace(peers.ours("reference"), build=lambda case, device: attend)
        return own.prepare(SMALL, inputs)

    clock = itertools.count(1)
    timings, failed = harness.time_rounds(
        {"a": spy("a"), "b": spy("b", fails_at=2), "c": spy("c")}, 3, lambda call: (call(), float(next(clock)))[1]
    )
    # two forwards per peer and round: one timed, one whose graph the backward uses; b dies in the second round
    assert called == [*"aabbcc", *"ccb", *"aa", *"aacc"]
    assert failed == {"b": "RuntimeError: out of memory"}
    assert set(timings) == {(name, direction) for name in "ac" for direction in ("forward", "backward")}
    assert timings["a", "forward"] == [1, 9, 11]
    assert timings["a", "backward"] == [2, 10, 12]


class Device:
    """The part of torch.cuda that timing needs. It does in order what it was asked for; a clock times calls."""

    def __init__(self):
        self.asked, self.clock, self.series = [], 0.0, []

    def Event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                device.asked.append("event")
                self.at = device.clock
                device.series.append(0)

            def elapsed_time(self, later):
                return later.at - self.at

        return Event()

    def _sleep(self, cycles):
        self.asked.append(f"sleep {cycles}")

    def synchronize(self):
        self.asked.append("wait")


@pytest.fixture
def stand_in(monkeypatch):
    device = Device()
    monkeypatch.setattr(harness.torch, "cuda", device)
    return device


def test_bursts_let_the_host_get_ahead(stand_in, monkeypatch):
    """A median of as many calls as fill the time, each with a cleared cache, after a sleep that nothing waits for."""
    cache = types.SimpleNamespace(zero_=lambda: stand_in.asked.append("zero"))
    monkeypatch.setattr(harness.torch, "empty", lambda *_, **__: cache)
    took = itertools.chain([2.0] * 5 + [3.0] * 2, itertools.cycle([1.0, 9.0, 4.0]))

    def call():
        stand_in.asked.append("call")
        stand_in.clock += next(took)

    assert harness.burst_timer(0.0121)(call) == 4.0
    expected = []
    for count, cycles in ((5, 0), (2, 0), (6, harness._HEAD_START)):
        expected += ["wait", f"sleep {cycles}", *["zero", "event", "call", "event"] * count, "wait"]
    assert stand_in.asked == expected


def test_sustained_calls_fill_the_time(stand_in):
    """0.06 s of calls of 2 ms: 3 to see how long one takes, 7 to warm up, 30 that count, nothing between them."""
    took = itertools.chain([2.0] * 3, [9.0] * 7, [2.5] * 15, [1.5] * 15)

    def call():
        stand_in.series[-1] += 1
        stand_in.clock += next(took)

    assert harness.sustained_timer(0.06)(call) == 2.0
    assert stand_in.series == [3, 0, 7, 0, 30, 0]


def test_graphs_replay_several_calls(stand_in):
    """1 call before the capture, 8 in it; a call's time is an eighth of the graph's."""
    made = []

    class Graph:
        def replay(self):
            stand_in.clock += 2.0 * self.calls

    @contextlib.contextmanager
    def capture(graph, stream):
        assert stream == "current"
        before = len(made)
        yield
        graph.calls = len(made) - before

    stand_in.CUDAGraph, stand_in.graph, stand_in.current_stream = Graph, capture, lambda: "current"
    assert harness.captured_timer(0.06)(lambda: made.append(None)) == 2.0
    assert len(made) == 9


# ------------------------------------------------------------------------------------------------------------- the runs


@pytest.fixture
def timed(monkeypatch):
    """Runs on the CPU as on a GPU, by a counting clock, cuDNN's place taken by what runs here."""
    clock = itertools.count(1)

    def timer(call):
        call()
        return float(next(clock))

    monkeypatch.setattr(harness, "machine", lambda: ("cpu", True))
    monkeypatch.setattr(attention, "REGIMES", dict.fromkeys(attention.REGIMES, (lambda seconds: timer, 0.3)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cudnn = peers.Peer("cudnn", "stand-in", "BHTD", "none", peers.sdpa(SDPBackend.MATH))
    monkeypatch.setitem(peers.OTHERS, "cudnn", cudnn)


def run(tmp_path, *more: str) -> tuple[int, dict]:
    output = tmp_path / "new" / "results.json"
    status = harness.main(attention, [*ARGUMENTS, *more, "--output", str(output)])
    return status, json.loads(output.read_text(), parse_constant=lambda name: pytest.fail(f"not strict JSON: {name}"))


@pytest.mark.usefixtures("timed")
def test_a_run_leaves_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "forgetting_transformer", None)  # absent, whatever is installed
    status, read = run(tmp_path, "--peers", "fox", "cudnn", "--decays", "scalar", "none", "constant")
    assert status == 0
    keys = {"gpu", "driver", "torch", "triton", "cudnn", "python", "commit", "dirty", "command", "date"}
    assert keys <= set(read)
    assert str(tmp_path) not in json.dumps(read)
    assert (read["regime"], read["captured"], read["rounds"]) == ("sustained", False, 2)
    assert [(row["batch"], row["length"], row["direction"]) for row in read["rows"]] == [
        (2, 20, "forward"), (2, 20, "backward"), (1, 40, "forward"), (1, 40, "backward"),
    ]
    for row in read["rows"]:
        assert list(row["kernels"]) == ["cudnn", "reference", "reference, no decay", "reference, constant"]
        for figures in row["kernels"].values():
            assert {"ms", "ms_range", "tflops", "ratio_to_cudnn"} <= set(figures)
            assert max(figures["relative_error"].values()) < 1e-5
    assert {(entry["kernel"], entry["kind"], entry["ours"]) for entry in read["missing"]} == {("fox", "absent", False)}
    assert len(read["checks"]) == 2 * 3
    assert "/cuDNN" in capsys.readouterr().out


def test_ratios_are_medians_of_rounds():
    rounds = {"cudnn": [4.0, 2.0, 3.0], "ours": [2.0, 2.0, 1.0]}
    timings = {(name, way): times for name, times in rounds.items() for way in ("forward", "backward")}
    errors = {name: {"out": 1e-3} for name in rounds}
    forward, backward = attention.rows(SMALL, timings, errors)
    ours = forward["kernels"]["ours"]
    assert (ours["ms"], ours["ms_range"], ours["ratio_to_cudnn"]) == (2.0, [1.0, 2.0], 2.0)  # of 2, 1, 3
    assert backward["kernels"]["ours"]["tflops"] == pytest.approx(SMALL.tflops("backward", 2.0))
    alone = {key: times for key, times in timings.items() if key[0] == "ours"}
    assert next(attention.rows(SMALL, alone, errors))["kernels"]["ours"]["ratio_to_cudnn"] is None


@pytest.mark.usefixtures("timed")
def test_a_wrong_kernel_of_ours_gets_no_speed(tmp_path, monkeypatch, capsys):
    verify, judged = harness.verify_ours, []

    def plant(case, inputs, backend, heads):
        judged.append(heads)
        if case.decay == "none":
            return [Comparison("dk", (0, 0), 1.0, 0.1, 0.5, "frobenius", "wrong")]
        return verify(case, inputs, backend, heads)

    def too_big(case, device):
        raise torch.OutOfMemoryError("too big")

    monkeypatch.setattr(harness, "verify_ours", plant)
    monkeypatch.setattr(attention, "_TWO_HEADS_UP_TO", 20)
    monkeypatch.setitem(peers.OTHERS, "fla", peers.Peer("fla", "", "BTHD", "learned", too_big))
    status, read = run(tmp_path, "--peers", "cudnn", "fla")
    assert status == 1
    assert {(entry["kernel"], entry["kind"], entry["reason"]) for entry in read["missing"]} == {
        ("reference, no decay", "wrong", "dk outside the error budget: no speed is reported"),
        ("fla", "failed", "OutOfMemoryError: too big"),
    }
    assert all(list(row["kernels"]) == ["cudnn", "reference"] for row in read["rows"])
    assert judged == [[(0, 0), (1, 1)]] * 2 + [[(0, 1)]] * 2  # long heads one at a time
    assert "VIOLATED" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "message"), [
    (["--shapes", "1,2,3"], "expected B,T,H,D or B,T,H,D,D_v, got 1,2,3"),
    (["--shapes", "1,2,0,3"], "positive integer, got 0"),
    (["--decays", "linear"], "invalid choice: 'linear'"),
    (["--seconds", "0"], "expected a positive number, got 0"),
    (["--dtype", "bfloat16"], "expected float16 or float32, got bfloat16"),
    (["--before", "nowhere"], "nowhere holds no decayattn/__init__.py"),
])
def test_bad_options_are_refused(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        harness.main(attention, argv)
    assert message in capsys.readouterr().err


def test_the_script_checks_interpreted_kernels_without_a_gpu(interpreter):
    """Run as a user runs it, on a machine whose GPU is hidden; it sets TRITON_INTERPRET itself."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    script = [sys.executable, str(EXPERIMENTS / "benchmarks/attention.py"), "--shapes", "1,33,1,16"]
    run = subprocess.run(
        script, env=environment | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=300, check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "triton, no decay: within the error budget" in run.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels with CUDA events: needs a GPU")
@pytest.mark.parametrize("regime", attention.REGIMES)
def test_a_small_run_on_the_gpu(regime, tmp_path, monkeypatch):
    monkeypatch.undo()  # filling fresh memory with NaN is the suite's, and would be timed
    output = tmp_path / "results.json"
    argv = ["--shapes", "2,512,4,64", "--rounds", "2", "--seconds", "0.02", "--backends", "triton", "--peers", "cudnn"]
    status = harness.main(attention, [*argv, "--regime", regime, "--output", str(output)])
    read = json.loads(output.read_text())
    assert status == 0, read["missing"]
    for row in read["rows"]:
        assert set(row["kernels"]) == {"cudnn", "triton", "triton, no decay"}
        assert row["kernels"]["triton"]["ms"] > 0


@pytest.mark.usefixtures("timed")
def test_another_version_is_measured_in_the_same_rounds(tmp_path):
    """A copy that gives twice what it should: an error of 1, reported and not judged, and nothing of it is ours."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "decayattn", tree / "decayattn", ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "decayattn/__init__.py").open("a") as file:
        file.write("\n_ours = decay_attention\ndef decay_attention(*a, **b): return 2 * _ours(*a, **b)\n")
    status, read = run(tmp_path, "--before", str(tree), "--before-commit", "abc", "--decays", "scalar", "--peers")
    assert (status, read["before"], read["missing"]) == (0, "abc", [])
    for row in read["rows"]:
        ours, before = row["kernels"]["reference"], row["kernels"]["reference before"]
        assert ours["relative_error"]["out"] < 1e-5 < 0.9 < before["relative_error"]["out"]
    assert {entry["kernel"] for entry in read["checks"]} == {"reference"}
