"""The benchmark: its arithmetic, its peers' layouts, refusals and report, on any machine; a real run on a GPU."""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import types
from pathlib import Path

import benchmark_attention
import pytest
import torch
from attention_benchmark import figure, report
from attention_benchmark.launches import launches_in_trace
from repository_files import EXPERIMENTS
from shared import checks, peers, provenance, timing
from shared.calls import Prepared, prepare
from shared.cases import Case, cases, random_inputs
from shared.report import write
from torch.nn.attention import SDPBackend

from decayattn import decay_attention
from decayattn.testing import Comparison, call

CPU = torch.device("cpu")
SMALL = Case(batch=2, heads=3, length=40, head_dim=8, dtype="float32", decay="scalar", mean_log_decay=-0.1)
# rounding of a float32 evaluation against float64, relative: far below any mistake, far above eps of 40 tokens
FLOAT32_ERROR = 40 * torch.finfo(torch.float32).eps


def with_decay(decay: str) -> Case:
    return Case(**{**vars(SMALL), "decay": decay})


def reference_peer(**changes) -> peers.Peer:
    return peers.Peer(**{**vars(peers.ours("reference")), **changes})


# ---------------------------------------------------------------------------------------------------------------- cases


def test_the_default_shapes_hold_the_same_tokens_at_every_length():
    made = cases([64, 128], [2048, 8192, 32768], 32768, 16, "bfloat16", "none", 0.0)
    assert [(c.batch, c.length, c.head_dim) for c in made] == [
        (16, 2048, 64), (4, 8192, 64), (1, 32768, 64), (16, 2048, 128), (4, 8192, 128), (1, 32768, 128),
    ]
    assert cases([64], [100], 10, 1, "float32", "none", 0)[0].batch == 1


def test_work_is_that_of_the_matrix_products_over_half_of_the_pairs():
    # two products forward, five backward, 2·D operations each per visible pair
    pairs = SMALL.batch * SMALL.heads * SMALL.length**2 / 2
    assert SMALL.flops("forward") == 2 * 2 * SMALL.head_dim * pairs
    assert SMALL.flops("backward") == 5 * 2 * SMALL.head_dim * pairs
    assert dataclasses.replace(SMALL, causal=False).flops("backward") == 2 * SMALL.flops("backward")
    wide = dataclasses.replace(SMALL, head_dim=192, value_dim=128)
    assert wide.flops("forward") == 2 * (192 + 128) * pairs
    assert wide.flops("backward") == 2 * (3 * 192 + 2 * 128) * pairs
    # B4 H16 T8192 D128: 550e9 operations, so one millisecond is 550 TFLOP/s
    big = Case(4, 16, 8192, 128, "bfloat16", "scalar", -0.01)
    assert big.tflops("forward", 1.0) == pytest.approx(4 * 4 * 16 * 8192**2 * 128 / 2 / 1e9)
    assert big.tflops("forward", 2.0) == big.tflops("forward", 1.0) / 2


@pytest.mark.parametrize("decay", ["scalar", "constant", "none"])
def test_inputs_are_what_decay_attention_takes(decay):
    case = with_decay(decay)
    inputs = random_inputs(case, "cpu", seed=1)
    again = random_inputs(case, "cpu", seed=1)
    assert all(torch.equal(inputs[name], again[name]) for name in inputs)
    assert {x.shape for name, x in inputs.items() if name != "log_decay"} == {(2, 40, 3, 8)}
    if decay == "none":
        assert "log_decay" not in inputs
        return
    log_decay = inputs["log_decay"]
    assert log_decay.shape == ((2, 40, 3) if decay == "scalar" else (3,))
    assert log_decay.dtype == torch.float32
    assert log_decay.max() < 0
    assert log_decay.min() > 2 * case.mean_log_decay


def test_inputs_with_large_logits():
    case = dataclasses.replace(SMALL, length=400, deviation=16.0)
    inputs, ordinary = (random_inputs(c, "cpu", seed=1) for c in (case, dataclasses.replace(case, deviation=1.0)))
    logits = torch.einsum("bihd,bjhd->bhij", inputs["q"], inputs["k"]) / case.head_dim**0.5
    assert logits.std().item() == pytest.approx(16, rel=0.1)
    assert torch.equal(inputs["q"], 4 * ordinary["q"])
    assert torch.equal(inputs["v"], ordinary["v"])
    assert str(case).endswith("decay scalar, logits of deviation 16")


