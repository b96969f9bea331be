"""Base of the benchmarks: inputs, errors, clocks, options; and every benchmark end to end."""

import contextlib
import dataclasses
import itertools
import shlex
import sys
import types
from argparse import Namespace

import pytest
import torch
from benchmark_runs import hide_gpu, run
from benchmarks import attention, context, fox, harness, overhead, peers, sequences, skipping, training
from benchmarks.harness import Case
from processes import run_python
from repository_files import EXPERIMENTS, ROOT
from studies import length_extrapolation

from decayattn import decay_attention

SMALL = Case(batch=2, heads=3, length=40, head_dim=8, dtype="float32", decay="scalar", mean_log_decay=-0.1)
# rounding of a float32 evaluation against float64, relative: far below any mistake, far above eps of 40 tokens
FLOAT32_ERROR = 40 * torch.finfo(torch.float32).eps
DECAYS = ("scalar", "constant", "none")


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


@pytest.mark.parametrize("decay", DECAYS)
def test_inputs_fit_decay_attention(decay):
    case = dataclasses.replace(SMALL, decay=decay)
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
    grouped = dataclasses.replace(case, kv_heads=1).inputs("cpu", seed=1)
    assert [grouped[name].shape[2] for name in ("q", "k", "v", "grad_out")] == [3, 1, 1, 3]


@pytest.mark.parametrize(("rates", "decay"), [("none to speak of", "scalar"), ("alibi", "constant")])
def test_rates_that_are_not_drawn(rates, decay):
    log_decay = dataclasses.replace(SMALL, heads=4, decay=decay, rates=rates).inputs("cpu", seed=1)["log_decay"]
    if rates == "alibi":
        assert log_decay.tolist() == [-0.25, -(0.25**2), -(0.25**3), -(0.25**4)]
    else:
        assert log_decay.shape == (2, 40, 4)
        assert -1e-5 < float(log_decay.min()) <= float(log_decay.max()) < 0


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("oracle_scores", [harness.ORACLE_SCORES, 7 * SMALL.length])
def test_errors_of_the_reference_are_rounding(decay, oracle_scores, monkeypatch):
    monkeypatch.setattr(harness, "ORACLE_SCORES", oracle_scores)
    errors = errors_of(peers.ours("reference"), dataclasses.replace(SMALL, decay=decay))
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


def test_rounds_interleave_calls_and_survive_a_failure():
    called, clock = [], itertools.count(1)

    def parts(name, fails_at=10**9):
        for way in ("forward", "backward"):
            def call(way=way):
                called.append(name + way[0])
                if called.count(name + way[0]) == fails_at:
                    raise RuntimeError("out of memory\nand a long story")
            yield way, call

    calls = {"a": lambda: parts("a"), "b": lambda: parts("b", fails_at=2), "c": lambda: parts("c")}
    run = harness.Run("x.py", Namespace(output=None, rounds=3), [], None)
    where = {name: {"call": name} for name in calls}
    timings = run.time(calls, lambda call: (call(), float(next(clock)))[1], where=where)
    assert " ".join(called) == "af ab bf bb cf cb cf cb bf af ab cf cb af ab"  # b dies in the second round
    assert [(one["call"], one["reason"]) for one in run.report["missing"]] == [("b", "RuntimeError: out of memory")]
    assert set(timings) == set(itertools.product("ac", ("forward", "backward")))
    assert timings["a", "forward"] == [1, 9, 13]
    assert timings["a", "backward"] == [2, 10, 14]
    called.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        run.time(calls, lambda call: call() or 1.0, 2)


@pytest.fixture
def stand_in(monkeypatch):
    """The part of torch.cuda that timing needs. It executes in order; a clock times calls."""
    device = types.SimpleNamespace(asked=[], clock=0.0, series=[])
    device._sleep = lambda cycles: device.asked.append(f"sleep {cycles}")
    device.synchronize = lambda: device.asked.append("wait")

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            device.asked.append("event")
            self.at = device.clock
            device.series.append(0)

        def elapsed_time(self, later):
            return later.at - self.at

    device.Event = Event
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


