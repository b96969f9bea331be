"""The benchmark of attention: its peers, refusals, rows, another version."""

import dataclasses
import json
import os
import shutil
import sys
import types
from unittest import mock

import pytest
import torch
from benchmark_runs import count_milliseconds, hide_gpu, run
from benchmarks import attention, harness, overhead, peers
from repository_files import ROOT
from test_benchmark_harness import FLOAT32_ERROR, SMALL, errors_of

from decayattn import decay_attention
from decayattn.testing import Comparison, call

ARGUMENTS = ["--shapes", "2,20,2,8", "1,40,2,8", "--dtype", "float32", "--backends", "reference", "--rounds", "2"]


@pytest.mark.parametrize("name", ["flex-grad", pytest.param("flex", marks=pytest.mark.slow)])
def test_flex_computes_the_same_attention(name, monkeypatch):
    from torch.nn.attention import flex_attention

    # traced as on a GPU, but evaluated densely; the refusal of gradients on a CPU is about the compiled kernel
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="aot_eager", **options))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    errors = errors_of(peers.OTHERS[name], SMALL)
    torch._dynamo.reset()
    assert ("dlog_decay" in errors) == (name == "flex-grad")
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


def test_fla_runs_the_kernels_of_its_name(monkeypatch):
    def attend(q, *_):
        ran.append(os.environ["FLA_ATTN_GLUON"])
        return 2 * q

    for name in ("FLA_TILELANG", "FLA_ATTN_GLUON", "FLA_GLUON"):
        monkeypatch.setenv(name, "")
    registry = types.SimpleNamespace(get_active=lambda: types.SimpleNamespace(backend_type="gluon"))
    module = types.SimpleNamespace(parallel_forgetting_attn=attend, _get_operation_registry=lambda _: registry)
    monkeypatch.setattr(peers, "imported", lambda _: module)
    ran, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: ran.append(os.environ["FLA_ATTN_GLUON"]))
    for out in [peers.OTHERS[name].build(SMALL, x.device)(x, x, x, x) for name in ("fla gluon", "fla")]:
        out.backward()
    assert ran == ["1", "0", "1", "0"]
    with pytest.raises(harness.Absent, match="fla does not take the kernels of FLA_TILELANG here"):
        peers.OTHERS["fla tilelang"].build(SMALL, x.device)


@pytest.mark.parametrize(("name", "module", "function", "stand_in"), [
    ("fla", "fla.ops.forgetting_attn.parallel", "parallel_forgetting_attn", fla_stand_in),
    ("fox", "forgetting_transformer.ops.forgetting_attention", "forgetting_attention", fox_stand_in),
    ("flash_attn", "flash_attn.cute", "flash_attn_func", flash_stand_in),
])
def test_external_peers_get_their_own_layout(name, module, function, stand_in, monkeypatch):
    for known in (module.split(".")[0], module):  # makes the import fail also where it is installed, or was imported
        monkeypatch.setitem(sys.modules, known, None)
    with pytest.raises(harness.Absent, match="cannot be imported: ModuleNotFoundError"):
        errors_of(peers.OTHERS[name], SMALL)
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[module], function, stand_in)
    errors = errors_of(peers.OTHERS[name], SMALL)
    assert ("dlog_decay" in errors) == (name != "flash_attn")
    assert max(errors.values()) < FLOAT32_ERROR
    if name != "flash_attn":
        for other in (dataclasses.replace(SMALL, decay="constant"), dataclasses.replace(SMALL, causal=False)):
            with pytest.raises(harness.Absent, match="takes causal cases with a scalar decay only"):
                errors_of(peers.OTHERS[name], other)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_ours_is_held_to_the_error_budget(factor, monkeypatch):
    def planted(*tensors, backend, **options):
        out, lse = decay_attention(*tensors, backend="reference", **options)
        return (out * factor, lse) if backend == "triton" else (out, lse)

    monkeypatch.setattr(call, "decay_attention", planted)
    comparisons = attention.verify_ours(SMALL, SMALL.inputs("cpu", seed=0), "triton")
    assert {c.name for c in comparisons} == {"out", "lse", "dq", "dk", "dv", "dlog_decay"}
    assert all(c.passed for c in comparisons) == (factor == 1.0)


@pytest.fixture
def timed(monkeypatch):
    """Runs on the CPU as on a GPU, by a counting clock, with another peer in the place of cuDNN."""
    count_milliseconds(monkeypatch)
    monkeypatch.setattr(attention, "REGIMES", dict.fromkeys(attention.REGIMES, harness.sustained_timer))
    monkeypatch.setattr(peers.SDPBackend, "CUDNN_ATTENTION", peers.SDPBackend.MATH)