# ---------------------------------------------------------------------------------------------------------------- peers


def errors_of(peer: peers.Peer, case: Case) -> dict[str, float]:
    inputs = random_inputs(case, "cpu", seed=0)
    return checks.relative_errors(
        case, prepare(peer, case, inputs), checks.oracle(case, inputs, peer.decay != "none")
    )


@pytest.mark.parametrize("decay", ["scalar", "constant", "none"])
@pytest.mark.parametrize("oracle_scores", [checks.ORACLE_SCORES, 7 * SMALL.length])
def test_errors_of_the_reference_are_rounding(decay, oracle_scores, monkeypatch):
    monkeypatch.setattr(checks, "ORACLE_SCORES", oracle_scores)
    case = with_decay(decay)
    assert checks.oracle_rows(case) == min(case.length, oracle_scores // case.length)
    errors = errors_of(peers.ours("reference"), case)
    assert set(errors) == {"out", "dq", "dk", "dv"} | ({"dlog_decay"} if decay != "none" else set())
    assert max(errors.values()) < FLOAT32_ERROR


@pytest.mark.parametrize("spoilt", ["out", "dq", "dk", "dv", "dlog_decay"])
def test_an_error_of_one_percent_is_seen_as_one_percent(spoilt):
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

    errors = errors_of(reference_peer(build=lambda case, device: attend), SMALL)
    assert errors.pop(spoilt) == pytest.approx(0.01, abs=FLOAT32_ERROR)
    assert max(errors.values()) < FLOAT32_ERROR


@pytest.mark.parametrize("peer", [
    peers.Peer("math", "SDPA", "BHTD", "none", peers.sdpa(SDPBackend.MATH)), peers.ours("reference", decay=False),
], ids=lambda peer: peer.name)
def test_a_peer_without_decay_is_measured_against_attention_without_decay(peer):
    errors = errors_of(peer, SMALL)
    assert set(errors) == {"out", "dq", "dk", "dv"}
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
        with pytest.raises(peers.Absent, match="same as flex"):
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


@pytest.mark.parametrize(
    ("name", "module", "function", "stand_in"),
    [
        ("fla", "fla.ops.forgetting_attn.parallel", "parallel_forgetting_attn", fla_stand_in),
        ("fox", "forgetting_transformer.ops.forgetting_attention", "forgetting_attention", fox_stand_in),
    ],
)
def test_external_peers_get_their_own_layout(name, module, function, stand_in, monkeypatch):
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[module], function, stand_in)
    errors = errors_of(peers.OTHERS[name], SMALL)
    assert "dlog_decay" in errors
    assert max(errors.values()) < FLOAT32_ERROR
    with pytest.raises(peers.Absent, match="scalar decay only, not constant"):
        peers.OTHERS[name].build(with_decay("constant"), CPU)


@pytest.mark.parametrize("name", ["fla", "fox"])
def test_a_peer_that_cannot_be_imported_says_so(name, monkeypatch):
    for package in ("fla", "forgetting_transformer"):
        monkeypatch.setitem(sys.modules, package, None)  # makes the import fail also where the package is installed
    with pytest.raises(peers.Absent, match="cannot be imported: ModuleNotFoundError"):
        peers.OTHERS[name].build(SMALL, CPU)


# ------------------------------------------------------------------------------------------------- rounds and launches


