"""experiments/benchmark_overhead.py."""

import json
import types

import benchmark_overhead
import pytest
import torch


def test_a_run_leaves_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "overhead.json"
    argv = ["--length", "8", "--heads", "1", "--head-dims", "8", "--rounds", "2", "--peers", "fox", "--profile"]
    assert benchmark_overhead.main([*argv, "--output", str(output)]) == 0
    read = json.loads(output.read_text())
    assert [row["peer"] for row in read["rows"]] == ["decayattn reference"]
    for key in ("host_us", "one_thread_us"):
        low, high = read["rows"][0][f"{key}_range"]
        assert 0 < low <= read["rows"][0][key] <= high
    assert [(entry["peer"], entry["ours"]) for entry in read["missing"]] == [("fox", False)]
    printed = capsys.readouterr().out
    assert "host µs" in printed
    assert "one thread" in printed
    assert "reference, µs per call" in printed
    assert "decay_attention" in printed


def test_a_call_of_ours_that_fails_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def broken(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(benchmark_overhead.decayattn, "decay_attention", broken)
    assert benchmark_overhead.main(["--length", "8", "--head-dims", "8", "--rounds", "1", "--peers"]) == 1


def test_another_version_of_the_package_is_measured_beside_this_one(tmp_path, monkeypatch):
    """Which fails here: it is reported, and does not fail the run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def broken(*_, **__):
        raise RuntimeError("planted")

    other = types.SimpleNamespace(decay_attention=broken)
    monkeypatch.setattr(benchmark_overhead.other_versions, "load", lambda tree: other)
    output = tmp_path / "overhead.json"
    argv = ["--length", "8", "--heads", "1", "--head-dims", "8", "--rounds", "1", "--peers", "--before", str(tmp_path)]
    assert benchmark_overhead.main([*argv, "--before-commit", "abc", "--output", str(output)]) == 0
    read = json.loads(output.read_text())
    assert read["before"] == "abc"
    assert [row["peer"] for row in read["rows"]] == ["decayattn reference"]
    assert [(entry["peer"], entry["reason"]) for entry in read["missing"]] == [
        ("decayattn reference before", "RuntimeError: planted")
    ]


def test_packed_calls_have_one_total_or_another_in_every_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    totals = {}

    def attend(q, k, v, log_decay, *, cu_seqlens_q, max_seqlen_q, backend, **_):
        assert len(q) == cu_seqlens_q[-1] <= max_seqlen_q
        totals.setdefault(int(max_seqlen_q), []).append(len(q))
        return q + k + v + log_decay[..., None]

    monkeypatch.setattr(benchmark_overhead.decayattn, "decay_attention_varlen", attend)
    argv = ["--packed", "--length", "8", "--heads", "1", "--head-dims", "8", "--rounds", "2", "--calls", "2", "--peers"]
    assert benchmark_overhead.main(argv) == 0
    assert totals == {8: [8] * 7, 14: [8, 9, 10, 11, 12, 13, 14]}


def test_a_call_is_timed_as_training_makes_it_and_with_its_backward_in_the_same_thread(monkeypatch):
    """Packed calls as training makes them only: others would change in which call which total comes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = []

    def clock(step, calls, device):
        threads.append(torch._C._is_multithreading_enabled())
        return 1.0

    monkeypatch.setattr(benchmark_overhead, "host_microseconds", clock)
    argv = ["--packed", "--length", "8", "--heads", "1", "--head-dims", "8", "--rounds", "2", "--calls", "2", "--peers"]
    assert benchmark_overhead.main(argv) == 0
    assert threads == [True, True, True, False] * 2
    assert torch._C._is_multithreading_enabled()


def test_host_time_counts_every_call():
    calls = []
    assert benchmark_overhead.host_microseconds(lambda: calls.append(1), 5, "cpu") > 0
    assert len(calls) == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph: needs a GPU")
def test_a_small_run_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()  # filling fresh memory with NaN is the suite's
    output = tmp_path / "overhead.json"
    argv = ["--head-dims", "64", "--rounds", "1", "--calls", "3", "--peers", "cudnn"]
    assert benchmark_overhead.main([*argv, "--output", str(output)]) == 0
    for row in json.loads(output.read_text())["rows"]:
        assert row["graph_us"] > 0
        assert row["one_thread_us"] > 0
