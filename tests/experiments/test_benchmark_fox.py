"""The benchmark of the official 760M model: its settings, their order, and results that get no speed."""

import pytest
import torch
from benchmark_runs import count_milliseconds, hide_gpu, run
from benchmarks import fox, harness

SMALL = ["--model", "1", "16", "2", "20", "--checked", "12", "--tokens", "24", "--new-tokens", "3",
         "--backend", "reference", "--recomputed", "12"]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    hide_gpu(monkeypatch)
    count_milliseconds(monkeypatch)
    monkeypatch.setattr(harness, "back_to_back", lambda call, count: (call(), 2.0)[1])


def test_every_setting_is_timed_once(tmp_path, monkeypatch):
    written, enabled = [], []
    monkeypatch.setattr(fox, "begin", lambda *given, begin=fox.begin: (written.append(given[0].name), begin(*given))[1])
    for name in ("gradient_checkpointing_enable", "gradient_checkpointing_disable"):
        monkeypatch.setattr(fox.DecayForCausalLM, name, lambda *_, name=name: enabled.append(name))
    argv = [*SMALL, "--eager", "8", "--generation", "12", "--batches", "1", "2"]
    status, read = run(fox, tmp_path, *argv)
    assert (status, [entry["variant"] for entry in read["missing"]]) == (0, ["theirs"])
    assert [(row["part"], row["batch"], row["length"], row["variant"]) for row in read["rows"]] == [
        ("recomputed", 2, 12, "ours"), ("generation", 1, 12, "ours"), ("generation", 1, 12, "ours, captured"),
        ("generation", 2, 12, "ours"), ("generation", 2, 12, "ours, captured"), ("eager", 3, 8, "ours"),
    ]
    step, generation = read["rows"][0], read["rows"][4]
    assert (step["ms"], step["tokens_per_second"]) == (2.0, 24 / 2.0 * 1e3)
    assert (generation["prefill_ms"], generation["tokens_per_second"]) == (2.0, 2 * 3 / 2.0 * 1e3)
    assert [name.endswith("enable") for name in enabled] == [True, *[False] * 5]
    # the checks, then a round that compiles and one more, for each of two batches
    assert written == ["ours", "ours, captured"] + 2 * ["ours", "ours, captured", "ours, captured", "ours"]
    assert run(fox, tmp_path, *argv)[1]["rows"] == read["rows"]


def test_different_losses_get_no_speed(tmp_path, monkeypatch, capsys):
    """A second model of ours, with other weights, replaces theirs."""

    def variants(run, variants=fox.variants):
        ours, captured = variants(run)
        torch.manual_seed(1)
        model = fox.DecayForCausalLM(ours.model.config)
        torch.nn.init.normal_(model.lm_head.weight)
        return [fox.Variant("ours, other", model, torch.optim.AdamW(model.parameters())), ours, captured]

    monkeypatch.setattr(fox, "variants", variants)
    monkeypatch.setattr(fox, "check", lambda found, run: found)
    status, read = run(fox, tmp_path, *SMALL)
    assert (status, read["rows"]) == (1, [])
    assert "recomputed" in read["missing"][-1]["setting"]
    assert "different losses" in capsys.readouterr().out


def test_wrong_logits_get_no_speed(tmp_path, monkeypatch):
    def begin(variant, *given, begin=fox.begin):
        logits, step = begin(variant, *given)
        return logits * (1 + 1e-5 * (variant.name == "ours")), step

    monkeypatch.setattr(fox, "begin", begin)
    status, read = run(fox, tmp_path, *SMALL)
    assert (status, read["rows"]) == (1, [])
    assert [entry["variant"] for entry in read["missing"]] == ["theirs", "ours"]