def test_rounds_interleave_the_peers_and_a_failing_one_leaves_the_others_alone():
    inputs = random_inputs(SMALL, "cpu", seed=0)
    called = []

    def spy(name: str, fails_at: int = 10**9) -> Prepared:
        calls = itertools.count()

        def attend(*tensors):
            called.append(name)
            if next(calls) == fails_at:
                raise RuntimeError("out of memory\nand a long story")
            return decay_attention(*tensors, backend="reference")

        return prepare(reference_peer(name=name, build=lambda case, device: attend), SMALL, inputs)

    clock = itertools.count(1)

    def timer(call):
        call()
        return float(next(clock))

    timings, failed = timing.time_rounds({"a": spy("a"), "b": spy("b", fails_at=2), "c": spy("c")}, 3, timer)
    # two forwards per peer and round: one timed, one whose graph the backward uses; b dies in the second round
    assert called == [*"aabbcc", *"ccb", *"aa", *"aacc"]
    assert failed == {"b": "RuntimeError: out of memory"}
    assert set(timings) == {(name, direction) for name in "ac" for direction in ("forward", "backward")}
    assert timings["a", "forward"].rounds == [1, 9, 11]
    assert timings["a", "backward"].rounds == [2, 10, 12]
    assert timings["c", "backward"].median == statistics.median([6, 8, 14])


def test_only_what_runs_on_the_device_counts_as_a_launch():
    def event(cat, name, ts, ph="X"):
        return {"cat": cat, "name": name, "ts": ts, "ph": ph}

    trace = {
        "traceEvents": [
            event("kernel", "_backward", 30), event("gpu_memset", "Memset (Device)", 20), event("kernel", "_delta", 10),
            event("gpu_memcpy", "Memcpy DtoD", 40), event("cpu_op", "aten::empty", 5),
            event("cuda_runtime", "cudaLaunchKernel", 6), event("gpu_user_annotation", "step", 7),
            event("ac2g", "ac2g", 30, ph="f"), {"ph": "M", "name": "process_name"},
        ]
    }
    assert launches_in_trace(trace) == ["_delta", "Memset (Device)", "_backward", "Memcpy DtoD"]


# --------------------------------------------------------------------------------------------------------------- report


def synthetic_report() -> dict:
    """Rows as a GPU run makes them, with made-up times."""
    rows = []
    speeds = {"cudnn": (400, 330), "flex": (300, 250), "fox": (220, 150), "decayattn triton": (380, 300)}
    for case in cases([64, 128], [2048, 8192, 32768], 32768, 16, "bfloat16", "scalar", -0.01):
        timings = {}
        for (name, pair), (direction, at) in itertools.product(speeds.items(), (("forward", 0), ("backward", 1))):
            tflops = pair[at] * (0.8 + 0.1 * (case.length > 2048) + 0.2 * (case.head_dim == 128))
            ms = case.flops(direction) / tflops / 1e9
            timings[name, direction] = timing.Timing([ms * f for f in (1.0, 0.97, 1.02, 1.05, 0.99)])
        errors = {name: {"out": 2e-3, "dq": float("nan")} for name in speeds}
        launches = {("decayattn triton", "forward"): ["_prefix", "_forward"]}
        rows += report.rows(case, timings, errors, launches)
    labels = {name: peer.label for name, peer in peers.OTHERS.items()} | {"decayattn triton": "decayattn (triton)"}
    return {"gpu": "a GPU", "torch": "2", "triton": "3", "peers": labels, "rows": rows}


def test_rows_have_median_range_speed_and_ratio():
    timings = {
        ("cudnn", "forward"): timing.Timing([2.0, 4.0, 3.0]),
        ("mine", "forward"): timing.Timing([1.5, 1.0, 9.0]),
    }
    errors = {"cudnn": {"out": 1.0}, "mine": {"out": 2.0}}
    baseline, mine = report.rows(SMALL, timings, errors, {("mine", "forward"): ["_a", "_b"]})
    assert (mine["ms"], mine["ms_range"], mine["ratio_to_cudnn"]) == (1.5, [1.0, 9.0], 2.0)
    assert mine["tflops"] == SMALL.tflops("forward", 1.5)
    assert mine["tflops_range"] == [SMALL.tflops("forward", 9.0), SMALL.tflops("forward", 1.0)]
    assert (mine["length"], mine["decay"], mine["peer"], mine["relative_error"]) == (40, "scalar", "mine", {"out": 2.0})
    assert mine["launches"] == ["_a", "_b"]
    assert "launches" not in baseline
    assert baseline["ratio_to_cudnn"] == 1.0
    (alone,) = report.rows(SMALL, {("mine", "forward"): timings["mine", "forward"]}, errors, {})
    assert alone["ratio_to_cudnn"] is None


