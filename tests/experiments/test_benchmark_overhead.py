"""The benchmark of host time: rows, failures, packed calls, threads."""

import json

import pytest
import torch
from benchmarks import harness, overhead

ARGUMENTS = ["--length", "8", "--heads", "1", "--head-dims", "8", "--rounds", "2", "--calls", "2", "--peers"]


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_a_run_leaves_rows(tmp_path, capsys):
    output = tmp_path / "overhead.json"
    assert harness.main(overhead, [*ARGUMENTS, "fox", "--output", str(output)]) == 0
    read = json.loads(output.read_text())
    assert [row["peer"] for row in read["rows"]] == ["decayattn reference"]
    for key in ("host_us", "one_thread_us"):
        low, high = read["rows"][0][f"{key}_range"]
        assert 0 < low <= read["rows"][0][key] <= high
    assert [(entry["peer"], entry["ours"]) for entry in read["missing"]] == [("fox", False)]
    assert "one_thread_us" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_a_failing_call_of_ours_fails_the_run(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(overhead.decayattn, "decay_attention", broken)
    assert harness.main(overhead, ARGUMENTS) == 1


@pytest.mark.usefixtures("without_gpu")
def test_packed_calls_have_one_total_or_many(monkeypatch):
    """Called as training makes them only: others would change in which call which total comes."""
    totals, threads = {}, []

    def attend(q, k, v, log_decay, *, cu_seqlens_q, max_seqlen_q, backend, **_):
        assert len(q) == cu_seqlens_q[-1] <= max_seqlen_q
        totals.setdefault(int(max_seqlen_q), []).append(len(q))
        threads.append(torch._C._is_multithreading_enabled())
        return q + k + v + log_decay[..., None]

    monkeypatch.setattr(overhead.decayattn, "decay_attention_varlen", attend)
    assert harness.main(overhead, ["--packed", *ARGUMENTS]) == 0
    assert totals == {8: [8] * 7, 14: [8, 9, 10, 11, 12, 13, 14]}
    assert all(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph: needs a GPU")
def test_a_small_run_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.undo()  # filling fresh memory with NaN is the suite's
    output = tmp_path / "overhead.json"
    argv = ["--head-dims", "64", "--rounds", "1", "--calls", "3", "--peers", "cudnn"]
    assert harness.main(overhead, [*argv, "--output", str(output)]) == 0
    for row in json.loads(output.read_text())["rows"]:
        assert row["graph_us"] > 0
        assert row["one_thread_us"] > 0
