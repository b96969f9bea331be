"""The benchmark of packed sequences, decoding and generation: its arithmetic, its checks, its timed run."""

import shlex
from argparse import Namespace
from unittest import mock

import pytest
import torch
from benchmark_runs import count_milliseconds, hide_gpu
from benchmarks import harness, sequences
from benchmarks.harness import Case
from benchmarks.sequences import Eviction, Step, Workload, write
from judged_calls import DEVICE
from test_benchmark_harness import DECAYS, TINY

from decayattn import decay_attention_varlen
from decayattn.nn import DecayCache
from decayattn.testing import call


@pytest.fixture
def timed(monkeypatch):
    monkeypatch.setitem(sequences.SIZES, "cuda", sequences.SIZES["cpu"])
    count_milliseconds(monkeypatch, DEVICE)


def run(*argv: str) -> harness.Run:
    """The parts of a run, with their report."""
    options = harness.parse(sequences, [*shlex.split(TINY[sequences]), *argv])
    options.output = None
    found = harness.Run("x.py", options, [], {})
    sequences.measure(found)
    return found


def test_work_of_a_packed_batch_is_that_of_its_documents():
    batch = Workload("packed", (3, 1, 20), Case(1, 3, 24, 8, "float32", "scalar", -0.1))
    document = torch.repeat_interleave(torch.tensor([3, 1, 20]))
    token = torch.arange(24)
    pairs = int(((document[:, None] == document) & (token[:, None] >= token)).sum())
    # two products forward, five backward, 2·D operations each per visible pair and head
    assert batch.flops("forward") == 2 * 2 * 8 * 3 * pairs
    assert batch.flops("backward") == 5 * 2 * 8 * 3 * pairs


@pytest.mark.parametrize("decay", DECAYS)
def test_bytes_of_a_step_are_those_of_the_tensors_it_reads(decay):
    step = Step(batch=2, heads=4, kv_heads=2, head_dim=8, tokens=50, dtype="float16")
    inputs = step.inputs("cpu", seed=0, mean_log_decay=-0.1)
    read = [inputs["keys"], inputs["values"], *([inputs["alpha"]] if decay == "scalar" else [])]
    assert step.bytes_read(decay) == sum(x.numel() * x.element_size() for x in read)
    assert inputs["alpha"].dtype == torch.float64
    torch.testing.assert_close(inputs["alpha"].diff(dim=1).float(), inputs["log_decay"][:, 1:])
    assert (inputs["log_decay"] <= 0).all()
    assert (inputs["log_decay"] >= -0.2).all()


@pytest.mark.usefixtures("timed")
def test_wrong_packed_and_decode_kernels_get_no_speed(monkeypatch, capsys):
    def planted(*tensors, **options):
        out, lse = decay_attention_varlen(*tensors, **options)
        return out * 1.001, lse

    step_call = Step.call

    def planted_step(self, inputs, decay):
        call = step_call(self, inputs, decay)
        return (lambda: [x * 1.01 for x in call()]) if decay == "constant" else call

    monkeypatch.setattr(call, "decay_attention_varlen", planted)
    monkeypatch.setattr(Step, "call", planted_step)
    report = run("--what", "decode", "packed", "--backend", "reference", "--dtype", "float32", "--rounds", "2").report
    assert [(entry["case"].split("decay ")[-1].split(":")[0], entry["kind"]) for entry in report["missing"]] == [
        ("constant", "wrong"), ("constant, paged", "wrong"), ("scalar", "wrong"),
    ]
    assert {row["workload"] for row in report["packed"]} == {"dense alike"}
    assert "VIOLATED" in capsys.readouterr().out
    rows = report["decode"]
    assert [row["decay"] for row in rows] == ["copy", "scalar", "none", "scalar, paged", "none, paged"]
    assert [row["ms"] for row in rows] == [5.5] * 5  # 1 and 10, 2 and 9, …: every second round goes the other way
    assert rows[0]["bytes"] == 2 * 2 * 50 * 2 * 8 * 4
    assert rows[1]["gigabytes_per_second"] == pytest.approx(rows[1]["bytes"] / 5.5e-3 / 1e9)
    assert rows[1]["ratio_to_copy"] == pytest.approx(rows[1]["bytes"] / rows[0]["bytes"])


@pytest.mark.usefixtures("timed")
def test_timed_run_reports_every_part():
    report = run("--backend", "reference", "--dtype", "float32").report
    rows = {(row["workload"], row["direction"]): row for row in report["packed"]}
    assert len(rows) == 4
    documents = sequences.document_lengths(3, 2, 20, 0)
    length = round(sum(n**2 for n in documents) / sum(documents))
    tokens = {"packed": sum(documents), "dense alike": length * round(sum(documents) / length)}
    for (name, direction), row in rows.items():
        assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9)
        assert row["ms_range"][0] < row["ms"] < row["ms_range"][1]
        assert row["tokens"] == tokens[name]
        ratio = row["tflops"] / rows["dense alike", direction]["tflops"]
        assert row["ratio_to_alike"] == (pytest.approx(ratio) if name == "packed" else None)
    assert [row["decay"] for row in report["decode"]] == ["copy", *DECAYS, *(f"{decay}, paged" for decay in DECAYS)]
    assert all(row["tokens_per_second_range"][0] <= row["tokens_per_second"] for row in report["generate"])