def test_the_cost_of_a_decay_is_that_of_the_same_rounds():
    name, bare = (peers.ours("triton", decay).name for decay in (True, False))
    rounds = {name: [3.0, 2.2, 9.0], bare: [2.0, 2.0, 3.0]}
    timings = {(who, way): timing.Timing(times) for who, times in rounds.items() for way in ("forward", "backward")}
    rows = report.rows(SMALL, timings, {who: {"out": 1.0} for who in rounds}, {})
    assert [row.get("time_over_no_decay") for row in rows] == [1.5, 1.5, None, None]
    assert f"{name}: the decay costs 50.0% forward, 50.0% backward" in report.table(rows)


def test_table_has_an_aligned_line_per_peer_and_names_the_worst_error():
    rows = [row for row in synthetic_report()["rows"] if (row["length"], row["head_dim"]) == (8192, 64)]
    lines = report.table(rows).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["cudnn", "flex", "fox", "decayattn"]
    assert len({line.index("nan (dq)") for line in lines[2:]}) == 1
    assert " 342 " in lines[-1]  # 380 · 0.9 TFLOP/s
    for row in rows:
        row["ratio_to_cudnn"] = None
    assert "–" in report.table(rows).splitlines()[-1].split()


def test_json_is_strict_and_complete(tmp_path):
    path = tmp_path / "new folder" / "results.json"
    write(synthetic_report(), path)
    read = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"not strict JSON: {name}"))
    assert len(read["rows"]) == 6 * 4 * 2
    assert read["rows"][0]["relative_error"] == {"out": 2e-3, "dq": "nan"}


def test_figure_shows_every_row(tmp_path):
    data = synthetic_report()
    drawn = figure.draw(data)
    titles = ["forward, head dimension 64", "backward, head dimension 64"]
    titles += [title.replace("64", "128") for title in titles]
    assert [panel.get_title() for panel in drawn.axes] == titles
    for panel in drawn.axes:
        direction, head_dim = panel.get_title().split(", head dimension ")
        shown = {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in panel.containers}
        for name in ("cudnn", "flex", "fox", "decayattn triton"):
            assert shown[name] == [
                [row["length"], row["tflops"]]
                for row in data["rows"]
                if (row["peer"], row["direction"], row["head_dim"]) == (name, direction, int(head_dim))
            ]
    drawn.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="has no rows"):
        figure.draw({**data, "rows": []})


# ------------------------------------------------------------------------------------------------------------ the timer


class Device:
    """A device that stands in for torch.cuda: it does in order what it was asked for, at times that a test reads."""

    def __init__(self):
        self.asked, self.clock = [], 0.0

    def Event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                device.asked.append("event")
                self.at = device.clock

            def elapsed_time(self, later):
                return later.at - self.at

        return Event()

    def _sleep(self, cycles):
        self.asked.append(f"sleep {cycles}")

    def synchronize(self):
        self.asked.append("wait")


def test_the_timer_lets_the_host_get_ahead(monkeypatch):
    """A median of as many calls as fill the time, each with a cleared cache, behind a sleep that nothing waits for."""
    device = Device()
    monkeypatch.setattr(timing.torch, "cuda", device)
    cache = types.SimpleNamespace(zero_=lambda: device.asked.append("zero"))
    monkeypatch.setattr(timing.torch, "empty", lambda *_, **__: cache)
    took = itertools.chain([2.0] * 5 + [3.0] * 2, itertools.cycle([1.0, 9.0, 4.0]))

    def call():
        device.asked.append("call")
        device.clock += next(took)

    assert timing.cuda_timer(warmup=4, duration=6)(call) == 4.0
    expected = []
    for count, cycles in ((5, 0), (2, 0), (3, timing._HEAD_START)):
        expected += ["wait", f"sleep {cycles}", *["zero", "event", "call", "event"] * count, "wait"]
    assert device.asked == expected


# ------------------------------------------------------------------------------------------------------------- the runs