TINY = {
    overhead: "--length 8 --heads 1 --head-dims 8 --rounds 2 --calls 2 --peers fox",
    sequences: "--generate-stream 200",
    skipping: "--studies pruning --pruning 600 --heads 1",
    training: "--layers 1 --width 16 --head-dims 8 --lengths 20 --tokens 40 --backend triton",
    fox: "",
}
SAYS = {
    overhead: ["decayattn reference", "one_thread_us", "fox: absent: cannot be imported"],
    sequences: ["packed, packed: 3 sequences", "decay none, paged: within the error budget", "ratio_to_recompute"],
    skipping: ["visits 0.", "skipping: within the error budget"],
    training: [
        *(f"eager, {name}: within" for name in ("ours", "ours-whole", "ours-rotary", "cudnn", "cudnn-rotary")),
        *(f"{name}: absent: needs a GPU" for name in ("flex", "fla", "fox", "fox-pruned")),
    ],
    fox: ["theirs: absent: needs a GPU", "ours: within the error budget", "ours, captured: within the error budget"],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on a CPU: needs Triton's interpreter")
@pytest.mark.parametrize("module", TINY, ids=lambda module: module.__name__)
def test_benchmarks_check_kernels_without_a_gpu(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "forgetting_transformer", None)  # absent, whatever is installed
    status, read = run(module, tmp_path, *shlex.split(TINY[module]))
    assert status == 0
    assert {"gpu", "torch", "triton", "python", "commit", "dirty", "command", "date", "method"} <= read.keys()
    printed = capsys.readouterr().out
    assert all(said in printed for said in SAYS[module]), printed
    if module is overhead:
        low, high = read["rows"][0]["host_us_range"]
        assert 0 < low <= read["rows"][0]["host_us"] <= high
    if module is sequences:
        assert (read["missing"], read["packed"], read["decode"]) == ([], [], [])
        assert [check["section"] for check in read["checks"]] == ["packed"] * 2 + ["decode"] * 6 + ["generate"]
        assert [row["mode"] for row in read["generate"]] == ["recompute", "cache", "captured", "evict"]
        assert max(read["stream"]["after"]) <= read["stream"]["held_bound"] < 200
        assert len(read["stream"]["after"]) == 200 // 16


@pytest.mark.slow
def test_attention_script_interprets_kernels_by_itself(interpreter):
    """Run as a user runs it, on a machine with a hidden GPU; it sets TRITON_INTERPRET itself."""
    printed = run_python(
        EXPERIMENTS / "benchmarks/attention.py", "--shapes", "1,9,1,16", "--decays", "none",
        without="TRITON_INTERPRET", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT),
    )
    assert "triton, no decay: within the error budget" in printed


@pytest.mark.parametrize(("module", "argv", "message"), [
    (attention, "--shapes 1,2,3", "expected B,T,H,D or B,T,H,D,D_v, got 1,2,3"),
    (attention, "--shapes 1,2,0,3", "positive integer, got 0"),
    (attention, "--decays linear", "invalid choice: 'linear'"),
    (attention, "--seconds 0", "expected a positive number, got 0"),
    (attention, "--dtype bfloat16", "expected float16 or float32, got bfloat16"),
    (attention, "--before nowhere", "nowhere holds no decayattn/__init__.py"),
    (sequences, "--what nothing", "invalid choice: 'nothing'"),
    (context, "--decays fast", "expected none, alibi or a number, got 'fast'"),
    (training, "--head-dims 7", "expected even divisors of the width, 32, got 7"),
    (training, "--variants theirs", "--variants: expected all, or some of ours"),
    (length_extrapolation, "--lengths 64", "--crops: expected as many numbers as --lengths"),
    (length_extrapolation, "--lengths 60 256", "--lengths: expected multiples of --context"),
    (length_extrapolation, "--heads 3", "--heads: expected a divisor of the width"),
    (length_extrapolation, "--minutes 0", "expected a positive number, got 0"),
    (length_extrapolation, "--schemes alibi2", "invalid choice: 'alibi2'"),
])
def test_bad_options_are_refused(module, argv, message, capsys, monkeypatch):
    hide_gpu(monkeypatch)
    with pytest.raises(SystemExit):
        harness.parse(module, shlex.split(argv))
    assert message in capsys.readouterr().err