def test_the_dense_batch_alike_has_the_documents_work():
    options = Namespace(dtype="bfloat16", mean_log_decay=-0.01, seed=0)
    chosen = {workload.name: workload for workload in sequences.workloads(options, sequences.SIZES["cuda"], 64)}
    documents, alike = chosen["packed"], chosen["dense alike"]
    assert sum(alike.lengths) == pytest.approx(sum(documents.lengths), rel=0.02)
    assert alike.flops("forward") == pytest.approx(documents.flops("forward"), rel=0.02)


@pytest.mark.parametrize("decay", DECAYS)
def test_steps_are_judged_with_their_own_decay(decay):
    step = Step(batch=3, heads=4, kv_heads=2, head_dim=8, tokens=70, dtype="float16" if decay == "none" else "float32")
    inputs = step.inputs(DEVICE, seed=0, mean_log_decay=-0.1)
    out, lse = step.call(inputs, decay)()
    comparisons = sequences.verify_step(step, inputs, decay, (out, lse))
    assert [c.name for c in comparisons] == ["out", "lse", "out", "lse"]
    assert all(c.passed for c in comparisons)
    for head in ((0, 1), (2, 3)):
        wrong_out, wrong_lse = out.clone(), lse.clone()
        wrong_out[head[0], :, head[1]] *= 1.02
        wrong_lse[head] += 0.02
        for name, results in (("out", (wrong_out, lse)), ("lse", (out, wrong_lse))):
            violated = [c for c in sequences.verify_step(step, inputs, decay, results) if not c.passed]
            assert [(c.name, c.head) for c in violated] == [(name, head)]
    for other in set(DECAYS) - {decay}:
        assert not any(c.passed for c in sequences.verify_step(step, inputs, other, (out, lse)))


def small_model(dtype=torch.float64, half_lives=(1.0, 2.0)):
    return sequences.build_model(2, 16, 2, half_lives, dtype, "cpu", seed=0)


@torch.no_grad()
def test_every_mode_writes_the_same_text():
    model, prompt, eviction = small_model(), torch.randint(256, (1, 90)), Eviction(8, 1e-9)
    caches = [None, *(model.make_caches(1, room) for room in (130, sequences.held_bound(model, eviction) + 90))]
    texts = []
    for own in caches:
        writer = write(model, prompt, own, eviction if own is caches[2] else None)
        texts.append([int(next(writer)) for _ in range(41)])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) > 1
    assert sequences.longest(caches[1]) == 130
    assert sequences.longest(caches[2]) < 90


@torch.no_grad()
@pytest.mark.parametrize(("tolerance", "half_lives"), [
    (2.0**-24, (1.0, 2.0)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2.0**-24, (3.0, 5.0)), (1e-2, (3.0, 5.0)))),
])
def test_caches_stay_as_long_as_the_arithmetic_says(tolerance, half_lives):
    model, eviction = small_model(torch.float32, half_lives), Eviction(8, tolerance)
    held = sequences.held_bound(model, eviction)
    found = sequences.stream(model, 3 * held, eviction)
    assert found["held_bound"] == held
    assert found["tokens"] == [8 * n for n in range(1, 3 * held // 8 + 1)]
    flat = [length for written, length in zip(found["tokens"], found["after"], strict=True) if written > 2 * held]
    assert held - 2 <= min(flat) <= max(flat) <= held
    assert found["before"][1:] == [length + 8 for length in found["after"][:-1]]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32])
def test_logits_are_held_to_the_error_without_a_cache(dtype, monkeypatch):
    model, eviction = small_model(dtype), Eviction(8, 2.0**-24)
    tokens = torch.randint(256, (1, 120))
    ratios = sequences.logits_over_budget(model, tokens, eviction)
    assert list(ratios) == ["cache", "captured", "evict"]
    assert max(ratios.values()) <= 1
    too_much = sequences.logits_over_budget(model, tokens, Eviction(8, 0.999))
    if dtype == torch.float32:  # an error below float16's rounding is not wrong for it
        assert [x <= 1 for x in too_much.values()] == [True, True, False]

    def forgetful(cache, *arguments):
        out = attend(cache, *arguments)
        cache.first.clamp_(min=cache.longest - 2)  # sees itself and the token before
        return out

    attend = DecayCache._append
    monkeypatch.setattr(DecayCache, "_append", forgetful)
    assert min(sequences.logits_over_budget(model, tokens, eviction).values()) > 1


def test_failures_are_listed_and_leave_the_others_alone(monkeypatch):
    """Too little memory, 4 heads with 3 key heads, a width that the heads do not divide."""
    too_big = mock.Mock(side_effect=torch.OutOfMemoryError("too big\nand a long story"))
    hide_gpu(monkeypatch)
    monkeypatch.setattr(Workload, "inputs", too_big)
    monkeypatch.setattr(sequences.SIZES["cpu"], "step", (2, 4, 3, 8, 50))
    monkeypatch.setattr(sequences.SIZES["cpu"], "model", (1, 9, 2))
    report = run("--what", "decode", "packed", "generate").report
    missing = {entry["section"]: entry for entry in report["missing"]}
    assert len(report["missing"]) == 6 + 2 + 1
    assert list(missing) == ["decode", "packed", "generate"]
    assert (missing["packed"]["kind"], missing["packed"]["reason"]) == ("failed", "OutOfMemoryError: too big")