@pytest.fixture
def without_gpu(monkeypatch):
    """A counting clock for the CUDA timer, one launch per call."""
    clock = itertools.count(1)
    monkeypatch.setattr(benchmark_attention, "cuda_timer", lambda **_: lambda call: (call(), float(next(clock)))[1])
    monkeypatch.setattr(benchmark_attention, "count_launches", lambda call: ["_kernel"] if call() is not None else [])


def run_benchmark(chosen: list[peers.Peer]) -> dict:
    options = argparse.Namespace(seed=0, rounds=2, round_ms=1.0)
    result = {"rows": [], "missing": [], "checks": []}
    benchmark_attention.benchmark(SMALL, chosen, options, result, "cpu")
    return result


def failing_build(case: Case, device: torch.device) -> peers.Attend:
    raise torch.OutOfMemoryError("too big")


def absent_build(case: Case, device: torch.device) -> peers.Attend:
    raise peers.Absent("not installed")


@pytest.mark.usefixtures("without_gpu")
def test_a_case_measures_what_it_can_and_lists_what_it_cannot(capsys):
    cudnn = peers.Peer("cudnn", "stand-in", "BHTD", "none", peers.sdpa(SDPBackend.MATH))
    broken = peers.Peer("broken", "", "BHTD", "none", failing_build)
    absent = peers.Peer("absent", "", "BHTD", "none", absent_build)
    result = run_benchmark([cudnn, broken, absent, peers.ours("reference")])
    measured = [(row["peer"], row["direction"], row.get("launches")) for row in result["rows"]]
    assert measured == [
        ("cudnn", "forward", None), ("cudnn", "backward", None),
        ("decayattn reference", "forward", ["_kernel"]), ("decayattn reference", "backward", ["_kernel"]),
    ]
    assert [(entry["peer"], entry["kind"], entry["reason"], entry["ours"]) for entry in result["missing"]] == [
        ("broken", "failed", "OutOfMemoryError: too big", False), ("absent", "absent", "not installed", False),
    ]
    assert result["checks"][0]["peer"] == "decayattn reference"
    printed = capsys.readouterr().out
    assert "broken: failed: OutOfMemoryError: too big" in printed
    assert "decayattn reference: 1 launches backward: _kernel" in printed


@pytest.mark.usefixtures("without_gpu")
def test_a_wrong_kernel_of_ours_gets_no_speed(monkeypatch, capsys):
    wrong = [Comparison("dk", (0, 0), 1.0, 0.1, 0.5, "frobenius", "wrong")]
    monkeypatch.setattr(checks, "verify_ours", lambda *_: wrong)
    result = run_benchmark([peers.ours("reference")])
    assert result["rows"] == []
    assert [(entry["kind"], entry["ours"]) for entry in result["missing"]] == [("wrong", True)]
    assert "VIOLATED" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark_attention.main(["--backends", "reference", "--lengths", "8", "--head-dims", "8"]) == 1


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(("decay", "causal"), [("scalar", True), ("scalar", False), ("none", True)])
def test_a_run_leaves_json_and_plot(decay, causal, tmp_path, capsys):
    output, plot = tmp_path / "new" / "results.json", tmp_path / "other" / "results.png"
    argv = ["--lengths", "8", "16", "--head-dims", "8", "--tokens", "16", "--heads", "2", "--dtype", "float32"]
    argv += ["--backends", "reference", "--peers", "fox", "--decay", decay]
    argv += ["--output", str(output), "--plot", str(plot), *["--not-causal"] * (not causal)]
    options = benchmark_attention.parse(argv, cuda=True)
    assert options.not_causal != causal
    measured = cases([8], [8, 16], 16, 2, "float32", decay, -0.01, causal)
    assert benchmark_attention.run(measured, options, argv, "cpu") == 0
    read = json.loads(output.read_text())
    assert [(row["batch"], row["length"], row["direction"]) for row in read["rows"]] == [
        (2, 8, "forward"), (2, 8, "backward"), (1, 16, "forward"), (1, 16, "backward"),
    ]
    assert {row["causal"] for row in read["rows"]} == {causal}
    assert {entry["peer"] for entry in read["missing"]} == {"fox"}
    assert {"gpu", "driver", "torch", "triton", "cudnn", "python", "commit", "dirty", "command", "date"} <= set(read)
    assert str(tmp_path) not in output.read_text()
    assert ("decay" in read["peers"]["fox"]) == (decay != "none")
    assert plot.stat().st_size > 10_000
    assert "decayattn reference" in capsys.readouterr().out