@pytest.mark.usefixtures("timed")
def test_a_run_leaves_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "forgetting_transformer", None)  # absent, whatever is installed
    decays = ("--decays", "scalar", "none", "constant")
    status, read = run(attention, tmp_path, *ARGUMENTS, "--peers", "fox", "cudnn", *decays)
    assert status == 0
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
    assert "reference, constant, backward: ms " in capsys.readouterr().out


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
def test_wrong_and_failing_kernels_get_no_speed(tmp_path, monkeypatch, capsys):
    verify, judged = attention.verify_attention, []

    def plant(*tensors, heads, **options):
        judged.append(heads)
        if tensors[3] is None:
            row = {"error": 1.0, "budget": 0.1, "relative_error": 0.5, "norm": "frobenius", "verdict": "wrong"}
            return [Comparison("dk", (0, 0), **row)]
        return verify(*tensors, heads=heads, **options)

    too_big = mock.Mock(side_effect=torch.OutOfMemoryError("too big"))
    monkeypatch.setattr(attention, "verify_attention", plant)
    monkeypatch.setattr(attention, "_TWO_HEADS_UP_TO", 20)
    monkeypatch.setitem(peers.OTHERS, "fla", peers.Peer("fla", "BTHD", "learned", too_big))
    status, read = run(attention, tmp_path, *ARGUMENTS, "--peers", "cudnn", "fla")
    assert status == 1
    assert {(entry["kernel"], entry["kind"], entry["reason"]) for entry in read["missing"]} == {
        ("reference, no decay", "wrong", "dk outside the error budget: no speed is reported"),
        ("fla", "failed", "OutOfMemoryError: too big"),
    }
    assert all(list(row["kernels"]) == ["cudnn", "reference"] for row in read["rows"])
    assert judged == [[(0, 0), (1, 1)]] * 2 + [[(0, 1)]] * 2  # long heads one at a time
    assert "VIOLATED" in capsys.readouterr().out


@pytest.mark.usefixtures("timed")
def test_another_version_is_measured_in_the_same_rounds(tmp_path):
    """A copy that gives twice the outputs: an error of 1, reported and not judged, and nothing of it is ours."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "decayattn", tree / "decayattn", ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "decayattn/__init__.py").open("a") as file:
        file.write("\n_ours = decay_attention\ndef decay_attention(*a, **b): return 2 * _ours(*a, **b)\n")
    before = ["--before", str(tree), "--decays", "scalar", "constant", "--peers"]
    status, read = run(attention, tmp_path, *ARGUMENTS, *before)
    assert (status, read["before"], read["missing"]) == (0, None, [])
    for row in read["rows"]:
        ours, before = row["kernels"]["reference"], row["kernels"]["reference before"]
        assert ours["relative_error"]["out"] < 1e-5 < 0.9 < before["relative_error"]["out"]
        assert "reference, constant before" in row["kernels"]
    assert {entry["kernel"] for entry in read["checks"]} == {"reference", "reference, constant"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels with CUDA events: needs a GPU")
@pytest.mark.parametrize("regime", attention.REGIMES)
def test_a_small_run_on_the_gpu(regime, tmp_path, monkeypatch):
    monkeypatch.undo()  # filling fresh memory with NaN is the suite's, and would be timed
    argv = ["--shapes", "2,512,4,64", "--rounds", "2", "--seconds", "0.02", "--backends", "triton", "--peers", "cudnn"]
    status, read = run(attention, tmp_path, *argv, "--regime", regime)
    assert status == 0, read["missing"]
    for row in read["rows"]:
        assert set(row["kernels"]) == {"cudnn", "triton", "triton, no decay"}
        assert row["kernels"]["triton"]["ms"] > 0


HOST = ["--length", "8", "--heads", "1", "--head-dims", "8", "--rounds", "2", "--calls", "2", "--peers"]


def test_host_time_of_a_failing_call_fails_the_run(monkeypatch):
    hide_gpu(monkeypatch)
    monkeypatch.setattr(overhead.decayattn, "decay_attention", mock.Mock(side_effect=RuntimeError("planted")))
    assert harness.main(overhead, HOST) == 1


def test_packed_calls_have_one_total_or_many(monkeypatch):
    """Called as training makes them only: others would change in which call which total comes."""
    totals, threads = {}, []

    def attend(q, k, v, log_decay, *, cu_seqlens_q, max_seqlen_q, backend, **_):
        assert len(q) == cu_seqlens_q[-1] <= max_seqlen_q
        totals.setdefault(int(max_seqlen_q), []).append(len(q))
        threads.append(torch._C._is_multithreading_enabled())
        return q + k + v + log_decay[..., None]

    hide_gpu(monkeypatch)
    monkeypatch.setattr(overhead.decayattn, "decay_attention_varlen", attend)
    assert harness.main(overhead, ["--packed", *HOST]) == 0
    assert totals == {8: [8] * 7, 14: [8, 9, 10, 11, 12, 13, 14]}
    assert all(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph: needs a GPU")
def test_host_and_graph_are_timed_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()  # filling fresh memory with NaN is the suite's
    output = tmp_path / "overhead.json"
    argv = ["--head-dims", "64", "--rounds", "1", "--calls", "3", "--peers", "cudnn"]
    assert harness.main(overhead, [*argv, "--output", str(output)]) == 0
    for row in json.loads(output.read_text())["rows"]:
        assert row["graph_us"] > 0
        assert row["one_thread_us"] > 0
