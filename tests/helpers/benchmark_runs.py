"""Runs of a benchmark in a test: without a GPU, by a clock that counts, and with their report."""

import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks import harness


def hide_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on the CPU; it also keeps a test from writing to results/, where a GPU's figures are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DECAYATTN_COMMIT", "abc")


def count_milliseconds(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """Time kernels on any device, by a clock that says 1 ms, 2 ms, …"""
    clock = itertools.count(1)
    for name in ("burst_timer", "sustained_timer", "captured_timer"):
        monkeypatch.setattr(harness, name, lambda seconds: lambda call: (call(), float(next(clock)))[1])
    monkeypatch.setattr(harness, "machine", lambda: (device, True))
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)


def run(module: ModuleType, folder: Path, *argv: str) -> tuple[int, dict]:
    """(exit status, report) of a run that writes to new/results.json in a folder; the report is strict JSON."""
    output = folder / "new/results.json"
    status = harness.main(module, [*argv, "--output", str(output)])
    text = output.read_text()
    assert str(folder) not in text
    return status, json.loads(text, parse_constant=lambda name: pytest.fail(f"not strict JSON: {name}"))