@pytest.mark.parametrize("decay", ["scalar", "constant", "none"])
def test_peers_are_the_asked_ones_with_the_baseline_first(decay):
    options = benchmark_attention.parse(
        ["--peers", "fox", "flash", "cudnn", "fox", "--backends", "auto", "reference"], cuda=True
    )
    chosen = benchmark_attention.choose_peers(options, with_decay(decay), "cpu")
    # on a CPU "auto" is the reference, which is then asked for twice and measured once
    assert [peer.name for peer in chosen] == ["cudnn", "fox", "flash", "decayattn reference"]


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_ours_is_held_to_the_error_budget(factor, monkeypatch):
    def planted(*tensors, backend, **options):
        out, lse = decay_attention(*tensors, backend="reference", **options)
        return (out * factor, lse) if backend == "triton" else (out, lse)

    monkeypatch.setattr(call, "decay_attention", planted)
    comparisons = checks.verify_ours(SMALL, random_inputs(SMALL, "cpu", seed=0), "triton")
    assert {c.name for c in comparisons} == {"out", "lse", "dq", "dk", "dv", "dlog_decay"}
    assert all(c.passed for c in comparisons) == (factor == 1.0)


@pytest.mark.parametrize(
    ("argv", "cuda", "message"),
    [
        (["--lengths", "0"], True, "positive integer, got 0"),
        (["--decay", "linear"], True, "invalid choice: 'linear'"),
        (["--peers", "nobody"], True, "invalid choice: 'nobody'"),
        (["--dtype", "bfloat16"], False, "expected float16 or float32, got bfloat16"),
        (["--output", "x.json"], False, "no GPU here"),
    ],
)
def test_bad_options_are_refused(argv, cuda, message, capsys):
    with pytest.raises(SystemExit):
        benchmark_attention.parse(argv, cuda)
    assert message in capsys.readouterr().err


def test_defaults_are_the_machine_s():
    gpu, cpu = (benchmark_attention.parse([], cuda) for cuda in (True, False))
    assert (gpu.lengths, gpu.dtype, gpu.backends) == ([2048, 8192, 32768], "bfloat16", ["auto"])
    assert gpu.output.is_relative_to(provenance.ROOT / "results")
    assert gpu.plot == gpu.output.with_suffix(".png")
    assert benchmark_attention.parse(["--output", "a/b.json"], cuda=True).plot == Path("a/b.png")
    assert (cpu.dtype, cpu.backends, cpu.output, cpu.plot) == ("float32", ["triton"], None, None)


def test_the_script_checks_the_interpreted_kernels_where_there_is_no_gpu(interpreter):
    """As a user runs it, on a machine whose GPU is hidden; it sets TRITON_INTERPRET itself."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(EXPERIMENTS / "benchmark_attention.py"), "--head-dims", "16", "--lengths", "33"],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300, check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "backend triton" in run.stdout
    assert "all within the error budget" in run.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels with CUDA events: needs a GPU")
def test_a_small_run_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()  # filling fresh memory with NaN is the suite's, and would count as launches
    output, plot = tmp_path / "results.json", tmp_path / "results.png"
    options = "--lengths 512 --head-dims 64 --tokens 1024 --heads 4 --rounds 2 --round-ms 3 --backends triton"
    options += " --peers cudnn flash fla fox"
    status = benchmark_attention.main([*options.split(), "--output", str(output), "--plot", str(plot)])
    read = json.loads(output.read_text())
    assert status == 0, read["missing"]
    assert plot.stat().st_size > 10_000
    ours = {row["direction"]: row for row in read["rows"] if row["peer"] == "decayattn triton"}
    assert set(ours) == {"forward", "backward"}
    assert 1 <= len(ours["forward"]["launches"]) <= 3
    assert 1 <= len(ours["backward"]["launches"]) <= 6
    assert {entry["peer"] for entry in read["missing"]} <= {"fla", "fox"}
